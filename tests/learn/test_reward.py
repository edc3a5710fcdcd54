"""Post-training on rewards: unbiased weights, the tilted law, recipes and what is refused."""

from dataclasses import replace

import pytest
import torch
from networks import TableNet
from torch import nn
from worlds import SCHEDULES, world

from fsdfm.config import load_recipe
from fsdfm.data import Tokenizer, TrainingBatch
from fsdfm.flow import Posterior, total_variation
from fsdfm.flow.exact import all_states
from fsdfm.learn import REWARDS, RewardConfig, RewardObjective, register_reward
from fsdfm.learn.report import EntropyAlarm, own_entropy
from fsdfm.learn.reward import LengthRewardConfig, LettersRewardConfig, dpo_weights, reinforce_weights
from fsdfm.noise import Noise

V, L = 3, 2
PATH, _ = world("uniform", SCHEDULES[0], V, L)
STATES = all_states(V, L)
PLACE = torch.tensor([V, 1])


class TablePosterior(Posterior):
    """A law over all texts, one for each x_t."""

    joint = True

    def __init__(self, log_p):
        self.log_p = log_p

    def draw(self, samples, u, *, filter=None):
        cdf = self.log_p[samples].double().exp().cumsum(-1)
        return STATES[(cdf < u[:, :1]).sum(-1).clamp(max=len(STATES) - 1)]

    def log_prob(self, x_1):
        return self.log_p.gather(-1, (x_1 * PLACE).sum(-1, keepdim=True))[:, 0]

    def given(self, held, *, forbidden=None):
        return self

    marginals = part = changed = None


TablePosterior.__abstractmethods__ = frozenset()


class TableJoint(nn.Module):
    """A joint head that can say anything: features [B, L, V^L / L ...] are the logits of whole texts."""

    def posterior(self, network, x_t, t, *, h, rows=None):
        return TablePosterior(torch.log_softmax(network.trunk(x_t, t, h)[:, 0], -1))

    def log_prob(self, network, features, x_1, *, t, h, held, real, forbidden=None):
        return TablePosterior(torch.log_softmax(features[:, 0], -1)).log_prob(x_1)

    def shared(self, network):
        return []


class JointTable(nn.Module):
    """Logits of every text, for every x_t."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(len(STATES), len(STATES), generator=generator))
        self.head, self.joint = nn.Identity(), TableJoint()

    def trunk(self, x_t, t, h):
        return self.table[(x_t * PLACE).sum(-1)][:, None].expand(-1, L, -1)

    def logits_at(self, features):
        return features


class Letters:
    """Reads tokens 0, 1, 2 as a, b, c; none of them ends a text."""

    eos_id = -1

    def decode(self, tokens):
        return "".join("abc"[token] for token in tokens)


def spelled_reward(texts):
    return [0.7 * text.count("a") - 0.5 * (text[0] == "c") + 0.4 * (text == "cb") for text in texts]


REWARD_OF_STATES = torch.tensor(spelled_reward([Letters().decode(s) for s in STATES.tolist()]))


def objective_of(**options):
    return RewardObjective(PATH, spelled_reward, RewardConfig(**options), Letters())


def tilted(parent, beta):
    return torch.softmax(torch.log_softmax(parent.table.detach(), -1) + REWARD_OF_STATES / beta, -1)


def fit(model, parent, objective, steps, size=256):
    """Adam, then the mean of the last half of the weights."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: 1 - n / steps)
    for number in range(steps):
        noise = Noise(7, range(number * size, (number + 1) * size))
        batch = TrainingBatch(torch.zeros(size, L, dtype=torch.int64))
        optimiser.zero_grad()
        outcome = objective(model, batch, noise, training_step=number, ema=parent)
        outcome.loss.backward()
        optimiser.step()
        schedule.step()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bound"), [("reinforce", 0.05), ("dpo", 0.03)])
def test_it_learns_the_tilted_law(method, bound):
    """p e^{r/beta} / Z for every x_0, texts drawn together: total variation from 0.3 and more to below the bound."""
    parent, beta = JointTable(), 0.5
    model = JointTable()
    aim = tilted(parent, beta)
    far = total_variation(torch.softmax(model.table.detach(), -1), aim) / len(STATES)
    outcome = fit(model, parent, objective_of(method=method, beta=beta, group=8), steps=300)
    near = total_variation(torch.softmax(model.table.detach(), -1), aim) / len(STATES)
    assert far > 0.25
    assert near < bound, (far, near)
    assert outcome.logs["kl"] > 0.1


@pytest.mark.slow
def test_two_independent_steps_gain_what_they_can():
    """With jumps and independent outputs the tilt is out of reach; E r - beta KL still grows to most of beta log Z."""
    parent, model, beta = TableNet(V, L, slots=2), TableNet(V, L, slots=2), 0.5
    objective = objective_of(beta=beta, group=8, calls=2)
    first = fit(TableNet(V, L, slots=2), parent, objective, steps=1, size=4096)
    fit(model, parent, objective, steps=150)
    batch = TrainingBatch(torch.zeros(4096, L, dtype=torch.int64))
    with torch.no_grad():
        last = objective(model, batch, Noise(1, range(4096)), training_step=0, ema=parent)
    most = beta * float(torch.logsumexp(REWARD_OF_STATES / beta, 0))  # no law has more, whatever the parent
    assert first.logs["kl"] == pytest.approx(0, abs=1e-5)
    assert -first.logs["loss"] + 0.15 < -last.logs["loss"] < most


def test_reinforce_weights_are_unbiased():
    """Summed over all pairs of draws, the weights' gradient is that of -(E r - beta KL)."""
    logits = torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64), 0)
    reward, beta = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64), 0.3
    log_p = torch.log_softmax(logits, 0)
    aim = -(log_p.exp() * (reward - beta * (log_p - reference))).sum()
    (expected,) = torch.autograd.grad(aim, logits, retain_graph=True)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            both = torch.tensor([i, j])
            chance = log_p[both].sum().exp().detach()
            ratio = (log_p - reference)[both].detach()
            weights, _ = reinforce_weights(reward[both], ratio, beta=beta, group=2)
            total = total + chance * (weights * log_p[both]).sum()
    (found,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(found, expected)


def test_dpo_weights_are_the_gradient_of_its_loss_and_rest_at_the_tilt():
    reward = torch.tensor([0.3, -0.8, 1.2, 0.4], dtype=torch.float64)
    ratio = torch.tensor([0.1, 0.5, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    weights, loss = dpo_weights(reward, ratio, beta=0.4, group=2)
    (expected,) = torch.autograd.grad(loss, ratio)
    torch.testing.assert_close(weights.detach(), expected)
    still, _ = dpo_weights(reward, reward / 0.4 + 3, beta=0.4, group=4)
    torch.testing.assert_close(still, torch.zeros_like(still))


def test_a_group_shares_its_prompt():
    seen = []
    objective = replace(objective_of(group=2), reward=lambda texts: seen.extend(texts) or [0.0] * len(texts))
    given = torch.tensor([[True, False]]).expand(4, 2)
    batch = TrainingBatch(torch.tensor([[0, 1], [1, 1], [2, 1], [1, 1]]), given=given)
    objective(JointTable(), batch, Noise(0, range(4)), training_step=0, ema=JointTable())
    assert [text[0] for text in seen] == ["a", "a", "c", "c"]


def test_the_collapse_alarm_compares_with_the_parents_own_draws():
    objective = objective_of(group=2)
    assert own_entropy(objective) is objective
    outcome = objective(
        JointTable(), TrainingBatch(torch.zeros(64, L, dtype=torch.int64)), Noise(0, range(64)), training_step=0,
        ema=JointTable(),
    )  # fmt: skip
    alarm = EntropyAlarm()
    alarm.reference = outcome.logs["target_entropy"]
    assert 0 < alarm.reference < 0.7
    assert alarm.check(alarm.reference) is None
    assert "collapsing" in str(alarm.check(0.1 * alarm.reference))


def test_rewards_of_texts():
    length = REWARDS.build(LengthRewardConfig(words=4))
    assert [*length(["a b c d", "a b", ""])] == [0.0, -0.5, -1.0]
    letters = REWARDS.build(LettersRewardConfig(without="wx"))
    assert [*letters(["We saw a fox", "none here", ""])] == [-0.75, 0.0, 0.0]


def test_an_own_reward_is_named_in_a_recipe(tmp_path, monkeypatch):
    register_reward("shortest", lambda texts: [-float(len(text)) for text in texts])
    with pytest.raises(ValueError, match=r"registered already"):
        register_reward("length", len, type("Other", (LengthRewardConfig,), {}))
    recipe = load_recipe("stories-reward", ["objective.reward=shortest"])
    assert recipe.objective.reward.kind == "shortest"
    assert [*REWARDS.build(recipe.objective.reward)(["abc"])] == [-3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["objective.beta=0"], "beta is 0.0; allowed are numbers above 0"),
        (["objective.group=1"], "group is 1"),
        (["objective.rule=forced"], "rule is 'forced'; allowed are exact"),
        (["objective.reward=lenght"], "objective.reward.kind is 'lenght'; allowed are"),
        (["objective.reward.without=5"], "without"),
    ],
)
def test_what_a_recipe_cannot_say(options, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("stories-reward", options)


def test_what_is_refused():
    batch, noise = TrainingBatch(torch.zeros(6, L, dtype=torch.int64)), Noise(0, range(6))
    with pytest.raises(ValueError, match="objective.group is 4"):
        objective_of(group=4)(JointTable(), batch, noise, training_step=0, ema=JointTable())
    blind = RewardObjective(PATH, spelled_reward, RewardConfig(group=2))
    with pytest.raises(ValueError, match="cannot read"):
        blind(JointTable(), batch, noise, training_step=0, ema=JointTable())
    wrong = replace(blind.reading(Letters()), reward=lambda texts: [float("nan")])
    with pytest.raises(ValueError, match="the reward gave 1 numbers for 6 texts"):
        wrong(JointTable(), batch, noise, training_step=0, ema=JointTable())
    dropping = JointTable()
    dropping.config = type("C", (), {"dropout": 0.1})
    with pytest.raises(ValueError, match="dropout 0.1"):
        objective_of(group=2)(dropping, batch, noise, training_step=0, ema=JointTable())
    with pytest.raises(ValueError, match="use the rule exact"):
        objective_of(group=2, rule="single")(JointTable(), batch, noise, training_step=0, ema=JointTable())


def test_a_text_ends_where_it_ends():
    tokenizer = Tokenizer.bytes()
    from fsdfm.learn.reward import _text

    assert _text(tokenizer, [*tokenizer.encode("ab"), tokenizer.eos_id, *tokenizer.encode("c")]) == "ab"


def test_a_draw_is_compared_with_the_mean_of_the_others():
    """Leave one out: w_i = -(v_i - mean of the other v) / n, by hand for groups of two."""
    reward, log_ratio = torch.tensor([1.0, 0.0, 3.0, 1.0]), torch.tensor([0.0, 1.0, 0.0, 0.0])
    weights, value = reinforce_weights(reward, log_ratio, beta=0.5, group=2)  # values 1, -0.5, 3, 1
    assert weights.tolist() == pytest.approx([-1.5 / 4, 1.5 / 4, -2 / 4, 2 / 4])
    assert float(value) == pytest.approx(-4.5 / 4)
