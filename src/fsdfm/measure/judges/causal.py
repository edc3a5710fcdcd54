"""Judges that need nothing beyond this package: our causal model, from its own folder or a llama2.c file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fsdfm.checkpoint import convert_llama2c
from fsdfm.data import Tokenizer
from fsdfm.files import read_text, write_json
from fsdfm.measure.judges.scoring import TokenJudge
from fsdfm.model import CausalConfig, CausalModel

__all__ = ["causal_judge", "is_causal_folder", "llama2c_judge", "load_causal", "read_causal", "save_causal"]

_FORMAT = "fsdfm-causal"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_BOS = "<s>"


def causal_judge(
    model: CausalModel,
    tokenizer: Tokenizer,
    *,
    name: str,
    bos_id: int | None = None,
    device: torch.device | str = "cpu",
) -> TokenJudge:
    """A `CausalModel` with its tokenizer; the model is put into eval mode and its weights are not touched."""
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {model.config.vocab_size}; "
            "give the tokenizer that the model was trained with"
        )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return TokenJudge(
        name=name,
        nll=model.to(device).eval().nll,
        hidden=model.trunk,
        encode=tokenizer.encode_batch,
        max_length=model.config.max_length,
        vocab_size=model.config.vocab_size,
        bos_id=bos_id,
        details={"dtype": dtype, "num_parameters": sum(p.numel() for p in model.parameters())},
        device=device,
    )


def llama2c_judge(
    checkpoint: str | Path, tokenizer: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> TokenJudge:
    """A llama2.c file such as stories15M.bin, over its whole vocabulary; before a text stands <s>.

    The tokenizer is the `tokenizer.bin` beside the checkpoint if none is named, else what follows the weights.
    """
    checkpoint = Path(checkpoint)
    beside = checkpoint.with_name("tokenizer.bin")
    if tokenizer is None and beside.is_file():
        tokenizer = beside
    for file in (checkpoint, tokenizer):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{file} is not a file; name a llama2.c .bin with its tokenizer.bin beside it")
    parts = convert_llama2c(checkpoint, tokenizer)
    return causal_judge(
        parts.causal,
        Tokenizer(parts.tokenizer.to_str(), _BOS),
        name=checkpoint.stem.lower(),
        bos_id=parts.bos_id,
        device=device,
    )


def save_causal(folder: str | Path, model: CausalModel, tokenizer: Tokenizer, *, bos_id: int | None = None) -> Path:
    """Write a causal model for `load_causal`: config.json, model.safetensors, tokenizer.json."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty; choose another folder, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    config = {"format": _FORMAT, "model": model.config.to_dict(), "bos_id": bos_id, "tokenizer": tokenizer.hash}
    tokenizer.save(folder)
    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, folder / _WEIGHTS)
    write_json(folder / _CONFIG, config, indent=2)
    return folder


def is_causal_folder(folder: str | Path) -> bool:
    """Does the folder hold what `save_causal` writes?"""
    return _read_config(Path(folder)).get("format") == _FORMAT


def load_causal(folder: str | Path, *, device: torch.device | str = "cpu") -> TokenJudge:
    """The causal model in a folder, as a judge; every tensor must fit."""
    model, tokenizer, bos_id = read_causal(folder)
    return causal_judge(model, tokenizer, name=Path(folder).name, bos_id=bos_id, device=device)


def read_causal(folder: str | Path) -> tuple[CausalModel, Tokenizer, int | None]:
    """The causal model in a folder, its tokenizer and its first token."""
    folder = Path(folder)
    config = _read_config(folder)
    if config.get("format") != _FORMAT:
        raise ValueError(f"{folder} holds no causal model of ours; name a folder that save_causal wrote")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.hash != config.get("tokenizer"):
        raise ValueError(f"{folder} has another tokenizer than its {_CONFIG} names; get it again")
    try:
        if not (folder / _WEIGHTS).is_file():
            raise ValueError("it is missing, or no plain file")
        tensors = load_file(folder / _WEIGHTS)
        network = CausalConfig.from_dict(config["model"])
        if network.num_blocks > len(tensors):  # before a million empty blocks are built
            raise ValueError(f"it has {len(tensors)} tensors, too few for {network.num_blocks} blocks")
        with torch.device("meta"):  # what is allocated is what the file holds, not what config.json says
            model = CausalModel(network)
        model.load_state_dict({name: value.float() for name, value in tensors.items()}, assign=True)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, OverflowError, SafetensorError) as error:
        raise ValueError(
            f"{folder / _WEIGHTS} does not fit its {_CONFIG} ({str(error)[:200]}); get it again"
        ) from error
    return model, tokenizer, config.get("bos_id")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(folder / _CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
