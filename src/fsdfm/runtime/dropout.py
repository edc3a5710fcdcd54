"""Dropout by sample: what is dropped is a function of (seed, training step, sample) and of nothing else.

Torch draws the masks of a whole batch from one generator, so a sample's mask depends on the rows beside it, and with
them on the number of processes. Here every row has a key of its own and position i of the n-th dropout of a forward
pass is hashed with it. A hash needs no state: compiled, it is a part of the kernel that drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdfm.noise import Noise, Purpose

__all__ = ["SampleDropout"]

_LEVELS = 2**16  # a probability is a multiple of 1 / _LEVELS: two positions share a hash of 32 bits
_FIRST_CALL = 2  # the compiler takes 0 and 1 for constants and would compile each anew
_PLACE, _CALL_1, _CALL_2 = -1640531527, 0x3C6EF372, 0x2545F491  # odd or irregular: they only scatter
_MIX_1, _MIX_2 = 0x7FEB352D, -2073254261  # lowbias32 of C. Wellons, whose two words are 7feb352d and 846ca68b


class SampleDropout(TorchFunctionMode):
    """Takes the place of `F.dropout`, in any network, for the rows of a batch.

    dropout = SampleDropout()
    with dropout.of(seed=0, training_step=7, samples=[40, 41], device=device):
        model.trunk(x_t, t, h)  # x_t [2, L]
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(0, 2, dtype=torch.int32)
        self.calls = _FIRST_CALL

    @contextmanager
    def of(
        self, seed: int, training_step: int, samples: Sequence[int] | Tensor, *, device: torch.device
    ) -> Iterator[None]:
        """Inside, the first dimension of what is dropped are these samples, in this order."""
        words = Noise(seed, samples).integers(Purpose.DROPOUT, 2, 2**32, step=training_step % 2**32)
        self.keys, self.calls = (words - 2**31).to(torch.int32).to(device), _FIRST_CALL
        with self:
            yield

    def __torch_function__(  # noqa: PLR0917 (torch gives all four by position)
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of torch, of which one is ours."""
        return (self._drop if func is F.dropout else func)(*args, **(kwargs or {}))

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, *, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        if len(input) != len(self.keys):
            raise ValueError(
                f"dropout met a tensor of {len(input)} rows in a batch of {len(self.keys)} samples; "
                "the first dimension of what is dropped must be the samples"
            )
        level = round(p * _LEVELS)
        kept = input.masked_fill(self._below(input, level), 0.0) * (_LEVELS / max(1, _LEVELS - level))
        return input.copy_(kept) if inplace else kept

    def _below(self, input: Tensor, level: int) -> Tensor:
        """Where a uniform 16-bit number is below the level: bool, of the input's shape."""
        size, call = input[0].numel(), self.calls
        self.calls = call + 1
        # Half of the key enters before the first multiplication and half after it: rows never share a stretch.
        word = torch.arange((size + 1) // 2, dtype=torch.int32, device=input.device) * _PLACE
        word = word + (self.keys[:, :1] + call * _CALL_1 % 2**31)
        word = (word ^ ((word >> 16) & 0xFFFF)) * _MIX_1
        word = word ^ (self.keys[:, 1:] ^ (call * _CALL_2 % 2**31))
        word = (word ^ ((word >> 15) & 0x1FFFF)) * _MIX_2
        word = word ^ ((word >> 16) & 0xFFFF)
        return word.view(torch.int16)[:, :size].view(input.shape) < level - _LEVELS // 2
