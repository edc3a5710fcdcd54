"""What is shown but not made anew: result files of `fsdfm evaluate --json`, stories of `fsdfm generate --format json`.

results/*.json   measured quality; files of one model (fewer samples at 1,024 calls, say) become one
stories/*.json   texts that take too long to be made while somebody waits
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdfm.checkpoint.embedded import NAMES
from fsdfm.demo.stories import Sampling, Story, command_line
from fsdfm.files import read_json
from fsdfm.measure.results import Evaluation, Row, load_evaluation
from fsdfm.show.quality import Comparison
from fsdfm.show.quality.blocks import join_evaluations
from fsdfm.show.timeline import Timeline

__all__ = ["CALLED", "StoredSamples", "evaluate_commands", "merge", "read_stored", "sampling_of"]

CALLED = {"fewstep": "Few-step model", "parent": "Parent"}
_LARGEST_STORIES = 2**26  # bytes


@dataclass(frozen=True)
class StoredSamples:
    """Evaluations by the name of their model, embedded models first, and stories."""

    evaluations: dict[str, Evaluation]
    stories: tuple[Story, ...] = ()

    @property
    def comparison(self) -> Comparison | None:
        """All evaluations side by side; None: there are none."""
        labels = tuple(CALLED.get(name, name) for name in self.evaluations)
        return Comparison(labels, tuple(self.evaluations.values())) if self.evaluations else None

    def sampling(self, model: str, calls: int) -> Sampling:
        """How a model is sampled in so many calls: as it was measured."""
        return sampling_of(self.evaluations[model], self.row(model, calls)) if model in self.evaluations else ()

    def row(self, model: str, calls: int) -> Row | None:
        """What was measured of a model at this number of calls."""
        return None if model not in self.evaluations else self.evaluations[model].row(calls)


def read_stored(folder: Path, loaded: Mapping[str, str]) -> StoredSamples:
    """What a folder of results and stories holds; a folder that is not there holds nothing.

    loaded   what loading the models said, by name: a story of other weights says so
    """
    evaluations = merge(map(load_evaluation, sorted((folder / "results").glob("*.json"))))
    stories = [story for file in sorted((folder / "stories").glob("*.json")) for story in _stories(file, loaded)]
    return StoredSamples(evaluations, tuple(stories))


def merge(evaluations: Iterable[Evaluation]) -> dict[str, Evaluation]:
    """Evaluations of one model as one: the rows of the later added to the first."""

    def place(evaluation: Evaluation) -> tuple[int, str]:
        return (NAMES.index(evaluation.name) if evaluation.name in NAMES else len(NAMES)), evaluation.name

    return join_evaluations(sorted(evaluations, key=place))


def evaluate_commands(evaluation: Evaluation) -> list[str]:
    """The commands that measure the same again: one for every number of samples and temperature."""
    model = str(evaluation.model.get("folder", evaluation.name))
    dtype = evaluation.facts.get("dtype")
    rounded = dtype if dtype in ("bfloat16", "int8") else None
    groups: dict[tuple[int | None, float], list[Row]] = {}
    for row in evaluation.plain:
        groups.setdefault((row.num_samples, row.temperature), []).append(row)
    return [
        command_line(
            "evaluate",
            model,
            judge=evaluation.judge.get("name"),
            held_out=evaluation.data.get("held_out"),
            steps=",".join(str(row.steps) for row in group),
            num=group[0].num_samples,
            seed=evaluation.facts.get("seed"),
            precision=rounded,
            **dict(sampling_of(evaluation, group[0])),
        )
        for group in groups.values()
    ]


def sampling_of(evaluation: Evaluation, row: Row | None = None) -> Sampling:
    """What the sampler was told beyond what it takes unless told; the temperature is the row's, if one is meant."""
    usual = {
        "temperature": 1.0,
        "final_temperature": None,
        "top_k": None,
        "top_p": None,
        "jump": "exact",
        "grid": "uniform",
        "renoise": 0.0,
    }
    told = {name: evaluation.sampler.get(name, value) for name, value in usual.items()}
    if row is not None:
        told["temperature"] = row.temperature
    elif isinstance(told["temperature"], Mapping):  # by budget, and this one was not measured: as the model advises
        del told["temperature"]
    return tuple((name, value) for name, value in told.items() if value != usual[name])


def _stories(file: Path, loaded: Mapping[str, str]) -> list[Story]:
    """The texts of one `fsdfm generate --format json`; they were made from nothing."""
    try:
        record = read_json(file, _LARGEST_STORIES)
        model = str(record["model"]).rpartition(" from ")[2]
        texts, steps = record["generations"], record["settings"]["steps"]
        seed, num = int(record["settings"]["seed"]), len(texts)
        other = () if loaded.get(model) == record["model"] else ("Made with other weights than those of this build.",)
        return [
            Story(
                model=model,
                calls=text["calls"],
                seconds=text["seconds"] / num,
                seed=seed,
                shell=command_line("generate", model=model, steps=steps, seed=seed, num=num),
                timeline=Timeline(text["pieces"], text["last_changed"], text["steps"], given=text["given"]),
                notes=(f"Text {text['copy'] + 1} of {num}.", *other),
            )
            for text in texts
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no stories of `fsdfm generate --format json` ({error!r:.120})") from error
