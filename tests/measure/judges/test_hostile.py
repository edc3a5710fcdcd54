"""Judges of strangers: what a header claims allocates nothing, and ends in a sentence."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdfm.data import Tokenizer
from fsdfm.measure.judges import load_causal, save_causal
from fsdfm.measure.judges.gemma import gemma_judge
from fsdfm.measure.judges.gguf import GgufFile, llama_judge, read_gguf
from fsdfm.model import CausalConfig, CausalModel

CONFIG = CausalConfig(vocab_size=257, width=16, num_blocks=1, num_heads=2, style="llama", max_length=32)


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def gguf(*, tensors: bytes = b"", num_tensors: int = 0, values: bytes = b"", num_values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + values + tensors


NESTED = text("a") + b"".join(struct.pack("<IQ", 9, 1) for _ in range(5000))
HEADERS = {
    "values": gguf(num_values=2**60),
    "tensors": gguf(num_tensors=2**60),
    "array": gguf(values=text("a") + struct.pack("<IIQ", 9, 7, 2**40), num_values=1),
    "nested": gguf(values=NESTED, num_values=1),
    "an array of arrays": gguf(values=text("a") + struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 7), num_values=1),
    "axes": gguf(tensors=text("t") + struct.pack("<I", 2**32 - 1), num_tensors=1),
    "alignment": gguf(values=text("general.alignment") + struct.pack("<II", 4, 0), num_values=1),
    "a word for a number": gguf(values=text("general.alignment") + struct.pack("<I", 8) + text("x"), num_values=1),
    "a long string": gguf(values=struct.pack("<Q", 2**63), num_values=1),
    "kind": gguf(values=text("a") + struct.pack("<I", 99), num_values=1),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_gguf_header_is_not_believed(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(HEADERS[name])
    tracemalloc.start()
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


FACTS = {
    "llama.embedding_length": 16,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.feed_forward_length": 32,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 32,
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.merges": [],
}


@pytest.mark.parametrize(
    "change",
    [
        {"llama.embedding_length": 2**40},
        {"llama.block_count": 10**9},
        {"llama.attention.head_count": 0},
        {"llama.attention.head_count": "two"},
        {"llama.feed_forward_length": None},
        {"tokenizer.ggml.tokens": 5},
        {},
    ],
)
def test_a_network_that_the_file_does_not_hold_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    pytest.importorskip("gguf", reason="the extra `judge`")
    file = tmp_path / "a.gguf"
    file.write_bytes(b"\0" * 100)
    data = np.fromfile(file, dtype=np.uint8)
    tensors = {"token_embd.weight": ((2, 2**40), 0, 0)}
    with pytest.raises(ValueError, match="no Llama network that can be read"):
        llama_judge(GgufFile(file.name, data, {**FACTS, **change}, tensors), name="x")
    with pytest.raises(ValueError, match="no Llama network that can be read .KeyError"):
        llama_judge(GgufFile(file.name, data, {}, tensors), name="x")
    with pytest.raises(ValueError, match="no Gemma 3 network that can be read"):
        gemma_judge(GgufFile(file.name, data, {}, tensors), name="x")


@pytest.mark.parametrize(
    "change",
    [
        {"model": {**CONFIG.to_dict(), "num_blocks": 10**9}},
        {"model": {**CONFIG.to_dict(), "width": 2**40}},
        {"model": {**CONFIG.to_dict(), "width": "x"}},
        {"model": 3},
        {"model": None},
    ],
)
def test_a_folder_of_ours_is_not_believed_either(tmp_path: Path, change: dict[str, object]) -> None:
    folder = save_causal(tmp_path / "m", CausalModel(CONFIG), Tokenizer.bytes())
    record = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(ValueError, match="does not fit its config.json"):
        load_causal(folder)
    (folder / "config.json").write_text(json.dumps({"format": record["format"], "model": record["model"]}))
    with pytest.raises(ValueError, match="another tokenizer"):
        load_causal(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="no causal model"):
        load_causal(folder)


def test_what_is_loaded_has_its_weights() -> None:
    """Built without memory, filled from the file: nothing may stay empty."""
    assert not any(p.is_meta for p in CausalModel(CONFIG).parameters())
    with torch.device("meta"):
        assert all(p.is_meta for p in CausalModel(CONFIG).parameters())


def test_tensors_do_not_share_bytes() -> None:
    """A thousand blocks over the same bytes took a thousand times the memory of the file."""
    data = np.zeros(256, np.uint8)
    for other in (0, 32):  # the same bytes, half of them
        file = GgufFile("a.gguf", data, {}, {"a": ((16,), 0, 0), "b": ((16,), 0, other), "c": ((16,), 0, 128)})
        with pytest.raises(ValueError, match="not for it alone"):
            file.tensor("a")
        assert file.tensor("c").shape == (16,)


def test_the_end_of_a_header_is_known(tmp_path: Path) -> None:
    """A file with holes has as many bytes as it says: values of nothing were read for hours."""
    (tmp_path / "a.gguf").write_bytes(gguf(values=text("a") + struct.pack("<IIQ", 9, 0, 2**31), num_values=1))
    os.truncate(tmp_path / "a.gguf", 2**32)
    with pytest.raises(ValueError, match="does not fit the file|beyond the end"):
        read_gguf(tmp_path / "a.gguf")


def test_a_judge_is_a_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="not a plain file"):
        read_gguf(tmp_path / "a.gguf")
