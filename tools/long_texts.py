"""What a canvas model gains by its context on texts far longer than its rows: docs/long.md.

    python tools/long_texts.py bound MODEL unseen.txt                  nats per token by position, three ways
    python tools/long_texts.py write MODEL unseen.txt --texts 4        texts after a prompt, three ways: names, topics
    python tools/long_texts.py rotary parent stories.txt               rows longer than in training, by rotary scaling
    python tools/long_texts.py memory tiny --window 512                memory and time of 8k, 16k and 32k tokens

`memory` takes a preset, whose weights are random: no cost depends on them.

Three ways with the same weights: after the context (canvases), after half a block (each block of a canvas's length, its
first half given: overlap and forget), and alone. Every number goes to --out, a JSON file, as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdfm.bench.measure import peak_extra_mib
from fsdfm.checkpoint import Checkpoint, load_model
from fsdfm.data import Tokenizer, open_documents, texts
from fsdfm.flow import Denoiser, MixturePath, UniformSource
from fsdfm.generate import LanguageModel
from fsdfm.measure import bootstrap_mean, bootstrap_ratio
from fsdfm.measure.consistency import name_recurrence, rarity, topic_likeness
from fsdfm.model import DiT, ModelConfig
from fsdfm.noise import Noise, Purpose

NEAR, FAR = range(1, 8), range(33, 40)  # canvases before
DISTANCES = (1, 2, 4, 7, 16, 32, 64)
SEGMENT = 16  # canvases that are resampled together


def keep(file: Path, name: str, value: Any, *, silent: bool = False) -> None:
    """Add a result to the file and say it."""
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, name: value}, indent=1))
    if silent:
        return
    sys.stdout.write(f"{name} {json.dumps(value)[:2000]}\n")
    sys.stdout.flush()


def read_tokens(bundle: Checkpoint, file: str, *, count: int, skip: int) -> list[int]:
    """The tokens `skip` .. `skip + count` of a file's text, white space made single spaces."""
    text = " ".join(Path(file).read_text(encoding="utf-8-sig").split())
    return bundle.tokenizer.encode(text[: 8 * (skip + count)])[skip : skip + count]


def forgetful(bundle: Checkpoint) -> Checkpoint:
    """The same weights as a model of blocks of a canvas's length behind the token that begins a text: no context."""
    model = DiT(replace(bundle.model.config, canvas=None, window=None)).eval()
    model.load_state_dict(bundle.model.state_dict())
    assert bundle.model.config.canvas is not None
    return replace(bundle, model=model, length=bundle.model.config.canvas + 1)


# --- nats per token ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def nats_left(denoiser: Denoiser, bundle: Checkpoint, rows: Tensor, *, own: int, draws: int) -> Tensor:
    """-log p of the tokens of rows [N, L] that show noise, at shares k = (j + 1/2) / draws of known ones: [N, draws].

    own   tokens at the end of a row that are asked about; what is before them is given. Two ways to cut a text into
          rows have the same noise at every token, so that their difference is a paired one.

    The mean over k is the integral of H: the nats per token of a sampler that draws one position after the other in
    random order, which by Jensen's inequality bounds those of its texts from above.
    """
    length, path, noise = rows.shape[1], bundle.path, Noise(0, [0])
    order, x_0 = torch.ones(rows.shape, dtype=torch.float64), rows.clone()
    order[:, -own:] = noise.uniform(Purpose.PATH, len(rows) * own).view(-1, own)
    x_0[:, -own:] = path.source.sample(noise, len(rows) * own).view(-1, own)
    asked_about = torch.arange(length) >= length - own
    found = torch.zeros(len(rows), draws, dtype=torch.float64)
    for draw in range(draws):
        k = (draw + 0.5) / draws
        hidden = (order >= k) & asked_about
        t = path.schedule.kappa_inverse(torch.full((len(rows),), k, dtype=torch.float64))
        asked = hidden.flatten().nonzero()[:, 0]
        posterior = denoiser.posterior(torch.where(hidden, x_0, rows), t, torch.full_like(t, 2.0**-10), rows=asked)
        count = hidden.sum(1).clamp(min=1).double()
        for part, tile, which in posterior.marginals(asked):
            log_p = torch.log_softmax((tile if which is None else tile[which]).float(), -1)
            nats = -log_p.gather(-1, rows.flatten()[asked[part], None])[:, 0].double()
            found[:, draw].index_add_(0, asked[part] // length, nats)
        found[:, draw] /= count
    return found


def left_after_context(bundle: Checkpoint, tokens: Tensor, *, draws: int, window: int | None) -> Tensor:
    """`nats_left` of every canvas of a text after those before it, of which `window` tokens are seen."""
    assert isinstance(bundle.model, DiT)
    model = DiT(replace(bundle.model.config, window=window)).eval()
    model.load_state_dict(bundle.model.state_dict())
    network, context, contexts = LanguageModel(replace(bundle, model=model)).network, None, []
    canvases = tokens.view(-1, bundle.model.config.canvas)
    for canvas in canvases:
        contexts.append(context)
        context = network.read(canvas[None], context)
    return nats_left(network.after(contexts[1:]), bundle, canvases[1:], own=canvases.shape[1], draws=draws)


def left_in_blocks(bundle: Checkpoint, tokens: Tensor, *, draws: int, before: int) -> Tensor:
    """The same of blocks, each behind a first token and `before` tokens that are given, and no other."""
    network, size = LanguageModel(forgetful(bundle)).network, bundle.model.config.canvas
    own = size - before
    begin = torch.tensor([bundle.bos_id])
    starts = range(size, len(tokens), own)
    rows = torch.stack([torch.cat([begin, tokens[start - before : start + own]]) for start in starts])
    return nats_left(network, bundle, rows, own=own, draws=draws).view(-1, size // own, draws).mean(1)


def measure_bound(args: argparse.Namespace) -> None:
    """Nats per token of an unseen text, by position."""
    bundle = load_model(args.model)
    size = bundle.model.config.canvas
    text = read_tokens(bundle, args.text, count=args.tokens - 1, skip=args.skip)
    tokens = torch.tensor([bundle.bos_id, *text])
    window = bundle.model.config.window
    ways: dict[str, Callable[[], Tensor]] = {
        "alone": lambda: left_in_blocks(bundle, tokens, draws=args.draws, before=0),
        "context": lambda: left_after_context(bundle, tokens, draws=args.draws, window=window),
        "overlap": lambda: left_in_blocks(bundle, tokens, draws=args.draws, before=size // 2),
        "one canvas": lambda: left_after_context(bundle, tokens, draws=args.draws, window=size),
    }
    found: dict[str, Tensor] = {}
    for name, measure in ways.items():
        found[name] = measure()
        keep(args.out, f"{name} by canvas and share", found[name].tolist(), silent=True)
        said = {name: found[name], **{f"{other} - {name}": found[other] - found[name] for other in [*found][:-1]}}
        for label, values in said.items():
            quarters = [f"{bootstrap_mean(part):.3f}" for part in values.mean(1).chunk(4)]
            keep(args.out, label, {"all": f"{bootstrap_mean(values.mean(1)):.3f}", "quarters": quarters})
            keep(args.out, f"{label}, by share", [f"{bootstrap_mean(part):.3f}" for part in values.T])


# --- texts ------------------------------------------------------------------------------------------------------------


def segments(values: Tensor) -> Tensor:
    """Sums over segments of canvases that follow each other, which are resampled together: [N] -> [segments]."""
    return torch.stack([part.sum() for part in values.split(SEGMENT)])


def consistency(written: Sequence[list[str]], weight: dict[str, float]) -> dict[str, Any]:
    """Names and topics of some texts, each a list of canvases; intervals over segments of 16 canvases."""
    found: dict[str, Any] = {}
    for name, distances in (("near", NEAR), ("far", FAR)):
        parts = [name_recurrence(blocks, distances) for blocks in written]
        hits, count = (torch.cat([segments(part[side]) for part in parts]) for side in (0, 1))
        found[f"names {name}"] = f"{bootstrap_ratio(hits, count):.3f}" if float(count.sum()) else "none"
        found[f"names {name} counted"] = int(count.sum())
    for distance in DISTANCES:
        parts = [topic_likeness(blocks, distance, weight) for blocks in written]
        sums = torch.cat([segments(part) for part in parts])
        numbers = torch.cat([segments(torch.ones_like(part)) for part in parts])
        found[f"topic {distance}"] = f"{bootstrap_ratio(sums, numbers):.4f}"
    return found


def cut(bundle: Checkpoint, tokens: Sequence[int]) -> list[str]:
    """The texts of canvases."""
    size = bundle.model.config.canvas
    return [bundle.tokenizer.decode([*tokens[start : start + size]]) for start in range(0, len(tokens), size)]


def write(args: argparse.Namespace) -> None:
    """Texts after prompts of an unseen text: what recurs in what was written."""
    bundle = load_model(args.model)
    options = {"steps": args.steps, "temperature": args.temperature, "jump": "spaced", "seed": args.seed}
    kept = json.loads(args.out.read_text()).get("texts", {}) if args.out.exists() else {}
    real, span = [], args.tokens - args.prompt - 1  # the first token begins the text
    for index in range(args.texts):
        tokens = read_tokens(bundle, args.text, count=args.tokens, skip=index * args.tokens // 2)
        real.append(tokens)
    weight = rarity(block for tokens in real for block in cut(bundle, tokens))
    keep(args.out, "real", consistency([cut(bundle, tokens[-span:]) for tokens in real], weight))
    with_context, without = LanguageModel(bundle), LanguageModel(forgetful(bundle))

    def go_on(lm: LanguageModel, prompt: str) -> Sequence[int]:
        request = replace(lm.encoder.continuation(prompt, None, length=args.tokens), ends=False)
        return lm.run([request], **options)[0].tokens

    def alone(index: int) -> list[int]:
        size, seed = bundle.model.config.canvas, args.seed + 1000 * (index + 1)
        request = replace(without.encoder.continuation(None, None, length=size + 1), ends=False)
        many = without.run(request.copies(-(-span // size)), **{**options, "seed": seed})
        return [token for each in many for token in each.tokens]

    ways: dict[str, Callable[[str, int], Sequence[int]]] = {
        "context": lambda prompt, _: go_on(with_context, prompt),
        "overlap": lambda prompt, _: go_on(without, prompt),
        "alone": lambda _, index: alone(index),
    }
    for index in range(args.texts):
        for name, make in ways.items():
            if f"{name} {index}" not in kept:
                prompt = bundle.tokenizer.decode(real[index][: args.prompt])
                kept[f"{name} {index}"] = [*make(prompt, index)][-span:]
                keep(args.out, "texts", kept, silent=True)
    for name in ways:
        written = [cut(bundle, kept[f"{name} {index}"]) for index in range(args.texts)]
        keep(args.out, name, consistency(written, weight))
        keep(args.out, f"{name} sample", " ".join(written[0][60:66]))


# --- rotary scaling ---------------------------------------------------------------------------------------------------


def rotary(args: argparse.Namespace) -> None:
    """Nats per token of rows 1, 2 and 4 times longer than in training, each as one row, by rotary scaling."""
    bundle = load_model(args.model)
    assert isinstance(bundle.model, DiT)
    stream: list[int] = []
    for text in texts(open_documents([args.text])):
        stream += [*bundle.tokenizer.encode(text), bundle.tokenizer.eos_id]
        if len(stream) > args.tokens:
            break
    for times in (1, 2, 4):
        length = times * bundle.length - 1
        rows = torch.tensor(stream[: args.tokens // (length + 1) * length]).view(-1, length)
        rows = torch.cat([torch.full_like(rows[:, :1], bundle.bos_id), rows], 1)
        plain = torch.zeros(len(rows), dtype=torch.float64)
        for kind in ("none",) if times == 1 else ("none", "linear", "ntk"):
            scaling: dict[str, Any] = {} if kind == "none" else {"rotary_factor": float(times), "rotary_scaling": kind}
            model = DiT(replace(bundle.model.config, **scaling)).eval()
            model.load_state_dict(bundle.model.state_dict())
            network = LanguageModel(replace(bundle, model=model)).network
            found = nats_left(network, bundle, rows, own=length, draws=args.draws).mean(1)
            plain = found if kind == "none" else plain
            said = {
                "nats": f"{bootstrap_mean(found):.3f}",
                "more than unscaled": f"{bootstrap_mean(found - plain):.3f}",
            }
            keep(args.out, f"{times} x {bundle.length}, {kind}", said)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> None:
    """The memory that a text takes above the loaded model, and the CPU time per token, one call per canvas."""
    tokenizer = Tokenizer.bytes()
    sizes: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "canvas": args.canvas, "window": args.window or None}
    config, path = ModelConfig.preset(args.model, **sizes), MixturePath(UniformSource(tokenizer.vocab_size))
    lm = LanguageModel(Checkpoint(DiT(config).eval(), path, tokenizer, 4 * args.canvas, bos_id=None))

    def write(length: int) -> None:
        request = replace(lm.encoder.continuation(None, None, length=length, begin="anywhere"), ends=False)
        assert len(lm.run([request], steps=1)[0].tokens) == length

    write(2 * args.canvas)
    for length in args.lengths:
        began = time.process_time()
        mib = peak_extra_mib(lambda length=length: write(length))  # type: ignore[misc]
        took = 1000 * (time.process_time() - began) / length
        name = f"{args.model}, canvas {args.canvas}, window {args.window or 'none'}, {length} tokens"
        keep(args.out, name, {"MiB": mib and round(mib, 1), "ms per token": round(took, 3)})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bound", "write", "rotary", "memory"))
    parser.add_argument("model")
    parser.add_argument("text", nargs="?")
    parser.add_argument("--out", type=Path, default=Path("long.json"))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--skip", type=int, default=2000, help="tokens of the text that are left out at its beginning")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=511, help="tokens that are given")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--canvas", type=int, default=128, help="of memory")
    parser.add_argument("--window", type=int, default=0, help="of memory; 0: none")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768], help="of memory")
    args = parser.parse_args()
    if (args.text is None) != (args.what == "memory"):
        parser.error(f"{args.what} takes {'no text' if args.text else 'a text file'}")
    torch.set_num_threads(1)
    {"bound": measure_bound, "write": write, "rotary": rotary, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
