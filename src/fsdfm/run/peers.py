"""The peers' published weights, made checkpoint folders: MDLM, Duo, SEDD, SDTT, epsilon-HDLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

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
    "sedd-absorb": {"clock": "sigma"},
    "duo": {"clock": "sigma", "says": "leave-one-out"},
}
_REFUSED: dict[System, str] = {
    "sedd-uniform": "its network is told the sigma of a geometric schedule, which no checkpoint of ours can say",
    "hdlm-gamma": "its network blends the mask into every embedding by the noise of the position",
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
        if found.system in _REFUSED:
            raise ValueError(
                f"{found.path} holds {found.system}: {_REFUSED[found.system]}; fsdfm.peers.network runs it, "
                "generate, evaluate and train cannot"
            )
        bundle = _checkpoint(found, data.make_tokenizer(tokenizer))
        with console.status(f"reading {found.path}, {found.path.stat().st_size / 1e9:.1f} GB"):
            about = {"file": found.path.name, "group": found.system, "sha256": file_sha256(found.path)}
            bundle = replace(bundle, facts={**bundle.facts, "imported": about})
            save_model(out, bundle, dtype=dtype, tensors=found)
    return bundle


def _checkpoint(found: PeerWeights, tokenizer: data.Tokenizer) -> Checkpoint:
    """Everything but the weights. Duo's vocabulary has a token more than the tokenizer, which its data never hold."""
    network = ModelConfig.from_dict({**found.config.to_dict(), **_NETWORKS[found.system]})
    if not tokenizer.vocab_size <= network.vocab_size <= tokenizer.vocab_size + 1 or (
        found.masked and network.vocab_size != tokenizer.vocab_size + 1
    ):
        raise ValueError(
            f"{found.path} has {network.vocab_size} tokens{', the mask included' if found.masked else ''}, and the "
            f"tokenizer {tokenizer.vocab_size}; name the model's own tokenizer"
        )
    with torch.device("meta"):
        model = DiT(network).eval()
    source = (flow.MaskSource if found.masked else flow.UniformSource)(network.vocab_size)
    facts = {"weights": _WEIGHTS[found.kind], "objective": {"kind": found.system}}
    return Checkpoint(model, flow.MixturePath(source), tokenizer, length=found.about.length, facts=facts)
