"""The processes of a run: who they are, what they tell each other, and what becomes of them when one dies.

`torchrun` starts them and says so in the environment. Small things (a flag, a sentence, an error) travel over a group
of their own on the CPU; gradients and shards of weights are torch's, in `fsdfm.runtime.machine`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

__all__ = ["ALONE", "EchoError", "Processes", "is_sharded", "local", "placed", "process_count"]

_CPU = torch.device("cpu")
_T = TypeVar("_T")
_R = TypeVar("_R")
_PATIENCE = timedelta(days=1)  # the first process may pack a corpus while the others wait
_AGAIN = "the same command resumes from there, and torchrun --max-restarts=3 gives it by itself"
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "gloo", "NCCL", "Socket")


def process_count() -> int:
    """How many processes `torchrun` started; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class EchoError(ValueError):
    """The first process failed and says why: the others, which end with it, need not repeat it."""


class Processes:
    """The processes that compute together, all of which call the same methods in the same order.

        scores = [score for part in processes.gather(judge(processes.share(texts))) for score in part]

    One that is alone is the first of one, and every method costs it nothing.
    """

    def __init__(self, rank: int = 0, count: int = 1, *, group: Any = None):
        self.rank, self.count, self.group = rank, count, group

    @classmethod
    def join(cls, device: torch.device = _CPU) -> Processes:
        """Meet the others that `torchrun` started; without it, be a group of one."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store: Any = vars(dist)["HashStore"]()
        rank, count = 0, 1
        if process_count() > 1 or "MASTER_ADDR" in os.environ:
            store, rank, count = next(rendezvous("env://"))
        # A job that torchrun started again may meet where it met before: the addresses of the dead are not its own.
        store = vars(dist)["PrefixStore"](f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
        return cls(dist.get_rank(), dist.get_world_size(), group=dist.new_group(backend="gloo", timeout=_PATIENCE))

    def leave(self, *, in_order: bool = True) -> None:
        """End the group; after a failure only a group of one can be left in order."""
        if self.group is not None and (in_order or self.count == 1):
            dist.barrier(group=self.group)  # whoever holds the meeting point leaves no earlier than the others
            dist.destroy_process_group()
        self.group = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.leave(in_order=kind is None)

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0

    # --- sharing work -------------------------------------------------------------------------------------------------

    def share(self, items: Sequence[_T]) -> Sequence[_T]:
        """This process's part of some items: consecutive ones, as many as the others have, to within one."""
        first, last = (len(items) * rank // self.count for rank in (self.rank, self.rank + 1))
        return items[first:last]

    def gather(self, thing: _T) -> list[_T]:
        """What every process has, in the order of the processes, on all of them."""
        if self.count == 1:
            return [thing]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, thing, group=self.group)
        return found

    def map(self, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """`[function(item) for item in items]` on every process, each of which computes its share."""
        parts = self.gather([function(item) for item in self.share(items)])
        return [result for part in parts for result in part]

    def rounds(self, function: Callable[[_T], _R], items: Sequence[_T]) -> Iterator[list[_R]]:
        """The results of `map`, one per process at a time, so that progress can be told of in between."""
        for start in range(0, len(items), self.count):
            yield self.map(function, items[start : start + self.count])

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def mean(self, value: float) -> float:
        """The mean over the processes, the same on all; nan or inf if one has it."""
        if self.count == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return float(total) / self.count

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any of them."""
        return self.mean(float(bool(flag))) > 0

    def on_rank0(self, job: Callable[[], _T]) -> _T:
        """What a job on the first process returns, on all of them; if it fails there, all fail."""
        if self.count == 1:
            return job()
        if self.is_rank0:
            try:
                result = job()
            except BaseException as error:
                self._tell((None, str(error) or type(error).__name__))
                raise
            self._tell((result, None))
            return result
        result, problem = self._hear()
        if problem is not None:
            raise EchoError(problem)
        return result

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first process goes ahead; the others follow when it is done, and find what it made."""
        if not self.is_rank0:
            self.on_rank0(lambda: None)
            yield
            return
        try:
            yield
        except BaseException as error:
            self._tell((None, str(error) or type(error).__name__))
            raise
        self._tell((None, None))

    def _tell(self, message: Any) -> None:
        if self.count > 1:
            dist.broadcast_object_list([message], src=0, group=self.group)

    def _hear(self) -> Any:
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=0, group=self.group)
        return heard[0]

    @contextmanager
    def watch(self, saved: str, again: str = _AGAIN) -> Iterator[None]:
        """Say in one sentence that another process is gone, what was `saved`, and how to resume."""
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or any(word in str(error) for word in _BROKEN)
            if self.count == 1 or not lost:
                raise
            raise ValueError(
                f"process {self.rank} of {self.count} lost another one, which was killed or failed "
                f"(look above for its message; {_reason(error)}); {saved}: {again}"
            ) from error

    # --- tensors ------------------------------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All of some tensors in the first process's memory, one after the other; nothing in the others'."""
        found: dict[str, Tensor] = {}
        for name, value in tensors.items():
            full = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
            if self.is_rank0:
                found[name] = full.detach().cpu()
        return found


ALONE = Processes()


def _reason(error: BaseException) -> str:
    """The first line of what the network's library says, without its place in that library."""
    return str(error).splitlines()[0].rpartition("] ")[2].rstrip(".")[:120]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process holds only its share of a tensor: a DTensor, whose module is slow to import."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the same memory."""
    shard: Any = tensor
    return shard.to_local() if is_sharded(tensor) else tensor


def placed(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A whole tensor as another one is: this process's share of it if that one is sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
