"""The one page: the playground of the server, and the same page without it, as one file, for `fsdfm demo`.

index.html   the frame; page.css and page.js beside it. No build, nothing from elsewhere.
"""

from __future__ import annotations

from importlib import resources

from fsdfm.show.timeline import TIMELINE_STYLE
from fsdfm.show.timeline.colours import DARK, LIGHT, Theme

__all__ = ["page_files", "static_page"]

_FOLDER = resources.files("fsdfm.serve.page")


def page_files(extra: str = "") -> dict[str, tuple[str, str]]:
    """What a server serves: path -> (content, media type); `extra` is HTML below the playground."""
    html = _frame(
        title="fsdfm: few-step text",
        head='<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>',
        body=f"{_read('playground.html')}\n{extra}",
    )
    return {
        "/": (html, "text/html; charset=utf-8"),
        "/page.css": (_style(), "text/css; charset=utf-8"),
        "/page.js": (_read("page.js"), "text/javascript; charset=utf-8"),
    }


def static_page(body: str, *, title: str) -> str:
    """The same page as one file without a script: `body` is what it shows."""
    return _frame(title=title, head=f"<style>\n{_style()}\n</style>", body=body)


def _frame(**parts: str) -> str:
    html = _read("index.html")
    for name, content in parts.items():
        html = html.replace(f"<!--{name}-->", content)
    return html


def _style() -> str:
    return f"{_variables()}\n{TIMELINE_STYLE}\n{_read('page.css')}"


def _variables() -> str:
    """The timeline's colours, for all of the page."""

    def of(theme: Theme) -> str:
        return f"--page:{theme.page};--ink:{theme.ink};--faint:{theme.faint};--mark:{theme.mark}"

    return (
        f":root{{color-scheme:light dark;{of(LIGHT)};--ground:#f3f4f7;--edge:#c9ced8;--accent:#3b4a8f;"
        "--on-accent:#fff}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{of(DARK)};--ground:#0b0d10;--edge:#3a414c;--accent:#a9b6ff;"
        "--on-accent:#0b0d10}.plot{filter:invert(1) hue-rotate(180deg)}}"
    )


def _read(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")
