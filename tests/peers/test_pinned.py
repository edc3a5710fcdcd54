"""The peers' laws, losses and samplers, number by number, without the originals' vectors; see tests/pinned.py."""

import json
import math
from dataclasses import replace

import torch
from peer_files import small_network, write_hugging_face, write_lightning
from peer_worlds import ALL_MASKS, MASKED_STATES, PADDED, masked_logits
from torch import Tensor

from fsdfm.data import TrainingBatch
from fsdfm.flow import RULES, CosineSchedule, Filter, Grid, MaskSource, MixturePath, UniformSource, trajectory
from fsdfm.learn import OBJECTIVES
from fsdfm.noise import Noise, Purpose
from fsdfm.peers import duo, hdlm, mdlm, remdm, sdtt, sedd
from fsdfm.peers.dream import DreamRule, filter_logits, reveal_count, reveal_share, scores
from fsdfm.peers.layouts import is_peer, open_layout
from fsdfm.peers.llada import Guided, LLaDARule, confidences, guide, gumbel_tokens, reveal_counts
from fsdfm.peers.network import Clock, blended_embedding, embed_soft, embed_sparse, run
from fsdfm.peers.noising import Geometric, LogLinear
from fsdfm.peers.objectives import (
    ConsistencyConfig,
    ConsistencyObjective,
    DuoConfig,
    DuoObjective,
    GammaConfig,
    GammaObjective,
    HybridConfig,
    HybridObjective,
    MdlmObjective,
    RoundConfig,
    RoundObjective,
    ScoreObjective,
    UniformScoreObjective,
)
from fsdfm.peers.order import best_positions, gumbel_scores
from fsdfm.peers.sampling import (
    PEER_RULES,
    Cached,
    Counted,
    DuoRule,
    GammaStep,
    LawRule,
    end_law,
    released_times,
    tail_grid,
)
from fsdfm.peers.transition import (
    clipped,
    draw_float32,
    draw_tokens,
    float32_survival,
    joint_matrix,
    masked_law,
    nucleus,
    strict_nucleus,
)
from pinned import Cases, chosen, odd, said

cases = Cases("peers")
V, L, B = 7, 6, 4
MASKED, EVEN = MixturePath(MaskSource(V)), MixturePath(UniformSource(V))
T, NEXT = torch.tensor([0.0, 0.2, 0.5, 0.9]).double(), torch.tensor([0.25, 0.4, 0.95, 1.0]).double()


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def state(mask: bool = True) -> Tensor:
    noise = Noise(1, range(B))
    x = noise.integers(Purpose.DATA, L, V - 1)
    return torch.where(noise.uniform(Purpose.COIN, L) < 0.5, V - 1, x) if mask else x


@cases
def noisings() -> object:
    t = torch.linspace(0, 1, 7).double()
    found: list[object] = []
    for noising in (LogLinear(), LogLinear(0.0), LogLinear(5e-3), Geometric(), Geometric(0.01, 3.0)):
        found += [noising.kappa(t), noising.lost(t), noising.sigma(t), noising.rate(t)]
        found += [[Clock(name, noising)(t) for name in ("none", "sigma", "time")]]
    found += [said(lambda e=e: LogLinear(e).epsilon) for e in (-0.1, 0, 0.99, 1)]
    found += [said(lambda a=a: Geometric(*a).largest) for a in ((0, 1), (2, 1), (1, 1), (1, math.inf), (0.5, 1))]
    return [
        *found,
        said(lambda: Clock("x")),
        mdlm.stratified_times(T, shortest=0.01),
        mdlm.stratified_times(T, rounds=5),
        mdlm.expected_cached_calls(8, 20),
    ]


@cases
def laws() -> object:
    logits, found = weights(B, L, V), {}
    x_t, shown = state(), state(mask=False)
    steps = {
        "mdlm": mdlm.Ancestral(),
        "remask": remdm.Remasking(top_p=0.7),
        "cap": remdm.Cap(eta=0.3),
        "rescale": remdm.Rescale(eta=0.4, top_p=0.9),
        "back": remdm.ForwardBackward(),
        "loop": remdm.Loop(eta=0.2, begin=0.3, end=0.6, level=0.7),
        "corrector": remdm.Corrector(strength=3.0),
        "sedd": sedd.Rule(),
        "sedd-euler": sedd.Rule(step="euler"),
        "acs": hdlm.Correction(eta=0.2, temperature=0.7),
        "fill": hdlm.Remask(temperature=1.3),
        "gamma": hdlm.GammaRule(hdlm.GammaHybrid(0.3)),
        "gamma-own": hdlm.GammaRule(hdlm.GammaHybrid(0.3), "network"),
        "psi": duo.Psi(0.6, "mask", top_p=0.8),
    }
    for name, step in steps.items():
        found[name] = [step.law(logits, x_t, t=T, t_next=NEXT), step.law(logits, x_t, t=0.3, t_next=0.6)]
    for name, step in {
        "uniform": duo.UniformAncestral(top_p=0.9),
        "psi-even": duo.Psi(0.4),
        "sedd-even": sedd.Rule.uniform(),
        "sedd-even-euler": sedd.Rule.uniform("euler"),
    }.items():
        found[name] = [step.law(logits, shown, t=T, t_next=NEXT), step.law(logits, shown, t=0.3, t_next=0.6)]
    for name in ("sedd", "sedd-euler"):
        found[name] += [
            steps[name].weights(logits, x_t, t=T, t_next=NEXT),
            steps[name].last_law(logits, x_t, T),
            steps[name].scores(logits, x_t, T),
        ]
    found["sedd last"] = [
        sedd.Rule.uniform().last_weights(logits, shown, T),
        steps["gamma"].last_law(logits, x_t, t=T, t_next=NEXT),
    ]
    sure = remdm.Confidence()
    memory = torch.where(x_t == V - 1, -torch.inf, -torch.linspace(0.1, 0.9, B * L).double().view(B, L))
    u = Noise(0, range(B)).uniform(Purpose.DESTINATION, L)
    found["confidence"] = [
        sure.law_given(logits, x_t, T, t_next=NEXT, confidence=memory),
        sure.step(logits, x_t, T, t_next=NEXT, u=u, confidence=memory),
        sure.start(x_t),
    ]
    found["rates"] = [
        [step.rates(T, NEXT) for step in steps.values() if isinstance(step, remdm.Remasking)],
        remdm.rho_max(T, NEXT),
        steps["corrector"].times(4) if hasattr(steps["corrector"], "times") else None,
    ]
    found["ends"] = [
        end_law(step, masked_logits, ALL_MASKS, times=released_times(3, stop=0.0), states=MASKED_STATES)
        for step in (mdlm.Ancestral(), remdm.Cap(eta=0.3))
    ]
    found["times"] = [
        released_times(4),
        tail_grid(4).times,
        said(lambda: tail_grid(1)),
        tail_grid(2).times,
        PADDED.sum(),
    ]
    found["refused"] = [
        *(said(lambda v=v: remdm.Remasking(top_p=v).top_p) for v in (0, 1e-9, 1, 1.1)),
        *(said(lambda v=v: remdm.Cap(eta=v).eta) for v in (-0.1, 0, 1, 1.1)),
        *(
            said(lambda v=v: remdm.Loop(**v).level)
            for v in ({"begin": 0}, {"begin": 0.95}, {"end": 1}, {"level": 1}, {"level": 0})
        ),
        *(said(lambda v=v: duo.Psi(v).mixture) for v in (-0.1, 0, 1, 1.1)),
        *(said(lambda v=v: hdlm.GammaHybrid(v).gamma) for v in (-0.1, 0, 1, 1.1)),
        *(
            said(lambda v=v: hdlm.EpsilonHybrid(*v).epsilon)
            for v in ((-0.1, 1), (0, 0), (1, 1), (0.5, -1), (0.5, math.inf))
        ),
    ]
    return found


@cases
def transitions() -> object:
    law, u = weights(B, L, V), Noise(2, range(B)).uniform(Purpose.DESTINATION, L)
    probs, x_t = weights(B, L, V).softmax(-1), state()
    probs[..., -1] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    found: list[object] = [
        clipped(law),
        masked_law(probs, x_t, reveal=T[:, None] * 2 - 0.3, remask=NEXT[:, None] - 0.5),
    ]
    found += [nucleus(probs, m) for m in (0.0, 0.3, 0.9, 1.0)] + [strict_nucleus(probs, m) for m in (0.0, 0.3, 0.9)]
    found += [draw_tokens(law, u), draw_float32(probs, Noise(3, range(B)).uniform(Purpose.DATA, L * V).view(B, L, V))]
    found += [
        float32_survival(torch.tensor([0.0, 1e-9, 1e-7, 1e-3, 1.0]), 0.01),
        joint_matrix(probs[:1, :1, :].expand(V, 1, V)),
        said(lambda: joint_matrix(2 * probs[:, :1])),
    ]
    rank = weights(B, L)
    for counts in ([0, 1, 2, 9], [3, 3, 3, 3]):
        found.append(best_positions(rank, x_t == V - 1, torch.tensor(counts)))
    return [
        *found,
        best_positions(torch.zeros(1, 4), torch.tensor([[True, False, True, True]]), torch.tensor([2])),
        gumbel_scores(rank, u, 0.5),
    ]


OWN_RULES = {
    **PEER_RULES,
    "conf-again": RULES["remdm-conf"],
    "gamma-own": GammaStep(gamma=0.3, own_score="network"),
    "duo-mix": DuoRule(mixture=0.3, tail="greedy"),
    "llada": LLaDARule(),
    "llada-blocks": LLaDARule(block_length=2, temperature=0.7),
    "llada-calls": LLaDARule(block_calls=1),
    "llada-random": LLaDARule(order="random", temperature=1.0, begin=1),
    "llada-sure": LLaDARule(threshold=0.4, block_length=3),
    "llada-eos": LLaDARule(ban_eos=True, eos_id=2),
    "llada-late": LLaDARule(late_eos=True, eos_id=2, eot_id=3, temperature=0.5),
    "llada-literal": LLaDARule(literal=True, block_length=2, late_eos=True, eos_id=2, eot_id=3, temperature=0.5),
    "dream": DreamRule(temperature=1.0),
    "dream-entropy": DreamRule("entropy", temperature=0.2, top_p=0.95),
    "dream-margin": DreamRule("topk_margin", top_k=3),
    "dream-plus": DreamRule("maskgit_plus", alg_temp=0.5, temperature=0.8),
    "dream-mean": DreamRule("maskgit_plus", batch_mean=True, eps=0.1),
}


@cases
def walks() -> object:
    found: dict[str, object] = {}
    w = weights(V, V)

    def table(x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return 2 * w[x_t] + w[x_t.roll(1, 1)] * (1 + t.reshape(-1, 1, 1)) + h.reshape(-1, 1, 1)

    for name, rule in OWN_RULES.items():
        for path in (MASKED, EVEN, MixturePath(UniformSource(V), CosineSchedule())):
            noise = Noise(11, range(3))
            x_0 = path.source.sample(noise, L)
            frozen = torch.zeros_like(x_0, dtype=torch.bool)
            frozen[:, 1], frozen[2, 4] = True, True
            given = torch.where(frozen, 3, x_0)
            for options in ({}, {"frozen": frozen, "filter": Filter(0.8, 5, 0.95)}):
                key = f"{name} {path.source.mask_token} {len(options)} {type(path.schedule).__name__}"
                steps = said(
                    lambda p=path, r=rule, o=options, g=given, n=noise: [
                        (s.x_t, s.x_next) for s in trajectory(table, p, g, grid=Grid.uniform(3), noise=n, rule=r, **o)
                    ]
                )
                found[key] = steps
    counted, cached = Counted(table), Cached(table)
    for each in (counted, cached):
        list(
            trajectory(
                each,
                MASKED,
                MASKED.source.sample(Noise(0, [0]), L),
                grid=Grid.uniform(9),
                noise=Noise(0, [0]),
                rule=RULES["mdlm"],
            )
        )
    found["calls"] = [
        counted.calls,
        cached.calls,
        [rule.options() for rule in OWN_RULES.values()],
        LawRule(remdm.Cap()).with_options(eta=0.5).options(),
    ]
    return found


@cases
def decoders() -> object:
    logits, tokens, found = weights(5, V).float(), torch.tensor([0, 1, 2, 3, 6]), []
    for rule in (
        DreamRule(temperature=0.5),
        DreamRule(top_p=0.6),
        DreamRule(top_k=2, temperature=2.0),
        DreamRule(top_p=1.0, top_k=7),
    ):
        found += [
            filter_logits(logits, rule),
            [
                scores(filter_logits(logits, rule), tokens, alg)
                for alg in ("origin", "maskgit_plus", "topk_margin", "entropy")
            ],
        ]
    found += [
        [float(reveal_share(1e-3, k, 4)) for k in range(4)],
        reveal_count(torch.tensor([9, 10, 1]), 0.1, 1, steps=3),
        [reveal_counts(m, s) for m, s in ((10, 3), (2, 4), (7, 7), (0, 2))],
    ]
    found += [
        confidences(logits, tokens),
        confidences(logits, tokens, (6, None)),
        guide(logits, logits.flip(0), 0.5),
        gumbel_tokens(logits, Noise(0, range(5)).uniform(Purpose.DATA, V), 0.7),
    ]
    net = small_network(vocab_size=V).double()
    x_t, t = state(), torch.full((B,), 0.5).double()
    with torch.no_grad():
        guided = Guided(net, x_t < 3, guidance=1.5, mask_token=V - 1)
        found += [
            guided.trunk(x_t, t, t),
            [tile for _, tile, _ in guided.posterior(x_t, t, t).marginals(torch.arange(5))],
        ]
    for wrong in (
        {"block_length": 0},
        {"block_calls": 0},
        {"block_calls": 1, "block_length": 2},
        {"temperature": -1},
        {"order": "x"},
        {"threshold": 0},
        {"threshold": 1},
        {"threshold": 1.1},
        {"ban_eos": True},
        {"late_eos": True},
        {"block_length": 1},
    ):
        found.append(said(lambda w=wrong: LLaDARule(**w).threshold))
    for wrong in (
        {"alg": "x"},
        {"eps": 0},
        {"eps": 1},
        {"temperature": -0.1},
        {"alg_temp": -1},
        {"top_p": 0},
        {"top_p": 1},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": 1},
    ):
        found.append(said(lambda w=wrong: DreamRule(**w).eps))
    found += [
        said(lambda: Guided(net, x_t < 3, guidance=-1, mask_token=0)),
        said(lambda: DuoRule(mixture=1.1)),
        said(lambda: DuoRule(tail="x")),
        said(lambda: GammaStep(own_score="x")),
    ]
    return found


@cases
def losses() -> object:
    logits, x_1, found = weights(B, L, V), state(mask=False), {}
    x_t, shown = state(), Noise(5, range(B)).integers(Purpose.SOURCE, L, V)
    sigma = LogLinear().sigma(T.clamp(max=0.99))
    found["mdlm"] = [mdlm.subs(logits, x_t), mdlm.nelbo(weights(B, L), x_t == V - 1, T), mdlm.greedy(logits, x_t)]
    for graph, at in ((sedd.Absorb(), x_t), (sedd.Uniform(), shown)):
        for scaled in (False, True):
            log_scores = sedd.log_score(logits, at, sigma, scaled=scaled)
            found[f"{type(graph).__name__} {scaled}"] = [
                log_scores,
                graph.score_entropy(log_scores, x_1, at, sigma=sigma),
                graph.euler(log_scores.exp(), at, T),
                graph.analytic(log_scores.exp(), at, T),
            ]
        p = logits.softmax(-1)
        found[type(graph).__name__] = [
            graph.scores(p, at, sigma),
            graph.posterior(graph.scores(p, at, sigma), at, sigma),
        ]
    found["duo"] = [
        duo.nelbo(logits.log_softmax(-1), x_1, shown, kappa=T.clamp(0.01, 0.99), kappa_dot=NEXT),
        duo.posterior_law(logits.softmax(-1), shown, kappa_t=T.clamp(min=0.01), kappa_next=NEXT),
    ]
    found["gauss"] = [duo.gaussian_kappa(torch.linspace(-6, 2, 5), v) for v in (2, 50, 50258)] + [
        duo.GaussianNoise(50).gamma(T),
        duo.GaussianNoise(50).kappa(T),
    ]
    leading = duo.leading_noise(x_1, Noise(3, range(B)), vocab_size=V, k=3)
    gamma = duo.GaussianNoise(V).gamma(T)
    found["leading"] = [
        leading,
        leading.state(x_1, gamma),
        leading.weights(x_1, gamma, temperature=0.1),
        said(lambda: duo.leading_noise(x_1, Noise(3, range(B)), vocab_size=V, k=V)),
        said(lambda: duo.leading_noise(x_1, Noise(3, range(B)), vocab_size=V, k=0)),
    ]
    found["soft"] = [duo.diffuse(x_1, logits, gamma), duo.soft_input(logits, 0.5)]
    found["consistency"] = [
        duo.consistency_loss(logits.log_softmax(-1), logits.flip(0).log_softmax(-1), d) for d in ("kl-bwd", "kl-fwd")
    ] + [said(lambda: duo.consistency_loss(logits, logits, "x"))]
    for shares in ((0.0, 0.0), (0.3, 0.4)):
        times = duo.psi_times(9, level=0.6, shares=shares)
        found[f"psi {shares}"] = [times, duo.psi_times(5)] + [
            duo.psi_mixture(times, (m, "constant-0.5", m), shares=shares)
            for m in ("pure-posterior", "pure-pc", "max-capped-0.2", "max-rescale-0.5", "constant-remdm-0.1")
        ]
    found["psi refused"] = said(lambda: duo.psi_mixture(times, ("x-1", "x-1", "x-1")))
    hybrid = hdlm.EpsilonHybrid(0.3, 0.7)
    coins = [Noise(k, range(B)).uniform(Purpose.PATH, L) for k in (6, 7)]
    drawn = hybrid.corrupt(x_1, hybrid.masking(T), mask=V - 1, coin_mask=coins[0], coin_replace=coins[1], tokens=shown)
    found["hdlm"] = [
        drawn,
        hybrid.weights(drawn, hybrid.masking(T)),
        hybrid.weights(drawn, hybrid.masking(T), scheduled=True),
        hybrid.masking(T),
    ]
    gammas = hdlm.GammaHybrid(0.3)
    found["gamma"] = [
        gammas.corrupt(x_1, sigma, mask=V - 1, coins=tuple(coins), tokens=shown),
        gammas.log_score(logits, sigma),
        gammas.score_entropy(gammas.log_score(logits, sigma), x_1, x_t, sigma=sigma),
    ]
    found["levels"] = (
        [hdlm.level_times(torch.arange(5), 4)]
        + [[s.levels(9), s.settled(9)] for s in (hdlm.BlockSchedule(4, 3), hdlm.SlidingSchedule(4, 3))]
        + [hdlm.BlockSchedule(4, 3).times(9), hdlm.BlockSchedule(4, 3).calls(9)]
    )
    found["hidden"] = [hdlm.hidden_positions(4, 6, 9), hdlm.hidden_positions(4, 6, 9, width=2)]
    found["sdtt"] = [
        sdtt.round_step(3),
        sdtt.round_step(1, k=3, first_steps=10),
        sdtt.teacher_times(T, 0.1, 3),
        sdtt.released_teacher_times(T, 0.1, 3),
        sdtt.released_teacher_times(T, 0.1, 1),
    ]
    rollout = sdtt.roll_out(
        lambda x, t: weights(V, V)[x] + t[:, None, None],
        x_t,
        sdtt.teacher_times(T, 0.2, 3),
        dt=0.2,
        noise=Noise(0, range(B)),
        step=1,
    )
    found["rollout"] = [rollout.states, rollout.target.clamp(min=-99)]
    found["divergences"] = [
        sdtt.divergences(logits[0].log_softmax(-1), logits[1].log_softmax(-1), k)
        for k in ("kl-bwd", "kl-fwd", "mse", "tvd")
    ] + [said(lambda: sdtt.divergences(logits, logits, "x"))]
    return found


EVERY = {
    "mdlm": lambda **o: MdlmObjective(MASKED, **o),
    "sedd-absorb": lambda **o: ScoreObjective(MASKED, **o),
    "sedd-uniform": lambda **o: UniformScoreObjective(EVEN, **o),
    "duo": lambda **o: DuoObjective(EVEN, **o),
    "duo soft": lambda **o: DuoObjective(EVEN, config=DuoConfig(curriculum_steps=9, temperature=0.1), **o),
    "duo-dcd": lambda **o: ConsistencyObjective(EVEN, config=ConsistencyConfig(step=0.25), **o),
    "duo-dcd fwd": lambda **o: ConsistencyObjective(EVEN, config=ConsistencyConfig(divergence="kl-fwd"), **o),
    "sdtt": lambda **o: RoundObjective(MASKED, config=RoundConfig(step=0.125), **o),
    "sdtt mse": lambda **o: RoundObjective(
        MASKED, config=RoundConfig(step=0.125, times="released", divergence="mse"), **o
    ),
    "hdlm-epsilon": lambda **o: HybridObjective(MASKED, config=HybridConfig(epsilon=0.2), **o),
    "hdlm-gamma": lambda **o: GammaObjective(MASKED, config=GammaConfig(gamma=0.3), **o),
}


@cases
def objectives() -> object:
    found: dict[str, object] = {}
    noise = Noise(4, range(3, 3 + B))
    given, real = torch.zeros(B, L, dtype=torch.bool), torch.ones(B, L, dtype=torch.bool)
    given[:, 0], real[1, 4:] = True, False
    plain = TrainingBatch(noise.integers(Purpose.DATA, L, V - 1), samples=noise.samples)
    for name, make in EVERY.items():
        for place, batch in enumerate((plain, replace(plain, given=given, real=real, size=9))):
            objective = make(chunk=5)
            model = small_network(0, vocab_size=V, **objective.network)
            outcome = objective(
                model, batch, noise, training_step=4, ema=small_network(1, vocab_size=V, **objective.network)
            )
            outcome.loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            found[f"{name} {place}"] = [
                outcome.loss,
                outcome.t,
                outcome.h,
                outcome.sample_loss,
                outcome.logs,
                [float(g.detach().norm()) for g in grads],
                grads[0],
            ]
        found[name] = [
            dict(objective.network),
            objective.step_sizes,
            None if objective.teacher is None else objective.teacher.calls,
            type(objective.validation).__name__,
            objective.teacher_share,
        ]
    found["refused"] = [
        said(lambda: MdlmObjective(EVEN)),
        said(lambda: DuoObjective(MASKED)),
        said(lambda: MdlmObjective(MixturePath(MaskSource(V), CosineSchedule()))),
        *(
            said(lambda v=v: DuoConfig(**v).temperature)
            for v in ({"curriculum_steps": -1}, {"gamma_min": 0.0}, {"temperature": 0.0}, {"gamma_min": -1.85})
        ),
        *(said(lambda v=v: ConsistencyConfig(step=v).step) for v in (0, 1, 0.5)),
        *(
            said(lambda v=v: RoundConfig(**v).step)
            for v in ({"step": 0.0}, {"step": 1.0}, {"k": 1}, {"k": 2, "step": 0.25})
        ),
        OBJECTIVES.build(OBJECTIVES.find("mdlm").config(shortest=0.1), MASKED).shortest,
    ]
    return found


@cases
def networks() -> object:
    model, x_t, s = small_network(vocab_size=V), state(), torch.linspace(0, 2, B)
    hidden = hdlm.hidden_positions(2, 4, L)
    with torch.no_grad():
        soft = weights(B, L, V).softmax(-1)
        tokens, few = torch.arange(B * L * 2).view(B, L, 2) % V, weights(B, L, 2).softmax(-1)
        found = [
            run(model, x_t, s),
            run(model, x_t, s[:, None].expand(B, L) + torch.arange(L)),
            run(model, x_t, s, hidden=hidden),
            run(model, x_t, s, embedded=embed_soft(model, soft)),
        ]
        found += [
            embed_sparse(model, tokens, few),
            blended_embedding(model, x_t, s, gamma=0.5),
            blended_embedding(model, x_t, s[:, None].expand(B, L), gamma=0.5),
        ]
    return found


@cases
def files(folder) -> object:
    model, other = small_network(0), small_network(1)
    write_hugging_face(folder / "hf", model)
    write_lightning(folder / "a.ckpt", model, other, hyper_parameters={"config": {}})
    found: list[object] = []
    for place, options in (
        (folder / "hf", {}),
        (folder / "a.ckpt", {"system": "mdlm"}),
        (folder / "a.ckpt", {"system": "mdlm", "weights": "raw"}),
        (folder / "a.ckpt", {"system": "duo", "weights": "ema"}),
        (folder / "a.ckpt", {}),
    ):

        def read(place=place, options=options):
            with open_layout(place, **options) as opened:
                loaded = opened.load()
            return [loaded.config, [float(p.detach().norm()) for p in loaded.parameters()]]

        found.append(said(read))
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text(json.dumps({"model_type": "x"}))
    return [
        *found,
        is_peer(folder / "hf"),
        is_peer(folder / "a.ckpt"),
        is_peer(folder / "empty"),
        said(lambda: open_layout(folder / "empty")),
    ]


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.peers")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.peers")


test_what_is_computed = cases.test()
