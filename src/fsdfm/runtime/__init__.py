"""The machine: device, precision, processes, compilation, dropout, signals. No other package knows of it."""

from fsdfm.runtime.machine import Precision, Runtime, RuntimeConfig, Strategy, require_strategy
from fsdfm.runtime.processes import ALONE, EchoError, Processes, is_sharded, local, placed, process_count
from fsdfm.runtime.session import commit, interrupt_on_sigterm, stop_on_signal, versions
from fsdfm.runtime.shards import load_shards, save_shards
from fsdfm.runtime.spawn import share_threads, spawn_local
from fsdfm.runtime.threads import free_threads

__all__ = [
    "ALONE",
    "EchoError",
    "Precision",
    "Processes",
    "Runtime",
    "RuntimeConfig",
    "Strategy",
    "commit",
    "free_threads",
    "interrupt_on_sigterm",
    "is_sharded",
    "load_shards",
    "local",
    "placed",
    "process_count",
    "require_strategy",
    "save_shards",
    "share_threads",
    "spawn_local",
    "stop_on_signal",
    "versions",
]
