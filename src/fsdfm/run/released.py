"""The paper's released weights, made a checkpoint folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from fsdfm import data, flow
from fsdfm.checkpoint import (
    Checkpoint,
    ReleasedConfig,
    ReleasedWeights,
    WeightsName,
    check_new,
    open_released,
    preset_settings,
    read_settings,
    save_model,
)
from fsdfm.files import file_sha256
from fsdfm.model import DiT
from fsdfm.terminal import printable

__all__ = ["import_released"]

_WEIGHTS = {"ema": "averaged weights", "raw": "weights as trained", "teacher": "the teacher's weights"}
_BUDGETS = tuple(2**k for k in range(11))  # 1, 2, 4, ... 1024 steps


def import_released(
    file: str | Path,
    out: str | Path,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    weights: WeightsName | None = None,
    tokenizer: str = "gpt2",
    half: bool = False,
    console: Console | None = None,
) -> Checkpoint:
    """Make a checkpoint folder of one of the paper's released .pth files; nothing in the file is run.

    Tensors are read, checked and written one at a time, so what is returned has the model's shapes alone.

    preset, config   the settings: a size of the paper's, or a JSON file; neither: what the tensors tell
    weights          `ema`, `raw` or `teacher`; None: the averaged ones, and those as trained if there are none
    """
    if preset is not None and config is not None:
        raise ValueError(f"both preset {preset!r} and config {str(config)!r} are given; the settings come from one")
    settings = ReleasedConfig() if preset is None else preset_settings(preset)
    settings = settings if config is None else read_settings(config)
    check_new(Path(out))
    console = console or Console(stderr=True)
    dtype = torch.float16 if half else torch.float32
    with open_released(file, settings, weights, dtype=dtype) as released:
        checkpoint = _released_checkpoint(released, data.make_tokenizer(tokenizer), console)
        size = released.path.stat().st_size / 1e9
        with console.status(Text(printable(f"reading {released.path}, {size:.1f} GB"))):
            about = {"file": released.path.name, "group": released.group, "sha256": file_sha256(released.path)}
            checkpoint = replace(checkpoint, facts={**checkpoint.facts, "imported": about})
            save_model(out, checkpoint, dtype=dtype, tensors=released)
    return checkpoint


def _released_checkpoint(released: ReleasedWeights, tokenizer: data.Tokenizer, console: Console) -> Checkpoint:
    """Everything but the weights; with one more token than the tokenizer has, the source is the mask."""
    network, settings, num_tokens = released.config, released.settings, tokenizer.vocab_size
    masked = settings.source == "mask" or (settings.source is None and network.vocab_size == num_tokens + 1)
    known = network.vocab_size - masked
    if known > num_tokens:
        raise ValueError(
            f"{released.path} has {known} tokens and the tokenizer only {num_tokens}; name the model's own tokenizer"
        )
    if known < num_tokens:
        console.print(
            f"warning: the model knows only the first {known} of the tokenizer's {num_tokens} tokens; "
            "it can write with it, but not read every text",
            highlight=False,
            soft_wrap=True,
        )
    with torch.device("meta"):
        model = DiT(network).eval()
    facts: dict[str, Any] = {"weights": _WEIGHTS[released.kind]}
    if released.training_step is not None:
        facts["training_step"] = released.training_step
    return Checkpoint(
        model,
        flow.MixturePath((flow.MaskSource if masked else flow.UniformSource)(network.vocab_size)),
        tokenizer,
        length=settings.length,
        budgets=_BUDGETS if network.is_step_aware else None,
        facts=facts,
    )
