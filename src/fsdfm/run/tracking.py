"""Where a run's numbers and texts go beside its own files: `train.tracker` names one of these.

    auto          TensorBoard where it is installed, else nothing
    none          nothing
    tensorboard   the run's folder, `tensorboard --logdir runs`
    trackio       trackio's own folder on this machine, `trackio show`; nothing is sent anywhere
    wandb         Weights & Biases, as its own settings say: WANDB_MODE=offline keeps everything here

Numbers are logged as they are, sampled texts as words, their timelines as a page (trackio, wandb) or a picture
(TensorBoard, where the extra `plots` is installed). A tracker that fails while the run continues is dropped with a
warning: no run is lost to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from fsdfm.learn.trainer import TRACKER_NAMES
from fsdfm.show.timeline import Timeline, page

__all__ = ["TRACKERS", "SafeTracker", "Tracker", "open_tracker"]

PROJECT = "fsdfm"


class Tracker(Protocol):
    """Takes what a run says at a training step."""

    def log(self, training_step: int, scalars: Mapping[str, float]) -> None:
        """Numbers by name."""

    def show(self, training_step: int, texts: Sequence[Timeline]) -> None:
        """Sampled texts and how they came about."""

    def close(self) -> None:
        """The run ends."""


class _TensorBoard:
    def __init__(self, folder: Path, config: Mapping[str, Any]):  # noqa: ARG002 (one signature for all of its kind)
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, training_step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, training_step)
        self.writer.flush()

    def show(self, training_step: int, texts: Sequence[Timeline]) -> None:
        for number, text in enumerate(texts):
            self.writer.add_text(f"sample/{number}", _indented(_words(text)), training_step)
            if find_spec("matplotlib") is not None:
                self.writer.add_image(f"timeline/{number}", _picture(text), training_step, dataformats="HWC")
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _Trackio:
    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import trackio

        self.trackio: Any = trackio
        self.run = trackio.init(
            project=PROJECT, name=folder.name, config=dict(config), resume="allow", auto_log_gpu=False, embed=False
        )

    def log(self, training_step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=training_step)

    def show(self, training_step: int, texts: Sequence[Timeline]) -> None:
        shown = {
            f"sample/{number}": self.trackio.Markdown(_indented(_words(text))) for number, text in enumerate(texts)
        }
        shown["timelines"] = self.trackio.Html(_page(training_step, texts))
        self.run.log(shown, step=training_step)

    def close(self) -> None:
        self.run.finish()


class _Wandb:
    def __init__(self, folder: Path, config: Mapping[str, Any]):
        import wandb

        self.wandb: Any = wandb
        self.run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=dict(config), id=_run_id(folder), resume="allow"
        )

    def log(self, training_step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=training_step)

    def show(self, training_step: int, texts: Sequence[Timeline]) -> None:
        rows = [[training_step, number, _words(text)] for number, text in enumerate(texts)]
        table = self.wandb.Table(columns=["training_step", "number", "text"], data=rows)
        page = self.wandb.Html(_page(training_step, texts), inject=False)
        self.run.log({"samples": table, "timelines": page}, step=training_step)

    def close(self) -> None:
        self.run.finish()


_Open = Callable[[Path, Mapping[str, Any]], Tracker]
TRACKERS: dict[str, _Open | None] = dict(zip(TRACKER_NAMES, (None, None, _TensorBoard, _Trackio, _Wandb), strict=True))
"""By the name in a recipe; the package that each needs has the same name."""


class SafeTracker:
    """A tracker whose failures end it, not the run."""

    def __init__(self, tracker: Tracker, say: Callable[[str], None]):
        self.tracker: Tracker | None = tracker
        self.say = say

    def log(self, training_step: int, scalars: Mapping[str, float]) -> None:
        """Numbers by name."""
        self._try(lambda tracker: tracker.log(training_step, scalars))

    def show(self, training_step: int, texts: Sequence[Timeline]) -> None:
        """Sampled texts."""
        self._try(lambda tracker: tracker.show(training_step, texts))

    def close(self) -> None:
        """The run ends."""
        self._try(lambda tracker: tracker.close())

    def _try(self, work: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            work(self.tracker)
        except Exception as error:  # whatever a tracker raises is no fault of the run
            self.tracker = None
            self.say(f"warning: the tracker failed and is dropped ({type(error).__name__}: {str(error)[:120]})")


def open_tracker(
    name: str, folder: Path, config: Mapping[str, Any], *, say: Callable[[str], None]
) -> SafeTracker | None:
    """The tracker of that name for the run in a folder, told its recipe; None: there is none."""
    made = TRACKERS[name]
    if name == "auto" and find_spec("tensorboard") is not None:
        made = _TensorBoard
    if made is None:
        return None
    try:
        return SafeTracker(made(folder, config), say)
    except ImportError as error:
        raise ValueError(f"train.tracker is {name!r}, which is not installed: pip install 'fsdfm[{name}]'") from error
    except Exception as error:  # no account, no room, no network: of many kinds
        say(f"warning: train.tracker {name} cannot be opened ({type(error).__name__}: {str(error)[:120]})")
        return None


def _words(text: Timeline) -> str:
    return "".join(text.pieces)


def _indented(text: str) -> str:
    """A text as Markdown shows it unread: a block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _page(training_step: int, texts: Sequence[Timeline]) -> str:
    return page(texts, title=f"Training step {training_step}")


def _picture(text: Timeline) -> Any:
    """A timeline as pixels [height, width, 3]."""
    import numpy as np
    from PIL import Image

    buffer = BytesIO()
    text.save_png(buffer)  # type: ignore[arg-type]  # matplotlib and Pillow write to files and buffers alike
    return np.asarray(Image.open(buffer).convert("RGB"))


def _run_id(folder: Path) -> str:
    """The same for the same folder, so that a resumed run is one run."""
    from hashlib import sha256

    return sha256(str(folder.resolve()).encode()).hexdigest()[:16]
