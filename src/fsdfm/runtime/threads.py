"""CPU threads that share a machine.

A small network's products take less time than a busy machine takes to let a thread run again. With as many threads as
cores, every product waits at its end for the slowest thread, and OpenMP's threads wait by spinning: on two cores with
other work a text of 1 CPU second took 11, and 100 s instead of 13. Two mends, neither of which changes a bit of a text:

    passive waiting   OMP_WAIT_POLICY=passive, which `import fsdfm` sets before torch starts, unless it is set already
    free cores        a model is loaded with as many threads as cores are free, at least one

A process that forks takes none of OpenMP's threads along, and its child would wait for them for ever at the first
product. A child therefore computes with one thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

__all__ = ["free_threads"]

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def free_threads(most: int, *, load: float | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """How many of `most` threads find a core: the cores of this process less those that others keep busy.

    load   processes that want to run, a mean over the last minute; asked of the system unless given
    """
    if "OMP_NUM_THREADS" in environment:  # somebody has decided
        return most
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, min(most, round(cores - load)))
