"""Each part against its formula, written out."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.model.layers import (
    AdaptiveBlock,
    Attention,
    Block,
    Cache,
    Mlp,
    Norm,
    Projection,
    StackConfig,
    gelu_tanh,
    initialise,
    rotary_phases,
    rotate,
)

BOTH_STYLES = pytest.mark.parametrize("style", ["paper", "llama"])


def config(**changes: object) -> StackConfig:
    return StackConfig.from_dict({"vocab_size": 11, "width": 24, "num_blocks": 2, "num_heads": 4, **changes})


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rotation_is_a_complex_turn_of_the_two_halves() -> None:
    x = draw(2, 7, 3, 8)
    position, channel = torch.arange(7.0)[:, None, None], torch.arange(4.0)
    turn = torch.polar(torch.ones(7, 1, 4), position * 10000 ** (-2 * channel / 8))
    turned = torch.complex(x[..., :4], x[..., 4:]) * turn
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, rotary_phases(7, 8)), expected)


def test_rotated_products_depend_on_the_distance_only() -> None:
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16, seed=2)

    def product(i: int, j: int) -> float:
        turned_q = rotate(q, rotary_phases(1, 16, start=i))
        return float((turned_q * rotate(k, rotary_phases(1, 16, start=j))).sum())

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


@BOTH_STYLES
def test_norm_folds_its_modulation(style: str) -> None:
    norm = Norm(config(style=style))
    fill(norm)
    x, shift, scale = draw(2, 5, 24), draw(2, 1, 24, seed=2), draw(2, 1, 24, seed=3)
    centred = x - x.mean(-1, keepdim=True) if style == "paper" else x
    unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), unit)
    torch.testing.assert_close(norm(x, shift, scale), unit * (1 + scale) + shift)


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_attention(num_kv_heads: int | None, causal: bool) -> None:
    attention = Attention(config(num_kv_heads=num_kv_heads), causal=causal)
    fill(attention)
    x, kv = draw(2, 5, 24), num_kv_heads or 4
    rotary = rotary_phases(5, 6)
    q, k, v = torch.split(attention.qkv(x).view(2, 5, -1, 6), (4, kv, kv), dim=2)
    k, v = (rows.repeat_interleave(4 // kv, dim=2) for rows in (rotate(k, rotary), v))
    scores = torch.einsum("bihd,bjhd->bhij", rotate(q, rotary), k) / math.sqrt(6)
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    expected = attention.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(2, 5, 24))
    torch.testing.assert_close(attention(x, rotary), expected, atol=1e-5, rtol=1e-4)


def test_cached_attention_sees_the_same_past() -> None:
    attention = Attention(config(num_kv_heads=2), causal=True)
    fill(attention)
    x, cache = draw(2, 6, 24), Cache(6)
    whole = attention(x, rotary_phases(6, 6))
    parts = [attention(x[:, :3], rotary_phases(3, 6), cache)]
    parts += [attention(x[:, i : i + 1], rotary_phases(1, 6, start=i), cache) for i in range(3, 6)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)
    assert cache.length == 6


@BOTH_STYLES
def test_mlp_is_its_formula(style: str) -> None:
    mlp = Mlp(config(style=style, mlp_width=10))
    fill(mlp)
    x = draw(3, 24)
    if style == "paper":
        y = x @ mlp.into.weight.T + mlp.into.bias
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        expected = y @ mlp.out.weight.T + mlp.out.bias
    else:
        gate, up = x @ mlp.into.weight[:10].T, x @ mlp.into.weight[10:].T
        expected = (gate * torch.sigmoid(gate) * up) @ mlp.out.weight.T
        assert mlp.into.bias is None
    torch.testing.assert_close(mlp(x), expected)


@BOTH_STYLES
def test_a_fresh_adaptive_block_is_the_identity_and_with_open_gates_the_plain_block(style: str) -> None:
    settings = config(style=style)
    plain, adaptive = Block(settings, causal=False).eval(), AdaptiveBlock(settings, cond_width=8).eval()
    fill(plain)
    initialise(adaptive, num_blocks=2, seed=0)
    x, c, rotary = draw(2, 5, 24), draw(2, 8, seed=2), rotary_phases(5, 6)
    assert torch.equal(adaptive(x, c, rotary), x)
    adaptive.load_state_dict({**adaptive.state_dict(), **plain.state_dict()})
    adaptive.open_gates()
    assert torch.equal(adaptive(x, c, rotary), plain(x, rotary))


def test_adaptive_block_takes_its_six_parts_in_order() -> None:
    block = AdaptiveBlock(config(), cond_width=8).eval()
    fill(block)
    x, c, rotary = draw(2, 5, 24), draw(2, 8, seed=2), rotary_phases(5, 6)
    parts = (c @ block.modulation.linear.weight.T + block.modulation.linear.bias).view(2, 6, 1, 24).unbind(1)
    y = x + parts[2] * block.attention(block.norm_attention(x) * (1 + parts[1]) + parts[0], rotary)
    y = y + parts[5] * block.mlp(block.norm_mlp(y) * (1 + parts[4]) + parts[3])
    torch.testing.assert_close(block(x, c, rotary), y, atol=1e-5, rtol=1e-4)


def test_initial_weights_have_their_sizes() -> None:
    block = Block(config(width=128), causal=True)
    initialise(block, num_blocks=8, seed=0)
    assert float(block.attention.qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(block.mlp.out.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.mlp.into.bias.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 25}, "multiple of 8"),
        ({"width": 12}, "multiple of 8"),  # three channels a head cannot be halved
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_blocks": 2.5}, "whole number"),
        ({"vocab_size": True}, "whole number"),
        ({"num_kv_heads": 3}, "divisors"),
        ({"mlp_width": -1}, "or leave it out"),
        ({"style": "gpt"}, "'paper', 'llama'"),
        ({"dropout": 1.0}, "0 <= dropout < 1"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"num_head": 4}, "did you mean 'num_heads'"),
        ({"colour": 4}, "allowed are vocab_size"),
    ],
)
def test_a_bad_config_says_what_is_allowed(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_a_config_survives_its_dictionary_and_misses_nothing() -> None:
    settings = config(style="llama", num_kv_heads=2)
    assert StackConfig.from_dict(settings.to_dict()) == settings
    with pytest.raises(ValueError, match="'width'"):
        StackConfig.from_dict({"vocab_size": 2, "num_blocks": 1, "num_heads": 1})


@pytest.mark.parametrize("shape", [(3, 5), (2, 100, 8), (0, 4)])
def test_gelu_without_gradients_is_the_same_function(shape: tuple[int, ...]) -> None:
    x = 4 * draw(*shape)
    expected = F.gelu(x.double(), approximate="tanh")
    with torch.no_grad():
        torch.testing.assert_close(gelu_tanh(x.clone()), expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(gelu_tanh(x.requires_grad_()), F.gelu(x, approximate="tanh"))


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who multiplies where nobody needs gradients, whatever this machine would choose."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr("fsdfm.model.layers._onednn_is_faster", lambda: request.param)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shape", [(7, 16), (2, 3, 16), (1, 16), (0, 16), (2, 0, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_is_a_linear_with_and_without_gradients(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = Projection(16, 1027, bias=bias), draw(*shape)
    expected = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5, check_dtype=False)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert layer(x).is_contiguous()
            close(layer(x), expected)
            close(layer.part(x, 3, 1000), expected[..., 3:1000])
            close(layer.gelu(x), F.gelu(expected, approximate="tanh"))
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.reshape(-1, 16).sum(0).expand(1027, 16), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("library")
def test_a_projection_takes_what_is_strided_and_leaves_it() -> None:
    layer, wide = Projection(16, 8), draw(5, 40)
    before = wide.clone()
    with torch.no_grad():
        torch.testing.assert_close(layer(wide[:, 3:19]), F.linear(wide[:, 3:19], layer.weight, layer.bias))
        torch.testing.assert_close(layer(wide.t()[:16].t()), layer(wide[:, :16].contiguous()))
        layer.gelu(wide[:, :16])
    assert torch.equal(wide, before)


@pytest.mark.usefixtures("library")
def test_a_projection_stays_out_of_the_way_of_autocast() -> None:
    layer, x = Projection(16, 8), draw(5, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == layer.gelu(x).dtype == torch.bfloat16


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_at_rows_is_attention_there(kv_heads: int) -> None:
    attention = Attention(config(num_kv_heads=kv_heads), causal=False)
    fill(attention)
    x, rotary, rows = draw(3, 6, 24), rotary_phases(6, 6), torch.tensor([1, 5, 12, 13, 17])
    torch.testing.assert_close(attention.at(x, rotary, rows), attention(x, rotary).flatten(0, 1)[rows])
