"""A model that writes text without PyTorch: its trunk as an ONNX graph, the sampler in numpy beside it.

    export_onnx("fewstep", "exported/")
    $ python exported/generate.py "Once upon a time"      # numpy, onnxruntime, tokenizers

What is exported is the law of `lm.generate` in one block with the rules `exact` and `spaced`: an independent posterior,
or a causal head of Llama's style, whose blocks become arrays that numpy multiplies. The graph is checked against the
network before anything is written: its outputs agree to 1e-4.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsdfm.adapters import portable
from fsdfm.checkpoint import Checkpoint, check_new, load_model
from fsdfm.files import replace_file, write_text
from fsdfm.flow import MixtureSource, PolynomialSchedule
from fsdfm.model.causal_head import CausalHead
from fsdfm.model.causal_loop import are_plain
from fsdfm.model.layers import Block, rotary_phases

__all__ = ["export_onnx"]

_TOLERANCE = 1e-4


class _Graph(nn.Module):
    """What becomes the graph: x_t [1, L], t [1], h [1] to features [1, L, C], or to a causal head's two inputs."""

    def __init__(self, model: Any, head: CausalHead | None):
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x_t: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        features = self.model.trunk(x_t, t, h)
        return (features,) if self.head is None else self.head.inputs(features, t, h)


def export_onnx(model: str | Path | None, out: str | Path) -> Path:
    """Write trunk.onnx, weights.npz, portable.json, tokenizer.json and generate.py into a new folder."""
    out = Path(out)
    check_new(out)
    _require_packages()
    checkpoint = load_model(model)
    head = _known_head(checkpoint)
    graph = _Graph(checkpoint.model, head).eval()
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as aside:
        place = Path(aside)
        _write_graph(graph, place / "trunk.onnx", checkpoint)
        np.savez(place / "weights.npz", **_weights(checkpoint, head))
        write_text(place / "portable.json", json.dumps(_describe(checkpoint, head), indent=1) + "\n")
        write_text(place / "tokenizer.json", checkpoint.tokenizer.definition)
        shutil.copyfile(portable.__file__, place / "generate.py")
        for file in sorted(place.iterdir()):
            replace_file(out / file.name, lambda side, file=file: shutil.copyfile(file, side))  # type: ignore[misc]
    return out


def _require_packages() -> None:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError("an export needs onnx: pip install 'fsdfm[onnx]'") from error


def _known_head(checkpoint: Checkpoint) -> CausalHead | None:
    """The model's causal head, if it has one; what numpy has no law for is refused."""
    head = getattr(checkpoint.model, "joint", None)
    if not isinstance(checkpoint.path.schedule, PolynomialSchedule):
        raise ValueError(f"the schedule is {checkpoint.path.schedule}; exported models know PolynomialSchedule alone")
    if head is not None and not isinstance(head, CausalHead):
        raise ValueError(f"the posterior is a {type(head).__name__}; exported models know independent and causal ones")
    if head is not None and not are_plain(head.blocks):
        raise ValueError("the causal head has no plain blocks of Llama's style; exported models know these alone")
    return head


@torch.no_grad()
def _write_graph(graph: _Graph, file: Path, checkpoint: Checkpoint) -> None:
    """Export for every length, and compare with the network at two."""
    import onnxruntime

    size = min(checkpoint.length, 16)
    example = _example(checkpoint, size)
    length = torch.export.Dim("length", min=2, max=checkpoint.length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        torch.onnx.export(
            graph,
            example,
            str(file),
            input_names=["x_t", "t", "h"],
            dynamic_shapes=({1: length}, None, None),
            external_data=False,
            dynamo=True,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    for count in {size, checkpoint.length}:
        asked = _example(checkpoint, count)
        inputs = {name: value.numpy() for name, value in zip(("x_t", "t", "h"), asked, strict=True) if name in names}
        for found, expected in zip(session.run(None, inputs), graph(*asked), strict=True):
            worst = float((torch.from_numpy(found) - expected).abs().max())
            if not worst <= _TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ValueError(
                    f"the graph differs from the network by {worst:.3g} at {count} tokens; nothing is kept"
                )


def _example(checkpoint: Checkpoint, length: int) -> tuple[Tensor, Tensor, Tensor]:
    x_t = torch.arange(length)[None] * 7919 % checkpoint.model.config.vocab_size
    return x_t, torch.full((1,), 0.25, dtype=torch.float64), torch.full((1,), 0.125, dtype=torch.float64)


@torch.no_grad()
def _weights(checkpoint: Checkpoint, head: CausalHead | None) -> dict[str, Any]:
    """The vocabulary's matrix and what a causal head multiplies by."""
    model: Any = checkpoint.model
    width = model.embedding.weight.shape[1]
    bias = model.logits_at(torch.zeros(1, width))[0]
    kept = {"head": (model.logits_at(torch.eye(width)) - bias).T, "head_bias": bias}
    if head is None:
        return {name: value.contiguous().numpy() for name, value in kept.items()}
    kept |= {"embedding": model.embedding.weight, "combine": head.combine.weight, "norm": head.norm.weight}
    kept["cos"], kept["sin"] = rotary_phases(checkpoint.length, head.head_width)
    for number, block in enumerate(head.blocks):
        assert isinstance(block, Block)
        kept |= {
            f"{number}.norm_attention": block.norm_attention.weight,
            f"{number}.norm_mlp": block.norm_mlp.weight,
            f"{number}.qkv": block.attention.qkv.weight,
            f"{number}.project": block.attention.out.weight,
            f"{number}.into": block.mlp.into.weight,
            f"{number}.out": block.mlp.out.weight,
        }
    return {name: value.detach().contiguous().numpy() for name, value in kept.items()}


def _describe(checkpoint: Checkpoint, head: CausalHead | None) -> dict[str, Any]:
    source, schedule, eos = checkpoint.path.source, checkpoint.path.schedule, checkpoint.tokenizer.eos_id
    assert isinstance(schedule, PolynomialSchedule)
    banned = {source.mask_token, checkpoint.bos_id} - {None, eos}
    told: dict[str, Any] = {
        "format": "fsdfm-portable",
        "vocab_size": source.vocab_size,
        "source": type(source).__name__.removesuffix("Source").lower(),
        "mask": source.mask_token,
        "mask_share": source.mask_share if isinstance(source, MixtureSource) else None,
        "movable": "masked" if type(source).__name__ == "MaskSource" else "all",
        "exponent": schedule.exponent,
        "length": checkpoint.length,
        "first": eos if checkpoint.bos_id is None else checkpoint.bos_id,
        "eos": eos,
        "banned": sorted(banned),
        "head": "independent" if head is None else "causal",
        "advice": dict(checkpoint.facts.get("sampling", {})),
    }
    if head is not None:
        block = head.blocks[0]
        assert isinstance(block, Block)
        causal = {"num_blocks": len(head.blocks), "num_heads": block.attention.num_heads, "eps": block.norm_mlp.eps}
        told["causal"] = causal
    return told
