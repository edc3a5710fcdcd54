"""Text in, text out: the `lm` object, what it is asked and what it answers.

Reading order: config (how to sample), request (what is given), blind (what is wrong in a text of unknown damage),
run (the one loop), result, model (`load`, `lm`).
"""

from fsdfm.generate.blind import (
    FALSE_ALARMS,
    consistent_time,
    expected_agreement,
    find_damage,
    find_recurring,
    leave_one_out,
)
from fsdfm.generate.budget import EntropyCurve, fit_curve
from fsdfm.generate.config import MAX_STEPS, SamplerConfig, SamplerOptions, check_advice, read_advice
from fsdfm.generate.model import Corruption, LanguageModel, Stream, load
from fsdfm.generate.request import Begin, Request
from fsdfm.generate.result import Generation, State, pieces_of

__all__ = [
    "FALSE_ALARMS",
    "MAX_STEPS",
    "Begin",
    "Corruption",
    "EntropyCurve",
    "Generation",
    "LanguageModel",
    "Request",
    "SamplerConfig",
    "SamplerOptions",
    "State",
    "Stream",
    "check_advice",
    "consistent_time",
    "expected_agreement",
    "find_damage",
    "find_recurring",
    "fit_curve",
    "leave_one_out",
    "load",
    "pieces_of",
    "read_advice",
]
