"""The timeline of appendix D.4: the final text, each token coloured by the step at which it last changed.

Reading order: tokens (bins of steps), colours (how a bin looks), glyphs (any piece of text, made visible), record (the
Timeline), then the media: terminal, live (the terminal while it happens), html, layout and png.
"""

from fsdfm.show.timeline.html import TIMELINE_STYLE, notebook_html, page, timeline_html_fragment
from fsdfm.show.timeline.live import LiveText
from fsdfm.show.timeline.record import Timeline

__all__ = ["TIMELINE_STYLE", "LiveText", "Timeline", "notebook_html", "page", "timeline_html_fragment"]
