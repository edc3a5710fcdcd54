"""The scoring loop: exact likelihoods, windows, prefixes, batches; a judge's perplexity on its own samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fsdfm.measure import bootstrap_ratio
from fsdfm.measure.judges import Scores, TokenJudge, scoring
from fsdfm.model import CausalConfig, CausalModel
from fsdfm.noise import Noise

LETTERS = "abcd"
BOS = len(LETTERS)


def encode(texts: Sequence[str]) -> list[list[int]]:
    """A character a token."""
    return [[LETTERS.index(letter) for letter in text] for text in texts]


def bigram_nll(tokens: Tensor) -> Tensor:
    """A network that looks at one token only: what it says does not depend on the window."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    return -table[tokens[:, :-1], tokens[:, 1:]]


def bigram_judge(max_length: int = 64, bos_id: int | None = BOS) -> TokenJudge:
    return TokenJudge("bigram", bigram_nll, encode, max_length=max_length, vocab_size=5, bos_id=bos_id)


def causal_network() -> CausalModel:
    """A model that gives the four letters real differences, and no probability to the first token's id."""
    config = CausalConfig(vocab_size=5, width=16, num_blocks=2, num_heads=2, style="paper", max_length=8, dropout=0.0)
    model = CausalModel(config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
        model.head.bias[BOS] = -1e4
    return model


def causal_judge() -> TokenJudge:
    return TokenJudge("own", causal_network().nll, encode, max_length=8, vocab_size=5, bos_id=BOS)


def all_texts(length: int) -> list[str]:
    return ["".join(letters) for letters in itertools.product(LETTERS, repeat=length)]


def test_the_likelihoods_of_all_texts_sum_to_one() -> None:
    scores = causal_judge().score(all_texts(4))
    assert float(torch.exp(-scores.nll).sum()) == pytest.approx(1, abs=1e-5)
    assert scores.num_tokens.unique().tolist() == [4]


def test_a_judges_perplexity_on_its_own_samples_is_its_entropy() -> None:
    judge, length, rows = causal_judge(), 5, 3000
    law = torch.exp(-judge.score(all_texts(length)).nll)
    entropy = -float((law * law.log()).sum()) / length
    drawn = causal_network().generate(torch.full((rows, 1), BOS), length + 1, Noise(0, range(rows)))
    scores = judge.score(["".join(LETTERS[i] for i in row) for row in drawn[:, 1:].tolist()])
    interval = bootstrap_ratio(scores.nll, scores.num_tokens)
    assert interval.low < entropy < interval.high
    assert interval.high - interval.low < 0.05 < math.log(4) - entropy  # and it is no uniform law
    assert scores.token_perplexity == pytest.approx(math.exp(entropy), rel=0.02)


@pytest.mark.parametrize("max_length", [2, 3, 8, 64])
@pytest.mark.parametrize("bos_id", [BOS, None])
def test_windows_score_every_token_once(max_length: int, bos_id: int | None) -> None:
    texts = ["".join(LETTERS[i * i % 7 % 4] for i in range(n)) for n in (40, 1, 0, 9, 23)]
    scores = bigram_judge(max_length, bos_id).score(texts)
    first = [] if bos_id is None else [bos_id]
    for i, ids in enumerate(encode(texts)):
        tokens = torch.tensor([first + ids], dtype=torch.int64)
        expected = float(bigram_nll(tokens).double().sum()) if tokens.shape[1] > 1 else 0.0
        assert float(scores.nll[i]) == pytest.approx(expected, abs=1e-5)
        assert int(scores.num_tokens[i]) == max(0, tokens.shape[1] - 1)


def test_a_window_shows_half_a_context_or_all_there_is() -> None:
    contexts: list[list[float]] = []

    def count_context(tokens: Tensor) -> Tensor:
        """The 'nll' of a token is the number of tokens before it in the window."""
        assert tokens.shape[1] <= 11
        contexts.append(tokens.tolist())
        return torch.arange(1.0, tokens.shape[1]).expand(len(tokens), -1)

    judge = replace(bigram_judge(10), nll=count_context)
    # 30 tokens after the first: 10 with 1 .. 10 before them, then strides of 5 with 6 .. 10 before each.
    assert float(judge.score(["a" * 30]).nll[0]) == sum(range(1, 11)) + 4 * sum(range(6, 11))


@pytest.mark.parametrize("max_length", [4, 64])
def test_a_continuation_is_scored_given_its_prefix(max_length: int) -> None:
    judge = bigram_judge(max_length)
    prefixes, texts = ["abcabca", "", "dd"], ["bbdac" * 4, "abc", ""]
    given = judge.score(texts, prefixes=prefixes)
    whole = judge.score([a + b for a, b in zip(prefixes, texts, strict=True)])
    before = judge.score(prefixes)
    torch.testing.assert_close(given.nll, whole.nll - before.nll)
    assert given.num_tokens.tolist() == [20, 3, 0]
    with pytest.raises(ValueError, match="2 prefixes for 3 texts"):
        judge.score(texts, prefixes=prefixes[:2])


def test_a_token_across_the_border_counts_for_the_text() -> None:
    pairs = {"ab": 0, "a": 1, "b": 2, "c": 3}

    def greedy(texts: Sequence[str]) -> list[list[int]]:
        rows = []
        for text in texts:
            row = []
            while text:
                piece = text[:2] if text[:2] in pairs else text[:1]
                row, text = [*row, pairs[piece]], text[len(piece) :]
            rows.append(row)
        return rows

    judge = replace(bigram_judge(), encode=greedy)
    scores = judge.score(["bc"], prefixes=["ca"])  # c ab c: the prefix alone is c a, so only its c is given
    assert scores.num_tokens.tolist() == [2]
    assert float(scores.nll[0]) == pytest.approx(float(bigram_nll(torch.tensor([[3, 0, 3]])).sum()))


def test_batches_and_order_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = causal_judge()
    texts = ["".join(LETTERS[(i * k + i) % 4] for i in range(1 + k % 20)) for k in range(50)]
    whole = judge.score(texts)
    state = torch.get_rng_state()
    monkeypatch.setattr(scoring, "_FLOATS_AT_ONCE", 100)
    monkeypatch.setattr(scoring, "_TEXTS_AT_ONCE", 7)
    torch.testing.assert_close(judge.score(texts).nll, whole.nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(judge.score(texts[::-1]).nll.flip(0), whole.nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(judge.score(texts).nll, judge.score(texts).nll)
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []

    def watch(tokens: Tensor) -> Tensor:
        shapes.append((tokens.shape[0], tokens.shape[1]))
        return bigram_nll(tokens)

    monkeypatch.setattr(scoring, "_FLOATS_AT_ONCE", 5 * 60)
    replace(bigram_judge(), nll=watch).score(["ab" * (1 + k % 9) for k in range(40)])
    assert max(rows * length for rows, length in shapes) <= 60


def test_nothing_to_score() -> None:
    judge = bigram_judge()
    assert len(judge.score([])) == 0
    assert judge.score([""]).num_tokens.tolist() == [0]
    assert bigram_judge(bos_id=None).score(["a"]).num_tokens.tolist() == [0]
    with pytest.raises(ValueError, match="at least 2"):
        bigram_judge(max_length=1)
    with pytest.raises(ValueError, match="one number per text"):
        Scores(torch.zeros(2), torch.zeros(3))
    assert judge.facts["context"] == 64
