"""What a run will need before it is begun: memory per process, and time, from formulas (docs/guides/scale.md).

All is counted in bytes for one process. P are the parameters, P_b those of a block, P_r the rest of them (embedding,
head and what is small); C is the width, M that of the MLP, k the share of key heads, T the tokens of a portion.

    weights, average, moments, gradients   4 P, 4 P, 8 P, 4 P; a share of each under fsdp
    gathered (fsdp)                        12 P_r: weights, gradient and average of the rest; two blocks of weights
    activations                            T n [(44 + 12 k + 2 d) C + 8 g M] in float32,
                                           T n [(30 + 6 k + 2 d) C + 4 g M] + 2 P in bfloat16,
                                           n blocks, d = 1 with dropout, g = 2 in a gated MLP, else 1
    loss                                   12 T C, 8 C V of the head's gradient, four chunks of logits
    teacher                                on its share of T: 4 C a stage and a block's own work
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from fsdfm.model import ModelConfig, TransformerConfig, build_network

__all__ = ["Memory", "Workload", "estimate_flops", "estimate_memory", "tokens_per_second"]

_CHUNK = 256  # rows of logits that live at a time


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The numbers of a training run that decide what it needs."""

    model: ModelConfig | TransformerConfig
    length: int
    batch_size: int
    accumulate: int = 1
    steps: int = 1
    bfloat16: bool = False
    stages: int = 0  # of the teacher; 0: there is none
    teacher_share: float = 0.0  # of the rows

    @property
    def tokens(self) -> int:
        """Of a training step, over all processes."""
        return self.batch_size * self.length

    @property
    def num_parameters(self) -> int:
        """All of them."""
        block, rest = _parameters(self.model)
        return block * self.model.num_blocks + rest


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process at the worst moment of a step, by what they are for."""

    weights: float
    average: float  # the EMA, which is also the teacher
    moments: float
    gradients: float
    gathered: float  # weights of other processes, while they are needed
    activations: float
    loss: float
    teacher: float

    @property
    def total(self) -> float:
        """Their sum."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def _parameters(config: ModelConfig | TransformerConfig) -> tuple[int, int]:
    """Parameters of a block, and of all that is not a block."""
    with torch.device("meta"):
        model = build_network(config)
    block = sum(p.numel() for p in model.blocks[0].parameters())
    return block, sum(p.numel() for p in model.parameters()) - block * config.num_blocks


def estimate_memory(work: Workload, strategy: Literal["single", "ddp", "fsdp"], processes: int = 1) -> Memory:
    """What one of so many processes needs."""
    if processes < 1 or (strategy == "single" and processes > 1):
        raise ValueError(f"processes is {processes}; allowed are 1 and more, and 1 for the strategy single")
    if work.batch_size % (work.accumulate * processes):
        raise ValueError(
            f"batch_size {work.batch_size} in {work.accumulate} portions over {processes} processes leaves unequal "
            f"shares; allowed are multiples of {work.accumulate * processes}"
        )
    block, rest = _parameters(work.model)
    share = work.num_parameters / (processes if strategy == "fsdp" else 1)
    tokens = work.tokens / work.accumulate / processes
    activations = tokens * _activations(work)
    gathered = 0.0
    if strategy == "fsdp":
        blocks = block * (2 * (2 if work.bfloat16 else 4) + 8)  # two of weights, one's gradient, its float32 sum
        gathered = 4 * rest * (3 if work.stages else 2) + blocks
    elif work.bfloat16:
        activations += 2 * work.num_parameters  # the cast weights of every product, kept for its gradient
    gradients = 4 * share
    if strategy == "single" and work.accumulate == 1:
        gradients = max(0.0, gradients - activations)  # they come as the activations go
    return Memory(
        weights=4 * share,
        average=4 * share,
        moments=8 * share,
        gradients=gradients,
        gathered=gathered,
        activations=activations,
        loss=12 * tokens * work.model.width + 8 * work.model.width * work.model.vocab_size + _logits(work, 4),
        teacher=_teacher(work, tokens),
    )


def _activations(work: Workload) -> float:
    """Bytes per token that the backward pass needs of the trunk."""
    model = work.model
    keys = model.kv_heads / model.num_heads
    gated, drops = (2 if model.style == "llama" else 1), (2 if model.dropout else 0)
    if work.bfloat16:
        per_block = (30 + 6 * keys + drops) * model.width + 4 * gated * model.hidden_width
    else:
        per_block = (44 + 12 * keys + drops) * model.width + 8 * gated * model.hidden_width
    return model.num_blocks * per_block + 8 * model.width


def _logits(work: Workload, copies: int) -> float:
    return 4.0 * copies * _CHUNK * work.model.vocab_size


def _teacher(work: Workload, tokens: float) -> float:
    if not work.stages:
        return 0.0
    model, size = work.model, 2 if work.bfloat16 else 4
    working = size * (6 * model.width + 2 * model.hidden_width) + 4 * model.width
    return tokens * work.teacher_share * (4 * work.stages * model.width + working) + _logits(work, 2)


def estimate_flops(work: Workload) -> float:
    """Floating-point operations per token: three forward passes for a step, and one per stage on the teacher's share.

    A forward pass has 2 operations per parameter of a matrix product and 4 L C per block of attention.
    """
    model = work.model
    block, _ = _parameters(model)
    modulation = 6 * model.width * (model.cond_width + 1)  # acts once per row, not once per token
    modulation *= model.conditioning != "none"
    trunk = model.num_blocks * (2.0 * (block - modulation) + 4 * work.length * model.width)
    head = 2.0 * model.width * model.vocab_size
    return 3 * (trunk + head) + work.teacher_share * (work.stages * trunk + head)


def tokens_per_second(work: Workload, flops: float, processes: int = 1) -> float:
    """Of all processes, if each does so many floating-point operations per second."""
    if not flops > 0:
        raise ValueError(f"flops is {flops}; give the operations a second that a process really does, such as 1.2e14")
    return processes * flops / estimate_flops(work)
