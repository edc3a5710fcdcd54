import inspect
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import SOURCES, world

from fsdfm.flow import (
    ExactDenoiser,
    ExactJump,
    Filter,
    Grid,
    Independent,
    InstantJump,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    SamplerState,
    SingleJump,
    SystematicJump,
    UniformSource,
    advance,
    sample,
    sampler_law,
    trajectory,
)
from fsdfm.noise import Noise

RULES = [ExactJump(), SingleJump(), InstantJump(), SystematicJump(SingleJump())]
every_rule = pytest.mark.parametrize("jump", RULES, ids=str)


class Toy:
    """A denoiser with a mind of its own: logits from fixed random weights of token, position and time."""

    def __init__(self, vocab, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(vocab, 8, generator=generator)
        self.head = torch.randn(8, vocab, generator=generator)
        self.calls, self.times, self.sizes = 0, [], []

    def trunk(self, x_t, t, h):
        self.calls += 1
        self.times.append(t.tolist())
        self.sizes.append(h.tolist())
        features = self.embedding[x_t]
        return features + features.roll(1, 1) * t.float()[:, None, None] + h.float()[:, None, None]

    def logits_at(self, features):
        return features @ self.head


class Picky(Toy):
    """The same, told beforehand which rows are wanted."""

    asked = ()

    def features_at(self, x_t, t, h, *, rows):
        self.asked = (*self.asked, rows)
        return self.trunk(x_t, t, h).flatten(0, 1)[rows]


class Dense:
    """The same without the split."""

    def __init__(self, toy):
        self.toy = toy

    def __call__(self, x_t, t, h):
        return self.toy.logits_at(self.toy.trunk(x_t, t, h))


def run(denoiser, path, *, samples=range(5), length=12, steps=4, rule=RULES[0], seed=0, **options):
    noise = Noise(seed, samples)
    return sample(
        denoiser, path, path.source.sample(noise, length), grid=Grid.uniform(steps), rule=rule, noise=noise, **options
    )


@every_rule
@pytest.mark.parametrize("steps", [1, 2, 7, 33])
def test_network_calls_equal_steps(jump, steps):
    toy = Toy(11)
    run(toy, MixturePath(UniformSource(11)), steps=steps, rule=jump)
    assert toy.calls == steps
    assert toy.times == [pytest.approx([k / steps] * 5) for k in range(steps)]
    assert toy.sizes == [pytest.approx([1 / steps] * 5)] * steps


@every_rule
def test_a_sample_does_not_depend_on_batch_size_or_order(jump):
    path, toy = MixturePath(MixtureSource(11, 0.4)), Toy(11)
    together = run(toy, path, samples=range(8), rule=jump, renoise=0.5)
    for order in ([3], [5, 1], [7, 6, 5, 4, 3, 2, 1, 0]):
        assert torch.equal(run(toy, path, samples=order, rule=jump, renoise=0.5), together[order])
    assert not torch.equal(run(toy, path, samples=range(8), rule=jump, seed=1, renoise=0.5), together)


@every_rule
@pytest.mark.parametrize("source", [UniformSource(300), MaskSource(300)], ids=str)
def test_asking_the_head_for_candidates_only_changes_nothing(jump, source):
    path, toy = MixturePath(source), Toy(300)
    split = run(toy, path, length=200, steps=8, rule=jump)
    dense = run(Dense(toy), path, length=200, steps=8, rule=jump)
    assert torch.equal(split, dense)


@every_rule
@pytest.mark.parametrize("hook", [None, lambda logits, rows: logits.mul_(0.5)], ids=["plain", "hooked"])
def test_a_network_may_know_beforehand_which_rows_are_wanted(jump, hook):
    path, picky = MixturePath(UniformSource(300)), Picky(300)
    found = run(picky, path, length=200, steps=8, rule=jump, hook=hook)
    assert torch.equal(found, run(Toy(300), path, length=200, steps=8, rule=jump, hook=hook))
    assert picky.calls == 8  # one call per step, however many tiles the head takes
    counts = [len(rows) for rows in picky.asked]
    assert max(counts) == counts[-1] == 1000  # at the end every position is redrawn,
    assert counts[0] < 250  # and at the start an eighth of them
    assert all(bool((rows.diff() > 0).all()) for rows in picky.asked)


@pytest.mark.parametrize("source", [MaskSource(9), MixtureSource(9, 0.5)], ids=str)
@every_rule
def test_the_mask_is_never_emitted_and_never_entered(source, jump):
    path, toy, noise = MixturePath(source), Toy(9), Noise(0, range(20))
    toy.head[:, -1] += 50  # a network that loves the mask
    x_0 = source.sample(noise, 50)
    for step in trajectory(toy, path, x_0, grid=Grid.uniform(6), rule=jump, noise=noise):
        assert not bool(((step.x_t != 8) & (step.x_next == 8)).any())
        if isinstance(source, MaskSource):
            assert not bool(step.jumps[step.x_t != 8].any())  # a revealed position never moves
    assert not bool((step.x_next == 8).any())


def test_renoising_remasks_only_when_asked_for():
    path, toy, noise = MixturePath(MaskSource(9)), Toy(9), Noise(0, range(20))
    x_0 = path.source.sample(noise, 50)
    steps = list(trajectory(toy, path, x_0, grid=Grid.uniform(6), rule=ExactJump(), noise=noise, renoise=1.0))
    remasked = [int(((before.x_next != 8) & (after.x_t == 8)).sum()) for before, after in itertools.pairwise(steps)]
    assert remasked.pop() == 0  # nothing stands behind the last step that would correct it
    assert min(remasked) > 0
    assert not bool((steps[-1].x_next == 8).any())
    assert toy.calls == 6


@pytest.mark.parametrize("source", SOURCES)
def test_renoising_does_not_move_the_law(source):
    """With the exact posterior and many steps the end is p_1, with renoising as without."""
    path, p_1 = world(source, PolynomialSchedule())
    exact, rows = ExactDenoiser(path, p_1=p_1), 8_000
    x_1 = run(exact, path, samples=range(rows), length=2, steps=24, renoise=1.0)
    index = x_1[:, 0] * path.source.vocab_size + x_1[:, 1]
    shares = torch.bincount(index, minlength=p_1.numel()) / rows
    assert float((shares - p_1.flatten()).abs().sum() / 2) < 0.05


@every_rule
@given(seed=st.integers(0, 1000), share=st.floats(0, 1))
def test_frozen_positions_never_change(jump, seed, share):
    path, toy, noise = MixturePath(UniformSource(11)), Toy(11), Noise(seed, range(3))
    x_0 = path.source.sample(noise, 20)
    frozen = torch.rand(3, 20, generator=torch.Generator().manual_seed(seed)) < share
    x_1 = sample(toy, path, x_0, grid=Grid.uniform(4), rule=jump, noise=noise, frozen=frozen, renoise=0.5)
    assert torch.equal(x_1[frozen], x_0[frozen])


def test_everything_frozen_works():
    path, toy, noise = MixturePath(UniformSource(11)), Toy(11), Noise(0, range(2))
    x_0 = path.source.sample(noise, 5)
    frozen = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(sample(toy, path, x_0, grid=Grid.uniform(3), rule=ExactJump(), noise=noise, frozen=frozen), x_0)


def test_one_token_vocabulary_works():
    assert run(Toy(1), MixturePath(UniformSource(1))).eq(0).all()


def test_a_start_time_other_than_zero_and_one_a_row():
    path, toy, noise = MixturePath(UniformSource(11)), Toy(11), Noise(0, range(2))
    x_0 = path.source.sample(noise, 5)
    grid = Grid.uniform(4, torch.tensor([0.0, 0.5]))
    both = sample(toy, path, x_0, grid=grid, rule=ExactJump(), noise=noise)
    assert toy.sizes == [[0.25, 0.125]] * 4
    late = sample(toy, path, x_0[1:], grid=Grid.uniform(4, 0.5), rule=ExactJump(), noise=noise[1:])
    assert torch.equal(both[1:], late)


@pytest.mark.parametrize("jump", [rule for rule in RULES if rule.markov], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_samples_follow_the_computed_law(jump, source):
    path, p_1 = world(source, PolynomialSchedule(2))
    exact, rows = ExactDenoiser(path, p_1=p_1), 20_000
    x_1 = run(exact, path, samples=range(rows), length=2, steps=3, rule=jump)
    counts = torch.bincount(x_1[:, 0] * path.source.vocab_size + x_1[:, 1], minlength=p_1.numel()).double()
    expected = rows * sampler_law(exact, path, exact.marginal(0.0), grid=Grid.uniform(3), jump=jump)
    possible = expected > 1e-9
    assert float(counts[~possible].sum()) == 0
    assert chisquare(counts[possible], expected[possible] * rows / expected[possible].sum()).pvalue > 1e-4


def test_a_hook_changes_the_logits():
    path, toy = MixturePath(UniformSource(11)), Toy(11)
    seen = []

    def ban_seven(logits, rows):
        seen.append((rows.sample.max() < 5, rows.position.max() < 300, logits.shape == (len(rows.sample), 11)))
        logits[:, 7] = -math.inf
        return logits

    for denoiser in (toy, Dense(toy)):
        assert not bool((run(denoiser, path, length=300, hook=ban_seven) == 7).any())
    assert bool((run(toy, path, length=300) == 7).any())
    assert all(all(flags) for flags in seen)
    unchanged = run(toy, path, length=300, hook=lambda logits, rows: logits)
    assert torch.equal(unchanged, run(toy, path, length=300))


def test_a_hook_is_told_where_its_rows_are():
    path, toy, noise = MixturePath(UniformSource(11)), Toy(11), Noise(0, range(3))
    x_0, seen = path.source.sample(noise, 150), []

    def look(logits, rows):
        seen.append(rows)
        expected = toy.logits_at(Toy.trunk(toy, rows.x_t, rows.t, rows.t_next - rows.t)[rows.sample, rows.position])
        assert torch.allclose(logits, expected, atol=1e-5)
        return logits

    steps = list(trajectory(toy, path, x_0, grid=Grid.uniform(2), noise=noise, hook=look))
    assert torch.equal(torch.cat([rows.sample * 150 + rows.position for rows in seen[-4:]]), torch.arange(450))
    assert [float(rows.t[0]) for rows in seen[-4:]] == [0.5] * 4
    assert [float(rows.t_next[0]) for rows in seen[-4:]] == [1.0] * 4
    assert torch.equal(seen[-1].x_t, steps[-1].x_t)


def test_tiles_are_full_unless_a_denoiser_keeps_samples_apart():
    def calls(denoiser):
        seen, logits_at = [], denoiser.logits_at
        denoiser.logits_at = lambda features: (seen.append(len(features)), logits_at(features))[1]
        list(Independent.of_features(torch.zeros(100, 3, 8), denoiser).marginals(torch.arange(300)))
        return seen

    assert calls(Toy(11)) == [128, 128, 44]
    apart = Toy(11)
    apart.samples_apart = True
    assert calls(apart) == [3] * 100


def test_a_hook_does_not_touch_the_denoisers_tensor_and_must_return_logits():
    path, logits = MixturePath(UniformSource(11)), torch.zeros(5, 12, 11)
    run(lambda x_t, t, h: logits, path, hook=lambda tile, rows: tile.fill_(1.0), steps=1)
    assert float(logits.abs().max()) == 0
    with pytest.raises(ValueError, match="must return the logits"):
        run(lambda x_t, t, h: logits, path, hook=lambda tile, rows: None)


def test_stratified_candidates_are_even_along_a_trajectory():
    """With a posterior that never holds the present token every candidate jumps: floor or ceil of the sum."""
    vocab, noise, path = 50, Noise(0, range(4)), MixturePath(UniformSource(50))

    def always_another(x_t, t, h):
        return torch.zeros(*x_t.shape, vocab).scatter(-1, x_t[..., None], -math.inf)

    x_0 = path.source.sample(noise, 500)
    jumps = [
        step.jumps
        for step in trajectory(always_another, path, x_0, grid=Grid.uniform(8), rule=SystematicJump(), noise=noise)
    ]
    total = sum(1 / k for k in range(1, 9))
    assert set(torch.stack(jumps).sum(0).flatten().tolist()) == {math.floor(total), math.ceil(total)}


def test_every_renoising_brings_new_noise():
    path, noise = MixturePath(UniformSource(1000)), Noise(0, range(2))
    x_t = torch.zeros(2, 200, dtype=torch.int64)
    first, second = (path.renoise(x_t, 1.0, 0.0, noise=noise, step=step) for step in (0, 1))
    assert float((first == second).double().mean()) < 0.05
    assert float((first == path.source.sample(noise, 200)).double().mean()) < 0.05


def test_the_default_rule_is_exact_and_the_signature_is_shown():
    path, toy, noise = MixturePath(UniformSource(11)), Toy(11), Noise(0, range(2))
    x_0 = path.source.sample(noise, 9)
    grid = Grid.uniform(3)
    assert torch.equal(
        sample(toy, path, x_0, grid=grid, noise=noise), sample(toy, path, x_0, grid=grid, noise=noise, rule=ExactJump())
    )
    assert "frozen" in inspect.signature(sample).parameters


def test_bad_arguments_are_told_before_the_first_step():
    path = MixturePath(UniformSource(11))
    with pytest.raises(ValueError, match="one sample index per row"):
        trajectory(Toy(11), path, torch.zeros(2, 5, dtype=torch.int64), grid=Grid.uniform(2), noise=Noise(0))


def test_renoising_needs_the_independent_coupling():
    class Same:
        def sample(self, source, x_1, noise):
            return x_1

    path, x_0 = MixturePath(UniformSource(11), coupling=Same()), torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="independent"):
        trajectory(Toy(11), path, x_0, grid=Grid.uniform(2), noise=Noise(0), renoise=1.0)
    with pytest.raises(ValueError, match="independent"):
        path.renoise(x_0, 0.5, 0.2, noise=Noise(0))


@given(
    source=st.sampled_from([UniformSource, MaskSource, MixtureSource]),
    vocab=st.integers(2, 40),
    length=st.integers(1, 9),
    batch=st.integers(1, 4),
    times=st.lists(st.floats(0, 0.999), min_size=1, max_size=5, unique=True).map(sorted),
    jump=st.sampled_from(RULES),
    scale=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
)
def test_any_world_runs(source, vocab, length, batch, times, jump, scale):
    path, noise = MixturePath(source(vocab)), Noise(1, range(batch))
    toy = Toy(vocab)
    toy.head *= scale
    x_0 = path.source.sample(noise, length)
    x_1 = sample(toy, path, x_0, grid=Grid([*times, 1.0]), rule=jump, noise=noise)
    real = vocab - (path.source.mask_token is not None)
    assert x_1.shape == x_0.shape
    assert 0 <= int(x_1.min()) <= int(x_1.max()) < real
    assert toy.calls == len(times)


def test_a_cold_filter_is_greedy():
    path, toy = MixturePath(UniformSource(11)), Toy(11)
    cold = run(toy, path, steps=1, filter=Filter(temperature=1e-4))
    noise = Noise(0, range(5))
    x_0, zero = path.source.sample(noise, 12), torch.zeros(5)
    assert torch.equal(cold, Dense(toy)(x_0, zero, zero + 1).argmax(-1))


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not any(tensor is a for a in args):
                shares = any(isinstance(a, torch.Tensor) and a.data_ptr() == tensor.data_ptr() for a in args)
                self.largest = max(self.largest, 0 if shares else tensor.numel())
        return out


@every_rule
def test_no_second_tensor_of_the_size_of_the_logits(jump):
    length, vocab = 512, 20_000
    logits = torch.zeros(1, length, vocab)
    path, x_t = MixturePath(UniformSource(vocab)), torch.zeros(1, length, dtype=torch.int64)
    for t, t_next in [(0.5, 0.75), (7 / 8, 1.0)]:
        times = torch.tensor([t], dtype=torch.float64), torch.tensor([t_next], dtype=torch.float64)
        with LargestTensor() as watch:
            advance(SamplerState(x_t, *times, path, Noise(0)), jump, Independent.of_logits(logits))
        assert 0 < watch.largest <= logits.numel() / 8


def test_gradients_are_not_recorded_and_the_callers_mode_is_left_alone():
    toy, modes = Toy(11), []
    trunk = toy.trunk
    toy.trunk = lambda x_t, t, h: (modes.append(torch.is_grad_enabled()), trunk(x_t, t, h))[1]
    noise, path = Noise(0), MixturePath(UniformSource(11))
    x_0 = path.source.sample(noise, 4)
    for _ in trajectory(toy, path, x_0, grid=Grid.uniform(2), noise=noise):
        assert torch.is_grad_enabled()
    assert modes == [False, False]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x_0": torch.zeros(2, 5)}, "int64"),
        ({"x_0": torch.zeros(2, 0, dtype=torch.int64)}, "not empty"),
        ({"x_0": torch.zeros(10, dtype=torch.int64)}, "int64"),
        ({"x_0": torch.full((2, 5), 11)}, "vocabulary"),
        ({"x_0": torch.full((2, 5), -1)}, "vocabulary"),
        ({"noise": Noise(0, range(3))}, "one sample index per row"),
        ({"frozen": torch.zeros(2, 5)}, "must be bool"),
        ({"frozen": torch.zeros(2, 4, dtype=torch.bool)}, "must be bool"),
        ({"grid": Grid.uniform(4, torch.tensor([0.0, 0.1, 0.2]))}, "rows"),
        ({"renoise": -1.0}, "allowed"),
        ({"renoise": math.nan}, "allowed"),
    ],
)
def test_bad_arguments_are_errors(change, match):
    arguments = {
        "x_0": torch.zeros(2, 5, dtype=torch.int64),
        "grid": Grid.uniform(4),
        "rule": ExactJump(),
        "noise": Noise(0, range(2)),
    } | change
    with pytest.raises(ValueError, match=match):
        sample(Toy(11), MixturePath(UniformSource(11)), **arguments)


def test_nan_logits_are_an_error():
    def broken(x_t, t, h):
        return torch.full((*x_t.shape, 11), math.nan)

    with pytest.raises(ValueError, match="NaN"):
        run(broken, MixturePath(UniformSource(11)))


def test_the_last_step_has_the_final_temperature():
    """Nearly cold at the end, every position ends at the mode of its posterior; the first steps stay as they were."""
    path = MixturePath(UniformSource(5))
    logits = torch.tensor([0.0, 0.4, 0.2, 0.1, 0.3])
    noise = Noise(0, range(50))
    x_0 = path.source.sample(noise, 4)

    def ends(filter):
        steps = trajectory(
            lambda x, t, h: logits.expand(*x.shape, 5), path, x_0, grid=Grid.uniform(3), noise=noise, filter=filter
        )
        return [step.x_next for step in steps]

    plain, cooled = ends(None), ends(Filter(1.0, final_temperature=1e-3))
    assert torch.equal(plain[0], cooled[0])
    assert bool((cooled[-1] == 1).all())
    assert len(plain[-1].unique()) == 5
