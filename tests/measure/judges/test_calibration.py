"""The scale of a judge: real text against its own words in random order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdfm.measure.judges import TokenJudge, calibrate, calibration, shuffle_words

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [[WORDS.index(word) for word in text.split()] for text in texts]


def counts_upwards(tokens: Tensor) -> Tensor:
    """A language in which every number is followed by the next one."""
    right = tokens[:, 1:] == (tokens[:, :-1] + 1) % 8
    return torch.where(right, 0.1, 3.0)


def test_shuffled_text_is_the_far_end_of_the_scale() -> None:
    judge = TokenJudge("counter", counts_upwards, encode, max_length=16, vocab_size=8)
    texts = [" ".join(WORDS[i % 8] for i in range(k, k + 14)) for k in range(10)]
    scale = calibrate(judge, texts)
    assert scale.real.token_perplexity == pytest.approx(2.718281828**0.1, rel=1e-5)
    assert scale.contrast > 8
    assert torch.equal(calibrate(judge, texts).shuffled.nll, scale.shuffled.nll)
    assert not torch.equal(calibrate(judge, texts, seed=1).shuffled.nll, scale.shuffled.nll)
    assert str(scale).startswith("counter: real text 1.11, word-shuffled")
    with pytest.raises(ValueError, match="no word"):
        calibrate(judge, ["", " "])


def test_shuffling_keeps_the_words() -> None:
    text = "a  b\nc a d e f g"
    shuffled = shuffle_words(text, seed=3)
    assert sorted(shuffled.split(" ")) == sorted(text.split())
    assert shuffled != " ".join(text.split())
    assert shuffle_words(text, seed=3, index=1) != shuffled


def test_a_file_of_llama2c_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(calibration, "llama2c_judge", lambda file, device: asked.append(str(file)))
    calibration.make_judge("some/stories42M.bin")
    calibration.make_judge("stories15m:other.model")
    assert asked == ["some/stories42M.bin", "other.model"]
