"""Text in, text out: the `lm` object, what it is asked and what it answers.

Reading order: settings (how to sample), request (what is given), blind (where a text of unknown damage stands in time),
walk (the one loop), result, model (`load`, `lm`).
"""

from fsdfm.text.blind import consistent_time, expected_agreement
from fsdfm.text.model import Corruption, LanguageModel, Stream, load
from fsdfm.text.request import Begin, Request
from fsdfm.text.result import Generation, State, pieces_of
from fsdfm.text.settings import MAX_STEPS, Options, Settings

__all__ = [
    "MAX_STEPS",
    "Begin",
    "Corruption",
    "Generation",
    "LanguageModel",
    "Options",
    "Request",
    "Settings",
    "State",
    "Stream",
    "consistent_time",
    "expected_agreement",
    "load",
    "pieces_of",
]
