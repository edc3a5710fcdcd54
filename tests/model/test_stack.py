"""The plain stack: who sees whom, angles, rows, exact conditioning, ties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdfm.model import to_bfloat16, to_int8
from fsdfm.model.layers import rotate
from fsdfm.model.stack import Transformer, TransformerConfig, rotary_frequencies, visibility

SMALL = TransformerConfig(vocab_size=17, width=32, num_blocks=2, num_heads=4, num_kv_heads=2, mlp_width=40)
GPT2 = replace(
    SMALL,
    num_kv_heads=4,
    style="paper",
    positions="learned",
    max_length=24,
    **dict.fromkeys(("qkv_bias", "out_bias", "norm_bias", "tied"), True),
)
QWEN3 = replace(SMALL, head_channels=12, qk_norm=True, tied=True)
CONFIGS = {"llama": SMALL, "gpt2": GPT2, "qwen3": QWEN3, "biased": replace(SMALL, qkv_bias=True, out_bias=True)}


def build(config: TransformerConfig = SMALL, **changes: Any) -> Transformer:
    model = Transformer(replace(config, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def draw_tokens(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(1))


def moved(model: Transformer, position: int) -> Tensor:
    """Which positions change when one token does: bool [L]."""
    x, changed = draw_tokens(), draw_tokens()
    changed[:, position] = (changed[:, position] + 1) % 17
    return (model(x) != model(changed)).any(-1).all(0)


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_who_sees_whom(config: TransformerConfig) -> None:
    assert moved(build(config), 6).all()
    causal = moved(build(config, future=0.0), 6)
    assert causal.tolist() == [i >= 6 for i in range(12)]
    blocks = moved(build(config, future=0.0, block_length=4), 6)
    assert blocks.tolist() == [i >= 4 for i in range(12)]


@torch.no_grad()
def test_the_future_comes_in_by_weight() -> None:
    """Attention weights written out: a_ij = m_ij exp(s_ij) / sum_k m_ik exp(s_ik)."""
    model = build(future=0.3, block_length=2)
    attention, place = model.blocks[0].attention, model._place(draw_tokens(), None, None)
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(2))
    q, k, v = torch.split(attention.qkv(x)[0].view(12, 8, 8), [4, 2, 2], dim=1)
    assert place.rotary is not None
    q, k = rotate(q, place.rotary), rotate(k, place.rotary).repeat_interleave(2, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
    block = torch.arange(12) // 2
    weights = torch.where(block[None] > block[:, None], 0.3, 1.0) * scores.exp()
    mixed = torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), v.repeat_interleave(2, 1))
    torch.testing.assert_close(attention.attend(x, place)[0], attention.out(mixed.flatten(1)), atol=1e-4, rtol=1e-4)
    model.see_future(1.0)
    assert model._place(draw_tokens(), None, None).bias is None
    assert model.config.future == 1.0
    table = visibility(replace(SMALL, future=0.25, block_length=2), 4)
    assert table is not None
    torch.testing.assert_close(table.exp(), torch.tensor([[1, 1, 0.25, 0.25]] * 2 + [[1, 1, 1, 1]] * 2))


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("changes", [{}, {"next_token": True}, {"future": 0.0}, {"conditioning": "step"}])
def test_rows_are_those_of_the_whole(config: TransformerConfig, changes: dict[str, Any]) -> None:
    model, x = build(config, **changes), draw_tokens()
    t, h = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.5, 0.25, 0.1])
    rows = torch.tensor([0, 1, 7, 24, 30, 35])  # none of the second sample
    whole = model.trunk(x, t, h).flatten(0, 1)
    torch.testing.assert_close(model.features_at(x, t, h, rows=rows), whole[rows], atol=1e-5, rtol=1e-5)
    assert model.features_at(x, t, h, rows=rows[:0]).shape == (0, 32)
    torch.testing.assert_close(model.logits_at(whole).view(3, 12, 17), model(x, t, h))
    padding = torch.arange(12) >= torch.tensor([[0], [2], [3]])
    seen = model.trunk(x, t, h, keys=padding).flatten(0, 1)
    torch.testing.assert_close(model.trunk(x, t, h, rows=rows, keys=padding), seen[rows], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_padding_that_nobody_sees_is_not_there(config: TransformerConfig) -> None:
    model, x = build(config), draw_tokens()
    padded = torch.cat((torch.full((3, 2), 5), x), 1)
    seen = (torch.arange(14) >= 2).expand(3, -1)
    features = model.trunk(padded, keys=seen, positions=(torch.arange(14) - 2).clamp(min=0).expand(3, -1))
    torch.testing.assert_close(features[:, 2:], model.trunk(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_new_conditioning_changes_nothing(config: TransformerConfig) -> None:
    plain, x = build(config), draw_tokens()
    child = Transformer(replace(config, conditioning="step", cond_width=8)).eval()
    child.load_state_dict({**child.state_dict(), **plain.state_dict()})
    t, h = torch.tensor([0.0, 0.5, 0.9]), torch.tensor([1.0, 0.5, 0.1])
    torch.testing.assert_close(child(x, t, h), plain(x), atol=1e-5, rtol=1e-5)
    for name, value in child.named_parameters():
        if "modulation" in name:
            value.add_(0.1)
    assert float((child(x, t, h) - plain(x)).abs().max()) > 0.1
    with pytest.raises(ValueError, match="t is None"):
        child(x)


@torch.no_grad()
def test_the_shift_moves_features_by_one() -> None:
    plain, x = build(), draw_tokens()
    shifted = build(next_token=True)
    assert torch.equal(shifted(x)[:, 1:], plain(x)[:, :-1])
    assert torch.equal(shifted(x)[:, 0], plain(x)[:, 0])


def test_angles() -> None:
    d = SMALL.head_width
    expected = torch.tensor([10000.0 ** (-2 * i / d) for i in range(d // 2)])
    torch.testing.assert_close(rotary_frequencies(SMALL), expected)
    torch.testing.assert_close(rotary_frequencies(replace(SMALL, rotary_factor=4.0)), expected / 4)
    bands = replace(SMALL, head_channels=64, rotary_factor=8.0, rotary_bands=[1.0, 4.0, 128])
    plain, scaled = rotary_frequencies(replace(SMALL, head_channels=64)), rotary_frequencies(bands)
    turns = 128 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    torch.testing.assert_close(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert bool(((scaled < plain) & (scaled > plain / 8))[between].all())
    assert TransformerConfig.from_dict(bands.to_dict()) == bands


@torch.no_grad()
def test_a_tied_head_is_the_embedding_until_it_is_untied() -> None:
    model, x = build(QWEN3), draw_tokens()
    assert "head.weight" not in model.state_dict()
    tied = model(x)
    torch.testing.assert_close(tied, model.trunk(x) @ model.embedding.weight.t())
    model.untie()
    torch.testing.assert_close(model(x), tied)
    assert not model.config.tied


def test_it_trains_and_repeats() -> None:
    one, two = Transformer(QWEN3, seed=1), Transformer(QWEN3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    x = draw_tokens()
    optimiser = torch.optim.Adam(one.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(one(x).flatten(0, 1), x.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert all(value.grad is not None for value in one.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads is 3; allowed are the divisors of 4"),
        ({"width": 30}, "width is 30 with num_heads 4; give head_channels"),
        ({"head_channels": 5}, "a head has 5 channels; rotary positions need an even number"),
        ({"future": 1.5}, "future 1.5"),
        ({"rotary_bands": (4.0, 1.0, 8)}, "rotary_bands is"),
        ({"rotary_base": 0.5}, "rotary_base is 0.5"),
        ({"positions": "alibi"}, "positions is 'alibi'; allowed are 'rotary', 'learned'"),
        ({"conditioning": "fused"}, "conditioning is 'fused'; allowed are 'none', 'time', 'step'"),
        ({"tied": 1}, "tied is 1; allowed are true and false"),
        ({"block_length": 0}, "block_length is 0"),
    ],
)
def test_a_config_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_learned_positions_end() -> None:
    with pytest.raises(ValueError, match="the text has 25 tokens; this model has 24 learned positions"):
        build(GPT2)(draw_tokens(length=25))


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_children_say_what_their_parent_says(tied: bool) -> None:
    parent, x = build(replace(SMALL, tied=tied)), draw_tokens()
    t, h = torch.tensor([0.0, 0.5, 0.9]), torch.tensor([1.0, 0.5, 0.1])
    child = parent.step_aware(seed=3)
    assert child.config.is_step_aware
    torch.testing.assert_close(child(x, t, h), parent(x), atol=1e-5, rtol=1e-5)
    left = torch.randn(17, 4, generator=torch.Generator().manual_seed(0))
    chained = parent.with_transitions(left, torch.zeros(17, 4))
    rows = torch.arange(x.numel())
    (_, found, _), *_ = chained.posterior(x, t, h).given(torch.full_like(x, -1)).marginals(rows[:12])
    torch.testing.assert_close(found.exp(), parent(x)[0].softmax(-1), atol=1e-5, rtol=1e-5)  # no transition yet
    with pytest.raises(ValueError, match="step-aware already"):
        child.step_aware()
    with pytest.raises(ValueError, match="rank 4 already"):
        chained.with_transitions(left, left)


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("convert", "error"), [(to_bfloat16, 0.03), (to_int8, 0.1)])
def test_converters(config: TransformerConfig, convert: Any, error: float) -> None:
    model, x = build(config), draw_tokens()
    exact = model(x)
    convert(model)
    assert 0 < float((model(x) - exact).norm() / exact.norm()) < error


def test_threads_that_ask_for_other_lengths_do_not_disturb_each_other():
    """Between two lines of one thread, another may keep the places of its own length."""

    class Shared(Transformer):
        other = None

        @property
        def _places(self):
            return self.kept

        @_places.setter
        def _places(self, value):
            self.kept = value if self.other is None else self.other

    model = Shared(TransformerConfig(vocab_size=11, width=16, num_blocks=2, num_heads=2)).eval()
    x_t = torch.arange(5)[None]
    expected = model.trunk(x_t)
    model.trunk(x_t[:, :3])
    model.other = model.kept
    torch.testing.assert_close(model.trunk(x_t), expected, rtol=0, atol=0)
