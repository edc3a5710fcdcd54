"""The chain against brute force: every text of a small vocabulary, its probability written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from fsdfm.flow import (
    Chain,
    ChainCRF,
    Filter,
    Grid,
    Independent,
    MaskSource,
    MixturePath,
    SamplerState,
    Transitions,
    UniformSource,
    advance,
    pmi_transitions,
    sample,
)
from fsdfm.flow.crf import _follow, _follow_by_doubling
from fsdfm.flow.rule import RULES
from fsdfm.noise import Noise

V, L, RANK = 5, 4, 3


def fields(seed: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, L, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def links(seed: int = 1, size: int = V) -> Transitions:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, RANK, generator=generator, dtype=torch.float64) for _ in range(2))
    return left, right


def every_text(size: int = V) -> Tensor:
    return torch.tensor(list(itertools.product(range(size), repeat=L)))


def brute_force(
    u: Tensor, tables: Transitions, *, candidates: int, temperature: float = 1.0, gates: Tensor | None = None
) -> Tensor:
    """log p of every text under one row of fields [L, V] and gates [L-1, r], by the definition."""
    left, right = tables
    gates = torch.zeros(L - 1, RANK, dtype=u.dtype) if gates is None else gates
    log_p = torch.log_softmax(u, -1)
    linked = [set(row.topk(candidates).indices.tolist()) for row in log_p]
    scores = []
    for text in every_text().tolist():
        score = sum(log_p[i, token] for i, token in enumerate(text))
        for i, (a, b) in enumerate(itertools.pairwise(text)):
            if a in linked[i] and b in linked[i + 1]:
                score = score + ((1 + gates[i]) * left[a]) @ right[b] / temperature
        scores.append(score)
    return torch.log_softmax(torch.stack(scores), 0)


@pytest.mark.parametrize("candidates", [1, 3, V, 2 * V])
def test_every_text_has_its_probability(candidates: int) -> None:
    u, tables = fields(), links()
    chain = Chain.of(u, tables, candidates=candidates)
    texts = every_text()
    for row in range(len(u)):
        one = Chain.of(u[row : row + 1].expand(len(texts), L, V), tables, candidates=candidates)
        found = one.log_prob(texts)
        torch.testing.assert_close(found, brute_force(u[row], tables, candidates=min(candidates, V)))
        assert float(found.exp().sum()) == pytest.approx(1, abs=1e-12)
    assert chain.log_prob(texts[:2]).shape == (2,)


def gates_of(seed: int = 7, batch: int = 2) -> Tensor:
    return torch.randn(batch, L - 1, RANK, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("candidates", [3, V])
def test_dynamic_transitions_have_the_law_of_their_gates(candidates: int) -> None:
    u, tables, gates, texts, n = fields(), links(), gates_of(), every_text(), 20_000
    for row in range(len(u)):
        log_p = brute_force(u[row], tables, candidates=candidates, gates=gates[row])
        own = gates[row].expand(len(texts), L - 1, RANK)
        chain = Chain.of(u[row].expand(len(texts), L, V), tables, candidates=candidates, gates=own)
        torch.testing.assert_close(chain.log_prob(texts), log_p)
        many = Chain.of(u[row].expand(n, L, V), tables, candidates=candidates, gates=own[:1].expand(n, -1, -1))
        drawn = many.draw(torch.rand(n, L, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
        place = (drawn * torch.tensor([V**3, V**2, V, 1])).sum(-1)
        assert _p_value(torch.bincount(place, minlength=len(log_p)).double(), log_p.exp() * n) > 1e-4
        p, marginals = log_p.exp(), chain.log_marginals()[0].exp()
        expected = torch.stack([p[texts[:, 2] == token].sum() for token in range(V)])
        torch.testing.assert_close(marginals[2], expected)


def test_a_posterior_with_gates_is_its_chains_and_can_be_parted() -> None:
    u, tables, gates, texts = fields(), links(), gates_of(), every_text()[[3, 77]]
    posterior = ChainCRF(Independent.of_logits(u), tables, torch.full((2, L), -1), gates=gates)
    expected = Chain.of(u, tables, gates=gates).log_prob(texts)
    torch.testing.assert_close(posterior.log_prob(texts), expected)
    torch.testing.assert_close(posterior.part(1, 1).log_prob(texts[1:]), expected[1:])
    uniform = Noise(0, range(2)).uniform(3, L)
    both = posterior.draw(torch.arange(2), uniform)
    assert torch.equal(posterior.part(1, 1).draw(torch.tensor([0]), uniform[1:]), both[1:])
    found = torch.cat([tile for _, tile, _ in posterior.marginals(torch.arange(2 * L))])
    torch.testing.assert_close(found, Chain.of(u, tables, gates=gates).log_marginals().flatten(0, 1))


@pytest.mark.parametrize("length", [1, 2, 3, 9, 64])
def test_moves_are_followed_in_rounds_as_one_by_one(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    first = torch.randint(6, (5,), generator=generator)
    moves = torch.randint(6, (5, length - 1, 6), generator=generator)
    assert torch.equal(_follow_by_doubling(first, moves), _follow(first, moves))


def test_marginals_are_sums_over_texts() -> None:
    u, tables = fields(), links()
    found = Chain.of(u, tables, candidates=3).log_marginals().exp()
    texts = every_text()
    for row in range(len(u)):
        p = brute_force(u[row], tables, candidates=3).exp()
        for i in range(L):
            expected = torch.stack([p[texts[:, i] == token].sum() for token in range(V)])
            torch.testing.assert_close(found[row, i], expected)


def test_without_transitions_it_is_the_product_of_softmaxes() -> None:
    u = fields()
    none = (torch.zeros(V, 1, dtype=torch.float64), torch.zeros(V, 1, dtype=torch.float64))
    chain = Chain.of(u, none, candidates=2)
    torch.testing.assert_close(chain.log_marginals(), torch.log_softmax(u, -1))
    torch.testing.assert_close(chain.log_normaliser(), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(("candidates", "temperature"), [(3, 1.0), (V, 0.5)])
def test_texts_are_drawn_as_often_as_they_should(candidates: int, temperature: float) -> None:
    u, tables, n = fields(batch=1), links(), 40_000
    chain = Chain.of((u / temperature).expand(n, L, V), tables, candidates=candidates, temperature=temperature)
    drawn = chain.draw(torch.rand(n, L, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    place = (drawn * torch.tensor([V**3, V**2, V, 1])).sum(-1)
    p = brute_force(u[0] / temperature, tables, candidates=candidates, temperature=temperature).exp()
    assert _p_value(torch.bincount(place, minlength=len(p)).double(), p * n) > 1e-4


@pytest.mark.parametrize("temperature", [0.3, 0.066, 0.03, 0.01])
@pytest.mark.parametrize("held", [False, True])
def test_cold_draws_in_float32_are_the_exact_ones(temperature: float, held: bool) -> None:
    """exp(s / temperature) is no float32 below 0.066, and what it leaves underflows where a token is held."""
    n, u = 3_000, 2 * fields(5, batch=1)[0]
    tables = tuple(1.3 * table for table in links(6))
    texts, cold = every_text(), u / temperature
    log_p = brute_force(cold, tables, candidates=V, temperature=temperature)
    worst = int(torch.cat([log_p[texts[:, 2] == token].max()[None] for token in range(V)]).argmin())
    given = torch.tensor([-1, -1, worst, -1]) if held else torch.full((L,), -1)
    fits = ((given < 0) | (texts == given)).all(-1)
    log_p = torch.log_softmax(torch.where(fits, log_p, -torch.inf), 0)
    floats = tuple(table.float() for table in tables)
    chain = Chain.of(cold.float().expand(n, L, V), floats, held=given.expand(n, L), temperature=temperature)
    drawn = chain.draw(torch.rand(n, L, dtype=torch.float64, generator=torch.Generator().manual_seed(8)))
    place = (drawn * torch.tensor([V**3, V**2, V, 1])).sum(-1)
    assert bool(fits[place].all())
    assert _p_value(torch.bincount(place, minlength=len(log_p)).double(), log_p.exp() * n) > 1e-4
    marginals = chain.log_marginals()[0].double()
    expected = torch.stack(
        [torch.stack([torch.logsumexp(log_p[texts[:, i] == v], 0) for v in range(V)]) for i in range(L)]
    )
    torch.testing.assert_close(marginals.exp(), expected.exp(), atol=1e-3, rtol=0)
    best = texts[log_p.argmax()]
    assert float(chain.log_prob(best.expand(n, L))[0]) == pytest.approx(float(log_p.max()), abs=2e-3)


def _p_value(seen: Tensor, expected: Tensor) -> float:
    """Of the chi-squared test, rare outcomes taken together."""
    often = expected >= 5
    seen, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected))
    kept = expected > 0
    return float(stats.chisquare(seen[kept].numpy(), (expected / expected.sum() * seen.sum())[kept].numpy()).pvalue)


def test_the_rest_is_drawn_from_its_own_tokens() -> None:
    u = torch.tensor([[[5.0, 1.0, 0.0, -1.0, -40.0]]]).expand(20_000, 1, V)
    tables = (torch.zeros(V, 1), torch.zeros(V, 1))
    drawn = Chain.of(u, tables, candidates=1).draw(torch.rand(20_000, 1, dtype=torch.float64))
    rest = torch.bincount(drawn[drawn > 0], minlength=V)[1:].double()
    assert rest[-1] == 0
    expected = torch.softmax(u[0, 0, 1:4].double(), 0) * rest.sum()
    assert stats.chisquare(rest[:3].numpy(), expected.numpy()).pvalue > 1e-4


def test_held_positions_are_certain_and_condition_the_others() -> None:
    u, tables = fields(batch=1), links()
    held = torch.tensor([[-1, 2, -1, -1]])
    chain = Chain.of(u, tables, held=held)
    texts = every_text()
    p = brute_force(u[0], tables, candidates=V).exp()
    given = torch.where(texts[:, 1] == 2, p, 0.0)
    given = given / given.sum()
    expected = torch.stack([given[texts[:, 0] == token].sum() for token in range(V)])
    torch.testing.assert_close(chain.log_marginals()[0, 0].exp(), expected)
    drawn = chain.draw(torch.rand(1, L, dtype=torch.float64))
    assert drawn[0, 1] == 2


def test_positions_outside_the_text_are_linked_to_nobody() -> None:
    u, tables = fields(batch=1), links()
    joined = torch.tensor([[True, True, True, False]])
    short = Chain.of(u[:, :3], tables)
    padded = Chain.of(u, tables, joined=joined)
    x = torch.tensor([[1, 4, 0, 3]])
    torch.testing.assert_close(padded.log_prob(x, scored=joined), short.log_prob(x[:, :3]))


def test_the_gradient_of_log_z_is_the_marginals() -> None:
    u, tables = fields().requires_grad_(), links()
    Chain.of(u, tables, candidates=3).log_normaliser().sum().backward()
    assert u.grad is not None
    # Z counts normalised fields: d log Z / d u = marginal - softmax
    expected = Chain.of(u, tables, candidates=3).log_marginals().exp() - torch.softmax(u, -1)
    torch.testing.assert_close(u.grad, expected.detach())


def test_gradients_are_finite_where_positions_are_certain() -> None:
    u = fields().float().requires_grad_()
    left, right = (table.float().requires_grad_() for table in links())
    held = torch.tensor([[0, -1, -1, 1], [-1, -1, -1, -1]])
    chain = Chain.of(u, (left, right), held=held, candidates=2)
    (-chain.log_prob(torch.tensor([[0, 1, 2, 1], [4, 4, 4, 4]]))).sum().backward()
    for tensor in (u, left, right):
        assert tensor.grad is not None
        assert bool(torch.isfinite(tensor.grad).all())


def test_counted_transitions_know_who_follows_whom() -> None:
    text = torch.tensor([0, 1, 2, 3] * 500)
    counts = torch.zeros(5, 5).index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = counts.to_sparse()
    left, right = pmi_transitions(sparse, rank=4, strength=1.0, prior=1.0)
    scores = left @ right.T
    expected = math.log((500 + 0.25) / (501 * 0.25))
    assert float(scores[0, 1]) == pytest.approx(expected, abs=0.02)
    assert float(scores[1, 0]) == pytest.approx(0, abs=0.02)
    doubted = pmi_transitions(sparse, rank=4, strength=1.0, prior=500.0)  # as many pairs by chance as were seen
    assert float((doubted[0] @ doubted[1].T)[0, 1]) == pytest.approx(math.log((500 + 125) / (1000 * 0.25)), abs=0.02)
    again, _ = pmi_transitions(sparse, rank=4, strength=1.0, prior=1.0)
    torch.testing.assert_close(left, again)


class Linked:
    """A denoiser with fixed fields and links."""

    def __init__(self, u: Tensor, tables: Transitions):
        self.u, self.links = u, tables

    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> ChainCRF:
        fields = Independent.of_logits(self.u.expand(len(x_t), L, V))
        return ChainCRF(fields, self.links, torch.full_like(x_t, -1))


def test_one_step_draws_from_the_chain() -> None:
    n = 1_500  # one after the other
    denoiser = Linked(fields(batch=1), links())
    path = MixturePath(UniformSource(V))
    noise = Noise(0, range(n))
    x = sample(denoiser, path, path.source.sample(noise, L), grid=Grid.uniform(1), noise=noise)
    pair = torch.bincount(x[:, 0] * V + x[:, 1], minlength=V * V).double()
    p, texts = brute_force(denoiser.u[0], denoiser.links, candidates=V).exp(), every_text()
    expected = torch.zeros(V * V, dtype=torch.float64).index_add_(0, texts[:, 0] * V + texts[:, 1], p)
    assert _p_value(pair, expected * n) > 1e-4
    independent = (pair.view(V, V).sum(1)[:, None] * pair.view(V, V).sum(0) / n).flatten()
    assert _p_value(pair, independent) < 1e-4  # the links do something


def test_rules_that_do_not_redraw_take_the_marginals() -> None:
    n = 1_500
    denoiser = Linked(fields(batch=1), links())
    path, noise = MixturePath(UniformSource(V)), Noise(0, range(n))
    x = sample(denoiser, path, path.source.sample(noise, L), grid=Grid.uniform(1), noise=noise, rule=RULES["single"])
    marginals = Chain.of(denoiser.u, denoiser.links).log_marginals()[0].exp()
    for i in range(L):
        seen = torch.bincount(x[:, i], minlength=V).double()
        assert stats.chisquare(seen.numpy(), (marginals[i] * n).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("name", ["exact", "spaced", "systematic"])
def test_only_candidates_move_and_frozen_positions_stay(name: str) -> None:
    denoiser = Linked(fields(batch=1), links())
    path, noise = MixturePath(UniformSource(V)), Noise(5, range(200))
    x_0 = path.source.sample(noise, L)
    frozen = torch.zeros(200, L, dtype=torch.bool)
    frozen[:, 1] = True
    posterior = denoiser.posterior(x_0, x_0, x_0).given(torch.where(frozen, x_0, -1))
    times = torch.zeros(200, dtype=torch.float64), torch.full((200,), 0.26, dtype=torch.float64)
    x_next = advance(SamplerState(x_0, *times, path, noise, frozen=frozen), RULES[name], posterior)
    assert torch.equal(x_next[:, 1], x_0[:, 1])
    assert 0 < int((x_next != x_0).sum()) < 200 * 3 * 0.5


def test_what_is_frozen_conditions_the_joint_draw_of_a_sampler() -> None:
    n, token = 600, 4
    denoiser = Linked(fields(batch=1), links())
    path, noise = MixturePath(UniformSource(V)), Noise(3, range(n))
    x_0, frozen = path.source.sample(noise, L), torch.zeros(n, L, dtype=torch.bool)
    x_0[:, 1], frozen[:, 1] = token, True
    x = sample(denoiser, path, x_0, grid=Grid.uniform(1), noise=noise, frozen=frozen)
    p, texts = brute_force(denoiser.u[0], denoiser.links, candidates=V).exp(), every_text()
    given = torch.where(texts[:, 1] == token, p, 0.0)
    assert bool((x[:, 1] == token).all())
    for i in (0, 2):
        expected = torch.zeros(V, dtype=torch.float64).index_add_(0, texts[:, i], given / given.sum())
        free = torch.zeros(V, dtype=torch.float64).index_add_(0, texts[:, i], p)
        seen = torch.bincount(x[:, i], minlength=V).double()
        assert _p_value(seen, expected * n) > 1e-4
        assert _p_value(seen, free * n) < 1e-4  # what it would be without


def test_a_sample_is_the_same_in_any_batch() -> None:
    denoiser = Linked(fields(batch=1).float(), links())
    path = MixturePath(UniformSource(V))
    together = Noise(0, range(6))
    whole = sample(denoiser, path, path.source.sample(together, L), grid=Grid.uniform(3), noise=together)
    alone = Noise(0, [4])
    one = sample(denoiser, path, path.source.sample(alone, L), grid=Grid.uniform(3), noise=alone)
    assert torch.equal(whole[4:5], one)


def test_filters_and_the_mask_reach_the_chain() -> None:
    path = MixturePath(MaskSource(V))
    denoiser = Linked(fields(batch=1), links())
    noise = Noise(0, range(100))
    x_0 = path.source.sample(noise, L)
    x = sample(denoiser, path, x_0, grid=Grid.uniform(2), noise=noise)
    assert int(x.max()) < V - 1  # the mask is the last token and never drawn
    cold = sample(denoiser, path, x_0, grid=Grid.uniform(2), noise=noise, filter=Filter(top_k=1))
    u = denoiser.u.clone()
    u[..., V - 1] = -torch.inf
    assert torch.equal(cold, u.argmax(-1).expand(100, L))


def test_marginals_know_what_is_certain_and_what_cannot_be() -> None:
    u, tables = fields(batch=1), links()
    held = torch.tensor([[-1, 2, -1, -1]])
    rows = torch.tensor([0, 2])
    ((_, found, _),) = ChainCRF(Independent.of_logits(u), tables, held, forbidden=V - 1).marginals(rows)
    allowed = u.clone()
    allowed[..., V - 1] = -torch.inf
    expected = Chain.of(allowed, tables, held=held).log_marginals()[0, rows]
    torch.testing.assert_close(found[:, : V - 1], expected[:, : V - 1])
    assert float(found[:, V - 1].exp().max()) == 0


def test_the_posterior_is_the_law_of_its_chain() -> None:
    """log_prob is that of brute force, sums to 1 over all texts, and knows what is held."""
    u, tables, texts = fields(batch=1), links(), every_text()
    posterior = ChainCRF(Independent.of_logits(u.expand(len(texts), L, V)), tables, torch.full_like(texts, -1))
    found = posterior.log_prob(texts)
    torch.testing.assert_close(found, brute_force(u[0], tables, candidates=V))
    assert float(found.exp().sum()) == pytest.approx(1)
    held = torch.tensor([-1, 2, -1, -1]).expand_as(texts)
    inside = posterior.given(held).log_prob(texts).exp()
    assert float(inside.sum()) == pytest.approx(1)
    assert float(inside[texts[:, 1] != 2].sum()) == pytest.approx(0, abs=1e-12)
