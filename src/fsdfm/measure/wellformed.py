"""Simple checks that a reader of a story makes: do names stay, do sentences end, are quotes closed?

Each is a share of texts that pass, taken where there is something to check; real text does not reach 1 either, so the
share of real text stands beside it. They look at characters only and know no language model.

    check_texts(texts)["quotes_close"]   # 1.0 passes, 0.0 fails, nan: nothing to check, one number per text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["CHECKS", "check_texts", "names_kept", "quotes_close", "sentences_end"]

Floats = npt.NDArray[np.float64]
_NAN = float("nan")
_NAME = re.compile(r"(?<![.!?\"\u201c\u201d\n] )(?<![.!?\"\u201c\u201d\n])(?<!^)\b([A-Z][a-z]+)\b")
_CAPITALISED = re.compile(r"\b[A-Z][a-z]+\b")
_CLOSERS = "\"'\u201d\u2019)"
_INTRODUCED = 0.5  # names must all be heard of in this first part of a text
_NO_NAMES = frozenset(
    ("I", "Mr", "Mrs", "Ms", "Dr", "Mom", "Mommy", "Mum", "Dad", "Daddy", "Grandma", "Grandpa", "God")
)


def names_kept(text: str) -> float:
    """1 where the second half of a text names nobody new: every name in it stood in the first half; nan: no name there.

    A name is a capitalised word inside a sentence. Stories seldom bring in somebody new at the end, samplers that lose
    the thread do.
    """
    middle = _middle(text)
    late = {found[1] for found in _NAME.finditer(text, 1) if found.start() >= middle} - _NO_NAMES
    return float(late <= set(_CAPITALISED.findall(text[:middle]))) if late else _NAN


def _middle(text: str) -> int:
    """The end of the word at which half of the text is over."""
    place = text.find(" ", int(len(text) * _INTRODUCED))
    return len(text) if place < 0 else place


def sentences_end(text: str) -> float:
    """1 where every paragraph but the last ends with . ! or ?, quotes behind it left out; nan: there is only one.

    The last one may be cut off by the length of a sample, which is no fault.
    """
    paragraphs = [part.strip() for part in text.split("\n") if part.strip()]
    if len(paragraphs) < 2:
        return _NAN
    return float(all(part.rstrip(_CLOSERS)[-1:] in tuple(".!?") for part in paragraphs[:-1]))


def quotes_close(text: str) -> float:
    """1 where the quotes of every paragraph but the last come in pairs; nan: there are no quotes in them.

    Straight quotes must be even in number, curly ones open before they close.
    """
    paragraphs = [part for part in text.split("\n") if part.strip()][:-1]
    quoted = [part for part in paragraphs if any(mark in part for mark in '"\u201c\u201d')]
    return float(all(map(_balanced, quoted))) if quoted else _NAN


def _balanced(paragraph: str) -> bool:
    if paragraph.count('"') % 2:
        return False
    depth = 0
    for character in paragraph:
        depth += (character == "\u201c") - (character == "\u201d")
        if depth not in (0, 1):
            return False
    return depth == 0


CHECKS = {"names_kept": names_kept, "sentences_end": sentences_end, "quotes_close": quotes_close}
"""By the name of the metric."""


def check_texts(texts: Sequence[str]) -> Mapping[str, Floats]:
    """Every check of every text: float64 [N] each, 1 passed, 0 failed, nan nothing to check."""
    return {name: np.array([check(text) for text in texts], dtype=np.float64) for name, check in CHECKS.items()}
