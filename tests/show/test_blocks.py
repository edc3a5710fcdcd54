"""Documents whose numbers come from result files: written, checked, and nothing else touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row, save_evaluation
from fsdfm.show.quality import Comparison
from fsdfm.show.quality.blocks import fill_blocks, join_evaluations, stale_documents, write_documents
from fsdfm.show.quality.figures import draw_frontier

DOCUMENT = """# Title

Eight calls: <!-- number few-8.json 8 token_perplexity -->?<!-- /number -->; real text
<!-- number few-8.json real token_perplexity -->?<!-- /number -->. Untouched 47.6.

<!-- results few-steps few-1.json few-8.json -->
<!-- /results -->

The end.
"""


def evaluation(steps: int, perplexity: float, sha: str = "a") -> Evaluation:
    metrics = {"token_perplexity": Measured(perplexity, perplexity - 1, perplexity + 1), "entropy_bits": Measured(6.0)}
    real = {"token_perplexity": Measured(9.69, 9.5, 9.9)}
    model = {"name": "few", "checkpoint_sha256": sha}
    return Evaluation(model=model, judge={"name": "toy"}, rows=(Row(steps=steps, metrics=metrics),), real=real)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    save_evaluation(evaluation(1, 500.0), folder / "few-1.json")
    save_evaluation(evaluation(8, 47.6), folder / "few-8.json")
    return folder


def test_marked_places_are_filled_and_nothing_else(results: Path) -> None:
    found = fill_blocks(DOCUMENT, results)
    assert "-->47.6 [46.6, 48.6]<!-- /number -->" in found
    assert "-->9.69 [9.50, 9.90]<!-- /number -->" in found
    assert "| few | 500 / 6.00 | 47.6 / 6.00 |" in found
    assert found.startswith("# Title\n\nEight calls:")
    assert found.endswith("<!-- /results -->\n\nThe end.\n")
    assert fill_blocks(found, results) == found
    assert (
        fill_blocks(DOCUMENT.replace("few-1.json few-8.json", "few*.json"), results).count("| few | 500 / 6.00 |") == 1
    )


def test_numbers_of_the_alternative_and_of_controls_have_names(results: Path) -> None:
    found = evaluation(8, 47.6)
    written = Row(steps=255, metrics={"token_perplexity": Measured(10.2)}, facts={"name": "ar"})
    controls = {"cycle": {"token_perplexity": Measured(64.1)}}
    save_evaluation(replace(found, alternatives=(written,), controls=controls), results / "all.json")
    text = "".join(
        f"<!-- number all.json {which} token_perplexity -->?<!-- /number -->"
        for which in ("alternative", "ar", "cycle")
    )
    assert fill_blocks(text, results).count("10.2") == 2
    assert "64.1" in fill_blocks(text, results)


def swept(name: str, *points: tuple[float, float, float], base: float = 1.0) -> dict[str, tuple[Row, ...]]:
    """An autoregressive model of (temperature, entropy, perplexity) as an evaluation holds it."""
    rows = [
        Row(
            steps=255,
            temperature=temperature,
            metrics={"token_perplexity": Measured(p, 0.9 * p, 1.1 * p), "entropy_bits": Measured(bits, bits, bits)},
            facts={"name": name},
        )
        for temperature, bits, p in points
    ]
    own = tuple(row for row in rows if row.temperature == base)
    return {"alternatives": own, "alternative_frontier": tuple(row for row in rows if row not in own)}


def test_two_sweeps_are_compared_at_equal_entropy_the_alternatives_too(results: Path) -> None:
    """The model has twice the alternative's perplexity at every entropy."""
    metrics = [
        {"token_perplexity": Measured(p, 0.9 * p, 1.1 * p), "entropy_bits": Measured(bits, bits, bits)}
        for bits, p in ((6.0, 20.0), (6.4, 40.0))
    ]
    found = replace(
        evaluation(8, 47.6),
        rows=(Row(steps=8, metrics=metrics[0]),),
        frontier=(Row(steps=8, temperature=1.2, metrics=metrics[1]),),
        **swept("ar", (0.8, 6.0, 10.0), (1.0, 6.4, 20.0)),
    )
    save_evaluation(found, results / "swept.json")
    text = "<!-- equal-entropy swept.json:ar swept.json -->?<!-- /equal-entropy -->"
    assert "-->2.000 to 2.000<!--" in fill_blocks(text, results)
    table = "<!-- results equal-entropy-alternative swept.json -->\n<!-- /results -->"
    assert "| few | 8 against 255 | 6.00 | **2.000 [" in fill_blocks(table, results)
    beside = "<!-- results equal-entropy swept.json -->\n<!-- /results -->"
    assert "| ar | 255 against 8 | 6.00 | **0.500 [" in fill_blocks(beside, results)
    with pytest.raises(ValueError, match="holds no sweep of other"):
        fill_blocks("<!-- equal-entropy swept.json:other swept.json -->?<!-- /equal-entropy -->", results)
    figure = draw_frontier(Comparison(("few",), (found,)))
    assert figure is not None
    assert {"few", "ar"} <= {text.get_text() for text in figure.legends[0].get_texts()}


def test_sweeps_of_alternatives_join_by_name_and_temperature() -> None:
    base = evaluation(8, 47.6)
    first = replace(base, **swept("ar", (0.8, 6.0, 10.0), (1.0, 6.4, 20.0)))
    more = replace(base, **swept("ar", (0.8, 6.0, 11.0), (1.2, 6.6, 30.0)))
    (joined,) = join_evaluations([first, more]).values()
    assert sorted(row.temperature for row in joined.alternative_frontier) == [0.8, 1.2]
    assert len(joined.alternatives) == 1


def test_a_joined_row_has_the_seconds_of_the_one_that_measured_more() -> None:
    few, many = (
        Row(steps=8, seconds_per_sample=seconds, metrics=dict.fromkeys(names, Measured(1.0)))
        for seconds, names in ((0.1, ["brier_lm"]), (0.9, ["token_perplexity", "entropy_bits"]))
    )
    base = evaluation(8, 47.6)
    for order in ((few, many), (many, few)):
        (joined,) = join_evaluations([replace(base, rows=(row,)) for row in order]).values()
        assert joined.rows[0].seconds_per_sample == 0.9
        assert set(joined.rows[0].metrics) == {"brier_lm", "token_perplexity", "entropy_bits"}


def test_rows_that_measured_different_things_are_one() -> None:
    first, again = evaluation(8, 47.6), evaluation(8, 50.0)
    other = replace(first, rows=(Row(steps=8, metrics={"brier_lm": Measured(3.0), "entropy_bits": Measured(7.0)}),))
    (joined,) = join_evaluations([first, other]).values()
    assert len(joined.rows) == 1
    assert {name: found.value for name, found in joined.rows[0].metrics.items()} == {
        "token_perplexity": 47.6,
        "entropy_bits": 6.0,
        "brier_lm": 3.0,
    }
    bare = replace(other, judge={}, real={})
    for order in ([first, bare], [bare, first]):
        (joined,) = join_evaluations(order).values()
        assert joined.judge == {"name": "toy"}
        assert joined.real == first.real
        assert joined.rows[0].metrics.keys() == {"token_perplexity", "entropy_bits", "brier_lm"}
    (later,) = join_evaluations([first, again]).values()
    assert later.rows[0].metrics["token_perplexity"].value == 50.0


def test_a_section_of_a_study_is_taken_over(results: Path) -> None:
    (results / "boards.md").write_text("# Boards\n\nintro\n\n## Easy\n\n| a | 1 |\n\n## Hard\n\n| b | 2 |\n")
    text = "x\n<!-- study boards.md Easy -->\nold\n<!-- /study -->\ny\n"
    found = fill_blocks(text, results)
    assert found == "x\n<!-- study boards.md Easy -->\n| a | 1 |\n<!-- /study -->\ny\n"
    assert fill_blocks(found, results) == found
    with pytest.raises(ValueError, match="has no section 'Medium'; it has Easy, Hard"):
        fill_blocks(text.replace("Easy", "Medium"), results)
    with pytest.raises(ValueError, match="copy the study's report there"):
        fill_blocks(text.replace("boards", "others"), results)


def test_marks_in_a_block_of_code_are_left_alone(results: Path) -> None:
    code = "```markdown\n" + DOCUMENT + "```\n"
    assert fill_blocks(code, results) == code
    assert fill_blocks(code + DOCUMENT, results) == code + fill_blocks(DOCUMENT, results)


def test_a_document_is_stale_until_it_is_written(results: Path, tmp_path: Path) -> None:
    document, other = tmp_path / "a.md", tmp_path / "b.md"
    document.write_text(DOCUMENT)
    other.write_text("no marks, 47.6")
    assert stale_documents([document, other], results) == [document]
    assert write_documents([document, other], results) == [document]
    assert stale_documents([document, other], results) == []
    save_evaluation(evaluation(8, 50.0), results / "few-8.json")
    assert stale_documents([document, other], results) == [document]


def test_what_cannot_be_filled_says_where(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    for text, reason in (
        ("<!-- number few-8.json 4 token_perplexity --><!-- /number -->", "no token_perplexity at 4"),
        ("<!-- number few-8.json 8 mauve --><!-- /number -->", "no mauve at 8"),
        ("<!-- number none.json 8 mauve --><!-- /number -->", "cannot read"),
        ("<!-- results pies few-8.json -->\n<!-- /results -->", "allowed are headline"),
        ("<!-- results controls few-8.json -->\n<!-- /results -->", "no numbers for the table controls"),
    ):
        document.write_text(text)
        with pytest.raises(ValueError, match=reason) as error:
            stale_documents([document], results)
        assert str(document) in str(error.value)


def test_an_autoregressive_model_alone_joins_whatever_weights_it_was_measured_beside() -> None:
    """What was measured of stories15M beside weights that no longer ship holds; what was measured of them does not."""
    new = evaluation(1, 5.0, sha="new")
    written = Row(steps=255, metrics={"token_perplexity": Measured(10.2)}, facts={"name": "ar"})
    old = replace(
        evaluation(1, 9.0, sha="old"), rows=(), alternatives=(written,), real={"token_perplexity": Measured(3.0)}
    )
    for order in ([new, old], [old, new]):
        (joined,) = join_evaluations(order).values()
        assert (joined.rows, joined.real, joined.alternatives) == (new.rows, new.real, (written,))
        assert joined.model["checkpoint_sha256"] == "new"


def test_numbers_can_be_ratios_and_stand_alone(results: Path) -> None:
    for mark, written in (
        ("8 token_perplexity alone", "47.6"),
        ("8 token_perplexity over real alone", "4.91"),
        ("8 token_perplexity over real", "4.91 [4.77, 5.06]"),
    ):
        text = f"x <!-- number few-8.json {mark} -->?<!-- /number --> y"
        assert fill_blocks(text, results) == text.replace("?", written)
    with pytest.raises(ValueError, match="no token_perplexity at 4"):
        fill_blocks("<!-- number few-8.json 8 token_perplexity over 4 --><!-- /number -->", results)


def test_a_row_says_how_many_texts_how_cool_and_what_the_guard_flags(results: Path) -> None:
    flags = ("collapse: distinct_2 below real text's 0.26 .. 0.33", "collapse: distinct_4 below real text's 0.7 .. 0.8")
    own = {"num_samples": 215, "temperature": 0.88, "seconds_per_sample": 0.0834}
    found = evaluation(1, 17.0)
    row = replace(found.rows[0], flags=flags, **own)
    ar = Row(steps=255, flags=("noise: entropy_bits above real text's 1 .. 2",), facts={"name": "ar"})
    save_evaluation(replace(found, rows=(row, Row(steps=2)), alternatives=(ar,)), results / "many" / "few.json")
    for which, metric, written in (
        ("1", "texts", "215"),
        ("1", "temperature", "0.88"),
        ("1", "seconds", "0.08"),
        ("1", "guard", "distinct-2, distinct-4 (collapse)"),
        ("2", "guard", "nothing"),
        ("ar", "guard", "entropy, bits (noise)"),
    ):
        text = f"<!-- number many/few.json {which} {metric} -->?<!-- /number -->"
        assert fill_blocks(text, results) == text.replace("?", written)
    for mark in ("real guard", "4 texts", "1 texts over 2"):
        with pytest.raises(ValueError, match="it is a row's own"):
            fill_blocks(f"<!-- number many/few.json {mark} -->?<!-- /number -->", results)


def test_the_ratios_at_equal_entropy_stand_in_a_line(results: Path) -> None:
    def sweep(name: str, times: float) -> Evaluation:
        rows = tuple(
            Row(steps=1, temperature=t, metrics={"token_perplexity": Measured(times * p), "entropy_bits": Measured(h)})
            for t, p, h in ((0.8, 10.0, 5.0), (1.0, 20.0, 6.0))
        )
        return Evaluation(model={"name": name}, judge={"name": "toy"}, frontier=rows)

    save_evaluation(sweep("a", 1.0), results / "a.json")
    save_evaluation(sweep("b", 0.25), results / "b.json")
    text = "<!-- equal-entropy a.json b.json -->?<!-- /equal-entropy --> times"
    assert fill_blocks(text, results) == text.replace("?", "0.250 to 0.250")
    with pytest.raises(ValueError, match=r"have no entropy in common; sweep both"):
        fill_blocks(text.replace("b.json", "few-8.json"), results)


def test_a_picture_is_stale_until_it_is_drawn_from_the_numbers_that_there_are(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document, picture = tmp_path / "docs" / "a.md", tmp_path / "docs" / "assets" / "quality.png"
    picture.parent.mkdir(parents=True)
    text = "<!-- picture quality few*.json -->\n![Perplexity by calls](assets/quality.png)\n"
    document.write_text(text)
    assert stale_documents([document], results) == [picture]
    assert write_documents([document], results) == [picture]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (stale_documents([document], results), document.read_text()) == ([], text)
    save_evaluation(evaluation(8, 50.0), results / "few-8.json")
    assert stale_documents([document], results) == [picture]
    document.write_text("```\n" + text + "```\n")  # an example
    assert stale_documents([document], results) == []
    document.write_text(text.replace("quality few", "pie few"))
    with pytest.raises(ValueError, match="the picture 'pie' is not known; allowed are latency, frontier, quality"):
        stale_documents([document], results)


def test_files_of_one_model_with_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="different weights"):
        join_evaluations([evaluation(1, 5.0), evaluation(8, 5.0, sha="b")])
