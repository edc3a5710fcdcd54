"""Defects: each does what it says and nothing else; metrics see those that they must see."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fsdfm.measure.defects import DEFECTS, Sight, find_sights, inject
from fsdfm.noise import Noise

NAMES = ["Lily", "Tom", "Ben", "Anna", "Max", "Sue"]
PLACES = ["park", "house", "wood", "lake", "shop", "school", "farm", "beach"]
THINGS = ["ball", "cat", "dog", "hat", "boat", "cake", "book", "drum", "kite"]


def story(rng: np.random.Generator) -> str:
    name, place, thing = (rng.choice(part) for part in (NAMES, PLACES, THINGS))
    lines = [
        f"One day {name} was in the {place}.",
        f"She saw a {thing}!",
        f"The {thing} was {rng.choice(['big', 'small', 'red', 'old'])}.",
        f'"He has a {rng.choice(THINGS)}," said {rng.choice(NAMES)}.',
        f"They were {rng.choice(['happy', 'sad', 'tired'])} at last.",
    ]
    return "\n\n".join((" ".join(lines[:2]), " ".join(lines[2:])))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = np.random.default_rng(0)
    return [story(rng) for _ in range(80)]


@pytest.fixture(scope="module")
def training() -> list[str]:
    rng = np.random.default_rng(1)
    return [story(rng) + " The end." for _ in range(80)]


def test_strength_zero_changes_nothing_and_a_seed_says_all(texts: list[str], training: list[str]) -> None:
    noise = Noise(0, range(len(texts)))
    for name in DEFECTS:
        assert inject(name, texts, strength=0.0, noise=noise, training=training) == texts
        once = inject(name, texts, strength=0.5, noise=noise, training=training)
        assert once == inject(name, texts, strength=0.5, noise=noise, training=training)
        assert once != texts
        assert len(once) == len(texts)


def test_repetition_says_sentences_again(texts: list[str]) -> None:
    (found,) = inject("repetition", texts[:1], strength=1.0, noise=Noise(0, [0]))
    first = texts[0].split(".")[0] + "."
    assert found.count(first) == 5


def test_wrong_agreement_swaps_and_nothing_else() -> None:
    (found,) = inject("wrong agreement", ["He was a cat. They were here. Wash it."], strength=1.0, noise=Noise(0, [0]))
    assert found == "She were an cat. They was here. Wash it."


def test_shuffled_sentences_are_the_same_sentences(texts: list[str]) -> None:
    found = inject("shuffled sentences", texts, strength=1.0, noise=Noise(0, range(len(texts))))
    for before, after in zip(texts, found, strict=True):
        assert Counter(before.split()) == Counter(after.split())
        assert before.count("\n\n") == after.count("\n\n") == 1
    assert np.mean([a != b for a, b in zip(texts, found, strict=True)]) > 0.9


def test_lost_variety_and_copying_have_their_share(texts: list[str], training: list[str]) -> None:
    noise = Noise(0, range(len(texts)))
    poor = inject("lost variety", texts, strength=0.5, noise=noise)
    assert sum(a != b for a, b in zip(texts, poor, strict=True)) == 40
    assert set(poor) <= set(texts)
    copied = inject("copying", texts, strength=0.25, noise=noise, training=training)
    assert sum(text in training for text in copied) == 20
    with pytest.raises(ValueError, match="copying needs 80"):
        inject("copying", texts, strength=0.25, noise=noise)


def distinct(texts: list[str]) -> float:
    return len(set(texts)) / len(texts)


def mean_length(texts: list[str]) -> float:
    return float(np.mean([len(text) for text in texts]))


def test_a_metric_sees_what_it_measures(texts: list[str], training: list[str]) -> None:
    metrics = {"distinct texts": distinct, "length": mean_length}
    sights = find_sights(metrics, texts, training, noise=Noise(0, range(30)))  # type: ignore[arg-type]
    assert sights["distinct texts", "lost variety"].seen_from == 0.1
    assert sights["distinct texts", "shuffled sentences"].seen_from is None
    assert sights["length", "shuffled sentences"].seen_from is None
    assert sights["length", "copying"].seen_from is not None  # those texts are longer
    without = find_sights(metrics, texts, [], noise=Noise(0, range(30)))  # type: ignore[arg-type]
    assert ("length", "copying") not in without


def test_seen_from_wants_every_larger_strength_too() -> None:
    assert Sight({0.1: 5.0, 0.3: 1.0, 1.0: 9.0}).seen_from == 1.0
    assert Sight({0.1: -5.0, 0.3: 7.0}).seen_from == 0.1
    assert Sight({0.1: 5.0, 1.0: 0.0}).seen_from is None


def test_what_is_no_defect_is_refused(texts: list[str]) -> None:
    noise = Noise(0, range(len(texts)))
    with pytest.raises(ValueError, match="allowed are repetition"):
        inject("typos", texts, strength=0.1, noise=noise)
    with pytest.raises(ValueError, match="strength is 2"):
        inject("repetition", texts, strength=2, noise=noise)
    with pytest.raises(ValueError, match="one per text"):
        inject("repetition", texts, strength=0.5, noise=Noise(0, [1]))
    with pytest.raises(ValueError, match="four and two"):
        find_sights({}, texts[:2], [], noise=noise)
