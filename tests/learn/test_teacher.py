import pytest
import torch
from networks import MixerNet
from worlds import world

from fsdfm.flow import ExactJump, MaskSource, MixturePath, PolynomialSchedule, SingleJump, UniformSource
from fsdfm.flow.exact import all_states, transition_matrix
from fsdfm.learn.teacher import TABLEAUS, ShortcutConfig, ShortcutTeacher, Stage, Tableau, chained_weights
from fsdfm.noise import Noise

VOCAB, LENGTH = 7, 5


class Recorder(MixerNet):
    """Notes what it was asked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []

    def trunk(self, x_t, t, h):
        self.asked.append((x_t.clone(), t.clone(), h.clone()))
        return super().trunk(x_t, t, h)


def ask(name, *, t=0.25, h=0.5, batch=3, jump=None, average=None, seed=0):
    path, model = MixturePath(UniformSource(VOCAB)), Recorder(VOCAB)
    noise = Noise(seed, range(batch))
    x_t = path.source.sample(noise, LENGTH)
    teacher = ShortcutTeacher(TABLEAUS[name], jump=jump or ExactJump(), average=average)
    times, sizes = torch.full((batch,), t, dtype=torch.float64), torch.full((batch,), h, dtype=torch.float64)
    return model, teacher.target(model, path, x_t, t=times, h=sizes, noise=noise), x_t


def log_probs(target, count):
    return target.log_probs(slice(0, count), forbidden=None)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("rk2", [0, 0.5]),
        ("rk4", [0, 0.5, 0.5, 1]),
        ("classical-rk4", [0, 0.5, 0.5, 1]),
        ("heun", [0, 1]),
        ("midpoint", [0, 0.5]),
        ("chained", [0, 0.5]),
    ],
)
def test_stages_ask_at_their_times_with_half_the_step(name, nodes):
    model, _, x_t = ask(name)
    assert [float(t[0]) for _, t, _ in model.asked] == [0.25 + 0.5 * c for c in nodes]
    assert all(bool((h == 0.25).all()) for _, _, h in model.asked)
    assert torch.equal(model.asked[0][0], x_t)


def test_the_papers_rk4_starts_each_state_from_the_one_before():
    """With a step to t+h = 1 and jumps that surely redraw, a chained state differs from every earlier one."""
    model, _, x_t = ask("rk4", t=0.0, h=1.0, batch=200)
    states = [x for x, _, _ in model.asked]
    # x(1) keeps x_t with probability 1/2 and more; x(2) starts from x(1) over [1/2, 1], a redraw of every position
    kept_1 = float((states[1] == x_t).double().mean())
    assert 0.5 < kept_1 < 0.65
    kept_2 = float((states[2] == states[1]).double().mean())
    assert kept_2 < 0.4  # redrawn everywhere: equal only by chance
    classical, _, x_t = ask("classical-rk4", t=0.0, h=1.0, batch=200)
    states = [x for x, _, _ in classical.asked]
    assert float((states[2] == x_t).double().mean()) > 0.5  # x(2) starts from x_t again, over half a step


@pytest.mark.parametrize("name", ["rk2", "rk4", "classical-rk4", "heun", "midpoint"])
def test_the_mean_of_logits_is_taken_on_the_features_and_is_exact(name):
    model, target, _ = ask(name)
    assert len(target.features) == 1
    by_hand = sum(
        weight * model.logits_at(MixerNet.trunk(model, x, t, h)).double()
        for weight, (x, t, h) in zip(TABLEAUS[name].weights, list(model.asked), strict=True)
    )
    expected = torch.log_softmax(by_hand.flatten(0, 1), -1)
    assert torch.allclose(log_probs(target, 15).double(), expected, atol=1e-5)


def test_the_mean_of_probabilities():
    model, target, _ = ask("rk2", average="probabilities")
    parts = [torch.softmax(model(x, t, h).double(), -1) for x, t, h in list(model.asked)]
    assert torch.allclose(log_probs(target, 15).exp().double(), (parts[0] + parts[1]).flatten(0, 1) / 2, atol=1e-6)


def test_chained_weights_are_those_of_two_exact_half_steps():
    """The law of two chained exact half-steps with frozen posteriors p1, p2 is one step with the target posterior."""
    path, _ = world("uniform", PolynomialSchedule(2), vocab=4, length=1)
    t, h = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    p1, p2 = (torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    p1, p2 = p1 / p1.sum(), p2 / p2.sum()
    w = chained_weights(path.schedule, t, h)[0]
    assert float(w.sum()) == pytest.approx(1)

    def law(p, a, b):
        return transition_matrix(p.expand(4, 1, 4), path, ExactJump(), t=a, t_next=b)

    two = law(p1, 0.3, 0.55) @ law(p2, 0.55, 0.8)
    one = law(w[0] * p1 + w[1] * p2, 0.3, 0.8)
    assert torch.allclose(two, one, atol=1e-12)
    end = chained_weights(path.schedule, torch.tensor([0.5]).double(), torch.tensor([0.5]).double())[0]
    assert end.tolist() == [0.0, 1.0]  # the last half-step redraws everything


def test_chained_target_mixes_probabilities_with_its_weights():
    model, target, _ = ask("chained")
    parts = [torch.softmax(model(x, t, h).double(), -1).flatten(0, 1) for x, t, h in list(model.asked)]
    w = chained_weights(PolynomialSchedule(), torch.tensor([0.25]).double(), torch.tensor([0.5]).double())[0]
    assert torch.allclose(log_probs(target, 15).exp().double(), w[0] * parts[0] + w[1] * parts[1], atol=1e-6)


def test_hops_follow_the_rule_and_leave_frozen_positions_alone():
    path, model = MixturePath(MaskSource(VOCAB)), Recorder(VOCAB)
    noise = Noise(0, range(50))
    x_t = path.source.sample(noise, LENGTH)
    frozen = torch.zeros_like(x_t, dtype=torch.bool)
    frozen[:, 0] = True
    ShortcutTeacher(TABLEAUS["rk4"], jump=SingleJump()).target(
        model, path, x_t, t=torch.zeros(50).double(), h=torch.ones(50).double(), noise=noise, frozen=frozen
    )
    last = model.asked[-1][0]
    assert bool((last[:, 0] == VOCAB - 1).all())
    assert not bool((last[:, 1:] == VOCAB - 1).any())  # everything else was revealed by the redraw at t = 1


def test_a_target_does_not_depend_on_its_batch():
    _, whole, _ = ask("rk4", batch=4)
    path, model = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB)
    noise = Noise(0, [2])
    x_t = path.source.sample(noise, LENGTH)
    one = ShortcutTeacher(TABLEAUS["rk4"]).target(
        model, path, x_t, t=torch.tensor([0.25]).double(), h=torch.tensor([0.5]).double(), noise=noise
    )
    assert torch.allclose(log_probs(one, 5), whole.log_probs(slice(10, 15), forbidden=None), atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Tableau((Stage(0.0),), (0.5,)),
        lambda: Tableau((Stage(0.0),), (0.5, 0.5)),
        lambda: Tableau((Stage(0.0), Stage(0.5, start=1)), (0.5, 0.5)),
    ],
)
def test_impossible_tableaus_are_errors(bad):
    with pytest.raises(ValueError, match="sum to|one each|earlier"):
        bad()


def test_states_enumerate():
    assert len(all_states(3, 2)) == 9


def test_bad_temperature_is_an_error():
    with pytest.raises(ValueError, match="allowed"):
        ShortcutTeacher(TABLEAUS["rk2"], temperature=0)


def test_every_stage_has_noise_of_its_own():
    """Two stages that surely redraw from one state by one posterior reach different states."""
    path, model = MixturePath(UniformSource(VOCAB)), Recorder(VOCAB)
    end = Stage(1.0, start=0, drive=0, hop=1.0)
    noise = Noise(0, range(50))
    whole = torch.ones(50, dtype=torch.float64)
    teacher = ShortcutTeacher(Tableau((Stage(0.0), end, end), (0.0, 0.5, 0.5)))
    teacher.target(model, path, path.source.sample(noise, LENGTH), t=0 * whole, h=whole, noise=noise)
    _, (one, *_), (two, *_) = model.asked
    assert float((one == two).double().mean()) < 0.5


@pytest.mark.parametrize("from_h", [-0.1, 1.01, 2.0])
def test_the_teachers_range_is_of_step_sizes(from_h):
    with pytest.raises(ValueError, match="allowed are step sizes 0 <= from_h <= 1"):
        ShortcutConfig(from_h=from_h)


def test_a_forbidden_token_has_no_part_in_a_target():
    """log p is that of the others, and -inf there, for a mean of logits and for one of probabilities."""
    model, path = MixerNet(5), MixturePath(MaskSource(5))
    x_t = torch.full((2, 4), 4)
    h = torch.full((2,), 0.5, dtype=torch.float64)
    for name in ("rk2", "chained"):
        teacher = ShortcutTeacher(TABLEAUS[name])
        target = teacher.target(model, path, x_t, t=torch.zeros_like(h), h=h, noise=Noise(0, range(2)))
        log_p = target.log_probs(slice(None), forbidden=4)
        assert bool((log_p[:, 4] == -torch.inf).all())
        assert torch.allclose(log_p[:, :4].exp().sum(-1), torch.ones(8), atol=1e-5)


def test_the_papers_tableaus_as_data():
    """Algorithms 1 and 2: node, start, drive and hop of every stage, and the weights."""
    stages = [(s.node, s.start, s.drive, s.hop) for s in TABLEAUS["rk4"].stages]
    assert stages == [(0.0, None, 0, 0.0), (0.5, 0, 0, 0.5), (0.5, 1, 1, 0.5), (1.0, 2, 2, 0.5)]
    assert TABLEAUS["rk4"].weights == (1 / 6, 2 / 6, 2 / 6, 1 / 6)
    assert [(s.node, s.hop) for s in TABLEAUS["rk2"].stages] == [(0.0, 0.0), (0.5, 0.5)]


@pytest.mark.parametrize("name", ["rk2", "classical-rk4", "heun", "midpoint", "chained"])
def test_a_hop_ends_where_its_stage_asks(name):
    """As in any explicit Runge-Kutta method; the paper's rk4 alone hops from stage to stage."""
    stages = TABLEAUS[name].stages
    for stage in stages[1:]:
        assert stage.start is not None
        assert stage.hop == stage.node - stages[stage.start].node


def test_a_target_is_at_the_teachers_temperature():
    """log softmax(logits / T), whatever else the teacher does."""
    path, model, noise = MixturePath(UniformSource(VOCAB)), MixerNet(VOCAB), Noise(0, range(3))
    x_t, t, h = path.source.sample(noise, LENGTH), torch.full((3,), 0.25), torch.full((3,), 0.5)
    itself = Tableau((Stage(0.0),), (1.0,))
    target = ShortcutTeacher(itself, temperature=2.0).target(model, path, x_t, t=t, h=h, noise=noise)
    expected = torch.log_softmax(model(x_t, t, h / 2).flatten(0, 1) / 2, -1)
    assert torch.allclose(target.log_probs(slice(None), forbidden=None), expected, atol=1e-6)
