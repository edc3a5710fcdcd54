"""The peers' samplers on a small world: who converges, and what the originals' faults cost."""

import pytest

from fsdfm.studies import faults
from fsdfm.studies.faults import FAULTS, SAMPLERS, _World, run_faults

CONVERGES = (
    *("MDLM, SDTT, SEDD absorbing", "SEDD uniform, analytic", "SEDD uniform, Euler", "Duo ancestral"),
    *("Duo, Psi 0.95", "ReMDM cap 0.04", "forward-backward"),
)
STAYS_AWAY = (
    *("Duo ancestral fed with the plain posterior", "Duo, greedy tail", "gamma-HDLM 0.1, as released"),
    *("LLaDA, low confidence, T = 1", "LLaDA, greedy", "Dream, entropy, T = 0.2, top-p 0.95"),
)


@pytest.mark.parametrize("name", CONVERGES)
def test_it_converges(name: str) -> None:
    world = _World()
    few, many = (SAMPLERS[name](world, steps) for steps in (4, 64))
    assert many < 0.03 < few


@pytest.mark.parametrize("name", STAYS_AWAY)
def test_it_does_not(name: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(faults, "_SAMPLES", 2000)
    assert SAMPLERS[name](_World(), 16) > 0.2


def test_one_position_per_call_in_random_order_is_the_data() -> None:
    assert SAMPLERS["LLaDA, random order, T = 1"](_World(), 4) < 0.03


def test_a_last_call_is_a_step_less() -> None:
    _, whole, tailed = FAULTS["last-call"]()
    assert all(float(a) < float(b) for a, b in zip(whole[1:], tailed[1:], strict=True))


@pytest.mark.slow
def test_float32_cools_in_many_steps_only() -> None:
    _, large, small = FAULTS["float32-gumbel"]()
    exact, few, *_, many = map(float, large[1:])
    assert exact == pytest.approx(7.566, abs=2e-3)
    assert exact - few < 0.05 < 1.5 < exact - many
    assert float(small[1]) - float(small[-1]) < exact - many


def test_the_mean_over_the_batch_loses_given_tokens_and_leaves_masks() -> None:
    table = {row[0]: (int(row[1]), int(row[2])) for row in FAULTS["dream-batch-mean"]()[1:]}
    assert all(value == (0, 0) for name, value in table.items() if name.endswith("per row"))
    assert table["32 and 32 masks, as released"] == (0, 0)
    assert min(table["32 and 38 masks, as released"]) > 0


def test_the_own_score_reveals_masks_far_too_early() -> None:
    rows = FAULTS["gamma-own-score"]()[1:]
    assert all(float(row[1]) > 0.99 for row in rows)
    assert float(rows[0][2]) == pytest.approx(0.02, abs=2e-3)
    assert float(rows[1][2]) < 0


@pytest.mark.slow
def test_the_study_resumes_and_reports(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(faults, "_SAMPLES", 200)
    monkeypatch.setattr(faults, "STEPS", (1, 4))
    run_faults(tmp_path, workers=1)
    run_faults(tmp_path, workers=1)
    text = (tmp_path / "faults.md").read_text()
    assert all(name in text for name in SAMPLERS)
    assert "Dream's mean over the batch" in text
