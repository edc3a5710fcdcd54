"""PyTorch's .pth files, read without running them: descriptions of all tensors, and the bytes of those asked for.

    with TorchFile("model.pth") as file:
        file.content["model"]["head.weight"]  # a StoredTensor: dtype, shape, where its bytes are
        file.read(file.content["model"]["head.weight"])  # the tensor

A .pth file is a zip archive: the pickle `data.pkl` says what is there, `data/KEY` are the bytes of one storage each.
`torch.load(weights_only=True, mmap=True)` runs no code either, but it materialises whatever the pickle declares before
anyone can look at it, and its errors are of many kinds. This reader is three small parts instead: a directory checked
against the file's size (`archive`), a pickle machine that calls nothing (`pickled`), and plain reads of single tensors.
What is not asked for, such as an optimiser's moments, is never read; plain reads rather than a memory map, so that a
tensor's memory is gone with the tensor and a file that shrinks meanwhile is an error and no crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fsdfm.checkpoint.archive import ZipArchive
from fsdfm.checkpoint.pickled import LONGEST_PROGRAM, Call, Inert, Name, interpret

__all__ = ["StoredTensor", "TorchFile"]

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the pickled magic number of files before PyTorch 1.6
_TAR = slice(257, 262), b"ustar"
_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 2**62

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
# What stands beside weights in checkpoints: numbers of numpy's, devices, random states. None of it is built.
_BESIDE = (
    "collections.Counter",
    "torch.device",
    "torch.Size",
    *(f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")),
    *(
        f"{builtins}.{name}"
        for builtins in ("builtins", "__builtin__")
        for name in ("int", "float", "list", "dict", "set", "long")
    ),
    "argparse.Namespace",
    "_codecs.encode",
    "numpy.dtype",
    "numpy.ndarray",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    num_values: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the file: a view of a storage, with every number checked against the storage's declared size."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its values."""
        return self.storage.dtype

    @property
    def num_values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes they take."""
        return self.num_values * self.dtype.itemsize

    @property
    def span(self) -> int:
        """From its first to its last value in the storage."""
        if self.num_values == 0:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class TorchFile:
    """An opened .pth file; `content` is what was saved, with a `StoredTensor` in place of every tensor."""

    def __init__(self, path: str | Path):
        _check_kind(Path(path))
        self.archive = ZipArchive(path)
        try:
            self._folder = self._find_folder()
            self.content = self._interpret()
        except BaseException:
            self.archive.__exit__(None, None, None)
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.archive.__exit__(kind, error, trace)

    def check(self, tensor: StoredTensor) -> None:
        """Raise unless the tensor's values are all in the file, each for itself, in a storage of the declared size."""
        storage = tensor.storage
        if tensor.num_values > tensor.span:
            raise self.archive.error(f"has a tensor of shape {tensor.shape} that repeats {tensor.span} values")
        member = self.archive.members.get(f"{self._folder}data/{storage.key}")
        declared = storage.num_values * storage.dtype.itemsize
        if member is None or member.size < declared:
            found = "none" if member is None else str(member.size)
            raise self.archive.error(
                f"is damaged: storage {storage.key[:40]!r} should have {declared} bytes, and {found} are there"
            )

    def check_shared(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise where tensors share their values so often that they would take more memory than the file has of them.

        A head may be the embedding; more than that is room made for the same bytes again and again.
        """
        tensors = list(tensors)
        stored = sum(storage.num_values * storage.dtype.itemsize for storage in {each.storage for each in tensors})
        if (said := sum(each.num_bytes for each in tensors)) > 2 * stored:
            raise self.archive.error(f"describes {said} bytes of tensors and holds {stored}")

    def read(self, tensor: StoredTensor) -> Tensor:
        """The tensor, contiguous, in memory of its own."""
        self.check(tensor)
        values = torch.empty(tensor.span, dtype=tensor.dtype)
        if tensor.span:
            buffer = values.view(torch.uint8).numpy().data
            name = f"{self._folder}data/{tensor.storage.key}"
            self.archive.read_into(buffer, name, tensor.offset * tensor.dtype.itemsize)
        return values.as_strided(tensor.shape, tensor.stride).contiguous()

    def _find_folder(self) -> str:
        """The archive's one folder, of any name, with a slash behind it."""
        found = [name for name in self.archive.members if name.rpartition("/")[2] == "data.pkl"]
        if len(found) != 1:
            raise self.archive.error(f"is no .pth file: its zip archive holds data.pkl {len(found)} times, not once")
        return found[0].removesuffix("data.pkl")

    def _interpret(self) -> Any:
        size = self.archive.members[f"{self._folder}data.pkl"].size
        if size > LONGEST_PROGRAM:
            raise self.archive.error(f"has a pickle of {size} bytes; allowed are up to {LONGEST_PROGRAM}")
        order = self.archive.members.get(f"{self._folder}byteorder")
        if order is not None and (order.size > 8 or self.archive.read(f"{self._folder}byteorder") != b"little"):
            raise self.archive.error("was not written by a little-endian machine")
        program = self.archive.read(f"{self._folder}data.pkl")
        try:
            return interpret(program, _CALLS, _storage)
        except ValueError as error:
            raise ValueError(
                f"{self.archive.path} cannot be read safely: {error}; get it from its authors, or save its weights "
                "alone with torch.save(model.state_dict(), FILE)"
            ) from error


def _check_kind(path: Path) -> None:
    """Raise for files that are known to be something else."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file; name a .pth file")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name a .pth file that you may read") from error
    if start.startswith(_LEGACY) or start[_TAR[0]] == _TAR[1]:
        raise ValueError(
            f"{path} has the format of PyTorch before 1.6, which only running it can read; convert it where you trust "
            "it: torch.save(torch.load(FILE, weights_only=True), NEW)"
        )
    if start[8:10] == b'{"':
        raise ValueError(f"{path} is a safetensors file, not a .pth file; name the .pth file it was made from")


# --- what the pickle may say ------------------------------------------------------------------------------------------


def _storage(identity: tuple[Any, ...]) -> _Storage:
    """The storage of a persistent id: ("storage", class, key, device, number of values)."""
    if len(identity) != 5 or identity[0] != "storage":
        raise ValueError("the pickle is broken: a storage has another form")
    _, kind, key, _, num_values = identity
    if not isinstance(kind, Name) or kind.name not in _STORAGES or not isinstance(key, str):
        raise ValueError("the pickle is broken: a storage has no type or no name")
    return _Storage(key, _STORAGES[kind.name], _count(num_values))


def _tensor(arguments: tuple[Any, ...]) -> StoredTensor:
    """A view of a storage: (storage, offset, size, stride, ...)."""
    if len(arguments) < 4 or not isinstance(arguments[0], _Storage):
        raise ValueError("the pickle is broken: a tensor has no storage")
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) != len(stride):
        raise ValueError("the pickle is broken: a tensor has no shape")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions; allowed are up to {_MOST_DIMENSIONS}")
    tensor = StoredTensor(storage, _count(offset), tuple(map(_count, shape)), tuple(map(_count, stride)))
    if tensor.offset + tensor.span > storage.num_values:
        raise ValueError("the pickle is broken: a tensor has more values than its storage")
    return tensor


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_SIZE:
        raise ValueError("the pickle is broken: a size is no whole number in range")
    return value


def _first(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments else Inert()


_CALLS: dict[str, Call] = {
    **{name: lambda _: Inert() for name in (*_STORAGES, *_BESIDE)},
    "collections.OrderedDict": lambda _: {},
    "collections.defaultdict": lambda _: {},
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _first,
}
