"""Which of the peers' samplers reach the data, and what the originals' known faults cost, where laws are computed.

    run_faults("out")

One small world, 3 tokens at 3 positions that depend on each other, with the exact network. A cell is a sampler: total
variation between the law it ends in and the data, by steps; or a fault, measured with and without it. Laws are
computed by enumeration; rules that remember (confidence orders) are sampled, and then noise is a few thousandths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fsdfm.flow import ExactDenoiser, Grid, MaskSource, MixturePath, StepRule, UniformSource, sample
from fsdfm.flow.exact import all_states, total_variation
from fsdfm.flow.reading import leave_one_out
from fsdfm.noise import Noise, Purpose
from fsdfm.peers import duo, hdlm, remdm, sdtt, sedd
from fsdfm.peers.dream import DreamRule
from fsdfm.peers.llada import LLaDARule
from fsdfm.peers.mdlm import Ancestral
from fsdfm.peers.sampling import StepLaw, end_law, released_times
from fsdfm.peers.transition import float32_survival, joint_matrix
from fsdfm.studies.folder import StudyFolder
from fsdfm.studies.report import StudyReport, markdown_table
from fsdfm.studies.runner import Cell, Study, StudyResults, run_study

__all__ = ["FAULTS", "SAMPLERS", "run_faults"]

V, L = 3, 3
STEPS, FULL_STEPS = (1, 4, 16, 64), (1, 4, 16, 64, 256, 1024)
_SAMPLES = 4_000
_MOST_SAMPLED = 64  # steps of what is sampled
_GAMMA = 0.1
Say = Callable[[float], Tensor]


# --- the world --------------------------------------------------------------------------------------------------------


class _World:
    """The data, all states, and what the exact network says in every one of them."""

    def __init__(self) -> None:
        weights = Noise(seed=7).uniform(Purpose.DATA, V**L)[0].view([V] * L) ** 4
        self.data = weights / weights.sum()
        self.padded = torch.nn.functional.pad(self.data, (0, 1) * L)
        self.states, self.masked_states = all_states(V, L), all_states(V + 1, L)
        self.uniform = ExactDenoiser(MixturePath(UniformSource(V)), p_1=self.data)
        self.masked = ExactDenoiser(MixturePath(MaskSource(V + 1)), p_1=self.padded)
        self.even = torch.full((V**L,), 1 / V**L, dtype=torch.float64)
        self.masks = torch.zeros((V + 1) ** L, dtype=torch.float64).index_fill(0, torch.tensor([(V + 1) ** L - 1]), 1.0)

    def say_masked(self, _t: float = 0.5) -> Tensor:
        """log p in every state of the mask source, which does not depend on the time."""
        return self.masked(self.masked_states, torch.full((len(self.masked_states),), 0.5, dtype=torch.float64))

    def say_uniform(self, kappa: float) -> Tensor:
        """log p_{1|t} in every state of the uniform source."""
        return self.uniform(self.states, torch.full((len(self.states),), kappa, dtype=torch.float64))

    def masked_error(self, rule: StepLaw, times: Tensor, say: Say | None = None) -> float:
        """Total variation of what a masked sampler ends in."""
        law = end_law(rule, say or self.say_masked, self.masks, times=times, states=self.masked_states)
        return total_variation(law, self.padded.flatten())

    def uniform_error(self, rule: StepLaw, times: Tensor, say: Say) -> float:
        """Total variation of what a sampler of the uniform source ends in."""
        law = end_law(rule, say, self.even, times=times, states=self.states)
        return total_variation(law, self.data.flatten())

    def sampled_error(self, rule: StepRule, steps: int) -> float:
        """The same by samples, for rules that remember."""
        table, places = self.say_masked(), (V + 1) ** torch.arange(L - 1, -1, -1)
        x_0, noise = torch.full((_SAMPLES, L), V), Noise(0, range(_SAMPLES))
        path, grid = MixturePath(MaskSource(V + 1)), Grid.uniform(steps)
        last = sample(lambda x_t, *_: table[(x_t * places).sum(-1)], path, x_0, grid=grid, noise=noise, rule=rule)
        found = (last * places).sum(-1).bincount(minlength=(V + 1) ** L).double() / _SAMPLES
        return total_variation(found, self.padded.flatten())


class _HybridDenoiser(ExactDenoiser):
    """The exact posterior of noise that masks with one probability and else replaces with another."""

    def __init__(self, world: _World, shares: Callable[[float], tuple[float, float]]):
        super().__init__(MixturePath(MaskSource(V + 1)), p_1=world.padded)
        self.shares = shares

    def _likelihood(self, t: Any) -> Tensor:
        masked, replaced = self.shares(float(t))
        own = torch.eye(V + 1, dtype=torch.float64)
        own[-1, -1] = 0
        even, mask = torch.zeros(2, V + 1, V + 1, dtype=torch.float64)
        even[:V, :V], mask[-1] = 1 / V, 1
        shown: Tensor = (1 - replaced) * own + replaced * even
        law: Tensor = masked * mask + (1 - masked) * shown
        return law

    def say(self, world: _World, t: float) -> Tensor:
        """log p in every state."""
        said: Tensor = self(world.masked_states, torch.full((len(world.masked_states),), t, dtype=torch.float64))
        return said


# --- samplers ---------------------------------------------------------------------------------------------------------

_Error = Callable[[_World, int], float]


class _Ending:
    """A masked sampler's step; the one that ends at t = 1 reveals everything, as our rules do."""

    def __init__(self, rule: StepLaw):
        self.rule = rule

    def law(self, logits: Tensor, x_t: Tensor, *, t: Any, t_next: Any) -> Tensor:
        """The rule's, or at the end plain revealing."""
        return (Ancestral() if float(t_next) == 1 else self.rule).law(logits, x_t, t=t, t_next=t_next)


def _masked(rule: StepLaw) -> _Error:
    return lambda world, steps: world.masked_error(_Ending(rule), released_times(steps, stop=0.0))


def _sampled(rule: StepRule) -> _Error:
    return lambda world, steps: world.sampled_error(rule, steps) if steps <= _MOST_SAMPLED else math.nan


def _confidence(world: _World, steps: int) -> float:
    """remdm-conf by samples: it remembers at which probability each token was revealed."""
    if steps > _MOST_SAMPLED:
        return math.nan
    rule, table = remdm.Confidence(), world.say_masked()
    places = (V + 1) ** torch.arange(L - 1, -1, -1)
    x_t, noise = torch.full((_SAMPLES, L), V), Noise(0, range(_SAMPLES))
    confidence = rule.start(x_t)
    for number, (t, t_next) in enumerate(pairwise(released_times(steps, stop=0.0).tolist())):
        u = noise.uniform(Purpose.DESTINATION, L, number)
        x_t, confidence = rule.step(table[(x_t * places).sum(-1)], x_t, t, t_next=t_next, u=u, confidence=confidence)
    found = (x_t * places).sum(-1).bincount(minlength=(V + 1) ** L).double() / _SAMPLES
    return total_variation(found, world.padded.flatten())


def _sedd_uniform(step: Literal["analytic", "euler"]) -> _Error:
    def error(world: _World, steps: int) -> float:
        rule = sedd.Rule.uniform(step)

        def say(t: float) -> Tensor:
            sigma = torch.as_tensor(rule.noising.sigma(t), dtype=torch.float64)
            probs = world.say_uniform(float(torch.exp(-sigma))).exp()
            return torch.log(sedd.Uniform().scores(probs, world.states, sigma.expand(len(world.states))))

        law = end_law(rule, say, world.even, times=released_times(steps), states=world.states)
        law = law @ joint_matrix(rule.last_law(say(1 - 1e-5), world.states, 1 - 1e-5))
        return total_variation(law, world.data.flatten())

    return error


class _DuoStep:
    """Duo's step in every state, fed with what it is made for or with the plain posterior."""

    def __init__(self, mixture: float = 1.0, *, plain: bool = False, greedy: bool = False):
        self.mixture, self.plain, self.greedy = mixture, plain, greedy

    def law(self, logits: Tensor, x_t: Tensor, *, t: Any, t_next: Any) -> Tensor:
        """q_{s|t}, or its mixture with noise put on anew."""
        now, then = (torch.full((len(x_t),), float(time), dtype=torch.float64) for time in (t, t_next))
        theta = (
            logits
            if self.plain
            else leave_one_out(logits.flatten(0, 1), x_t.flatten(), now.repeat_interleave(L)).view_as(logits)
        )
        probs = torch.softmax(theta, -1)
        law = duo.posterior_law(probs, x_t, kappa_t=now, kappa_next=then)
        if self.mixture < 1:
            clean = duo.posterior_law(probs, x_t, kappa_t=now, kappa_next=torch.ones_like(now))
            law = self.mixture * law + (1 - self.mixture) * (float(t_next) * clean + (1 - float(t_next)) / V)
        if self.greedy and float(t_next) == 1:
            return torch.nn.functional.one_hot(probs.argmax(-1), V).double()
        return law


def _duo(step: _DuoStep) -> _Error:
    def error(world: _World, steps: int) -> float:
        times = released_times(steps, stop=0.0)
        if step.greedy and steps > 1:
            times = torch.cat([released_times(steps - 1), torch.ones(1, dtype=torch.float64)])
        return world.uniform_error(step, times, world.say_uniform)

    return error


def _epsilon(epsilon: float, eta: float) -> _Error:
    def error(world: _World, steps: int) -> float:
        network = _HybridDenoiser(world, lambda t: (1 - t, epsilon))
        rule = _Ending(hdlm.Correction(eta=eta))
        return world.masked_error(rule, released_times(steps, stop=0.0), partial(network.say, world))

    return error


def _gamma(own: Literal["one", "network"]) -> _Error:
    """gamma-HDLM: as mended ("one") or as released, where the own score is what nothing has trained."""

    def error(world: _World, steps: int) -> float:
        if steps == 1:
            return math.nan
        hybrid = hdlm.GammaHybrid(_GAMMA)
        rule, states = hdlm.GammaRule(hybrid, own), world.masked_states

        def shares(t: float) -> tuple[float, float]:
            sigma = float(hybrid.noising.sigma(t))
            return 1 - math.exp(-(1 - _GAMMA) * sigma), 1 - math.exp(-_GAMMA * sigma)

        network = _HybridDenoiser(world, shares)

        def say(t: float) -> Tensor:
            head = _gamma_head(network.say(world, t).exp(), states, hybrid.noising.sigma(t))
            return head if own == "one" else head.scatter(-1, states[..., None], 0.0)

        times = hdlm.level_times(torch.arange(steps - 1, -1, -1), steps)
        masked = 1 - math.exp(-(1 - _GAMMA) * 4)
        place = torch.tensor([(1 - masked) / V] * V + [masked], dtype=torch.float64)
        law = end_law(rule, say, torch.einsum("i,j,k->ijk", place, place, place).flatten(), times=times, states=states)
        last = float(times[-1])
        law = law @ joint_matrix(rule.last_law(say(last), states, t=last, t_next=last + 0.99e-3))
        return total_variation(law, world.padded.flatten())

    return error


def _gamma_head(probs: Tensor, states: Tensor, sigma: Tensor) -> Tensor:
    """What gamma-HDLM's loss is least at: scores of the two pure graphs for the hybrid's posterior."""
    masked = states == V
    shown = torch.where(masked, 0, states)
    absorb = sedd.Absorb().scores(probs, states, sigma)
    uniform = torch.cat([sedd.Uniform().scores(probs[..., :-1], shown, sigma), absorb[..., -1:]], -1)
    scores = torch.where(masked[..., None], absorb, uniform).clamp(min=1e-30)
    return torch.log(scores) + torch.log(torch.expm1(sigma)) + math.log(V)


SAMPLERS: dict[str, _Error] = {
    "MDLM, SDTT, SEDD absorbing": _masked(Ancestral()),
    "SEDD uniform, analytic": _sedd_uniform("analytic"),
    "SEDD uniform, Euler": _sedd_uniform("euler"),
    "Duo ancestral": _duo(_DuoStep()),
    "Duo ancestral fed with the plain posterior": _duo(_DuoStep(plain=True)),
    "Duo, greedy tail": _duo(_DuoStep(greedy=True)),
    "Duo, Psi 0.95": _duo(_DuoStep(0.95)),
    "Duo, Psi 0": _duo(_DuoStep(0.0)),
    "ReMDM cap 0.04": _masked(remdm.Cap(eta=0.04)),
    "ReMDM rescale 0.3": _masked(remdm.Rescale(eta=0.3)),
    "ReMDM conf": _confidence,
    "ReMDM loop 0.055": _masked(remdm.Loop(eta=0.055)),
    "forward-backward": _masked(remdm.ForwardBackward()),
    "epsilon-HDLM, ACS, epsilon 0.01, eta 0.01": _epsilon(0.01, 0.01),
    "epsilon-HDLM, ACS, epsilon 0.1, eta 0.1": _epsilon(0.1, 0.1),
    "gamma-HDLM 0.1, own score mended": _gamma("one"),
    "gamma-HDLM 0.1, as released": _gamma("network"),
    "LLaDA, random order, T = 1": _sampled(LLaDARule(order="random", temperature=1.0)),
    "LLaDA, low confidence, T = 1": _sampled(LLaDARule(temperature=1.0)),
    "LLaDA, greedy": _sampled(LLaDARule()),
    "Dream, origin, T = 1": _sampled(DreamRule(temperature=1.0)),
    "Dream, entropy, T = 1": _sampled(DreamRule("entropy", temperature=1.0)),
    "Dream, entropy, T = 0.2, top-p 0.95": _sampled(DreamRule("entropy", temperature=0.2, top_p=0.95)),
}
"""Total variation of each sampler with the exact network, by steps."""


# --- faults -----------------------------------------------------------------------------------------------------------

_Table = list[list[str]]


def _float32_gumbel() -> _Table:
    """A Zipf law as the originals draw it: entropy in nats after S ancestral steps, by the closed form."""
    steps = (8, 64, 1024, 4096)
    rows: _Table = [["float32 Gumbel draw: entropy of a Zipf law, nats", "exact", *(f"{s} steps" for s in steps)]]
    for size in (50_257, 3_600):
        law = 1 / torch.arange(1, size + 1, dtype=torch.float64)
        law = law / law.sum()
        found = [_entropy(law), *(_entropy(_drawn_in_float32(law, s)) for s in steps)]
        rows.append([f"{size:,} tokens", *(f"{value:.3f}" for value in found)])
    return rows


def _drawn_in_float32(law: Tensor, steps: int) -> Tensor:
    """What a masked position ends as: what a step fails to reveal is left to the next."""
    total, left = torch.zeros_like(law), 1.0
    for step in range(steps):
        reveal = 1 / (steps - step)
        drawn = left * reveal * law * (float32_survival(law, reveal) if reveal < 1 else 1.0)
        total, left = total + drawn, left - float(drawn.sum())
    return total / total.sum()


def _entropy(law: Tensor) -> float:
    return float(-(law * torch.log(law.clamp(min=1e-300))).sum())


def _last_call() -> _Table:
    """SEDD's, MDLM's and Duo's last call, which reveals almost nothing: total variation at equal calls."""
    world, calls = _World(), (2, 4, 8, 16)
    rows: _Table = [["a last call as released: total variation", *(f"{n} calls" for n in calls)]]
    whole = [world.masked_error(Ancestral(), released_times(n, stop=0.0)) for n in calls]
    tails = [torch.cat([released_times(n - 1), torch.ones(1, dtype=torch.float64)]) for n in calls]
    tailed = [world.masked_error(Ancestral(), times) for times in tails]
    rows.append(["S steps that end at the data", *(f"{value:.3f}" for value in whole)])
    rows.append(["S - 1 steps and the last call", *(f"{value:.3f}" for value in tailed)])
    return rows


def _sdtt_times() -> _Table:
    """SDTT's ideal student (k = 2, dt = 1/4) with teacher times as meant and as released: total variation."""
    world, steps = _World(), (1, 2, 4, 8)
    rows: _Table = [["SDTT's teacher times: total variation of the ideal student", *(f"{n} steps" for n in steps)]]
    plain = [world.masked_error(Ancestral(), released_times(n, stop=0.0)) for n in steps]
    rows.append(["the teacher", *(f"{value:.4f}" for value in plain)])
    for name, times in (("meant", sdtt.teacher_times), ("released", sdtt.released_teacher_times)):
        say = partial(_student, world, times)
        found = [world.masked_error(Ancestral(), released_times(n, stop=0.0), say) for n in steps]
        rows.append([f"times as {name}", *(f"{value:.4f}" for value in found)])
    return rows


def _student(world: _World, make: Callable[[Tensor, float, int], Tensor], t: float) -> Tensor:
    """E[log target] in every state: the minimiser of KL(student || target), told the time.

    A position that the first step reveals is taught what the teacher says now, one that it leaves what the teacher says
    behind that step.
    """
    dt, log_p, states = 0.25, world.say_masked(), world.masked_states
    first = float(make(torch.tensor([t], dtype=torch.float64), dt, 2)[0, 0])
    reveal = min(1.0, dt / max(1e-5, 1 - first))
    step = Ancestral().law(log_p, states, t=first, t_next=min(1.0, first + dt))
    stay = torch.nn.functional.one_hot(states, V + 1).double()
    told = torch.empty_like(log_p)
    for position in range(L):
        others = step.clone()
        others[:, position] = stay[:, position]  # the position itself is left for the second step
        later = joint_matrix(others) @ log_p[:, position].clamp(min=-60.0)
        told[:, position] = reveal * log_p[:, position].clamp(min=-60.0) + (1 - reveal) * later
    shown = (states != V)[..., None]
    return torch.where(shown, log_p, told)


def _own_score() -> _Table:
    """gamma-HDLM: the weight that a mask keeps in a step of 1/1024 at t = 1/2; nothing trains the score it reads."""
    rows: _Table = [["gamma-HDLM's own score: the mask's weight after a step of 1/1024", "mended", "as released"]]
    hybrid, t = hdlm.GammaHybrid(_GAMMA), 0.5
    for tokens in (48, 2_048, 50_257):
        x_t = torch.tensor([[tokens]])
        probs = torch.full((1, 1, tokens + 1), 1 / tokens, dtype=torch.float64).index_fill(-1, x_t[0], 0.0)
        scores = sedd.Absorb().scores(probs, x_t, hybrid.noising.sigma(t)).clamp(min=1e-30)
        head = torch.log(scores) + torch.log(torch.expm1(hybrid.noising.sigma(t))) + math.log(tokens)
        mended = hdlm.GammaRule(hybrid, "one").weights(head, x_t, t=t, t_next=t + 1 / 1024)[0, 0, -1]
        head[..., -1] = 0.0
        released = hdlm.GammaRule(hybrid, "network").weights(head, x_t, t=t, t_next=t + 1 / 1024)[0, 0, -1]
        rows.append([f"{tokens:,} tokens", f"{float(mended):.3f}", f"{float(released):.3f}"])
    return rows


def _batch_mean() -> _Table:
    """Dream: two texts of 64 tokens in one batch, 8 calls; given tokens that are masked again, masks that stay."""
    rows: _Table = [["Dream's mean over the batch: of 64 tokens", "given tokens lost", "masks left"]]
    for masks in ((32, 32), (32, 38), (16, 48)):
        for mean in (False, True):
            lost, left = _dream_batch(masks, mean=mean)
            how = "as released" if mean else "per row"
            rows.append([f"{masks[0]} and {masks[1]} masks, {how}", f"{lost}", f"{left}"])
    return rows


def _dream_batch(masks: Sequence[int], *, mean: bool) -> tuple[int, int]:
    size, length = 8, 64
    logits = 2 * Noise(3, range(length)).uniform(Purpose.DATA, size + 1)
    x_0 = torch.zeros(len(masks), length, dtype=torch.int64)
    for row, count in enumerate(masks):
        x_0[row, length - count :] = size
    noise, path = Noise(1, range(len(masks))), MixturePath(MaskSource(size + 1))
    rule = DreamRule("entropy", temperature=1.0, batch_mean=mean)
    last = sample(
        lambda x_t, *_: logits.expand(len(x_t), -1, -1), path, x_0, grid=Grid.uniform(8), noise=noise, rule=rule
    )
    return int(((x_0 != size) & (last == size)).sum()), int(((x_0 == size) & (last == size)).sum())


FAULTS: dict[str, Callable[[], _Table]] = {
    "float32-gumbel": _float32_gumbel,
    "last-call": _last_call,
    "sdtt-times": _sdtt_times,
    "gamma-own-score": _own_score,
    "dream-batch-mean": _batch_mean,
}
"""The known faults of the originals, each measured with and without it."""


# --- the study --------------------------------------------------------------------------------------------------------


def _compute(cell: Cell, _folder: StudyFolder, *, steps: Sequence[int]) -> Mapping[str, Any]:
    if cell.variant in FAULTS:
        return {"table": FAULTS[cell.variant]()}
    world, name = _World(), list(SAMPLERS)[cell.spec]
    found = [SAMPLERS[name](world, each) for each in steps]
    return {"sampler": name, "distances": [None if math.isnan(value) else value for value in found]}


def _report(results: StudyResults, *, steps: Sequence[int]) -> StudyReport:
    rows = [["total variation to the data", *(f"{each} steps" for each in steps)]]
    faults, record = [], {}
    for cell in results.cells:
        value = results.values[cell.name]
        if cell.variant in FAULTS:
            faults += [markdown_table(value["table"]), ""]
            continue
        record[value["sampler"]] = value["distances"]
        rows.append([value["sampler"], *("-" if x is None else f"{x:.4f}" for x in value["distances"])])
    lines = [
        "# The peers' samplers and the faults of the originals",
        "",
        f"{V} tokens at {L} positions that depend on each other, the exact network; laws by enumeration, of LLaDA, "
        f"Dream and ReMDM conf by {_SAMPLES:,} samples (noise about 0.015).",
        "",
        markdown_table(rows),
        "",
        *faults,
    ]
    return StudyReport("faults", "\n".join(lines), {"steps": list(steps), "distances": record})


def run_faults(out: str | Path, *, full: bool = False, workers: int | None = None) -> StudyResults:
    """Measure every sampler and every fault; the same call resumes. Writes faults.md and faults.json."""
    steps = FULL_STEPS if full else STEPS
    cells = [Cell(f"sampler-{number:02d}", spec=number) for number in range(len(SAMPLERS))]
    cells += [Cell(name) for name in FAULTS]
    study = Study(
        *("faults", cells, partial(_compute, steps=steps), partial(_report, steps=steps)),
        setting={"steps": list(steps)},
    )
    return run_study(study, out, workers=workers)
