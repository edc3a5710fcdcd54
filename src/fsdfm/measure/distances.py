"""Distances between two sets of texts in standard units: energy distance and MMD on features of texts.

    scale = split_scale(energy_distance, real_features, size=256, noise=Noise(0, range(64)))
    scale.z(energy_distance(sample_features, real_features[:256]))

A distance has no scale of its own. Real text cut into two halves has one too, by chance alone; z says how many standard
deviations of that a distance lies above its mean:

    z = (s - mean) / sd   over real-against-real splits of the same size

Features are numbers of each text: style (lengths, punctuation, function words) and n-gram profiles need no language
model; sentence features, a judge's hidden states and a trunk's need one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.checkpoint import Checkpoint
from fsdfm.measure.judges.scoring import TokenJudge
from fsdfm.noise import Noise, Purpose

__all__ = [
    "FUNCTION_WORDS",
    "Distance",
    "Scale",
    "energy_distance",
    "hidden_features",
    "median_distance",
    "mmd",
    "ngram_features",
    "split_scale",
    "standardise_features",
    "style_features",
    "trunk_features",
]

Floats = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.floating]
A = TypeVar("A", bound=npt.NDArray[Any])
Distance = Callable[[Matrix, Matrix], float]
"""Features [N, D] of one set and [M, D] of another -> how far the sets are apart."""

_ROWS_AT_ONCE = 1024
_FINEST = 2.0**-10  # the step size of a plain posterior
_MOST_FOR_MEDIAN = 1000  # points whose distances give the bandwidth
_BUCKETS = 512  # of an n-gram profile
_FUNCTION_WORDS = """
the a an and but or so if then when while because as of to in on at by for with from into about over under up down out
off he she it they we you i him her them me us his its their my your our is was are were be been had has have did do
does would could should will can not no yes this that these those there here who what which how all some one very too
again
"""
FUNCTION_WORDS = tuple(_FUNCTION_WORDS.split())
_NUM_LENGTHS = 7  # of the features that are lengths
_PUNCTUATION = ".,!?;:'\"-()\n"
_WORD = re.compile(r"[A-Za-z']+")


# --- distances --------------------------------------------------------------------------------------------------------


def energy_distance(a: Matrix, b: Matrix) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| with Euclidean norms, X, X' ~ a and Y, Y' ~ b independent.

    Pairs of one point with itself are left out (a U-statistic), so that two sets of one law have mean 0; it may be
    below 0. In the limit it is 0 only for equal laws.
    """
    x, y = _checked(a, b)
    across = _mean_distance(x, y)
    return 2 * across - _own_distance(x) - _own_distance(y)


def mmd(a: Matrix, b: Matrix, *, bandwidth: float | None = None) -> float:
    """The squared maximum mean discrepancy E k(X, X') + E k(Y, Y') - 2 E k(X, Y), k = exp(-|x - y|^2 / (2 s^2)).

    Unbiased; s is `bandwidth`, or else the median distance between points of both sets together.
    """
    x, y = _checked(a, b)
    s = bandwidth if bandwidth is not None else median_distance(torch.cat((x, y)))
    if not s > 0:
        if bandwidth is None:  # more than half of all pairs are equal: nothing to tell apart by
            return 0.0
        raise ValueError(f"bandwidth is {s}; allowed are numbers above 0")

    def kernel(distance: Tensor) -> Tensor:
        return torch.exp(distance.square() / (-2 * s * s))

    return _own_mean(x, kernel) + _own_mean(y, kernel) - 2 * _mean(x, y, kernel)


def _checked(a: Matrix, b: Matrix) -> tuple[Tensor, Tensor]:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(f"the features have the shapes {a.shape} and {b.shape}; give [N, D] each, N >= 2, of one D")
    x, y = (torch.from_numpy(np.ascontiguousarray(part, dtype=np.float64)) for part in (a, b))
    return x, y


def _mean(x: Tensor, y: Tensor, function: Callable[[Tensor], Tensor]) -> float:
    parts = [function(torch.cdist(rows, y)).sum() for rows in torch.split(x, _ROWS_AT_ONCE)]
    return float(torch.stack(parts).sum()) / (len(x) * len(y))


def _own_mean(x: Tensor, function: Callable[[Tensor], Tensor]) -> float:
    """The mean over pairs of different points."""
    itself = float(function(torch.zeros(1, dtype=x.dtype))) * len(x)
    return (_mean(x, x, function) * len(x) ** 2 - itself) / (len(x) * (len(x) - 1))


def _mean_distance(x: Tensor, y: Tensor) -> float:
    return _mean(x, y, lambda distance: distance)


def _own_distance(x: Tensor) -> float:
    return _own_mean(x, lambda distance: distance)


def median_distance(points: Tensor) -> float:
    """The median distance between points [N, D], or of some of them where they are many."""
    chosen = points[:: -(-len(points) // _MOST_FOR_MEDIAN)]
    rows, columns = torch.triu_indices(len(chosen), len(chosen), offset=1)
    return float(torch.cdist(chosen, chosen)[rows, columns].median())


# --- standard units ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of a distance over real-against-real splits."""

    mean: float
    sd: float
    num_splits: int
    size: int

    def z(self, distance: float) -> float:
        """(distance - mean) / sd; about a standard normal number where the samples are real."""
        if not self.sd > 0:
            raise ValueError("all splits of the real text have one distance: is it the same text again and again?")
        return (distance - self.mean) / self.sd


def split_scale(distance: Callable[[A, A], float], real: A, *, size: int, noise: Noise) -> Scale:
    """The scale of a distance: `real` is split at random into two sets of `size`, once for each row of the noise."""
    if not 2 <= size <= len(real) // 2:
        raise ValueError(
            f"size is {size} of {len(real)} real texts; allowed are 2 to {len(real) // 2}: a split needs two sets of it"
        )
    if len(noise) < 2:
        raise ValueError(f"there are {len(noise)} splits; give two or more: one has no spread")
    order = noise.uniform(Purpose.CONTROL, len(real)).argsort(1).cpu().numpy()
    found = [distance(real[row[:size]], real[row[size : 2 * size]]) for row in order]
    return Scale(float(np.mean(found)), float(np.std(found, ddof=1)), len(found), size)


def standardise_features(features: Matrix, real: Matrix) -> Floats:
    """Every column less its mean and by its deviation over real text; columns that are constant there become 0."""
    mean, sd = real.mean(0), real.std(0)
    scaled: Floats = np.where(sd > 0, (features - mean) / np.where(sd > 0, sd, 1.0), 0.0)
    return scaled


# --- features without a language model --------------------------------------------------------------------------------


def style_features(texts: Sequence[str]) -> Floats:
    """Lengths, punctuation and function words of each text: [N, 7 + marks + words]; rates are by word."""
    width = _NUM_LENGTHS + len(_PUNCTUATION) + len(FUNCTION_WORDS)
    return np.array([_style(text) for text in texts], dtype=np.float64).reshape(len(texts), width)


def _style(text: str) -> list[float]:
    words = [word.lower() for word in _WORD.findall(text)]
    sentences = [part for part in re.split(r"[.!?]+", text) if part.strip()]
    sizes = [len(part.split()) for part in sentences] or [0]
    count = max(1, len(words))
    lengths = [
        float(len(words)),
        float(np.mean([len(word) for word in words] or [0])),
        float(len(sentences)),
        float(np.mean(sizes)),
        float(np.std(sizes)),
        len(set(words)) / count,
        sum(character.isupper() for character in text) / count,
    ]
    marks = [text.count(mark) / count for mark in _PUNCTUATION]
    return [*lengths, *marks, *(words.count(word) / count for word in FUNCTION_WORDS)]


def ngram_features(rows: Sequence[npt.NDArray[np.integer]], *, n: int = 2, buckets: int = _BUCKETS) -> Floats:
    """The share of a text's n-grams in each of `buckets` hashed classes, as square roots: [N, buckets].

    The square root makes the Euclidean distance of two profiles sqrt(2) times Hellinger's, in which rare and frequent
    n-grams weigh alike.
    """
    if n < 1 or buckets < 2:
        raise ValueError(f"n is {n} and buckets {buckets}; allowed are n >= 1 and two buckets or more")
    return np.array([_profile(np.asarray(row), n, buckets) for row in rows]).reshape(len(rows), buckets)


def _profile(row: npt.NDArray[np.integer], n: int, buckets: int) -> Floats:
    count = max(0, len(row) - n + 1)
    mixed = np.zeros(count, dtype=np.uint64)
    for k in range(n):
        mixed = (mixed ^ row[k : k + count].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    bucket = (mixed % np.uint64(buckets)).astype(np.int64)
    profile: Floats = np.sqrt(np.bincount(bucket, minlength=buckets) / max(1, count))
    return profile


# --- features with one ------------------------------------------------------------------------------------------------


def hidden_features(judge: TokenJudge) -> Callable[[Sequence[str]], Floats]:
    """Texts -> the mean of what the judge's head reads over a text's tokens, [N, C]; long texts are cut at its context.

    A text is read behind the judge's own first token, which is no part of the mean; a text without a token is zero.
    """
    hidden = judge.hidden
    if hidden is None:
        raise ValueError(f"the judge {judge.name} does not show its features; use one from a llama2.c or GGUF file")

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> Floats:
        first = [] if judge.bos_id is None else [judge.bos_id]
        rows = [(first + row)[: judge.max_length] for row in judge.encode(texts)]
        found = [_pool(hidden, row, len(first), device=judge.device) for row in rows]
        width = max((len(row) for row in found), default=0)
        return np.array([row if len(row) else np.zeros(width) for row in found]).reshape(len(texts), width)

    return embed


def trunk_features(checkpoint: Checkpoint) -> Callable[[Sequence[str]], Floats]:
    """Texts -> the mean over positions of what a denoiser's trunk says of the finished text, [N, C].

    The text is x_t at t = 1 - h, h = 2^-10; long ones are cut at the model's length. No likelihood is asked for, so the
    network need not be a judge: a frozen parent does.
    """
    network, first = checkpoint.model, [] if checkpoint.bos_id is None else [checkpoint.bos_id]
    h = torch.tensor([_FINEST], dtype=torch.float64)

    @torch.no_grad()
    def embed(texts: Sequence[str]) -> Floats:
        rows = [(first + checkpoint.tokenizer.encode(text))[: checkpoint.length] for text in texts]
        found = [_pool(lambda row: network.trunk(row, 1 - h, h), row, len(first), device="cpu") for row in rows]
        width = max((len(row) for row in found), default=0)
        return np.array([row if len(row) else np.zeros(width) for row in found]).reshape(len(texts), width)

    return embed


def _pool(
    hidden: Callable[[Tensor], Tensor], row: Sequence[int], num_given: int, *, device: torch.device | str
) -> npt.NDArray[np.float64]:
    if len(row) <= num_given:
        return np.empty(0)
    features = hidden(torch.tensor([row], device=device))[0, num_given:]
    pooled: npt.NDArray[np.float64] = features.double().mean(0).cpu().numpy()
    return pooled
