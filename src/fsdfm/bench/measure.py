"""Timing and memory: medians of interleaved repeats, because machines are shared and noisy; peaks from the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path as FilePath
from typing import Any, TypeVar

from rich.console import Console

from fsdfm.terminal import moving_bar

__all__ = ["in_fresh_process", "interleaved_medians", "peak_extra_mib", "peak_mib"]

_T = TypeVar("_T")
_STATUS = FilePath("/proc/self/status")
_CLEAR = FilePath("/proc/self/clear_refs")


def interleaved_medians(jobs: Mapping[str, Callable[[], object]], *, repeats: int, title: str) -> dict[str, float]:
    """Median seconds of each job; a round runs every job once, so that a slow moment of the machine meets them all."""
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; allowed are whole numbers >= 1")
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with moving_bar(Console(), transient=True) as progress:
        task = progress.add_task(title, total=(repeats + 1) * len(jobs))
        for round_ in range(repeats + 1):
            for name, job in jobs.items():
                start = time.perf_counter()
                job()
                if round_ > 0:  # the first round warms caches and pools
                    seconds[name].append(time.perf_counter() - start)
                progress.advance(task)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_extra_mib(job: Callable[[], object]) -> float | None:
    """How far the resident memory rises while the job runs, in MiB; None where the kernel cannot say."""
    gc.collect()
    _return_freed_memory()
    try:
        _CLEAR.write_text("5")  # reset the high-water mark
    except OSError:
        return None
    before = _resident_kib("VmRSS")
    job()
    return max(0.0, (_resident_kib("VmHWM") - before) / 1024)


def in_fresh_process(function: Callable[..., _T], *arguments: Any) -> _T:
    """What a function gives in a process that has done nothing else, so that its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_mib() -> float | None:
    """The most resident memory this process ever had, in MiB; None where the kernel cannot say."""
    return _resident_kib("VmHWM") / 1024 if _STATUS.exists() else None


def _return_freed_memory() -> None:
    """Let the allocator give back what it only keeps for later, lest the job seem to need nothing new."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident_kib(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return float(line.split()[1])
