"""GGUF files of small networks, as llama.cpp stores them."""

from __future__ import annotations

from typing import Any


def add_shape(writer: Any, config: Any) -> None:
    """What every architecture says of its sizes, from a config of transformers."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_file(writer: Any) -> None:
    """All that was added, on the disk."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
