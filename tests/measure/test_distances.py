"""Distances: closed forms, invariants, and that z is a standard number where the samples are real."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsdfm.measure.distances import (
    FUNCTION_WORDS,
    energy_distance,
    hidden_features,
    mmd,
    ngram_features,
    split_scale,
    standardise_features,
    style_features,
    trunk_features,
)
from fsdfm.measure.judges import TokenJudge
from fsdfm.noise import Noise
from tiny_models import random_bundle


def brute(a: np.ndarray, b: np.ndarray, f: object) -> float:
    cross = np.mean([f(x, y) for x in a for y in b])  # type: ignore[operator]
    own = [np.mean([f(p[i], p[j]) for i in range(len(p)) for j in range(len(p)) if i != j]) for p in (a, b)]  # type: ignore[operator]
    return float(2 * cross - own[0] - own[1])


def test_both_distances_by_enumeration() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 3)), rng.normal(size=(5, 3)) + 0.5
    assert energy_distance(a, b) == pytest.approx(brute(a, b, lambda x, y: np.linalg.norm(x - y)), abs=1e-12)
    kernel = brute(a, b, lambda x, y: math.exp(-np.sum((x - y) ** 2) / (2 * 1.3**2)))
    assert mmd(a, b, bandwidth=1.3) == pytest.approx(-kernel, abs=1e-12)


def test_the_energy_distance_of_two_normals_has_its_closed_form() -> None:
    """One dimension, N(0, 1) and N(m, 1): 2 E|N(m, 2)| - 2 E|N(0, 2)|."""
    rng, m = np.random.default_rng(0), 1.5
    a, b = rng.normal(size=(3000, 1)), rng.normal(size=(3000, 1))
    a, b = a - a.mean(), b - b.mean() + m
    s = math.sqrt(2)
    folded = s * math.sqrt(2 / math.pi) * math.exp(-(m**2) / 4) + m * math.erf(m / 2)
    assert energy_distance(a, b) == pytest.approx(2 * folded - 2 * s * math.sqrt(2 / math.pi), rel=0.06)


def test_the_median_of_distances_is_the_bandwidth() -> None:
    a, b = np.array([[0.0], [1.0]]), np.array([[3.0], [10.0]])
    assert mmd(a, b) == mmd(a, b, bandwidth=float(torch.tensor([1, 3, 10, 2, 9, 7.0]).median()))
    assert mmd(np.zeros((3, 2)), np.zeros((3, 2))) == 0
    with pytest.raises(ValueError, match="bandwidth is 0"):
        mmd(a, b, bandwidth=0)


def test_distances_are_symmetric_and_refuse_what_has_no_shape() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(9, 4)), rng.normal(size=(6, 4))
    for distance in (energy_distance, mmd):
        assert distance(a, b) == pytest.approx(distance(b, a), abs=1e-12)
    for bad in (np.zeros((1, 4)), np.zeros((5, 3)), np.zeros(4)):
        with pytest.raises(ValueError, match="shapes"):
            energy_distance(a, bad)


def test_z_of_real_text_is_standard_and_of_other_text_is_large() -> None:
    rng = np.random.default_rng(2)
    real, fresh = rng.normal(size=(200, 5)), rng.normal(size=(60, 50, 5))
    scale = split_scale(energy_distance, real, size=50, noise=Noise(0, range(60)))
    z = [scale.z(energy_distance(part, real[:50])) for part in fresh]
    assert abs(np.mean(z)) < 1.0
    assert 0.4 < np.std(z) < 2.5
    assert scale.z(energy_distance(fresh[0] + 1.0, real[:50])) > 10
    assert (scale.num_splits, scale.size) == (60, 50)
    assert split_scale(energy_distance, real, size=50, noise=Noise(0, range(60))) == scale
    for size, splits in ((101, 4), (1, 4), (50, 1)):
        with pytest.raises(ValueError, match="allowed are 2 to 100|two or more"):
            split_scale(energy_distance, real, size=size, noise=Noise(0, range(splits)))


def test_real_text_that_is_all_the_same_has_no_scale() -> None:
    scale = split_scale(energy_distance, np.ones((8, 2)), size=4, noise=Noise(0, range(3)))
    with pytest.raises(ValueError, match="the same text again"):
        scale.z(1.0)


def test_style_features_count_what_they_say() -> None:
    one, two = style_features(['The cat sat. "Oh!" the dog said.', ""])
    assert one[:4].tolist() == [7, 3, 3, pytest.approx((3 + 1 + 4) / 3)]
    the = 7 + len(".,!?;:'\"-()\n") + FUNCTION_WORDS.index("the")
    assert one[the] == pytest.approx(2 / 7)
    assert not two.any()
    assert style_features([]).shape[0] == 0


def test_ngram_profiles_are_hellinger_profiles() -> None:
    rows = [np.array([1, 2, 1, 2, 1]), np.array([1, 2, 1, 2, 1])[::-1], np.array([5])]
    features = ngram_features(rows, n=2, buckets=64)
    assert np.square(features).sum(1).tolist() == pytest.approx([1, 1, 0])
    assert sorted(set(np.square(features[0]).round(6))) == [0, 0.5]
    assert (features[0] == features[1]).all()
    assert (ngram_features(rows, n=1)[0] != ngram_features(rows, n=2)[0]).any()
    with pytest.raises(ValueError, match="n is 0"):
        ngram_features(rows, n=0)


def test_columns_are_scaled_by_real_text() -> None:
    real = np.array([[0.0, 5.0], [2.0, 5.0]])
    assert standardise_features(np.array([[3.0, 9.0]]), real).tolist() == [[2.0, 0.0]]


def judge(hidden: bool) -> TokenJudge:
    return TokenJudge(
        name="toy",
        nll=lambda tokens: torch.zeros(len(tokens), tokens.shape[1] - 1),
        encode=lambda texts: [[int(c) for c in text] for text in texts],
        max_length=4,
        vocab_size=10,
        bos_id=9,
        hidden=(lambda tokens: torch.stack((tokens, tokens**2), -1).float()) if hidden else None,
    )


def test_hidden_features_are_means_over_a_text_behind_its_first_token() -> None:
    found = hidden_features(judge(True))(["123", "", "12345"])
    assert found.tolist() == [[2.0, pytest.approx(14 / 3)], [0.0, 0.0], [2.0, pytest.approx(14 / 3)]]  # cut at 4 tokens
    with pytest.raises(ValueError, match="does not show its features"):
        hidden_features(judge(False))


def test_trunk_features_are_means_of_the_finished_text_behind_its_first_token() -> None:
    """A text's features are those of its tokens at t = 1 - h, whatever stands beside it, cut at the model's length."""
    bundle = random_bundle(length=6)
    found = trunk_features(bundle)(["abc", "", "abcdefgh"])
    assert found.shape == (3, bundle.model.config.width)
    h = torch.tensor([2.0**-10], dtype=torch.float64)
    rows = bundle.model.trunk(torch.tensor([bundle.tokenizer.encode("abc")]), 1 - h, h)
    assert found[0].tolist() == pytest.approx(rows[0].double().mean(0).tolist(), rel=1e-4)
    assert (found[1] == 0).all()
    assert (trunk_features(bundle)(["abcdef"])[0] == found[2]).all()


def test_the_scale_is_the_standard_deviation_of_a_sample() -> None:
    found: list[float] = []

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        found.append(float(np.abs(a.mean() - b.mean())))
        return found[-1]

    real = np.arange(12.0)[:, None] ** 2
    scale = split_scale(distance, real, size=4, noise=Noise(0, range(3)))
    assert scale.mean == pytest.approx(sum(found) / 3)
    assert scale.sd == pytest.approx((sum((value - scale.mean) ** 2 for value in found) / 2) ** 0.5)
