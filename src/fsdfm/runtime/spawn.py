"""Several processes on one machine, started by the first of them; `torchrun` is for several machines."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdfm.plugins import import_plugin, imported_plugins
from fsdfm.runtime.processes import EchoError, process_count

__all__ = ["share_threads", "spawn_local"]

_SECONDS_TO_LEAVE = 10.0  # for those that have nothing left to do


@contextmanager
def spawn_local(count: int, function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Inside, this process is the first of `count`; the others call the function, and so must this one.

        with spawn_local(2, evaluate, request):
            evaluate(request)

    The function stands in a module that can be imported, and its arguments can be pickled. The others end with the
    block: in their own time if it ends well, at once if it does not.
    """
    if count < 1:
        raise ValueError(f"processes is {count}; allowed are whole numbers >= 1")
    if count == 1:
        yield
        return
    if process_count() > 1:
        raise ValueError(f"processes is {count}, but torchrun started {process_count()} already; leave the option out")
    spawn = multiprocessing.get_context("spawn")
    places = _places(count)
    plugins = {"plugins": imported_plugins()}
    others = [
        spawn.Process(target=_join, args=(place, function, arguments), kwargs=plugins, daemon=True)
        for place in places[1:]
    ]
    try:
        for other in others:
            other.start()
        with _told(places[0]):
            yield
        for other in others:
            other.join(_SECONDS_TO_LEAVE)
    finally:
        for other in others:
            if other.pid is not None:
                other.kill()  # one that waits for a dead process would not hear anything else


def share_threads(count: int) -> int:
    """How many of torch's threads each of so many processes gets."""
    return max(1, torch.get_num_threads() // count)


def _places(count: int) -> list[dict[str, str]]:
    """What `torchrun` would tell each process: who it is, of how many, and where they meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@contextmanager
def _told(place: dict[str, str]) -> Iterator[None]:
    """Inside, the environment says who this process is."""
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _join(
    place: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...], *, plugins: tuple[str, ...]
) -> None:
    os.environ.update(place)
    try:
        for plugin in plugins:
            import_plugin(plugin)
        function(*arguments)
    except EchoError:
        sys.exit(2)
    except ValueError as error:
        sys.exit(f"error: process {place['RANK']}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
