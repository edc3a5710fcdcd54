"""The machine made ready: device, precision, threads, compilation, and how a training step spreads over processes.

    single   one process
    ddp      every process holds all weights and computes its share of the batch; gradients are averaged
    fsdp     every process also holds only its share of the weights, their average, gradients and moments

The model knows nothing of this: under `ddp` the objective runs inside torch's wrapper, under `fsdp` hooks around the
network's trunk and blocks bring the weights together while they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdfm.checks import require_whole
from fsdfm.runtime.dropout import SampleDropout
from fsdfm.runtime.processes import ALONE, Processes, process_count

__all__ = ["Precision", "Runtime", "RuntimeConfig", "Strategy", "Student", "require_strategy"]

_T = TypeVar("_T")
Precision = Literal["auto", "float32", "bfloat16"]
Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Where and how a run computes."""

    device: str = "auto"  # auto: cuda if there is one, else cpu; or a torch device such as cuda:1
    precision: Precision = "auto"  # of matrix products; auto: bfloat16 on a GPU that has it, else float32
    compile: bool = False  # torch.compile the networks' trunks: slow to start, faster on GPUs
    threads: int = 0  # CPU threads; 0: torch's own choice
    strategy: Strategy = "single"  # ddp and fsdp: over the processes that torchrun starts; fsdp shares the weights too

    def __post_init__(self) -> None:
        require_whole("threads", self.threads, 0)  # 0: torch's own choice
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision is {self.precision!r}; allowed are {', '.join(get_args(Precision))}")


class Student(nn.Module):
    """Calls a function of a network as if it were the network's own forward pass, which is what `ddp` watches."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], _T]) -> _T:
        """The function of the network."""
        return function(self.model)


class Runtime:
    """A machine made ready: what a trainer asks of it.

    with Runtime(RuntimeConfig(device="cpu", threads=2)) as runtime:
        with runtime.autocast():
            ...
    """

    def __init__(self, config: RuntimeConfig):
        self.config = config
        self.device = _device(config.device)
        self.bfloat16 = _wants_bfloat16(config.precision, self.device)
        self.sample_dropout = SampleDropout()
        if config.threads:
            torch.set_num_threads(config.threads)
        self.processes = ALONE if config.strategy == "single" else Processes.join(self.device)
        self._mesh: Any = None

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.processes.leave(in_order=kind is None)

    # --- one network --------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[object]:
        """Matrix products in bfloat16 where the precision says so; weights stay float32.

        Without a cache of cast weights: a weight first cast without gradient, as by a teacher that is the student
        itself, would be reused and its gradient silently lost.
        """
        if not self.bfloat16:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)

    def dropout(self, seed: int, training_step: int, samples: Sequence[int] | Tensor) -> AbstractContextManager[object]:
        """Inside, what is dropped is a function of (seed, training step, sample), whatever rows stand together."""
        return self.sample_dropout.of(seed, training_step, samples, device=self.device)

    def place(self, model: nn.Module) -> None:
        """Bring a network to where it computes, compiled if the config asks for it; weights keep their names.

        Under `fsdp` this process keeps its share of every weight and no more. A whole network never stands on the
        device there: block by block is moved and shared out.
        """
        if self.config.strategy == "fsdp":
            self._shard(model)
            return
        model.to(self.device)
        self.compile(model)

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        self._mesh = self._mesh or init_device_mesh(self.device.type, (self.processes.count,))
        # Blocks are brought together in the precision of their products; inputs keep theirs: t needs float32.
        precision = torch.bfloat16 if self.bfloat16 else None
        policy = MixedPrecisionPolicy(precision, torch.float32, cast_forward_inputs=False)
        for block in getattr(model, "blocks", ()):
            if self.config.compile:
                block.compile()
            fully_shard(block, mesh=self._mesh, mp_policy=policy)
        # The rest, of which the embedding and the head are most, stays together from the trunk to the end of a step:
        # the head is asked many times, for some rows each.
        fully_shard(model, mesh=self._mesh, reshard_after_forward=False)
        register_fsdp_forward_method(model, "trunk")

    def compile(self, model: nn.Module) -> None:
        """Compile a network's trunk in place, if the config asks for it; its weights and their names stay."""
        if self.config.compile:
            network: Any = model
            network.trunk = torch.compile(network.trunk)

    # --- a step of several processes ----------------------------------------------------------------------------------

    def student(self, model: nn.Module) -> nn.Module | None:
        """Under `ddp` the wrapper of a network: call it with a function of the network, and gradients are averaged."""
        if self.config.strategy != "ddp":
            return None
        return DistributedDataParallel(Student(model), gradient_as_bucket_view=True)

    def accumulating(self, student: nn.Module | None) -> AbstractContextManager[object]:
        """Inside, gradients only add up: the processes average them once per step, in its last portion.

        Under `fsdp` they are averaged in every portion, since none has room for all of them.
        """
        if isinstance(student, DistributedDataParallel):
            context: AbstractContextManager[object] = student.no_sync()
            return context
        return nullcontext()

    def settle(self, *models: nn.Module) -> None:
        """Let go of weights that were brought together, so that what a network holds is this process's share."""
        for model in models:
            for module in model.modules():
                getattr(module, "reshard", lambda: None)()


def require_strategy(config: RuntimeConfig) -> None:
    """Raise where several processes would each do the whole of a work that changes files."""
    if config.strategy == "single" and process_count() > 1:
        raise ValueError(
            f"runtime.strategy is 'single', but torchrun started {process_count()} processes; allowed are then "
            "'ddp' (every process holds the model) and 'fsdp' (each a share of it): add runtime.strategy=ddp"
        )


def _device(name: str) -> torch.device:
    local_rank = os.environ.get("LOCAL_RANK", "0") if process_count() > 1 else None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is not None and name.startswith("cuda:"):
        raise ValueError(f"device is {name!r} for all {process_count()} processes; allowed are cuda, auto and cpu")
    if local_rank is not None and name == "cuda":
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {name!r}, which cannot be used here ({reason}); try auto or cpu") from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _wants_bfloat16(precision: Precision, device: torch.device) -> bool:
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return precision == "bfloat16"
