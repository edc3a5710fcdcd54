"""Docstrings on the API pages: aligned lists of names and what they mean become Markdown lists.

    steps   network calls
    seed    the same seed gives the same text,
            whatever the batch

reads well in a terminal, and Markdown would run it together into one paragraph.
"""

import re
from typing import Any

from griffe import Extension, Object

_ITEM = re.compile(r"([\w*][\w*., ()=/\[\]-]*?) {2,}(\S.*)")


class AlignedLists(Extension):
    """Rewrites every docstring as it is collected."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """The text with its aligned lists as Markdown lists, and no character taken for a tag."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = _ITEM.fullmatch(line)
        if found is not None:
            lines += [] if inside else [""]
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line.startswith("  ") and line.strip():
            lines.append(f"  {line.strip()}")
            continue
        else:
            lines += ["", line] if inside and line.strip() else [line]
        inside = found is not None
    return "\n".join(line if line.startswith("    ") else _escaped(line) for line in lines)


def _escaped(line: str) -> str:
    """Outside of code, `<left, right>` is no tag."""
    parts = line.split("`")
    return "`".join(part if place % 2 else re.sub(r"<(?=\w)", "&lt;", part) for place, part in enumerate(parts))
