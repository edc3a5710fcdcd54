"""Dream's decoder: the published trajectories token for token, scores and filters, and its law."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from canvases import GOLDEN, KnownCoins, Seen, golden, law_distance, tiny, walk
from fsdfm.noise import Noise
from fsdfm.peers.dream import DreamRule, filter_logits, reveal_count, reveal_share, scores
from fsdfm.peers.order import best_positions, gumbel_scores

CASES: dict[str, Any] = json.loads((GOLDEN / "dream_cases.json").read_text()) if GOLDEN.is_dir() else {"cases": {}}
OPTIONS = ("alg", "eps", "top_p", "top_k")


@golden
@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES["cases"] if "uneven" not in name])
def test_golden_trajectories(name: str, tmp_path: Path) -> None:
    known, case = load_file(GOLDEN / "dream_trajectories.safetensors"), CASES["cases"][name]
    if name not in known:
        pytest.skip("this trajectory is not among the vectors")
    expected, network = known[name], tiny("dream", tmp_path)
    denoiser: Any = network
    if "padded" in name:
        seen = torch.cat((known["attention_mask_padded"].bool(), torch.ones(2, 32, dtype=torch.bool)), 1)
        denoiser = Seen(network, seen, (seen.long().cumsum(-1) - 1).masked_fill(~seen, 1))
    rule = DreamRule(**{key: case[key] for key in OPTIONS if key in case})
    noise = KnownCoins(known[f"uniforms_{name}"].nan_to_num(1.0)) if f"uniforms_{name}" in known else None
    found = walk(denoiser, expected[0], rule, steps=case["steps"], mask=61, noise=noise)
    assert torch.equal(found, expected[1:])


@golden
@torch.no_grad()
def test_rows_of_unequal_length(tmp_path: Path) -> None:
    """The published fault as a switch, seen in how many masks are left; without it both rows end as they do alone."""
    known = load_file(GOLDEN / "dream_trajectories.safetensors")
    canvas, network = known["entropy_s8_uneven"][0], tiny("dream", tmp_path)
    last = walk(network, canvas, DreamRule("entropy", batch_mean=True), steps=8, mask=61)[-1]
    assert (last == 61).sum(-1).tolist() == CASES["cases"]["entropy_s8_uneven"]["masks_at_the_end_per_row"]
    noise, rule = Noise(0, range(2)), DreamRule("entropy")
    both = walk(network, canvas, rule, steps=8, mask=61, noise=noise)[-1]
    assert not (both == 61).any()
    for row in range(2):
        own = slice(row, row + 1)
        assert torch.equal(both[own], walk(network, canvas[own], rule, steps=8, mask=61, noise=noise[own])[-1])


@golden
def test_golden_counts() -> None:
    for case in CASES["counts_per_call"]:
        masked, counts = torch.tensor([case["masked"]]), []
        for call in range(case["steps"]):
            counts.append(int(reveal_count(masked, case["eps"], call, steps=case["steps"])))
            masked = masked - counts[-1]
        if "counts" in case:
            assert counts == case["counts"]
        else:
            known = (case["calls_that_reveal_nothing"], case["largest"], case["last"])
            assert (counts.count(0), max(counts), counts[-1]) == known


@golden
def test_golden_scores() -> None:
    known = load_file(GOLDEN / "dream_confidences.safetensors")
    filters: dict[str, Any] = {"": {}, "_top_p0.9": {"top_p": 0.9}, "_top_k5": {"top_k": 5}}
    algs: Any = ("maskgit_plus", "topk_margin", "entropy")
    for alg, (name, options) in itertools.product(algs, filters.items()):
        filtered = filter_logits(known["logits"], DreamRule(**options))
        tokens = filtered.argmax(-1)
        assert torch.equal(tokens, known[f"token_{alg}{name}"])
        expected = known[f"confidence_{alg}{name}"]
        torch.testing.assert_close(scores(filtered, tokens, alg), expected, atol=1e-6, rtol=1e-5)
        if name:
            assert torch.equal(filtered.isfinite(), known[f"kept{name}"])


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_shares_are_those_of_the_times() -> None:
    times = [1.0, 0.8, 0.6, 0.4, 0.2]
    for call in range(3):
        assert float(reveal_share(0.2, call, 4)) == pytest.approx(1 - times[call + 1] / times[call], rel=1e-6)
    assert float(reveal_share(0.2, 3, 4)) == 1


def test_order_by_temperature_is_drawing_without_replacement() -> None:
    """Three positions, two places: the law of the pairs, enumerated, against stratified uniforms."""
    score, temperature, n = torch.tensor([[0.3, -0.2, 0.9]], dtype=torch.float64), 0.5, 60
    weights = torch.softmax(score[0] / temperature, 0)
    law = {
        frozenset((i, j)): float(weights[i] * weights[j] * (1 / (1 - weights[i]) + 1 / (1 - weights[j])))
        for i, j in itertools.combinations(range(3), 2)
    }
    u = torch.cartesian_prod(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n] * 3)
    keys = gumbel_scores(score.expand(len(u), -1), u, temperature)
    chosen = best_positions(keys, torch.ones_like(keys, dtype=torch.bool), torch.full((len(u),), 2))
    for pair, probability in law.items():
        share = float((chosen[:, sorted(pair)].all(-1)).double().mean())
        assert share == pytest.approx(probability, abs=0.01)
    assert sum(law.values()) == pytest.approx(1)


def test_the_best_are_taken_from_the_left_among_equals() -> None:
    value = torch.tensor([[0.5, 0.9, 0.9, 0.1, 0.9]])
    candidates = torch.tensor([[True, True, True, True, False]])
    assert best_positions(value, candidates, torch.tensor([1])).tolist() == [[False, True, False, False, False]]
    assert best_positions(value, candidates, torch.tensor([3])).tolist() == [[True, True, True, False, False]]
    assert best_positions(value, candidates, torch.tensor([9])).sum() == 4  # never more than there are
    infinite = torch.full((1, 5), -torch.inf)
    assert torch.equal(best_positions(infinite, candidates, torch.tensor([4])), candidates)


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert filter_logits(logits, DreamRule(top_p=0.6)).isfinite().tolist() == [[True, True, False, False]]
    assert filter_logits(logits, DreamRule(top_p=0.75)).isfinite().tolist() == [[True, True, True, False]]
    tied = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    assert filter_logits(tied, DreamRule(top_k=2)).isfinite().sum() == 3  # ties stay
    torch.testing.assert_close(filter_logits(tied, DreamRule(temperature=0.5)), tied * 2)


@pytest.mark.slow
def test_only_the_original_rule_reaches_the_law() -> None:
    """`origin` converges to p_1 with the calls. The others do not: floor(m w) leaves two positions to the last call."""
    found = [law_distance(DreamRule(temperature=1.0), steps) for steps in (1, 3, 16)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.08 < 0.25 < found[0]
    algs: Any = ("maskgit_plus", "topk_margin", "entropy")
    for alg in algs:
        assert law_distance(DreamRule(alg, temperature=1.0), 16) > 0.12


def test_an_order_with_a_temperature_asks_for_every_row_its_own_coin() -> None:
    logits = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * 2
    canvas, noise = torch.full((3, 12), 63), Noise(1, range(3))
    rule = DreamRule("entropy", alg_temp=0.5, temperature=1.0)
    whole = walk(lambda x, t, h: logits.expand(len(x), -1, -1), canvas, rule, steps=5, mask=63, noise=noise)
    alone = walk(lambda x, t, h: logits.expand(len(x), -1, -1), canvas[1:2], rule, steps=5, mask=63, noise=noise[1:2])
    assert torch.equal(whole[:, 1:2], alone)
    assert len({tuple(row) for row in (whole[1] == 63).tolist()}) > 1  # other orders in other rows


def test_refusals() -> None:
    for options, message in (
        ({"eps": 0.0}, "eps is 0.0"),
        ({"alg": "best"}, "alg is 'best'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            DreamRule(**options)  # type: ignore[arg-type]
