"""Post-training on rewards: `objective.kind = "reward"`.

A reward r is any function of texts. With the parent p as the reference, the aim is

    max_pi  E_pi[r] - beta KL(pi || p),          whose optimum is the tilted law   p(x) e^{r(x)/beta} / Z

with the KL between the laws of whole draws (trajectories from x_0), which bounds that of the texts. A draw's exact
log-probability (`fsdfm.learn.rollout`) makes both losses exact:

    reinforce   R_k = r_k - beta log(pi/p)(draw_k); the weight of log pi(draw_k) is R_k minus the mean of the other R of
                its group: leave-one-out REINFORCE, unbiased, the gradient of the KL included
    dpo         for all pairs of a group  -s log sigma(beta d) - (1 - s) log sigma(-beta d), d the difference of their
                log pi/p and s = sigma(r_i - r_j): direct preference optimisation with the preferences of a
                Bradley-Terry judge, so that its minimiser is the tilted law and not a hard choice

A group is some draws after one prompt. The noise x_0 has a law of its own, which nobody learns: the tilt is reached for
every x_0 by itself, and under a few-step sampler only as far as the network's steps can express it.

Rewards of your own: `register_reward("mine", function)` in a module that the recipe names in `plugins`, which imports
it and runs its code; nothing else is run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.data import Tokenizer, TrainingBatch
from fsdfm.flow import RULES, Grid, Jump, MixturePath
from fsdfm.learn.losses import CHUNK
from fsdfm.learn.objective import Outcome, SectionConfig, TrainableDenoiser
from fsdfm.learn.path import CrossEntropy, PathObjective
from fsdfm.learn.registry import Registry
from fsdfm.learn.rollout import DrawnTexts, Tempered, roll_out, weighted_log_prob
from fsdfm.learn.teacher import ParentTeacher
from fsdfm.noise import Noise

__all__ = [
    "REWARDS",
    "LengthRewardConfig",
    "LettersRewardConfig",
    "Reward",
    "RewardConfig",
    "RewardObjective",
    "dpo_weights",
    "make_reward_objective",
    "register_reward",
    "reinforce_weights",
]


class Reward(Protocol):
    """A function of texts: one number each, larger is better."""

    def __call__(self, texts: Sequence[str]) -> Sequence[float] | Tensor:
        """The rewards of some texts, which were drawn together."""
        ...


REWARDS = Registry("objective.reward.kind", "length")
"""kind -> config, build(config) -> Reward."""


def register_reward(name: str, function: Callable[..., Any], config: type[Any] | None = None) -> None:
    """Let recipes say `objective.reward = name`.

    function   texts -> numbers; or with a config (config) -> such a function
    config     a frozen dataclass of options, among them kind: str = name; None: there are none
    """
    if config is None:
        config = make_dataclass(f"{name.title()}Reward", [("kind", str, name)], frozen=True, kw_only=True)
        REWARDS.register(name, config, lambda config: function)  # noqa: ARG005 (one signature for all of its kind)
        return
    REWARDS.register(name, config, function)


@dataclass(frozen=True, kw_only=True)
class LengthRewardConfig:
    """Texts of about so many words: r = -|words - target| / target."""

    kind: str = "length"
    words: int = 100

    def __post_init__(self) -> None:
        if self.words < 1:
            raise ValueError(f"words is {self.words}; allowed are whole numbers >= 1")


@dataclass(frozen=True, kw_only=True)
class LettersRewardConfig:
    """Texts without some letters: r = -(share of words that hold one of them), case ignored."""

    kind: str = "letters"
    without: str = "w"

    def __post_init__(self) -> None:
        if not self.without.isalpha():
            raise ValueError(f"without is {self.without!r}; give the letters that texts should not have, such as w")


def _length_reward(config: LengthRewardConfig) -> Reward:
    return lambda texts: [-abs(len(text.split()) - config.words) / config.words for text in texts]


def _letters_reward(config: LettersRewardConfig) -> Reward:
    banned = re.compile(f"[{re.escape(config.without)}]", re.IGNORECASE)

    def reward(texts: Sequence[str]) -> list[float]:
        words = [text.split() for text in texts]
        return [-sum(bool(banned.search(word)) for word in own) / max(1, len(own)) for own in words]

    return reward


register_reward("length", _length_reward, LengthRewardConfig)
register_reward("letters", _letters_reward, LettersRewardConfig)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The keys of [objective] with kind = "reward"."""

    kind: str = "reward"
    reward: SectionConfig = field(default_factory=LengthRewardConfig, metadata={"registry": REWARDS})
    method: Literal["reinforce", "dpo"] = "reinforce"
    beta: float = 0.1  # the price of a nat of KL to the parent, in units of the reward
    group: int = 8  # draws after one prompt, which are compared with each other; divides the portion of a batch
    calls: int = 1  # network calls of a draw
    rule: str = "exact"  # of a step, as sample.jump
    heat: float = 1.0  # the temperature of the draws: the law that is trained is the one at this temperature

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta is {self.beta}; allowed are numbers above 0: at 0 the reward's maximum is one text")
        if self.group < 2 or self.calls < 1 or not self.heat > 0:
            raise ValueError(
                f"group is {self.group}, calls {self.calls}, heat {self.heat}; allowed are group >= 2, calls >= 1 and "
                "a heat above 0"
            )
        self.jump()

    def jump(self) -> Jump:
        """The rule that is named: one whose draws have a log-probability."""
        found = RULES.get(self.rule)
        if not isinstance(found, Jump) or not (found.redraws_candidates or found.markov):
            known = [name for name, rule in RULES.items() if isinstance(rule, Jump)]
            raise ValueError(f"rule is {self.rule!r}; allowed are {', '.join(known)}: others have no log-probability")
        return found


def make_reward_objective(config: RewardConfig, path: MixturePath) -> RewardObjective:
    """The objective of a recipe's section."""
    return RewardObjective(path, REWARDS.build(config.reward), config)


def reinforce_weights(reward: Tensor, log_ratio: Tensor, *, beta: float, group: int) -> tuple[Tensor, Tensor]:
    """(what to multiply each log pi(draw) with, the value -mean R): leave-one-out REINFORCE on R = r - beta log(pi/p).

    A_k = R_k - (1/(K-1)) sum_{j != k} R_j;  the gradient of sum_k (-A_k / B) log pi(draw_k) is, on average, that of
    -(E r - beta KL).
    """
    value = (reward - beta * log_ratio).view(-1, group)
    others = (value.sum(1, keepdim=True) - value) / (group - 1)
    return -(value - others).flatten() / value.numel(), -value.mean()


def dpo_weights(reward: Tensor, log_ratio: Tensor, *, beta: float, group: int) -> tuple[Tensor, Tensor]:
    """(what to multiply each log pi(draw) with, the loss): DPO over all pairs of a group with soft preferences.

    The derivative of a pair's loss in d is beta (sigma(beta d) - sigma(r_i - r_j)): 0 where beta d = r_i - r_j.
    """
    r, ratio = reward.view(-1, group), log_ratio.view(-1, group)
    first, second = torch.triu_indices(group, group, offset=1, device=reward.device)
    prefer = torch.sigmoid(r[:, first] - r[:, second])
    d = beta * (ratio[:, first] - ratio[:, second])
    loss = -(prefer * F.logsigmoid(d) + (1 - prefer) * F.logsigmoid(-d)).mean()
    slope = beta * (torch.sigmoid(d) - prefer) / prefer.numel()
    weights = torch.zeros_like(ratio).index_add(1, first, slope).index_add(1, second, -slope)
    return weights.flatten(), loss


_WEIGHTS = {"reinforce": reinforce_weights, "dpo": dpo_weights}


@dataclass(frozen=True)
class RewardObjective:
    """Draws texts with the model, asks the reward about them and moves the model towards the tilted law.

    tokenizer   what texts are read with: `reading` gives it
    """

    path: MixturePath
    reward: Reward
    config: RewardConfig = field(default_factory=RewardConfig)
    tokenizer: Tokenizer | None = None
    chunk: int | None = CHUNK

    joint_allowed = True  # a draw of a joint posterior has its log-probability, too
    notes_own_entropy = True  # asked of the student at the start, it notes what the collapse alarm compares with

    @property
    def step_sizes(self) -> Tensor:
        """That of its draws."""
        return torch.tensor([1 / self.config.calls], dtype=torch.float64)

    @property
    def teacher(self) -> ParentTeacher:
        """The parent, for the KL."""
        return ParentTeacher(calls=self.config.calls)

    @property
    def teacher_share(self) -> float:
        """Every draw is compared with the parent's law."""
        return 1.0

    @property
    def validation(self) -> PathObjective:
        """The likelihood of held-out text: what the reward costs there."""
        return PathObjective(self.path, loss=CrossEntropy())

    def reading(self, tokenizer: Tokenizer) -> RewardObjective:
        """The same objective, able to read."""
        return replace(self, tokenizer=tokenizer)

    def __call__(
        self,
        model: TrainableDenoiser,
        batch: TrainingBatch,
        noise: Noise,
        *,
        training_step: int,  # noqa: ARG002 (one signature for all of its kind)
        ema: TrainableDenoiser,
    ) -> Outcome:
        """The loss of one draw per row; `ema` is the parent."""
        _check_dropout(model)
        policy, parent = (Tempered(network, self.config.heat) for network in (model, ema))
        rollout = self._draw(policy, batch, noise)
        rewards = self._rewards(rollout.x_1).to(rollout.x_1.device)
        features = rollout.features(policy)
        with torch.no_grad():
            ones = torch.ones(len(rewards), device=rollout.x_1.device)
            _, log_p = weighted_log_prob(policy, rollout, [f.detach() for f in features], weight=ones, chunk=self.chunk)
            _, reference = weighted_log_prob(parent, rollout, rollout.features(parent), weight=ones, chunk=self.chunk)
        log_ratio = log_p - reference
        weigh, beta, group = _WEIGHTS[self.config.method], self.config.beta, self.config.group
        weights, value = weigh(rewards, log_ratio, beta=beta, group=group)
        surrogate, _ = weighted_log_prob(policy, rollout, features, weight=weights, chunk=self.chunk)
        loss = surrogate - surrogate.detach() + value
        notes = {
            "loss": float(value),
            "reward": float(rewards.mean()),
            "kl": float(log_ratio.mean()),
            "target_entropy": _unigram_entropy(rollout.x_1, batch.given),
        }
        t = torch.zeros(len(rewards), dtype=torch.float64)
        return Outcome(loss, t, t + 1 / self.config.calls, -rewards, notes)

    def _draw(self, policy: Tempered, batch: TrainingBatch, noise: Noise) -> DrawnTexts:
        """A text per row; the rows of a group share the first one's prompt."""
        size, group = len(batch.x_1), self.config.group
        if size % group:
            raise ValueError(
                f"the batch has {size} rows here, objective.group is {group}; make train.batch_size a multiple of it"
            )
        first = torch.arange(size, device=batch.x_1.device) // group * group
        x_0 = self.path.source.sample(noise, batch.x_1.shape[1]).to(batch.x_1.device)
        frozen = None
        if batch.given is not None:
            frozen = batch.given[first]
            x_0 = torch.where(frozen, batch.x_1[first], x_0)
        grid, rule = Grid.uniform(self.config.calls), self.config.jump()
        return roll_out(policy, self.path, x_0, grid=grid, noise=noise, rule=rule, frozen=frozen)

    def _rewards(self, x_1: Tensor) -> Tensor:
        if self.tokenizer is None:
            raise ValueError("the objective cannot read texts yet; give it a tokenizer: objective.reading(tokenizer)")
        texts = [_text(self.tokenizer, row) for row in x_1.tolist()]
        found = torch.as_tensor(self.reward(texts), dtype=torch.float32).flatten()
        if len(found) != len(texts) or not bool(torch.isfinite(found).all()):
            raise ValueError(
                f"the reward gave {len(found)} numbers for {len(texts)} texts, or one that is not finite; it must give "
                "a finite number for every text"
            )
        return found


def _check_dropout(model: Any) -> None:
    dropout = getattr(getattr(model, "config", None), "dropout", 0.0)
    if dropout:
        raise ValueError(
            f"the model has dropout {dropout}, so that what it draws is not what it is asked about; set model.dropout "
            "to 0.0"
        )


def _text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of a row up to its end."""
    end = next((i for i, token in enumerate(tokens) if i and token == tokenizer.eos_id), len(tokens))
    return tokenizer.decode(tokens[:end])


def _unigram_entropy(x_1: Tensor, given: Tensor | None) -> float:
    """The mean over texts of the entropy of their own tokens, in nats, what is given left out."""
    found = []
    for index, row in enumerate(x_1):
        own = row if given is None else row[~given[index]]
        counts = torch.tensor([*Counter(own.tolist()).values()], dtype=torch.float64)
        share = counts / counts.sum()
        found.append(-float((share * share.log()).sum()))
    return sum(found) / len(found)
