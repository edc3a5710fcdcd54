"""Evidence beyond perplexity: how far a set of samples is from real text, in standard units, and simple checks.

    evidence = Evidence(reader, real=rows, features={"meaning": minilm_features()})
    evidence.measure(samples)["energy_style_z"]

All of it compares sets of one size: the first texts of the samples with as many real ones. Two further sets of real
text, drawn from the same pool again and again, say how far apart equal laws are by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fsdfm.measure.distances import (
    Distance,
    Scale,
    energy_distance,
    mmd,
    ngram_features,
    split_scale,
    standardise_features,
    style_features,
)
from fsdfm.measure.ngrams import NgramModel, cross_entropy_bits
from fsdfm.measure.results import Measured
from fsdfm.measure.rows import Reader, TokenRows
from fsdfm.measure.statistics import Interval, bootstrap_mean, bootstrap_ratio, jackknife
from fsdfm.measure.wellformed import check_texts
from fsdfm.noise import Noise

__all__ = ["FEWEST_REAL", "Evidence", "TextFeatures", "measure_checks"]

Matrix = npt.NDArray[np.floating]
TextFeatures = Callable[[Sequence[str]], Matrix]
"""Texts -> a vector for each, [N, D]."""

FEWEST_REAL = 8  # rows of real text below which splits of it say nothing
_FEWEST_CHECKED = 2  # texts that a check applies to
_SPLITS = 64
_NGRAM = 2  # of the profiles
_ORDER = 3  # of the language models of n-grams
_DISTANCES: Mapping[str, Distance] = {"energy": energy_distance, "mmd": mmd}


@dataclass(frozen=True)
class _Scaled:
    """A distance on one kind of feature: real features, what samples are compared with, and the scale."""

    embed: Callable[[TokenRows], Matrix]
    distance: Distance
    reference: Matrix
    scale: Scale

    def measure(self, rows: TokenRows) -> Measured:
        """z of the samples, with a jackknife interval over them; the distance itself is a fact beside it."""
        features = self.embed(rows[: self.scale.size])
        samples = list(features)

        def z(part: Sequence[Matrix]) -> float:
            return self.scale.z(self.distance(np.stack(part), self.reference))

        found = jackknife(z, samples)
        facts = {
            "distance": self.distance(features, self.reference),
            "real_mean": self.scale.mean,
            "real_sd": self.scale.sd,
            "n": len(features),
        }
        return Measured(found.value, found.low, found.high, facts)


@dataclass(frozen=True)
class Evidence:
    """Compares samples with real text.

    real      held-out rows, int32 [M, L]: half of them is what samples are compared with
    features  texts to vectors, of networks, by their names in the metrics: energy_NAME_z and mmd_NAME_z
    vocab_size   tokens that rows may hold; 0: those of the tokenizer
    """

    reader: Reader
    real: TokenRows
    features: Mapping[str, TextFeatures] = field(default_factory=dict)
    seed: int = 0
    vocab_size: int = 0

    def __post_init__(self) -> None:
        if len(self.real) < FEWEST_REAL:
            raise ValueError(f"there are {len(self.real)} real rows; distances need {FEWEST_REAL} or more")

    @property
    def size(self) -> int:
        """Texts of a set."""
        return len(self.real) // 2

    def measure(self, rows: TokenRows) -> dict[str, Measured]:
        """Every distance, n-gram cross-entropy in both directions, and the checks."""
        documents = [piece.text for piece in self.reader.pieces(rows)]
        return {**self.distances(rows), **self.ngrams(rows), **measure_checks(documents, seed=self.seed)}

    def measure_real(self) -> dict[str, Measured]:
        """The same of the real rows that samples are not compared with."""
        return self.measure(self.real[self.size :])

    def distances(self, rows: TokenRows) -> dict[str, Measured]:
        """z of the energy distance on each kind of feature, and of the MMD on a network's."""
        if len(rows) < 2:
            return {}
        return {name: scaled.measure(rows) for name, scaled in self._scaled.items()}

    def ngrams(self, rows: TokenRows) -> dict[str, Measured]:
        """Bits per token: real text under a model of the samples (recall), samples under a model of real text.

        Both also as z, in deviations of one half of real text under a model of the other.
        """
        size = min(self.size, len(rows))
        mine, real = self._arrays(rows[:size]), self._arrays(self.real[: self.size])
        own = NgramModel.fit(mine, order=_ORDER, vocab_size=self._vocab)
        sums = {
            "ngram_recall_bits": cross_entropy_bits(own, real),
            "ngram_precision_bits": cross_entropy_bits(self._real_model, mine),
        }
        bits = {name: _ratio(found[:, 0], found[:, 1], self.seed) for name, found in sums.items()}
        scale = self._ngram_scale
        if size < self.size or not scale.sd > 0:
            return bits
        return bits | {name.removesuffix("bits") + "z": _in_deviations(bits[name], scale) for name in bits}

    # --- parts --------------------------------------------------------------------------------------------------------

    @cached_property
    def _scaled(self) -> Mapping[str, _Scaled]:
        embeddings: dict[str, Callable[[TokenRows], Matrix]] = {
            "style": lambda rows: style_features(self._texts(rows)),
            "ngram": lambda rows: ngram_features(self._arrays(rows), n=_NGRAM),
            **{name: self._embedding(features) for name, features in self.features.items()},
        }
        scaled = {
            f"{kind}_{name}_z": self._scale(embed, distance)
            for name, embed in embeddings.items()
            for kind, distance in _DISTANCES.items()
        }
        return {name: each for name, each in scaled.items() if each.scale.sd > 0}  # else all real texts are the same

    def _scale(self, embed: Callable[[TokenRows], Matrix], distance: Distance) -> _Scaled:
        """A distance on features whose columns have the mean 0 and the deviation 1 over real text."""
        real = embed(self.real)

        def scaled(rows: TokenRows) -> Matrix:
            return standardise_features(embed(rows), real)

        features = standardise_features(real, real)
        scale = split_scale(distance, features, size=self.size, noise=Noise(self.seed, range(_SPLITS)))
        return _Scaled(scaled, distance, features[: self.size], scale)

    def _embedding(self, features: TextFeatures) -> Callable[[TokenRows], Matrix]:
        """Features of rows; those of the last rows are remembered, since two distances ask for them one by one."""
        known: dict[bytes, Matrix] = {}

        def embed(rows: TokenRows) -> Matrix:
            key = rows.tobytes()
            if key not in known:
                if len(known) > 1:  # the real rows stay
                    known.popitem()
                known[key] = features(self._texts(rows))
            return known[key]

        return embed

    @cached_property
    def _real_model(self) -> NgramModel:
        """Of the half that samples are compared with."""
        return NgramModel.fit(self._arrays(self.real[: self.size]), order=_ORDER, vocab_size=self._vocab)

    @cached_property
    def _ngram_scale(self) -> Scale:
        """Bits per token of one half of real text under a model of the other: the scale of both directions."""
        rows = np.asarray(self.real)[:, self.reader.num_bos :]

        def bits(a: TokenRows, b: TokenRows) -> float:
            model = NgramModel.fit(list(a), order=_ORDER, vocab_size=self._vocab)
            total, count = cross_entropy_bits(model, list(b)).sum(0)
            return float(total / count)

        return split_scale(bits, rows, size=self.size, noise=Noise(self.seed, range(_SPLITS)))

    @property
    def _vocab(self) -> int:
        return self.vocab_size or self.reader.tokenizer.vocab_size

    def _arrays(self, rows: TokenRows) -> list[npt.NDArray[np.integer]]:
        return list(rows[:, self.reader.num_bos :])

    def _texts(self, rows: TokenRows) -> list[str]:
        return [self.reader.text(row) for row in rows.tolist()]


def measure_checks(texts: Sequence[str], *, seed: int = 0) -> dict[str, Measured]:
    """The share of documents that pass each check, of those that it applies to, with the number of them.

    A row may hold several documents, and a new one has new names: each is checked by itself.
    """
    found = {}
    for name, passed in check_texts(texts).items():
        checked = passed[np.isfinite(passed)]
        if len(checked) >= _FEWEST_CHECKED:
            share = bootstrap_mean(checked.tolist(), seed=seed)
            found[name] = Measured(share.value, share.low, share.high, {"n": len(checked)})
    return found


def _in_deviations(bits: Measured, scale: Scale) -> Measured:
    value, low, high = (scale.z(number) for number in (bits.value, bits.low, bits.high))
    return Measured(value, low, high, {"real_mean": scale.mean, "real_sd": scale.sd, "n": scale.size})


def _ratio(top: npt.NDArray[np.float64], bottom: npt.NDArray[np.float64], seed: int) -> Measured:
    found: Interval = bootstrap_ratio(torch.from_numpy(top), torch.from_numpy(bottom), seed=seed)
    return Measured(found.value, found.low, found.high)
