"""Defects put into real text at known strengths, and which of them a metric sees.

    table = find_sights(metrics, texts, training, noise=Noise(0, range(64)))
    table["distinct_2", "repetition"]   # z at each strength

A metric is worth what it notices. Real text is damaged in one way at a time, more and more, and a metric sees the
defect where its number leaves what real text has by chance: |z| > 3 over real subsets of the same size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fsdfm.noise import Noise, Purpose

__all__ = ["DEFECTS", "SEEN", "STRENGTHS", "Defect", "Sight", "find_sights", "inject"]

Metric = Callable[[Sequence[str]], float]
"""A set of texts -> one number."""

STRENGTHS = (0.1, 0.3, 1.0)
SEEN = 3.0  # |z| from which a defect is seen
_SENTENCE = re.compile(r"(?<=[.!?])(?=\s)|(?<=[.!?][\"\u201d])(?=\s)")
_SWAPS = (("was", "were"), ("is", "are"), ("has", "have"), ("he", "she"), ("his", "her"), ("him", "her"), ("a", "an"))
_SWAP = {**dict(_SWAPS), **{b: a for a, b in reversed(_SWAPS)}}
_SWAPPED = re.compile(r"\b(" + "|".join(sorted(_SWAP)) + r")\b", re.IGNORECASE)


class Inject(Protocol):
    """Texts, training texts, strength and one row of randomness per text -> damaged texts."""

    def __call__(self, texts: Sequence[str], training: Sequence[str], strength: float, /, *, noise: Noise) -> list[str]:
        """Damage them."""
        ...


@dataclass(frozen=True)
class Defect:
    """A way to damage a set of texts; `strength` is what the share of it means."""

    name: str
    strength: str
    inject: Inject


def inject(
    name: str, texts: Sequence[str], *, strength: float, noise: Noise, training: Sequence[str] = ()
) -> list[str]:
    """The texts with a defect of a strength in 0 .. 1: a function of (seed, sample); at 0 they are what they were."""
    if name not in DEFECTS:
        raise ValueError(f"the defect is {name!r}; allowed are {', '.join(DEFECTS)}")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is {strength}; allowed are 0 <= strength <= 1")
    if len(noise) != len(texts):
        raise ValueError(f"there are {len(noise)} rows of randomness for {len(texts)} texts; give one per text")
    return DEFECTS[name].inject(texts, training, strength, noise=noise)


def _sentences(text: str) -> list[str]:
    return [part for part in _SENTENCE.split(text) if part]


def _uniform(noise: Noise, length: int, step: int = 0) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = noise.uniform(Purpose.CONTROL, length, step).cpu().numpy()
    return found


def _each(change: Callable[[str, npt.NDArray[np.float64], float], str]) -> Inject:
    """A defect of single texts: text, uniforms and strength -> text."""

    def damage(texts: Sequence[str], _: Sequence[str], strength: float, /, *, noise: Noise) -> list[str]:
        uniform = _uniform(noise, max((len(text) for text in texts), default=0) + 1)
        return [change(text, row, strength) for text, row in zip(texts, uniform, strict=True)]

    return damage


def _repeat(text: str, uniform: npt.NDArray[np.float64], strength: float) -> str:
    said: list[str] = []
    for sentence, u in zip(_sentences(text), uniform, strict=False):
        said.append(said[-1] if said and u < strength else sentence)
    return "".join(said)


def _disagree(text: str, uniform: npt.NDArray[np.float64], strength: float) -> str:
    def swap(found: re.Match[str]) -> str:
        word = found[0]
        if uniform[found.start()] >= strength:
            return word
        other = _SWAP[word.lower()]
        return other.capitalize() if word[0].isupper() else other

    return _SWAPPED.sub(swap, text)


def _shuffle(text: str, uniform: npt.NDArray[np.float64], strength: float) -> str:
    """A share of the sentences change places among themselves."""
    sentences = _sentences(text)
    order = uniform[: len(sentences)].argsort()
    chosen = np.sort(order[: round(strength * len(sentences))])
    moved = list(sentences)
    for place, source in zip(chosen, order[: len(chosen)], strict=True):
        blank = sentences[place][: len(sentences[place]) - len(sentences[place].lstrip())]  # belongs to the place
        moved[place] = blank + sentences[source].lstrip()
    return "".join(moved)


def _lose_variety(texts: Sequence[str], _: Sequence[str], strength: float, /, *, noise: Noise) -> list[str]:
    """A share of the texts become copies of the others."""
    uniform = _uniform(noise, 2)
    order = uniform[:, 0].argsort()
    lost = order[: min(round(strength * len(texts)), len(texts) - 1)]
    kept = order[len(lost) :]
    found = list(texts)
    for place in lost:
        found[place] = texts[int(kept[int(uniform[place, 1] * len(kept))])]
    return found


def _copy(texts: Sequence[str], training: Sequence[str], strength: float, *, noise: Noise) -> list[str]:
    """A share of the texts become texts of the training set, each of them once."""
    if len(training) < len(texts):
        raise ValueError(f"copying needs {len(texts)} training texts and there are {len(training)}; give more")
    order = _uniform(noise, 1)[:, 0].argsort()
    found = list(texts)
    for place in order[: round(strength * len(texts))]:
        found[place] = training[int(place)]
    return found


_TABLE = (
    Defect("repetition", "of the sentences repeat the one before", _each(_repeat)),
    Defect("lost variety", "of the texts are copies of other texts of the set", _lose_variety),
    Defect("wrong agreement", "of was/were, is/are, has/have, he/she, a/an are the other one", _each(_disagree)),
    Defect("shuffled sentences", "of a text's sentences change places", _each(_shuffle)),
    Defect("copying", "of the texts are texts of the training set", _copy),
)
DEFECTS: Mapping[str, Defect] = MappingProxyType({defect.name: defect for defect in _TABLE})
"""By name."""


@dataclass(frozen=True)
class Sight:
    """How far a metric moves with a defect, in deviations of real text: strength -> z."""

    z: Mapping[float, float]

    @property
    def seen_from(self) -> float | None:
        """The smallest strength from which on the metric leaves what real text has; None: it does not see it."""
        found = None
        for strength in sorted(self.z, reverse=True):
            if not abs(self.z[strength]) > SEEN:
                break
            found = strength
        return found


def find_sights(
    metrics: Mapping[str, Metric],
    texts: Sequence[str],
    training: Sequence[str],
    *,
    noise: Noise,
    strengths: Sequence[float] = STRENGTHS,
) -> dict[tuple[str, str], Sight]:
    """(metric, defect) -> how far it moves: the first half of the texts is damaged, subsets of all are its scale.

    noise    one row a real subset: of as many texts as are damaged, drawn without replacement
    training only copying needs it; without it copying is left out
    """
    size = len(texts) // 2
    if size < 2 or len(noise) < 2:
        raise ValueError(f"there are {len(texts)} texts and {len(noise)} subsets; give four and two or more")
    order = _uniform(noise, len(texts)).argsort(1)[:, :size]
    rows = Noise(noise.seed, range(size))
    kinds = [name for name in DEFECTS if name != "copying" or len(training) >= size]
    damaged = {
        (name, s): inject(name, texts[:size], strength=s, noise=rows, training=training)
        for name in kinds
        for s in strengths
    }
    found = {}
    for metric, measure in metrics.items():
        real = [measure([texts[i] for i in part]) for part in order]
        mean, sd = float(np.mean(real)), float(np.std(real, ddof=1))
        for name in kinds:
            found[metric, name] = Sight({s: _z(measure(damaged[name, s]), mean, sd) for s in strengths})
    return found


def _z(value: float, mean: float, sd: float) -> float:
    if sd > 0:
        return (value - mean) / sd
    return 0.0 if value == mean else float(np.copysign(np.inf, value - mean))
