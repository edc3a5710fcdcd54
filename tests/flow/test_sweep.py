"""The rule sweep: who turns when, and the law of its texts, by enumeration and by counting."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats
from torch import Tensor
from worlds import SOURCES, coupled_data, world

from fsdfm.flow import (
    RULES,
    CosineSchedule,
    Grid,
    MaskSource,
    MixturePath,
    PolynomialSchedule,
    Posterior,
    Sampler,
    SamplerState,
    Sweep,
    UniformSource,
    sample,
    trajectory,
)
from fsdfm.flow.exact import all_states, total_variation
from fsdfm.noise import Noise

V, L = 2, 4


@dataclass(frozen=True)
class Known(Posterior):
    """p(x_1 | what is held): the exact posterior of a sweep, whose other positions are noise that knows nothing."""

    data: Tensor
    held: Tensor | None = None
    joint = True

    def law(self, held: Tensor) -> Tensor:
        """Of every text, given what one sample holds."""
        texts = all_states(self.data.shape[0], self.data.ndim)
        fits = ((held < 0) | (texts == held)).all(1)
        p = torch.where(fits, self.data.flatten(), 0.0)
        return p / p.sum()

    def draw(self, samples: Tensor, u: Tensor, *, filter=None) -> Tensor:
        texts = all_states(self.data.shape[0], self.data.ndim)
        cdf = torch.stack([self.law(self.held[b]).cumsum(0) for b in samples.tolist()])
        return texts[torch.searchsorted(cdf, u[:, :1].contiguous()).clamp(max=len(texts) - 1)[:, 0]]

    def given(self, held: Tensor, *, forbidden: int | None = None) -> "Known":
        return replace(self, held=held)

    def marginals(self, rows: Tensor) -> Iterator:
        raise NotImplementedError

    def log_prob(self, x_1: Tensor) -> Tensor:
        raise NotImplementedError

    def part(self, first: int, count: int) -> "Known":
        return replace(self, held=self.held[first : first + count])

    def changed(self, hook, x_t, *, t, t_next) -> "Known":
        return self


def turns(grid: Grid, frozen: Tensor | None = None, path: MixturePath | None = None) -> list[Tensor]:
    """Which positions of one text turn in each step, bool [L] each."""
    path, found = path or MixturePath(UniformSource(V)), []
    memory: dict[str, Tensor] = {}
    x = torch.zeros(1, L, dtype=torch.int64)
    for index in range(grid.steps):
        t, t_next = (grid.times[index + k].reshape(1) for k in (0, 1))
        state = SamplerState(x, t, t_next, path, Noise(0, [0]), index=index, frozen=frozen, memory=memory)
        plan = Sweep().plan(state)
        found.append(torch.zeros(L, dtype=torch.bool).index_fill_(0, plan.rows, True))
        Sweep().apply(state, plan, Known(coupled_data(V, L)))
    return found


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("frozen", [[], [0], [1, 2], [3]])
@pytest.mark.parametrize("start", [0.0, 0.4])
def test_every_free_position_turns_once_and_in_order(steps, frozen, start):
    kept = torch.zeros(1, L, dtype=torch.bool)
    kept[0, frozen] = True
    found = torch.stack(turns(Grid.uniform(steps, start), kept)).long()
    assert torch.equal(found.sum(0), (~kept[0]).long())
    step_of = [int(found[:, i].argmax()) for i in range(L) if not kept[0, i]]
    assert step_of == sorted(step_of)
    assert int(found.sum(1).max()) <= math.ceil((L - len(frozen)) / steps)


@pytest.mark.parametrize("schedule", [PolynomialSchedule(2), CosineSchedule()], ids=str)
def test_a_schedule_says_how_much_is_settled(schedule):
    path, grid = MixturePath(UniformSource(V), schedule), Grid.uniform(4)
    shares = torch.stack(turns(grid, path=path)).sum(1).cumsum(0) / L
    assert torch.equal(shares, torch.round(schedule.kappa(grid.times[1:]) * L).float() / L)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("frozen", [None, [-1, 1, -1, -1], [-1, -1, -1, 0]])
def test_with_the_exact_posterior_the_law_is_exact_for_any_number_of_steps(steps, frozen):
    """The product of the steps' laws, enumerated: p(turned | held) at every state that can be reached."""
    data = coupled_data(V, L)
    held = torch.full((L,), -1) if frozen is None else torch.tensor(frozen)
    posterior, texts = Known(data), all_states(V, L)
    law = {tuple(held.tolist()): 1.0}
    for turning in turns(Grid.uniform(steps), (held >= 0)[None]):
        reached: dict[tuple[int, ...], float] = {}
        for state, weight in law.items():
            p = posterior.law(torch.tensor(state))
            for text, chance in zip(texts, p.tolist(), strict=True):
                after = torch.where(turning, text, torch.tensor(state))
                reached[tuple(after.tolist())] = reached.get(tuple(after.tolist()), 0.0) + weight * chance
        law = reached
    found = torch.tensor([law.get(tuple(text.tolist()), 0.0) for text in texts], dtype=torch.float64)
    assert total_variation(found, posterior.law(held)) < 1e-12


@pytest.mark.parametrize("source", [UniformSource(V), MaskSource(V + 1)], ids=str)
@pytest.mark.parametrize("steps", [2, 3])
def test_texts_have_the_law(source, steps):
    n, data = 1200, coupled_data(V, L)
    path, noise = MixturePath(source), Noise(4, range(n))
    sampler = Sampler(path, source.sample(noise, L), grid=Grid.uniform(steps), noise=noise, rule=Sweep())
    while not sampler.done:
        sampler.question()
        sampler.answer(Known(data))
    counts = torch.bincount((sampler.x * (V ** torch.arange(L - 1, -1, -1))).sum(1), minlength=V**L)
    assert stats.chisquare(counts.numpy(), (data.flatten() * n).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("source", SOURCES)
def test_independent_positions_keep_what_is_frozen_and_never_show_the_mask(source):
    path, _ = world(source, PolynomialSchedule(1), vocab=5, length=6)
    noise, vocab = Noise(0, range(20)), path.source.vocab_size
    x_0 = path.source.sample(noise, 6)
    frozen = torch.rand(20, 6, generator=torch.Generator().manual_seed(1)) < 0.3
    x_0 = torch.where(frozen, 2, x_0)

    def logits(x_t, t, h):
        return torch.zeros(*x_t.shape, vocab)

    options = {"grid": Grid.uniform(3), "rule": RULES["sweep"]}
    steps = list(trajectory(logits, path, x_0, noise=noise, frozen=frozen, **options))
    x_1 = steps[-1].x_next
    assert bool((x_1[frozen] == 2).all())
    assert path.source.mask_token is None or bool((x_1 != path.source.mask_token).all())
    behind = (~frozen).cumsum(1) > torch.round((~frozen).sum(1, keepdim=True) / 3)
    assert torch.equal(steps[0].x_next[behind & ~frozen], x_0[behind & ~frozen])
    alone = [sample(logits, path, x_0[[b]], noise=noise[[b]], frozen=frozen[[b]], **options) for b in range(20)]
    assert torch.equal(torch.cat(alone), x_1)


def test_it_does_not_go_back():
    path, noise = MixturePath(UniformSource(V)), Noise(0, [0])
    with pytest.raises(ValueError, match="the rule sweep cannot.*leave renoise out"):
        Sampler(path, torch.zeros(1, L).long(), grid=Grid.uniform(2), noise=noise, rule=Sweep(), renoise=0.5)
