"""A small network written the way the peers publish theirs."""

import json

import torch
from safetensors.torch import save_file

from fsdfm.model import DiT, ModelConfig
from fsdfm.peers.layouts import ema_order, our_names

CONFIG = ModelConfig(vocab_size=257, width=16, num_blocks=2, num_heads=2, cond_width=8, dropout=0.0)


def small_network(seed=0, **changes):
    """Random weights everywhere, also where training starts from zero."""
    model = DiT(ModelConfig.from_dict({**CONFIG.to_dict(), **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return model.eval()


def their_tensors(model):
    """Under the peers' names, with the rotary buffer."""
    named = {}
    for ours, theirs in our_names(model.config.num_blocks).items():
        for part in ("weight", "bias"):
            if f"{ours}.{part}" in model.state_dict():
                name = "vocab_embed.embedding" if ours == "embedding" else f"{theirs}.{part}"
                named[name] = model.state_dict()[f"{ours}.{part}"].clone()
    half = model.config.head_width // 2
    named["rotary_emb.inv_freq"] = 10000.0 ** (-torch.arange(half) / half)
    return named


def write_hugging_face(folder, model, prefix="backbone.", **config):
    """config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    save_file({prefix + name: value for name, value in their_tensors(model).items()}, folder / "model.safetensors")
    record = {"model_type": "mdlm", "n_heads": model.config.num_heads, "model_length": 16, "dropout": 0.1, **config}
    (folder / "config.json").write_text(json.dumps(record))
    return folder


def write_lightning(path, raw, averaged, **more):
    """A .ckpt with EMA weights as a list without names."""
    shadow = [their_tensors(averaged)[name] for name in ema_order(raw.config.num_blocks)]
    state = {f"backbone.{name}": value for name, value in their_tensors(raw).items()}
    torch.save({"state_dict": state, "ema": {"decay": 0.9999, "shadow_params": shadow}, **more}, path)
    return path
