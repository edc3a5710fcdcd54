"""llama2.c files made here, read back, and compared with llama2.c's own arithmetic."""

from __future__ import annotations

import math
import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llama2c_files import PIECES, STORIES, VOCAB_SIZE, Llama, write_vocabulary
from tokenizers import Tokenizer

from fsdfm import checkpoint as convert
from fsdfm.checkpoint import (
    Vocabulary,
    build_tokenizer,
    convert_llama2c,
    prune_vocabulary,
    read_llama2c,
    read_vocabulary,
)


def encode_greedily(vocabulary: Vocabulary, text: str) -> list[int]:
    """llama2.c's and sentencepiece's BPE: always the adjacent pair of the best score, the leftmost of equals."""
    scores = dict(list(zip(vocabulary.pieces, vocabulary.scores, strict=True))[259:])
    symbols: list[str] = []
    for character in " " + text if text else "":
        symbols += [character] if character in scores else [f"<0x{byte:02X}>" for byte in character.encode()]
    while True:
        found = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not found:
            return [vocabulary.pieces.index(symbol) for symbol in symbols]
        _, i = min(found)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return read_vocabulary(write_vocabulary(tmp_path_factory.mktemp("v") / "tokenizer.bin"), VOCAB_SIZE)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    return Llama().write(folder / "model.bin"), write_vocabulary(folder / "tokenizer.bin")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_the_causal_model_computes_what_llama2c_computes(tmp_path: Path, shared: bool, num_kv_heads: int) -> None:
    llama = Llama(shared=shared, num_kv_heads=num_kv_heads)
    model = read_llama2c(llama.write(tmp_path / "model.bin"))
    tokens = [1, 300, 270, 301, 265, 5, 299]
    logits = model(torch.tensor([tokens]))[0].detach().numpy()
    np.testing.assert_allclose(logits, llama.logits(tokens), atol=2e-4, rtol=1e-3)
    assert not model.training


def test_under_a_causal_mask_the_denoiser_is_the_causal_model(files: tuple[Path, Path]) -> None:
    parts = convert_llama2c(*files, STORIES)
    x, t = torch.arange(60).view(3, 20) * 7 % parts.causal.config.vocab_size, torch.tensor([0.0, 0.4, 1.0])
    expected = parts.causal(x)
    assert not torch.allclose(parts.denoiser(x, t)[:, 1:], expected[:, :-1], atol=1e-3)  # it sees the future
    for block in parts.denoiser.blocks:
        block.attention.causal = True
    assert torch.equal(parts.denoiser(x, t)[:, 1:], expected[:, :-1])
    child = parts.denoiser.step_aware()
    for block in child.blocks:
        block.attention.causal = True
    assert torch.equal(child(x, t, torch.full((3,), 0.125))[:, 1:], expected[:, :-1])


def test_a_pruned_model_gives_the_kept_tokens_their_old_logits(files: tuple[Path, Path]) -> None:
    whole, pruned = convert_llama2c(*files), convert_llama2c(*files, STORIES[:1])
    kept = torch.tensor(pruned.kept)
    assert len(kept) == pruned.causal.config.vocab_size == pruned.denoiser.config.vocab_size < VOCAB_SIZE
    ids = [pruned.bos_id, *pruned.tokenizer.encode(STORIES[0]).ids]
    old_ids = [whole.bos_id, *whole.tokenizer.encode(STORIES[0]).ids]
    assert kept[ids].tolist() == old_ids
    old = whole.causal(torch.tensor([old_ids]))[..., kept]
    torch.testing.assert_close(pruned.causal(torch.tensor([ids])), old, atol=1e-5, rtol=1e-5)
    assert pruned.causal.embedding.weight.data_ptr() != pruned.causal.head.weight.data_ptr()


def test_one_file_may_hold_both(files: tuple[Path, Path], tmp_path: Path) -> None:
    both = tmp_path / "llama2.data"
    both.write_bytes(files[0].read_bytes() + files[1].read_bytes())
    one, two = convert_llama2c(both), convert_llama2c(*files)
    assert one.tokenizer.to_str() == two.tokenizer.to_str()
    assert torch.equal(one.causal.head.weight, two.causal.head.weight)


def test_every_age_of_tokenizer_file_reads_the_same(vocabulary: Vocabulary, tmp_path: Path) -> None:
    for header in (True, False):
        for named_bytes in (True, False):
            path = write_vocabulary(tmp_path / "t.bin", header=header, named_bytes=named_bytes)
            assert read_vocabulary(path, VOCAB_SIZE) == vocabulary
    assert vocabulary.pieces[:4] == ("<unk>", "<s>", "</s>", "<0x00>")
    assert vocabulary.pieces[258] == "<0xFF>"


SCRAPS = [*PIECES, *"<s>0x▁é日🙂\t"]  # joined, they make merges compete
NAMES = ["<s>", "a <s> b</s>", "<unk>", "<0x0A>", "\n<s>\n"]  # of special tokens, as text
TEXTS = st.sampled_from(STORIES + NAMES) | st.lists(st.sampled_from(SCRAPS), max_size=25).map("".join) | st.text()


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_the_tokenizer_is_llama2cs_and_any_text_comes_back(vocabulary: Vocabulary, text: str) -> None:
    tokenizer = build_tokenizer(vocabulary)
    ids = tokenizer.encode(text).ids
    assert ids == encode_greedily(vocabulary, text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {0, 1, 2}


def test_the_tokenizer_survives_its_json(vocabulary: Vocabulary) -> None:
    tokenizer = build_tokenizer(vocabulary)
    again = Tokenizer.from_str(tokenizer.to_str())
    assert again.decode([1, *again.encode("The dog").ids, 1]) == "The dog"  # specials are known as such
    assert [again.encode(text).ids for text in STORIES] == [tokenizer.encode(text).ids for text in STORIES]
    assert again.token_to_id("<s>") == convert.BOS_ID


def test_pruning_keeps_the_corpus_encoding_and_drops_the_rest(vocabulary: Vocabulary) -> None:
    whole = build_tokenizer(vocabulary)
    keep = prune_vocabulary(vocabulary, STORIES[:2])
    pruned = build_tokenizer(vocabulary.select(keep))
    for text in STORIES[:2]:
        assert [keep[i] for i in pruned.encode(text).ids] == whole.encode(text).ids
    assert pruned.decode(pruned.encode(STORIES[2]).ids) == STORIES[2]
    assert keep[:259] == list(range(259))
    used = {i for text in STORIES[:2] for i in whole.encode(text).ids}
    assert used < set(keep) < set(range(VOCAB_SIZE))


def test_rare_tokens_are_spelled_out(vocabulary: Vocabulary) -> None:
    often = prune_vocabulary(vocabulary, STORIES, min_count=2)
    assert set(often) < set(prune_vocabulary(vocabulary, STORIES))
    tokenizer = build_tokenizer(vocabulary.select(often))
    for text in STORIES:
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids) == text
        assert sum(i < 259 for i in encoded.ids) == 3 * text.count("—")  # bytes only where they were before
    with pytest.raises(ValueError, match="min_count >= 1"):
        prune_vocabulary(vocabulary, STORIES, min_count=0)


@pytest.mark.parametrize(
    ("mangle", "words"),
    [
        (lambda data: data[:20], "begins with 28"),
        (lambda data: data[:-1], "cut off"),
        (lambda data: struct.pack("<I", 0x616B3432) + data[4:], "versioned format"),
        (lambda data: struct.pack("<i", -5) + data[4:], "no llama2.c checkpoint"),
        (lambda data: struct.pack("<i", 2**30) + data[4:], "no llama2.c checkpoint"),
        (lambda data: data[:8] + struct.pack("<i", 2**20) + data[12:], "cut off"),
        (lambda data: data[:12] + struct.pack("<i", 5) + data[16:], "multiple of 10"),
        (lambda data: data[:400] + struct.pack("<f", math.nan) + data[404:], "not finite"),
    ],
)
def test_a_mangled_checkpoint_is_refused(files: tuple[Path, Path], tmp_path: Path, mangle: object, words: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(mangle(files[0].read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=words):
        read_llama2c(path)


def test_a_wrong_tokenizer_file_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    data, path = files[1].read_bytes(), tmp_path / "bad.bin"
    with pytest.raises(ValueError, match="belongs to the checkpoint"):
        read_vocabulary(files[1], VOCAB_SIZE + 1)
    for bad in (b"", data[:-1], data + b"\0", data[:4] + struct.pack("<fi", 0.0, -1) + data[12:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="belongs to the checkpoint"):
            read_vocabulary(path, VOCAB_SIZE)
    twice = Vocabulary(tuple(PIECES), tuple([0.0] * len(PIECES)))
    path.write_bytes(data[: -len(twice.pieces[-1].encode())] + twice.pieces[-2].encode())
    with pytest.raises(ValueError, match="twice"):
        read_vocabulary(path, VOCAB_SIZE)


@pytest.mark.skipif("FSDFM_STORIES15M" not in os.environ, reason="FSDFM_STORIES15M names no llama2.data of stories15M")
def test_stories15m_knows_its_stories() -> None:
    parts = convert_llama2c(os.environ["FSDFM_STORIES15M"])
    story = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high."
    )
    tokens = torch.tensor([[parts.bos_id, *parts.tokenizer.encode(story).ids]])
    assert math.exp(float(parts.causal.nll(tokens).mean().detach())) < 3.0
    shuffled = torch.cat((tokens[:, :1], tokens[:, 1:].flip(1)), 1)
    assert math.exp(float(parts.causal.nll(shuffled).mean().detach())) > 100
