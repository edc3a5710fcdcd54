"""Draw the pictures of docs/learn-the-method.md: python tools/lesson_pictures.py docs/assets.

Every token of them is computed: the path and its two sources are the definition of x_t on one sentence, the posterior
and the jumps are the embedded parent model's, the board is sampled with its exact posterior.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fsdfm import Grid, MaskSource, MixturePath, Noise, UniformSource, load, sample
from fsdfm.generate import LanguageModel
from fsdfm.noise import Purpose
from fsdfm.studies.checkerboard.board import Board, CheckerboardDenoiser
from fsdfm.studies.checkerboard.figures import scatter

SENTENCE = "One day, Lily and her mom went to the park. They saw a big dog."
INK, FAINT, NOISE, TEXT, NEW = "#2a2f36", "#6a717a", "#eceef1", "#cfe0f5", "#fbd9a6"
DPI = 150


def main(folder: Path) -> None:
    """Write learn-path.png, learn-posterior.png, learn-jump.png and learn-steps.png."""
    lm = load("parent", threads=1)
    for name, figure in (
        ("path", draw_path(lm)),
        ("posterior", draw_posterior(lm)),
        ("jump", draw_jump(lm)),
        ("steps", draw_steps(points=4000)),
    ):
        figure.savefig(folder / f"learn-{name}.png", dpi=DPI, facecolor="white")


def draw_path(lm: LanguageModel) -> Figure:
    """One sentence at five times between either source and the text."""
    x_1 = torch.tensor([lm.checkpoint.tokenizer.encode(SENTENCE)])
    figure, panels = _stacked(2, height=4.6)
    for axes, masked in zip(panels, (False, True), strict=True):
        size = lm.checkpoint.tokenizer.vocab_size + masked
        path = MixturePath(MaskSource(size) if masked else UniformSource(size))
        noise = Noise(seed=1, samples=[0])
        x_0 = path.source.sample(noise, x_1.shape[1])
        coins = noise.uniform(Purpose.DATA, x_1.shape[1])
        for row, t in enumerate((0.0, 0.25, 0.5, 0.75, 1.0)):
            shown = coins < float(path.schedule.kappa(torch.tensor(t, dtype=torch.float64)))
            x_t = torch.where(shown, x_1, x_0)[0].tolist()
            words = ["[M]" if masked and token == size - 1 else _piece(lm, token) for token in x_t]
            colours = [TEXT if data else NOISE for data in shown[0].tolist()]
            _row_of_words(axes, row, words=words, colours=colours, label=_time_label(t))
        name = "Mask" if masked else "Uniform"
        _frame(axes, x_1.shape[1], 5, title=f"{name} source: blue places show the text, grey ones noise")
    return figure


def draw_posterior(lm: LanguageModel) -> Figure:
    """What the network says about one place of the sentence, when little and when much of the rest is shown."""
    model, encode = lm.checkpoint.model, lm.checkpoint.tokenizer.encode
    lead = [] if lm.checkpoint.bos_id is None else [lm.checkpoint.bos_id]
    tokens = torch.tensor([lead + encode(SENTENCE)])
    place = len(lead) + len(encode(SENTENCE.split(" park")[0]))  # " park"
    figure = Figure(figsize=(9.2, 2.9))
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.075, right=0.985, top=0.72, bottom=0.06, wspace=0.42)
    noise = Noise(seed=9, samples=[0])
    x_0 = UniformSource(lm.checkpoint.tokenizer.vocab_size).sample(noise, tokens.shape[1])
    coins = noise.uniform(Purpose.DATA, tokens.shape[1])
    for axes, t in zip(panels, (0.1, 0.5, 0.9), strict=True):
        shown = coins < t
        shown[:, : len(lead)] = True
        shown[:, place] = False
        x_t = torch.where(shown, tokens, x_0)
        at = torch.full((1,), t, dtype=torch.float64)
        with torch.inference_mode():
            features = model.trunk(x_t, at, 1 - at)
            law = torch.softmax(model.logits_at(features[:, place])[0].double(), -1)
        best = law.topk(5)
        axes.barh(range(5), best.values.tolist(), color="#5b8fd0", height=0.7)
        likely = [_piece(lm, token).strip() or "(blank)" for token in best.indices.tolist()]
        axes.set_yticks(range(5), likely, fontsize=9, color=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15)
        axes.set_xticks([])
        for value, row in zip(best.values.tolist(), range(5), strict=True):
            axes.text(value + 0.02, row, f"{value:.0%}", va="center", fontsize=8.5, color=FAINT)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        words = [_piece(lm, int(token)).strip() or "·" for token in x_t[0]]
        words[place] = f"[{words[place]}]"
        axes.set_title(f"t = {t:g}", fontsize=11, color=INK, pad=24, loc="left")
        around = axes.text(0, 1.06, " ".join(words[place - 4 : place + 3]), transform=axes.transAxes)
        around.set(fontsize=7.5, color=FAINT, family="monospace", parse_math=False)
    return figure


def draw_jump(lm: LanguageModel) -> Figure:
    """A text in four steps: what each redraws."""
    steps, places = 4, 17
    states = [state.tokens[:places] for state in lm.stream(length=32, steps=steps, seed=5)]
    figure, (axes,) = _stacked(1, height=2.5)
    before: Sequence[int] = states[0]
    for row, tokens in enumerate(states):
        colours = [NEW if a != b else NOISE if row == 0 else "white" for a, b in zip(tokens, before, strict=True)]
        words = [_piece(lm, token) for token in tokens]
        _row_of_words(axes, row, words=words, colours=colours, label=_time_label(row / steps))
        before = tokens
    _frame(axes, places, steps + 1, title="Four steps of size h = ¼: orange places took a new token from the posterior")
    return figure


def draw_steps(points: int) -> Figure:
    """The checkerboard in 1, 2, 4 and 8 steps of the exact jump from the uniform source."""
    board = Board(size=64, square=16)
    path = MixturePath(UniformSource(board.size))
    noise = Noise(seed=0, samples=range(points))
    denoiser = CheckerboardDenoiser(path, board)
    figure = Figure(figsize=(9.2, 2.75))
    panels = figure.subplots(1, 4)
    figure.subplots_adjust(left=0.03, right=0.99, top=0.86, bottom=0.07, wspace=0.1)
    for axes, steps in zip(panels, (1, 2, 4, 8), strict=True):
        x_1: Tensor = sample(denoiser, path, path.source.sample(noise, 2), grid=Grid.uniform(steps), noise=noise)
        scatter(axes, board, x_1, margin=False, dot=2.5)
        right = float(board.allowed(x_1).double().mean())
        axes.set_title(f"{steps} step{'s' if steps > 1 else ''}: {right:.0%} right", fontsize=11, color=INK)
        axes.set_xlabel("first token", fontsize=8.5, color=FAINT)
    panels[0].set_ylabel("second token", fontsize=8.5, color=FAINT)
    return figure


def _piece(lm: LanguageModel, token: int) -> str:
    """A token as it reads, with what cannot be printed left out."""
    text = lm.checkpoint.tokenizer.decode([token]).replace("\n", "⏎")
    return "".join(c for c in text if c.isprintable() and c != "\ufffd") or "·"


def _time_label(t: float) -> str:
    return "t = " + {0.0: "0", 0.25: "¼", 0.5: "½", 0.75: "¾", 1.0: "1"}[t]


def _stacked(panels: int, *, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.2, height))
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0].tolist()
    figure.subplots_adjust(left=0.01, right=0.995, top=1 - 0.3 / height, bottom=0.01, hspace=0.16)
    return figure, axes


def _row_of_words(axes: Axes, row: int, *, words: Sequence[str], colours: Sequence[str], label: str) -> None:
    axes.text(-0.15, row + 0.5, label, ha="right", va="center", fontsize=10, color=INK)
    for place, (word, colour) in enumerate(zip(words, colours, strict=True)):
        axes.fill_between([place + 0.03, place + 0.97], row + 0.08, row + 0.92, color=colour, linewidth=0)
        short = word.strip() or word
        size = 8.5 if len(short) <= 6 else 6.8 if len(short) <= 8 else 5.4
        cell = axes.text(place + 0.5, row + 0.5, short, ha="center", va="center", color=INK)
        cell.set(fontsize=size, parse_math=False)


def _frame(axes: Axes, places: int, rows: int, *, title: str) -> None:
    axes.set_xlim(-1.1, places)
    axes.set_ylim(rows, 0)
    axes.axis("off")
    axes.set_title(title, fontsize=10, color=FAINT, loc="left", pad=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
