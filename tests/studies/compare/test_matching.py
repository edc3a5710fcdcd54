"""Ours against a peer: decided only where equal entropy and equal diversity say the same."""

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.studies.compare.matching import compare_at


def point(temperature: float, perplexity: float, entropy: float, distinct: float, width: float = 0.01) -> Row:
    def near(value: float) -> Measured:
        return Measured(value, value * (1 - width), value * (1 + width))

    metrics = {"token_perplexity": near(perplexity), "entropy_bits": near(entropy), "distinct_2": near(distinct)}
    return Row(steps=4, temperature=temperature, metrics=metrics)


def swept(factor: float, *, shift: float = 0.0, width: float = 0.01) -> Evaluation:
    """Perplexity e^(3 H - 12) times a factor at entropies 5 and 6 (and a shift), distinct-2 0.5 and 0.8."""
    cold, hot = point(0.7, 20 * factor, 5.0 + shift, 0.5, width), point(1.0, 400 * factor, 6.0 + shift, 0.8, width)
    real = {"entropy_bits": Measured(5.5, 5.2, 5.8), "distinct_2": Measured(0.65, 0.6, 0.7)}
    return Evaluation(model={"name": "m"}, rows=(hot,), frontier=(cold,), real=real)


@pytest.mark.parametrize(
    ("factor", "width", "verdict"), [(0.5, 0.01, "win"), (2.0, 0.01, "loss"), (0.9, 0.2, "undecided")]
)
def test_a_ratio_is_that_of_the_curves(factor: float, width: float, verdict: str) -> None:
    match = compare_at(swept(1.0), swept(factor, width=width), 4)
    assert match.entropy is not None
    assert match.entropy.ratio.value == pytest.approx(factor, rel=1e-6)
    assert match.distinct is not None
    assert match.distinct.ratio.value == pytest.approx(factor, rel=1e-6)
    assert match.verdict == verdict
    assert match.inside
    assert match.to_json()["verdict"] == verdict


def test_a_colder_model_is_not_better() -> None:
    """The same curve further down: lower perplexities, the same ratio at equal entropy."""
    whole = swept(1.0)
    colder = Evaluation(
        model={"name": "c"},
        rows=(point(1.0, 20 * 20**0.5, 5.5, 0.65),),
        frontier=(point(0.7, 20, 5.0, 0.5),),
        real=whole.real,
    )
    match = compare_at(whole, colder, 4)
    assert match.entropy is not None
    assert match.entropy.ratio.value == pytest.approx(1.0, abs=1e-6)
    assert match.verdict == "undecided"


def test_sweeps_that_do_not_meet_say_nothing() -> None:
    match = compare_at(swept(1.0), swept(0.1, shift=2.0), 4)
    assert match.entropy is None
    assert match.verdict == "apart"
    assert compare_at(swept(1.0), swept(1.0), 8).verdict == "apart"  # no such budget
