"""MAUVE: two halves of one set are close, shuffled text is far, and the result says how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fsdfm.data import Tokenizer
from fsdfm.measure import mauve as module
from fsdfm.measure.judges import shuffle_words
from fsdfm.measure.mauve import Mauve, compute_mauve, huggingface_features
from fsdfm.measure.rows import Reader
from fsdfm.measure.suite import MetricSuite

pytest.importorskip("mauve", reason="the extra `measure`")

RING = 12


def walk(index: int) -> str:
    """A text in which each word follows its neighbour on a ring, in one of two directions."""
    generator = np.random.default_rng(index)
    step = 1 if index % 2 else -1
    words = np.cumsum(generator.choice([step, step, step, 0, -step], 40)) + generator.integers(RING)
    return " ".join(str(word % RING) for word in words)


def transitions(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Features that know the order of words: how often each word follows each other one."""
    features = np.zeros((len(texts), RING, RING), dtype=np.float32)
    for i, text in enumerate(texts):
        words = [int(word) for word in text.split()]
        np.add.at(features[i], (words[:-1], words[1:]), 1)
    return features.reshape(len(texts), -1)


@pytest.mark.slow
def test_halves_are_close_and_shuffled_text_is_far() -> None:
    texts = [walk(i) for i in range(200)]
    halves = compute_mauve(transitions(texts[:100]), transitions(texts[100:]), seeds=range(2))
    assert halves.mean > 0.9
    assert halves.low <= halves.mean <= halves.high
    assert (halves.num_texts, halves.num_buckets, halves.seeds) == ((100, 100), 10, (0, 1))
    shuffled = [shuffle_words(text, index=i) for i, text in enumerate(texts[100:])]
    far = compute_mauve(transitions(texts[:100]), transitions(shuffled), seeds=range(2))
    assert far.high < 0.1
    again = compute_mauve(transitions(texts[:100]), transitions(texts[100:]), seeds=range(2))
    assert again == halves


def test_few_texts_are_clustered_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    import faiss

    kmeans, features = faiss.Kmeans, transitions([walk(i) for i in range(40)])
    compute_mauve(features[:20], features[20:], seeds=(0,))
    assert capfd.readouterr() == ("", "")
    assert faiss.Kmeans is kmeans


def test_mauve_in_deviations_of_real_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as real text is from real text for other real text, further for shuffled text, not known without both."""
    monkeypatch.setattr("fsdfm.measure.suite._MAUVE_SPLITS", 8)
    tokenizer = Tokenizer.bytes()

    def rows(texts: Sequence[str]) -> npt.NDArray[np.int32]:
        return np.array([tokenizer.encode(f"{text:<120}"[:120]) for text in texts], dtype=np.int32)

    real, spare, other = (rows([walk(i) for i in range(k, k + 40)]) for k in (0, 40, 80))
    far = rows([shuffle_words(walk(i), seed=i) for i in range(80, 120)])
    suite = MetricSuite(Reader(tokenizer), ("mauve",), real=real, features=transitions, spare=spare)
    near, away = suite.mauve(other, "near")["mauve_z"], suite.mauve(far, "far")["mauve_z"]
    assert abs(near.value) < 4 < away.value
    assert away.low <= away.value <= away.high
    assert away.facts["n"] == 40
    assert set(replace(suite, spare=None).mauve(other, "alone")) == {"mauve"}
    assert set(suite.mauve(other[:20], "fewer")) == {"mauve"}


def test_bad_requests() -> None:
    features = np.zeros((10, 3), dtype=np.float32)
    with pytest.raises(ValueError, match="of one D"):
        compute_mauve(features, features[:, :2])
    with pytest.raises(ValueError, match="several"):
        compute_mauve(features, features, seeds=())


def test_the_model_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for places, found in (([str(tmp_path)], True), ([], False), (None, False)):
        spec = SimpleNamespace(submodule_search_locations=places)
        monkeypatch.setattr(module.importlib.util, "find_spec", lambda _, spec=spec: spec)
        if found:
            assert module.find_minilm() == tmp_path / "model"
            continue
        with pytest.raises(ValueError, match="sentence features need the package"):
            module.find_minilm()


def test_features_that_cannot_be_had(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `judge`")
    with pytest.raises(ValueError, match="cannot be had"):
        huggingface_features(tmp_path)


def test_the_ends_of_the_seeds_are_told() -> None:
    found = Mauve(scores=(0.5, 0.9, 0.7), seeds=(0, 1, 2), num_texts=(10, 10), num_buckets=2)
    assert (found.low, found.high) == (0.5, 0.9)
    assert found.mean == pytest.approx(0.7)


def test_buckets_are_a_tenth_of_the_smaller_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_threads", nullcontext)
    monkeypatch.setattr(module, "_library", lambda: lambda *_, **said: SimpleNamespace(mauve=said["num_buckets"]))
    many, few = np.zeros((90, 2), dtype=np.float32), np.zeros((40, 2), dtype=np.float32)
    for sets in ((many, few), (few, many)):
        found = compute_mauve(*sets, seeds=[0])
        assert (found.num_buckets, found.scores) == (4, (4.0,))


def test_features_stand_in_the_order_of_their_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are embedded by length, here in twos; each one's feature is its own letter."""
    monkeypatch.setattr(module, "_TEXTS_AT_ONCE", 2)
    embed = object.__new__(module._Embedder)
    embed.max_tokens, embed.device, embed.pool = 8, "cpu", module._last_token
    embed.tokenizer = lambda texts, **_: {"input_ids": [[ord(letter) for letter in text] for text in texts]}
    embed.network = lambda input_ids, attention_mask: SimpleNamespace(last_hidden_state=input_ids[..., None].double())
    texts = ["aaaaa", "b", "ccc", "dddd", "ee"]
    assert embed(texts)[:, 0].tolist() == [ord(text[0]) for text in texts]
    assert embed.pool(torch.tensor([[[1.0], [2.0], [0.0]]]), torch.tensor([[1, 1, 0]])).tolist() == [[2.0]]
