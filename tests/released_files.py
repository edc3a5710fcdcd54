"""The released architecture in plain torch, written from its description, and random weights in its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Released:
    """The sizes of a released model, its random weights, and its arithmetic in float64."""

    vocab_size: int = 257
    width: int = 24
    cond_width: int = 12
    num_blocks: int = 2
    num_heads: int = 3
    step_aware: bool = True

    def weights(self, seed: int = 0) -> State:
        C, D, n = self.cond_width, self.width, self.num_blocks
        shapes: dict[str, tuple[int, ...]] = {"vocab_embed.weight": (self.vocab_size, D)}

        def add(name: str, rows: int, columns: int, *, bias: bool = True) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for part in ("time_embedding", "dt_embedding") if self.step_aware else ("time_embedding",):
            add(f"{part}.mlp.0", C, 256)
            add(f"{part}.mlp.2", C, C)
        if self.step_aware:
            add("time_condition_fuser", 2 * C, 2 * C)
        for i in range(n):
            shapes[f"blocks.{i}.norm1.weight"] = shapes[f"blocks.{i}.norm2.weight"] = (D,)
            for part in ("qw", "kw", "vw", "attn_out"):
                add(f"blocks.{i}.{part}", D, D, bias=False)
            add(f"blocks.{i}.mlp.0", 4 * D, D)
            add(f"blocks.{i}.mlp.2", D, 4 * D)
            add(f"blocks.{i}.adaLN_modulation", 6 * D, C)
        shapes["output_layer.norm_final.weight"] = (D,)
        add("output_layer.linear", self.vocab_size, D)
        add("output_layer.adaLN_modulation", 2 * D, C)
        if self.step_aware:
            for place in (*(f"blocks.{i}" for i in range(n)), "output_layer"):
                add(f"{place}.condition_fuser", C, 2 * C)
        generator = torch.Generator().manual_seed(seed)
        state = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
        head_width = D // self.num_heads
        state["rotary_emb.inv_freq"] = 1 / 10000 ** (torch.arange(0, head_width, 2).float() / head_width)
        return state

    def logits(self, state: State, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        w = {name: value.double() for name, value in state.items()}

        def dense(name: str, x: Tensor) -> Tensor:
            y = x @ w[f"{name}.weight"].T
            return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

        def embed(name: str, value: Tensor) -> Tensor:
            angle = value.double()[:, None] * torch.exp(-math.log(10000) * torch.arange(128).double() / 128)
            waves = torch.cat((angle.cos(), angle.sin()), 1)
            return dense(f"{name}.mlp.2", F.silu(dense(f"{name}.mlp.0", waves)))

        def condition(place: str) -> Tensor:
            if not self.step_aware:
                return F.silu(embed("time_embedding", t))
            both = torch.cat((embed("time_embedding", t), embed("dt_embedding", h)), 1)
            return F.silu(dense(f"{place}.condition_fuser", F.silu(dense("time_condition_fuser", both))))

        def norm(name: str, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            centred = x - x.mean(-1, keepdim=True)
            unit = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return unit * w[f"{name}.weight"] * (1 + scale[:, None]) + shift[:, None]

        batch, length = x_t.shape
        position = torch.arange(length).double()[:, None] * w["rotary_emb.inv_freq"]
        cos, sin = torch.cat((position.cos(),) * 2, -1), torch.cat((position.sin(),) * 2, -1)

        def heads(name: str, x: Tensor, *, turned: bool) -> Tensor:
            y = dense(name, x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin if turned else y

        x = w["vocab_embed.weight"][x_t]
        for i in range(self.num_blocks):
            name = f"blocks.{i}"
            shift, scale, gate, shift_m, scale_m, gate_m = dense(f"{name}.adaLN_modulation", condition(name)).chunk(
                6, 1
            )
            y = norm(f"{name}.norm1", x, shift, scale)
            q, k, v = (heads(f"{name}.{part}", y, turned=part != "vw") for part in ("qw", "kw", "vw"))
            scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
            y = dense(f"{name}.attn_out", (scores @ v).transpose(1, 2).reshape(batch, length, -1))
            x = x + gate[:, None] * y
            y = dense(f"{name}.mlp.0", norm(f"{name}.norm2", x, shift_m, scale_m))
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + gate_m[:, None] * dense(f"{name}.mlp.2", y)
        shift, scale = dense("output_layer.adaLN_modulation", condition("output_layer")).chunk(2, 1)
        return dense("output_layer.linear", norm("output_layer.norm_final", x, shift, scale))

    def content(self, seed: int = 0) -> dict[str, object]:
        """What a released file holds: the averaged weights have the seed, those as trained the next one."""
        samplers = {
            "step": 7,
            "train_sampler": {"epoch": 0, "_counter": 3},
            "test_sampler": {"epoch": 0, "_counter": 0},
        }
        moments = {i: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(5, 3)} for i in range(3)}
        optimizer = {"state": moments, "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95), "params": [0, 1, 2]}]}
        if not self.step_aware:
            return {**samplers, "model": self.weights(seed), "optimizer": optimizer}
        models = {"student_model": self.weights(seed + 1), "student_ema_model": self.weights(seed)}
        return {**samplers, **models, "student_optimizer": optimizer}

    def save(self, path: Path, seed: int = 0) -> Path:
        torch.save(self.content(seed), path)
        return path


def inputs(vocab_size: int, rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, t and h of some rows."""
    generator = torch.Generator().manual_seed(5)
    x_t = torch.randint(vocab_size, (rows, length), generator=generator)
    return x_t, torch.rand(rows, generator=generator), 2.0 ** -torch.arange(rows)
