"""The machine: device, precision, threads, compilation, seeds of dropout, signals. No other file knows of it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from fsdfm.noise import Noise, Purpose

__all__ = ["Runtime", "RuntimeConfig", "commit", "lock", "stop_on_signal", "versions"]

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Where and how a run computes."""

    device: str = "auto"  # auto: cuda if there is one, else cpu; or a torch device such as cuda:1
    precision: Precision = "auto"  # of matrix products; auto: bfloat16 on a GPU that has it, else float32
    compile: bool = False  # torch.compile the networks' trunks: slow to start, faster on GPUs
    threads: int = 0  # CPU threads; 0: torch's own choice

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads is {self.threads}; allowed are 0 (torch's own choice) and more")


class Runtime:
    """A machine made ready: what a trainer asks of it.

    runtime = Runtime(RuntimeConfig(device="cpu", threads=2))
    with runtime.autocast():
        ...
    """

    def __init__(self, config: RuntimeConfig):
        self.config = config
        self.device = _device(config.device)
        self.bfloat16 = _wants_bfloat16(config.precision, self.device)
        if config.threads:
            torch.set_num_threads(config.threads)

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in bfloat16 where the precision says so; weights stay float32.

        Without a cache of cast weights: a weight first cast without gradient, as by a teacher that is the student
        itself, would be reused and its gradient silently lost.
        """
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    def compile(self, model: nn.Module) -> None:
        """Compile a network's trunk in place, if the config asks for it; its weights and their names stay."""
        if self.config.compile:
            network: Any = model
            network.trunk = torch.compile(network.trunk)

    def seed_dropout(self, seed: int, training_step: int, *, sample: int) -> None:
        """Seed torch's own generators, which only dropout uses, for the rows that begin with a sample.

        What is dropped is a function of (seed, training step, sample): a resumed run drops the same.
        """
        step = training_step % 2**32
        torch.manual_seed(int(Noise(seed, [sample]).integers(Purpose.DROPOUT, 1, 2**32, step=step)))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {name!r}, which cannot be used here ({reason}); try auto or cpu") from error
    return device


def _wants_bfloat16(precision: Precision, device: torch.device) -> bool:
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"


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
def lock(folder: Path) -> Iterator[None]:
    """Keep every other process out of a folder; the lock dies with its process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder} is in use by another run; wait for it, or choose another out") from error
        yield


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
    here = Path(__file__).resolve().parent
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
