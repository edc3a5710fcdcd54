"""Tensors of which every process holds a share, on disk: torch's distributed checkpoints.

Every process writes its share into one folder (`__RANK_0.distcp`) and the first an index of them (`.metadata`), from
which any number of processes, one included, reads what it needs.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdfm.runtime.processes import Processes, is_sharded, placed

__all__ = ["INDEX", "load_shards", "save_shards"]

INDEX = ".metadata"
_TRUSTED = ("torch.distributed.checkpoint.", "torch.distributed.tensor.", "torch.distributed._shard.")
_TRUSTED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "set"),
    ("builtins", "getattr"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "device"),
}


def save_shards(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """Write this process's share of some tensors, synced; all processes call it, and fail together with an OSError."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        writer = FileSystemWriter(folder, sync_files=True)
        save(dict(tensors), storage_writer=writer, process_group=processes.group)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise OSError(f"process {rank} could not write its share ({failure})") from error


def load_shards(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors in a folder, as those of the same name in `like` are placed; without it whole, on the CPU."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    like, reader = like or {}, _reader(folder)
    tensors: dict[str, Tensor] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{folder / INDEX} says that {name!r} is no tensor; this is no training state of fsdfm")
        mine = like.get(name)
        fits = mine is not None and is_sharded(mine) and mine.shape == entry.size
        tensors[name] = torch.empty_like(mine) if fits else torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[arg-type]
    alone = not any(is_sharded(value) for value in tensors.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process alone reads them is meant
        load(tensors, storage_reader=reader, no_dist=alone)
    return {name: placed(value, like.get(name)) if alone else value for name, value in tensors.items()}


def _reader(folder: Path) -> Any:
    """Torch's reader, which unpickles the index, restricted to what an index is made of."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / INDEX).open("rb") as file:
                metadata = _Index(file).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)


class _Index(pickle.Unpickler):
    """A pickle may call any function; this one only what describes tensors."""

    def find_class(self, module: str, name: str) -> Any:
        trusted = module.startswith(_TRUSTED) or (module, name) in _TRUSTED_NAMES
        if not trusted and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise ValueError(f"{INDEX} asks for {module}.{name}, which describes no tensor; this is no training state")
        return super().find_class(module, name)
