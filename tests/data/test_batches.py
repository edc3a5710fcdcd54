"""Sample k depends on (seed, k) alone, and an epoch holds every block once."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdfm.data.batches import Blocks, batches, permute
from fsdfm.data.corpus import Corpus, Header

EOS = 9999


def corpus_of(num_tokens: int, starts: list[int] | None = None) -> Corpus:
    """A corpus whose token i is i, so that a row says where it comes from."""
    header = Header(1, True, "", EOS + 1, EOS, "<u4", {}, num_tokens=num_tokens)
    return Corpus(
        Path(), header, np.arange(num_tokens, dtype=np.uint32), starts=np.array(starts or [0], dtype=np.int64)
    )


def shuffle(size: int, seed: int, epoch: int) -> list[int]:
    return permute(torch.arange(size), size, torch.full((size,), epoch), seed=seed).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_shuffle_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(shuffle(size, seed, epoch)) == list(range(size))


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {tuple(shuffle(50, seed, epoch)) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1, 2**32, 2**33)}
    assert len(orders) == 16


@pytest.mark.parametrize("size", [3, 5, 8])
def test_all_places_are_equally_likely(size: int) -> None:
    epochs = torch.arange(4000)
    for index in range(size):
        places = permute(torch.full((4000,), index), size, epochs, seed=7)
        counts = torch.bincount(places, minlength=size)
        chi_squared = float(((counts - 4000 / size) ** 2 / (4000 / size)).sum())
        assert chi_squared < 35, "p < 1e-5 even with seven degrees of freedom"


def test_neighbours_are_torn_apart() -> None:
    order = torch.tensor(shuffle(5000, 1, 0))
    assert int((order.diff().abs() == 1).sum()) < 12  # 2 are expected
    assert abs(float(torch.corrcoef(torch.stack([order.double(), torch.arange(5000.0).double()]))[0, 1])) < 0.06


def test_permute_of_huge_sizes_and_bad_arguments() -> None:
    index = torch.arange(100)
    values = permute(index, 2**61, torch.zeros(100, dtype=torch.int64), seed=0)
    assert len(set(values.tolist())) == 100
    assert 2**58 < int(values.max()) < 2**61
    with pytest.raises(ValueError, match="an index is outside 0 <= index < 99"):
        permute(index, 99, index, seed=0)
    with pytest.raises(ValueError, match="size is 0; allowed are 1"):
        permute(index, 0, index, seed=0)


@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_block_once(num_tokens: int, length: int, epoch: int) -> None:
    length = min(length, num_tokens)
    blocks = Blocks(corpus_of(num_tokens), length, seed=3)
    n = len(blocks)
    batch = blocks.rows(range(epoch * n, (epoch + 1) * n))
    assert batch.x_1.dtype == torch.int64
    assert batch.x_1.shape == (n, length)
    assert bool(batch.real.all())
    assert sorted(batch.x_1[:, 0].tolist()) == [i * length for i in range(n)]
    assert bool((batch.x_1 == batch.x_1[:, :1] + torch.arange(length)).all())


def mixed(seed: int = 5) -> Blocks:
    """Rows of all kinds, in epochs of 25."""
    shares = {"short_share": 0.5, "document_starts": 0.5, "given_share": 0.5}
    return Blocks(corpus_of(403, [0, 7, 90, 200, 395]), 16, seed, shortest=3, **shares)


@given(
    batch_size=st.integers(1, 8), num_ranks=st.integers(1, 4), start=st.integers(0, 60), seed=st.integers(0, 2**64 - 1)
)
@settings(max_examples=15, deadline=None)
def test_a_sample_depends_on_its_index_only(batch_size: int, num_ranks: int, start: int, seed: int) -> None:
    blocks, batch_size = mixed(seed), batch_size * num_ranks
    ranks = [batches(blocks, batch_size, start, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    rows: list[tuple[Tensor, Tensor, Tensor, int]] = []
    for together in islice(zip(*ranks, strict=True), 4):
        for batch in together:
            assert batch.next_sample == start + len(rows) // batch_size * batch_size + batch_size
            assert batch.given is not None
            rows += zip(batch.x_1, batch.real, batch.given, batch.samples.tolist(), strict=True)
    assert sorted(index for *_, index in rows) == list(range(start, start + 4 * batch_size))
    for x_1, real, given_, index in rows:
        alone = blocks.rows([index])
        assert torch.equal(alone.x_1[0], x_1)
        assert torch.equal(alone.real[0], real)
        assert alone.given is not None
        assert torch.equal(alone.given[0], given_)


def test_resuming_needs_one_integer() -> None:
    whole = list(islice(batches(mixed(), 6), 20))
    for cut in (1, 7, 13):
        rest = islice(batches(mixed(), 6, whole[cut - 1].next_sample), 20 - cut)
        for old, new in zip(whole[cut:], rest, strict=True):
            assert torch.equal(old.x_1, new.x_1)
            assert torch.equal(old.samples, new.samples)
    regrouped = torch.cat([batch.x_1 for batch in islice(batches(mixed(), 4), 30)])
    assert torch.equal(regrouped, torch.cat([batch.x_1 for batch in whole]))


def test_short_rows_end_in_eos_and_say_so() -> None:
    batch = mixed().rows(range(2000))
    lengths = batch.real.sum(dim=1)
    assert torch.equal(batch.real, torch.arange(16) < lengths[:, None])
    assert bool((batch.x_1[~batch.real] == EOS).all())
    assert bool((batch.x_1[batch.real] < 403).all())
    short = lengths < 16
    assert abs(float(short.double().mean()) - 0.5) < 0.05
    counts = torch.bincount(lengths[short])
    assert len(counts) == 16
    assert int(counts[:3].sum()) == 0
    assert int(counts[3:].min()) > 40  # 77 are expected of each of 13 lengths


def test_a_share_of_rows_starts_at_documents() -> None:
    starts = [1, 7, 90, 203, 387, 395]
    rows = Blocks(corpus_of(403, starts), 16, 5, document_starts=0.4).rows(range(4000))
    first = rows.x_1[:, 0]
    assert bool(rows.real.all())
    at_start = torch.isin(first, torch.tensor(starts))
    assert abs(float(at_start.double().mean()) - 0.4) < 0.03
    assert sorted(set(first[at_start].tolist())) == [1, 7, 90, 203, 387], "395 has no block after it"
    assert bool((first[~at_start] % 16 == 0).all())
    counts = torch.bincount(first[at_start])
    assert int(counts[[1, 7, 90, 203, 387]].min()) > 250  # 320 are expected of each


def test_a_share_of_rows_is_given_a_prompt_or_a_frame() -> None:
    rows = mixed().rows(range(4000))
    given_ = rows.given
    assert given_ is not None
    asked = ~given_
    first, last = asked.int().argmax(1), 15 - asked.flip(1).int().argmax(1)
    assert bool((asked.sum(1) == last - first + 1).all()), "one gap, of a token or more"
    assert bool(rows.real[torch.arange(4000), first].all()), "which begins in the text"
    told = given_.any(1)
    framed = given_[:, -1] & rows.real.all(1)
    assert abs(float(told.double().mean()) - 0.5) < 0.08, "a few prompts are empty"
    assert abs(float(framed.double().mean()) - 0.5 * 0.5 * 0.5) < 0.03
    whole = told & rows.real.all(1) & ~framed
    prompts = torch.bincount(first[whole], minlength=16)[1:]
    assert int(prompts.min()) > 0, "prompts of every length"
    assert int(prompts[:5].sum()) > 3 * int(prompts[-5:].sum()), "short ones, the first of two cuts, more often"
    assert Blocks(corpus_of(403), 16).rows(range(4)).given is None


def test_choices_are_independent_of_each_other() -> None:
    batch = mixed().rows(range(4000))
    short = ~batch.real.all(dim=1)
    at_start = batch.x_1[:, 0] % 16 != 0
    both = float((short & at_start).double().mean())
    assert abs(both - float(short.double().mean()) * float(at_start.double().mean())) < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length is 0; allowed are 1 <= length <= 100"),
        ({"length": 101}, "length is 101; allowed are 1 <= length <= 100, the tokens of the corpus: take shorter"),
        ({"seed": -1}, "seed is -1"),
        ({"short_share": 1.1}, "short_share is 1.1; allowed are 0 <= short_share <= 1"),
        ({"document_starts": float("nan")}, "document_starts is nan"),
        ({"given_share": -0.1}, "given_share is -0.1; allowed are 0 <= given_share <= 1"),
        ({"short_share": 0.1, "shortest": 10}, "shortest is 10; allowed are 1 <= shortest < 10"),
        ({"short_share": 0.1, "shortest": 0}, "shortest is 0; allowed"),
        ({"document_starts": 0.1, "starts": [95]}, "no document has 10 tokens after its start"),
    ],
)
def test_blocks_say_what_they_allow(options: dict, message: str) -> None:
    options = {"length": 10, "seed": 0, **options}
    corpus = corpus_of(100, options.pop("starts", None))
    with pytest.raises(ValueError, match=message):
        Blocks(corpus, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0 in 1 portions over 1 processes; allowed are positive multiples of 1"),
        (
            {"batch_size": 6, "num_ranks": 4},
            "batch_size is 6 in 1 portions over 4 processes; allowed are positive multiples of 4",
        ),
        ({"batch_size": 4, "num_ranks": 0}, "batch_size is 4"),
        ({"batch_size": 4, "num_ranks": 2, "rank": 2}, "rank is 2; allowed are 0 <= rank < 2"),
        ({"batch_size": 4, "start": -1}, "start is -1"),
    ],
)
def test_batches_say_what_they_allow_before_the_first(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(mixed(), **options)


def test_no_rows_are_no_rows() -> None:
    assert mixed().rows([]).x_1.shape == (0, 16)


def test_tokens_and_starts_that_nobody_wrote_are_damage():
    """A folder's header may be whole and its files not: such tokens went into the network's table as they were."""
    corpus = corpus_of(64)
    few = Corpus(corpus.folder, replace(corpus.header, vocab_size=40), corpus.tokens, starts=corpus.starts)
    with pytest.raises(ValueError, match="holds the token .*, and tokens are below 40"):
        Blocks(few, 16).rows(range(4))
    with pytest.raises(ValueError, match="a document begins at -9"):
        Blocks(corpus_of(64, [-9]), 16, document_starts=1.0).rows([0])
