"""The machine: device, precision, processes, compilation, dropout, signals. No other room knows of it."""

from fsdfm.runtime.machine import Precision, Runtime, RuntimeConfig, Strategy, require_strategy
from fsdfm.runtime.processes import ALONE, Processes, is_sharded, local, placed
from fsdfm.runtime.session import commit, lock, stop_on_signal, versions
from fsdfm.runtime.shards import load_shards, save_shards

__all__ = [
    "ALONE",
    "Precision",
    "Processes",
    "Runtime",
    "RuntimeConfig",
    "Strategy",
    "commit",
    "is_sharded",
    "load_shards",
    "local",
    "lock",
    "placed",
    "require_strategy",
    "save_shards",
    "stop_on_signal",
    "versions",
]
