"""The report: exact tables of known numbers, changes against closed forms, figures drawn from the right numbers."""

import csv
import io
import math
import re
import sys
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fsdfm.cli import app
from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from fsdfm.show.quality import Comparison, change, report_markdown, write_report
from fsdfm.show.quality.figures import draw_change, draw_frontier, draw_latency, draw_panels, draw_quality
from fsdfm.show.quality.metrics import metric_named
from fsdfm.show.quality.tables import (
    across_budgets_table,
    changes_csv,
    changes_table,
    few_steps_table,
    matched_table,
    metric_table,
    model_tables,
    plain_markdown,
    results_csv,
)
from fsdfm.show.quality.terminal import print_tables

NAN = float("nan")
COLLAPSED = "entropy below the band of real text"
REAL = {
    "token_perplexity": Measured(24.6, 23.9, 25.4),
    "entropy_bits": Measured(7.88, 7.84, 7.92, {"band": (7.5, 8.2)}),
    "mauve": Measured(0.97, 0.96, 0.98),
}


def row(steps, perplexity, entropy, *, flags=(), **more):
    metrics = {
        "token_perplexity": Measured(perplexity, 0.9 * perplexity, 1.1 * perplexity),
        "entropy_bits": Measured(entropy, entropy - 0.05, entropy + 0.05),
    }
    return Row(steps=steps, metrics=metrics, flags=flags, **more)


def evaluation(name, *rows, real=REAL, judge="gpt2", **more):
    return Evaluation(model={"name": name}, judge={"name": judge}, rows=rows, real=real, **more)


def two():
    a = evaluation("DFM", row(1, 2000.0, 8.1, seconds_per_sample=0.1), row(8, 310.0, 8.0, seconds_per_sample=0.8))
    b = evaluation(
        "FS-DFM",
        row(1, 500.0, 6.1, flags=(COLLAPSED,), seconds_per_sample=0.1),
        row(8, 90.5, 7.8, seconds_per_sample=0.8),
        row(16, 70.25, 7.85, seconds_per_sample=1.6),
    )
    return Comparison(("DFM", "FS-DFM"), (a, b))


def lone(*rows, **more):
    return Comparison(("m",), (evaluation("m", *rows, **more),))


def curves(axes):
    """The lines that are models': [(xs, ys, hollow)], without the real-data line and connectors."""
    return [
        (list(line.get_xdata()), list(line.get_ydata()), line.get_markerfacecolor() == "white")
        for line in axes.get_lines()
        if line.get_marker() not in ("", "None", None) and len(line.get_xdata())
    ]


def real_lines(axes):
    return [line.get_ydata()[0] for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]]


# ------------------------------------------------------------------------------------------------------- tables


def test_the_few_step_table_to_the_letter():
    assert few_steps_table(two()).to_markdown() == (
        "### Few steps\n"
        "\n"
        "Perplexity (token) / entropy, bits / MAUVE; the intervals stand in the tables below.\n"
        "\n"
        "| steps | 1 | 8 | 16 |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| DFM | 2,000 / 8.10 / - | 310 / 8.00 / - | - |\n"
        "| FS-DFM | 500 ⚑a / 6.10 / - | 90.5 / 7.80 / - | 70.2 / 7.85 / - |\n"
        "| real data | 24.6 / 7.88 / 0.970 | 24.6 / 7.88 / 0.970 | 24.6 / 7.88 / 0.970 |\n"
        "\n"
        "⚑a: entropy below the band of real text\n"
    )


def test_many_budgets_are_thinned_to_the_papers():
    table = few_steps_table(lone(*(row(2**n, 100.0, 7.0) for n in range(11))))
    assert table.header == ("steps", "1", "2", "4", "8", "16", "1024")


def test_a_metric_table_has_intervals_and_entropy_beside_perplexity():
    table = metric_table(two(), metric_named("token_perplexity"))
    assert table.rows == (
        ("1", "2,000 [1,800, 2,200] / 8.10", "500 [450, 550] ⚑a / 6.10"),
        ("8", "310 [279, 341] / 8.00", "90.5 [81.5, 99.6] / 7.80"),
        ("16", "-", "70.2 [63.2, 77.3] / 7.85"),
        ("real data", "24.6 [23.9, 25.4] / 7.88", "24.6 [23.9, 25.4] / 7.88"),
    )
    entropies = metric_table(two(), metric_named("entropy_bits"))
    assert entropies.rows[0] == ("1", "8.10 [8.05, 8.15]", "6.10 [6.05, 6.15]")  # the flag is the perplexity's


def test_a_models_table_has_what_was_measured_and_only_that():
    comparison = two()
    main, further = model_tables("FS-DFM", comparison.evaluations[1], comparison.real_of("FS-DFM"))[0], None
    assert main.header == ("steps", "perplexity (token)", "entropy, bits", "MAUVE", "seconds per sample")
    assert main.rows[0] == ("1", "500 [450, 550] ⚑a", "6.10 [6.05, 6.15]", "-", "0.100")
    assert main.rows[-1] == ("real data", "24.6 [23.9, 25.4]", "7.88 [7.84, 7.92]", "0.970 [0.960, 0.980]", "-")
    odd = Row(steps=2, calls=8, temperature=0.8, flags=("x",), metrics={"odd_perplexity": Measured(3.14159)})
    main, further = model_tables("m", evaluation("m", odd), comparison.real_of("DFM"))
    assert further.header == ("steps", "calls", "temperature", "odd perplexity")
    assert further.rows == (("2", "8", "0.8", "3.14 ⚑a"), ("real data", "-", "-", "-"))


def test_every_table_ends_with_real_data():
    comparison = two()
    matched = evaluation("m", Row(steps=8, temperature=1.1, matched={"to": "data"}, metrics={"mauve": Measured(1)}))
    tables = [
        few_steps_table(comparison),
        metric_table(comparison, metric_named("mauve")),
        changes_table(comparison, "FS-DFM"),
        *model_tables("DFM", comparison.evaluations[0], comparison.real_of("DFM")),
        matched_table(Comparison(("m",), (matched,))),
    ]
    assert all(table.rows[-1][0].startswith("real data") for table in tables)
    assert all(len(line) == len(table.header) for table in tables for line in table.rows)


def test_matched_rows_have_a_table_of_their_own_and_their_flags():
    rows = (
        row(8, 90.0, 7.0),
        row(8, 120.0, 7.88, temperature=1.0712, matched={"to": "steps 1024"}, flags=(COLLAPSED,)),
    )
    table = matched_table(lone(*rows))
    assert table.rows[0] == ("m", "8", "steps 1024", "1.07", "120 [108, 132] ⚑a", "7.88 [7.83, 7.93]")
    assert matched_table(two()) is None
    assert few_steps_table(lone(*rows)).rows[0] == ("m", "90.0 / 7.00 / -")


def test_rows_of_equal_entropy_are_compared_across_budgets():
    parent = evaluation("parent", row(8, 96.0, 6.44), row(1024, 64.0, 6.45))
    cool = evaluation("parent", row(1024, 50.0, 6.33, temperature=0.88))
    child = evaluation("child", row(1, 20.0, 6.37), row(8, 48.0, 6.31), row(2, 30.0, 5.0))
    table = across_budgets_table(Comparison(("parent", "cool", "child"), (parent, cool, child)))
    pairs = [(cells[1], cells[4], cells[7]) for cells in table.rows]
    # log 0.9 = -0.105 and log 1.1 = 0.095 on both sides: the ratio's ends are exp(-+hypot(0.105, 0.095))
    spread = math.exp(math.hypot(math.log(0.9), math.log(1.1)))
    ratio = 48 / 50
    assert pairs[-1] == ("8", "1,024 at 0.88", f"{ratio:.3f} [{ratio / spread:.3f}, {ratio * spread:.3f}]")
    assert [pair[:2] for pair in pairs[:-1]] == [("1", "8 at 1"), ("1", "1,024 at 0.88"), ("1", "1,024 at 1")]
    assert all(pair[2].startswith("**0.") for pair in pairs[:-1])
    assert across_budgets_table(Comparison(("a", "b"), (parent, evaluation("b", row(8, 9.0, 3.0))))) is None


def test_no_flagged_perplexity_stands_bare_in_the_whole_report():
    flagged = evaluation(
        "m",
        row(1, 111.0, 5.0, flags=(COLLAPSED,)),
        row(2, 112.0, 5.0, flags=(COLLAPSED,), temperature=0.9, matched={"to": "data"}),
    )
    text = report_markdown(Comparison(("a", "m"), (evaluation("a", row(1, 500.0, 7.9)), flagged)))
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    shown = [cell for cell in cells if "111" in cell or "112" in cell or "-77.8" in cell]
    assert len(shown) >= 5
    assert all("⚑" in cell for cell in shown)


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (Measured(math.inf), "∞"),
        (Measured(NAN), "nan"),
        (Measured(5.0, 4.0, math.inf), "5.00 [4.00, ∞]"),
        (Measured(1e12), "1.00e+12"),
        (Measured(0.0, 0.0, 0.0), "0.00 [0.00, 0.00]"),
        (None, "-"),
    ],
)
def test_strange_numbers_are_written(measured, text):
    assert metric_named("token_perplexity").write(measured) == text


def test_names_cannot_break_a_table():
    comparison = Comparison(("a|b\nc",), (evaluation("x", row(1, 5.0, 7.0, flags=("p|q",))),))
    lines = few_steps_table(comparison).to_markdown().splitlines()
    assert "| a\\|b c | 5.00 ⚑a / 7.00 / - |" in lines
    assert "⚑a: p\\|q" in lines


EVIL = "<script>alert(1)</script> ![p](http://x/y.png) [l](http://x) &amp;"


def test_the_words_of_a_result_file_are_words_in_the_report():
    """Whoever wrote the file chose names, judge, flags and facts; the reader's browser obeys none of them."""
    facts = {"seed": EVIL, "commit": EVIL, "started": EVIL}
    hostile = evaluation(EVIL, row(1, 5.0, 7.0, flags=(EVIL,)), judge=EVIL, data={"held_out": EVIL}, facts=facts)
    text = report_markdown(Comparison((EVIL, "b"), (hostile, evaluation("b", row(1, 4.0, 7.0), judge=EVIL))))
    assert "<script" not in text
    assert "](http" not in text
    assert "&lt;script&gt;" in text
    assert "&amp;amp;" in text


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t"])
def test_no_name_is_a_formula_in_a_spreadsheet(sign):
    comparison = Comparison((f"{sign}HYPERLINK(1)",), (evaluation("x", row(1, 5.0, -7.0, flags=(f"{sign}1+1",))),))
    (line, _) = csv.DictReader(io.StringIO(results_csv(comparison)))
    assert line["model"] == f"'{sign}HYPERLINK(1)"
    assert line["flags"] == f"'{sign}1+1"
    assert line["entropy_bits"] == "-7.0"  # a number is one


def test_the_terminal_shows_strange_names_as_they_are():
    out = io.StringIO()
    strange = evaluation("x[/b]", row(1, 5.0, 7.0, flags=("p\x1b[31m[/red]",)))
    print_tables(strange, Console(file=out, width=200))
    assert "\x1b" not in out.getvalue()
    assert "[/red]" in out.getvalue()


# ------------------------------------------------------------------------------------------------------ changes


def test_the_interval_of_a_difference_of_symmetric_ones_adds_in_squares():
    found = change(Measured(10.0, 7.0, 13.0), Measured(20.0, 16.0, 24.0), relative=False)
    assert (found.measured.value, found.measured.low, found.measured.high) == pytest.approx((10.0, 5.0, 15.0))
    assert found.decided


def test_the_interval_of_a_difference_takes_the_ends_that_meet():
    found = change(Measured(10.0, 9.0, 14.0), Measured(10.0, 7.0, 11.0), relative=False).measured
    assert (found.low, found.high) == pytest.approx((-5.0, math.sqrt(2)))  # 3 and 4 below; 1 and 1 above


def test_the_interval_of_a_ratio_adds_in_logarithms():
    factor = math.exp(0.3)
    found = change(Measured(100.0, 100.0 / factor, 100.0 * factor), Measured(50.0, 50.0, 50.0), relative=True).measured
    assert (found.value, 1 + found.low, 1 + found.high) == pytest.approx((-0.5, 0.5 / factor, 0.5 * factor))


def test_the_interval_covers_the_true_change_as_often_as_it_says():
    import random

    draw, hits, times = random.Random(0), 0, 4000
    for _ in range(times):
        a, b = draw.gauss(0, 1.0), draw.gauss(0.5, 2.0)
        found = change(Measured(a, a - 1.96, a + 1.96), Measured(b, b - 3.92, b + 3.92), relative=False).measured
        hits += found.low <= 0.5 <= found.high
    assert hits / times == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / times))


@pytest.mark.parametrize("bad", [Measured(NAN), Measured(math.inf), Measured(-1.0, -2.0, 0.0), Measured(0.0)])
def test_a_change_that_cannot_be_said_is_not_a_number(bad):
    found = change(bad, Measured(2.0, 1.0, 3.0), relative=True)
    assert math.isnan(found.measured.value)
    assert not found.decided
    assert change(None, bad, relative=True) is None


def test_the_table_of_changes_to_the_letter():
    table = changes_table(two(), "FS-DFM")
    assert table.header == ("steps", "perplexity (token), %", "entropy, bits", "MAUVE")
    low = math.expm1(math.log(0.25) - math.hypot(math.log(0.9), math.log(1.1)))
    high = math.expm1(math.log(0.25) + math.hypot(math.log(0.9), math.log(1.1)))
    assert table.rows[0] == (
        "1",
        f"**-75.0 [{100 * low:.1f}, {100 * high:.1f}]** ⚑a",
        "**-2.00 [-2.07, -1.93]**",
        "-",
    )
    assert [line[0] for line in table.rows] == ["1", "8", "real data against DFM at 8"]
    assert table.rows[2][2] == "**-0.12 [-0.18, -0.06]**"
    assert table.notes == ("⚑a: entropy below the band of real text",)


def test_models_without_a_common_budget_have_no_changes():
    comparison = Comparison(("a", "b"), (evaluation("a", row(1, 5.0, 7.0)), evaluation("b", row(2, 5.0, 7.0))))
    assert changes_table(comparison, "b").rows == (("real data", "-", "-", "-"),)
    assert draw_change(comparison, "b") is None
    assert len(changes_csv(comparison).splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------- CSV


def test_the_csv_holds_every_row_with_its_flags():
    base = two()
    cold = row(8, 50.0, 7.0, temperature=0.8, flags=("a", "b"))
    swept = evaluation("S", Row(steps=1, metrics={"token_perplexity": Measured(math.inf)}), frontier=(cold,))
    lines = list(csv.DictReader(io.StringIO(results_csv(Comparison((*base.labels, "S"), (*base.evaluations, swept))))))
    assert [(line["model"], line["kind"], line["steps"]) for line in lines] == [
        *(("DFM", "budget", "1"), ("DFM", "budget", "8")),
        *(("FS-DFM", "budget", "1"), ("FS-DFM", "budget", "8"), ("FS-DFM", "budget", "16")),
        *(("S", "budget", "1"), ("S", "frontier", "8"), ("real data", "real", "")),
    ]
    assert (lines[2]["token_perplexity"], lines[2]["token_perplexity_low"]) == ("500.0", "450.0")
    assert lines[2]["flags"] == COLLAPSED
    assert (lines[5]["token_perplexity"], lines[5]["token_perplexity_low"], lines[5]["mauve"]) == ("inf", "", "")
    assert (lines[6]["flags"], lines[6]["temperature"]) == ("a; b", "0.8")
    assert lines[7]["entropy_bits_high"] == "7.92"


def test_the_csv_of_changes():
    lines = list(csv.DictReader(io.StringIO(changes_csv(two()))))
    assert [(line["steps"], line["metric"]) for line in lines] == [
        *(("1", "token_perplexity"), ("1", "entropy_bits"), ("8", "token_perplexity"), ("8", "entropy_bits")),
    ]
    assert float(lines[0]["change"]) == pytest.approx(-0.75)
    assert (lines[0]["kind"], lines[0]["flags"], lines[1]["flags"]) == ("relative", COLLAPSED, "")


# --------------------------------------------------------------------------------------------------- comparison


def test_real_perplexity_is_taken_from_the_judge_where_it_stands_only_there():
    judge = {"name": "gpt2", "real": {"token_perplexity": 20.0, "perplexity": {"value": 21.0, "low": 20, "high": 22}}}
    found = Comparison(("m",), (Evaluation(model={"name": "m"}, judge=judge),)).reals[0].metrics
    assert (found["token_perplexity"].value, found["perplexity"].low) == (20.0, 20.0)


def test_files_that_disagree_about_real_data_have_a_row_each():
    other = {"entropy_bits": Measured(6.0)}
    pair = (evaluation("a", row(1, 5.0, 7.0)), evaluation("b", row(1, 5.0, 7.0), real=other))
    table = few_steps_table(Comparison(("a", "b"), pair))
    assert [line[0] for line in table.rows] == ["a", "b", "real data (a)", "real data (b)"]


def test_what_differs_between_files_is_said():
    a = evaluation("a", sampler={"length": 64}, facts={"num_samples": 8})
    b = evaluation("b", sampler={"length": 128}, facts={"num_samples": 8})
    assert Comparison(("a", "b"), (a, b)).warnings == ["The files differ in length (a: 64, b: 128)."]
    assert "- The files differ in length" in report_markdown(Comparison(("a", "b"), (a, b)))


def test_different_judges_are_refused():
    with pytest.raises(ValueError, match=r"different judges \(gpt2, smollm2\)"):
        Comparison(("a", "b"), (evaluation("a"), evaluation("b", judge="smollm2")))


def test_equal_names_are_told_apart(tmp_path):
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        save_evaluation(evaluation("m"), file)
    assert Comparison.read(files).labels == ("m (one)", "m (two)")
    assert Comparison.read([files[0]] * 2).labels == ("m (one)", "m (one) #2")
    assert Comparison.read(files, ["x", "y"]).labels == ("x", "y")
    with pytest.raises(ValueError, match="1 names are given for 2 files"):
        Comparison.read(files, ["x"])
    with pytest.raises(ValueError, match="no result file"):
        Comparison.read([])


# ------------------------------------------------------------------------------------------------------ figures


def test_quality_is_drawn_from_the_rows():
    left, right = draw_quality(two()).axes
    assert (left.get_xscale(), left.get_yscale(), right.get_yscale()) == ("log", "log", "linear")
    assert curves(left) == [
        ([1, 8], [2000, 310], False),
        ([8, 16], [90.5, 70.25], False),
        ([1], [500], True),  # flagged: hollow
    ]
    assert curves(right) == [([1, 8], [8.1, 8.0], False), ([1, 8, 16], [6.1, 7.8, 7.85], False)]
    assert (real_lines(left), real_lines(right)) == ([24.6], [7.88])
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["1", "2", "4", "8", "16"]


def test_ribbons_are_the_intervals():
    (axes, _) = draw_quality(lone(row(1, 100.0, 7.0), row(2, 50.0, 7.0))).axes
    ribbon = axes.collections[0].get_paths()[0].vertices
    assert {(x, round(y, 6)) for x, y in ribbon} == {(1, 90.0), (1, 110.0), (2, 45.0), (2, 55.0)}


def test_calls_not_steps_are_the_axis_and_ticks_go_up_to_1024():
    rows = [row(2**n, 100.0, 7.0, calls=2 ** (n + 1)) for n in range(10)]
    axes = draw_quality(lone(*rows)).axes[0]
    assert curves(axes)[0][0] == [2 ** (n + 1) for n in range(10)]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(2**n) for n in range(1, 11)]


def test_what_cannot_be_drawn_breaks_the_line():
    rows = [row(1, math.inf, 7.0), row(2, NAN, NAN), row(4, 0.0, 7.0), row(8, 9.0, 7.0)]
    left = draw_quality(lone(*rows)).axes[0]
    ((_, ys, _),) = curves(left)
    assert [math.isnan(y) for y in ys] == [True, True, True, False]


def test_panels_show_what_was_measured():
    accurate = Row(steps=4, metrics={"accuracy": Measured(0.3, 0.28, 0.32), "mauve": Measured(0.5)})
    figure = draw_panels(lone(accurate))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Accuracy", "MAUVE"]
    assert curves(figure.axes[0]) == [([4], [0.3], False)]


def test_changes_are_drawn_below_the_models():
    entropy, perplexity, less_entropy, less_perplexity = draw_change(two(), "FS-DFM").axes
    assert curves(entropy) == [([1, 8], [8.1, 8.0], False), ([1, 8, 16], [6.1, 7.8, 7.85], False)]
    assert curves(perplexity)[0] == ([1, 8], [2000, 310], False)
    assert curves(less_entropy)[0][1] == pytest.approx([-2.0, -0.2])
    solid, hollow = curves(less_perplexity)
    assert (solid[0], hollow[0], hollow[2]) == ([8], [1], True)
    assert (solid[1], hollow[1]) == (pytest.approx([100 * (90.5 / 310 - 1)]), pytest.approx([-75.0]))
    connectors = [list(line.get_ydata()) for line in perplexity.get_lines() if line.get_linestyle() == ":"]
    assert connectors == [[500, 2000], [90.5, 310]]


def test_the_frontier_has_a_line_a_budget_from_cold_to_hot():
    rows = [row(s, 100.0 / s + 10 * t, 7 + t, temperature=t) for t in (1.0, 0.5) for s in (8, 4)]
    (axes,) = draw_frontier(lone(frontier=tuple(rows))).axes
    lines = curves(axes)
    assert lines[:2] == [([7.5, 8.0], [30.0, 35.0], False), ([7.5, 8.0], [17.5, 22.5], False)]
    assert lines[2][:2] == ([7.88], [24.6])  # real data
    assert {text.get_text() for text in axes.texts} == {"4 steps", "8 steps", "real data"}


def test_latency_takes_seconds_and_says_steps():
    (axes,) = draw_latency(two()).axes
    assert curves(axes)[0] == ([0.1, 0.8], [2000, 310], False)
    assert curves(axes)[2] == ([0.1], [500], True)
    assert sorted(text.get_text() for text in axes.texts) == ["1", "1", "16", "8", "8"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_names_of_crosses_that_lie_close_are_apart_and_beside_them():
    beside = tuple(
        replace(row(255, y, 7.9, seconds_per_sample=x), facts={"name": name})
        for name, x, y in (("first", 0.147, 11.7), ("second", 0.158, 11.6))
    )
    figure = draw_latency(lone(row(1, 17.0, 7.9, seconds_per_sample=0.12), alternatives=beside))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    first, second = (text for text in axes.texts if text.get_text() in ("first", "second"))
    boxes = [text.get_window_extent() for text in (first, second)]
    assert not boxes[0].overlaps(boxes[1])
    assert first.get_horizontalalignment() == "right"
    for box, (x, y) in zip(boxes, ((0.147, 11.7), (0.158, 11.6)), strict=True):
        place = axes.transData.transform((x, y))
        assert abs((box.y0 + box.y1) / 2 - place[1]) < 2 * box.height  # not pushed beyond another line


def test_real_text_of_two_sizes_is_two_points_with_one_name():
    swept = [row(8, 30.0, 7.5, temperature=0.5), row(8, 35.0, 8.0, temperature=1.0)]
    models = [evaluation(name, frontier=tuple(swept)) for name in ("a", "b")]
    other = replace(models[1], real={**models[1].real, "token_perplexity": Measured(25.0, 24.0, 26.0)})
    (axes,) = draw_frontier(Comparison(("a", "b"), (models[0], other))).axes
    assert [text.get_text() for text in axes.texts if text.get_text()].count("real data") == 1


def test_nothing_to_draw_is_no_figure():
    for comparison in (lone(), lone(Row(steps=1)), lone(row(1, NAN, NAN))):
        draws = (draw_quality, draw_panels, draw_frontier, draw_latency)
        assert [draw(comparison) for draw in draws] == [None] * 4
    assert draw_latency(lone(row(1, 5.0, 7.0, seconds_per_sample=0.0))) is None


# -------------------------------------------------------------------------------------------------------- files


def saved(tmp_path, comparison):
    files = [tmp_path / f"{n}.json" for n in range(len(comparison.labels))]
    for file, one in zip(files, comparison.evaluations, strict=True):
        save_evaluation(one, file)
    return files


def test_the_report_is_a_folder_whose_pictures_stand_in_the_text(tmp_path):
    written = write_report(saved(tmp_path, two()), tmp_path / "new" / "out")
    names = ["report.md", "results.csv", "changes.csv", "quality.png", "panels.png", "change-2-fs-dfm.png"]
    assert [file.name for file in written] == [*names, "latency.png"]
    text = written[0].read_text()
    for file in written:
        if file.suffix == ".png":
            assert f"]({file.name})" in text
            with Image.open(file) as picture:
                assert picture.width == 1680
                assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
                assert len(picture.convert("RGB").resize((200, 200)).getcolors(40_000)) > 20


def test_strange_names_are_drawn_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdfm.show.quality.report.DPI", 30)
    names = ("_costs $5 or $x_{$", "模型 " + "long " * 40)
    models = tuple(evaluation(name, row(2, 100.0, 7.0)) for name in names)
    written = write_report(saved(tmp_path, Comparison(names, models)), tmp_path / "out")
    assert [file.name[:8] for file in written[3:]] == ["quality.", "panels.p", "change-2"]
    shown = [text.get_text() for text in draw_quality(Comparison(names, models)).legends[0].get_texts()]
    assert shown[0] == r" _costs \$5 or \$x_{\$"
    assert len(shown[1]) == 80
    assert shown[2] == "real data"


def test_many_models_differ_in_look():
    names = tuple(f"model {n}" for n in range(16))
    comparison = Comparison(names, tuple(evaluation(name, row(2, 100.0, 7.0)) for name in names))
    handles = draw_quality(comparison).legends[0].get_lines()[:17]
    looks = {(line.get_color(), line.get_marker(), repr(line._dash_pattern)) for line in handles}
    assert len(looks) == 17  # and real data


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("fsdfm.show.quality.report.DPI", 30)
    files = [str(file) for file in saved(tmp_path, two())]
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["report", *files, "--out", str(out), "--name", "A", "--name", "B"])
    assert done.exit_code == 0, done.output
    assert "report.md" in done.stdout
    assert "| A | 2,000 / 8.10" in (out / "report.md").read_text()


def test_bad_input_is_refused(tmp_path, monkeypatch):
    (file, _) = saved(tmp_path, two())
    with pytest.raises(ValueError, match="cannot write into"):
        write_report([file], file / "out")
    with pytest.raises(ValueError, match="cannot read"):
        write_report([tmp_path / "none.json"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"matplotlib.*fsdfm\[plots\]"):
        write_report([file], tmp_path / "out")


@pytest.mark.parametrize("name", ["a|b", "a\\|b", "a\\\\| 1.0 | 2.0", "\\", "a\\", "[x](y)", "[x\\](y)", "![a\\\\](b)"])
def test_a_strangers_name_is_one_cell_and_no_link(name):
    """As GitHub cuts a row: a backslash takes what follows it along, a bar after two backslashes ends a cell."""
    row = plain_markdown(name)
    cells = re.findall(r"(?:\\.|[^|])+", row)
    assert cells == [row]
    said = re.sub(r"\\([\\|\[\]()])", r"\1", row)
    assert said == name  # nothing is lost
    assert "](" not in re.sub(r"\\.", "", row)
