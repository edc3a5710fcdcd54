"""What objectives, teachers, the optimiser and the loop give, number by number; see tests/pinned.py."""

import io
import json
import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import torch
from networks import MixerNet
from rich.console import Console
from torch import Tensor, nn

from fsdfm.data import Tokenizer, TrainingBatch
from fsdfm.flow import (
    POLICIES,
    RULES,
    CosineSchedule,
    Filter,
    Grid,
    MaskSource,
    MixturePath,
    MixtureSource,
    UniformSource,
    alike,
    dyadic_step_sizes,
)
from fsdfm.learn import (
    OBJECTIVES,
    TABLEAUS,
    TEACHERS,
    CanvasConfig,
    CrossEntropy,
    FewStepConfig,
    FewStepObjective,
    FineTimes,
    GeneralisedKL,
    MultiplesOfH,
    NextTokenObjective,
    NoTeacherConfig,
    PathConfig,
    PathObjective,
    RewardConfig,
    ShortcutConfig,
    ShortcutTeacher,
    Stage,
    SweepConfig,
    SweepObjective,
    Tableau,
    register_reward,
)
from fsdfm.learn.journal import JsonLines, ProgressBar, duration
from fsdfm.learn.losses import chunked_loss, log_probs_at, soft_cross_entropy
from fsdfm.learn.optim import EMA, OptimConfig, Optimiser, WithoutDropout
from fsdfm.learn.path import noised, settled
from fsdfm.learn.reflow import DRAWS, InverseAutoregressive, Perturbed, Reflow, collect_pairs
from fsdfm.learn.registry import Registry
from fsdfm.learn.report import EntropyAlarm, Report, Tally, own_entropy
from fsdfm.learn.reward import LengthRewardConfig, LettersRewardConfig, dpo_weights, reinforce_weights
from fsdfm.learn.rollout import Tempered, roll_out, weighted_log_prob
from fsdfm.learn.sweep import AutoregressiveConfig, AutoregressiveTeacher
from fsdfm.learn.teacher import ParentTeacher, chained_weights
from fsdfm.learn.trainer import Every, Hooks, Trainer, TrainerConfig, TrainingState
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel, CRFConfig, DiT, ModelConfig
from fsdfm.noise import Noise, Purpose
from fsdfm.runtime import Runtime, RuntimeConfig
from pinned import Cases, chosen, odd, refused, said

cases = Cases("learn")
V, L, B = 11, 8, 6
PATHS = [
    MixturePath(UniformSource(V)),
    MixturePath(MaskSource(V), CosineSchedule()),
    MixturePath(MixtureSource(V, mask_share=0.4), CosineSchedule()),
]


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def dit(**options) -> DiT:
    shape = {"width": 16, "num_blocks": 1, "num_heads": 2, "cond_width": 8, "dropout": 0.0, "conditioning": "step"}
    return stirred(DiT(ModelConfig(vocab_size=V, **{**shape, **options})))


def causal() -> CausalModel:
    config = CausalConfig(vocab_size=V, width=16, num_blocks=1, num_heads=2, max_length=16, dropout=0.0)
    return stirred(CausalModel(config)).eval()


def rows(first: int = 0, **options) -> tuple[TrainingBatch, Noise]:
    noise = Noise(4, range(first, first + B))
    return TrainingBatch(noise.integers(Purpose.DATA, L, V - 1), samples=noise.samples, **options), noise


def every_batch() -> list[tuple[TrainingBatch, Noise]]:
    plain, noise = rows()
    given = torch.zeros(B, L, dtype=torch.bool)
    given[:, 0], given[2, :4] = True, True
    real = torch.ones(B, L, dtype=torch.bool)
    real[1, 5:], real[4, 2:] = False, False
    x_0 = noise.integers(Purpose.SOURCE, L, V, step=5)
    x_0[3] = -1
    other = (noise.integers(Purpose.DATA, L, V, step=1), noise.integers(Purpose.DATA, L, V - 1, step=2))
    return [
        (plain, noise),
        (replace(plain, given=given, real=real, size=2 * B), noise),
        (replace(plain, x_0=x_0, given=given, real=real, larger=((0.25, *other), (1.0, other[0], plain.x_1))), noise),
    ]


def learnt(objective, model, batch, noise, *, step: int = 3, ema=None) -> object:
    """An outcome and the gradient of every weight."""
    model.zero_grad()
    outcome = objective(model, batch, noise, training_step=step, ema=ema if ema is not None else model)
    outcome.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [outcome.loss, outcome.t, outcome.h, outcome.sample_loss, outcome.logs, dict(outcome.counts), grads]


@cases
def path_losses() -> object:
    found = {}
    for number, path in enumerate(PATHS):
        for place, (batch, noise) in enumerate(every_batch()):
            for options in (
                {},
                {"loss": CrossEntropy(), "h": 0.25, "times": FineTimes(1 / 8), "spaced_share": 0.5, "chunk": 5},
            ):
                objective = PathObjective(path, **options)
                found[f"{number} {place} {len(options)}"] = said(
                    lambda o=objective, b=batch, n=noise: learnt(o, MixerNet(V), b, n)
                )
    batch, noise = rows()
    at_times = replace(batch, x_0=batch.x_1.roll(1, 1), t=torch.linspace(0, 0.9, B, dtype=torch.float64))
    found["times of their own"] = learnt(PathObjective(PATHS[0]), MixerNet(V), at_times, noise)
    found["whole"] = learnt(PathObjective(PATHS[0], h=1.0, chunk=None), MixerNet(V), batch, noise)
    with torch.no_grad():
        asked = PathObjective(PATHS[1], h=0.5, chunk=7)(MixerNet(V), batch, noise)
    return {**found, "unlearnt": [asked.loss, asked.sample_loss], "said": [asked.t, PathObjective(PATHS[0]).step_sizes]}


@cases
def states_of_training() -> object:
    found: list[object] = []
    for path in PATHS:
        for batch, noise in every_batch():
            for h in (torch.full((B,), 0.125).double(), torch.linspace(0.1, 1, B).double()):
                own = settled(path, batch, noise, h=h)
                found += [own.x_0, own.x_1, own.given, own.real]
                for share in (0.0, 0.7):
                    shown = noised(path, own, noise, t=1 - h, spaced_share=share)
                    found += [shown.x_t, shown.weight, shown.scorable, shown.real, shown.pick(torch.tensor([2, 0])).x_t]
    u = torch.linspace(0, 1 - 1e-9, 9).double()
    sizes = torch.tensor([1.0, 0.5, 0.125]).double()
    return [*found, *(times(h.expand(9), u) for times in (MultiplesOfH(), FineTimes(), FineTimes(0.25)) for h in sizes)]


@cases
def few_step_losses() -> object:
    found = {}
    for number, path in enumerate(PATHS):
        for name, tableau in TABLEAUS.items():
            teacher = ShortcutTeacher(tableau, from_h=0.25, temperature=0.8 if name == "heun" else 1.0)
            objective = FewStepObjective(
                path, teacher=teacher, weights=POLICIES["PU"], step_sizes=dyadic_step_sizes(-4), chunk=10
            )
            batch, noise = every_batch()[1 if name in ("rk4", "chained") else 0]
            found[f"{number} {name}"] = [
                learnt(objective, MixerNet(V), batch, noise, ema=MixerNet(V, seed=1)),
                objective.teacher_share,
            ]
    batch, noise = every_batch()[2]
    none = FewStepObjective(
        PATHS[0], teacher=None, loss=CrossEntropy(), step_sizes=dyadic_step_sizes(-3), spaced_share=0.5
    )
    found["none"] = [learnt(none, MixerNet(V), batch, noise), none.teacher_share, none.validation, none.validation.h]
    shared = FewStepObjective(PATHS[0], step_sizes=dyadic_step_sizes(-10))
    found["processes"] = learnt(shared, MixerNet(V), replace(rows()[0], processes=2), noise)
    found["sizes"] = [shared.draw_step_sizes(noise, step, size) for step in (0, 7) for size in (6, 64)]
    found["joint"] = said(
        lambda: learnt(FewStepObjective(PATHS[0], weights=POLICIES["PU"]), dit(posterior=CRFConfig(rank=2)), *rows())
    )
    return found


@cases
def teachers() -> object:
    found: dict[str, object] = {}
    t, h = (
        torch.tensor([0.0, 0.25, 0.5, 0.5, 0.75, 0.0]).double(),
        torch.tensor([1.0, 0.25, 0.5, 0.25, 0.25, 0.5]).double(),
    )
    batch, noise = rows()
    frozen = torch.zeros(B, L, dtype=torch.bool)
    frozen[:, :2] = True
    for number, path in enumerate(PATHS):
        x_t = path.sample(path.sample_x_0(batch.x_1, noise), batch.x_1, t, noise=noise)
        for name, tableau in TABLEAUS.items():
            for options in ({}, {"average": "probabilities", "jump": RULES["single"], "temperature": 0.7}):
                made = ShortcutTeacher(tableau, **options)
                target = made.target(MixerNet(V), path, x_t, t=t, h=h, noise=noise, frozen=frozen)
                forbidden = path.source.mask_token
                said_of = [
                    target.log_probs(slice(3, 30), forbidden=forbidden),
                    target.log_probs(torch.tensor([0, 40]), forbidden=None),
                ]
                found[f"{number} {name} {len(options)}"] = [said_of, made.calls, target.weights]
    found["chained"] = chained_weights(CosineSchedule(), t, h)
    found["refused"] = [
        said(lambda: Tableau((Stage(0.0),), (0.5,))),
        said(lambda: Tableau((Stage(0.0),), (0.5, 0.5))),
        said(lambda: Tableau((Stage(0.0), Stage(0.5, start=1)), (0.5, 0.5))),
        said(lambda: Tableau((Stage(0.0), Stage(0.5, start=0, drive=1)), (0.5, 0.5))),
        said(lambda: Tableau((Stage(0.0), Stage(0.5, start=-1)), (0.5, 0.5))),
        *(said(lambda v=v: ShortcutTeacher(TABLEAUS["rk2"], temperature=v)) for v in (0.0, math.inf)),
        *(said(lambda v=v: ShortcutConfig(from_h=v).from_h) for v in (-0.1, 0.0, 1.0, 1.1)),
        said(lambda: TEACHERS.build(ShortcutConfig(tableau="rk3"))),
        TEACHERS.build(
            ShortcutConfig(
                tableau="heun", from_h=0.5, average="probabilities", jump="single", temperature=2.0, network="student"
            )
        ),
        TEACHERS.build(NoTeacherConfig()),
        said(lambda: ParentTeacher(2).target()),
        ParentTeacher(3),
    ]
    return found


@cases
def joint_losses() -> object:
    found = {}
    for name, posterior in {"crf": CRFConfig(rank=3), "causal": CausalHeadConfig(cond_width=8)}.items():
        for number, path in enumerate(PATHS[:2]):
            for place, (batch, noise) in enumerate(every_batch()[:2]):
                objective = PathObjective(path, loss=CrossEntropy(), h=0.25)
                found[f"{name} {number} {place}"] = learnt(objective, dit(posterior=posterior), batch, noise)
        whole = PathObjective(PATHS[0], loss=CrossEntropy(), h=0.25, chunk=None)
        found[f"{name} whole"] = learnt(whole, dit(posterior=posterior), *rows())
        found[f"{name} refused"] = said(lambda p=posterior: learnt(PathObjective(PATHS[0]), dit(posterior=p), *rows()))
    return found


SIZES = dyadic_step_sizes(-3)


@cases
def sweep_losses() -> object:
    found, asked = {}, AutoregressiveTeacher("somewhere.bin")
    for number, path in enumerate(PATHS[:2]):
        model = dit(posterior=CausalHeadConfig(cond_width=8), style="llama")
        for place, (batch, noise) in enumerate(every_batch()):
            objective = SweepObjective(path, step_sizes=SIZES, spaced_share=0.5, chunk=9)
            found[f"{number} {place}"] = learnt(objective, model, batch, noise)
            if place:
                own = replace(objective, asked=asked, prefix_share=0.8, weights=POLICIES["PU"], times=FineTimes(0.25))
                found[f"{number} {place} law"] = learnt(own, model, batch, noise, ema=causal())
        for share in (0.0, 1.0):
            own = SweepObjective(path, prefix_share=share, start_share=share)
            found[f"{number} all {share}"] = learnt(own, model, *rows(), step=9)
        found[f"{number} first"] = said(
            lambda p=path, m=model: learnt(SweepObjective(p, asked=asked), m, *rows(), ema=causal())
        )
        own = SweepObjective(path, asked=asked, prefix_share=1.0, start_share=1.0, own_share=0.7, step_sizes=SIZES)
        found[f"{number} its own texts"] = [learnt(own, model, *batch, ema=causal()) for batch in every_batch()[1:]]
    longer = Noise(1, range(40))
    drawn = SweepObjective(PATHS[1], step_sizes=dyadic_step_sizes(-4))._draw(
        TrainingBatch(torch.zeros(40, 50).long()), longer, 5
    )
    found["drawn"] = drawn
    found["said"] = [
        objective.teacher,
        own.validation.asked,
        replace(own, asked=asked).teacher_share,
        own.teacher_share,
    ]
    found["headless"] = said(lambda: learnt(SweepObjective(PATHS[0], prefix_share=1.0), dit(), *rows()))
    return found


@cases
def next_token_and_canvas_losses() -> object:
    found: list[object] = []
    for batch, noise in every_batch()[:2]:
        found.append(learnt(NextTokenObjective(), causal(), batch, noise))
        for window in (None, 4):
            objective = OBJECTIVES.build(CanvasConfig(canvas=4, window=window, smallest_h=-2), PATHS[0])
            found += [
                learnt(objective, dit(canvas=4, window=window), batch, noise),
                dict(objective.network),
                objective.step_sizes,
            ]
    found += [
        said(lambda c=c: CanvasConfig(**c).window)
        for c in ({"canvas": 0}, {"canvas": 4, "window": 6}, {"canvas": 4, "window": 8}, {"canvas": 1, "window": 0})
    ]
    odd = replace(batch, x_1=batch.x_1[:, :6], given=None, real=None)
    return [*found, NextTokenObjective().step_sizes, said(lambda: objective(dit(canvas=4), odd, noise))]


def count(texts):
    return [float(len(set(text))) for text in texts]


register_reward("kinds", count)


@cases
def rewards() -> object:
    reward, ratio = torch.tensor([0.5, 1.0, -1.0, 2.0, 0.0, 0.3]), torch.tensor([0.1, -0.4, 0.9, 0.0, 0.2, -0.3])
    found: list[object] = [
        weigh(reward, ratio, beta=beta, group=group)
        for weigh in (reinforce_weights, dpo_weights)
        for beta, group in ((0.1, 3), (2.0, 2))
    ]
    tokenizer = Tokenizer.bytes()
    texts = ["one two three", "a we w", "", "Willow and oak", "x"]
    found += [OBJECTIVES.find("reward").config(reward=LengthRewardConfig(words=2)).reward]
    for config in (LengthRewardConfig(words=2), LettersRewardConfig(without="wx")):
        objective = OBJECTIVES.build(RewardConfig(reward=config), PATHS[0])
        found.append(objective.reward(texts))
    batch, noise = every_batch()[1]
    batch = replace(batch, x_1=batch.x_1[:, :6], given=batch.given[:, :6], real=None)
    big = MixturePath(UniformSource(257))
    for options in (
        {"group": 2, "calls": 2},
        {"group": 3, "calls": 3, "method": "dpo", "rule": "single", "heat": 0.7},
        {"group": 6, "rule": "spaced", "calls": 2, "beta": 1.0},
    ):
        made = OBJECTIVES.build(RewardConfig(reward=OBJECTIVES.find("reward").config().reward, **options), big).reading(
            tokenizer
        )
        made = replace(made, reward=count, chunk=7)
        for own in (batch, replace(batch, given=None)):
            found.append(learnt(made, MixerNet(257), own, noise, ema=MixerNet(257, seed=1)))
        found += [made.step_sizes, made.teacher, made.teacher_share, type(made.validation.loss).__name__]
    joint = stirred(
        DiT(
            ModelConfig(
                vocab_size=257,
                width=16,
                num_blocks=1,
                num_heads=2,
                cond_width=8,
                dropout=0.0,
                posterior=CausalHeadConfig(cond_width=8),
            )
        )
    )
    own = replace(made, config=RewardConfig(group=3, calls=2, heat=0.8))
    found.append(learnt(own, joint, batch, noise, ema=stirred(deepcopy(joint), 2)))
    for wrong in (
        {"beta": 0.0},
        {"group": 1},
        {"calls": 0},
        {"heat": 0.0},
        {"rule": "sweep"},
        {"rule": "nothing"},
        {"group": 2, "calls": 1, "heat": 1e-3, "beta": 1e-9},
    ):
        found.append(refused(lambda wrong=wrong: RewardConfig(**wrong).group))
    found += [said(lambda: LengthRewardConfig(words=0)), LengthRewardConfig(words=1).words]
    found += [said(lambda w=w: LettersRewardConfig(without=w).without) for w in ("", "1", "ab")]
    found += [
        said(lambda: made(MixerNet(257), replace(batch, x_1=batch.x_1[:5]), noise[:5], training_step=0, ema=joint))
    ]
    found += [
        said(lambda: replace(made, tokenizer=None)(MixerNet(257), batch, noise, training_step=0, ema=MixerNet(257)))
    ]
    for bad in (lambda texts: [1.0], lambda texts: [math.nan] * len(texts)):
        found.append(
            said(
                lambda bad=bad: replace(made, reward=bad)(
                    MixerNet(257), batch, noise, training_step=0, ema=MixerNet(257)
                )
            )
        )
    return [*found, said(lambda: made(dit(dropout=0.1), batch, noise, training_step=0, ema=joint))]


@cases
def rollouts() -> object:
    found: list[object] = []
    noise, weight = Noise(2, range(4)), torch.tensor([1.0, -0.5, 0.0, 2.0])
    for path in PATHS[:2]:
        x_0 = path.source.sample(noise, L)
        frozen = torch.zeros_like(x_0, dtype=torch.bool)
        frozen[:, 0] = True
        for model in (
            Tempered(MixerNet(V), 0.8),
            MixerNet(V),
            dit(posterior=CRFConfig(rank=2)),
            dit(posterior=CausalHeadConfig(cond_width=8)),
        ):
            for name in ("exact", "single", "instant", "systematic", "spaced"):
                got = said(
                    lambda m=model, n=name, p=path, x=x_0, f=frozen: roll_out(
                        m, p, x, grid=Grid.uniform(2), noise=noise, rule=RULES[n], frozen=f
                    )
                )
                found.append(got)
                if not isinstance(got, str):
                    total, by_sample = weighted_log_prob(
                        model, got, got.features(model), weight=weight, chunk=3 if name == "single" else 256
                    )
                    own = model.model if isinstance(model, Tempered) else model
                    found += [total, by_sample, torch.autograd.grad(total, [*own.parameters()], allow_unused=True)]
    return [*found, said(lambda: Tempered(MixerNet(V), 0.0))]


class Kept:
    def __init__(self):
        self.rows = []

    @property
    def count(self):
        return sum(len(x_0) for x_0, _ in self.rows)

    def append(self, x_0, x_1):
        self.rows.append((x_0, x_1))


@cases
def pairs() -> object:
    found: list[object] = []
    text = lambda samples: Noise(8, samples).integers(Purpose.DATA, L, V - 1)  # noqa: E731
    times = lambda samples: Noise(8, samples).uniform(Purpose.TIME, 1)[:, 0]  # noqa: E731
    order = alike(MixerNet(V).embedding.weight)
    for path in PATHS[:2]:
        for draws in ("free", "quantile"):
            for options in (
                {},
                {"first_token": 2, "filter": Filter(0.6, 5), "order": order, "rule": RULES["spaced"], "seed": 3},
            ):
                make = Reflow(MixerNet(V).double(), path, L, Grid.uniform(3), draws=DRAWS[draws], **options)
                sink = Kept()
                found.append(
                    said(
                        lambda make=make, sink=sink: [
                            list(collect_pairs(make, sink, num_pairs=5, batch_size=2)),
                            sink.rows,
                        ]
                    )
                )
        for first in (False, True):
            make = Perturbed(MixerNet(V).double(), path, text, times, 3, first_token=first, filter=Filter(0.7), seed=1)
            found += [make.pairs(range(2, 6)), replace(make, rule=RULES["single"], seed=3).pairs(range(2, 6))]
    model = causal()
    own = InverseAutoregressive(text, lambda x: model(x), order, seed=2)
    found += [own.pairs([4, 1]), own.pairs([1])]
    for sizes in ({"num_pairs": 0}, {"num_pairs": 1, "batch_size": 0}, {"num_pairs": 1, "batch_size": 1}):
        found.append(said(lambda sizes=sizes: list(collect_pairs(make, Kept(), **sizes))))
    return [
        *found,
        said(lambda: Reflow(dit(posterior=CRFConfig(rank=2)), PATHS[0], L, Grid.uniform(2), draws=DRAWS["quantile"])),
    ]


@cases
def vocabulary_losses() -> object:
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens, weight = torch.arange(14).view(7, 2) % V, torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 3.0])
    target = torch.softmax(logits.detach().flip(0) * 3, -1)
    target[2, 3:] = 0
    target = target / target.sum(-1, keepdim=True)
    found: list[object] = []
    for loss in (log_probs_at(logits, tokens) * torch.tensor([1.0, -2.0]), soft_cross_entropy(logits, target) * weight):
        found += [loss, torch.autograd.grad(loss.sum(), logits)]
    cut = logits.detach().clone()
    cut[:, 4] = -torch.inf
    aim = target.clone()
    aim[:, 4] = 0
    found += [soft_cross_entropy(cut, aim)]
    for chunk in (None, 2, 3, 100):
        model = MixerNet(V)
        features = torch.randn(7, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        scale = nn.Parameter(torch.tensor(1.5))
        losses = lambda some, part, s=scale: -log_probs_at(some * s, tokens[part, :1])[:, 0]  # noqa: E731
        total, per_row = chunked_loss(model, features, weight, losses=losses, chunk=chunk, parameters=[scale])
        (3 * total).backward()
        found += [
            total,
            per_row * (weight != 0),
            features.grad,
            model.head.weight.grad,
            model.head.bias.grad,
            scale.grad,
        ]
    return found


class Mixed(MixerNet):
    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return nn.functional.dropout(super().trunk(x_t, t, h), 0.2, self.training)


def feed(start):
    while True:
        samples = torch.arange(start, start + 4)
        start += 4
        yield TrainingBatch(Noise(9, samples).integers(Purpose.DATA, L, V), samples=samples, next_sample=start, size=8)


def trainer(
    objective, *, steps: int = 7, notes: list | None = None, model: nn.Module | None = None, **options
) -> Trainer:
    model = model or Mixed(V)
    config = TrainerConfig(
        **{"steps": steps, "batch_size": 8, "accumulate": 2, "log_every": 3, "save_every": 2, **options}
    )
    optim = OptimConfig(lr=1e-2, warmup=3, weight_decay=0.1, clip=0.5, joint_lr=2e-2)
    notes = [] if notes is None else notes

    def note(report):
        notes.append(replace(report, tokens_per_second=0.0, seconds_left=0.0))

    return Trainer(
        model,
        objective,
        feed,
        optimiser=Optimiser(model, optim, steps=9),
        ema=EMA(model, 0.9),
        runtime=Runtime(RuntimeConfig(device="cpu")),
        config=config,
        hooks=Hooks(
            save=lambda t: notes.append(("saved", t.training_step, t.next_sample, t.tokens, t.last_loss)),
            report=note,
            others=[Every(3, lambda t: notes.append(("other", t.training_step)))],
        ),
    )


def plain_state(state: TrainingState) -> object:
    numbers = dict(state.numbers)
    numbers["since_report"] = {**numbers["since_report"], "seconds": 0}
    return [state.tensors, numbers]


@cases
def training() -> object:
    found: dict[str, object] = {}
    few = FewStepObjective(
        PATHS[0],
        teacher=ShortcutTeacher(TABLEAUS["rk2"], from_h=0.25),
        weights=POLICIES["PU"],
        step_sizes=dyadic_step_sizes(-3),
    )
    joint = dit(posterior=CRFConfig(rank=2))
    for name, objective, model in (
        ("path", PathObjective(PATHS[0]), None),
        ("few", few, None),
        ("joint", PathObjective(PATHS[0], CrossEntropy()), joint),
    ):
        notes: list[object] = []
        made = trainer(objective, notes=notes, model=model)
        done = made.fit()
        found[name] = [
            done,
            notes,
            plain_state(made.state()),
            dict(made.ema.module.named_parameters()),
            made.alarm.reference,
        ]
        found[name + " blank"] = {key: list(value.shape) for key, value in made.blank().items()}
    notes = []
    stopped = trainer(few, notes=notes)
    asked = iter([False, False, True])
    found["stopped"] = [stopped.fit(stop=lambda: next(asked)), notes, stopped.training_step]
    again = trainer(few, notes=(later := []))
    again.ema.module.load_state_dict(stopped.ema.module.state_dict())
    state = stopped.state()
    again.load(TrainingState(dict(state.tensors), json.loads(json.dumps(state.numbers))))
    unused = trainer(few, notes=[])
    for numbers in ({}, {"next_sample": None, "tokens": None, "training_step": None}):
        unused.load(TrainingState(dict(unused.state().tensors), {**unused.state().numbers, **numbers}))
        found[f"begun {len(numbers)}"] = [unused.training_step, unused.next_sample, unused.tokens]
    found["resumed"] = [
        again.alarm.reference,
        again.next_sample,
        again.tokens,
        again.fit(),
        later,
        dict(again.model.named_parameters()),
    ]
    assessed = again.assess(again.model, PathObjective(PATHS[0]), [next(feed(40)), next(feed(44))])
    found["assessed"] = [assessed.means(), assessed.loss_by_h_t(), assessed.tokens, assessed.portions]
    for wrong in (
        *({name: 0} for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "keep")),
        {"batch_size": 9},
        {"tracker": "none"},
        {"tracker": "nowhere"},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 2**63 - 1},
        {"steps": 1, "batch_size": 2, "log_every": 1, "save_every": 1, "keep": 1},
    ):
        found[str(wrong)] = said(lambda wrong=wrong: TrainerConfig(**{"batch_size": 8, "accumulate": 2, **wrong}).seed)
    broken = trainer(PathObjective(PATHS[0]))
    broken.model.head.weight.data[0, 0] = math.nan
    found["broken"] = said(broken.fit)
    foreign = trainer(PathObjective(PATHS[0]), model=MixerNet(V + 1))
    return {**found, "foreign": said(lambda: foreign.load(state)).splitlines()[0]}


@cases
def optimisers() -> object:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "joint": nn.Linear(2, 2)})
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) + n)
    made = Optimiser(
        model, OptimConfig(lr=0.1, joint_lr=0.01, warmup=2, weight_decay=0.5, clip=1.0, final=0.2), steps=6
    )
    ema, found = EMA(model, 0.9), [[made.learning_rate(n) for n in range(9)]]
    for step in range(5):
        loss = model["joint"](model["a"](torch.tensor([[1.0, -2.0, 0.5]]))).square().sum() * (step + 1)
        loss.backward()
        found += [loss, made.clip(), [p.grad.clone() for p in model.parameters()]]
        made.step(step)
        ema.update(model, step)
        found += [
            all(p.grad is None for p in model.parameters()),
            dict(model.named_parameters()),
            dict(ema.module.named_parameters()),
        ]
    state = made.state()
    other = Optimiser(model, made.config, steps=6)
    other.load(state)
    found += [
        state,
        other.state(),
        {k: v.shape for k, v in made.blank().items()},
        [ema.beta_at(n) for n in (0, 5, 79, 80, 500)],
    ]
    found += [said(lambda: other.load({"exp_avg.b.weight": torch.zeros(1)}))]
    found += [said(lambda: other.load({"exp_avg.a.weight": torch.zeros(2, 3)}))]
    found += [said(lambda: other.load({**state, "exp_avg_sq.a.weight": torch.zeros(3, 2)}))]
    found += [Optimiser(model, OptimConfig(lr=1.0, warmup=0, final=0.0), steps=0).learning_rate(0)]
    no_joint = Optimiser(model, OptimConfig(), steps=4)
    found += [
        [(g["weight_decay"], g["lr"], g["betas"], len(g["params"])) for g in o._adamw.param_groups]
        for o in (made, no_joint)
    ]
    for name in ("lr", "joint_lr", "clip", "beta1", "beta2", "ema", "final", "warmup", "weight_decay"):
        for value in (-1, -0.001, 0, 0.5, 1, 1.001, 10, 10.5, math.inf):
            found.append(said(lambda n=name, v=value: getattr(OptimConfig(**{n: v}), n)))
    found += [said(lambda b=b: EMA(model, b).beta) for b in (-0.1, 0, 0.99, 1)]
    mixed = Mixed(V).train()
    x, t = torch.zeros(2, L, dtype=torch.int64), torch.full((2,), 0.5).double()
    alone = WithoutDropout(mixed)
    return [
        *found,
        alone.trunk(x, t, t),
        mixed.training,
        alone.logits_at(alone.trunk(x, t, t)[0]),
        WithoutDropout(mixed.eval()).trunk(x, t, t),
        mixed.training,
    ]


@cases
def tallies() -> object:
    batch, noise = rows()
    outcome = FewStepObjective(PATHS[0], weights=POLICIES["PU"], step_sizes=dyadic_step_sizes(-4))(
        MixerNet(V), batch, noise, training_step=0, ema=MixerNet(V)
    )
    one, two = Tally(), Tally()
    one.add(outcome, 48)
    one.add(replace(outcome, logs={"loss": 3.0}, counts={"loss": 0}), 10)
    one.add_step(0.5)
    one.add_step(1.5)
    two.add(replace(outcome, logs={**outcome.logs, "new": 2.0}, counts={**outcome.counts, "new": 4}), 5)
    found = [one.means(), one.loss_by_h_t(), one.to_json()]
    one.take(two)
    found += [one.means(), one.loss_by_h_t(), one.tokens, one.steps, one.norms, one.portions]
    record = json.loads(json.dumps(one.to_json()))
    again, part = Tally.from_json(record), Tally.from_json(record, whole=False)
    again.add(outcome, 7)
    found += [again.to_json(), again.means(), part.to_json(), part.means()]
    found += [
        said(lambda r=r: Tally.from_json(r))
        for r in ({}, {**record, "cells": [1]}, {**record, "steps": "x"}, {**record, "means": []})
    ]
    alarm = EntropyAlarm(0.5)
    found += [alarm.check(0.1), alarm.check(None)]
    alarm.reference = 2.0
    found += [alarm.check(v) for v in (None, 0.999, 1.0, 1.5)]
    found += [said(lambda s=s: EntropyAlarm(s).share) for s in (-0.1, 0, 0.99, 1)]
    made = FewStepObjective(
        PATHS[0], teacher=ShortcutTeacher(TABLEAUS["rk4"], from_h=0.5, temperature=0.5, network="student")
    )
    own = own_entropy(made)
    found += [
        own.teacher,
        own.teacher.calls,
        own_entropy(PathObjective(PATHS[0])),
        own_entropy(replace(made, teacher=None)),
    ]
    return found


@cases
def sections() -> object:
    found: list[object] = []
    for config, values in (
        (
            PathConfig,
            [
                ("spaced_share", (-0.1, 0, 1, 1.1)),
                ("smallest_h", (-31, -30, 0, 1)),
                ("times", ("fine",)),
                ("loss", ("cross-entropy",)),
            ],
        ),
        (
            FewStepConfig,
            [("weights", ("AG", "PU", "none")), ("mirrored", (True,)), ("smallest_h", (-4,)), ("anneal_every", (5,))],
        ),
        (
            SweepConfig,
            [
                ("prefix_share", (-0.1, 0, 1, 1.1)),
                ("start_share", (1, 1.1)),
                ("spaced_share", (1.01,)),
                ("smallest_h", (-31, -30, 0, 1)),
                ("weights", ("PU", "none")),
                ("times", ("fine",)),
            ],
        ),
    ):
        for name, choices in values:
            for value in choices:

                def build(config=config, name=name, value=value):
                    made = config(**{name: value})
                    objective = OBJECTIVES.build(made, PATHS[0])
                    u = torch.linspace(0, 0.99, 5).double()
                    sizes = objective.step_sizes
                    policy = objective.weights.probabilities(sizes, 12_000) if hasattr(objective, "weights") else None
                    return [
                        made,
                        type(getattr(objective, "loss", None)).__name__,
                        objective.times(sizes[:1].expand(5), u),
                        sizes,
                        objective.spaced_share,
                        policy,
                    ]

                found.append(said(build))
    found += [
        FewStepConfig(weights="AG", anneal_every=7).policy(),
        FewStepConfig(weights="AG").policy(),
        FewStepConfig(mirrored=True).policy(),
    ]
    found += [
        OBJECTIVES.build(SweepConfig(teacher=AutoregressiveConfig(checkpoint="a", tokenizer="b")), PATHS[0]).teacher
    ]
    found += [
        refused(lambda: OBJECTIVES.find("fewsteps")),
        refused(lambda: TEACHERS.find("rk4")),
        "path" in list(OBJECTIVES),
        len(TEACHERS) > 1,
    ]
    table = Registry("place", "x")
    table.register("path", PathConfig, lambda c: c)
    found += [
        said(lambda: table.register("other", PathConfig, len)),
        said(lambda: table.register("path", FewStepConfig, len)),
    ]
    found += [
        said(lambda: table.register("path", type("PathConfig", (), {"kind": "path"}), len)),
        table.build(PathConfig()),
    ]
    log = torch.tensor([-0.5, -1.0])
    found += [
        GeneralisedKL()(log, log * 2, torch.tensor([True, False]), scalar=torch.tensor(2.0)),
        CrossEntropy()(log, log),
    ]
    return found


@cases
def journals(folder) -> object:
    journal = JsonLines(folder / "metrics.jsonl")
    journal.rewind(3)
    for step in (1, 2, 3, 4):
        journal.write({"training_step": step, "loss": step / 2})
    with journal.path.open("a") as file:
        file.write('{"training_st')
    journal.rewind(3)
    seconds = (0, 0.4, 59.6, 60, 61, 119, 120, 3599, 3600, 3661, 3719, 3720, 7199, 7200, 86399, 86400, 90061)
    seconds = (*seconds, 93599, 93600, 172799, 172800)
    return [
        journal.path.read_text(),
        [duration(s) for s in seconds],
        said(lambda: JsonLines(folder / "no" / "x").write({})).split("/")[0],
    ]


class Several:
    """Stands for processes of which this one is the first: what the others noted is given."""

    def __init__(self, *others):
        self.others = others

    def gather(self, mine):
        return [mine, *self.others]


@cases
def tallies_of_several() -> object:
    """What the processes of a run noted, joined, and in which order it is told."""
    outcomes = []
    for seed, first in ((0, 0), (1, 6)):
        batch, noise = rows(first)
        outcome = PathObjective(PATHS[0])(MixerNet(V, seed=seed), batch, noise, training_step=0, ema=None)
        tally = Tally()
        for _ in range(2):
            late_first = outcome.t.argsort(descending=True)
            tally.add(replace(outcome, t=outcome.t[late_first]), batch.x_1.numel() + seed)
        outcomes.append(tally)
    joined = Trainer._joined(
        SimpleNamespace(processes=Several(*deepcopy(outcomes[1:]), deepcopy(outcomes[1]))), outcomes[0]
    )
    told = joined.loss_by_h_t()
    return [joined.tokens, joined.means(), [[h, *row] for h, row in told.items()], told]


@cases
def reports() -> object:
    """What a run says of itself, on a terminal and elsewhere."""
    logs = {"path_loss": 5.12345, "distil_loss": 0.2, "loss": 9.0, "bits": 3.0, "training_step": 1}
    report = Report(7, 2.34567, 1e-3, 0.5, 640, 1234.56, 3725.04, logs, {"-3": {"0.25": 1.5}}, averaged=3)
    every = [report, replace(report, logs={}, alarm="its texts collapse", seconds_left=59.94)]
    found: list[object] = [[each.to_json(), each.scalars()] for each in every]
    for is_terminal in (False, True):
        written = io.StringIO()
        console = Console(file=written, width=200, force_terminal=is_terminal, color_system=None)
        bar = ProgressBar(console, total=9, done=2)
        task, seen = bar.progress.tasks[0], []
        for happens in (
            bar.__enter__,
            lambda b=bar: b.step(SimpleNamespace(training_step=5, last_loss=1.234567)),
            *(lambda b=bar, r=each: b.report(r) for each in every),
            lambda b=bar: b.say("a [b] word"),
            lambda b=bar: b.__exit__(),
        ):
            happens()
            seen.append([task.completed, task.total, dict(task.fields), bar.progress.live.is_started])
        found += [seen, bar.progress.disable, None if is_terminal else written.getvalue()]
    return found


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.learn")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.learn")


test_what_is_computed = cases.test()
