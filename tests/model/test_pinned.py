"""What networks say, number by number; see tests/pinned.py."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdfm.flow import Filter
from fsdfm.model import (
    PRESETS,
    CausalConfig,
    CausalHeadConfig,
    CausalModel,
    CRFConfig,
    DiT,
    ModelConfig,
    Transformer,
    TransformerConfig,
    architecture_of,
    build_network,
    find_architecture,
    to_bfloat16,
    to_int8,
)
from fsdfm.model.causal_loop import Places, RowStack, are_plain
from fsdfm.model.context import CanvasPattern, Context
from fsdfm.model.filling import fill_network, num_bytes
from fsdfm.model.joint import read_joint_config
from fsdfm.model.layers import Cache, RotaryScaling, StackConfig, gelu_tanh, rotary_phases, rotate
from fsdfm.model.network import Network
from fsdfm.model.stack import rotary_frequencies, visibility
from fsdfm.model.weights import weights_sha256
from fsdfm.noise import Noise, Purpose
from pinned import Cases, chosen, odd, refused, said

cases = Cases("model")
V, L = 13, 7
SHAPE = {"vocab_size": V, "width": 24, "num_blocks": 2, "num_heads": 3, "dropout": 0.0}


def stirred(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.15)
    return model.eval()


def dit(**options) -> DiT:
    return stirred(DiT(ModelConfig(**{**SHAPE, "cond_width": 10, **options})))


def asked() -> tuple[Tensor, Tensor, Tensor]:
    x_t = Noise(0, range(3)).integers(Purpose.DATA, L, V)
    return x_t, torch.tensor([0.0, 0.4, 1.0]).double(), torch.tensor([1.0, 0.25, 2**-10]).double()


DITS = {
    "time": {},
    "step": {"conditioning": "step"},
    "fused": {"conditioning": "fused"},
    "llama": {"style": "llama", "num_kv_heads": 1, "mlp_width": 20},
    "next": {"next_token": True, "conditioning": "step", "style": "llama"},
    "silent": {"clock": "none"},
    "sigma": {"clock": "sigma", "blend": 0.5},
    "hybrid": {"clock": "hybrid", "blend": 1.0},
    "geometric": {"clock": "geometric"},
    "linear": {"rotary_factor": 2.0, "rotary_scaling": "linear", "norm_eps": 0.1},
    "ntk": {"rotary_factor": 3.0},
    "left": {"says": "leave-one-out"},
    "scores": {"says": "uniform-scores"},
}
ROWS = torch.tensor([0, 2, 6, 14, 20])


@cases
def denoisers() -> object:
    found: dict[str, object] = {}
    x_t, t, h = asked()
    keys = torch.ones(3, L, dtype=torch.bool)
    keys[1, 4:] = False
    for name, options in DITS.items():
        model = dit(**options)
        with torch.no_grad():
            own = [model(x_t, t, h), model.features_at(x_t, t, h, rows=ROWS), model.trunk(x_t, t, h, keys=keys)]
            own += [model.trunk(x_t, t, h, rows=ROWS, keys=keys), model.trunk(x_t[:, :4], t, h)]
            own += [model.trunk(x_t, t, h, embedded=model.embedding(x_t) * 2)]
            own += [
                [tile for _, tile, _ in model.posterior(x_t, t, h, rows=rows).marginals(ROWS)] for rows in (None, ROWS)
            ]
        loss = model(x_t, t, h).square().mean()
        found[name] = [*own, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
    found["no h"] = [said(lambda n=n: dit(**DITS[n])(x_t, t)) for n in ("time", "step", "fused")]
    found["fresh"] = {
        name: dict(DiT(ModelConfig(**{**SHAPE, "cond_width": 10, **DITS[name]}), seed=3).named_parameters())
        for name in ("step", "fused", "llama")
    }
    return {**found, "reading": said(lambda: dit(says="leave-one-out").joint.log_prob())}


@cases
def dropped() -> object:
    x_t, t, h = asked()
    model = dit(dropout=0.5).train()
    torch.manual_seed(0)
    one = model(x_t, t, h)
    return [one, model(x_t, t, h), dit(dropout=0.5)(x_t, t, h)]


@cases
def contexts() -> object:
    found: list[object] = []
    x_1, t, h = (
        Noise(1, range(2)).integers(Purpose.DATA, 12, V),
        torch.tensor([0.3, 0.6]).double(),
        torch.tensor([0.5, 0.25]).double(),
    )
    for options in (
        {},
        {"window": 4},
        {"window": 8, "style": "llama", "num_kv_heads": 1},
        {"window": 4, "style": "llama", "next_token": True},
    ):
        model = dit(canvas=4, conditioning="step", **options)
        with torch.no_grad():
            found.append(model.trunk(x_1.flip(1), t, h, context=model.read_all(x_1)))
            context = None
            for start in range(0, 8, 4):
                context = model.read(x_1[:, start : start + 4], context)
                found += [context.length, context.start, [layer.keys for layer in context.layers]]
            found += [
                model.trunk(x_1[:, 8:], t, h, context=context),
                model.features_at(x_1[:, 8:], t, h, rows=torch.tensor([1, 6]), context=context),
            ]
            beside = context.seen()
            found += [
                model.features_beside(x_1[:, :3], t, h, positions=torch.tensor([8, 10, 11]), length=12, beside=beside)
            ]
    for pattern in (
        CanvasPattern(2),
        CanvasPattern(2, 2),
        CanvasPattern(2, noised=True),
        CanvasPattern(2, 4, noised=True),
    ):
        found.append(pattern.mask(8, torch.device("cpu")))
    return [*found, Context.empty(2).length, said(lambda: dit().read_all(x_1))]


@cases
def children() -> object:
    x_t, t, h = asked()
    parent = dit()
    step, crf = parent.step_aware(seed=4), parent.with_transitions(torch.ones(V, 2), torch.eye(V)[:, :2])
    causal, masked = (
        parent.with_posterior(CausalHeadConfig(cond_width=6), seed=2),
        stirred(dit(style="llama").with_posterior(CRFConfig(rank=2))).with_mask(),
    )
    found = [
        [dict(child.named_parameters()), child.config, child.training, child(x_t, t, h)]
        for child in (step, crf, causal, masked, parent.train().with_mask())
    ]
    found += [
        said(step.step_aware),
        said(lambda: crf.with_transitions(crf.joint.left, crf.joint.right)),
        said(lambda: causal.with_posterior(CRFConfig())),
    ]
    plain = stirred(Transformer(TransformerConfig(**SHAPE)))
    aware, linked = plain.step_aware(seed=3), plain.with_transitions(torch.ones(V, 2), torch.eye(V)[:, :2])
    found += [[dict(child.named_parameters()), child.config, child(x_t, t, h)] for child in (aware, linked)]
    return [
        *found,
        said(aware.step_aware),
        said(lambda: linked.with_transitions(linked.joint.left, linked.joint.right)),
    ]


@cases
def grown() -> object:
    """Joint heads that became larger, and transitions that became dynamic."""
    x_t, t, h = asked()
    other = stirred(CausalModel(CausalConfig(**{**SHAPE, "num_blocks": 5})), 9)
    small = stirred(dit().with_posterior(CausalHeadConfig(num_blocks=2, cond_width=6), seed=2))
    found: list[object] = []
    for count, start in ((3, {}), (4, {"causal": other})):
        child = small.with_larger_posterior(CausalHeadConfig(num_blocks=count, cond_width=6), seed=3, **start)
        found += [dict(child.joint.named_parameters()), child.config, child.joint.blocks[-1].attention.out.weight]
    chain = stirred(dit().with_posterior(CRFConfig(rank=3), seed=2))
    gated = chain.with_gates(4, seed=5)
    found += [dict(gated.joint.named_parameters()), gated.config.posterior]
    gated = stirred(gated, 1)
    with torch.no_grad():
        found += [gated.joint.gates(gated.trunk(x_t, t, h), t, h)]
        alone = [gated.joint.gates(gated.trunk(x_t, t, h)[k : k + 1], t[k : k + 1], h[k : k + 1]) for k in range(3)]
        found += [torch.cat(alone), [c.to_dict() for c in (chain.config.posterior, gated.config.posterior)]]
    for ask in (
        lambda: small.with_larger_posterior(CausalHeadConfig(num_blocks=2, cond_width=6)),
        lambda: chain.with_larger_posterior(CausalHeadConfig(num_blocks=3, cond_width=6)),
        lambda: dit().with_larger_posterior(CRFConfig()),
        lambda: gated.with_gates(4),
        lambda: small.with_gates(4),
        *(lambda w=w: CRFConfig(**w) for w in ({"rank": 0}, {"rank": True}, {"gate_width": -1}, {"gate_width": 1.0})),
    ):
        found.append(said(ask))
    return found


STACKS = {
    "plain": {},
    "gpt2": {
        "style": "paper",
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "norm_bias": True,
        "tied": True,
        "max_length": 9,
    },
    "qwen": {"head_channels": 12, "qk_norm": True, "tied": True, "num_kv_heads": 1, "norm_eps": 0.01},
    "causal": {"future": 0.0, "next_token": True, "rotary_base": 500.0},
    "blocks": {"future": 0.0, "block_length": 3, "rotary_factor": 4.0},
    "between": {"future": 0.3, "rotary_factor": 8.0, "rotary_bands": [1.0, 4.0, 128]},
    "time": {"conditioning": "time", "cond_width": 10},
    "step": {"conditioning": "step", "cond_width": 10, "posterior": CRFConfig(rank=2)},
}


@cases
def transformers() -> object:
    found: dict[str, object] = {}
    x_t, t, h = asked()
    keys = torch.ones(3, L, dtype=torch.bool)
    keys[2, :3] = False
    positions = torch.arange(L).expand(3, L) + torch.tensor([[0], [1], [2]])
    for name, options in STACKS.items():
        config = TransformerConfig(**{**SHAPE, **options})
        model = stirred(Transformer(config))
        with torch.no_grad():
            own = [model(x_t, t, h), model.features_at(x_t, t, h, rows=ROWS), model.trunk(x_t, t, h, keys=keys)]
            own += [
                model.trunk(x_t, t, h, keys=keys, positions=positions),
                model.trunk(x_t, t, h, rows=ROWS, keys=keys, positions=positions),
            ]
            own += [rotary_frequencies(config), visibility(config, 7), model(x_t[:, :3], t, h)]
        grads = torch.autograd.grad(model(x_t, t, h).square().mean(), list(model.parameters()), allow_unused=True)
        small = [num_bytes(config, precision) for precision in ("float32", "bfloat16", "int8")]
        fresh = dict(Transformer(config, seed=5).named_parameters())
        model.untie()
        found[name] = [*own, grads, small, fresh, model.config.tied, model.head.weight]
        model.see_future(0.5)
        found[name] += [model(x_t, t, h)]
        for precision in ("float32", "bfloat16", "int8"):
            with torch.device("meta"):
                empty = Transformer(config)
            weights = dict(stirred(Transformer(config)).state_dict())
            fill_network(empty, weights, precision)
            with torch.no_grad():
                gap = (
                    (empty.eval()(x_t, t, h) - Transformer.forward(stirred(Transformer(config)), x_t, t, h)).abs().max()
                )
            found[name] += [
                empty.precision,
                empty.head.weight.dtype if precision == "float32" else None,
                bool(gap < {"float32": 1e-5, "bfloat16": 0.1, "int8": 0.3}[precision]),
            ]
    broken = {**weights, "norm.weight": weights["norm.weight"] * float("nan")}
    with torch.device("meta"):
        empty = Transformer(config)
    found["broken"] = [said(lambda: fill_network(empty, broken)), said(lambda: fill_network(empty, weights, "int4"))]
    found["refused"] = [said(lambda: Transformer(TransformerConfig(**SHAPE, conditioning="time"))(x_t))]
    found["refused"] += [
        said(
            lambda n=n: (
                stirred(Transformer(TransformerConfig(**{**SHAPE, **STACKS["gpt2"]})))(torch.zeros(1, n).long()).shape
            )
        )
        for n in (9, 10)
    ]
    return found


@cases
def heads() -> object:
    found: dict[str, object] = {}
    x_t, t, h = asked()
    u = Noise(3, range(3)).uniform(Purpose.DESTINATION, L)
    held = torch.full((3, L), -1)
    held[1, :5], held[2, 0], held[2, 3] = x_t[1, :5], 4, 2
    x_1 = x_t.flip(0)
    real = torch.ones(3, L, dtype=torch.bool)
    real[0, 5:] = False

    def hook(logits, rows):
        return logits + (rows.position * 0.1)[:, None] * torch.arange(V)

    for name, options in {
        "crf": {"posterior": CRFConfig(rank=3)},
        "causal": {"posterior": CausalHeadConfig(cond_width=6)},
        "llama": {"posterior": CausalHeadConfig(num_blocks=1, cond_width=6), "style": "llama", "conditioning": "step"},
        "gates": {"posterior": CRFConfig(rank=3, gate_width=5)},
        "grouped": {
            "posterior": CausalHeadConfig(num_blocks=3, cond_width=6),
            "style": "llama",
            "num_kv_heads": 1,
            "next_token": True,
        },
    }.items():
        model = dit(**options)
        own: list[object] = []
        with torch.no_grad():
            for rows in (None, torch.tensor([8, 9, 12])):
                one = model.posterior(x_t, t, h, rows=rows)
                samples = torch.arange(3) if rows is None else torch.tensor([1])
                every = (one, one.given(held), one.given(held, forbidden=5), one.changed(hook, x_t, t=t, t_next=t))
                for p in every:
                    own += [p.draw(samples, u[samples]), p.draw(samples, u[samples], filter=Filter(0.6, 4))]
                    own += [[tile for _, tile, _ in p.marginals(ROWS[1:4] if rows is None else rows)]]
                    own += [p.log_prob(x_1)] if rows is None else []
                own += [one.part(1, 2).draw(torch.tensor([0]), u[1:2])]
            features = model.trunk(x_t, t, h)
            joined = {"t": t, "h": h, "held": held, "real": real}
            own += [
                model.joint.log_prob(model, features, x_1, **joined),
                model.joint.log_prob(model, features, x_1, **joined, forbidden=3),
            ]
            if name not in ("crf", "gates"):
                own += [
                    model.joint.read(model, features, x_1, t=t, h=h),
                    model.joint.position_log_probs(model, features, x_1, t=t, h=h),
                ]
                several = model.posterior(x_t, t, h).given(held)
                own += [
                    model.joint.settle(several, torch.arange(3), u, filter=None),
                    are_plain(model.joint.blocks),
                ]
                other = stirred(
                    CausalModel(
                        CausalConfig(
                            **{
                                **SHAPE,
                                "style": options.get("style", "paper"),
                                "num_kv_heads": options.get("num_kv_heads"),
                                "num_blocks": 4,
                            }
                        )
                    ),
                    9,
                )
                model.joint.start_from(other)
                own += [
                    dict(model.joint.blocks.named_parameters()),
                    model.joint.norm.weight,
                    [tuple(p.shape) for p in model.joint.shared(model)],
                ]
        loss = -model.joint.log_prob(model, model.trunk(x_t, t, h), x_1, **joined).sum()
        found[name] = [*own, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]
        found[name] += [
            dict(DiT(ModelConfig(**{**SHAPE, "cond_width": 10, **options}), seed=1).joint.named_parameters())
        ]
    return found


@cases
def long_draws() -> object:
    """Windows of guesses that grow and shrink."""
    model = stirred(DiT(ModelConfig(**{**SHAPE, "cond_width": 10, "posterior": CausalHeadConfig(cond_width=6)})))
    x_t, t = Noise(0, range(2)).integers(Purpose.DATA, 90, V), torch.full((2,), 0.5).double()
    held = torch.full_like(x_t, -1)
    held[0, 10:60], held[1, :30] = 3, 2
    u = Noise(3, range(2)).uniform(Purpose.DESTINATION, 90)
    with torch.no_grad():
        p = model.posterior(x_t, t, t).given(held)
        return [
            p.draw(torch.arange(2), u),
            p.draw(torch.arange(2), u, filter=Filter(0.01)),
            model.joint.settle(p, torch.arange(2), u, filter=Filter(0.05)),
        ]


@cases
def causal_models() -> object:
    found: dict[str, object] = {}
    x = Noise(2, range(2)).integers(Purpose.DATA, 9, V)
    for name, options in {"paper": {}, "llama": {"style": "llama", "num_kv_heads": 1, "mlp_width": 17}}.items():
        model = stirred(CausalModel(CausalConfig(**{**SHAPE, **options, "max_length": 12})))
        with torch.no_grad():
            caches = [Cache(9) for _ in model.blocks]
            parts = [model.trunk(x[:, :4], caches), model.trunk(x[:, 4:5], caches), model.trunk(x[:, 5:], caches)]
            own = [model(x), model.nll(x), parts, [c.length for c in caches]]
            noise = Noise(1, range(2))
            own += [
                model.generate(x[:, :2], 9, noise, **how)
                for how in ({}, {"temperature": 0.0}, {"temperature": 0.5, "eos_id": 4})
            ]
        grads = torch.autograd.grad(model.nll(x).mean(), list(model.parameters()))
        found[name] = [*own, grads, dict(CausalModel(model.config, seed=2).named_parameters())]
    for wrong in (
        lambda: model.trunk(torch.zeros(1, 13).long()),
        lambda: model.trunk(torch.zeros(1, 12).long()).shape,
        lambda: model.generate(x[:, :0], 4, noise),
        lambda: model.generate(x, 8, noise),
        lambda: model.generate(x, 9, noise),
        lambda: model.generate(x, 13, noise),
        lambda: model.generate(x, 12, Noise(0, [0])),
        lambda: model.generate(x, 12, noise, temperature=-0.1),
        lambda: copy.deepcopy(model).train().generate(x, 9, noise),
    ):
        found[f"said {len(found)}"] = said(wrong)
    return found


@cases
def parts() -> object:
    x = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    found: list[object] = []
    for scaling in (None, RotaryScaling(kind="linear", factor=2.0), RotaryScaling(kind="ntk", factor=4.0)):
        phases = rotary_phases(5, 8, start=3, scaling=scaling)
        found += [phases, rotate(x, phases), None if scaling is None else scaling.of(8)]
    found += [RotaryScaling(factor=2.0).of(2), RotaryScaling(factor=2.0).of(1)]
    found += [said(lambda f=f: RotaryScaling(factor=f).factor) for f in (0.9, 1.0)]
    found += [said(lambda: RotaryScaling(kind="yarn"))]
    with torch.no_grad():
        found += [gelu_tanh(torch.linspace(-4, 4, 700).view(100, 7))]
    found += [gelu_tanh(torch.linspace(-4, 4, 10).requires_grad_())]
    blocks = stirred(CausalModel(CausalConfig(**{**SHAPE, "style": "llama"})))
    stack = RowStack(blocks.blocks, blocks.norm, rotary_phases(5, 8), texts=1)
    with torch.no_grad():
        found += [[stack(torch.linspace(-1, 1, 24)[None] * (i + 1), Places([i], [True]))[0] for i in range(5)]]
    return [
        *found,
        weights_sha256(blocks)[:1] != "",
        weights_sha256(blocks) == weights_sha256(copy.deepcopy(blocks)),
        weights_sha256(blocks.blocks[0]) == weights_sha256(blocks.blocks[1]),
    ]


@cases
def rounded() -> object:
    x_t, t, h = asked()
    found: list[object] = []
    for options in ({}, {"style": "llama"}):
        exact, eight, half = dit(**options), dit(**options), dit(**options)
        to_int8(eight)
        to_bfloat16(half)
        with torch.no_grad():
            of_all = [exact(x_t, t, h), eight(x_t, t, h), half(x_t, t, h)]
            of_rows = [m.logits_at(m.features_at(x_t, t, h, rows=ROWS)) for m in (exact, eight, half)]
        spread = float(of_all[0].std())
        for own in (of_all, of_rows):
            found += [float((own[1] - own[0]).std()) < 0.04 * spread, float((own[2] - own[0]).std()) < 0.02 * spread]
            found += [float((own[1] - own[0]).std()) > 0.001 * spread, float((own[2] - own[0]).std()) > 0.0005 * spread]
        found += [
            eight.precision,
            half.precision,
            eight.training,
            any(p.requires_grad for p in half.parameters()),
            sum(p.numel() for p in eight.parameters()),
        ]
    layer = eight.blocks[0].attention.qkv
    rows = torch.linspace(-2, 2, 24).repeat(70, 1) * torch.arange(70)[:, None]
    return [*found, layer(rows), layer.part(rows, 3, 9), layer.gelu(rows), layer(torch.zeros(2, 24))]


@cases
def configs() -> object:
    found: list[object] = [
        {name: [c.to_dict(), c.head_width, c.kv_heads, c.hidden_width, c.is_step_aware] for name, c in PRESETS.items()}
    ]
    found += [
        ModelConfig.preset("tiny", vocab_size=10, style="llama").to_dict(),
        said(lambda: ModelConfig.preset("huge")),
    ]
    for make, base, table in (
        (
            ModelConfig,
            SHAPE,
            {
                **dict.fromkeys(("vocab_size", "num_blocks", "cond_width"), (0, 1, 2.0, True, "1")),
                **{
                    "width": (25, 21, 6),
                    "num_heads": (0, 5, 12, 24),
                    "num_kv_heads": (None, 0, 1, 2, 3),
                    "mlp_width": (0, 1, None),
                },
                **{"style": ("gpt", "llama"), "dropout": (-0.1, 0, 0.99, 1), "norm_eps": (0, 1e-9, 0.99, 1)},
                **{
                    "conditioning": ("none", "fused"),
                    "clock": ("x", "sigma"),
                    "says": ("x", "uniform-scores"),
                    "blend": (-0.1, 0, 0.5, 1.1),
                },
                **{
                    "next_token": (1, True),
                    "canvas": (0, 1),
                    "window": (4, 0),
                    "rotary_factor": (0.5, 1, 2),
                    "rotary_scaling": ("x",),
                },
                **{"posterior": (3, CRFConfig(rank=1))},
            },
        ),
        (
            TransformerConfig,
            SHAPE,
            {
                **dict.fromkeys(
                    ("vocab_size", "max_length", "block_length", "cond_width", "head_channels"), (0, 1, 2.0, True)
                ),
                **{
                    "width": (25, 21),
                    "num_kv_heads": (2, 3),
                    "head_channels": (3, 4, 0, None),
                    "style": ("gpt", "paper"),
                    "positions": ("x", "learned"),
                },
                **{
                    "conditioning": ("x", "step"),
                    "dropout": (-0.1, 0, 1),
                    "future": (-0.1, 0, 1, 1.1),
                    "norm_eps": (0, 1, 0.5),
                },
                **{"rotary_base": (1, 1.1), "rotary_factor": (0.9, 1), "qkv_bias": (1, True), "tied": (0, False)},
                **{"rotary_bands": ([1, 2], [0, 1, 2], [1, 1, 2], [1, 2, 0], [1, 2, 1.5], [1, 2, 1], "abc")},
            },
        ),
        (CausalConfig, SHAPE, {"max_length": (0, 1), "width": (25,)}),
    ):
        for name, values in table.items():
            for value in values:
                found.append(said(lambda m=make, b=base, n=name, v=value: getattr(m(**{**b, n: v}), n)))
        found += [
            said(lambda m=make: m.from_dict({**SHAPE, "widht": 3})),
            said(lambda m=make: m.from_dict({"width": 4})),
        ]
        found += [said(lambda m=make: m.from_dict(m(**SHAPE).to_dict()) == m(**SHAPE))]
    found += [
        said(lambda c=c: ModelConfig(**SHAPE, **c).canvas)
        for c in ({"canvas": 4, "window": 6}, {"canvas": 4, "window": 8}, {"canvas": 4, "next_token": True})
    ]
    found += [
        said(lambda: ModelConfig(**SHAPE, says="leave-one-out", posterior=CRFConfig())),
        said(lambda: ModelConfig(**SHAPE, blend=0.5, clock="geometric")),
    ]
    found += [
        said(lambda: ModelConfig.from_dict({**SHAPE, "transition_rank": 3}).transition_rank),
        said(lambda: ModelConfig.from_dict({**SHAPE, "posterior": {"kind": "causal", "num_blocks": 1}}).posterior),
    ]
    found += [
        refused(lambda v=v: read_joint_config(v))
        for v in ({}, {"kind": "crf", "rank": 2}, {"kind": "crf", "rnak": 2}, {"kind": "mine"}, {"kind": ["crf"]})
    ]
    found += [said(lambda r=r: CRFConfig(rank=r).rank) for r in (0, 1, True, 1.0)]
    found += [
        said(lambda n=n, v=v: CausalHeadConfig(**{n: v})) for n in ("num_blocks", "cond_width") for v in (0, 1, True)
    ]
    config = ModelConfig(**SHAPE, posterior=CausalHeadConfig())
    found += [
        architecture_of(config),
        type(build_network(TransformerConfig(**SHAPE), seed=1)).__name__,
        config.to_dict(),
        find_architecture().network.__name__,
    ]
    found += [
        refused(lambda: find_architecture("gpt")),
        refused(lambda: find_architecture(3)),
        said(lambda: architecture_of(StackConfig(**SHAPE))),
    ]
    bare = Network()
    found += [said(bare.step_aware), said(lambda: bare.with_transitions(torch.ones(2, 3), torch.ones(2, 3)))]
    return [*found, replace(config, width=12).head_width]


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.model", TransformerConfig(**SHAPE), CausalConfig(**SHAPE))


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.model")


test_what_is_computed = cases.test()
