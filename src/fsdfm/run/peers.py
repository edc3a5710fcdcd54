"""The peers' published weights, made checkpoint folders: MDLM, Duo, SEDD, SDTT, HDLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, check_new, save_model
from fsdfm.files import file_sha256
from fsdfm.model import DiT, ModelConfig
from fsdfm.peers.layouts import SYSTEMS, EmaOrRaw, PeerWeights, System, open_layout

__all__ = ["import_peer"]

_WEIGHTS = {"ema": "averaged weights", "raw": "weights as its authors published them"}
_NETWORKS: dict[System, dict[str, str]] = {
    "mdlm": {"clock": "none"},
    "sdtt": {"clock": "none"},
    "hdlm-epsilon": {"clock": "none"},
    "hdlm-gamma": {"clock": "hybrid"},
    "sedd-absorb": {},  # the clock is that of its noise
    "sedd-uniform": {"says": "uniform-scores"},
    "duo": {"clock": "sigma", "says": "leave-one-out"},
}


def import_peer(
    source: str | Path,
    out: str | Path,
    *,
    system: str | None = None,
    weights: str | None = None,
    tokenizer: str = "gpt2",
    half: bool = False,
    console: Console | None = None,
) -> Checkpoint:
    """Make a checkpoint folder of a peer's weights; nothing in the file is run, tensors are written one at a time."""
    if system is not None and system not in SYSTEMS:
        raise ValueError(f"system is {system!r}; allowed are {', '.join(SYSTEMS)}")
    if weights not in (None, "ema", "raw"):
        raise ValueError(f"weights is {weights!r}; allowed are ema and raw")
    check_new(Path(out))
    console = console or Console(stderr=True)
    dtype = torch.float16 if half else torch.float32
    chosen = cast(EmaOrRaw | None, weights)
    with open_layout(source, system=system, weights=chosen) as found:
        checkpoint = _checkpoint(found, data.make_tokenizer(tokenizer))
        with console.status(f"reading {found.path}, {found.path.stat().st_size / 1e9:.1f} GB"):
            about = {"file": found.path.name, "group": found.system, "sha256": file_sha256(found.path)}
            checkpoint = replace(checkpoint, facts={**checkpoint.facts, "imported": about})
            save_model(out, checkpoint, dtype=dtype, tensors=_Trimmed(found, checkpoint.model.config.vocab_size))
    return checkpoint


class _Trimmed(Mapping[str, Tensor]):
    """Tensors without the rows of tokens that the tokenizer does not have."""

    def __init__(self, tensors: PeerWeights, vocab_size: int):
        self.tensors, self.vocab_size = tensors, vocab_size

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        by_token = name.startswith(("embedding.", "head."))
        return self.tensors[name][: self.vocab_size] if by_token else self.tensors[name]


def _checkpoint(found: PeerWeights, tokenizer: data.Tokenizer) -> Checkpoint:
    """Everything but the weights; Duo's [PAD], a token more that its data never hold, is left out."""
    theirs, ours = found.config.vocab_size, tokenizer.vocab_size + found.masked
    if theirs != ours and (found.system, theirs) != ("duo", ours + 1):
        raise ValueError(
            f"{found.path} has {theirs} tokens{', the mask included' if found.masked else ''}, and the tokenizer "
            f"{tokenizer.vocab_size}; name the model's own tokenizer"
        )
    gamma = found.about.gamma if found.system == "hdlm-gamma" else 0.0
    changes = {"vocab_size": ours, "blend": gamma, **_NETWORKS[found.system]}
    if found.system.startswith("sedd"):
        changes["clock"] = "geometric" if found.geometric else "sigma"
    network = ModelConfig.from_dict({**found.config.to_dict(), **changes})
    with torch.device("meta"):
        model = DiT(network).eval()
    source = (flow.MaskSource if found.masked else flow.UniformSource)(network.vocab_size)
    facts: dict[str, Any] = {"weights": _WEIGHTS[found.kind], "objective": {"kind": found.system}}
    if found.system.startswith("sedd"):
        facts["objective"]["noise"] = "geometric" if found.geometric else "log-linear"
    if gamma:
        facts["objective"]["gamma"] = gamma
        facts["sampling"] = {"jump": f"hdlm-gamma:gamma={gamma}"}
    return Checkpoint(model, flow.MixturePath(source), tokenizer, length=found.about.length, facts=facts)
