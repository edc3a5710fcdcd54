"""BrierLM: unbiased against the law it estimates, largest for the true law, by enumeration on a small one."""

from __future__ import annotations

import numpy as np
import pytest

from fsdfm.measure.brier import brier_lm, brier_n, brier_terms


def draw(rng: np.random.Generator, law: np.ndarray, contexts: int, samples: int) -> np.ndarray:
    """Continuations of two tokens from a law over 3 x 3: [contexts, samples, 2]."""
    flat = rng.choice(9, size=(contexts, samples), p=law.ravel())
    return np.stack((flat // 3, flat % 3), -1)


@pytest.mark.parametrize("samples", [2, 5])
def test_it_estimates_the_brier_score_of_the_law(samples: int) -> None:
    rng = np.random.default_rng(0)
    law, truth_law = rng.dirichlet(np.ones(9)).reshape(3, 3), rng.dirichlet(np.ones(9)).reshape(3, 3)
    x, y = draw(rng, law, 40000, samples), draw(rng, truth_law, 40000, 1)[:, 0]
    for n, p, q in ((1, law.sum(1), truth_law.sum(1)), (2, law.ravel(), truth_law.ravel())):
        terms = brier_terms(x, y, n)
        assert terms.mean() == pytest.approx(float(2 * p @ q - p @ p), abs=4 * terms.std() / 200)
        assert brier_n(x, y, n) == terms.mean()


def test_the_true_law_scores_best() -> None:
    rng = np.random.default_rng(1)
    law = np.array([0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.01]).reshape(3, 3)
    sharp, flat = law**2 / (law**2).sum(), np.full((3, 3), 1 / 9)
    y = draw(rng, law, 20000, 1)[:, 0]
    for n in (1, 2):
        scores = [brier_n(draw(rng, p, 20000, 2), y, n) for p in (law, sharp, flat)]
        assert scores[0] > max(scores[1:])


def test_copies_of_one_sample_are_no_variety() -> None:
    y = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    right = np.stack((y, y), 1)
    perfect = brier_lm(right, y)
    assert (perfect.value, perfect.low, perfect.high) == (100.0, 100.0, 100.0)
    wrong = np.zeros_like(right)
    assert brier_terms(wrong, y, 1).tolist() == [-1.0, -1.0]
    assert brier_lm(wrong, y).value == 0.0


def test_shapes_are_checked() -> None:
    y = np.zeros((3, 4), dtype=int)
    with pytest.raises(ValueError, match="samples >= 2"):
        brier_lm(np.zeros((3, 1, 4), dtype=int), y)
    with pytest.raises(ValueError, match="n is 5"):
        brier_terms(np.zeros((3, 2, 4), dtype=int), y, 5)
