"""Formulas of the documentation: LaTeX becomes MathML while the site is built, so that it needs no script.

A formula of its own stands between lines of $$, one inside of a line between $` and `$, as GitHub writes them.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_DISPLAYED = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`([^`\n]+)`\$")
_FUNCTION = re.compile(
    r"(?<!<msub>)(<mi>(?:log|ln)</mi>)(?!<mo)"
)  # wants a space before a letter, none before a bracket


_WITH_BASE = re.compile(r"(<msub><mi>(?:log|ln)</mi><mn>\d+</mn></msub>)(?=<mi>)")
_FOR_BROWSERS = {
    "<mi>&#x0007E;</mi>": "<mo>&#x0223C;</mo>",  # "is drawn from" is a relation, with space around it
    'mathvariant="bold"': 'style="font-weight: bold"',  # the attribute does nothing in MathML Core
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with every formula converted; inside of a line in a span, else a line that begins so is a block."""
    markdown = _DISPLAYED.sub(lambda found: f"<div>{_mathml(found[1], 'block')}</div>", markdown)
    return _INLINE.sub(lambda found: f"<span>{_mathml(found[1], 'inline')}</span>", markdown)


def _mathml(latex: str, display: str) -> str:
    formula = convert(latex, display=display)
    for given, wanted in _FOR_BROWSERS.items():
        formula = formula.replace(given, wanted)
    for function in (_FUNCTION, _WITH_BASE):
        formula = function.sub(r'\1<mspace width="0.17em" />', formula)
    return formula
