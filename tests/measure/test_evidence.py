"""Evidence: real text is near real text in its own units, other text is not, and n-grams tell both directions."""

from __future__ import annotations

import numpy as np
import pytest

from fsdfm.data import Tokenizer
from fsdfm.measure.evidence import Evidence, measure_checks
from fsdfm.measure.rows import Reader

LENGTH = 48
WORDS = ["the cat", "a dog", "ran home.", "was sad.", '"No," he said.', "She saw", "it fell.", "in the park"]


def rows(seed: int, count: int, words: list[str] = WORDS) -> np.ndarray:
    rng, tokenizer = np.random.default_rng(seed), Tokenizer.bytes()
    texts = [" ".join(rng.choice(words, size=24)) for _ in range(count)]
    return np.array([tokenizer.encode(text)[:LENGTH] for text in texts], dtype=np.int32)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return Evidence(
        Reader(Tokenizer.bytes()),
        rows(0, 60),
        features={"meaning": lambda texts: np.array([[len(t), t.count("a")] for t in texts])},
    )


def test_real_text_is_near_and_other_text_is_far(evidence: Evidence) -> None:
    near, far = evidence.measure(rows(1, 30)), evidence.measure(rows(2, 30, ["zebra", "xyz!", "QQ"]))
    for name in ("energy_style_z", "energy_ngram_z", "energy_meaning_z", "mmd_style_z", "mmd_ngram_z", "mmd_meaning_z"):
        assert abs(near[name].value) < 5, name
        assert far[name].value > 5.5, name
        assert near[name].low < near[name].value < near[name].high
    for name in ("ngram_recall_bits", "ngram_precision_bits"):
        assert far[name].value > near[name].value + 1
    for name in ("ngram_recall_z", "ngram_precision_z"):
        assert abs(near[name].value) < 4 < far[name].value, name
        assert near[name].facts["n"] == 30
    assert near["energy_style_z"].facts["n"] == 30


def test_what_is_left_of_real_text_is_measured_alike(evidence: Evidence) -> None:
    found = evidence.measure_real()
    assert abs(found["energy_ngram_z"].value) < 4
    assert found.keys() == evidence.measure(rows(3, 30)).keys()


def test_lost_variety_is_a_matter_of_recall(evidence: Evidence) -> None:
    one = evidence.measure(np.repeat(rows(4, 2), 15, axis=0))
    other = evidence.measure(rows(4, 30))
    assert one["ngram_recall_z"].value > 4
    assert one["ngram_recall_bits"].value > other["ngram_recall_bits"].value + 0.5
    assert one["ngram_precision_bits"].value < other["ngram_precision_bits"].value + 0.5


def test_checks_are_shares_of_texts_that_they_apply_to() -> None:
    found = measure_checks(["a.\nb", "a\nb", "c"])
    assert found["sentences_end"].value == 0.5
    assert found["sentences_end"].facts["n"] == 2
    assert "quotes_close" not in found


def test_too_little_real_text_is_refused() -> None:
    with pytest.raises(ValueError, match="need 8 or more"):
        Evidence(Reader(Tokenizer.bytes()), rows(0, 7))


def test_documents_of_a_row_are_checked_one_by_one() -> None:
    tokenizer = Tokenizer.bytes()
    story = "One day a boy called Tom saw a dog. The dog liked Tom."
    other = story.replace("Tom", "Ben")
    row = [*tokenizer.encode(story), tokenizer.eos_id, *tokenizer.encode(other)]
    rows = np.array([row] * 8, dtype=np.int32)
    assert Evidence(Reader(tokenizer), rows).measure(rows)["names_kept"].value == 1.0
