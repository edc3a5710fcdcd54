"""Measurement: metrics, their intervals, judges, the likelihood bound and the collapse guard.

Reading order: metrics, copying, judges, statistics, collapse, nll_bound, mauve; evaluation, which runs them.
"""

from fsdfm.measure.collapse import TOLERANCE, Flag, Tolerance, leave_band
from fsdfm.measure.copying import Copying, find_copies
from fsdfm.measure.judges import Calibration, Judge, Scores, TokenJudge, calibrate, make_judge
from fsdfm.measure.mauve import Features, Mauve, compute_mauve, minilm_features
from fsdfm.measure.metrics import (
    EntropyMeter,
    count_jumps,
    distinct_n,
    distribution_entropy_bits,
    duplicates,
    repetition,
    replace_tokens,
    self_bleu,
    token_accuracy,
    unigram_entropy_bits,
    unigram_entropy_nats,
)
from fsdfm.measure.nll_bound import Bound, nll_bound
from fsdfm.measure.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    draw_ratios,
    gap_closed,
    interval_of,
    jackknife,
    sequence_perplexity,
    student_mean,
    token_perplexity,
)

__all__ = [
    "TOLERANCE",
    "Bound",
    "Calibration",
    "Copying",
    "EntropyMeter",
    "Features",
    "Flag",
    "Interval",
    "Judge",
    "Mauve",
    "Scores",
    "TokenJudge",
    "Tolerance",
    "bootstrap_mean",
    "bootstrap_ratio",
    "calibrate",
    "compute_mauve",
    "count_jumps",
    "distinct_n",
    "distribution_entropy_bits",
    "draw_ratios",
    "duplicates",
    "find_copies",
    "gap_closed",
    "interval_of",
    "jackknife",
    "leave_band",
    "make_judge",
    "minilm_features",
    "nll_bound",
    "repetition",
    "replace_tokens",
    "self_bleu",
    "sequence_perplexity",
    "student_mean",
    "token_accuracy",
    "token_perplexity",
    "unigram_entropy_bits",
    "unigram_entropy_nats",
]
