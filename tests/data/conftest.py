"""The three kinds of tokenizers: bytes, a byte-level BPE, and a BPE with byte fallback."""

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from fsdfm.data.tokenizer import Tokenizer

SENTENCES = ["The quick fox jumps over the lazy dog. The dog sleeps; the fox doesn't.\n\n"] * 3 + ["Grüße, 世界! 12"]


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    return SENTENCES


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    return Tokenizer.train(SENTENCES, 300)


@pytest.fixture(scope="session")
def llama_definition() -> str:
    """A BPE as sentencepiece makes them: a space before every text, bytes for what it does not know."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, "▁", *"abdehortw", "he", "▁the", "▁t", "or"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "r")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend.to_str()


@pytest.fixture(scope="session")
def llama(llama_definition: str) -> Tokenizer:
    return Tokenizer(llama_definition, eos="</s>")


@pytest.fixture(scope="session", params=["bytes", "trained", "llama"])
def tokenizer(request: pytest.FixtureRequest, trained: Tokenizer, llama: Tokenizer) -> Tokenizer:
    return {"bytes": Tokenizer.bytes(), "trained": trained, "llama": llama}[request.param]
