"""Tables of negative controls and of models at equal entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fsdfm.measure.controls import blind_metrics
from fsdfm.measure.results import Evaluation, Measured, Row, load_evaluation, save_evaluation
from fsdfm.show.quality.claims import headline_table
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.marks import BLIND, UNKNOWN
from fsdfm.show.quality.metrics import metric_named
from fsdfm.show.quality.report import draw_all, report_markdown
from fsdfm.show.quality.tables import controls_table, equal_entropy_table, metric_table, results_csv


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
    assert f"### At equal entropy: perplexity {BLIND} as a multiple of A's" in report
    assert "A: cycle,control,," in results_csv(comparison)


def test_budgets_that_one_model_did_not_sweep_are_no_common_ones() -> None:
    """A file with controls and many budgets, joined with a sweep of one of them, is compared at that one."""
    few = evaluation("B", math.log(0.5))
    swept = [replace(row, steps=1) for row in (*few.rows, *few.frontier)]
    few = replace(few, rows=(swept[0], *few.rows), frontier=tuple(swept[1:]))
    table = equal_entropy_table(Comparison(("A", "B"), (evaluation("A", 0.0), few)))
    assert table is not None
    assert {row[1] for row in table.rows} == {"1 against 8"}
    assert BLIND in table.title


def test_every_table_of_a_report_bears_the_mark() -> None:
    """Whatever part of it is copied out, a reader sees that the perplexity in it was fooled, and by what."""
    comparison = Comparison(("A", "B"), (evaluation("A", 0.0), evaluation("B", -0.1)))
    parts = report_markdown(comparison).split("\n### ")[1:]
    of_perplexity = [part for part in parts if "erplexity" in part]
    assert len(of_perplexity) >= 8
    for part in of_perplexity:
        assert BLIND in part.partition("| --- ")[0], part  # in its title, caption or header
        assert f"{BLIND} perplexity (token): cycle above real data; cycle above " in part, part
    assert f"{BLIND} entropy" not in report_markdown(comparison)
    for table in (headline_table(comparison), metric_table(comparison, metric_named("token_perplexity"))):
        assert table.notes == (f"{BLIND} perplexity (token): cycle above real data; cycle above A (8), B (8)",)
    pytest.importorskip("matplotlib")
    for name, figure in draw_all(comparison).items():
        texts = [axes.get_title() + axes.get_title("left") + axes.get_ylabel() for axes in figure.axes]
        marked = [BLIND in text for text in texts if "erplexity" in text]
        assert any(marked) or name == "panels", (name, texts)  # a panel of entropy alone has no perplexity


def test_a_report_without_controls_says_that_blindness_is_not_known() -> None:
    comparison = Comparison(("A",), (evaluation("A", 0.0, controls=False),))
    assert f"{UNKNOWN}; measure them" in report_markdown(comparison)
    assert headline_table(comparison).notes == (UNKNOWN,)
    assert BLIND not in headline_table(comparison).header[4]


def test_controls_are_lent_to_a_file_that_has_none_but_only_for_what_each_text_says() -> None:
    bare = replace(evaluation("B", 0.0, controls=False), real={})
    lending = replace(evaluation("A", 0.0), facts={"num_samples": 32})
    fooled = replace(lending, controls={"cycle": {**lending.controls["cycle"], "distinct_2": near(0.4, 0.001)}})
    row = replace(bare.rows[0], metrics={**bare.rows[0].metrics, "distinct_2": near(0.9, 0.001)})
    fooled = replace(fooled, real={**fooled.real, "distinct_2": near(0.4, 0.001)})
    comparison = Comparison(("A", "B"), (fooled, replace(bare, rows=(row,))))
    assert set(comparison.marks_of("B").found) == {"token_perplexity"}
    assert comparison.marks.found["token_perplexity"].above_models == {"A, 8": ("cycle",), "B, 8": ("cycle",)}


@pytest.mark.parametrize(("num", "blind"), [(32, True), (None, True), (12, False)])
def test_what_moves_with_the_number_of_texts_is_ranked_among_as_many(num: int | None, blind: bool) -> None:
    one = evaluation("A", 0.0)
    diverse = {"cycle": {"distinct_2": near(0.4, 0.001), "token_perplexity": near(2.0)}}
    row = replace(one.rows[0], num_samples=num, metrics={**one.rows[0].metrics, "distinct_2": near(0.6, 0.001)})
    real = {**one.real, "distinct_2": near(0.4, 0.001)}
    found = replace(one, rows=(row,), controls=diverse, real=real, facts={"num_samples": 32})
    marks = {mark.metric: mark for mark in blind_metrics(found)}
    assert ("distinct_2" in marks) == blind
    assert marks["token_perplexity"].above_models == {"8 steps": ("cycle",)}


def test_an_autoregressive_model_that_a_control_beats_is_named() -> None:
    written = Row(steps=255, metrics={"token_perplexity": near(12.0)}, facts={"name": "ar"})
    one = replace(evaluation("A", 0.0), alternatives=(written,))
    (note,) = Comparison(("A",), (one,)).marks.notes(["token_perplexity"])
    assert note.endswith("cycle above 8 steps, ar")


def test_controls_survive_a_result_file(tmp_path: Path) -> None:
    one = evaluation("A", 0.0)
    save_evaluation(one, tmp_path / "a.json")
    assert load_evaluation(tmp_path / "a.json").controls == one.controls
    broken = one.to_json() | {"controls": {"cycle": {"token_perplexity": {"value": "many"}}}}
    with pytest.raises(ValueError, match="controls.cycle: token_perplexity: value is 'many'"):
        Evaluation.from_json(broken)
