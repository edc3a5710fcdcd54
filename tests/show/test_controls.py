"""Tables of negative controls and of models at equal entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation, save_evaluation
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.report import report_markdown
from fsdfm.show.quality.tables import BLIND, controls_table, equal_entropy_table, results_csv


def near(value: float, share: float = 0.02) -> Measured:
    return Measured(value, value * (1 - share), value * (1 + share))


def evaluation(name: str, level: float, *, controls: bool = True) -> Evaluation:
    """log-perplexity = level + 0.7 entropy at three temperatures."""

    def row(temperature: float, entropy: float) -> Row:
        perplexity = math.exp(level + 0.7 * entropy)
        return Row(
            steps=8,
            temperature=temperature,
            metrics={"token_perplexity": near(perplexity), "entropy_bits": near(entropy, 0.002)},
        )

    nonsense = {
        "cycle": {"token_perplexity": near(2.0), "entropy_bits": near(6.0, 0.001)},
        "unigram": {"token_perplexity": near(2000.0), "entropy_bits": near(6.4, 0.001)},
    }
    return Evaluation(
        model={"name": name},
        judge={"name": "toy"},
        rows=(row(1.0, 6.0),),
        frontier=(row(0.8, 5.0), row(0.9, 5.5)),
        real={"token_perplexity": near(10.0), "entropy_bits": near(6.0, 0.001)},
        controls=nonsense if controls else {},
    )


def test_a_fooled_metric_is_marked_blind_and_the_reason_stands_below() -> None:
    one = evaluation("A", 0.0)
    table = controls_table("A", one, Comparison(("A",), (one,)).real_of("A"))
    assert table is not None
    assert table.header[1] == f"perplexity (token) {BLIND}"
    assert table.header[2] == "entropy, bits"  # the model has the entropy of real text
    assert [row[0] for row in table.rows] == ["cycle", "unigram", "real data"]
    assert table.notes == (f"{BLIND} perplexity (token): cycle above real data; cycle above 8 steps",)
    assert controls_table("A", evaluation("A", 0.0, controls=False), Comparison(("A",), (one,)).real_of("A")) is None


def test_models_are_compared_at_entropies_that_both_have() -> None:
    comparison = Comparison(("A", "B"), (evaluation("A", 0.0), evaluation("B", math.log(0.5))))
    table = equal_entropy_table(comparison)
    assert table is not None
    assert [row[2] for row in table.rows] == ["5.00", "5.25", "5.50", "5.75", "6.00"]
    assert all(row[3].startswith("**0.500 [0.4") for row in table.rows)
    assert equal_entropy_table(Comparison(("A",), (evaluation("A", 0.0),))) is None


def test_sweeps_with_no_budget_in_common_are_compared_each_with_each() -> None:
    few = evaluation("B", math.log(0.5))
    few = replace(
        few, **{part: tuple(replace(r, steps=1) for r in getattr(few, part)) for part in ("rows", "frontier")}
    )
    table = equal_entropy_table(Comparison(("A", "B"), (evaluation("A", 0.0), few)))
    assert table is not None
    assert {row[1] for row in table.rows} == {"1 against 8"}
    assert all(row[3].startswith("**0.500 [0.4") for row in table.rows)


def test_report_and_csv_have_both(tmp_path: Path) -> None:
    comparison = Comparison(("A", "B"), (evaluation("A", 0.0), evaluation("B", -0.1)))
    report = report_markdown(comparison)
    assert "### A: negative controls" in report
    assert "### At equal entropy: perplexity as a multiple of A's" in report
    assert "A: cycle,control,," in results_csv(comparison)


def test_controls_survive_a_result_file(tmp_path: Path) -> None:
    one = evaluation("A", 0.0)
    save_evaluation(one, tmp_path / "a.json")
    assert load_evaluation(tmp_path / "a.json").controls == one.controls
    broken = one.to_json() | {"controls": {"cycle": {"token_perplexity": {"value": "many"}}}}
    with pytest.raises(ValueError, match="controls.cycle: token_perplexity: value is 'many'"):
        Evaluation.from_json(broken)
