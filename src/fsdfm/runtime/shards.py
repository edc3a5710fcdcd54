"""Tensors of which every process holds a share, on disk: torch's distributed checkpoints.

Every process writes its share into one folder (`__RANK_0.distcp`) and the first an index of them (`.metadata`), from
which any number of processes, one included, reads what it needs.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from fsdfm.files import read_bytes
from fsdfm.runtime.processes import Processes, is_sharded, placed

__all__ = ["INDEX", "load_shards", "save_shards"]

INDEX = ".metadata"
_LARGEST_INDEX = 2**28  # bytes
_STORED = "torch.distributed.checkpoint.metadata"
_NAMES = {  # all that the index of plain tensors is made of, name by name: a module vouches for nothing in it
    *((_STORED, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *((_STORED, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_PATHS = {("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")}


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
    metadata = reader.read_metadata()
    _check(folder, metadata)
    for name, entry in metadata.state_dict_metadata.items():
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
            metadata = _read_index(folder / INDEX)
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)


def _read_index(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        program = read_bytes(path, _LARGEST_INDEX)
        _check_places(program)
        metadata = _Index(io.BytesIO(program)).load()
    except (ValueError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, IndexError, KeyError) as error:
        raise ValueError(f"{path} cannot be used: {str(error)[:200]}; this is no training state of fsdfm") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} describes no tensors; this is no training state of fsdfm")
    return metadata


def _check_places(program: bytes) -> None:
    """Raise where a pickle notes a value at a place that is larger than itself: room is made up to there at once."""
    for code, place, _ in pickletools.genops(program):
        if "PUT" in code.name and not (isinstance(place, int) and 0 <= place <= len(program)):
            raise ValueError(f"it notes a value at the place {place!r:.80} and has {len(program)} bytes")


def _check(folder: Path, metadata: Any) -> None:
    """Raise where an index names files outside its folder, or tensors larger than the files that hold them."""
    entries = (metadata.storage_data or {}).values()
    names = {getattr(entry, "relative_path", None) for entry in entries}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ValueError(
                f"{folder / INDEX} names the file {name!r:.80}, which is none of this folder; get it again"
            )
    if any(getattr(entry, "transform_descriptors", None) for entry in entries):
        raise ValueError(f"{folder / INDEX} asks for transformed files, which fsdfm does not write; get it again")
    stored = sum((folder / str(name)).stat().st_size for name in names)
    described = 0
    for entry in metadata.state_dict_metadata.values():
        size, kind = getattr(entry, "size", ()), getattr(getattr(entry, "properties", None), "dtype", None)
        if not isinstance(size, tuple) or any(type(axis) is not int or axis < 0 for axis in size):
            raise ValueError(f"{folder / INDEX} describes a tensor of the size {size!r:.80}; get it again")
        described += math.prod(size) * (kind.itemsize if isinstance(kind, torch.dtype) else 0)
    if described > stored:
        raise ValueError(
            f"{folder / INDEX} describes {described} bytes of tensors, its files hold {stored}; get it again"
        )


class _Index(pickle.Unpickler):
    """A pickle may call any function; this one only the names that describe tensors, none reached through a dot."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PurePath
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _NAMES:
            raise ValueError(f"it asks for {module}.{name}, which describes no tensor")
        return super().find_class(module, name)
