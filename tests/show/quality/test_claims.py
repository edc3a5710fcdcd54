"""A claim holds where two judges agree; one table holds everything a reader weighs."""

from __future__ import annotations

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.show.quality.claims import claims_table, find_claims, headline_table
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.report import report_markdown


def near(value: float, share: float = 0.05) -> Measured:
    return Measured(value, value * (1 - share), value * (1 + share))


def evaluation(name: str, first: float, second: float | None, *, flags: tuple[str, ...] = ()) -> Evaluation:
    def metrics(one: float, two: float | None) -> dict[str, Measured]:
        found = {"token_perplexity": near(one), "entropy_bits": Measured(6.0), "distinct_2": Measured(0.4)}
        return found if two is None else {**found, "second_token_perplexity": near(two)}

    beside = {} if second is None else {"second": {"name": "other"}}
    row = Row(steps=8, num_samples=32, seconds_per_sample=0.5, metrics=metrics(first, second), flags=flags)
    written = Row(steps=255, num_samples=32, metrics=metrics(11, 12), facts={"name": "ar"}, seconds_per_sample=2.0)
    return Evaluation(
        model={"name": name},
        judge={"name": "one", **beside},
        rows=(row,),
        real=metrics(10, 11 if second is not None else None),
        alternatives=(written,),
    )


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (50.0, 60.0, "holds: lower"),
        (150.0, 160.0, "holds: higher"),
        (50.0, 160.0, "the judges disagree"),
        (50.0, 101.0, "not decided"),
        (101.0, 50.0, "not decided"),
    ],
)
def test_a_claim_holds_where_both_judges_say_it(first: float, second: float, verdict: str) -> None:
    comparison = Comparison(("A", "B"), (evaluation("A", 100, 100), evaluation("B", first, second)))
    claim = next(c for c in find_claims(comparison) if c.model == "B" and c.against == "A, 8")
    assert claim.verdict == verdict


def test_what_lost_variety_holds_with_a_flag() -> None:
    cold = evaluation("B", 50, 50, flags=("collapse: entropy",))
    claims = find_claims(Comparison(("A", "B"), (evaluation("A", 100, 100), cold)))
    assert {c.against: c.verdict for c in claims if c.model == "B"} == {
        "A, 8": "holds: lower ⚑",
        "ar": "holds: higher",
        "real data": "holds: higher",
    }


def test_under_one_judge_nothing_holds() -> None:
    comparison = Comparison(("A", "B"), (evaluation("A", 100, None), evaluation("B", 50, None)))
    assert {claim.verdict for claim in find_claims(comparison)} == {"one judge only"}
    assert claims_table(comparison) is None
    assert "Claims" not in report_markdown(comparison)


def test_the_table_has_ratios_of_both_judges_and_the_report_has_the_table() -> None:
    comparison = Comparison(("A", "B"), (evaluation("A", 100, 100), evaluation("B", 50, 60)))
    table = claims_table(comparison)
    assert table is not None
    assert table.header == ("perplexity of", "one", "other", "verdict")
    row = next(row for row in table.rows if row[0] == "B, 8 against A, 8")
    assert row[1].startswith("0.5 [0.4")
    assert row[2].startswith("0.6 [0.5")
    assert "holds: lower" in report_markdown(comparison)


def test_everything_stands_in_one_table() -> None:
    table = headline_table(Comparison(("A", "B"), (evaluation("A", 100, 100), evaluation("B", 50, 60))))
    assert [row[0] for row in table.rows] == ["A", "B", "ar", "real data"]
    assert table.header[:7] == ("text", "calls", "texts", "temperature", "one", "other", "times real")
    assert table.header[-1] == "seconds"
    assert table.rows[1][6] == "5"
    assert table.rows[2][1] == "255"
    assert table.rows[2][-1] == "2.00"
    alone = headline_table(Comparison(("A",), (evaluation("A", 100, None),)))
    assert "other" not in alone.header
