"""Texts drawn position by position: what one pass over them says, alone and together, by torch and compiled."""

import importlib.util
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdfm.flow import Filter, draw
from fsdfm.flow.posterior import BannedTokens
from fsdfm.model import CausalConfig, CausalHeadConfig, CausalModel, DiT, ModelConfig, compiled, to_bfloat16, to_int8
from fsdfm.model.causal_loop import lockstep
from fsdfm.noise import Noise

VOCAB, LENGTH, TEXTS = 300, 14, 19
SIZES = {"width": 32, "num_heads": 2, "mlp_width": 48, "style": "llama", "dropout": 0.0}


@pytest.fixture(params=["torch", "compiled"])
def engine(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(compiled, "_kernels", lambda: None)
    elif importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed: pip install 'fsdfm[fast]'")
    return request.param


def network(style: str = "llama") -> DiT:
    sizes = {**SIZES, "style": style}
    model = DiT(ModelConfig(vocab_size=VOCAB, num_blocks=1, cond_width=8, posterior=CausalHeadConfig(), **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn(value.shape, generator=generator))
    return model.eval()


def asked(model: DiT, *, texts: int = TEXTS):
    x_t = torch.randint(VOCAB, (texts, LENGTH), generator=torch.Generator().manual_seed(1))
    t = torch.full((texts,), 0.25, dtype=torch.float64)
    return model.posterior(x_t, t, t), Noise(3, range(texts)).uniform(3, LENGTH)


def held_beginnings(x: Tensor) -> Tensor:
    """Beginnings of 0, 1, 2, ... tokens, and a token in the middle of every third text."""
    held = torch.where(torch.arange(LENGTH) < torch.arange(len(x))[:, None] % LENGTH, x, -1)
    held[::3, 9] = 5
    return held


@torch.no_grad()
@pytest.mark.parametrize("chosen", [None, Filter(temperature=0.7), Filter(temperature=0.9, top_k=40, top_p=0.8)])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("style", ["llama", "paper"])
def test_a_text_is_what_one_pass_over_it_says(engine, chosen, begun, style):
    """x_i = F^-1(u_i | x_<i), the conditional laws taken by teacher forcing."""
    model = network(style)
    posterior, u = asked(model)
    held = held_beginnings(posterior.x_t) if begun else torch.full_like(posterior.x_t, -1)
    posterior = posterior.given(held, forbidden=7)
    x = posterior.draw(torch.arange(TEXTS), u, filter=chosen)
    read = model.joint.read(model, posterior.features, x, t=posterior.t, h=posterior.h)
    logits = model.logits_at(read.flatten(0, 1))
    expected = draw(logits, u.flatten(), forbidden=7, filter=chosen).tokens.view_as(x)
    assert torch.equal(x, torch.where(held >= 0, held, expected))


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_text_is_the_same_alone_and_in_any_company(engine, precision):
    model = network()
    {"float32": lambda model: None, "bfloat16": to_bfloat16, "int8": to_int8}[precision](model)
    posterior, u = asked(model)
    posterior = posterior.given(held_beginnings(posterior.x_t))
    together = posterior.draw(torch.arange(TEXTS), u)
    for count in (1, 2, 5, 9, 17):
        order = torch.randperm(TEXTS, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(posterior.draw(order, u[order]), together[order])


@torch.no_grad()
def test_a_hook_that_bans_and_one_that_is_only_a_function_draw_the_same(engine):
    posterior, u = asked(network())
    samples, one = torch.arange(TEXTS), posterior.t
    plain = posterior.draw(samples, u)
    closed = samples % 2 == 0
    ban = BannedTokens({int(plain[0, 0]): closed, 3: torch.ones_like(closed)})
    seen = []

    def watch(logits, where):
        seen.append((where.sample, where.position))
        return ban(logits, where)

    banned = posterior.changed(ban, posterior.x_t, t=one, t_next=one).draw(samples, u)
    watched = posterior.changed(watch, posterior.x_t, t=one, t_next=one).draw(samples, u)
    assert torch.equal(banned, watched)
    assert not bool((banned[closed] == plain[0, 0]).any())
    assert not bool((banned == 3).any())
    assert not torch.equal(banned, plain)
    rows = torch.cat([sample * LENGTH + position for sample, position in seen])
    assert torch.equal(rows.sort().values, torch.arange(TEXTS * LENGTH))


@torch.no_grad()
def test_weights_that_have_changed_are_used(engine):
    model = network()
    posterior, u = asked(model, texts=2)
    before = posterior.draw(torch.arange(2), u)
    model.head.weight.neg_()
    changed = posterior.draw(torch.arange(2), u)
    assert not torch.equal(changed, before)
    model.head.weight.neg_()
    assert torch.equal(posterior.draw(torch.arange(2), u), before)


@torch.no_grad()
@pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
def test_weights_that_are_halves_are_kept_so_and_say_the_same_bits(monkeypatch):
    """Subnormal halves, zeros of both signs and the largest one among them; a weight that is none keeps all float32."""
    rows, halves = torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), torch.tensor([6e-8, -6e-5, -0.0])
    model = network().half().float()
    product = torch.nn.Linear(8, 70, bias=False)
    product.weight.copy_(product.weight.half())
    product.weight[0, :3], product.weight[1, 0] = halves, 65504.0
    product.weight.copy_(product.weight.half())
    kernels, outs = compiled._kernels(), []
    for kept in (True, False):
        out = torch.zeros(3, 70)
        packed = compiled._pack(product, halves=kept)
        assert packed.dtype == (np.uint16 if kept else np.float32)
        kernels._multiply(rows.numpy(), packed, out.numpy(), 3)
        outs.append(out)
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0], rows @ product.weight.T)

    posterior, u = asked(model)
    read, texts = [], []
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda weights, *rest: read.append(weights) or run(weights, *rest))
    for reads_halves in (True, False):
        monkeypatch.setattr(compiled, "_reads_halves", lambda found=reads_halves: found)
        monkeypatch.setattr(compiled, "_KEPT", WeakKeyDictionary())
        texts.append(posterior.draw(torch.arange(TEXTS), u))
    assert torch.equal(*texts)
    monkeypatch.setattr(compiled, "_reads_halves", lambda: True)
    model.head.weight[0, 0] = 0.1  # which float16 does not hold
    posterior.draw(torch.arange(TEXTS), u)
    for weights, kept in zip(read[::2], (np.uint16, np.float32, np.float32), strict=True):
        products = (weights.qkv, weights.out, weights.into, weights.down, weights.head)
        assert [each.dtype for each in products] == [kept] * len(products)


@torch.no_grad()
@pytest.mark.parametrize("chosen", [None, Filter(top_k=3)])
def test_logits_that_are_no_numbers_are_refused(engine, chosen):
    model = network()
    posterior, u = asked(model, texts=2)
    model.head.weight[3] = torch.nan
    with pytest.raises(ValueError, match="nothing to draw from"):
        posterior.draw(torch.arange(2), u, filter=chosen)


@torch.no_grad()
@pytest.mark.parametrize("given", [1, 6])
def test_an_autoregressive_model_writes_the_same_by_the_loop_and_by_its_modules(engine, given, monkeypatch):
    model = CausalModel(CausalConfig(vocab_size=VOCAB, num_blocks=2, max_length=LENGTH, **SIZES)).eval()
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        value.add_(0.2 * torch.randn(value.shape, generator=generator))
    prompt = torch.randint(VOCAB, (TEXTS, given), generator=generator)
    noise = Noise(0, range(TEXTS))
    plain = model.generate(prompt, LENGTH, noise, temperature=0.8)
    end = int(plain[2, 8])
    ended = model.generate(prompt, LENGTH, noise, temperature=0.8, eos_id=end)
    monkeypatch.setattr("fsdfm.model.causal.can_loop", lambda blocks, features: False)
    assert torch.equal(model.generate(prompt, LENGTH, noise, temperature=0.8), plain)
    assert torch.equal(model.generate(prompt, LENGTH, noise, temperature=0.8, eos_id=end), ended)
    assert bool((ended[2, 8:] == end).all())
    assert model.generate(prompt[:, :1], 1, noise).shape == (TEXTS, 1)


def test_without_a_place_to_keep_what_is_compiled_it_is_compiled_all_the_same(monkeypatch):
    """A service without a home on a read-only file system: numba knows no place then, and says so by an error."""
    kernels = pytest.importorskip("fsdfm.model.kernels", reason="numba is not installed: pip install 'fsdfm[fast]'")
    asked = []

    def njit(*, cache, **_):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(kernels, "njit", njit)
    assert kernels._compiled(len)([1]) == 1
    assert asked == [True, False]


def test_texts_go_from_their_starts_to_their_ends():
    walk = [(places.at, places.going, places.same) for places in lockstep([0, 3, 2], [2, 4, 2])]
    assert walk == [([0, 3, 1], [True, True, False], None), ([1, 3, 1], [True, False, False], None)]
    assert [places.same for places in lockstep([1, 1], [3, 3])] == [1, 2]
