"""The report: the paper's figures beside ours and marked, flags kept, every verdict counted."""

import json
from dataclasses import replace

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.marks import BLIND, UNKNOWN
from fsdfm.studies.compare.paper import CONTINUED, EXPANDED, paper_figure
from fsdfm.studies.compare.setting import CompareSetting
from fsdfm.studies.compare.systems import GROUPS, VARIANTS, chosen_variants
from fsdfm.studies.compare.tables import compare_report

SETTING = CompareSetting("b", "t", "h", "j", 80, 64, 16, (0.7,), (1, 8), 16)


def evaluation(variant, number: int) -> Evaluation:  # type: ignore[no-untyped-def]
    def row(steps: int, temperature: float) -> Row:
        heat = temperature * (1 + number / 100)
        metrics = {
            "token_perplexity": Measured(100 * heat**3 / steps, 90 * heat**3 / steps, 110 * heat**3 / steps),
            "entropy_bits": Measured(5 * heat, 4.9 * heat, 5.1 * heat),
            "distinct_2": Measured(0.6 * heat, 0.59 * heat, 0.61 * heat),
            "energy_style_z": Measured(2.5),
        }
        if variant.continued:
            metrics |= {"continuation_token_perplexity": Measured(33.25), "continuation_entropy_bits": Measured(4.5)}
        flags = ("collapse: entropy_bits",) if variant.name == "llada-paper" else ()
        return Row(
            steps=steps, temperature=temperature, metrics=metrics, flags=flags, facts={"calls_made": steps - 0.5}
        )

    real = {"token_perplexity": Measured(9.9), "entropy_bits": Measured(5.0, 4.5, 5.5), "distinct_2": Measured(0.6)}
    return Evaluation(
        model={"name": variant.label, "num_parameters": 9_500_000},
        judge={"name": "smollm2"},
        rows=tuple(row(steps, 1.0) for steps in SETTING.steps),
        frontier=tuple(row(steps, 0.7) for steps in SETTING.steps) if variant.frontier else (),
        real=real,
        controls={"unigrams": {"token_perplexity": Measured(500.0)}} if variant.name == "base" else {},
    )


@pytest.mark.slow
def test_the_report_has_every_row_and_every_figure_of_the_paper() -> None:
    found = {variant.name: evaluation(variant, n) for n, variant in enumerate(VARIANTS)}
    report = compare_report(VARIANTS, found, SETTING)
    text = report.markdown
    assert all(variant.label in text for variant in VARIANTS)
    assert all(title in text for title in GROUPS.values())
    assert all(f"{figure.perplexity:.2f}" in text for figure in EXPANDED)
    assert all(f"paper: {label}" in text for label in CONTINUED)
    assert "33.2 / 4.50" in text  # a continuation
    assert "| 7.5 |" in text  # calls as made
    assert "# Controls" not in text.split("## Controls")[0]
    assert json.dumps(report.record, default=str)
    flagged = [line for line in text.splitlines() if line.startswith("| LLaDA, a greedy") and "33.2" not in line]
    assert flagged
    assert all("†" in line for line in flagged)


@pytest.mark.slow
def test_a_control_that_is_fooling_the_judge_marks_every_table() -> None:
    chosen = [variant for variant in VARIANTS if variant.name in ("base", "mdlm")]
    found = {variant.name: evaluation(variant, n) for n, variant in enumerate(chosen)}
    base = found["base"]
    real = {**base.real, "token_perplexity": Measured(10.0)}
    fooled = replace(base, controls={"periodic-k": {"token_perplexity": Measured(2.0)}}, real=real)
    text = compare_report(chosen, {**found, "base": fooled}, SETTING).markdown
    assert f"| PPL {BLIND} |" in text
    assert f"| perplexity {BLIND} / entropy / distinct-2, T = 1 |" in text
    assert f"- {BLIND} perplexity (token): periodic-k above real data; periodic-k above " in text
    assert BLIND not in compare_report(chosen, found, SETTING).markdown.partition("## At ")[2]
    without = {**found, "base": replace(base, controls={})}
    assert UNKNOWN in compare_report(chosen, without, SETTING).markdown


@pytest.mark.slow
def test_verdicts_are_counted_over_all_peers_with_a_frontier() -> None:
    found = {variant.name: evaluation(variant, n) for n, variant in enumerate(VARIANTS)}
    record = compare_report(VARIANTS, found, SETTING).record["matched"]
    swept = {v.name for v in VARIANTS if v.frontier} - {"ours", "shipped"}
    assert set(record["ours"]) == set(record["shipped"]) == swept
    text = compare_report(VARIANTS, found, SETTING).markdown
    line = next(line for line in text.splitlines() if line.startswith("- 8 calls:"))
    assert sum(int(word) for word in line.partition(":")[2].replace(",", "").split() if word.isdecimal()) == len(swept)


@pytest.mark.slow
def test_weights_alone_are_held_against_the_papers_model() -> None:
    rows = chosen_variants((), ["mdlm", "fs-dfm/0.17", "fs-dfm/1.3"])
    found = {variant.name: evaluation(variant, n) for n, variant in enumerate(rows)}
    report = compare_report(rows, found, SETTING)
    assert set(report.record["matched"]) == {"fs-dfm/0.17", "fs-dfm/1.3"}
    assert set(report.record["matched"]["fs-dfm/1.3"]) == {
        *("fs-dfm/0.17", "mdlm", "remdm-cap", "remdm-conf", "remdm-loop", "remdm-rescale"),
        *("llada", "llada-random"),
    }
    assert "## FS-DFM, the paper's recipe 1.3, at equal entropy and equal diversity" in report.markdown


def test_rows_know_what_the_paper_has_in_their_place() -> None:
    figure = paper_figure("mdlm/mine")
    assert figure is not None
    assert figure.perplexity == 837.58
    assert paper_figure("llada") is None
    names = {variant.name for variant in VARIANTS}
    assert {figure.variant for figure in EXPANDED if figure.variant} <= names
