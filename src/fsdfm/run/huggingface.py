"""Hugging Face folders become checkpoints: autoregressive models as denoisers, masked ones as they are.

An autoregressive model predicts token i+1 at position i and sees the past. As a denoiser it keeps its weights; its
attention sees everything (at once, or opened while it trains: `model.open_steps`), its output stays shifted by one or
not, and time enters by a conditioning that is zero at the start. Under the causal mask its logits are the original's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from fsdfm import flow
from fsdfm.checkpoint import Checkpoint, check_new, make_source, save_model
from fsdfm.checkpoint.hub import snapshot_name
from fsdfm.checkpoint.huggingface import FolderWeights, find_family, open_folder, read_bos_id, read_tokenizer
from fsdfm.model import Transformer

__all__ = ["SourceName", "import_folder"]

SourceName = Literal["uniform", "mask", "mixture"]
_LENGTH = 1024  # tokens per block unless said, if the model knows as many
_RULES = {"llada": "llada", "Dream": "dream-entropy"}  # how their authors sample


def import_folder(
    folder: str | Path,
    out: str | Path,
    *,
    source: SourceName | None = None,
    shift: bool = True,
    length: int | None = None,
    half: bool = False,
    seed: int = 0,
    console: Console | None = None,
) -> Checkpoint:
    """Make a checkpoint folder of a Hugging Face folder: Llama, SmolLM2, Qwen2, Qwen3, GPT-2, LLaDA or Dream.

    Tensors are read, checked and written one at a time, so what is returned has the model's shapes alone.

    source   of an autoregressive model: uniform (unless said), mask or mixture; LLaDA and Dream have a mask already
    shift    keep the next-token shift of an autoregressive model
    length   tokens per block; 1,024, or as many as the model knows
    half     store bfloat16, as most are published, in place of float32
    """
    check_new(Path(out))
    changes = _changes(folder, source, shift=shift)
    with open_folder(folder, **changes) as weights:
        checkpoint = _described(weights, source or "uniform", length)
        with (console or Console(stderr=True)).status(f"reading {folder}"):
            name = snapshot_name(Path(folder)) or Path(folder).name
            about = {"file": name, "group": weights.about["model_type"], "sha256": weights.sha256()}
            checkpoint = replace(checkpoint, facts={**checkpoint.facts, "imported": about})
            save_model(
                out, checkpoint, dtype=torch.bfloat16 if half else torch.float32, tensors=weights.all_tensors(seed)
            )
    return checkpoint


def _changes(folder: str | Path, source: SourceName | None, *, shift: bool) -> dict[str, Any]:
    """What an import changes in a network: nothing in one that is a denoiser already."""
    name, family = find_family(folder)
    if family.autoregressive:
        return {"next_token": shift, "conditioning": "time"}
    if source not in (None, "mask") or not shift:
        raise ValueError(f"{folder} is a {name} model, a denoiser already: leave out the source and the shift")
    return {}


def _described(weights: FolderWeights, source: SourceName, length: int | None) -> Checkpoint:
    """Everything but the weights; rows of the vocabulary that no token uses are left out."""
    tokenizer, kind = read_tokenizer(weights.folder), weights.about["model_type"]
    num_tokens, options = tokenizer.vocab_size, {}
    if weights.family.autoregressive:
        weights.keep_tokens(num_tokens, mask=source != "uniform")
    else:
        source, options = "mask", {"mask_token": _mask_token(weights)}
        weights.keep_tokens(max(num_tokens, options["mask_token"] + 1))
    network = weights.config
    with torch.device("meta"):
        model = Transformer(network).eval()
    facts: dict[str, Any] = {"weights": "weights as published"}
    if kind in _RULES:
        facts["sampling"] = {"jump": _RULES[kind]}
    return Checkpoint(
        model,
        flow.MixturePath(make_source({"name": source, "vocab_size": network.vocab_size, **options})),
        tokenizer,
        length=_block_length(length, network.max_length),
        bos_id=read_bos_id(weights.folder, tokenizer) if network.next_token else None,
        facts=facts,
    )


def _mask_token(weights: FolderWeights) -> int:
    found = weights.about.get("mask_token_id")
    if not isinstance(found, int) or not 0 <= found < weights.stored_rows:
        raise ValueError(
            f"{weights.folder / 'config.json'}: mask_token_id is {found!r}; a {weights.about['model_type']} model "
            f"needs one of its tokens 0 .. {weights.stored_rows - 1} there"
        )
    return found


def _block_length(length: int | None, known: int) -> int:
    chosen = min(_LENGTH, known) if length is None else length
    if not 1 <= chosen <= known:
        raise ValueError(f"length is {length}; allowed are 1 to {known}, the tokens that the model knows")
    return chosen
