"""The peers' objectives for recipes: `objective.kind = "mdlm"`, and so on, each with a config of its own.

Time is kappa: all of them are trained on the linear schedule, kappa_t = t, and a peer's own schedule is a law of t and
a weight. What a network must be like (`network`) is the objective's to say: what it is told of the time, what its
outputs mean. A *round* of a distillation is a run: its parent is the teacher (`teacher.network` is "parent"), the next
round's parent is this run.

Losses are computed a few rows at a time, as everywhere: no [B, L, V] tensor lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import ExactJump, Independent, MixturePath, PolynomialSchedule, SamplerState, advance
from fsdfm.flow.posterior import without_token
from fsdfm.learn import Objective, Outcome, Teacher, TrainableDenoiser, register_objective
from fsdfm.learn.losses import CHUNK, ChunkLoss, chunked_loss, log_probs_at
from fsdfm.learn.objective import UntaughtObjective
from fsdfm.learn.path import NoisedRows, mean_by_sample, noised, settled
from fsdfm.learn.teacher import ParentTeacher
from fsdfm.noise import Noise, Purpose
from fsdfm.peers import duo, hdlm, sdtt, sedd
from fsdfm.peers.network import embed_sparse
from fsdfm.peers.noising import Geometric, LogLinear, Noising

__all__ = [
    "ConsistencyConfig",
    "ConsistencyObjective",
    "DuoConfig",
    "DuoObjective",
    "GammaConfig",
    "GammaObjective",
    "HybridConfig",
    "HybridObjective",
    "MdlmConfig",
    "MdlmObjective",
    "RoundConfig",
    "RoundObjective",
    "ScoreConfig",
    "ScoreObjective",
]

_STEP = 2.0**-10  # what a network that knows its step size is told


@dataclass(frozen=True)
class _PeerObjective(UntaughtObjective):
    """What all of them share: one step size, no teacher, and their own loss on held-out text."""

    path: MixturePath
    chunk: int | None = field(default=CHUNK, kw_only=True)

    source = "mask"

    def __post_init__(self) -> None:
        masked = self.path.source.mask_token is not None
        if masked != (self.source == "mask") or self.path.schedule != PolynomialSchedule():
            raise ValueError(
                f"{type(self).__name__} is for the {self.source} source and kappa = t, not {self.path.source!r} with "
                f'{self.path.schedule!r}; set flow.source to "{self.source}", flow.schedule to "polynomial" and '
                "flow.exponent to 1"
            )

    @property
    def network(self) -> Mapping[str, Any]:
        """Fields of the network's config that this objective decides."""
        return {"clock": "none", "says": "posterior", "blend": 0.0}

    @property
    def step_sizes(self) -> Tensor:
        """One: these networks are not told a step size."""
        return torch.tensor([_STEP], dtype=torch.float64)

    def __call__(
        self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, *, training_step: int, ema: Any
    ) -> Outcome:
        """The loss of a batch: a subclass's."""
        raise NotImplementedError

    def _outcome(
        self, model: TrainableDenoiser, features: Tensor, rows: NoisedRows, *, t: Tensor, losses: ChunkLoss
    ) -> Outcome:
        total, per_row = chunked_loss(
            model, features.flatten(0, 1), rows.weight.flatten(), losses=losses, chunk=self.chunk
        )
        h = torch.full_like(t, _STEP)
        return Outcome(total, t, h, mean_by_sample(per_row, rows, len(t)), {"loss": float(total.detach())})


def _noise_levels(noise: Noise, batch: TrainingBatch, shortest: float) -> Tensor:
    """Their times, 1 - t: shortest + (1 - shortest) u, one stratum of the batch per sample: float64 [B]."""
    size = batch.size or len(batch.x_1)
    u = (noise.samples.cpu() % size + noise.uniform(Purpose.TIME, 1)[:, 0].cpu()) / size
    return shortest + (1 - shortest) * u


def _ask(model: TrainableDenoiser, x_t: Tensor, t: Tensor) -> Tensor:
    """Features [B, L, C] of a network at times t."""
    told = t.to(x_t.device)
    return model.trunk(x_t, told, torch.full_like(told, _STEP))


def _per_position(values: Tensor, rows: NoisedRows) -> Tensor:
    """One value per sample, spread over its flattened positions."""
    return values.to(rows.x_t.device)[:, None].expand_as(rows.x_t).flatten()


# --- MDLM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MdlmConfig:
    """The keys of [objective] with kind = "mdlm"."""

    kind: str = "mdlm"
    shortest: float = 1e-3  # the least noise, 1 - t, that is drawn


@dataclass(frozen=True)
class MdlmObjective(_PeerObjective):
    """-log p(x_1 | x_t) / (1 - t) at masks; t stratified over the batch, the network not told it."""

    shortest: float = 1e-3

    def __call__(self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, **_: Any) -> Outcome:
        """The mean over all positions, shown ones counting 0."""
        t = 1 - _noise_levels(noise, batch, self.shortest)
        batch = settled(self.path, batch, noise, h=torch.full_like(t, _STEP))
        rows = noised(self.path, batch, noise, t=t, spaced_share=0.0)
        weight, x_1 = _per_position(1 / (1 - t), rows).float(), rows.x_1.flatten()

        def losses(logits: Tensor, part: slice) -> Tensor:
            assert self.path.source.mask_token is not None
            allowed = without_token(logits, self.path.source.mask_token)
            return -log_probs_at(allowed, x_1[part, None])[:, 0] * weight[part]

        return self._outcome(model, _ask(model, rows.x_t, t), rows, t=t, losses=losses)


# --- SEDD -------------------------------------------------------------------------------------------------------------

NoiseName = Literal["log-linear", "geometric"]
_NOISES: dict[NoiseName, Noising] = {"log-linear": LogLinear(), "geometric": Geometric()}
_CLOCKS: dict[NoiseName, str] = {"log-linear": "sigma", "geometric": "geometric"}


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """The keys of [objective] with kind = "sedd-absorb" or "sedd-uniform"."""

    kind: str = "sedd-absorb"
    noise: NoiseName = "log-linear"  # which times are drawn, how they count, and what the network is told
    shortest: float = 1e-3  # the least of their times that is drawn

    def __post_init__(self) -> None:
        if self.noise not in get_args(NoiseName):
            raise ValueError(f"objective.noise is {self.noise!r}; allowed are {' and '.join(get_args(NoiseName))}")


@dataclass(frozen=True, kw_only=True)
class UniformScoreConfig(ScoreConfig):
    """The keys of [objective] with kind = "sedd-uniform"."""

    kind: str = "sedd-uniform"
    noise: NoiseName = "geometric"


@dataclass(frozen=True)
class ScoreObjective(_PeerObjective):
    """SEDD's score entropy with the absorbing graph, theirs under log-linear noise; the head is scaled by sigma."""

    shortest: float = 1e-3
    noise: NoiseName = "log-linear"

    @property
    def network(self) -> Mapping[str, Any]:
        """At masks the softmax of the outputs is p_{1|t}: the scale cancels."""
        return {"clock": _CLOCKS[self.noise], "says": "posterior", "blend": 0.0}

    def _levels(self, noise: Noise, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """kappa, sigma and sigma' of the batch."""
        t, noising = 1 - _noise_levels(noise, batch, self.shortest), _NOISES[self.noise]
        return noising.kappa(t), noising.sigma(t), noising.rate(t)

    def __call__(self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, **_: Any) -> Outcome:
        """The mean over positions (theirs: the sum over a text)."""
        kappa, sigma, rate = self._levels(noise, batch)
        batch = settled(self.path, batch, noise, h=torch.full_like(kappa, _STEP))
        rows = noised(self.path, batch, noise, t=kappa, spaced_share=0.0)
        x_1, x_t = rows.x_1.flatten()[:, None], rows.x_t.flatten()[:, None]
        sigmas, rates = _per_position(sigma, rows), _per_position(rate, rows)
        graph: sedd.Graph = sedd.Absorb() if self.source == "mask" else sedd.Uniform()

        def losses(logits: Tensor, part: slice) -> Tensor:
            scores = sedd.log_score(logits[:, None], x_t[part], sigmas[part], scaled=self.source == "mask")
            entropy = graph.score_entropy(scores, x_1[part], x_t[part], sigma=sigmas[part])
            return (entropy[:, 0] * rates[part]).float()

        return self._outcome(model, _ask(model, rows.x_t, kappa), rows, t=kappa, losses=losses)


@dataclass(frozen=True)
class UniformScoreObjective(ScoreObjective):
    """SEDD's score entropy with the uniform graph, theirs under geometric noise."""

    noise: NoiseName = "geometric"
    source = "uniform"

    @property
    def network(self) -> Mapping[str, Any]:
        """Its outputs are log-scores."""
        return {"clock": _CLOCKS[self.noise], "says": "uniform-scores", "blend": 0.0}


# --- Duo --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DuoConfig:
    """The keys of [objective] with kind = "duo"."""

    kind: str = "duo"
    shortest: float = 1e-3  # the least noise, 1 - t, that is drawn
    curriculum_steps: int = 0  # training steps with soft inputs before the plain objective; theirs: half of all
    gamma_min: float = -3.55  # Gaussian noise of the curriculum: kappa from 0.95 ...
    gamma_max: float = -1.85  # ... to 0.05, for 50,258 tokens
    temperature: float = 1e-3  # of the soft inputs

    def __post_init__(self) -> None:
        if self.curriculum_steps < 0 or not self.gamma_min < self.gamma_max or not self.temperature > 0:
            raise ValueError(
                f"curriculum_steps is {self.curriculum_steps}, gamma runs from {self.gamma_min} to {self.gamma_max} at "
                f"temperature {self.temperature}; allowed are steps >= 0, gamma_min < gamma_max, temperature > 0"
            )


@dataclass(frozen=True)
class DuoObjective(_PeerObjective):
    """Duo's NELBO, in its first steps on soft inputs of the Gaussian underneath."""

    config: DuoConfig = field(default_factory=DuoConfig)
    source = "uniform"

    @property
    def network(self) -> Mapping[str, Any]:
        """The NELBO teaches a leave-one-out posterior."""
        return {"clock": "sigma", "says": "leave-one-out", "blend": 0.0}

    @property
    def validation(self) -> Objective:
        """The plain NELBO."""
        return replace(self, config=replace(self.config, curriculum_steps=0))

    def __call__(
        self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, *, training_step: int, **_: Any
    ) -> Outcome:
        """The mean over all positions."""
        t = 1 - _noise_levels(noise, batch, self.config.shortest)
        kappa, slope = t, torch.ones_like(t)
        soft = training_step < self.config.curriculum_steps
        if soft:
            gaussian = self._gaussian()
            kappa, slope = gaussian.kappa(t)
        batch = settled(self.path, batch, noise, h=torch.full_like(t, _STEP))
        rows = noised(self.path, batch, noise, t=kappa.clamp(0, 1), spaced_share=0.0)
        if soft:
            rows, features = self._soft(model, batch, noise, rows=rows, gamma=gaussian.gamma(t), kappa=kappa)
        else:
            features = _ask(model, rows.x_t, kappa)
        return self._outcome(model, features, rows, t=kappa, losses=self._losses(rows, kappa, slope))

    def _gaussian(self) -> duo.GaussianNoise:
        return duo.GaussianNoise(self.path.source.vocab_size, self.config.gamma_min, self.config.gamma_max)

    def _soft(
        self,
        model: Any,
        batch: TrainingBatch,
        noise: Noise,
        *,
        rows: NoisedRows,
        gamma: Tensor,
        kappa: Tensor,
    ) -> tuple[NoisedRows, Tensor]:
        """Rows whose state is the arg-max of Gaussian noise, and features of its soft-max; given tokens stay hard."""
        x_1, device = batch.x_1, batch.x_1.device
        leading = duo.leading_noise(x_1.cpu(), noise, vocab_size=self.path.source.vocab_size, k=3)
        x_t = leading.state(x_1.cpu(), gamma).to(device)
        tokens, weights = leading.weights(x_1.cpu(), gamma, temperature=self.config.temperature)
        if batch.given is not None:
            x_t = torch.where(batch.given, x_1, x_t)
            certain = torch.zeros_like(weights)
            certain[..., 0] = 1
            weights = torch.where(batch.given.cpu()[..., None], certain, weights)
        embedded = embed_sparse(model, tokens.to(device), weights.to(device))
        features = model.trunk(x_t, kappa.to(device), torch.full_like(kappa, _STEP).to(device), embedded=embedded)
        return replace(rows, x_t=x_t), features

    def _losses(self, rows: NoisedRows, kappa: Tensor, slope: Tensor) -> ChunkLoss:
        x_1, x_t = rows.x_1.flatten()[:, None], rows.x_t.flatten()[:, None]
        kappas, slopes = _per_position(kappa, rows), _per_position(slope, rows)

        def losses(logits: Tensor, part: slice) -> Tensor:
            log_probs = torch.log_softmax(logits, -1)[:, None]
            loss = duo.nelbo(log_probs, x_1[part], x_t[part], kappa=kappas[part], kappa_dot=slopes[part])
            return loss[:, 0].float()

        return losses


@dataclass(frozen=True, kw_only=True)
class ConsistencyConfig:
    """The keys of [objective] with kind = "duo-dcd": one round of discrete consistency distillation."""

    kind: str = "duo-dcd"
    step: float = 1 / 512  # of this round; theirs doubles from 1/512 to 1/32 in five rounds of 10,000 training steps
    shortest: float = 1e-3  # the least noise, 1 - t, that is drawn before the step is added
    gamma_min: float = -4.0  # Gaussian noise at the data ...
    gamma_max: float = -1.0  # ... and at the source
    divergence: Literal["kl-bwd", "kl-fwd"] = "kl-bwd"  # KL(student || teacher), or the other way

    def __post_init__(self) -> None:
        if not 0 < self.step < 1 or not self.gamma_min < self.gamma_max:
            raise ValueError(
                f"step is {self.step} and gamma runs from {self.gamma_min} to {self.gamma_max}; allowed are "
                "0 < step < 1 and gamma_min < gamma_max"
            )


@dataclass(frozen=True)
class ConsistencyObjective(_PeerObjective):
    """The student at the noisier state says what the frozen parent says at the cleaner one; one noise for both."""

    config: ConsistencyConfig = field(default_factory=ConsistencyConfig)
    source = "uniform"

    @property
    def network(self) -> Mapping[str, Any]:
        """As Duo's."""
        return {"clock": "sigma", "says": "leave-one-out", "blend": 0.0}

    @property
    def teacher(self) -> Teacher | None:
        """One call per row."""
        return ParentTeacher(1)

    @property
    def validation(self) -> Objective:
        """The parent's NELBO."""
        return DuoObjective(self.path, chunk=self.chunk)

    def __call__(
        self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, *, ema: Any, **_: Any
    ) -> Outcome:
        """The mean over all positions; no weight, no data term."""
        config = self.config
        gaussian = duo.GaussianNoise(self.path.source.vocab_size, config.gamma_min, config.gamma_max)
        noisier = (_noise_levels(noise, batch, config.shortest) + config.step).clamp(max=1)
        t, s = 1 - noisier, 1 - noisier + config.step
        kappa_t, kappa_s = gaussian.kappa(t).kappa, gaussian.kappa(s).kappa
        batch = settled(self.path, batch, noise, h=torch.full_like(t, _STEP))
        rows = noised(self.path, batch, noise, t=kappa_t.clamp(0, 1), spaced_share=0.0)
        leading = duo.leading_noise(batch.x_1.cpu(), noise, vocab_size=self.path.source.vocab_size, k=1)
        x_t, x_s = (leading.state(batch.x_1.cpu(), gaussian.gamma(time)).to(batch.x_1.device) for time in (t, s))
        if batch.given is not None:
            x_t, x_s = (torch.where(batch.given, batch.x_1, state) for state in (x_t, x_s))
        with torch.no_grad():
            told = _ask(ema, x_s, kappa_s).flatten(0, 1)

        def losses(logits: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                target = torch.log_softmax(ema.logits_at(told[part]).float(), -1)
            return duo.consistency_loss(torch.log_softmax(logits, -1), target, config.divergence)

        rows = replace(rows, x_t=x_t)
        return self._outcome(model, _ask(model, x_t, kappa_t), rows, t=kappa_t, losses=losses)


# --- SDTT -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoundConfig:
    """The keys of [objective] with kind = "sdtt": one round of self-distillation through time."""

    kind: str = "sdtt"
    step: float = 1 / 1024  # dt of the teacher; theirs doubles every round, 1/16 in the seventh
    k: int = 2  # teacher steps that the student learns to take at once
    times: Literal["meant", "released"] = "meant"  # where the teacher takes them: t + i dt, or the released code's slip
    divergence: Literal["kl-bwd", "kl-fwd", "mse", "tvd"] = "kl-bwd"  # theirs, published as kld, -, mse, tvd

    def __post_init__(self) -> None:
        if not 0 < self.step * self.k <= 1 or self.k < 1:
            raise ValueError(f"step is {self.step} and k {self.k}; allowed are k >= 1 and 0 < k * step <= 1")


@dataclass(frozen=True)
class RoundObjective(_PeerObjective):
    """What the frozen parent says over k steps, of each mask that of the step in which it was revealed, at once."""

    config: RoundConfig = field(default_factory=RoundConfig)

    @property
    def teacher(self) -> Teacher | None:
        """k calls per row."""
        return ParentTeacher(self.config.k)

    @property
    def validation(self) -> Objective:
        """The parent's NELBO."""
        return MdlmObjective(self.path, chunk=self.chunk)

    def __call__(
        self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, *, ema: Any, **_: Any
    ) -> Outcome:
        """The mean over the masked positions of the batch."""
        t = 1 - _noise_levels(noise, batch, sdtt.SHORTEST)
        batch = settled(self.path, batch, noise, h=torch.full_like(t, _STEP))
        rows = noised(self.path, batch, noise, t=t, spaced_share=0.0)
        rows = replace(rows, weight=rows.scorable.float() / rows.scorable.sum().clamp(min=1))
        told = self._rolled_out(ema, rows, t, noise=noise, frozen=batch.given).flatten(0, 1)

        def losses(logits: Tensor, part: slice) -> Tensor:
            with torch.no_grad():
                target = torch.log_softmax(ema.logits_at(told[part]).float()[:, :-1], -1)
            student = torch.log_softmax(logits[:, :-1], -1)  # the mask is the last token
            return sdtt.divergences(student, target, self.config.divergence)

        outcome = self._outcome(model, _ask(model, rows.x_t, t), rows, t=t, losses=losses)
        masked = rows.scorable.sum(1).clamp(min=1) * len(t)
        return replace(outcome, sample_loss=outcome.sample_loss * rows.scorable.sum() / masked)

    @torch.no_grad()
    def _rolled_out(self, teacher: Any, rows: NoisedRows, t: Tensor, *, noise: Noise, frozen: Tensor | None) -> Tensor:
        """The teacher's features of the step in which each position was revealed: [B, L, C]; k calls."""
        dt, make = self.config.step, sdtt.teacher_times
        if self.config.times == "released":
            make = sdtt.released_teacher_times
        state, chosen = rows.x_t, None
        for i, time in enumerate(make(t, dt, self.config.k)):
            features = _ask(teacher, state, time)
            hidden = ~rows.scorable if chosen is None else state.eq(self.path.source.vocab_size - 1)
            chosen = features if chosen is None else torch.where(hidden[..., None], features, chosen)
            told = SamplerState(state, time, (time + dt).clamp(max=1), self.path, noise, index=i + 1, frozen=frozen)
            state = advance(told, ExactJump(), Independent.of_features(features, teacher))
        assert chosen is not None
        return chosen


# --- HDLM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """The keys of [objective] with kind = "hdlm-epsilon"."""

    kind: str = "hdlm-epsilon"
    epsilon: float = 0.01  # of the tokens that are not masked, the share that is replaced by a random one
    strength: float = 1.0  # lambda: how much positions count that show a token

    def __post_init__(self) -> None:
        hdlm.EpsilonHybrid(self.epsilon, self.strength)


@dataclass(frozen=True)
class HybridObjective(_PeerObjective):
    """epsilon-HDLM's weighted cross-entropy: masks, replaced and intact tokens alike say what they are."""

    config: HybridConfig = field(default_factory=HybridConfig)

    @property
    def validation(self) -> Objective:
        """MDLM's NELBO: its own weights have heavy tails."""
        return MdlmObjective(self.path, chunk=self.chunk)

    def __call__(self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, **_: Any) -> Outcome:
        """The mean over all positions; the mask's output takes part in the softmax."""
        hybrid = hdlm.EpsilonHybrid(self.config.epsilon, self.config.strength)
        t = noise.uniform(Purpose.TIME, 1)[:, 0].cpu()
        x_1, length = batch.x_1, batch.x_1.shape[1]
        tokens = self.path.source.vocab_size - 1
        coins = [noise.uniform(purpose, length).to(x_1.device) for purpose in (Purpose.PATH, Purpose.RENOISE)]
        p = hybrid.masking(t).to(x_1.device)
        drawn = hybrid.corrupt(
            x_1,
            p,
            mask=tokens,
            coin_mask=coins[0],
            coin_replace=coins[1],
            tokens=noise.integers(Purpose.SOURCE, length, tokens).to(x_1.device),
        )
        weights = hybrid.weights(drawn, p).float().flatten()
        rows, target = _scored(batch, drawn.x_t), x_1.flatten()

        def losses(logits: Tensor, part: slice) -> Tensor:
            return -log_probs_at(logits, target[part, None])[:, 0] * weights[part]

        return self._outcome(model, _ask(model, rows.x_t, t), rows, t=t, losses=losses)


@dataclass(frozen=True, kw_only=True)
class GammaConfig:
    """The keys of [objective] with kind = "hdlm-gamma"."""

    kind: str = "hdlm-gamma"
    gamma: float = 0.01  # the uniform graph's share of the generator; also how fast the mask enters the embeddings
    shortest: float = 1e-3  # the least noise, 1 - t, that is drawn

    def __post_init__(self) -> None:
        hdlm.GammaHybrid(self.gamma)


@dataclass(frozen=True)
class GammaObjective(_PeerObjective):
    """gamma-HDLM's score entropy: that of SEDD's absorbing graph at masks, of its uniform one at shown tokens.

    One block as long as the text, so every position is active and has the same sigma. The output for the mask is not
    trained, as in the original; `hdlm.GammaRule` therefore does not read it.
    """

    config: GammaConfig = field(default_factory=GammaConfig)

    @property
    def network(self) -> Mapping[str, Any]:
        """At masks the softmax of the outputs is p_{1|t}; the mask is blended into every input."""
        return {"clock": "hybrid", "says": "posterior", "blend": self.config.gamma}

    @property
    def validation(self) -> Objective:
        """MDLM's NELBO, of the masked positions only."""
        return MdlmObjective(self.path, chunk=self.chunk)

    def __call__(self, model: TrainableDenoiser, batch: TrainingBatch, noise: Noise, /, **_: Any) -> Outcome:
        """The mean over positions of sigma' times the score entropy (theirs: the sum over a text)."""
        hybrid = hdlm.GammaHybrid(self.config.gamma)
        t = 1 - _noise_levels(noise, batch, self.config.shortest)
        x_1, length, tokens = batch.x_1, batch.x_1.shape[1], self.path.source.vocab_size - 1
        sigma, rate = hybrid.noising.sigma(t), hybrid.noising.rate(t)
        coins = [noise.uniform(purpose, length).to(x_1.device) for purpose in (Purpose.PATH, Purpose.RENOISE)]
        drawn = noise.integers(Purpose.SOURCE, length, tokens).to(x_1.device)
        x_t = hybrid.corrupt(x_1, sigma.to(x_1.device), mask=tokens, coins=(coins[0], coins[1]), tokens=drawn)
        rows = _scored(batch, x_t)
        shown, target = rows.x_t.flatten()[:, None], x_1.flatten()[:, None]
        sigmas, rates = _per_position(sigma, rows), _per_position(rate, rows)

        def losses(logits: Tensor, part: slice) -> Tensor:
            scores = hybrid.log_score(logits[:, None].to(torch.float64), sigmas[part])
            entropy = hybrid.score_entropy(scores, target[part], shown[part], sigma=sigmas[part])
            return (entropy[:, 0] * rates[part]).float()

        return self._outcome(model, _ask(model, rows.x_t, t), rows, t=t, losses=losses)


def _scored(batch: TrainingBatch, x_t: Tensor) -> NoisedRows:
    """Rows in which every real position counts alike, but the given ones, which are shown as they are."""
    scored = torch.ones_like(x_t, dtype=torch.bool) if batch.real is None else batch.real
    if batch.given is not None:
        x_t, scored = torch.where(batch.given, batch.x_1, x_t), scored & ~batch.given
    mean = (scored / scored.sum(1, keepdim=True).clamp(min=1)).float() / len(x_t)
    return NoisedRows(batch.x_1, x_t, mean, scored, scored)


register_objective("mdlm", MdlmConfig, lambda config, path: MdlmObjective(path, shortest=config.shortest))
register_objective("sedd-absorb", ScoreConfig, lambda config, path: ScoreObjective(path, config.shortest, config.noise))
register_objective(
    "sedd-uniform",
    UniformScoreConfig,
    lambda config, path: UniformScoreObjective(path, config.shortest, config.noise),
)
register_objective("duo", DuoConfig, lambda config, path: DuoObjective(path, config=config))
register_objective("duo-dcd", ConsistencyConfig, lambda config, path: ConsistencyObjective(path, config=config))
register_objective("sdtt", RoundConfig, lambda config, path: RoundObjective(path, config=config))
register_objective("hdlm-epsilon", HybridConfig, lambda config, path: HybridObjective(path, config=config))
register_objective("hdlm-gamma", GammaConfig, lambda config, path: GammaObjective(path, config=config))
