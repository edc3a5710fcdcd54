"""LLaDA's decoder: the published trajectories token for token, its parts against their definitions, its law."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from canvases import GOLDEN, KnownCoins, Seen, golden, law_distance, tiny, walk
from fsdfm.flow import Filter, Grid, MaskSource, MixturePath, UniformSource, trajectory
from fsdfm.flow.rule import SamplerState
from fsdfm.model.stack import Transformer
from fsdfm.noise import Noise
from fsdfm.peers.llada import Guided, LLaDARule, block_window, confidences, guide, gumbel_tokens, reveal_counts

CASES: dict[str, Any] = json.loads((GOLDEN / "llada_cases.json").read_text()) if GOLDEN.is_dir() else {"cases": {}}
IDS: Any = {"eos_id": 57, "eot_id": 58}
NAMES = {
    "logits_eos_inf": "ban_eos",
    "confidence_eos_eot_inf": "late_eos",
    "remasking": "order",
    "block_length": "block_length",
}


@golden
@torch.no_grad()
@pytest.mark.parametrize("name", CASES["cases"])
def test_golden_trajectories(name: str, tmp_path: Path) -> None:
    known, case = load_file(GOLDEN / "llada_trajectories.safetensors"), CASES["cases"][name]
    if name not in known:
        pytest.skip("this trajectory is not among the vectors")
    expected, network = known[name], tiny("llada", tmp_path, case.get("weights"))
    denoiser: Any = network
    if "padded" in name:
        seen = torch.cat((known["attention_mask_padded"].bool(), torch.ones(2, 32, dtype=torch.bool)), 1)
        denoiser = Seen(network, seen)
    if "cfg_scale" in case:
        denoiser = Guided(network, expected[0] != 60, guidance=case["cfg_scale"], mask_token=60)
    options: Any = {NAMES[key]: value for key, value in case.items() if key in NAMES}
    rule = LLaDARule(**options, **IDS, literal="holes" in name or "loud" in name, begin=8)
    noise = KnownCoins(known[f"uniforms_{name}"]) if f"uniforms_{name}" in known else None
    found = walk(denoiser, expected[0], rule, steps=case["steps"], mask=60, noise=noise)
    last = case.get("calls_without_ties", case["calls"])
    assert torch.equal(found[:last], expected[1 : last + 1])


@golden
def test_every_golden_trajectory_has_a_case() -> None:
    names = {name for name, value in load_file(GOLDEN / "llada_trajectories.safetensors").items() if value.ndim == 3}
    assert names - {"uniforms_s8_b16_random"} <= {*CASES["cases"], "s16_b8_lateeos", "s6_b16", "s8_b16_cfg2"}


class KeysKept:
    """Fast-dLLM's caches, which are not built, played by a whole network: keys and values of kept positions are old.

    The first call of a block sees everything anew. Later ones keep what stands left of the block ("prefix"), or all but
    the block ("dual"); what they compute at kept positions is thrown away.
    """

    def __init__(self, model: Transformer, first: int, block_length: int, cache: str):
        self.model, self.first, self.size, self.dual = model, first, block_length, cache == "dual"
        self.start, self.kept = -1, torch.zeros(0, dtype=torch.bool)
        for block in model.blocks:
            attention: Any = block.attention
            attention._weigh = partial(self.weigh, attention._weigh, {})

    def weigh(self, weigh: Any, old: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, *, bias: Any) -> Tensor:
        if self.kept.any():
            kept = self.kept[:, None]
            k, v = torch.where(kept, old["k"], k), torch.where(kept, old["v"], v)
        else:
            old.update(k=k, v=v)
        found: Tensor = weigh(q, k, v, bias=bias)
        return found

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        place = torch.arange(x_t.shape[1])
        masked = place[x_t[0] == 60]
        start = int(masked[0] - self.first) // self.size * self.size + self.first if len(masked) else self.start
        outside = (place < start) | (self.dual & (place >= start + self.size))
        self.kept = outside if start == self.start else torch.zeros_like(outside)
        self.start = start
        return self.model.trunk(x_t, t, h)

    def logits_at(self, features: Tensor) -> Tensor:
        return self.model.logits_at(features)


@golden
@torch.no_grad()
@pytest.mark.parametrize("setting", ["s16_b8", "s8_b16", "s8_b8_threshold0.5", "s4_b8_threshold0.9"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_golden_thresholds_and_caches(cache: str, setting: str, tmp_path: Path) -> None:
    """Fast-dLLM's loops: the same end, after as many calls that ask for anything."""
    name = f"{cache}_{setting}"
    known = load_file(GOLDEN / "fastdllm_results.safetensors")
    case = json.loads((GOLDEN / "fastdllm_cases.json").read_text())[name]
    canvas = torch.cat((known["prompt"], torch.full((1, 32), 60)), 1)
    rule = LLaDARule(case["block_length"], threshold=case.get("threshold"))
    steps = case["steps"] if rule.threshold is None else 40
    network: Any = tiny("llada", tmp_path)
    if cache != "none":
        network = KeysKept(network, 8, case["block_length"], cache)
    found = walk(network, canvas, rule, steps=steps, mask=60)
    before = torch.cat((canvas[None], found[:-1]))
    assert int((before == 60).any(-1).sum()) == case["calls"]
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


def stand(length: int, call: int, steps: int) -> SamplerState:
    x_t, t = torch.full((1, length), 4), torch.zeros(1)
    return SamplerState(x_t, t, t, MixturePath(MaskSource(5)), Noise(0), index=call, steps=steps)


@pytest.mark.parametrize(("masked", "steps"), [(32, 8), (7, 3), (5, 8), (1, 1)])
def test_shares_need_no_memory(masked: int, steps: int) -> None:
    left, counts = masked, []
    for call in range(steps):
        end, calls = block_window(torch.tensor([3]), stand(3 + masked, call, steps), None)
        assert int(end) == 3 + masked
        counts.append(-(-left // int(calls)))
        left -= counts[-1]
    assert counts == reveal_counts(masked, steps)


@pytest.mark.parametrize(("steps", "blocks"), [(8, 4), (4, 4), (3, 5), (7, 3)])
def test_windows_grow_until_they_hold_everything(steps: int, blocks: int) -> None:
    """Every call has a window, windows end where blocks do, and at the end of its calls a window has none left."""
    found = [block_window(torch.tensor([2]), stand(2 + 3 * blocks, call, steps), 3) for call in range(steps)]
    ends, lefts = [int(end) for end, _ in found], [int(left) for _, left in found]
    assert ends[-1] == 2 + 3 * blocks
    assert ends == sorted(ends)
    assert all((end - 2) % 3 == 0 for end in ends)
    assert all(lefts[i] == 1 for i in range(steps) if i == steps - 1 or ends[i + 1] != ends[i])


def test_confidence_is_not_tempered_and_late_tokens_have_none() -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, 0.5]])
    torch.testing.assert_close(confidences(logits, torch.tensor([2])), torch.softmax(logits[0], 0)[2:3])
    assert float(confidences(logits, torch.tensor([2]), (2, 3))) == 0
    torch.testing.assert_close(confidences(logits, torch.tensor([0]), (2, 3)), torch.softmax(logits[0, :2], 0)[:1])
    hot: Any = {"late_eos": True, "temperature": 1.0, "eos_id": 2, "eot_id": 3}
    assert LLaDARule(**hot)._demoted() == (2, 3)
    assert LLaDARule(**hot, literal=True)._demoted() == (None, 3)  # forgotten


@pytest.mark.parametrize("by_filter", [True, False])
def test_proposals_have_the_tempered_law(by_filter: bool) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, 0.5, 9.0])
    rule = LLaDARule(temperature=0.0 if by_filter else 0.7, ban_eos=True, eos_id=2)
    x_0, noise = torch.full((200, 100), 4), Noise(2, range(200))
    (step,) = trajectory(
        lambda x, t, h: logits.expand(*x.shape, -1),
        MixturePath(MaskSource(5)),
        x_0,
        grid=Grid.uniform(1),
        noise=noise,
        rule=rule,
        filter=Filter(temperature=0.7) if by_filter else None,
    )
    found = step.x_next.flatten().bincount(minlength=5) / x_0.numel()
    law = torch.softmax(torch.tensor([1.0, 0.0, -torch.inf, 0.5, -torch.inf]) / 0.7, 0)
    assert float((found - law).abs().max()) < 4 * (0.25 / x_0.numel()) ** 0.5


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
    with pytest.raises(ValueError, match="guidance is -1"):
        Guided(None, one, guidance=-1, mask_token=0)  # type: ignore[arg-type]


def test_a_batch_is_its_rows_alone_and_gaps_are_filled() -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 3

    def answer(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return table[x] + table[x.roll(1, 1)] + torch.arange(x.shape[1])[:, None] * 0.1

    canvas = torch.full((2, 12), 63)
    canvas[0, :2], canvas[1, [0, 5, 11]] = 7, 9  # a prompt; a text with two gaps
    noise = Noise(7, range(2))
    for rule in (LLaDARule(3, 1.0, "random"), LLaDARule(4), LLaDARule(4, threshold=0.2)):
        both = walk(answer, canvas, rule, steps=4, mask=63, noise=noise)
        for row in range(2):
            own = slice(row, row + 1)
            assert torch.equal(both[:, own], walk(answer, canvas[own], rule, steps=4, mask=63, noise=noise[own]))
        assert not (both[-1] == 63).any()
        assert torch.equal(both[-1][canvas != 63], canvas[canvas != 63])


def test_without_a_threshold_a_block_keeps_its_calls() -> None:
    """What is written early waits: two calls per block, also where the first has only one mask."""
    canvas = torch.full((1, 8), 63)
    canvas[0, :3] = 5

    def answer(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return torch.eye(64)[(x + 1) % 63]

    states = walk(answer, canvas, LLaDARule(4, begin=0), steps=4, mask=63)
    assert (states[:, 0] == 63).sum(-1).tolist() == [4, 4, 2, 0]


def test_which_order_has_the_right_law() -> None:
    """One position per call is p_1 in random order; by confidence it is not, and more calls make it worse.

    What is revealed first is then what was *drawn* likely: rare tokens are drawn again until a common one comes.
    """
    noise = 0.06  # of 2,000 texts over 27 states
    shuffled, sure = LLaDARule(temperature=1.0, order="random"), LLaDARule(temperature=1.0)
    assert law_distance(shuffled, 3) < noise < law_distance(shuffled, 2)
    assert law_distance(sure, 1) == law_distance(shuffled, 1)
    assert law_distance(sure, 3) > 0.35 > 0.32 > law_distance(sure, 1)


def test_refusals() -> None:
    for options, message in (
        ({"order": "best"}, "order is 'best'"),
        ({"threshold": 2}, "threshold is 2"),
        ({"block_length": 0}, "block_length is 0"),
        ({"late_eos": True}, "eos_id is None"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            LLaDARule(**options)  # type: ignore[arg-type]
    state = stand(4, 0, 1)
    state.path = MixturePath(UniformSource(5))
    with pytest.raises(ValueError, match="the rule llada reveals masks, and the source is UniformSource"):
        LLaDARule().plan(state)


@pytest.mark.parametrize(("network", "apart"), [({}, False), ({"samples_apart": True}, True)])
def test_a_guided_head_is_asked_as_the_networks_own_is(network: dict[str, bool], apart: bool) -> None:
    guided = Guided(SimpleNamespace(**network), torch.ones(1, 2), guidance=1.0, mask_token=0)  # type: ignore[arg-type]
    assert guided.samples_apart is apart
