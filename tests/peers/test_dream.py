"""Dream's decoder: the published trajectories token for token, scores and filters, and its law."""

from __future__ import annotations

import itertools
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
from fsdfm.peers.dream import DreamConfig, decode, filter_logits, reveal_count, reveal_share, scores
from fsdfm.peers.order import best_positions, gumbel_scores

GOLDEN = Path(os.environ.get("FSDFM_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "peers" / "llada-dream"
golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="no golden files: FSDFM_GOLDEN names no folder with peers/llada-dream"
)
CASES: dict[str, Any] = json.loads((GOLDEN / "dream_cases.json").read_text()) if GOLDEN.is_dir() else {"cases": {}}
OPTIONS = ("alg", "steps", "eps", "top_p", "top_k")


def network(folder: Path, seen: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    shutil.copy(GOLDEN / "dream_tiny.config.json", folder / "config.json")
    shutil.copy(GOLDEN / "dream_tiny.safetensors", folder / "model.safetensors")
    with open_folder(folder) as opened:
        model = opened.build()
    positions = None if seen is None else (seen.long().cumsum(-1) - 1).masked_fill(~seen, 1)
    return lambda x: model.logits_at(model.trunk(x, keys=seen, positions=positions))


@golden
@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CASES["cases"] if "uneven" not in name])
def test_golden_trajectories(name: str, tmp_path: Path) -> None:
    known, case = load_file(GOLDEN / "dream_trajectories.safetensors"), CASES["cases"][name]
    if name not in known:
        pytest.skip("this trajectory is not among the vectors")
    expected, seen = known[name], None
    if "padded" in name:
        seen = torch.cat((known["attention_mask_padded"].bool(), torch.ones(2, 32, dtype=torch.bool)), 1)
    config = DreamConfig(**{key: case[key] for key in OPTIONS if key in case}, mask_id=61)
    uniforms = known.get(f"uniforms_{name}")
    answer = network(tmp_path, seen)
    found = list(decode(answer, expected[0], config, noise=Noise(0, range(2)), order_uniforms=uniforms))
    assert torch.equal(torch.stack(found), expected[1:])


@golden
@torch.no_grad()
def test_rows_of_unequal_length(tmp_path: Path) -> None:
    """The published fault as a switch, seen in how many masks are left; without it both rows end as they do alone."""
    known = load_file(GOLDEN / "dream_trajectories.safetensors")
    canvas, answer = known["entropy_s8_uneven"][0], network(tmp_path)
    noise = Noise(0, range(2))
    fault = DreamConfig(8, "entropy", mask_id=61, batch_mean=True)
    *_, last = decode(answer, canvas, fault, noise=noise)
    assert (last == 61).sum(-1).tolist() == CASES["cases"]["entropy_s8_uneven"]["masks_at_the_end_per_row"]
    config = DreamConfig(8, "entropy", mask_id=61)
    *_, both = decode(answer, canvas, config, noise=noise)
    assert not (both == 61).any()
    for row in range(2):
        own = slice(row, row + 1)
        *_, alone = decode(answer, canvas[own], config, noise=noise[own])
        assert torch.equal(both[own], alone)


@golden
def test_golden_counts() -> None:
    for case in CASES["counts_per_call"]:
        config, masked = DreamConfig(case["steps"], "entropy", case["eps"]), torch.tensor([case["masked"]])
        counts = []
        for call in range(case["steps"]):
            counts.append(int(reveal_count(masked, config, call)))
            masked = masked - counts[-1]
        if "counts" in case:
            assert counts == case["counts"]
        else:
            known = (case["calls_that_reveal_nothing"], case["largest"], case["last"])
            assert (counts.count(0), max(counts), counts[-1]) == known


@golden
def test_golden_scores() -> None:
    known = load_file(GOLDEN / "dream_confidences.safetensors")
    filters = {"": {}, "_top_p0.9": {"top_p": 0.9}, "_top_k5": {"top_k": 5}}
    for alg, (name, options) in itertools.product(("maskgit_plus", "topk_margin", "entropy"), filters.items()):
        filtered = filter_logits(known["logits"], DreamConfig(8, **options))  # type: ignore[arg-type]
        tokens = filtered.argmax(-1)
        assert torch.equal(tokens, known[f"token_{alg}{name}"])
        expected = known[f"confidence_{alg}{name}"]
        torch.testing.assert_close(scores(filtered, tokens, alg), expected, atol=1e-6, rtol=1e-5)  # type: ignore[arg-type]
        if name:
            assert torch.equal(filtered.isfinite(), known[f"kept{name}"])


# --- closed forms -----------------------------------------------------------------------------------------------------


def test_shares_are_those_of_the_times() -> None:
    config = DreamConfig(4, eps=0.2)
    times = [1.0, 0.8, 0.6, 0.4, 0.2]
    for call in range(3):
        assert float(reveal_share(config, call)) == pytest.approx(1 - times[call + 1] / times[call], rel=1e-6)
    assert float(reveal_share(config, 3)) == 1


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
    assert filter_logits(logits, DreamConfig(2, top_p=0.6)).isfinite().tolist() == [[True, True, False, False]]
    assert filter_logits(logits, DreamConfig(2, top_p=0.75)).isfinite().tolist() == [[True, True, True, False]]
    tied = torch.tensor([[1.0, 0.0, 0.0, -1.0]])
    assert filter_logits(tied, DreamConfig(2, top_k=2)).isfinite().sum() == 3  # ties stay
    torch.testing.assert_close(filter_logits(tied, DreamConfig(2, temperature=0.5)), tied * 2)


def test_origin_draws_the_tempered_law_in_one_call() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -3.0])
    config = DreamConfig(1, temperature=2.0, mask_id=3)
    canvas = torch.full((400, 50), 3)
    *_, last = decode(lambda x: logits.expand(*x.shape, -1), canvas, config, noise=Noise(3, range(400)))
    law = torch.softmax(logits[:3] / 2, 0)
    found = last.flatten().bincount(minlength=4) / last.numel()
    assert float(found[3]) == 0
    assert float((found[:3] - law).abs().max()) < 4 * (0.25 / last.numel()) ** 0.5


def test_refusals() -> None:
    for options, message in (
        ({"steps": 0}, "steps is 0"),
        ({"alg": "best"}, "alg is 'best'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            DreamConfig(**{"steps": 4, **options})  # type: ignore[arg-type]


# --- the law ----------------------------------------------------------------------------------------------------------


def law_distance(alg: str, steps: int, *, rows: int = 6000) -> float:
    """Total variation of Dream's texts at T = 1 from p_1, with the true posterior of a small world as its network."""
    path, p_1 = world("mask", PolynomialSchedule(1), 3, 3)
    every = all_states(4, 3)
    table = ExactDenoiser(path, p_1=p_1)(every, torch.full((len(every),), 0.5, dtype=torch.float64), None)
    canvas, places = torch.full((rows, 3), 3), torch.tensor([16, 4, 1])
    config = DreamConfig(steps, alg, temperature=1.0, mask_id=3)  # type: ignore[arg-type]
    *_, last = decode(lambda x: table[(x * places).sum(-1)], canvas, config, noise=Noise(0, range(rows)))
    found = (last * places).sum(-1).bincount(minlength=64).double() / rows
    return total_variation(found, p_1.flatten())


def test_only_the_original_rule_reaches_the_law() -> None:
    """`origin` converges to p_1 with the calls. The others do not: floor(m w) leaves two positions to the last call."""
    found = [law_distance("origin", steps) for steps in (1, 3, 8, 64)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.03 < 0.25 < found[0]
    for alg in ("maskgit_plus", "topk_margin", "entropy"):
        assert law_distance(alg, 64) > 0.12
