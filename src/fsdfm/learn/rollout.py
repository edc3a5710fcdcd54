"""Rollouts: texts drawn by a sampler, with all that their exact log-probability needs.

A trajectory x_0 -> ... -> x_1 has a law that is known step by step. There are two ways to write a step's, and both give
exact policy gradients:

    given the coins      sum over candidates of log p(x_next^i | x_t)      rules that redraw candidates (exact, spaced,
                         or log p(text | x_t) where positions are joint    systematic): their coins do not look at p
    over the coins       log stay, or log r + log p(x_next^i | x_t)        every Markov rule (single, instant)

In the last step every position is a candidate and every rule redraws from p, so that both are log p(x_1 | x_t). Given
the coins the law is that of an enlarged draw (the coins, and under a joint posterior the whole text of which candidates
took their part); what is added does not depend on the weights, so that the score function is still unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdfm.flow import Filter, Grid, Jump, MixturePath, Plan, Posterior, Sampler, SamplerState, StepRule, posterior_of
from fsdfm.flow.posterior import without_token
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_feature_loss, chunked_loss, log_probs_at
from fsdfm.learn.objective import TrainableDenoiser
from fsdfm.noise import Noise

__all__ = ["DrawnStep", "DrawnTexts", "Tempered", "roll_out", "weighted_log_prob"]

_SAMPLES = 4  # whose logits live at a time, where positions are joint


class Tempered:
    """A network whose logits are divided by a temperature: what draws at that temperature are draws of."""

    def __init__(self, model: Any, temperature: float):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; allowed are numbers above 0")
        self.model, self.temperature = model, temperature

    @property
    def head(self) -> Any:
        """The model's own."""
        return self.model.head

    @property
    def joint(self) -> Any:
        """The model's joint head, if it has one."""
        return getattr(self.model, "joint", None)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """The model's features."""
        features: Tensor = self.model.trunk(x_t, t, h)
        return features

    def logits_at(self, features: Tensor) -> Tensor:
        """The model's logits, tempered."""
        logits: Tensor = self.model.logits_at(features)
        return logits if self.temperature == 1 else logits / self.temperature


@dataclass(frozen=True)
class DrawnStep:
    """A step that was taken.

    x_t, x_next   int64 [B, L]
    t, h          float64 [B]
    redraws       E, the redraws that the rule expects: float64 [B]
    candidates    positions whose coin let them be redrawn: bool [B, L]
    text          what was drawn for the whole text where positions are joint; x_next at the candidates elsewhere
    frozen        positions that could not change: bool [B, L]
    """

    x_t: Tensor
    x_next: Tensor
    t: Tensor
    h: Tensor
    redraws: Tensor
    candidates: Tensor
    text: Tensor
    frozen: Tensor


@dataclass(frozen=True)
class DrawnTexts:
    """The steps of some texts; `x_1` is what they end in."""

    path: MixturePath
    rule: Jump
    steps: tuple[DrawnStep, ...]

    @property
    def x_1(self) -> Tensor:
        """The texts: int64 [B, L]."""
        return self.steps[-1].x_next

    def features(self, model: Any) -> list[Tensor]:
        """What a network says of every state on the way: [B, L, C] each."""
        return [model.trunk(step.x_t, step.t.to(step.x_t.device), step.h.to(step.x_t.device)) for step in self.steps]


class _Witness:
    """A posterior that remembers the whole texts drawn from it."""

    def __init__(self, posterior: Posterior, text: Tensor):
        self.posterior, self.text, self.joint = posterior, text, posterior.joint
        self.marginals = posterior.marginals

    def draw(self, samples: Tensor, u: Tensor, *, filter: Filter | None = None) -> Tensor:
        drawn = self.posterior.draw(samples, u, filter=filter)
        self.text[samples] = drawn
        return drawn


class _Recorder(StepRule):
    """A rule, and a note of every step it takes."""

    def __init__(self, rule: Jump):
        self.rule, self.steps = rule, list[DrawnStep]()

    def plan(self, state: SamplerState) -> Plan:
        """The rule's."""
        return self.rule.plan(state)

    def apply(self, state: SamplerState, plan: Plan, posterior: Posterior) -> Tensor:
        """The rule's, noted."""
        witness = _Witness(posterior, state.x_t.clone())
        x_next = self.rule.apply(state, plan, witness)  # type: ignore[arg-type]  # what rules ask of a posterior
        candidates = torch.zeros_like(state.x_t, dtype=torch.bool)
        candidates.view(-1)[plan.rows] = True
        frozen = ~state.movable()
        redraws = self.rule.redraws(state.path.schedule, state.t, state.t_next).expand(len(state.x_t))
        text = witness.text if posterior.joint else x_next
        t, h = state.t, state.t_next - state.t
        self.steps.append(DrawnStep(state.x_t, x_next, t, h, redraws, candidates, text, frozen))
        return x_next


@torch.no_grad()
def roll_out(
    model: Any,
    path: MixturePath,
    x_0: Tensor,
    *,
    grid: Grid,
    noise: Noise,
    rule: Jump,
    frozen: Tensor | None = None,
) -> DrawnTexts:
    """Draw texts from x_0 along the grid, and keep what their log-probability needs."""
    if getattr(model, "joint", None) is not None and not rule.redraws_candidates:
        raise ValueError(f"{rule} looks at marginals, and this model draws positions together; use the rule exact")
    recorder = _Recorder(rule)
    sampler = Sampler(path, x_0, grid=grid, noise=noise, rule=recorder, frozen=frozen)
    while not sampler.done:
        asked = sampler.question()
        sampler.answer(posterior_of(model, asked.x_t, asked.t, h=asked.h, rows=asked.rows))
    return DrawnTexts(path, rule, tuple(recorder.steps))


def weighted_log_prob(
    model: TrainableDenoiser,
    rollout: DrawnTexts,
    features: Sequence[Tensor],
    *,
    weight: Tensor,
    chunk: int | None = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(sum_b weight_b log P(draw_b), log P(draw_b) [B]), the first differentiable in the model.

    features   `rollout.features(model)`
    weight     float [B]; a policy gradient, and the gradient of any loss of the log-probabilities, is such a sum
    """
    joint = getattr(model, "joint", None)
    total, by_sample = features[0].new_zeros(()), torch.zeros(len(weight), device=features[0].device)
    for step, own in zip(rollout.steps, features, strict=True):
        part = _joint_step if joint is not None else _independent_step
        value, log_p = part(model, rollout, step, features=own, weight=weight, chunk=chunk)
        total, by_sample = total + value, by_sample + log_p
    return total, by_sample


def _independent_step(
    model: TrainableDenoiser,
    rollout: DrawnTexts,
    step: DrawnStep,
    *,
    features: Tensor,
    weight: Tensor,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """A step whose positions are independent: the rows that say something of it, a few at a time."""
    asked = step.candidates if rollout.rule.redraws_candidates else ~step.frozen
    rows = asked.flatten().nonzero()[:, 0]
    sample = rows // step.x_t.shape[1]
    log_p = features.new_zeros(len(weight))
    if not len(rows):
        return features.new_zeros(()), log_p
    losses = _row_losses(rollout, step, rows)
    total, per_row = chunked_loss(
        model, features.flatten(0, 1)[rows], -weight.to(features)[sample], losses=losses, chunk=chunk
    )
    return total, log_p.index_add(0, sample, -per_row.to(log_p))


def _row_losses(rollout: DrawnTexts, step: DrawnStep, rows: Tensor) -> ChunkLoss:
    """-log P of what each row did."""
    x_t, x_next = step.x_t.flatten()[rows], step.x_next.flatten()[rows]
    redraws, forbidden = step.redraws.to(x_t.device)[rows // step.x_t.shape[1]], rollout.path.source.mask_token

    def losses(logits: Tensor, part: slice) -> Tensor:
        if forbidden is not None:
            logits = without_token(logits, forbidden)
        log_p_next, log_p = log_probs_at(logits, torch.stack([x_next[part], x_t[part]], -1)).unbind(-1)
        if rollout.rule.redraws_candidates:
            return -log_p_next
        precise = log_p.to(torch.float64)
        ratio = rollout.rule.leave_ratio(-torch.expm1(precise), redraws[part])
        moved = torch.log(ratio).to(log_p_next) + log_p_next
        stayed = rollout.rule.log_stay(precise, redraws[part]).to(log_p)
        return -torch.where(x_next[part] != x_t[part], moved, stayed)

    return losses


def _joint_step(
    model: Any, rollout: DrawnTexts, step: DrawnStep, *, features: Tensor, weight: Tensor, chunk: int | None
) -> tuple[Tensor, Tensor]:
    """A step whose texts were drawn whole; one without a candidate drew nothing."""
    length, joint = step.x_t.shape[1], model.joint
    drew = step.candidates.any(1)
    held, every = torch.where(step.frozen, step.x_t, -1), torch.ones_like(step.frozen)
    t, h = step.t.to(features.device), step.h.to(features.device)

    def losses(some: Tensor, part: slice) -> Tensor:
        own = slice((part.start or 0) // length, None if part.stop is None else part.stop // length)
        log_p: Tensor = joint.log_prob(
            model,
            some.view(*step.text[own].shape, -1),
            step.text[own],
            t=t[own],
            h=h[own],
            held=held[own],
            real=every[own],
            forbidden=rollout.path.source.mask_token,
        )
        return (-log_p / length)[:, None].expand(-1, length).flatten()

    weights = (-weight.to(features) * drew)[:, None].expand(-1, length).flatten()
    parameters = [*model.head.parameters(), *joint.parameters(), *joint.shared(model)]
    total, per_row = chunked_feature_loss(
        features.flatten(0, 1),
        weights,
        losses=losses,
        chunk=None if chunk is None else _SAMPLES * length,
        parameters=[p for p in parameters if p.requires_grad],
    )
    return total, -per_row.view(-1, length).sum(1) * drew
