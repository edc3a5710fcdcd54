"""Numbers that callers give: what is wrong with one is a sentence with its value and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any

__all__ = ["require_number", "require_whole"]


def require_whole(name: str, value: Any, low: int, *, high: int | None = None) -> int:
    """The value as an int if it is a whole number, low <= value <= high, of a whole number's type."""
    try:
        found = operator.index(value)
        right = not isinstance(value, bool) and low <= found and (high is None or found <= high)
    except TypeError:
        right, found = False, 0
    if not right:
        allowed = f">= {low}" if high is None else f"{low} <= {name} <= {high}"
        raise ValueError(f"{name} is {value!r:.80}; allowed are whole numbers {allowed}")
    return found


def require_number(name: str, value: Any, allowed: str) -> float:
    """The value as a float if it is a number and not NaN; `allowed` says which."""
    if isinstance(value, bool | str) or not hasattr(value, "__float__") or math.isnan(float(value)):
        raise ValueError(f"{name} is {value!r:.80}; allowed are {allowed}")
    return float(value)
