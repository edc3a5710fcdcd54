"""Judges: language models that say how likely a text is.

Reading order: scoring (what a judge is, the one loop), causal (ours), huggingface, calibration (by name; the scale).
"""

from fsdfm.measure.judges.calibration import Calibration, calibrate, make_judge, shuffle_words
from fsdfm.measure.judges.causal import causal_judge, llama2c_judge, load_causal, save_causal
from fsdfm.measure.judges.scoring import Judge, Scores, TokenJudge

__all__ = [
    "Calibration",
    "Judge",
    "Scores",
    "TokenJudge",
    "calibrate",
    "causal_judge",
    "llama2c_judge",
    "load_causal",
    "make_judge",
    "save_causal",
    "shuffle_words",
]
