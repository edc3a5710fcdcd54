"""Whether pictures can be drawn: matplotlib and pillow are optional, and an error says what to install."""

from __future__ import annotations

import importlib.util

__all__ = ["require_plots"]


def require_plots() -> None:
    """Raise ValueError where matplotlib or pillow is missing."""
    missing = [name for name in ("matplotlib", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"pictures need {' and '.join(missing)}; install them with: pip install 'fsdfm[plots]'")
