"""GGUF files, and of them Llama networks with a byte-level BPE, SmolLM2's among them, read into our causal model.

transformers reads GGUF files of every kind, but takes minutes where this takes seconds; it is asked for what neither
this file nor `gemma` knows (`huggingface.gguf_judge`). Needs `gguf` (extra `judge`) for its tables of quantisation.
Weights become float32.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor

from fsdfm.checks import require_whole
from fsdfm.files import require_plain
from fsdfm.measure.judges.scoring import TokenJudge
from fsdfm.model import CausalConfig, CausalModel
from fsdfm.model.layers import Cache

__all__ = ["LONGEST_CONTEXT", "GgufFile", "judge_details", "llama_judge", "read_gguf", "reading"]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LARGEST_HEADER = 2**26  # bytes; a vocabulary of 262,144 tokens takes some six million
LONGEST_CONTEXT = 8192  # a context beyond this buys nothing here and costs memory
_ROTARY_BASE = 10000.0
_ROWS_AT_ONCE = 4096  # rows of a tensor that are dequantised at a time
_SPLITTERS = {
    "default": (),
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
}  # what comes before GPT-2's own regular expression, by tokenizer.ggml.pre
_PARTS = {
    "attn_norm": "norm_attention.weight",
    "attn_output": "attention.out.weight",
    "ffn_norm": "norm_mlp.weight",
    "ffn_down": "mlp.out.weight",
}


@dataclass(frozen=True)
class GgufFile:
    """The bytes and metadata of a GGUF file, and where its tensors are: name -> (shape, quantisation, offset)."""

    name: str
    data: npt.NDArray[np.uint8]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], int, int]]

    @property
    def is_plain_llama(self) -> bool:
        """Is it a Llama network with nothing added, and a byte-level BPE that we know how to split?"""
        known = self.metadata.get("tokenizer.ggml.pre", "default") in _SPLITTERS
        rotary_scaled = any(".rope.scaling" in key for key in self.metadata) or "rope_freqs.weight" in self.tensors
        return (
            self.metadata.get("general.architecture") == "llama"
            and self.metadata.get("tokenizer.ggml.model") == "gpt2"
            and known
            and not rotary_scaled
            and "llama.expert_count" not in self.metadata
            and not any(name.endswith(".bias") for name in self.tensors)
        )

    @cached_property
    def _offsets(self) -> list[int]:
        return sorted(offset for _, _, offset in self.tensors.values())

    def _room(self, offset: int) -> int:
        """Bytes up to the next tensor; none where two begin: tensors that share bytes would take memory without end."""
        first, behind = bisect_left(self._offsets, offset), bisect_right(self._offsets, offset)
        end = self._offsets[behind] if behind < len(self._offsets) else len(self.data)
        return min(end, len(self.data)) - offset if behind == first + 1 else 0

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        shape, kind, offset = self.tensors[name]
        quantisation = GGMLQuantizationType(kind)
        block, size = GGML_QUANT_SIZES[quantisation]
        row = shape[-1] // block * size
        count = row * math.prod(shape[:-1])
        if not 0 < count <= self._room(offset):
            raise ValueError(f"the tensor {name} has {count} bytes at {offset}, which the file has not for it alone")
        raw = self.data[offset : offset + count].reshape(-1, row)
        values = np.empty((len(raw), shape[-1]), dtype=np.float32)
        for start in range(0, len(raw), _ROWS_AT_ONCE):
            values[start : start + _ROWS_AT_ONCE] = dequantize(
                np.ascontiguousarray(raw[start : start + _ROWS_AT_ONCE]), quantisation
            )
        return torch.from_numpy(values.reshape(shape))


class _Reader:
    """Numbers and strings of a GGUF header, one after the other."""

    def __init__(self, data: npt.NDArray[np.uint8]):
        self.data, self.at = data[:_LARGEST_HEADER].data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def numbers(self, code: str, count: int) -> list[Any]:
        """Many numbers of one kind at once: a vocabulary has hundreds of thousands."""
        size = count * struct.calcsize(code)
        if self.at + size > len(self.data):
            raise struct.error("an array runs beyond the end of the file")
        self.at += size
        found: list[Any] = np.frombuffer(self.data[self.at - size : self.at], dtype="<" + code).tolist()
        return found

    def string(self) -> str:
        length = self.number("Q")
        if self.at + length > len(self.data):
            raise struct.error("a string runs beyond the end of the file")
        self.at += length
        return bytes(self.data[self.at - length : self.at]).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.number("I"), self.number("Q")
            if of == _ARRAY or count > len(self.data) - self.at:
                raise struct.error(f"an array of {count} values of kind {of} does not fit the file")
            return self.numbers(_NUMBERS[of], count) if of in _NUMBERS else [self.value(of) for _ in range(count)]
        return self.number(_NUMBERS[kind])


def read_gguf(*parts: str | Path) -> GgufFile:
    """Read the header of a GGUF file, version 2 or 3; the tensors stay on the disk.

    A file in several `parts` is joined in memory.
    """
    path = Path(parts[0])
    try:
        for part in parts:
            require_plain(Path(part))
        pieces = [np.memmap(part, dtype=np.uint8, mode="r") for part in parts]
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        reader = _Reader(data)
        magic, version = bytes(reader.data[:4]), struct.unpack_from("<I", reader.data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise struct.error(f"it begins with {magic!r}, version {version}")
        reader.at = 8
        num_tensors, num_values = reader.number("Q"), reader.number("Q")
        metadata = {reader.string(): reader.value(reader.number("I")) for _ in range(num_values)}
        found = [_tensor_entry(reader) for _ in range(num_tensors)]
        alignment = require_whole("general.alignment", metadata.get("general.alignment", 32), 1, high=2**20)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(
            f"{path} is no GGUF file of version 2 or 3 that can be read ({error}); get it again"
        ) from error
    start = -(-reader.at // alignment) * alignment
    return GgufFile(
        path.name, data, metadata, {name: (shape, kind, start + offset) for name, shape, kind, offset in found}
    )


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    axes = require_whole(f"the number of axes of {name!r:.40}", reader.number("I"), 1, high=8)
    shape = tuple(reader.number("Q") for _ in range(axes))[::-1]  # stored fastest axis first
    return name, shape, reader.number("I"), reader.number("Q")


@contextmanager
def reading(file: GgufFile, kind: str) -> Iterator[None]:
    """Whatever is wrong with what a file says of a network is one error with its name."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{file.name} is no {kind} network that can be read ({type(error).__name__}: {str(error)[:200]}); "
            "get it again"
        ) from error


def llama_judge(
    file: GgufFile, *, name: str, bos_id: int | None = None, device: torch.device | str = "cpu"
) -> TokenJudge:
    """A plain Llama network as a judge; `bos_id` replaces the first token that the file names."""
    with reading(file, "Llama"):
        return _llama_judge(file, name, bos_id, device=device)


def _llama_judge(file: GgufFile, name: str, bos_id: int | None, *, device: torch.device | str) -> TokenJudge:
    facts, tokens = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    config = CausalConfig(
        vocab_size=len(tokens),
        width=facts["llama.embedding_length"],
        num_blocks=facts["llama.block_count"],
        num_heads=facts["llama.attention.head_count"],
        num_kv_heads=facts.get("llama.attention.head_count_kv"),
        mlp_width=facts["llama.feed_forward_length"],
        style="llama",
        dropout=0.0,
        norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        max_length=min(LONGEST_CONTEXT, facts["llama.context_length"]),
    )
    if config.num_blocks > len(file.tensors):  # before a million empty blocks are built
        raise ValueError(f"it has {len(file.tensors)} tensors, too few for {config.num_blocks} blocks")
    with torch.device("meta"):  # what is allocated is what the file holds, not what its header says
        model = _Llama(config, base=float(facts.get("llama.rope.freq_base", _ROTARY_BASE)))
    model.load_state_dict(_state(file, config), assign=True)
    model.to(device).eval().requires_grad_(False)
    first = bos_id if bos_id is not None else facts.get("tokenizer.ggml.bos_token_id")
    return TokenJudge(
        name=name,
        nll=model.nll,
        hidden=model.trunk,
        encode=_Encode(tokens, facts["tokenizer.ggml.merges"], facts.get("tokenizer.ggml.pre", "default")),
        max_length=config.max_length,
        vocab_size=config.vocab_size,
        bos_id=first if first is not None else facts.get("tokenizer.ggml.eos_token_id"),
        details=judge_details(file),
        device=device,
    )


def judge_details(file: GgufFile) -> dict[str, Any]:
    """What a result file says of a judge from a GGUF file: precision, size, and the file's name."""
    num_parameters = sum(int(np.prod(shape)) for shape, *_ in file.tensors.values())
    return {"dtype": "float32", "num_parameters": num_parameters, "source": file.name.removesuffix(".part00")}


class _Llama(CausalModel):
    """Our causal model with another base of the rotary angles: base^(-2i/D) instead of 10000^(-2i/D)."""

    def __init__(self, config: CausalConfig, *, base: float):
        super().__init__(config)
        self.base = base

    def trunk(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Normed features [B, L, C] of whole texts."""
        assert caches is None  # a judge reads; it does not write
        channel = torch.arange(0, self.config.head_width, 2, dtype=torch.float32, device=tokens.device)
        position = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device)
        angle = position[:, None, None] * self.base ** (-channel / self.config.head_width)
        cos, sin = angle.cos(), angle.sin()
        rotary = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        return self.norm(x)  # type: ignore[no-any-return]


def _state(file: GgufFile, config: CausalConfig) -> dict[str, Tensor]:
    """Our names: q, k, v and gate, up fused; a head that is missing is the embedding."""
    embedding = file.tensor("token_embd.weight")
    head = file.tensor("output.weight") if "output.weight" in file.tensors else embedding
    state = {"embedding.weight": embedding, "norm.weight": file.tensor("output_norm.weight"), "head.weight": head}
    for i in range(config.num_blocks):
        q, k, v, gate, up = (
            file.tensor(f"blk.{i}.{part}.weight") for part in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
        )
        halves = [_split_halves(weight, config.head_width) for weight in (q, k)]
        state[f"blocks.{i}.attention.qkv.weight"] = torch.cat((*halves, v))
        state[f"blocks.{i}.mlp.into.weight"] = torch.cat((gate, up))
        for theirs, ours in _PARTS.items():
            state[f"blocks.{i}.{ours}"] = file.tensor(f"blk.{i}.{theirs}.weight")
    return state


def _split_halves(weight: Tensor, head_width: int) -> Tensor:
    """llama.cpp turns neighbouring channels, we turn halves: rows 0, 2, 4, ..., 1, 3, 5, ... of each head."""
    pairs = weight.view(-1, head_width // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


class _Encode:
    """The byte-level BPE of a GGUF file: token ids of texts, nothing added; no text is a special token."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: str):
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self.backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        self.backend.pre_tokenizer = pre_tokenizers.Sequence([*_SPLITTERS[pre], byte_level])

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]
