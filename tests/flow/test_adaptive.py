"""Rules that adapt: their exact laws on small worlds, their bounds, and calls that are counted per text."""

from itertools import product
from pathlib import Path

import pytest
import torch
from worlds import SCHEDULES, world

from fsdfm.flow import (
    RULES,
    CertainTurns,
    ExactDenoiser,
    Grid,
    Independent,
    MaskSource,
    MixturePath,
    Sampler,
    SamplerState,
    StableStop,
    posterior_of,
    sampler_law,
    total_variation,
)
from fsdfm.noise import Noise

V, L = 2, 3
PATH, DATA = world("uniform", SCHEDULES[0], V, L, seed=1)
TRUTH = ExactDenoiser(PATH, p_1=DATA)
PLACE = V ** torch.arange(L - 1, -1, -1)


def run(rule, steps, size, denoiser=TRUTH, path=PATH, **options):
    noise = Noise(0, range(size))
    x_0 = path.source.sample(noise, L)
    sampler = Sampler(path, x_0, grid=Grid.uniform(steps), noise=noise, rule=rule, **options)
    while not sampler.done:
        asked = sampler.question()
        sampler.answer(denoiser.posterior(asked.x_t, asked.t, asked.h, rows=asked.rows))
    return sampler


def exact_law(rule: CertainTurns, steps: int):
    """The law of texts under `CertainTurns`, by enumeration of states and of who had a turn: float64 [V^L]."""
    everybody = list(product(range(V), repeat=L))
    now = {(x, (False,) * L): 1 / V**L for x in everybody}
    ended = torch.zeros(V**L, dtype=torch.float64)
    for index in range(steps):
        after = {}
        for (x, turned), chance in now.items():
            kappa = sum(turned) / L
            t = torch.tensor([kappa], dtype=torch.float64)
            t_next = torch.tensor([(index + 1) / steps], dtype=torch.float64)
            if index:
                t_next = t + (1 - t) / (steps - index)
            probs = TRUTH.table(kappa)[int((torch.tensor(x) * PLACE).sum())]
            entropy = -(probs * torch.log(probs.clamp(min=1e-300))).sum(-1)[None]
            mask = torch.tensor([turned])
            memory = {"turned": mask, "total": torch.tensor([L]), "start": torch.zeros(1, dtype=torch.float64)}
            state = SamplerState(
                torch.tensor([x]), t, t_next, PATH, Noise(0, [0]), index=index, steps=steps, memory=memory
            )
            first = ~mask if index == steps - 1 else rule.choose(state, entropy, ~mask)
            reached = (mask | first)[0]
            done = bool(reached.all())
            w = 1.0 if done else (float(reached.sum()) / L - kappa) / (1 - kappa)
            for again in product([False, True], repeat=L):
                coins, moves = 1.0, []
                for i in range(L):
                    may = bool(mask[0, i]) and rule.returns and not done
                    coins *= (w if again[i] else 1 - w) if may else float(not again[i])
                    moves.append(done or bool(first[0, i]) or again[i])
                if not coins:
                    continue
                for x_next in everybody:
                    p = chance * coins
                    for i in range(L):
                        p *= float(probs[i, x_next[i]]) if moves[i] else float(x_next[i] == x[i])
                    if done:
                        ended[int((torch.tensor(x_next) * PLACE).sum())] += p
                    elif p:
                        key = (x_next, tuple(reached.tolist()))
                        after[key] = after.get(key, 0.0) + p
        now = after
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("rule", [CertainTurns(), CertainTurns(returns=False), CertainTurns(bound=0.9)])
def test_the_sampler_draws_from_the_enumerated_law(rule):
    law = exact_law(rule, 3)
    assert float(law.sum()) == pytest.approx(1)
    found = torch.bincount((run(rule, 3, 20_000).x * PLACE).sum(-1), minlength=V**L) / 20_000
    assert total_variation(found.double(), law) < 0.015


def exact_stop_law(rule: StableStop, steps: int):
    """(the law of texts under `StableStop` around the exact rule, the mean number of calls), by enumeration.

    A state is a text, the likeliest tokens of the call before, and for how many calls these stood.
    """
    everybody = [*product(range(V), repeat=L)]
    now, calls = {(x, None, 0): 1 / V**L for x in everybody}, 0.0
    ended = torch.zeros(V**L, dtype=torch.float64)
    for index in range(steps):
        kappa, kappa_next = (float(PATH.schedule.kappa(torch.tensor(i / steps).double())) for i in (index, index + 1))
        table, w, after = TRUTH.table(kappa), (kappa_next - kappa) / (1 - kappa), {}
        calls += sum(now.values())
        for (x, before, same), chance in now.items():
            probs = table[int((torch.tensor(x) * PLACE).sum())]
            likeliest = tuple(probs.argmax(-1).tolist())
            entropy = float(-(probs * torch.log(probs.clamp(min=1e-300))).sum(-1).mean())
            held = same + 1 if likeliest == before else 0
            stops = held >= rule.patience and entropy <= rule.entropy
            redraw = 1.0 if stops or index == steps - 1 else w
            for x_next in everybody:
                p = chance
                for i in range(L):
                    p *= redraw * float(probs[i, x_next[i]]) + (1 - redraw) * (x_next[i] == x[i])
                if redraw == 1.0:
                    ended[int((torch.tensor(x_next) * PLACE).sum())] += p
                elif p:
                    key = (x_next, likeliest, held)
                    after[key] = after.get(key, 0.0) + p
        now = after
    return ended, calls


@pytest.mark.parametrize("patience", [0, 1])
def test_the_stop_draws_from_the_enumerated_law(patience):
    rule = StableStop(rule=RULES["exact"], entropy=0.4, patience=patience)
    law, calls = exact_stop_law(rule, 4)
    assert float(law.sum()) == pytest.approx(1)
    sampler = run(rule, 4, 5_000)
    found = torch.bincount((sampler.x * PLACE).sum(-1), minlength=V**L) / 5_000
    assert total_variation(found.double(), law) < 0.03
    assert float(sampler.calls.double().mean()) == pytest.approx(calls, abs=0.05)
    never, all_calls = exact_stop_law(StableStop(rule=RULES["exact"], entropy=0.0, patience=9), 4)
    start = torch.full((V**L,), 1 / V**L, dtype=torch.float64)
    torch.testing.assert_close(never, sampler_law(TRUTH, PATH, start, grid=Grid.uniform(4), jump=RULES["exact"]))
    assert all_calls == pytest.approx(4)


def test_the_document_has_these_distances():
    """docs/adaptive.md: total variation of each rule to the data (and to the exact rule at the same grid)."""
    document = (Path(__file__).parents[2] / "docs" / "adaptive.md").read_text()
    data, start = DATA.flatten(), torch.full((V**L,), 1 / V**L, dtype=torch.float64)

    def said(value):
        return f"{value:.3f}".removeprefix("0")

    def distances(law, steps):
        exact = sampler_law(TRUTH, PATH, start, grid=Grid.uniform(steps), jump=RULES["exact"])
        return f"{said(total_variation(law, data))} ({said(total_variation(law, exact))})"

    for steps in (2, 3):
        exact = sampler_law(TRUTH, PATH, start, grid=Grid.uniform(steps), jump=RULES["exact"])
        found = [distances(exact_law(CertainTurns(bound=bound), steps), steps) for bound in (None, 0.3, 0.9)]
        row = next(
            line
            for line in document.splitlines()
            if line.startswith(f"| {steps} | {said(total_variation(exact, data))}")
        )
        for number in found:
            assert number in row
    for entropy in (0.2, 0.4, 0.6):
        law, calls = exact_stop_law(StableStop(rule=RULES["exact"], entropy=entropy), 8)
        assert f"| {entropy} nats | {calls:.1f} | {distances(law, 8)} |" in document


def test_how_much_certainty_changes_the_law():
    """At the same 3 calls the order by certainty is another law than the random one; docs/adaptive.md says how far."""
    start = torch.full((V**L,), 1 / V**L, dtype=torch.float64)
    random_order = sampler_law(TRUTH, PATH, start, grid=Grid.uniform(3), jump=RULES["exact"])
    certain = exact_law(CertainTurns(), 3)
    assert 0.01 < total_variation(certain, random_order) < 0.3


def test_the_bound_holds_and_the_grid_is_the_slowest_pace():
    size, length, bound = 5, 12, 1.5
    entropy = torch.rand(size, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    path, _ = world("uniform", SCHEDULES[0], V, L)
    x_t = torch.zeros(size, length, dtype=torch.int64)
    state = SamplerState(
        x_t, torch.zeros(size).double(), torch.full((size,), 0.25).double(), path, Noise(0, range(size)), steps=4
    )
    waiting = torch.ones(size, length, dtype=torch.bool)
    waiting[:, 0] = False
    chosen = CertainTurns(bound=bound).choose(state, entropy, waiting)
    assert not bool(chosen[:, 0].any())
    for row, own in zip(entropy, chosen, strict=True):
        taken = row[own]
        assert len(taken) == 3 or float(taken.sum() - taken.max()) <= bound
        left = row[waiting[0] & ~own]
        assert float(taken.max()) <= float(left.min())  # the most certain go first
        assert float(taken.sum() - taken.max() + left.min()) > bound - float(taken.max())
    grid_only = CertainTurns().choose(state, entropy, waiting)
    assert grid_only.sum(-1).tolist() == [3] * size
    assert bool((chosen | ~grid_only).all())  # never fewer than the grid


def test_a_bound_of_everything_is_one_call():
    sampler = run(CertainTurns(bound=100.0), 8, 50)
    assert sampler.calls.tolist() == [1] * 50
    assert sampler.done


def test_a_confident_text_stops_and_others_go_on():
    """Row 0's posterior is a delta from the start, row 1's never is."""

    def logits(x_t, t, h):
        sure = torch.zeros(*x_t.shape, V, dtype=torch.float64)
        sure[0, :, 1] = 50.0
        return sure

    noise = Noise(0, range(2))
    x_0 = PATH.source.sample(noise, L)
    sampler = Sampler(PATH, x_0, grid=Grid.uniform(8), noise=noise, rule=StableStop(entropy=0.1))
    while not sampler.done:
        asked = sampler.question()
        if sampler.index > 1:
            assert bool((asked.rows >= L).all())  # nothing is asked of the finished one
        sampler.answer(posterior_of(logits, asked.x_t, asked.t, h=asked.h, rows=asked.rows))
    assert sampler.calls.tolist() == [2, 8]
    assert sampler.x[0].tolist() == [1, 1, 1]


def test_an_entropy_at_the_bound_is_confident():
    """With a bound of 0 nats a text of which nothing is open any more ends."""

    def logits(x_t, t, h):
        return torch.nn.functional.one_hot(torch.ones_like(x_t), V).double() * 2000.0  # exactly 0 nats

    noise = Noise(0, range(2))
    rule = StableStop(entropy=0.0)
    sampler = Sampler(PATH, PATH.source.sample(noise, L), grid=Grid.uniform(8), noise=noise, rule=rule)
    while not sampler.done:
        asked = sampler.question()
        sampler.answer(posterior_of(logits, asked.x_t, asked.t, h=asked.h, rows=asked.rows))
    assert sampler.calls.tolist() == [2, 2]


def test_without_confidence_the_rule_inside_is_unchanged():
    """A stop that never comes leaves every text as it was."""
    plain = run(RULES["spaced"], 4, 200)
    watched = run(StableStop(entropy=0.0, patience=9), 4, 200)
    assert torch.equal(plain.x, watched.x)
    assert watched.calls.tolist() == [4] * 200


@pytest.mark.parametrize("rule", ["certain", "bounded", "stop"])
@pytest.mark.parametrize("source", ["mask", "mixture"])
def test_with_a_mask_no_mask_is_left_and_what_is_frozen_stays(rule, source):
    path, data = world(source, SCHEDULES[0], V, L)
    denoiser = ExactDenoiser(path, p_1=data)
    frozen = torch.zeros(60, L, dtype=torch.bool)
    frozen[:, 0] = True
    noise = Noise(0, range(60))
    x_0 = path.source.sample(noise, L)
    x_0[:, 0] = 1
    sampler = Sampler(path, x_0, grid=Grid.uniform(3), noise=noise, rule=RULES[rule], frozen=frozen)
    while not sampler.done:
        asked = sampler.question()
        sampler.answer(denoiser.posterior(asked.x_t, asked.t, asked.h, rows=asked.rows))
    assert bool((sampler.x[:, 0] == 1).all())
    assert not bool((sampler.x == path.source.mask_token).any())
    assert bool((sampler.calls >= 1).all())
    assert bool((sampler.calls <= 3).all())


def test_what_is_refused():
    with pytest.raises(ValueError, match="bound is -1"):
        CertainTurns(bound=-1.0)
    with pytest.raises(ValueError, match="entropy is -1"):
        StableStop(entropy=-1.0)


def test_turns_keep_pace_with_the_calls_that_are_left():
    """Under the mask source who had a turn is shown: each call takes its share of what is left, rounded up, no more."""
    path, steps, length = MixturePath(MaskSource(4)), 5, 12
    noise = Noise(0, range(3))
    x_0 = path.source.sample(noise, length)
    sampler = Sampler(path, x_0, grid=Grid.uniform(steps), noise=noise, rule=CertainTurns())
    expected = 0
    for index in range(steps):
        sampler.question()
        sampler.answer(Independent.of_logits(torch.zeros(3, length, 4)))
        expected += -(-(length - expected) // (steps - index))
        assert (sampler.x != path.source.mask_token).sum(1).tolist() == [expected] * 3
