"""A run among others on a machine: signals, and what it says of its versions."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import torch

__all__ = ["commit", "interrupt_on_sigterm", "stop_on_signal", "versions"]


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM and SIGINT only set a flag, which the yielded function reads; a second one acts as usual."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield lambda: False
        return
    usual: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, usual[number])

    for number in usual:
        signal.signal(number, note)
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM is what Ctrl-C is: a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def versions() -> dict[str, str]:
    """The versions of what computes: ours, Python, torch, the platform."""
    return {
        "fsdfm": metadata.version("fsdfm"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


@cache
def commit() -> str:
    """The commit of the checkout this package runs from, `+changes` if files differ; "unknown" outside of one."""
    here = Path(__file__).resolve().parents[1]
    try:
        top = _git(here, "rev-parse", "--show-toplevel")
        if Path(top) / "src" / "fsdfm" != here:  # installed into somebody else's repository
            return "unknown"
        changes = _git(here, "status", "--porcelain", "--untracked-files=no")
        return _git(here, "rev-parse", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment)
    return done.stdout.strip()
