"""llama2.c: an autoregressive checkpoint becomes a causal model and a denoiser.

    parts = convert_llama2c("stories15M.bin", "tokenizer.bin", texts=stories)
    parts.denoiser(x_t, t)  # a DiT over the tokens that the stories use
    parts.causal.nll(tokens)  # the same network as it was: baseline and judge, over the same tokens
    parts.tokenizer.encode("Once upon a time").ids

The denoiser is the causal network without its mask: modulation is the identity, whatever t, and the output for
position i still comes from i-1, so under a causal mask its logits equal the causal model's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor

from fsdfm.model import CausalConfig, CausalModel, DiT, ModelConfig
from fsdfm.model.layers import AdaptiveBlock, StackConfig

__all__ = [
    "BOS_ID",
    "Conversion",
    "Vocabulary",
    "build_tokenizer",
    "causal_over",
    "convert_llama2c",
    "is_llama2c",
    "prune_vocabulary",
    "read_llama2c",
    "read_vocabulary",
    "select_tokens",
    "to_denoiser",
]

_HEADER = struct.Struct("<7i")
_ENTRY = struct.Struct("<fi")
_VERSIONED_MAGIC = 0x616B3432
_LARGEST = 2**20  # no size in a header is larger; a mangled file is
_NUM_SPECIAL = 3  # <unk>, <s>, </s>
_NUM_RESERVED = _NUM_SPECIAL + 256  # then the 256 bytes, then the pieces of text
_SPECIAL = ("<unk>", "<s>", "</s>")
BOS_ID = 1  # `<s>` stands between stories in llama2.c's training data; `</s>` never occurs there


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a sentencepiece-style BPE: pieces of text and how early each is merged (higher is earlier).

    The ids 0, 1, 2 are <unk>, <s>, </s> and the next 256 are the bytes, as in every Llama vocabulary.
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]

    def merges(self) -> list[tuple[str, str]]:
        """Every pair of pieces that joins to a piece, best score first: the BPE as a ranked table."""
        text = {piece: i for i, piece in enumerate(self.pieces) if i >= _NUM_RESERVED}
        found = [
            (-self.scores[i], i, cut, (piece[:cut], piece[cut:]))
            for piece, i in text.items()
            for cut in range(1, len(piece))
            if piece[:cut] in text and piece[cut:] in text
        ]
        return [pair for *_, pair in sorted(found)]

    def select(self, keep: Sequence[int]) -> Vocabulary:
        """The vocabulary of some of the ids, which become 0, 1, 2, ..."""
        return Vocabulary(tuple(self.pieces[i] for i in keep), tuple(self.scores[i] for i in keep))


@dataclass(frozen=True)
class Conversion:
    """What `convert_llama2c` makes: two networks over one pruned vocabulary, and its tokenizer."""

    denoiser: DiT
    causal: CausalModel
    tokenizer: Tokenizer
    bos_id: int  # stands at position 0, given and frozen
    eos_id: int  # ends a document; llama2.c's models use <s> for both
    kept: tuple[int, ...]  # the old id of every token


def convert_llama2c(
    checkpoint: Path | str,
    tokenizer: Path | str | None = None,
    texts: Iterable[str] | None = None,
    *,
    min_count: int = 1,
    cond_width: int = 128,
    dropout: float = 0.1,
    seed: int = 0,
) -> Conversion:
    """Make a denoiser and a causal model of a llama2.c checkpoint, over the tokens that the texts use.

    Without `tokenizer` the bytes after the weights are the tokenizer.bin; without `texts` the vocabulary stays whole.
    """
    causal = read_llama2c(checkpoint)
    vocabulary = _vocabulary(checkpoint, tokenizer, causal)
    keep: Sequence[int] = range(len(vocabulary.pieces))
    if texts is not None:
        keep = prune_vocabulary(vocabulary, texts, min_count=min_count)
        vocabulary, causal = vocabulary.select(keep), select_tokens(causal, keep)
    return Conversion(
        denoiser=to_denoiser(causal, cond_width=cond_width, dropout=dropout, seed=seed),
        causal=causal,
        tokenizer=build_tokenizer(vocabulary),
        bos_id=BOS_ID,
        eos_id=BOS_ID,
        kept=tuple(keep),
    )


def causal_over(checkpoint: Path | str, pieces: Sequence[str], tokenizer: Path | str | None = None) -> CausalModel:
    """The autoregressive model over the tokens of a tokenizer that was made of its own, `pieces` in that order."""
    causal = read_llama2c(checkpoint)
    known = {piece: i for i, piece in enumerate(_vocabulary(checkpoint, tokenizer, causal).pieces)}
    if strange := [piece for piece in pieces if piece not in known]:
        raise ValueError(
            f"{checkpoint} does not know the token {strange[0]!r}, and {len(strange) - 1} more of {len(pieces)}; give "
            "the llama2.c model whose tokenizer the other model has"
        )
    return select_tokens(causal, [known[piece] for piece in pieces])


def _vocabulary(checkpoint: Path | str, tokenizer: Path | str | None, causal: CausalModel) -> Vocabulary:
    offset = 0 if tokenizer is not None else _num_bytes(*_read_header(checkpoint))
    return read_vocabulary(tokenizer or checkpoint, causal.config.vocab_size, offset=offset)


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def read_llama2c(path: Path | str) -> CausalModel:
    """Read a legacy llama2.c .bin: seven int32 of header, then float32 weights, layer by layer within each kind.

    Its rotary attention turns neighbouring channels (2i, 2i+1); the rows of q and k are put into our half-split order.
    """
    config, shared = _read_header(path)
    size, needed = Path(path).stat().st_size, _num_bytes(config, shared)
    if size < needed:
        raise ValueError(f"{path} has {size} bytes, but its header asks for {needed}; it is cut off: get it again")
    shapes = _shapes(config, shared)
    flat = np.fromfile(path, dtype="<f4", count=(needed - _HEADER.size) // 4, offset=_HEADER.size)
    if not np.isfinite(flat).all():
        raise ValueError(f"{path} holds weights that are not finite; it is damaged or no llama2.c checkpoint")
    parts = torch.split(torch.from_numpy(flat), [int(np.prod(shape)) for shape in shapes.values()])
    weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    model = CausalModel(config)
    model.load_state_dict(_to_our_names(weights, config))
    return model.eval()


def _read_header(path: Path | str) -> tuple[CausalConfig, bool]:
    """The sizes in the header, and whether the head shares the embedding's weights."""
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} has {len(header)} bytes; a llama2.c checkpoint begins with {_HEADER.size}")
    width, mlp_width, num_blocks, num_heads, num_kv_heads, vocab_size, max_length = _HEADER.unpack(header)
    if width == _VERSIONED_MAGIC:
        raise ValueError(f"{path} has llama2.c's versioned format; export it again with --version 0 (legacy)")
    sizes = (width, mlp_width, num_blocks, num_heads, num_kv_heads, abs(vocab_size), max_length)
    if not all(0 < size <= _LARGEST for size in sizes):
        raise ValueError(f"{path} is no llama2.c checkpoint: its header says {sizes}; allowed are 1 to {_LARGEST}")
    config = CausalConfig(
        vocab_size=abs(vocab_size),
        width=width,
        num_blocks=num_blocks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_width=mlp_width,
        style="llama",
        dropout=0.0,
        max_length=max_length,
    )
    return config, vocab_size > 0


def is_llama2c(path: Path | str) -> bool:
    """Does a file begin like a llama2.c checkpoint, and hold at least the weights that its header speaks of?"""
    try:
        return Path(path).stat().st_size >= _num_bytes(*_read_header(path))
    except (OSError, ValueError):
        return False


def _shapes(config: CausalConfig, shared: bool) -> dict[str, tuple[int, ...]]:
    """The arrays of a legacy checkpoint, in their order in the file."""
    n, width, hidden, vocab_size = config.num_blocks, config.width, config.hidden_width, config.vocab_size
    kv_width = config.kv_heads * config.head_width
    angles = (config.max_length, config.head_width // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (vocab_size, width),
        "norm_attention": (n, width),
        "q": (n, width, width),
        "k": (n, kv_width, width),
        "v": (n, kv_width, width),
        "o": (n, width, width),
        "norm_mlp": (n, width),
        "gate": (n, hidden, width),
        "down": (n, width, hidden),
        "up": (n, hidden, width),
        "norm": (width,),
        "cos": angles,  # tables of the rotary angles, which we compute ourselves
        "sin": angles,
    }
    return shapes if shared else {**shapes, "head": (vocab_size, width)}


def _num_bytes(config: CausalConfig, shared: bool) -> int:
    return _HEADER.size + 4 * sum(int(np.prod(shape)) for shape in _shapes(config, shared).values())


def _to_our_names(weights: Mapping[str, Tensor], config: CausalConfig) -> dict[str, Tensor]:
    """The state of a `CausalModel`: q, k, v and gate, up fused, q and k in half-split order."""
    state = {
        "embedding.weight": weights["embedding"],
        "norm.weight": weights["norm"],
        "head.weight": weights.get("head", weights["embedding"]),
    }
    for i in range(config.num_blocks):
        q = _split_halves(weights["q"][i], config.head_width)
        k = _split_halves(weights["k"][i], config.head_width)
        state |= {
            f"blocks.{i}.norm_attention.weight": weights["norm_attention"][i],
            f"blocks.{i}.attention.qkv.weight": torch.cat((q, k, weights["v"][i])),
            f"blocks.{i}.attention.out.weight": weights["o"][i],
            f"blocks.{i}.norm_mlp.weight": weights["norm_mlp"][i],
            f"blocks.{i}.mlp.into.weight": torch.cat((weights["gate"][i], weights["up"][i])),
            f"blocks.{i}.mlp.out.weight": weights["down"][i],
        }
    return state


def _split_halves(weight: Tensor, head_width: int) -> Tensor:
    """Reorder the rows of each head from (0, 1), (2, 3), ... neighbours to halves: 0, 2, 4, ..., 1, 3, 5, ..."""
    pairs = weight.view(-1, head_width // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


# --- the networks -----------------------------------------------------------------------------------------------------


def select_tokens(model: CausalModel, keep: Sequence[int]) -> CausalModel:
    """The model over some of its tokens, p(v | x) / sum_{w kept} p(w | x): rows of embedding and head are selected."""
    chosen = CausalModel(replace(model.config, vocab_size=len(keep)))
    rows, state = torch.tensor(keep), model.state_dict()
    per_token = {name: value[rows] for name, value in state.items() if name.startswith(("embedding.", "head."))}
    chosen.load_state_dict({**state, **per_token})
    return chosen.train(model.training)


def to_denoiser(model: CausalModel, *, cond_width: int = 128, dropout: float = 0.1, seed: int = 0) -> DiT:
    """A DiT with the weights of a causal model, its mask dropped and its next-token shift kept.

    The conditioning is zero: shift = scale = 0 and gate = 1 (the bias) for every t, so each block is the causal
    model's. Training moves the modulation away from there.
    """
    shared = {field.name: getattr(model.config, field.name) for field in fields(StackConfig)}
    config = ModelConfig(**{**shared, "dropout": dropout}, cond_width=cond_width, next_token=True)
    denoiser = DiT(config, seed=seed)
    denoiser.load_state_dict({**denoiser.state_dict(), **model.state_dict()})
    for block in denoiser.modules():
        if isinstance(block, AdaptiveBlock):
            block.open_gates()
    return denoiser.eval()


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path | str, vocab_size: int, *, offset: int = 0) -> Vocabulary:
    """Read a llama2.c tokenizer.bin: an int32 (the longest piece), then float32 score, int32 length, bytes per token.

    Older files lack the first int32; what parses to exactly `vocab_size` tokens is right. Byte tokens are written as
    the character or as <0xNN>, by age; here they are always <0xNN>.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    entries = _parse_entries(data, 4, vocab_size) or _parse_entries(data, 0, vocab_size)
    if entries is None or vocab_size < _NUM_RESERVED:
        raise ValueError(
            f"{path} is no llama2.c tokenizer of {vocab_size} tokens (at least {_NUM_RESERVED}); "
            "take the tokenizer.bin that belongs to the checkpoint"
        )
    pieces = [raw.decode("utf-8", errors="replace") for raw, _ in entries]
    pieces[:_NUM_RESERVED] = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    if len(set(pieces)) != vocab_size:
        twice = next(piece for i, piece in enumerate(pieces) if piece in pieces[:i])
        raise ValueError(f"{path} holds the piece {twice!r} twice; it is no Llama vocabulary")
    return Vocabulary(tuple(pieces), tuple(score for _, score in entries))


def _parse_entries(data: bytes, start: int, count: int) -> list[tuple[bytes, float]] | None:
    """`count` tokens from `start` that fill the data exactly, or None."""
    entries = []
    for _ in range(count):
        if start + _ENTRY.size > len(data):
            return None
        score, length = _ENTRY.unpack_from(data, start)
        start += _ENTRY.size + length
        if length < 0 or start > len(data):
            return None
        entries.append((data[start - length : start], score))
    return entries if start == len(data) else None


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The vocabulary as a `tokenizers` BPE with byte fallback: decode(encode(text)) == text for any text.

    A space is put before the text and taken away again, as sentencepiece does. No text encodes to a special token:
    "<s>" is three characters.
    """
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges(), byte_fallback=True, unk_token=_SPECIAL[0]))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in _SPECIAL])
    tokenizer.encode_special_tokens = True  # as text
    return tokenizer


def prune_vocabulary(vocabulary: Vocabulary, texts: Iterable[str], *, min_count: int = 1) -> list[int]:
    """The ids, ascending, that the texts use at least `min_count` times, with all that makes them reachable.

    A BPE builds a token from its merge ancestors, always in the same way; they stay, as do the specials, the bytes and
    the single characters. Every merge that the texts need is then left, and at min_count=1 their encoding is unchanged.
    """
    if min_count < 1:
        raise ValueError(f"min_count is {min_count}; allowed are min_count >= 1, and 1 keeps every token that occurs")
    tokenizer = build_tokenizer(vocabulary)
    counts = np.zeros(len(vocabulary.pieces), dtype=np.int64)
    for text in texts:
        np.add.at(counts, tokenizer.encode(text).ids, 1)
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    ranks = {pair: rank for rank, pair in enumerate(vocabulary.merges())}
    keep = set(range(_NUM_RESERVED))
    for i in np.flatnonzero(counts).tolist():
        if i < _NUM_RESERVED:
            continue
        piece = vocabulary.pieces[i]
        parts = _ancestors(piece, ranks) if counts[i] >= min_count else set(piece)
        keep |= {ids[part] for part in parts}
    return sorted(keep)


def _ancestors(piece: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """The piece, its characters, and every symbol that the BPE passes through on the way from these to it."""
    symbols = list(piece)
    seen = set(symbols)
    while len(symbols) > 1:
        best = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), len(ranks)))
        symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
        seen.add(symbols[best])
    return seen
