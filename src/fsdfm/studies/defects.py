"""Which defect each metric sees: real text is damaged in one way at a time, more and more, and every metric is asked.

    run_defects("out", held_out="valid.txt", training="train.txt", judge="smollm2")

A cell is a metric. Its number on damaged text is held against what it says of real subsets of the same size; from the
strength on at which it leaves them by more than three deviations, the metric sees the defect. What a metric does not
see it cannot be trusted with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdfm.data import open_documents
from fsdfm.files import file_sha256
from fsdfm.measure.copying import find_copies
from fsdfm.measure.defects import DEFECTS, SEEN, STRENGTHS, Sight, find_sights
from fsdfm.measure.distances import Distance, energy_distance, mmd, ngram_features, standardise_features, style_features
from fsdfm.measure.evaluation import named_features
from fsdfm.measure.judges import Judge, make_judge
from fsdfm.measure.mauve import compute_mauve, minilm_features
from fsdfm.measure.metrics import distinct_n, repetition, self_bleu, unigram_entropy_bits
from fsdfm.measure.ngrams import NgramModel, perplexity_bits
from fsdfm.measure.wellformed import CHECKS, check_texts
from fsdfm.noise import Noise
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.report import StudyReport, markdown_table
from fsdfm.studies.runner import Cell, Study, StudyResults, run_study

__all__ = ["run_defects"]

Metric = Callable[[Sequence[str]], float]
Rows = list[npt.NDArray[np.int64]]
_SUBSETS = 48
_LARGEST_Z = 9999.0
_WORD = re.compile(r"\w+|[^\w\s]")
_JUDGE = "perplexity"
_MEANING, _MAUVE = "meaning, energy", "MAUVE"
_MAUVE_SEEDS = range(3)
_DISTANCES: dict[str, Distance] = {"energy": energy_distance, "MMD": mmd}


@dataclass(frozen=True)
class DefectTexts:
    """Where the texts come from, and how many are damaged; as many again are compared with."""

    held_out: str
    training: str
    judge: str | None
    minilm: bool
    features: str
    num: int
    separator: str

    @property
    def setting(self) -> dict[str, Any]:
        """What all cells share."""
        shas = {name: file_sha256(Path(getattr(self, name))) for name in ("held_out", "training")}
        return {**shas, "num": self.num, "separator": self.separator}


class _Words:
    """Texts as rows of word numbers: the same for all texts of a study."""

    def __init__(self, texts: Sequence[str]):
        self.known: dict[str, int] = {}
        for text in texts:
            for word in _WORD.findall(text):
                self.known.setdefault(word, len(self.known))

    def __call__(self, texts: Sequence[str]) -> Rows:
        return [np.array([self.known.get(w, 0) for w in _WORD.findall(t)], dtype=np.int64) for t in texts]


def _metrics(texts: DefectTexts) -> dict[str, Callable[[], tuple[Metric, Sequence[str], Sequence[str]]]]:
    """Every metric by its name, made when it is asked for, with the texts that it is asked about."""

    def of(make: Callable[[_Words, Sequence[str], Sequence[str]], Metric]) -> Callable[[], Any]:
        def made() -> tuple[Metric, Sequence[str], Sequence[str]]:
            asked, reference, training = _read(texts)
            return make(_Words([*asked, *reference, *training]), reference, training), asked, training

        return made

    def mean(score: Callable[[Any], float]) -> Callable[[], Any]:
        return of(lambda words, *_: lambda found: float(np.mean([score(row) for row in words(found)])))

    found: dict[str, Callable[[], Any]] = {
        "entropy": mean(unigram_entropy_bits),
        "repetition": mean(repetition),
        "distinct-2": of(lambda words, *_: lambda found: distinct_n(words(found), 2)),
        "self-BLEU": of(lambda words, *_: lambda found: float(self_bleu(words(found)).mean())),
        "copied 8-grams": of(lambda words, _, training: partial(_copied, words, training)),
        "style, energy": of(lambda _, reference, __: _far(style_features, reference)),
        "style, MMD": of(lambda _, reference, __: _far(style_features, reference, mmd)),
        "n-grams, energy": of(lambda words, reference, _: _far(lambda t: ngram_features(words(t)), reference)),
        "n-grams, MMD": of(lambda words, reference, _: _far(lambda t: ngram_features(words(t)), reference, mmd)),
        "n-gram recall": of(lambda words, reference, _: partial(_recall, words, reference)),
        "n-gram precision": of(lambda words, reference, _: _precision(words, reference)),
        **{name.replace("_", " "): of(lambda *_, name=name: partial(_check, name)) for name in CHECKS},
    }
    if texts.minilm:
        found[_MEANING] = of(lambda _, reference, __: _far(_minilm(), reference))
        found[_MAUVE] = of(lambda _, reference, __: _unlike(_minilm(), reference))
    for name in filter(None, (part.strip() for part in texts.features.split(","))):
        for kind, distance in _DISTANCES.items():
            found[f"{name}, {kind}"] = of(_of_states(partial(_states, name, texts.judge), distance))
    if texts.judge is not None:
        judge = texts.judge
        found[_JUDGE] = of(lambda *_: _perplexity(_judge(judge)))
    return found


def _read(texts: DefectTexts) -> tuple[list[str], list[str], list[str]]:
    """Texts to be damaged and their subsets, texts to be compared with, training texts."""
    held, training = (list(_documents(file, texts.separator)) for file in (texts.held_out, texts.training))
    if len(held) < 2 * texts.num or len(training) < texts.num:
        raise ValueError(
            f"{texts.held_out} holds {len(held)} texts and {texts.training} {len(training)}; {2 * texts.num} and "
            f"{texts.num} are needed: give a smaller --num"
        )
    return held[: texts.num], held[texts.num : 2 * texts.num], training[: texts.num]


def _documents(file: str, separator: str) -> Iterator[str]:
    """The documents of a file that hold anything, whole."""
    parts: list[str] = []
    for chunk in open_documents(file, separator).chunks():
        parts.append(chunk.text)
        if chunk.last:
            if text := "".join(parts).strip():
                yield text
            parts = []


def _copied(words: _Words, training: Sequence[str], texts: Sequence[str]) -> float:
    copies = find_copies(words(texts), np.concatenate(words(training)))
    return float(copies.copied.sum() / max(1, copies.num_ngrams.sum()))


def _far(
    embed: Callable[[Sequence[str]], npt.NDArray[Any]], reference: Sequence[str], distance: Distance = energy_distance
) -> Metric:
    real = np.asarray(embed(reference), dtype=np.float64)
    scaled = standardise_features(real, real)
    return lambda texts: distance(standardise_features(np.asarray(embed(texts)), real), scaled)


def _unlike(embed: Callable[[Sequence[str]], npt.NDArray[Any]], reference: Sequence[str]) -> Metric:
    """MAUVE with the reference, a mean over seeds of its clusters."""
    real = embed(reference)
    return lambda texts: compute_mauve(real, embed(texts), seeds=_MAUVE_SEEDS).mean


def _of_states(embed: Callable[[], Any], distance: Distance) -> Callable[..., Metric]:
    return lambda _, reference, __: _far(embed(), reference, distance)


@cache
def _minilm() -> Callable[[Sequence[str]], npt.NDArray[Any]]:
    return _remembered(minilm_features())


@cache
def _states(name: str, judge: str | None) -> Callable[[Sequence[str]], npt.NDArray[Any]]:
    (embed,) = named_features(name, None if judge is None else _judge(judge)).values()
    return _remembered(embed)


def _remembered(embed: Callable[[Sequence[str]], npt.NDArray[Any]]) -> Callable[[Sequence[str]], npt.NDArray[Any]]:
    """Features that are computed once per text: subsets share most of theirs."""
    known: dict[str, npt.NDArray[Any]] = {}

    def ask(texts: Sequence[str]) -> npt.NDArray[Any]:
        new = list(dict.fromkeys(text for text in texts if text not in known))
        known.update(zip(new, embed(new), strict=True) if new else ())
        return np.stack([known[text] for text in texts])

    return ask


def _recall(words: _Words, reference: Sequence[str], texts: Sequence[str]) -> float:
    return perplexity_bits(NgramModel.fit(words(texts), vocab_size=len(words.known)), words(reference))


def _precision(words: _Words, reference: Sequence[str]) -> Metric:
    model = NgramModel.fit(words(reference), vocab_size=len(words.known))
    return lambda texts: perplexity_bits(model, words(texts))


def _check(name: str, texts: Sequence[str]) -> float:
    passed = check_texts(texts)[name]
    return float(np.nanmean(passed)) if np.isfinite(passed).any() else 0.0


@cache
def _judge(name: str) -> Judge:
    return make_judge(name)


def _perplexity(judge: Judge) -> Metric:
    """Log-perplexity per token: a ratio of sums over texts, each scored once."""

    def scores(texts: Sequence[str]) -> npt.NDArray[np.float64]:
        found = judge.score(texts)
        return np.stack((found.nll.numpy(), found.num_tokens.numpy().astype(np.float64)), 1)

    ask = _remembered(scores)

    def measure(texts: Sequence[str]) -> float:
        nll, count = ask(texts).sum(0)
        return float(nll / count)

    return measure


def _compute(cell: Cell, _: StudyFolder, *, texts: DefectTexts) -> Mapping[str, Any]:
    measure, asked, training = _metrics(texts)[cell.variant]()
    sights = find_sights({cell.variant: measure}, asked, training, noise=Noise(cell.seed, range(_SUBSETS)))
    return {"z": {defect: {str(s): _bounded(z) for s, z in sight.z.items()} for (_, defect), sight in sights.items()}}


def _bounded(z: float) -> float:
    """z as JSON holds it: where real subsets do not differ at all it is infinite."""
    return float(np.clip(z, -_LARGEST_Z, _LARGEST_Z))


def _report(results: StudyResults) -> StudyReport:
    body: list[list[str]] = [["metric", *DEFECTS]]
    for variant in results.variants:
        found = results.of(variant)[0]["z"]
        body.append([variant, *(_written(found.get(defect)) for defect in DEFECTS)])
    shares = ", ".join(f"{s:g}" for s in STRENGTHS)
    lines = [
        "# Which defect each metric sees",
        "",
        f"Real texts damaged at the strengths {shares}. A cell holds the smallest strength from which on the metric "
        f"leaves real subsets of the same size by more than {SEEN:g} deviations, and z at the largest; - where it does "
        "not see the defect.",
        "",
        *(f"- **{defect.name}**: the share {defect.strength}" for defect in DEFECTS.values()),
        "",
        "## What is seen",
        "",
        markdown_table(body),
        "",
    ]
    record = {"z": {variant: results.of(variant)[0]["z"] for variant in results.variants}}
    return StudyReport("defects", "\n".join(lines), record)


def _written(z: Mapping[str, float] | None) -> str:
    if z is None:
        return ""
    sight = Sight({float(strength): value for strength, value in z.items()})
    largest = sight.z[max(sight.z)]
    return "-" if sight.seen_from is None else f"{sight.seen_from:g} ({largest:+.0f})"


def run_defects(
    out: str | Path,
    *,
    held_out: str,
    training: str,
    judge: str | None = None,
    minilm: bool = False,
    features: str = "",
    num: int = 128,
    separator: str = "<|endoftext|>",
    workers: int | None = None,
) -> StudyResults:
    """Ask every metric about every defect; the same call resumes. Writes defects.md and defects.json."""
    named_features(features, None if judge is None or "judge" not in features else _judge(judge))  # a wrong name, now
    texts = DefectTexts(held_out, training, judge, minilm, features, num, separator)
    cells = [Cell(name) for name in _metrics(texts)]
    study = Study("defects", cells, partial(_compute, texts=texts), _report, setting=texts.setting)
    return run_study(study, out, workers=workers)
