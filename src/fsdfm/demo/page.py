"""The page: stories with their timelines beside what was measured, in one file without a script."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from fsdfm.demo.stored import CALLED, StoredSamples, evaluate_commands
from fsdfm.demo.stories import Order, Programme, Story
from fsdfm.measure.results import Measured
from fsdfm.serve.page import static_page
from fsdfm.show.quality.comparison import Comparison
from fsdfm.show.quality.metrics import metric_named
from fsdfm.show.quality.report import facts_in_words, judge_in_words
from fsdfm.show.quality.tables import FLAG, Table, matched_table, metric_table, model_tables
from fsdfm.show.timeline import timeline_html_fragment
from fsdfm.show.timeline.glyphs import visible

__all__ = ["Page", "measured_section", "notices", "page_html", "stories_section"]

_KINDS = {"infill": "Gaps filled · ", "repair": "Damage repaired · "}
PERPLEXITY, ENTROPY = metric_named("token_perplexity"), metric_named("entropy_bits")
NO_CHILD = "This build holds no few-step model yet: everything here is made by its undistilled parent."
NO_RESULTS = "This build holds no measured results yet, so the page cannot say how good these stories are."
OTHER_WEIGHTS = "The numbers of {} were measured with other weights than those of this build."


@dataclass(frozen=True)
class Page:
    """What the page shows.

    programme   the sections of what was made
    made        the story of every order
    plot        quality against calls, an SVG picture; None: nothing was measured
    stale       the models whose stored numbers are of other weights
    machine     where the stories were made, in a sentence
    """

    programme: Programme
    made: Mapping[Order, Story]
    stored: StoredSamples
    plot: bytes | None
    stale: Sequence[str]
    machine: str

    def stories(self, orders: Iterable[Order]) -> list[Story]:
        """The stories of these orders."""
        return [self.made[order] for order in orders]


def page_html(page: Page) -> str:
    """One self-contained page, light or dark as the reader's system is."""
    best, comparison = page.programme.more[0].model, page.stored.comparison
    known = [NO_CHILD] if best == "parent" else []
    known += [NO_RESULTS] if comparison is None else []
    few = page.programme.more[0].steps
    parts = [
        f"<header><h1>Stories in {_calls(few)} of a network</h1>",
        "<p class='lede'>A discrete flow writes all tokens of a story at once, from random tokens to text. Its parent "
        "model wants about a thousand network calls for that; the few-step model takes large steps, and draws the "
        "tokens of a step so that they agree. "
        "Colours tell at which step a token was last changed. "
        "<label><input type='checkbox' id='plain'> plain text</label></p>",
        _notices(known) + notices(page.stale),
        _tiles(page, comparison) if comparison else "",
        "</header>",
        _section(
            "The same noise, side by side",
            _cards(page.stored, page.stories(page.programme.beside), columns=3),
            "Every one of them set out from the same random tokens.",
        ),
        _section(
            f"More in {_calls(few)}",
            _cards(page.stored, page.stories(page.programme.more)),
            "With a beginning, and from nothing.",
        ),
        _section(
            f"Filled in and repaired in {_calls(few)}",
            _cards(page.stored, page.stories(page.programme.mended)),
            "What is given stands fast; only the rest is written.",
        ),
        _section(
            "In other numbers of calls",
            _cards(page.stored, page.stories(page.programme.fewer), columns=3),
            "The first story again, from the same noise.",
        ),
        measured_section(comparison, page.plot) if comparison else "",
        stories_section(page.stored),
        f"<footer><p>{escape(page.machine)} The same command gives the same text on the same kind of machine; another "
        "processor may round differently, and a last digit can become another word.</p></footer>",
    ]
    return static_page("\n".join(part for part in parts if part), title="fsdfm: stories in a few network calls")


def notices(stale: Sequence[str]) -> str:
    """What a reader must know where numbers are of other weights."""
    return _notices([OTHER_WEIGHTS.format(name) for name in stale])


def _notices(sentences: Sequence[str]) -> str:
    return "".join(f"<p class='notice'>{escape(sentence)}</p>" for sentence in sentences)


def stories_section(stored: StoredSamples) -> str:
    """Texts that took long, made beforehand; nothing where there are none."""
    words = "Made beforehand; the seconds are those of that machine."
    return _section("More that took long", _cards(stored, stored.stories), words) if stored.stories else ""


# --- stories ----------------------------------------------------------------------------------------------------------


def _cards(stored: StoredSamples, stories: Iterable[Story], *, columns: int = 2) -> str:
    cards = "\n".join(_card(stored, story) for story in stories)
    return f"<div class='cards of-{columns}'>\n{cards}\n</div>"


def _card(stored: StoredSamples, story: Story) -> str:
    asked = f"<p class='asked'><b>Given</b> {escape(visible(story.asked))}</p>" if story.asked else ""
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in story.notes)
    made = f"{_seconds(story.seconds)} · seed {escape(str(story.seed))}"
    return f"""<article>
<h3>{_called(story.model)} <span class="calls">{_calls(story.calls)}</span></h3>
<p class="facts">{_KINDS.get(story.command, "")}{made}{_quality(stored, story)}</p>
{asked}{timeline_html_fragment(story.timeline)}
{notes}{_code(story.shell)}
</article>"""


def _quality(stored: StoredSamples, story: Story) -> str:
    """What was measured of texts that are made like this one: from nothing, by this model in so many calls."""
    if any(story.timeline.given) or not stored.evaluations:
        return ""
    row = stored.row(story.model, story.calls)
    if row is None:
        return "<br>Texts made like this one were not measured."
    numbers = (("perplexity", _perplexity(row.metrics, row.flags), ""), ("entropy", _entropy(row.metrics), " bits"))
    return "<br>Texts made like this one:" + "".join(f"<br>{name} {value}{unit}" for name, value, unit in numbers)


def _perplexity(metrics: Mapping[str, Measured], flags: Sequence[str] = ()) -> str:
    """The perplexity with its interval, and with its flag where it must not be read alone."""
    flag = f" <span title='{escape('; '.join(flags))}'>{FLAG}</span>" if flags else ""
    return f"<b>{_interval(PERPLEXITY.write(metrics.get(PERPLEXITY.name)))}</b>{flag}"


def _entropy(metrics: Mapping[str, Measured]) -> str:
    return f"<b>{_interval(ENTROPY.write(metrics.get(ENTROPY.name)))}</b>"


def _interval(text: str) -> str:
    value, bracket, rest = text.partition(" [")
    return f"{value}</b> <small>[{rest}</small><b>" if bracket else value


def _code(shell: str) -> str:
    """A command that breaks between options, not within one."""
    words = re.sub(r"(--[a-z-]+ [^ ]+)", r"<span>\1</span>", escape(shell))
    return f"<pre><code>{words}</code></pre>"


def _called(model: str) -> str:
    return escape(CALLED.get(model, model))


def _calls(calls: int) -> str:
    return f"{calls:,} call{'' if calls == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


# --- numbers ----------------------------------------------------------------------------------------------------------


def _tiles(page: Page, comparison: Comparison) -> str:
    """The headline: every kind of story that stands side by side, and real text, with its numbers."""
    rows = [(order.model, page.stored.row(order.model, order.steps)) for order in page.programme.beside]
    judge = str(comparison.evaluations[0].judge.get("name", "no judge")) + comparison.marks.sign(PERPLEXITY.name)
    tiles = [
        _tile(
            f"{_called(model)} <span class='calls'>{_calls(row.num_calls)}</span>", judge, row.metrics, flags=row.flags
        )
        for model, row in rows
        if row is not None
    ]
    real = comparison.reals[0].metrics
    return f"<div class='tiles'>{''.join(tiles)}{_tile('Real text', judge, real)}</div>"


def _tile(name: str, judge: str, metrics: Mapping[str, Measured], *, flags: Sequence[str] = ()) -> str:
    return (
        f"<div><h3>{name}</h3><p class='big'>{_perplexity(metrics, flags)}</p><p>perplexity under {escape(judge)}</p>"
        f"<p class='second'>{_entropy(metrics)} bits of entropy</p></div>"
    )


def measured_section(comparison: Comparison, plot: bytes | None) -> str:
    """What was measured: the picture, the tables, and how to measure it again."""
    tables = [metric_table(comparison, m) for m in (PERPLEXITY, ENTROPY) if m.name in comparison.metric_names()]
    if (matched := matched_table(comparison)) is not None:
        tables.append(matched)
    further = [
        table
        for label, e in comparison.pairs
        for table in model_tables(label, e, comparison.real_of(label), marks=comparison.marks_of(label))
    ]
    picture = ""
    if plot is not None:
        source = b64encode(plot).decode()
        picture = (
            '<div class="scroll"><img class="plot" alt="Perplexity and entropy against network calls" '
            f'src="data:image/svg+xml;base64,{source}"></div>'
        )
    how = "".join(
        f"<h4>{_called(label)}</h4><p>{escape(facts_in_words(e))}</p>" + "".join(map(_code, evaluate_commands(e)))
        for label, e in comparison.pairs
    )
    words = (
        f"{judge_in_words(comparison.evaluations[0].judge)} Brackets are 95 % intervals. Perplexity never "
        "stands alone: text that repeats itself is easy to predict, so the entropy is beside it, and ⚑ marks what left "
        "the band of real text."
    )
    body = (
        f"{picture}{''.join(map(_table, tables))}"
        f"<details><summary>All that was measured</summary>{''.join(map(_table, further))}</details>"
        f"<details><summary>How it was measured, and how to measure it again</summary>{how}</details>"
    )
    return _section("Measured quality", body, words)


def _table(table: Table) -> str:
    caption = f"<p class='note'>{escape(table.caption)}</p>" if table.caption else ""
    return f"<h4>{escape(table.title)}</h4>{caption}<div class='scroll'>{table.to_html()}</div>"


def _section(title: str, body: str, words: str = "") -> str:
    lead = f"<p>{escape(words)}</p>" if words else ""
    return f"<section><h2>{escape(title)}</h2>{lead}\n{body}</section>"
