"""The whole demonstration in one call: make the stories, read what is stored, write the page and the pictures."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from fsdfm.checkpoint.embedded import embedded_models, find_model, stored_demo
from fsdfm.demo.page import Page, measured_section, notices, page_html, stories_section
from fsdfm.demo.stored import SavedSamples, read_stored
from fsdfm.demo.stories import Programme, make_stories
from fsdfm.files import replace_file, write_text
from fsdfm.generate import LanguageModel, load
from fsdfm.model.weights import weights_sha256
from fsdfm.runtime import versions
from fsdfm.show.folder import progress, writable_folder
from fsdfm.show.plots import require_plots
from fsdfm.show.quality.figures import draw_quality
from fsdfm.show.quality.report import DPI
from fsdfm.show.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LONG", "measured_fragment", "write_demo"]

LONG = 1024  # network calls of the parent's long story


def write_demo(
    out: str | os.PathLike[str],
    *,
    long: int = LONG,
    stored: Path | None = None,
    models: Mapping[str, LanguageModel] | None = None,
    console: Console | None = None,
) -> tuple[Path, Timeline]:
    """Write index.html, timeline.png and, where there are results, quality.png; the page and its first story.

    long      network calls of the parent's long story
    stored    a folder of results and stories; that of the package unless said
    models    the embedded ones unless said, the best first
    console   where the progress bar is drawn; standard error by default
    """
    require_plots()
    folder = writable_folder(out)
    if models is None:
        find_model(None)  # an error where there is none
        # Products this small are not worth sharing: on busy cores two threads make a call ten times slower.
        models = {name: load(name, threads=1) for name in embedded_models()}
    known = read_stored(stored or stored_demo(), {name: lm.checkpoint.loaded for name, lm in models.items()})
    few = next(iter(models.values())).sampler_config().num_steps()
    programme = Programme.of(list(models), known.sampling, long=long, few=few)
    with progress("stories", sum(order.steps for order in programme.orders), console) as tick:
        made = make_stories(programme.orders, models, tick)
    first = made[programme.beside[0]].timeline
    page = Page(
        programme,
        made,
        known,
        plot=_draw(known, folder),
        stale=[name for name, lm in models.items() if _is_stale(known, name, lm)],
        machine=_machine(next(iter(models.values()))),
    )
    index = folder / "index.html"
    replace_file(folder / "timeline.png", first.save_png)
    write_text(index, page_html(page))
    return index, first


def measured_fragment(models: Mapping[str, LanguageModel]) -> str:
    """What was measured of the embedded models that are served, as HTML for their page; nothing where none is.

    Without matplotlib the picture is missing. Numbers of other weights than those served say so.
    """
    known = read_stored(stored_demo(), {name: lm.checkpoint.loaded for name, lm in models.items()})
    if not known.evaluations or not any(name in known.evaluations for name in models):
        return ""
    stale = [name for name, lm in models.items() if _is_stale(known, name, lm)]
    comparison = known.comparison
    assert comparison is not None
    return notices(stale) + measured_section(comparison, _svg(known)) + stories_section(known)


def _svg(known: SavedSamples) -> bytes | None:
    try:
        require_plots()
    except ValueError:
        return None
    figure = None if known.comparison is None else draw_quality(known.comparison)
    return None if figure is None else _to_svg(figure)


def _to_svg(figure: Figure) -> bytes:
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return svg.getvalue()


def _draw(known: SavedSamples, folder: Path) -> bytes | None:
    """Quality against calls: quality.png in the folder, and the same as SVG for the page."""
    figure = None if known.comparison is None else draw_quality(known.comparison)
    if figure is None:
        return None
    replace_file(folder / "quality.png", partial(figure.savefig, format="png", dpi=DPI))
    return _to_svg(figure)


def _is_stale(known: SavedSamples, name: str, lm: LanguageModel) -> bool:
    """Whether the stored numbers of a model are of other weights than these."""
    if name not in known.evaluations:
        return False
    return known.evaluations[name].model.get("checkpoint_sha256") != weights_sha256(lm.checkpoint.model)


def _machine(lm: LanguageModel) -> str:
    about = versions()
    threads = f", {torch.get_num_threads()} threads" if lm.runtime.device.type == "cpu" else ""
    return f"Made on {lm.runtime.device}{threads}, fsdfm {about['fsdfm']}, torch {about['torch']}, {about['platform']}."
