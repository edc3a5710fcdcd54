"""LLaDA's decoder: the published trajectories token for token, and its parts against their definitions."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from worlds import world

from fsdfm.checkpoint.huggingface import open_folder
from fsdfm.flow import ExactDenoiser, PolynomialSchedule, total_variation
from fsdfm.flow.exact import all_states
from fsdfm.noise import Noise
from fsdfm.peers.llada import (
    LLaDAConfig,
    block_window,
    confidences,
    decode,
    guide,
    gumbel_tokens,
    propose,
    reveal_counts,
)

GOLDEN = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "peers" / "llada-dream"
golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="no golden files: FSDFM_GOLDEN names no folder with peers/llada-dream"
)
CASES: dict[str, Any] = json.loads((GOLDEN / "llada_cases.json").read_text()) if GOLDEN.is_dir() else {"cases": {}}
IDS = {"mask_id": 60, "eos_id": 57, "eot_id": 58}
NAMES = {
    "cfg_scale": "guidance",
    "logits_eos_inf": "ban_eos",
    "confidence_eos_eot_inf": "late_eos",
    "remasking": "order",
    "steps": "steps",
    "block_length": "block_length",
}


def network(folder: Path, weights: str = "llada_tiny.safetensors", keys: Tensor | None = None) -> Callable[..., Tensor]:
    shutil.copy(GOLDEN / "llada_tiny.config.json", folder / "config.json")
    shutil.copy(GOLDEN / weights, folder / "model.safetensors")
    with open_folder(folder) as opened:
        model = opened.build()
    return lambda x: model.logits_at(model.trunk(x, keys=keys))


@golden
@torch.no_grad()
@pytest.mark.parametrize("name", CASES["cases"])
def test_golden_trajectories(name: str, tmp_path: Path) -> None:
    known, case = load_file(GOLDEN / "llada_trajectories.safetensors"), CASES["cases"][name]
    if name not in known:
        pytest.skip("this trajectory is not among the vectors")
    expected, keys = known[name], None
    if "padded" in name:
        keys = torch.cat((known["attention_mask_padded"].bool(), torch.ones(2, 32, dtype=torch.bool)), 1)
    options = {NAMES[key]: value for key, value in case.items() if key in NAMES}
    answer = network(tmp_path, case.get("weights", "llada_tiny.safetensors"), keys)
    config = LLaDAConfig(**options, **IDS, literal="holes" in name or "loud" in name)  # type: ignore[arg-type]
    uniforms = known.get(f"uniforms_{name}")
    found = list(
        decode(answer, expected[0], config, noise=Noise(0, range(2)), prompt_length=8, order_uniforms=uniforms)
    )
    assert len(found) == case["calls"]
    last = case.get("calls_without_ties", case["calls"])
    assert torch.equal(torch.stack(found[:last]), expected[1 : last + 1])


@golden
@torch.no_grad()
def test_every_golden_trajectory_has_a_case() -> None:
    names = {name for name, value in load_file(GOLDEN / "llada_trajectories.safetensors").items() if value.ndim == 3}
    assert names - {"uniforms_s8_b16_random"} <= set(CASES["cases"])


@golden
@torch.no_grad()
@pytest.mark.parametrize("name", ["none_s16_b8", "none_s8_b16", "none_s8_b8_threshold0.5", "none_s4_b8_threshold0.9"])
def test_golden_thresholds(name: str, tmp_path: Path) -> None:
    """Fast-dLLM's loops without a cache: the same end, after the same number of calls."""
    known = load_file(GOLDEN / "fastdllm_results.safetensors")
    case = json.loads((GOLDEN / "fastdllm_cases.json").read_text())[name]
    config = LLaDAConfig(case["steps"], case["block_length"], threshold=case.get("threshold"), **IDS)  # type: ignore[arg-type]
    canvas = torch.cat((known["prompt"], torch.full((1, 32), 60)), 1)
    found = list(decode(network(tmp_path), canvas, config, noise=Noise(0), prompt_length=8))
    assert len(found) == case["calls"]
    assert torch.equal(found[-1], known[name])


@golden
def test_golden_counts_and_gumbel() -> None:
    for case in CASES["counts_per_call"]:
        assert reveal_counts(case["masked"], case["steps"]) == case["counts"]
    known = load_file(GOLDEN / "llada_gumbel.safetensors")
    for temperature in (0.5, 1.0, 1.5):
        found = gumbel_tokens(known["logits"], known["uniforms"], temperature)
        assert torch.equal(found, known[f"token_T{temperature}"])


# --- closed forms -----------------------------------------------------------------------------------------------------

SMALL = LLaDAConfig(4, mask_id=4, eos_id=2, eot_id=3)


@pytest.mark.parametrize(("masked", "steps"), [(32, 8), (7, 3), (5, 8), (1, 1)])
def test_shares_need_no_memory(masked: int, steps: int) -> None:
    left, counts = masked, []
    for call in range(steps):
        ends, calls = block_window(torch.tensor([3]), 3 + masked, LLaDAConfig(steps), call=call)
        assert int(ends) == 3 + masked
        counts.append(-(-left // int(calls)))
        left -= counts[-1]
    assert counts == reveal_counts(masked, steps)


@pytest.mark.parametrize(("steps", "blocks"), [(8, 4), (4, 4), (3, 5), (7, 3)])
def test_windows_grow_until_they_hold_everything(steps: int, blocks: int) -> None:
    """Every call has a window, windows end where blocks do, and at the end of its calls a window has none left."""
    starts, ends, lefts = torch.tensor([2, 5]), [], []
    for call in range(steps):
        end, left = block_window(starts, 2 + 3 * blocks, LLaDAConfig(steps, 3), call=call)
        ends.append(int(end[0]))
        lefts.append(int(left[0]))
    assert ends[-1] == 2 + 3 * blocks
    assert ends == sorted(ends)
    assert all((end - 2) % 3 == 0 for end in ends)
    changes = [i for i in range(steps) if i == steps - 1 or ends[i + 1] != ends[i]]
    assert [lefts[i] for i in changes] == [1] * len(changes)


def test_confidence_is_not_tempered_and_late_tokens_have_none() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, 0.5, 9.0]])
    plain = confidences(logits, torch.tensor([2]), SMALL)
    expected = torch.softmax(logits[0, :4], 0)  # without the mask
    torch.testing.assert_close(plain, expected[2:3])
    hot = LLaDAConfig(4, temperature=5.0, mask_id=4, eos_id=2, eot_id=3)
    torch.testing.assert_close(confidences(logits, torch.tensor([2]), hot), plain)
    late = LLaDAConfig(4, late_eos=True, mask_id=4, eos_id=2, eot_id=3)
    assert float(confidences(logits, torch.tensor([2]), late)) == 0
    torch.testing.assert_close(confidences(logits, torch.tensor([0]), late), torch.softmax(logits[0, :2], 0)[:1])
    fault = LLaDAConfig(4, late_eos=True, temperature=1.0, literal=True, mask_id=4, eos_id=2, eot_id=3)
    assert float(confidences(logits, torch.tensor([2]), fault)) > 0  # forgotten


def test_proposals_have_the_tempered_law() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 0.5, 9.0])
    config = LLaDAConfig(4, temperature=0.7, ban_eos=True, mask_id=4, eos_id=2, eot_id=3)
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000  # stratified: frequencies to 1/20000
    found = propose(logits.expand(20000, -1), u, config).bincount(minlength=5) / 20000
    law = torch.softmax(torch.tensor([1.0, 0.0, -torch.inf, 0.5, -torch.inf]) / 0.7, 0)
    torch.testing.assert_close(found, law, atol=2e-4, rtol=0)


def test_gumbel_in_float32_never_reaches_the_tail() -> None:
    """A token of probability e^-20 beside a certain one: float64 finds the uniforms that draw it, float32 cannot."""
    logits = torch.tensor([[20.0, 0.0]])
    u = torch.tensor([[1e-9, 1 - 2.0**-40]], dtype=torch.float64)  # a Gumbel of 27.7 against one of -3.0
    assert int(gumbel_tokens(logits, u, 1.0)) == 1
    largest = torch.tensor([[1e-9, 1 - 2.0**-24]], dtype=torch.float64)  # the largest float32 below 1
    assert int(gumbel_tokens(logits, largest, 1.0, dtype=torch.float32)) == 0


def test_guidance_is_an_extrapolation() -> None:
    one, other = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    assert guide(one, other, 0.5).tolist() == [4.0, 1.0]
    assert torch.equal(guide(one, other, 0.0), one)


def test_a_batch_is_its_rows_alone() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)) * 3

    def answer(x: Tensor) -> Tensor:
        return table[x] + table[x.roll(1, 1)] + torch.arange(x.shape[1])[:, None] * 0.1

    config = LLaDAConfig(4, 4, temperature=1.0, order="random", guidance=0.5, mask_id=4, eos_id=2, eot_id=3)
    canvas = torch.tensor([[0, 1, *[4] * 8], [3, 0, *[4] * 8]])
    noise = Noise(7, range(2))
    both = list(decode(answer, canvas, config, noise=noise, prompt_length=2))
    for row in range(2):
        own = slice(row, row + 1)
        alone = list(decode(answer, canvas[own], config, noise=noise[own], prompt_length=2))
        assert all(torch.equal(a[own], b) for a, b in zip(both, alone, strict=True))
    assert not (both[-1] == 4).any()
    assert torch.equal(both[-1][:, :2], canvas[:, :2])


def test_refusals() -> None:
    canvas, noise = torch.tensor([[0, 4, *[4] * 8]]), Noise(0)
    with pytest.raises(ValueError, match="the prompt holds the mask token 4"):
        next(decode(lambda x: x, canvas, SMALL, noise=noise, prompt_length=2))
    with pytest.raises(ValueError, match="8 tokens in blocks of 3"):
        next(decode(lambda x: x, canvas, LLaDAConfig(4, 3, mask_id=9), noise=noise, prompt_length=2))
    with pytest.raises(ValueError, match="order is 'best'"):
        LLaDAConfig(4, order="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold is 2"):
        LLaDAConfig(4, threshold=2)


# --- the law ----------------------------------------------------------------------------------------------------------


def law_distance(order: str, steps: int, *, rows: int = 6000) -> float:
    """Total variation of LLaDA's texts at T = 1 from p_1, with the true posterior of a small world as its network."""
    path, p_1 = world("mask", PolynomialSchedule(1), 3, 3)
    every = all_states(4, 3)
    table = ExactDenoiser(path, p_1=p_1)(every, torch.full((len(every),), 0.5, dtype=torch.float64), None)
    config = LLaDAConfig(steps, temperature=1.0, order=order, mask_id=3, eos_id=0, eot_id=0)  # type: ignore[arg-type]
    canvas, places = torch.full((rows, 3), 3), torch.tensor([16, 4, 1])
    *_, last = decode(
        lambda x: table[(x * places).sum(-1)], canvas, config, noise=Noise(0, range(rows)), prompt_length=0
    )
    found = (last * places).sum(-1).bincount(minlength=64).double() / rows
    return total_variation(found, p_1.flatten())


def test_which_order_has_the_right_law() -> None:
    """One position per call is p_1 in random order; by confidence it is not, and more calls make it worse.

    What is revealed first is then what was *drawn* likely: rare tokens are drawn again until a common one comes.
    """
    noise = 0.03  # of 6,000 texts over 27 states
    assert law_distance("random", 3) < noise
    assert law_distance("random", 2) > noise
    assert law_distance("low_confidence", 1) == pytest.approx(law_distance("random", 1), abs=1e-9)
    assert law_distance("low_confidence", 3) > 0.35 > 0.32 > law_distance("low_confidence", 1)
