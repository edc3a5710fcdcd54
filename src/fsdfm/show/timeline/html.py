"""The timeline as HTML: fragments that go together on one self-contained page, without a script or another file.

A reader sees a token's step as its colour, on hovering, and with "step numbers" ticked as a small number behind every
run of tokens of one bin; the numbers are always there under forced colours. Hovering or focusing a legend entry dims
all other tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from fsdfm.show.timeline.colours import DARK, LIGHT, NUM_HUES, Theme
from fsdfm.show.timeline.glyphs import NEWLINE, visible
from fsdfm.show.timeline.tokens import LEGEND_TITLE, Key, Token

if TYPE_CHECKING:
    from fsdfm.show.timeline.record import Timeline

__all__ = ["TIMELINE_STYLE", "notebook_html", "page", "timeline_html_fragment"]


def _variables(theme: Theme) -> str:
    hues = "".join(f"--k{index}:{hue};" for index, hue in enumerate(theme.hues))
    return f"--page:{theme.page};--ink:{theme.ink};--faint:{theme.faint};--mark:{theme.mark};{hues}"


def _dim_others(name: str) -> str:
    entry = f".fsdfm-timeline:has(.legend .{name}:is(:hover,:focus))"
    return f"{entry} .text>:not(.{name}){{opacity:.18}}"


_HUES = [f"k{index}" for index in range(NUM_HUES)]

TIMELINE_STYLE = f"""
.fsdfm-timeline{{color-scheme:light dark;{_variables(LIGHT)}
 margin:0 0 2.5rem;color:var(--ink);background:var(--page);font:1rem/1.75 system-ui,sans-serif}}
@media (prefers-color-scheme:dark){{.fsdfm-timeline{{{_variables(DARK)}}}}}
.fsdfm-timeline figcaption{{font-size:.875rem;margin-bottom:.75rem}}
.fsdfm-timeline .caption{{font-size:1.05rem;font-weight:600;display:block}}
.fsdfm-timeline .note,.fsdfm-timeline label{{color:var(--faint)}}
.fsdfm-timeline .legend{{list-style:none;display:flex;flex-wrap:wrap;gap:.35rem 1rem;margin:.25rem 0;padding:0}}
.fsdfm-timeline .legend>li>span{{cursor:default}}
.fsdfm-timeline .legend>li>:is([data-bin],.marked){{padding:.1rem .5rem;margin-right:.2rem}}
.fsdfm-timeline .text{{white-space:pre-line;overflow-wrap:anywhere;margin:0}}
.fsdfm-timeline .space{{white-space:pre-wrap}}
.fsdfm-timeline .text>span,.fsdfm-timeline .legend>li>span:first-child{{border-radius:.2rem;
 -webkit-box-decoration-break:clone;box-decoration-break:clone;print-color-adjust:exact;-webkit-print-color-adjust:exact}}
.fsdfm-timeline .text>span{{padding:.12rem 0;box-shadow:inset -1px 0 var(--page)}}
.fsdfm-timeline .text>span:hover{{outline:1px solid var(--ink)}}
.fsdfm-timeline .kept{{color:var(--faint)}}
.fsdfm-timeline .marked{{box-shadow:inset 0 0 0 1.5px var(--mark)!important}}
.fsdfm-timeline .text>.marked{{padding-right:.15rem;-webkit-box-decoration-break:slice;box-decoration-break:slice}}
.fsdfm-timeline .newline{{font-style:normal;opacity:.6;user-select:none;-webkit-user-select:none}}
.fsdfm-timeline:has(input:checked) [data-bin]::after{{content:attr(data-bin);font-size:.65em;vertical-align:super}}
@media (forced-colors:active){{.fsdfm-timeline [data-bin]::after{{content:attr(data-bin);font-size:.65em;
 vertical-align:super}}}}
{" ".join(f".fsdfm-timeline .{hue}{{background:var(--{hue})}}" for hue in _HUES)}
{" ".join(_dim_others(name) for name in (*_HUES, "kept", "given", "marked"))}
""".strip()
"""The style sheet of every fragment; `page` brings it, another page needs it once."""

_PAGE_STYLE = f"""
:root{{color-scheme:light dark;--page:{LIGHT.page};--ink:{LIGHT.ink}}}
@media (prefers-color-scheme:dark){{:root{{--page:{DARK.page};--ink:{DARK.ink}}}}}
body{{max-width:52rem;margin:2rem auto;padding:0 1rem;background:var(--page);color:var(--ink);
 font:1rem/1.6 system-ui,sans-serif}}
h1{{font-size:1.35rem}}
""".strip()


def page(parts: Iterable[Timeline | str], *, title: str = "Timeline") -> str:
    """A self-contained page of timelines and of HTML fragments (strings, taken as they are), in the order given."""
    body = "\n".join(part if isinstance(part, str) else timeline_html_fragment(part) for part in parts)
    shown = escape(visible(title))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{shown}</title>
<style>
{_PAGE_STYLE}
{TIMELINE_STYLE}
</style>
</head>
<body>
<h1>{shown}</h1>
{body}
</body>
</html>
"""


def notebook_html(timeline: Timeline) -> str:
    """One timeline with its style, for a cell of a notebook: no script, every character of the text escaped."""
    return f"<style>\n{TIMELINE_STYLE}\n</style>\n{timeline_html_fragment(timeline)}"


def timeline_html_fragment(timeline: Timeline, caption: str = "") -> str:
    """One timeline as a <figure> with its legend; the page around it must hold TIMELINE_STYLE once."""
    heading = f'<span class="caption">{escape(visible(caption))}</span>\n' if caption else ""
    legend = "\n".join(map(_entry, timeline.legend))
    return f"""<figure class="fsdfm-timeline">
<figcaption>
{heading}<span class="note">{LEGEND_TITLE}</span>
<ul class="legend">
{legend}
</ul>
<label><input type="checkbox"> step numbers</label>
</figcaption>
<p class="text" dir="auto">{"".join(_spans(timeline))}</p>
</figure>"""


def _entry(key: Key) -> str:
    names = _classes(key)
    number = f' data-bin="{key.bin.number}"' if key.bin else ""
    words = f"step {key.label}" if key.bin else key.label
    return f'<li><span class="{names}" tabindex="0"{number}>{words}</span> {key.count}</li>'


def _spans(timeline: Timeline) -> Iterator[str]:
    tokens, before = timeline.tokens, "\n"
    for token, following in zip(tokens, (*tokens, None)[1:], strict=True):
        ends_run = token.bin and (following is None or following.bin != token.bin)
        number = f' data-bin="{token.bin.number}"' if token.bin and ends_run else ""
        shown = visible(token.piece)
        hint = _hint(token, timeline.steps)
        text = _markup(shown, before)
        words = text.removesuffix("\n")  # the number stands at the end of its line, not before the next one
        yield f'<span class="{_classes(token)}" title="{hint}"{number}>{words}</span>{text[len(words) :]}'
        before = shown[-1]


def _markup(shown: str, before: str) -> str:
    """Escaped text; a space after white space is kept by its own element, the others may vanish where a line ends."""
    text = escape(shown).replace(f"{NEWLINE}\n", f'<i class="newline">{NEWLINE}</i>\n')
    lone = r"\A +" if before.isspace() else r"(?!)"
    return re.sub(rf"{lone}|(?<=\s) +", lambda spaces: f'<span class="space">{spaces[0]}</span>', text)


def _classes(look: Token | Key) -> str:
    hue = [f"k{look.bin.hue}"] if look.bin else []
    return " ".join(hue + [name for name in ("kept", "given", "marked") if getattr(look, name)])


def _hint(token: Token, steps: int) -> str:
    when = (
        f"last changed at step {token.step} of {steps}" if token.step else "given" if token.given else "never changed"
    )
    return f"{when}; was corrupted" if token.marked else when
