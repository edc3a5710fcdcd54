"""The causal model: no look at the future, exact scores, a cache that changes nothing, draws from the right law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdfm.model import CausalConfig, CausalModel, causal
from fsdfm.noise import Noise

SMALL = CausalConfig(vocab_size=17, width=32, num_blocks=2, num_heads=4, num_kv_heads=2, max_length=24)


def build(style: str = "llama") -> CausalModel:
    model = CausalModel(CausalConfig.from_dict({**SMALL.to_dict(), "style": style})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def draw_tokens(rows: int = 3, length: int = 10) -> Tensor:
    return torch.randint(17, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("style", ["paper", "llama"])
def test_the_future_is_hidden(style: str) -> None:
    model, tokens = build(style), draw_tokens()
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 17
    moved = (model(changed) != model(tokens)).any(-1)
    assert not moved[:, :6].any()
    assert bool(moved[:, 6:].all())


def test_nll_is_the_log_probability_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "_ROWS_AT_ONCE", 4)  # 27 rows in parts of 4
    model, tokens = build(), draw_tokens()
    log_probs = model(tokens)[:, :-1].log_softmax(-1)
    expected = -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(model.nll(tokens), expected)
    assert model.nll(tokens[:, :1]).shape == (3, 0)


def test_the_likeliest_text_is_the_same_without_a_cache() -> None:
    model, prompt = build(), draw_tokens(length=4)
    expected = prompt
    for _ in range(12):
        expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(prompt, 16, Noise(0, range(3)), temperature=0.0), expected)


def test_a_row_does_not_change_with_its_batch() -> None:
    model, prompt, noise = build(), draw_tokens(length=2), Noise(5, range(3))
    whole = model.generate(prompt, 20, noise)
    assert torch.equal(model.generate(prompt[1:2], 20, noise[1:2]), whole[1:2])
    assert not torch.equal(model.generate(prompt, 20, Noise(6, range(3))), whole)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_models_law(temperature: float) -> None:
    model, rows = build(), 20_000
    probs = (model(torch.tensor([[3, 5]]))[0, -1] / temperature).softmax(-1).detach()
    drawn = model.generate(torch.tensor([[3, 5]]).expand(rows, 2), 3, Noise(0, range(rows)), temperature=temperature)
    counts = torch.bincount(drawn[:, 2], minlength=17)
    chi_square = ((counts - rows * probs).square() / (rows * probs)).sum()
    assert float(chi_square) < 39.3  # the 0.1 % quantile at 16 degrees of freedom


def test_a_row_ends_at_its_eos() -> None:
    model, prompt = build(), torch.tensor([[4], [4], [4], [4]])
    free = model.generate(prompt, 24, Noise(0, range(4)))
    ended = model.generate(prompt, 24, Noise(0, range(4)), eos_id=9)
    reached = (free == 9).int().cumsum(1) > 0
    assert bool(reached.any())
    assert torch.equal(ended, torch.where(reached, 9, free))


def test_bad_requests_say_what_is_allowed() -> None:
    model, prompt, noise = build(), draw_tokens(length=4), Noise(0, range(3))
    with pytest.raises(ValueError, match="at most 24"):
        model(draw_tokens(length=25))
    with pytest.raises(ValueError, match="length <= 24"):
        model.generate(prompt, 25, noise)
    with pytest.raises(ValueError, match="3 rows"):
        model.generate(prompt, 8, noise[:2])
    with pytest.raises(ValueError, match="temperature >= 0"):
        model.generate(prompt, 8, noise, temperature=-1.0)
    with pytest.raises(ValueError, match="eval"):
        model.train().generate(prompt, 8, noise)
    with pytest.raises(ValueError, match="max_length"):
        CausalConfig.from_dict({**SMALL.to_dict(), "max_length": 0})


@pytest.mark.parametrize("style", ["paper", "llama"])
def test_a_text_read_in_parts_is_the_text_read_at_once(style: str) -> None:
    """Several tokens behind a cache see all before them, themselves, and nothing behind."""
    model, tokens = build(style), draw_tokens()
    caches = [causal.Cache(10) for _ in model.blocks]
    with torch.no_grad():
        parts = [model.trunk(part, caches) for part in tokens.split([4, 3, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model.trunk(tokens))
