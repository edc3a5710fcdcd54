"""The measured part of a model card: what result files say, between two marks of a README.md that is otherwise free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdfm.checkpoint import load_model
from fsdfm.checkpoint.embedded import embedded_models, find_model, name_of
from fsdfm.demo.stored import evaluate_commands, merge
from fsdfm.files import read_text, write_text
from fsdfm.measure.results import Evaluation, load_evaluation
from fsdfm.model.weights import weights_sha256
from fsdfm.show.quality import Comparison
from fsdfm.show.quality.report import facts_in_words, judge_in_words
from fsdfm.show.quality.tables import model_tables, plain_markdown

__all__ = ["BEGIN", "END", "card_text", "measured_markdown", "prune_results", "stale_card", "write_card"]

BEGIN, END = "<!-- measured: fsdfm card writes this part -->", "<!-- /measured -->"


def write_card(model: str | Path, files: Sequence[Path]) -> Path:
    """Put the tables of result files into a model's README.md: in the place of the old ones, or at its end.

    The files must be of these very weights; several are taken as one, fewer samples at many calls, say.
    """
    card, text = card_text(model, files)
    write_text(card, text)
    return card


def stale_card(model: str | Path, results: Path) -> tuple[Path, str] | None:
    """A model's card and what it should say, where its measured part differs from the results of its weights."""
    sha256 = weights_sha256(load_model(find_model(model)).model)
    found = {file: load_evaluation(file) for file in sorted(results.glob("*.json"))}
    own = [file for file, evaluation in found.items() if evaluation.model.get("checkpoint_sha256") == sha256]
    if not own:
        if any(e.name == name_of(find_model(model)) and (e.rows or e.frontier) for e in found.values()):
            raise ValueError(f"the results of {model} in {results} were measured with other weights; measure these")
        return None
    largest = sorted(own, key=lambda file: -int(found[file].facts.get("num_samples", 0)))  # its real text is shown
    card, text = card_text(model, largest)
    return (card, text) if not card.exists() or read_text(card) != text else None


def prune_results(results: Path) -> list[Path]:
    """Remove result files of an embedded model, by name or folder, of other weights; those removed.

    Files that hold an autoregressive model alone stay: they say nothing of the weights that they were made beside.
    """
    known = {name: weights_sha256(load_model(folder).model) for name, folder in embedded_models().items()}
    gone = []
    for file in sorted(results.rglob("*.json")):
        evaluation = load_evaluation(file)
        own = known.get(evaluation.name, known.get(str(evaluation.model.get("folder"))))
        alone = not (evaluation.rows or evaluation.frontier) and bool(evaluation.alternatives)
        if own is not None and evaluation.model.get("checkpoint_sha256") != own and not alone:
            file.unlink()
            gone.append(file)
    return gone


def card_text(model: str | Path, files: Sequence[Path]) -> tuple[Path, str]:
    """The file of a model's card, and what `write_card` would write into it."""
    folder = find_model(model)
    sha256 = weights_sha256(load_model(folder).model)
    evaluations = [load_evaluation(file) for file in files]
    for file, evaluation in zip(files, evaluations, strict=True):
        if evaluation.model.get("checkpoint_sha256") != sha256:
            raise ValueError(f"{file} was measured with other weights than those in {folder}; measure these")
    card = folder / "README.md"
    old = read_text(card) if card.exists() else f"# {folder.name}\n"
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2] or "\n"
    parts = "\n".join(measured_markdown(evaluation) for evaluation in merge(evaluations).values())
    return card, f"{before.rstrip()}\n\n{BEGIN}\n{parts}{END}{after}"


def measured_markdown(evaluation: Evaluation) -> str:
    """The main table of an evaluation, how it was measured, and the commands that measure it again."""
    comparison = Comparison((evaluation.name,), (evaluation,))
    real, marks = comparison.real_of(evaluation.name), comparison.marks
    table = model_tables("Measured", evaluation, real, marks=marks)[0].to_markdown()
    commands = "\n".join(evaluate_commands(evaluation))
    if BEGIN in commands or END in commands:
        raise ValueError(f"the results of {evaluation.name!r:.80} hold {END!r}, a mark of the card; measure again")
    judge, facts = plain_markdown(judge_in_words(evaluation.judge)), plain_markdown(facts_in_words(evaluation))
    words = f"{judge} Brackets are 95 % intervals. {facts}"
    return f"{table.replace('### ', '## ', 1)}\n{words}\n\n```sh\n{commands}\n```\n"
