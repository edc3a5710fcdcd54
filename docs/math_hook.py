"""Formulas of the documentation: $$ LaTeX $$ becomes MathML while the site is built, so that it needs no script."""

import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with every block between lines of $$ converted."""
    return _FORMULA.sub(lambda found: f"<div>{convert(found[1], display='block')}</div>", markdown)
