"""Small random models of each family, saved as Hugging Face folders by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from fsdfm.checkpoint.huggingface import FAMILIES, Family
from fsdfm.model import Transformer, TransformerConfig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHARED: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
FAMILY_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-biased": ("Llama", {"attention_bias": True, "head_dim": 20}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}),
}


def save_family(name: str, folder: Path, *, shard: str = "40KB") -> Any:
    """The transformers model of a family, which it has saved with its tokenizer; its weights are far from zero."""
    transformers = pytest.importorskip("transformers", reason="transformers makes the models that are compared")
    kind, changes = FAMILY_SETTINGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:  # biases and norms, which begin as 0 and 1
                value.add_(torch.randn(value.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path, *, normaliser: bool = False) -> None:
    """A byte-level BPE of 300 tokens, the first of which ends a document."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    if normaliser:
        backend.normalizer = tokenizers.normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|end|>", "<|pad|>"], initial_alphabet=alphabet
    )
    text = "once upon a time there was a little dog who liked to play with a red ball in the garden"
    backend.train_from_iterator([text] * 20, trainer)
    backend.save(str(folder / "tokenizer.json"))
    notes = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(notes))


def save_masked(kind: str, folder: Path) -> Transformer:
    """A random LLaDA or Dream folder under the published names, its mask token 299; the network that is in it."""
    about: dict[str, Any] = {"model_type": kind, "mask_token_id": 299, "eos_token_id": 0}
    if kind == "llada":
        about |= {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 48}
        about |= {"embedding_size": 310, "rope_theta": 5e5, "max_sequence_length": 64}
    else:
        about |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        about |= {"intermediate_size": 48, "vocab_size": 310, "max_position_embeddings": 64, "bos_token_id": 1}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    family = FAMILIES[kind]
    model = Transformer(TransformerConfig.from_dict(family.settings(about))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.3)
    save_file(_published(model, family), folder / "model.safetensors")
    save_tokenizer(folder)
    return model


def _published(model: Transformer, family: Family) -> dict[str, torch.Tensor]:
    """A network's tensors under a family's names, those that are joined here taken apart."""
    config, state = model.config, model.state_dict()
    heads = [count * config.head_width for count in (config.num_heads, config.kv_heads, config.kv_heads)]
    found = {}
    for ours, theirs in family.names.items():
        for i in range(config.num_blocks) if "{i}" in ours else (0,):
            if (name := ours.format(i=i)) in state:
                sizes = heads if len(theirs) == 3 else [len(state[name]) // len(theirs)] * len(theirs)
                parts = torch.split(state[name], sizes)
                found |= {part.format(i=i): value.clone() for part, value in zip(theirs, parts, strict=True)}
    return found
