"""What the mathematics gives, number by number; see tests/pinned.py."""

import torch
from networks import MixerNet
from torch import Tensor
from worlds import SCHEDULES, coupled_data, world

from fsdfm.flow import (
    POLICIES,
    RULES,
    CertainTurns,
    Chain,
    CosineSchedule,
    ExactDenoiser,
    ExactJump,
    ExponentialSchedule,
    Filter,
    Grid,
    Independent,
    InstantJump,
    LiteralJump,
    LowDiscrepancyJump,
    MaskSource,
    MixturePath,
    MixtureSource,
    PolynomialSchedule,
    Sampler,
    SamplerState,
    SingleJump,
    StableStop,
    SystematicJump,
    UniformSource,
    advance,
    alike,
    crf_posterior,
    draw,
    dyadic_step_sizes,
    find_rule,
    generalised_kl,
    inverse_autoregressive_noise,
    low_discrepancy_turns,
    path_loss,
    pmi_transitions,
    posterior_of,
    quantile_draws,
    quantile_law,
    sampler_law,
    total_variation,
    trajectory,
    transition_log_prob,
    velocity,
)
from fsdfm.flow.categorical import CompensatedSums, RowDraws
from fsdfm.flow.exact import all_states, generator, posterior_table, transition_matrix
from fsdfm.flow.grid import AnnealedGeometricWeights, BoostedWeights, MirroredWeights
from fsdfm.flow.reading import READINGS, leave_one_out, reading_hook, uniform_scores
from fsdfm.noise import Noise, Purpose
from pinned import Cases, chosen, odd, refused, said

cases = Cases("flow")
V, L = 7, 6
SOURCES = [UniformSource(V), MaskSource(V), MixtureSource(V, mask_share=0.3, mask_token=2)]


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """A denoiser whose logits depend on the state, t and h."""
    w, when = weights(V, V), torch.as_tensor(t).reshape(-1, 1, 1)
    return 2 * w[x_t] + w[x_t.roll(1, 1)] * (1 + when) + torch.as_tensor(h).reshape(-1, 1, 1) * w[0]


@cases
def schedules() -> object:
    t = torch.tensor([0.0, 0.02, 0.3, 0.5, 0.77, 0.99], dtype=torch.float64)
    end = torch.tensor([0.1, 0.5, 0.3, 0.52, 1.0, 1.0], dtype=torch.float64)
    every = [*SCHEDULES, ExponentialSchedule(-3)]
    return {
        repr(s): [
            *(s.kappa(t), s.kappa_dot(t), s.kappa_inverse(t), s.scalar(t), s.survival(t, end), s.redraw(t, end)),
            *(s.cumulative_scalar(t, end), s.mean_scalar(t, end), s.kappa_inverse(1.0), s.kappa(1.0), s.scalar(1.0)),
            *(s == PolynomialSchedule(2), hash(s) == hash(replace_schedule(s))),
        ]
        for s in every
    }


def replace_schedule(s):
    return type(s)(*vars(s).values())


@cases
def schedules_refuse() -> object:
    s = PolynomialSchedule()
    return [
        *(said(lambda t=t: s.kappa(t)) for t in (-1e-9, 0.0, 1.0, 1 + 1e-9, float("nan"))),
        said(lambda: s.kappa(torch.tensor([0.2, 1.7, -0.9]))),
        said(lambda: s.survival(0.5, 0.4)),
        said(lambda: s.survival(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.2, 0.3, 0.4]))),
        *(said(lambda: s.survival(1.0, 1.0)), said(lambda: s.survival(0.5, 0.5))),
        *(said(lambda n=n: PolynomialSchedule(n).exponent) for n in (0.99, 1, 3, float("inf"))),
        *(said(lambda r=r: ExponentialSchedule(r).rate) for r in (0, 20, -20, 20.1, -21, 1e-3)),
    ]


@cases
def sources() -> object:
    noise, found = Noise(3, [0, 5, 2**33]), []
    for source in [*SOURCES, MaskSource(4, mask_token=0), MixtureSource(5)]:
        x = source.sample(noise, 9)
        found += [x, source.sample(noise, 9, step=2), source.probabilities(), source.movable(x), source.mask_token]
    found += [
        SOURCES[0] == UniformSource(V),
        SOURCES[1] == MaskSource(V, mask_token=0),
        hash(SOURCES[1]) == hash(MaskSource(V)),
    ]
    for make in (UniformSource, MaskSource, MixtureSource):
        found += [said(lambda n=n, make=make: make(n).vocab_size) for n in (0, 1, 2)]
    found += [said(lambda s=s: MixtureSource(4, mask_share=s).mask_share) for s in (0.0, 1e-9, 0.999, 1.0)]
    return found + [said(lambda m=m: MaskSource(4, mask_token=m).mask_token) for m in (-1, 0, 3, 4, True, 1.0)]


@cases
def paths() -> object:
    noise, found = Noise(5, range(4)), []
    x_1 = noise.integers(Purpose.DATA, 30, V - 1)
    t = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64)
    for source in SOURCES:
        for schedule in (PolynomialSchedule(), CosineSchedule()):
            path = MixturePath(source, schedule)
            x_0 = path.sample_x_0(x_1, noise)
            x_t = path.sample(x_0, x_1, t, noise=noise, step=3)
            turns = low_discrepancy_turns(noise, 30)
            found += [x_0, x_t, path.sample(x_0, x_1, t, noise=noise, turns=turns)]
            found += [path.renoise(x_t, t, t / 2, noise=noise, step=2), path.renoise(x_t, 0.6, 0.6, noise=noise)]
    path = MixturePath(SOURCES[0])
    return [
        *found,
        *(
            low_discrepancy_turns(noise, 5),
            velocity(weights(2, 3, V).softmax(-1), x_1[:2, :3], torch.tensor([0.5, 2.0])),
        ),
        said(lambda: path.renoise(x_1, 0.4, 0.5, noise=noise)),
        said(lambda: path.sample(x_1, x_1[:, :3], 0.5, noise=noise)),
        said(lambda: path.sample(x_1, x_1, 0.5, noise=Noise(0, [1]))),
        said(lambda: path.renoise(x_1, 0.5, 0.4, noise=Noise(0, range(5)))),
    ]


@cases
def losses() -> object:
    logits, x_1 = weights(2, 4, V), torch.tensor([[0, 1, 2, 3], [6, 5, 4, 3]])
    x_t = torch.tensor([[0, 2, 2, 4], [6, 5, 1, 1]])
    loss = path_loss(logits.requires_grad_(), x_1, x_t, scalar=torch.tensor([0.5, 3.0]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    log_p = torch.tensor([-0.5, -2.0])
    kl = generalised_kl(log_p, log_p * 2, torch.tensor([True, False]), scalar=torch.tensor(2.0))
    return [loss, gradient, path_loss(logits, x_1, x_t, scalar=1.5), kl]


@cases
def grids() -> object:
    found: list[object] = [Grid.uniform(4).times, Grid.uniform(3, torch.tensor([0.0, 0.4])).h, Grid.uniform(1, 0.3).h]
    found += [Grid.uniform(5).steps, repr(Grid.uniform(3)), repr(Grid.uniform(9)), Grid([0.25, 0.5, 1]).h]
    wrong = ([0.5], [0.0, 0.5, 0.5, 1.0], [0.0, 0.9], [-0.1, 1.0], [0.1, 1.1], [[0.0, 1.0], [0.5, 0.4]], 0.5, [[]])
    found += [said(lambda w=w: Grid(w).h) for w in wrong]
    found += [said(lambda n=n: Grid.uniform(n).steps) for n in (0, 1, 1.5, 2.0, 1 << 20, (1 << 20) + 1)]
    found += [said(lambda s=s: Grid.uniform(2, s).times) for s in (-0.1, 1.0, 1 - 1e-9, 0.999)]
    h, u = dyadic_step_sizes(), Noise(0, [0]).uniform(Purpose.STEP_SIZE, 50)[0]
    for policy in [
        *POLICIES.values(),
        MirroredWeights(POLICIES["G"]),
        AnnealedGeometricWeights(100),
        MirroredWeights(BoostedWeights(7)),
    ]:
        found += [policy.probabilities(h, 0), policy.probabilities(h, 350), policy.sample(h, u, training_step=250)]
        found += [policy.sample(h, torch.tensor([0.0, 1 - 1e-16, 0.5]))]
    found += [said(lambda b=b: BoostedWeights(b).boost) for b in (0, 0.1, -1, float("inf"))]
    return [
        *found,
        h,
        dyadic_step_sizes(),
        said(lambda: AnnealedGeometricWeights(0)),
        AnnealedGeometricWeights(1).period,
    ]


@cases
def filters() -> object:
    logits, found = weights(5, 40).float() * 2, []
    logits[1, 3:] = logits[1, 0]  # ties
    every = [
        Filter(0.5),
        Filter(2.0),
        Filter(1e-45),
        Filter(top_k=1),
        Filter(top_k=5),
        Filter(top_k=40),
        Filter(top_p=0.6),
    ]
    every += [Filter(0.7, 10, 0.9), Filter(1.3, None, 0.05), Filter(top_p=1.0), Filter(1.0, 3, 0.5)]
    for each in every:
        found += [each(logits.clone()), each(logits.clone()).isinf().sum(-1)]
    cooling = Filter(1.0, 3, None, final_temperature=0.5)
    found += [[cooling.at(k, 5).temperature for k in range(5)], cooling.at(0, 1), Filter(0.3).at(1, 4)]
    half = torch.tensor([[0.0, 0.0, -100.0]])
    found += [Filter(top_p=0.5)(half.clone()), Filter(top_p=0.5001)(half.clone())]
    found += [
        said(lambda v=v: Filter(v).temperature) for v in (0, -1, 1e-9, float("inf"), float("nan"), "1", None, True)
    ]
    found += [said(lambda v=v: Filter(final_temperature=v)) for v in (0, 2.0, float("inf"))]
    found += [said(lambda v=v: Filter(top_k=v)) for v in (0, 1, 2.0, 2.5, "3", True)]
    return found + [said(lambda v=v: Filter(top_p=v)) for v in (0, 1e-9, 1, 1.0001, "x")]


@cases
def draws() -> object:
    found: list[object] = []
    u = Noise(1, [0]).uniform(Purpose.DESTINATION, 64)[0]
    for vocab in (5, 256, 700):
        logits = weights(8, vocab).float() * 3
        rows = torch.arange(64) % 8
        exclude = torch.arange(64) % vocab
        for sums in (None, CompensatedSums()):
            found += [
                draw(logits, u, rows=rows, sums=sums).tokens,
                draw(logits, u, rows=rows, exclude=exclude, sums=sums),
            ]
            found += [draw(logits, u, rows=rows, forbidden=1, filter=Filter(0.8, 4), sums=sums).tokens]
        each = RowDraws(vocab, Filter(0.9, top_p=0.8))
        plain = RowDraws(vocab)
        found += [[[int(draws(logits[n % 8][None], u[n : n + 1])) for draws in (each, plain)] for n in range(16)]]
    sure = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    found += [
        draw(sure, u[:1], exclude=torch.tensor([0])),
        draw(sure.double(), u[:1]),
        draw(sure[:0], u[:0], exclude=rows[:0]),
    ]
    found += [draw(sure[:0], u[:0]).log_p_excluded]
    ask = {"rows": torch.zeros(2, dtype=torch.int64)}
    for wrong in (
        lambda: draw(sure[0], u[:1]),
        lambda: draw(sure, u[:2]),
        lambda: draw(sure, u[:1].float()),
        lambda: draw(sure, torch.zeros(1, dtype=torch.float64)),
        lambda: draw(sure, torch.ones(1, dtype=torch.float64)),
        lambda: draw(sure, u[:2], **ask, exclude=torch.tensor([0])),
        lambda: draw(sure, u[:2], **ask, exclude=torch.tensor([0, 3])),
        lambda: draw(sure, u[:2], **ask, exclude=torch.tensor([-1, 2])),
        lambda: draw(sure, u[:2], **ask, exclude=torch.tensor([0, 2])),
        lambda: draw(sure, u[:1], forbidden=3),
        lambda: draw(sure, u[:1], forbidden=-1),
        lambda: draw(sure, u[:1], forbidden=2),
        lambda: draw(sure, u[:1], forbidden=0),
        lambda: draw(sure * float("nan"), u[:1]),
        lambda: RowDraws(3)(sure * float("nan"), u[:1]),
        lambda: int(RowDraws(3)(sure, torch.tensor([1 - 2**-53], dtype=torch.float64))),
    ):
        found.append(said(wrong))
    return found


@cases
def kernels() -> object:
    t, end = torch.tensor([0.0, 0.3, 0.5], dtype=torch.float64), torch.tensor([0.25, 0.9, 1.0], dtype=torch.float64)
    log_p = torch.tensor([-1e-17, -0.1, -3.0], dtype=torch.float64)
    certain = torch.zeros(3, dtype=torch.float64)  # there is nowhere to go
    probs, x_t, found = weights(3, V).softmax(-1), torch.tensor([0, 3, 6]), []
    q = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)
    for jump in (ExactJump(), SingleJump(), InstantJump(), LiteralJump(SingleJump()), LiteralJump(ExactJump())):
        e = jump.redraws(CosineSchedule(), t, end)
        found += [e, jump.log_stay(log_p, e), jump.leave_ratio(q, e), jump.leave(log_p, e), jump.kernel(probs, x_t, e)]
        found += [jump.markov, jump.redraws_candidates, jump.options(), jump.leave(certain, e)]
    for jump in (SystematicJump(SingleJump()), LowDiscrepancyJump(InstantJump()), SystematicJump()):
        e = jump.redraws(PolynomialSchedule(2), t, end)
        found += [e, jump.log_stay(log_p, e), jump.leave_ratio(q, e), jump.redraws_candidates, jump.markov]
        found += [said(lambda jump=jump, e=e: jump.kernel(probs, x_t, e)), said(lambda jump=jump: LiteralJump(jump))]
        bounds = torch.tensor([[0.3, 0.4, 0.2], [0.1, 0.0, 1.0]], dtype=torch.float64)
        found += [jump.coins(Noise(2, [0, 1]), 12, k, bounds=bounds[:, : k + 1]) for k in range(3)]
    return [*found, said(lambda: LiteralJump(LiteralJump(ExactJump())))]


@cases
def rules_by_name() -> object:
    names = [
        "exact",
        "exact:x=1",
        "none",
        "certain:bound=2",
        "certain:returns=false",
        "bounded:bound=none",
        "stop:patience=x",
    ]
    names += ["stop:entropy=0.5,patience=2", "stop:patience", "certain:", 3, "bounded:bound=-1", "stop:entropy=-0.1"]
    found = [refused(lambda n=n: repr(find_rule(n))) for n in names]
    for make in (
        lambda: CertainTurns(bound=0.0),
        lambda: CertainTurns(bound=float("inf")),
        lambda: StableStop(patience=-1),
    ):
        found.append(said(lambda make=make: repr(make())))
    return [
        *found,
        said(lambda: StableStop(entropy=0.0, patience=0).patience),
        [r.options() for r in OWN_RULES.values()],
    ]


def walked(steps) -> object:
    return [(s.index, s.t, s.t_next, s.x_t, s.x_next, s.jumps) for s in steps]


OWN_RULES = {
    **{name: RULES[name] for name in ("exact", "single", "instant", "systematic", "spaced", "sweep", "certain")},
    **{"spaced-single": LowDiscrepancyJump(SingleJump()), "literal": LiteralJump(SingleJump())},
    **{"bounded": CertainTurns(bound=1.5), "bounded-once": CertainTurns(bound=3.0, returns=False)},
    **{"stop": StableStop(entropy=1.2), "stop-later": StableStop(RULES["exact"], entropy=1.6, patience=2)},
}


def trajectories(source) -> object:
    path, noise, found = MixturePath(source, CosineSchedule()), Noise(11, range(3, 8)), {}
    x_0 = source.sample(noise, L)
    frozen = torch.zeros_like(x_0, dtype=torch.bool)
    frozen[:, 2], frozen[1, 4] = True, True
    for name, rule in OWN_RULES.items():
        steps = {"grid": Grid.uniform(4), "noise": noise, "rule": rule}
        found[name] = walked(trajectory(table, path, x_0, **steps))
        own = dict(steps, grid=Grid.uniform(3, torch.tensor([0.0, 0.1, 0.5, 0.9, 0.3])))
        narrow = Filter(0.8, 5, 0.9, final_temperature=0.4)
        found[name + " with all"] = walked(trajectory(table, path, x_0, **own, frozen=frozen, filter=narrow))
        found[name + " again"] = said(
            lambda own=own: walked(trajectory(table, path, x_0, **own, frozen=frozen, renoise=0.7))
        )
    return found


@cases
def trajectories_from_uniform() -> object:
    return trajectories(SOURCES[0])


@cases
def trajectories_from_masks() -> object:
    return trajectories(SOURCES[1])


@cases
def trajectories_from_a_mixture() -> object:
    return trajectories(SOURCES[2])


class Chained:
    """A split network with a chain over its positions."""

    def __init__(self, apart: bool = False):
        self.net, self.samples_apart = MixerNet(V).double(), apart
        self.trunk, self.logits_at = self.net.trunk, self.net.logits_at
        self.transitions = (weights(V, 3, seed=1), weights(V, 3, seed=2))

    def posterior(self, x_t, t, h, rows=None):
        return crf_posterior(self, self.transitions, x_t, t=t, h=h, rows=rows)


@cases
def trajectories_of_a_chain() -> object:
    found = {}
    for source in SOURCES[:2]:
        path, noise = MixturePath(source), Noise(4, range(4))
        x_0 = source.sample(noise, L)
        frozen = torch.zeros_like(x_0, dtype=torch.bool)
        frozen[:, 1] = True
        for name in ("exact", "single", "spaced", "sweep", "bounded", "stop"):
            with torch.no_grad():
                steps = trajectory(
                    Chained(),
                    path,
                    x_0,
                    grid=Grid.uniform(3),
                    noise=noise,
                    rule=OWN_RULES[name],
                    filter=Filter(0.7, 5),
                    frozen=frozen,
                )
                found[f"{source.mask_token} {name}"] = walked(steps)
    return found


@cases
def chains() -> object:
    logits, held = weights(3, 5, 9), torch.full((3, 5), -1)
    held[0, 2], held[1, 0], held[2, 4] = 7, 0, 8
    links, u = (weights(9, 2, seed=1), weights(9, 2, seed=2)), Noise(0, range(3)).uniform(Purpose.DESTINATION, 5)
    joined = torch.ones(3, 5, dtype=torch.bool)
    joined[1, 3:] = False
    x, found = torch.arange(15).view(3, 5) % 9, []
    for options in (
        {},
        {"held": held},
        {"joined": joined},
        {"temperature": 0.05},
        {"candidates": 3},
        {"candidates": 1, "held": held},
    ):
        chain = Chain.of(logits, links, **options)
        found += [chain.log_normaliser(), chain.log_prob(x), chain.log_prob(x, scored=joined), chain.log_marginals()]
        found += [chain.draw(u), chain.draw(u.flip(1)), chain.states, chain.scores]
    grad = logits.clone().requires_grad_()
    found += [torch.autograd.grad(Chain.of(grad, links, candidates=4).log_prob(x).sum(), grad)]
    counts = torch.randint(0, 9, (12, 12), generator=torch.Generator().manual_seed(0)).float()
    with torch.sparse.check_sparse_tensor_invariants():
        for options in ({"rank": 3}, {"rank": 40, "strength": 1.0, "prior": 2.0}):
            left, right = pmi_transitions(counts.to_sparse(), **options)
            found.append(left @ right.T)
    return found


@cases
def posteriors() -> object:
    x_t, found = torch.arange(12).view(2, 6) % V, []
    t, h = torch.tensor([0.2, 0.5], dtype=torch.float64), torch.tensor([0.5, 0.25], dtype=torch.float64)
    net, u = MixerNet(V).double().requires_grad_(False), Noise(0, range(2)).uniform(Purpose.DATA, 6)
    held = torch.where(x_t == 3, x_t, -1)
    rows = torch.tensor([1, 2, 7, 11])
    apart = Chained(apart=True)
    apart.net.requires_grad_(False)

    class Some(Chained):
        def features_at(self, x_t, t, h, rows):
            return self.net.trunk(x_t, t, h).flatten(0, 1)[rows]

    some = Some()
    some.net.requires_grad_(False)

    def shift(logits, where):
        return logits.add_(
            where.position[:, None] + where.t[where.sample][:, None] * where.t_next[where.sample][:, None]
        )

    for one in (posterior_of(table, x_t, t, h=h), posterior_of(net, x_t, t, h=h), posterior_of(apart, x_t, t, h=h)):
        whole = (one, one.given(held, forbidden=2), one.changed(shift, x_t, t=t, t_next=t + h))
        for p, count in [*((p, 2) for p in whole), (whole[0].part(1, 1), 1), (whole[1].part(1, 1), 1)]:
            own = torch.arange(count)
            found += [
                p.joint,
                p.draw(own, u[:count]),
                p.draw(own, u[:count], filter=Filter(0.5, 3)),
                said(lambda p=p, c=count: p.log_prob(x_t[:c])),
            ]
            found += [
                [
                    (part.start, part.stop, tile if kept is None else tile[kept])
                    for part, tile, kept in p.marginals(rows[:2])
                ]
            ]
    for p in (
        posterior_of(some, x_t, t, h=h, rows=rows),
        Independent.of_rows(net.trunk(x_t, t, h).flatten(0, 1)[rows], rows, net, length=6),
    ):
        found += [[tile for _, tile, _ in p.marginals(r)] for r in (rows, rows[1:3], rows[-1:])]
    return [
        *found,
        said(
            lambda: list(
                posterior_of(table, x_t, t, h=h).changed(lambda a, b: None, x_t, t=t, t_next=t).marginals(rows)
            )
        ),
    ]


@cases
def large_posteriors() -> object:
    """More rows than are asked for at once."""
    x_t = torch.arange(2 * 150).view(2, 150) % V
    t = h = torch.full((2,), 0.5, dtype=torch.float64)
    found: list[object] = []
    for apart in (False, True):
        net = Chained(apart)
        net.net.requires_grad_(False)
        plain = Independent.of_features(net.trunk(x_t, t, h), net)
        for rows in (torch.arange(300), torch.arange(20, 300)):
            for p in (plain, plain.changed(lambda logits, r: logits.mul_(r.position[:, None]), x_t, t=t, t_next=t)):
                found += [[(s.start, s.stop, tile) for s, tile, _ in p.marginals(rows)]]
    whole = Independent.of_logits(plain_logits := weights(2, 150, V))
    changed = whole.changed(lambda logits, _: logits.mul_(2), x_t, t=t, t_next=t)
    return [*found, [(s.start, s.stop, tile) for s, tile, _ in changed.marginals(torch.arange(300))], plain_logits]


@cases
def samplers() -> object:
    path, noise, x_0 = MixturePath(SOURCES[0]), Noise(0, range(2)), torch.zeros(2, L, dtype=torch.int64)
    sampler = Sampler(
        path, x_0, grid=Grid.uniform(2), noise=noise, hook=lambda logits, rows: logits + rows.position[:, None]
    )
    asked = sampler.question()
    found: list[object] = [asked.x_t, asked.t, asked.h, asked.rows, sampler.done, sampler.calls.clone()]
    while not sampler.done:
        asked = sampler.question()
        found += [asked.rows, sampler.answer(posterior_of(table, asked.x_t, asked.t, h=asked.h)), sampler.calls.clone()]
    for name in ("bounded", "stop", "certain"):
        own = Sampler(path, x_0, grid=Grid.uniform(6), noise=noise, rule=OWN_RULES[name])
        while not own.done:
            asked = own.question()
            own.answer(posterior_of(table, asked.x_t, asked.t, h=asked.h))
        found += [own.calls, own.index, own.x]
    make = lambda **changed: Sampler(**{"path": path, "x_0": x_0, "grid": Grid.uniform(2), "noise": noise, **changed}).x  # noqa: E731
    for wrong in (
        {"x_0": x_0[0]},
        {"x_0": x_0.int()},
        {"x_0": x_0[:0]},
        {"x_0": x_0 - 1},
        {"x_0": x_0 + V},
        {"x_0": x_0 + V - 1},
        {"noise": Noise(0, [1])},
        {"frozen": x_0},
        {"frozen": x_0[:1].bool()},
        {"grid": Grid.uniform(2, torch.tensor([0.1, 0.2, 0.3]))},
        {"renoise": -0.1},
        {"renoise": float("inf")},
        {"renoise": 0.0},
    ):
        found.append(said(lambda wrong=wrong: make(**wrong)))
    return [*found, said(sampler.question), said(lambda: sampler.answer(posterior_of(table, x_0, noise, h=noise)))]


@cases
def transitions_have_probabilities() -> object:
    found = []
    for source in SOURCES:
        path, noise = MixturePath(source), Noise(0, range(3))
        x_t, logits = source.sample(noise, L), weights(3, L, V)
        x_next = torch.where(noise.uniform(Purpose.COIN, L) < 0.5, noise.integers(Purpose.DATA, L, 2), x_t)
        frozen = torch.zeros_like(x_t, dtype=torch.bool)
        frozen[:, ::2] = True
        for jump in (ExactJump(), SingleJump(), InstantJump()):
            redraws = jump.redraws(path.schedule, torch.tensor([0.1, 0.5, 0.2]), torch.tensor([0.5, 1.0, 0.3]))
            options = {"redraws": redraws, "jump": jump, "path": path}
            found += [transition_log_prob(logits, x_t, x_next, **options)]
            found += [transition_log_prob(logits, x_t, x_next, **options, frozen=frozen, filter=Filter(0.7, 5))]
            grad = logits.clone().requires_grad_()
            log_p = transition_log_prob(grad, x_t, x_next, **options)
            found += [torch.autograd.grad(torch.where(log_p.isfinite(), log_p, 0.0).sum(), grad)]
    found += [said(lambda: transition_log_prob(logits, x_t, x_t, redraws=redraws, jump=RULES["spaced"], path=path))]
    found += [said(lambda: transition_log_prob(logits[..., :3], x_t, x_t, redraws=redraws, jump=jump, path=path))]
    state = SamplerState(
        x_t, torch.full((3,), 0.4).double(), torch.full((3,), 0.9).double(), path, noise, frozen=frozen
    )
    return [*found, state.movable(), advance(state, RULES["exact"], Independent.of_logits(logits)), state.memory]


@cases
def readings() -> object:
    p, x_t, kappa = weights(4, V).softmax(-1), torch.tensor([0, 2, 6, 3]), torch.tensor([0.0, 0.2, 0.5, 0.95]).double()
    loo, scores = leave_one_out(p.log(), x_t, kappa), uniform_scores(p, x_t, kappa)
    found = [
        loo,
        scores,
        READINGS["leave-one-out"](loo, x_t, kappa),
        READINGS["uniform-scores"](scores.log(), x_t, kappa),
    ]
    found += [READINGS["uniform-scores"](weights(4, V, seed=3), x_t, kappa)]
    state = torch.arange(6).view(2, 3)
    for name in READINGS:
        changed = posterior_of(lambda x, t, h: weights(2, 3, V) / 3, state, kappa[1:3], h=kappa[1:3])
        found += [
            [
                tile
                for _, tile, _ in changed.changed(reading_hook(name), state, t=kappa[1:3], t_next=kappa[1:3]).marginals(
                    torch.tensor([0, 4, 5])
                )
            ]
        ]
    return found


@cases
def coupled_draws() -> object:
    p, kappa = weights(3, 5, V).softmax(-1), torch.tensor([0.0, 0.4, 0.9])
    shown = torch.arange(15).view(3, 5) % V
    order = alike(weights(V, 4))
    path, noise = MixturePath(SOURCES[0]), Noise(0, range(3))
    x_0 = SOURCES[0].sample(noise, L)
    u = noise.uniform(Purpose.DATA, 5)
    found: list[object] = [quantile_law(p, shown, kappa[:, None].expand(3, 5)), order, alike(weights(13, 2, seed=4))]
    for options in ({}, {"order": order}, {"filter": Filter(0.5, 4), "order": order}):
        found.append(
            walked(
                trajectory(
                    table, path, x_0, grid=Grid.uniform(3), noise=noise, hook=quantile_draws(path, x_0, **options)
                )
            )
        )
    found += [
        inverse_autoregressive_noise(p, shown, u, order=order),
        inverse_autoregressive_noise(p, shown, u, order=torch.arange(V)),
    ]
    return [*found, said(lambda: quantile_draws(MixturePath(SOURCES[1]), x_0))]


@cases
def exact_laws() -> object:
    found: list[object] = []
    for source in ("uniform", "mask", "mixture"):
        path, data = world(source, CosineSchedule())
        exact = ExactDenoiser(path, p_1=data)
        start = exact.marginal(0.0)
        found += [start, exact.marginal(0.4), exact.table(0.4), exact.table(0.0)]
        for jump in (ExactJump(), SingleJump(), InstantJump()):
            law = sampler_law(exact, path, start, grid=Grid.uniform(3), jump=jump)
            found += [law, total_variation(law, exact.marginal(1.0))]
        probs = posterior_table(exact, path, 2, t=0.3, h=0.1)
        found += [
            probs,
            generator(probs, path.schedule.scalar(0.3)),
            transition_matrix(probs, path, ExactJump(), t=0.3, t_next=0.8),
        ]
        states = all_states(path.source.vocab_size, 2)
        found += [exact(states[:4], torch.tensor([0.1, 0.5, 0.1, 0.9]).double())]
    path = MixturePath(UniformSource(3))
    pi = weights(9, 9).softmax(-1) / 9
    paired = ExactDenoiser(path, pi=pi)
    found += [paired.table(0.3), paired.marginal(0.6), paired.length]
    alone = ExactDenoiser(path, p_1=torch.tensor([0.2, 0.3, 0.5]))
    found += [alone.table(0.5), ExactDenoiser(path, p_1=torch.tensor([0.0, 0.0, 1.0])).table(1.0)]
    data = coupled_data(3, 2)
    for wrong in (
        lambda: ExactDenoiser(path),
        lambda: ExactDenoiser(path, p_1=data, pi=pi),
        lambda: ExactDenoiser(path, p_1=data[:2]),
        lambda: ExactDenoiser(path, p_1=torch.tensor(1.0)),
        lambda: ExactDenoiser(path, p_1=2 * data),
        lambda: ExactDenoiser(path, p_1=data * 1.000005).length,
        lambda: ExactDenoiser(path, p_1=torch.tensor([-0.5, 0.5, 1.0])),
        lambda: ExactDenoiser(path, pi=pi[:8]),
        lambda: ExactDenoiser(path, pi=pi[:, :8]),
        lambda: ExactDenoiser(MixturePath(MaskSource(3)), p_1=data),
        lambda: alone(torch.tensor([[3]]), torch.tensor([0.5])),
        lambda: alone(torch.tensor([[-1]]), torch.tensor([0.5])),
        lambda: alone(torch.tensor([[2, 1]]), torch.tensor([0.5])),
        lambda: all_states(2, 15).shape,
        lambda: all_states(2, 16),
        lambda: sampler_law(paired, path, start, grid=Grid.uniform(2, torch.tensor([0.0])), jump=ExactJump()),
    ):
        found.append(said(wrong))
    return found


@cases
def noise() -> object:
    n = Noise(2**40 + 5, [0, 1, 2**32 + 1, 2**56 - 1])
    found: list[object] = [
        n.uniform(Purpose.COIN, 3, 7),
        n.integers(Purpose.DATA, 4, 10, step=2),
        n[1:3].samples,
        len(n),
        repr(n),
        repr(Noise(0, range(9))),
    ]
    for wrong in (
        *(lambda s=s: Noise(s).seed for s in (-1, 0, 2**64 - 1, 2**64, 1.0)),
        *(lambda s=s: Noise(0, s).samples for s in ([-1], [2**56], [2**56 - 1], [0.5], [True], [[1]], [])),
        *(lambda k=k: n.uniform(Purpose.COIN, 1, k) for k in (-1, 0, 2**32 - 1, 2**32)),
        *(lambda k=k: n.uniform(Purpose.COIN, k).shape for k in (-1, 0, 2**32)),
        *(lambda k=k: n.integers(Purpose.COIN, 1, k) for k in (0, 1, 2**32, 2**32 + 1)),
    ):
        found.append(said(wrong))
    return found


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.flow")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.flow")


test_what_is_computed = cases.test()
