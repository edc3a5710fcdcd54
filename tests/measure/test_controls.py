"""Negative controls: what each is made of, that they are functions of seed and sample, and the marking of blindness."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fsdfm.measure.controls import CONTROLS, Blindness, Material, find_blindness, sample_controls, sentence_ends
from fsdfm.measure.metrics import unigram_entropy_bits
from fsdfm.measure.results import Measured
from fsdfm.noise import Noise

VOCAB, LENGTH, STOP = 40, 64, 0
WHOLE_SET = ("phrases", "phrase-bank", "top-k", "mirror-k", "echo")  # match the entropy of all their rows together


@pytest.fixture(scope="module")
def material() -> Material:
    """Text with an order: token v is followed by v + 1 or v + 2, and every seventh token ends a sentence."""
    rng = np.random.default_rng(0)
    rows = np.empty((24, LENGTH), dtype=np.int32)
    for row in rows:
        row[0] = rng.integers(1, VOCAB)
        for i in range(1, LENGTH):
            row[i] = STOP if i % 7 == 6 else 1 + (row[i - 1] + rng.integers(1, 3)) % (VOCAB - 1)
    ends = np.zeros(VOCAB, dtype=bool)
    ends[STOP] = True
    return Material(rows, ends)


def grams(rows: np.ndarray, n: int) -> set[tuple[int, ...]]:
    return {tuple(row[i : i + n]) for row in rows.tolist() for i in range(len(row) - n + 1)}


def test_every_control_gives_rows_that_depend_on_seed_and_sample_only(material: Material) -> None:
    for control in CONTROLS.values():
        rows = control.sample(material, Noise(3, range(6)), LENGTH)
        assert rows.shape == (6, LENGTH)
        assert rows.dtype == np.int32
        assert np.isin(rows, material.rows).all()
        if control.name not in WHOLE_SET:
            assert (control.sample(material, Noise(3, [4]), LENGTH) == rows[4:5]).all(), control.name
        assert (control.sample(material, Noise(3, range(6)), LENGTH) == rows).all()
        changed = (control.sample(material, Noise(4, range(6)), LENGTH) != rows).any()
        assert changed == (control.name != "periodic-k"), control.name  # which has no randomness


def test_markov_text_has_only_real_ngrams_and_unigram_text_has_others(material: Material) -> None:
    noise = Noise(0, range(16))
    real = {n: grams(material.rows, n) for n in (2, 4)}
    assert grams(CONTROLS["markov-2"].sample(material, noise, LENGTH), 2) <= real[2]
    assert len(grams(CONTROLS["markov-2"].sample(material, noise, LENGTH), 4) - real[4]) > 0
    assert len(grams(CONTROLS["unigram"].sample(material, noise, LENGTH), 2) - real[2]) > 50


def test_markov_4_follows_the_law_of_the_text(material: Material) -> None:
    rows = CONTROLS["markov-4"].sample(material, Noise(0, range(64)), 32)
    known = grams(material.rows, 4)
    inside = [gram in known for gram in (tuple(r[i : i + 4]) for r in rows.tolist() for i in range(29))]
    assert np.mean(inside) > 0.95  # all but those behind a context that ends a row


def test_a_unigram_control_has_the_shares_of_the_text(material: Material) -> None:
    rows = CONTROLS["unigram"].sample(material, Noise(0, range(400)), LENGTH)
    want = np.bincount(material.tokens, minlength=VOCAB) / material.tokens.size
    have = np.bincount(rows.ravel(), minlength=VOCAB) / rows.size
    assert np.abs(have - want).max() < 5 * math.sqrt(0.15 / rows.size)


def test_sentences_are_real_and_in_another_order(material: Material) -> None:
    rows = CONTROLS["sentences"].sample(material, Noise(0, range(8)), LENGTH)
    real = {tuple(sentence) for sentence in material.sentences}
    for row in rows:
        stops = np.flatnonzero(row == STOP) + 1
        assert all(tuple(row[a:b]) in real for a, b in itertools.pairwise(stops))
    assert not grams(rows, 20) <= grams(material.rows, 20)


def test_stitched_spans_are_copies(material: Material) -> None:
    rows = CONTROLS["stitched"].sample(material, Noise(0, range(8)), LENGTH)
    stream = {tuple(material.tokens[i : i + 8]) for i in range(material.tokens.size - 7)}
    copied = [tuple(row[i : i + 8]) in stream for row in rows for i in range(LENGTH - 7)]
    assert np.mean(copied) > 0.4


def test_phrases_and_cycle_have_the_entropy_of_the_text(material: Material) -> None:
    for name in ("phrases", "cycle"):
        rows = CONTROLS[name].sample(material, Noise(0, range(64)), LENGTH)
        found = float(np.mean([unigram_entropy_bits(row) for row in rows]))
        assert found == pytest.approx(material.entropy_bits, abs=0.15), name


def test_a_cycle_and_an_echo_say_everything_twice(material: Material) -> None:
    size = round(2**material.entropy_bits)
    for row in CONTROLS["cycle"].sample(material, Noise(0, range(4)), LENGTH):
        assert len(set(row[:size].tolist())) == size
        assert (row[size:] == row[: LENGTH - size]).all()
    for row in CONTROLS["echo"].sample(material, Noise(0, range(4)), LENGTH):
        assert any((row[k:] == row[:-k]).all() for k in range(1, LENGTH // 2 + 1))


def by_frequency(material: Material) -> list[int]:
    values, counts = np.unique(material.tokens, return_counts=True)
    return [int(v) for v, _ in sorted(zip(values, counts, strict=True), key=lambda pair: (-pair[1], pair[0]))]


def test_top_k_draws_the_most_frequent_tokens_by_their_shares(material: Material) -> None:
    rows = CONTROLS["top-k"].sample(material, Noise(0, range(400)), LENGTH)
    used = sorted(set(rows.ravel().tolist()))
    k = len(used)
    assert set(used) == set(by_frequency(material)[:k])
    want = np.array([(material.tokens == token).sum() for token in used], dtype=float)
    have = np.array([(rows == token).mean() for token in used])
    assert np.abs(have - want / want.sum()).max() < 5 * math.sqrt(0.15 / rows.size)
    entropy = float(np.mean([unigram_entropy_bits(row) for row in rows]))
    assert entropy == pytest.approx(min(material.entropy_bits, entropy), abs=0.2)


def test_mirror_k_says_its_first_half_again(material: Material) -> None:
    for length in (64, 31):
        rows = CONTROLS["mirror-k"].sample(material, Noise(0, range(8)), length)
        half = length // 2
        assert (rows[:, half : 2 * half] == rows[:, :half]).all()
        assert len({tuple(row) for row in rows.tolist()}) == 8


def test_periodic_k_is_the_frequent_tokens_in_their_order(material: Material) -> None:
    rows = CONTROLS["periodic-k"].sample(material, Noise(0, range(3)), LENGTH)
    k = round(2**material.entropy_bits)
    assert rows.tolist() == [(by_frequency(material)[:k] * LENGTH)[:LENGTH]] * 3


def test_frequent_tokens_are_one_document(material: Material) -> None:
    """What parts documents is frequent, and a judge would read what follows it by itself."""
    first = by_frequency(material)[0]
    parted = Material(material.rows, material.ends, frozenset({first}))
    for name in ("top-k", "mirror-k", "periodic-k"):
        assert (CONTROLS[name].sample(material, Noise(0, range(4)), LENGTH) == first).any(), name
        assert not (CONTROLS[name].sample(parted, Noise(0, range(4)), LENGTH) == first).any(), name
    with pytest.raises(ValueError, match="nothing but borders of documents"):
        CONTROLS["top-k"].sample(Material(np.full((2, 8), 3), borders=frozenset({3})), Noise(0), 8)


def test_a_phrase_bank_draws_five_tokens_evenly_from_the_most_frequent(material: Material) -> None:
    rows = CONTROLS["phrase-bank"].sample(material, Noise(0, range(200)), 60)
    drawn: dict[tuple[int, ...], int] = {}
    for phrase in rows.reshape(-1, 5).tolist():
        drawn[tuple(phrase)] = drawn.get(tuple(phrase), 0) + 1
    bank = [tuple(phrase) for phrase in material.phrases(5).tolist()]
    assert set(drawn) <= set(bank[: len(drawn) + len(drawn) // 10 + 1])  # the most frequent ones, nearly all of them
    expected = rows.size / 5 / len(drawn)
    assert max(drawn.values()) < expected + 6 * math.sqrt(expected)  # not by frequency


def test_material_without_sentences_gives_the_other_controls() -> None:
    material = Material(np.arange(40, dtype=np.int32).reshape(2, 20))
    assert set(sample_controls(material, num=3, length=10)) == set(CONTROLS) - {"sentences"}
    with pytest.raises(ValueError, match="no whole sentence"):
        CONTROLS["sentences"].sample(material, Noise(0), 10)
    with pytest.raises(ValueError, match="length is 0"):
        CONTROLS["unigram"].sample(material, Noise(0), 0)
    with pytest.raises(ValueError, match="at least one row"):
        Material(np.empty((0, 4), dtype=np.int32))


def test_sentence_ends_look_behind_quotes() -> None:
    texts = ["a", ".", '!"', "? ", "Mr", "'", ".)"]
    assert sentence_ends(lambda ids: texts[ids[0]], len(texts)).tolist() == [
        False,
        True,
        True,
        True,
        False,
        False,
        True,
    ]


def exact(value: float) -> Measured:
    return Measured(value)


def test_a_metric_that_ranks_a_control_above_real_text_is_blind() -> None:
    real = {"token_perplexity": exact(10.0), "mauve": exact(0.9), "entropy_bits": exact(6.0)}
    models = {"8 calls": {"token_perplexity": exact(40.0), "mauve": exact(0.5), "entropy_bits": exact(6.3)}}
    controls = {
        "cycle": {"token_perplexity": exact(3.0), "mauve": exact(0.01), "entropy_bits": exact(6.01)},
        "unigram": {"token_perplexity": exact(900.0), "mauve": exact(0.02), "entropy_bits": exact(7.0)},
    }
    marks = {mark.metric: mark for mark in find_blindness(real, models, controls)}
    assert set(marks) == {"token_perplexity", "entropy_bits"}
    assert marks["token_perplexity"] == Blindness("token_perplexity", ("cycle",), {"8 calls": ("cycle",)})
    assert marks["entropy_bits"].above_real == ()
    assert marks["entropy_bits"].above_models == {"8 calls": ("cycle",)}
    assert "cycle above real text" in str(marks["token_perplexity"])
    assert Blindness.from_json(marks["token_perplexity"].to_json()) == marks["token_perplexity"]


def test_intervals_that_meet_are_no_blindness() -> None:
    real = {"token_perplexity": Measured(10.0, 9.0, 11.0)}
    near = {"a": {"token_perplexity": Measured(8.5, 7.5, 9.5)}}
    below = {"a": {"token_perplexity": Measured(8.0, 7.5, 8.9)}}
    assert find_blindness(real, {}, near) == []
    assert [mark.metric for mark in find_blindness(real, {}, below)] == ["token_perplexity"]


def test_nearness_looks_at_both_sides() -> None:
    real = {"distinct_2": exact(0.5)}
    model = {"m": {"distinct_2": Measured(0.6, 0.45, 0.7)}}  # may be at 0.5 itself
    control = {"c": {"distinct_2": Measured(0.5, 0.49, 0.51)}}
    assert find_blindness(real, model, control) == []
    model = {"m": {"distinct_2": Measured(0.6, 0.55, 0.7)}}
    assert find_blindness(real, model, control)[0].above_models == {"m": ("c",)}
