import math

import pytest

from fsdfm.measure.results import Evaluation, Measured, Row
from fsdfm.measure.statistics import student_mean
from fsdfm.studies.ablation.factors import CONTROL, FACTORS, Claim, Factor, Variant
from fsdfm.studies.ablation.setting import AblationSetting
from fsdfm.studies.ablation.summary import METRICS, AblationScores, Verdict, decide, verdicts
from fsdfm.studies.ablation.tables import AblationTables, paper_ratio, sentence

CLAIM = Claim("a beats b", "a", "b")
A, B = (Variant(label, None, CONTROL.setup) for label in ("a", "b"))
SETTING = AblationSetting(
    **{"base": "", "text": "", "held_out": "", "judge": "j", "steps": (1, 2), "train_steps": 1, "num": 2, "length": 8}
)


def row(steps, perplexity, entropy, temperature=1.0, flags=()):
    metrics = {"token_perplexity": Measured(perplexity), "entropy_bits": Measured(entropy)}
    return Row(steps=steps, temperature=temperature, metrics=metrics, flags=flags)


def evaluation(rows, frontier=()):
    real = {"token_perplexity": Measured(5.0, 4.0, 6.0), "entropy_bits": Measured(7.0, 6.9, 7.1)}
    return Evaluation(model={"name": "m"}, rows=tuple(rows), frontier=tuple(frontier), real=real)


def scores_of(a, b, *, slope=None):
    """Scores of two variants, a (perplexity, entropy) a seed, the same at both budgets.

    slope   of the base's log perplexity in its entropy
    """
    scores = AblationScores((1, 2))
    for label, values in (("a", a), ("b", b)):
        for seed, (perplexity, entropy) in enumerate(values):
            scores.add(label, seed, evaluation([row(steps, perplexity, entropy) for steps in (1, 2)]))
    if slope is not None:
        for seed in range(len(a)):
            base = [row(steps, 100.0, 7.0) for steps in (1, 2)]
            cooled = [row(steps, 100 * math.exp(-slope), 6.0, temperature=0.8) for steps in (1, 2)]
            scores.add(CONTROL.label, seed, evaluation(base, cooled))
    return scores


def verdict_of(scores, claim=CLAIM):
    factor = Factor("f", "f", "here", "who", (A, B), (claim,))
    (found,) = verdicts(factor, scores, factor.variants)
    return found


def test_the_interval_decides():
    assert decide(student_mean([-0.1, -0.11, -0.12])) == "reproduced"
    assert decide(student_mean([0.1, 0.11, 0.12])) == "refuted"
    assert decide(student_mean([-0.1, 0.1, 0.0])) == "undecided"
    assert decide(student_mean([-0.1, -2.0])) == "undecided"  # two seeds far apart
    assert decide(student_mean([-5.0])) == "undecided"  # one seed has no interval


def test_seeds_are_paired():
    """Seeds that differ by far more than the variants do hide nothing: only differences within a seed count."""
    b = [(10.0, 7.0), (100.0, 7.0), (1000.0, 7.0)]
    a = [(9.0, 7.0), (91.0, 7.0), (890.0, 7.0)]
    found = verdict_of(scores_of(a, b))
    assert found.result == "reproduced"
    assert math.exp(found.distance.value) == pytest.approx(0.9, abs=0.01)
    assert verdict_of(scores_of(b, a)).result == "refuted"
    assert set(found.by_budget) == {1, 2}


def test_a_win_that_cooling_explains_is_only_a_drop_in_entropy():
    b = [(100.0, 7.0), (101.0, 7.0), (99.0, 7.0)]
    cooled = [(p * math.exp(-0.5), 6.5) for p, _ in b]  # exactly what the base gains by half a bit
    found = verdict_of(scores_of(cooled, b, slope=1.0))
    assert found.result == "reproduced"
    assert found.only_entropy
    assert found.words == "reproduced, but only as a drop in entropy"
    assert found.equal.value == pytest.approx(0.0)
    assert found.entropy.value == pytest.approx(-0.5)
    other = verdict_of(scores_of(b, cooled, slope=1.0))
    assert other.words == "refuted, but only as a drop in entropy"


def test_a_win_that_cooling_explains_in_part_is_undecided_at_equal_entropy():
    b = [(100.0, 7.0), (100.0, 7.0), (100.0, 7.0)]
    a = [(100 * math.exp(d), 6.5) for d in (-1.0, -1.3, -1.6)]
    assert verdict_of(scores_of(a, b, slope=1.2)).words == "reproduced, but undecided at equal entropy"


def test_an_entropy_that_may_be_as_high_qualifies_nothing():
    b = [(100.0, 7.0), (101.0, 7.0), (99.0, 7.0)]
    a = [(90.0, 7.2), (91.0, 6.6), (89.0, 6.9)]
    assert verdict_of(scores_of(a, b, slope=1.0)).words == "reproduced"


def test_a_win_beyond_cooling_is_a_win():
    b = [(100.0, 7.0), (101.0, 7.0), (99.0, 7.0)]
    better = [(p * math.exp(-0.9), 6.5 + k / 1000) for k, (p, _) in enumerate(b)]
    found = verdict_of(scores_of(better, b, slope=1.0))
    assert found.words == "reproduced"
    assert found.equal.value == pytest.approx(-0.4, abs=0.01)


def test_without_a_frontier_nothing_is_said_of_equal_entropy():
    found = verdict_of(scores_of([(9.0, 6.0)] * 2, [(10.0, 7.0)] * 2))
    assert found.equal is None
    assert not found.only_entropy


def test_the_frontier_goes_on_straight_beyond_its_ends():
    scores = scores_of([(100.0, 8.0)] * 2, [(100.0, 5.0)] * 2, slope=1.0)
    assert scores.excess("a", 0, 1) == pytest.approx(-1.0)
    assert scores.excess("b", 0, 1) == pytest.approx(2.0)
    assert scores.excess(CONTROL.label, 0, 1) == pytest.approx(0.0)


def test_the_slope_is_that_of_all_seeds_and_the_level_each_seeds_own():
    """Its own two points would give 50 nats a bit; the means over seeds give (1 + 1 + 0.5) / (1 + 1 + 0.01)."""
    scores = scores_of([(100.0, 6.5)] * 3, [(100.0, 7.0)] * 3, slope=1.0)
    for budget in (1, 2):
        scores.frontiers[2, budget] = [(7.0, math.log(200.0)), (6.99, math.log(200.0) - 0.5)]
    assert scores.excess("a", 2, 1) - scores.excess("b", 2, 1) == pytest.approx(0.5 * 2.5 / 2.01)
    assert scores.excess("b", 2, 1) == pytest.approx(-math.log(2) + 0.25, abs=0.01)
    for seed in range(3):
        scores.frontiers[seed, 1] = [(7.0, 1.0), (7.0, 2.0)]
    assert scores.excess("a", 0, 1) is None


def test_higher_is_better_for_entropy_and_accuracy():
    claim = Claim("a keeps more", "a", "b", metric="entropy_bits")
    found = verdict_of(scores_of([(1.0, 7.0), (1.0, 7.01)], [(1.0, 6.0), (1.0, 6.01)]), claim)
    assert found.result == "reproduced"
    assert found.equal is None
    assert "+" not in sentence(found, FACTORS["teacher"])
    assert "ent. `a` minus `b`: 1.00" in sentence(found, FACTORS["teacher"])


def test_budgets_beyond_eight_are_no_part_of_the_claim():
    scores = AblationScores((4, 8, 1024))
    assert scores.budgets("token_perplexity") == (4, 8)
    assert AblationScores((16, 32)).budgets("token_perplexity") == (16, 32)


def test_times_are_ratios_within_a_round():
    scores = AblationScores((1,))
    for seed in range(3):
        scores.add_times("plain", seed, [1.0, 2.0, 4.0])
        scores.add_times("rk2", seed, [1.3, 2.6, 5.2 + seed / 10])
    assert scores.of("plain", "seconds", 0) == [1.0] * 3
    assert scores.of("rk2", "seconds", 0) == pytest.approx([1.3] * 3)
    found = verdict_of(_renamed(scores), Claim("", "a", "b", metric="seconds", ratio=1 / 1.33))
    assert found.result == "reproduced"


def _renamed(scores):
    names = {"plain": "a", "rk2": "b"}
    scores.values = {(names[label], *rest): value for (label, *rest), value in scores.values.items()}
    return scores


def test_the_papers_ratio_is_its_tables():
    factor = FACTORS["scalar"]
    claim = factor.claims[0]
    e = student_mean([0.0, 0.0])
    assert paper_ratio(factor, Verdict(claim, e, {1: e})) == pytest.approx(514.40 / 1312.65)
    whole = paper_ratio(factor, Verdict(claim, e, dict.fromkeys((1, 2, 4, 8), e)))
    assert whole == pytest.approx((514.40 / 1312.65 * 333.07 / 462.31 * 176.19 / 194.29 * 90.49 / 97.51) ** 0.25)
    assert paper_ratio(FACTORS["teacher"], Verdict(FACTORS["teacher"].claims[0], e, {1: e})) == 0.88


def test_flags_and_real_text_stand_in_the_table():
    scores = scores_of([(9.0, 6.0)] * 2, [(10.0, 7.0)] * 2)
    flagged = evaluation([row(s, 2.0, 1.0, flags=("collapse: entropy_bits below real text's 6 .. 7",)) for s in (1, 2)])
    scores.add("a", 1, flagged)
    factor = Factor("f", "Title", "here", "who", (A, B), (CLAIM,))
    text = AblationTables(factor, (A, B), scores, verdicts(factor, scores, (A, B)), SETTING, 2).markdown()
    assert "⚑ |" in text
    assert "a: collapse at 1, 2" in text
    assert "| *real text* | 5.00 [4.00, 6.00] | 7.00" in text
    assert "The paper prints no numbers for this." in text


def test_means_of_ratios_are_geometric():
    assert METRICS["token_perplexity"].mean([10.0, 1000.0]).value == pytest.approx(100)
    assert METRICS["entropy_bits"].mean([6.0, 7.0]).value == pytest.approx(6.5)
