"""Gemma 3 (text only) from a GGUF file: the network in plain torch, and its SentencePiece BPE.

    judge = gemma_judge(read_gguf("gemma-3-270m-q4_k_m.gguf"), name="gemma3")

A second judge of another family than Llama. Against a Llama block a Gemma block has norms on both sides of attention
and MLP, norms of every query and key head, GELU gates, an embedding times sqrt(width) that is also the head, and
attention to the last `sliding_window` tokens, rotary base 10,000, in all layers but every sixth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, normalizers
from torch import Tensor, nn

from fsdfm.measure.judges.gguf import LONGEST_CONTEXT, GgufFile, judge_details, reading
from fsdfm.measure.judges.scoring import TokenJudge

__all__ = ["GemmaConfig", "GemmaModel", "SentencePieceEncoder", "gemma_judge", "is_gemma3"]

_ROWS_AT_ONCE = 256  # positions whose logits over a vocabulary of 262,144 live at the same time
_FULL_EVERY = 6  # of so many layers the last sees the whole text
_LOCAL_BASE = 10000.0  # rotary base of the layers that see a window
_NORMAL, _USER_DEFINED = 1, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"


@dataclass(frozen=True)
class GemmaConfig:
    """The shape of a Gemma 3 network; `rope_base` is that of the layers that see the whole text."""

    vocab_size: int
    width: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    window: int
    rope_base: float
    norm_eps: float = 1e-6

    def sees_all(self, block: int) -> bool:
        """Does a block attend to the whole text, not to a window of it?"""
        return (block + 1) % _FULL_EVERY == 0


class _Norm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight; a GGUF file holds 1 + what the network was trained with."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _linear(width: int, out: int) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, out, bias=False)  # type: ignore[no-untyped-call]
    return layer


class _Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); names of parts are those of the file."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        width, heads, kv, head = config.width, config.num_heads, config.num_kv_heads, config.head_width
        self.heads, self.kv_heads, self.head_width = heads, kv, head
        self.attn_norm, self.post_attention_norm = _Norm(width, config.norm_eps), _Norm(width, config.norm_eps)
        self.ffn_norm, self.post_ffw_norm = _Norm(width, config.norm_eps), _Norm(width, config.norm_eps)
        self.attn_q_norm, self.attn_k_norm = _Norm(head, config.norm_eps), _Norm(head, config.norm_eps)
        self.attn_q, self.attn_output = _linear(width, heads * head), _linear(heads * head, width)
        self.attn_k, self.attn_v = _linear(width, kv * head), _linear(width, kv * head)
        self.ffn_gate, self.ffn_up = _linear(width, config.mlp_width), _linear(width, config.mlp_width)
        self.ffn_down = _linear(config.mlp_width, width)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.post_attention_norm(self._attend(self.attn_norm(x), rotary, mask))
        y = self.ffn_norm(x)
        y = self.ffn_down(F.gelu(self.ffn_gate(y), approximate="tanh") * self.ffn_up(y))
        return x + self.post_ffw_norm(y)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q = _turn(self.attn_q_norm(self._split(self.attn_q(x))), rotary)
        k = _turn(self.attn_k_norm(self._split(self.attn_k(x))), rotary)
        v = self._split(self.attn_v(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.attn_output(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        """[B, L, H D] -> [B, H, L, D]."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


def _turn(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel i of a head of width D with channel i + D/2: x [B, H, L, D]."""
    cos, signed_sin = rotary
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


class GemmaModel(nn.Module):
    """A causal Gemma 3 network that reads; it does not write."""

    def __init__(self, config: GemmaConfig):
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(
            config.vocab_size, config.width, _weight=torch.empty(config.vocab_size, config.width)
        )
        self.blk = nn.ModuleList(_Block(config) for _ in range(config.num_blocks))
        self.output_norm = _Norm(config.width, config.norm_eps)

    def trunk(self, tokens: Tensor) -> Tensor:
        """Normed features of every position: [B, L] -> [B, L, C]."""
        length, config = tokens.shape[1], self.config
        local, full = (_rotary(length, config.head_width, base) for base in (_LOCAL_BASE, config.rope_base))
        mask = _window_mask(length, config.window)
        x = self.token_embd(tokens) * math.sqrt(config.width)
        for i, block in enumerate(self.blk):
            x = block(x, full, None) if config.sees_all(i) else block(x, local, mask)
        return self.output_norm(x)  # type: ignore[no-any-return]

    def nll(self, tokens: Tensor) -> Tensor:
        """-log p(x_i | x_0 .. x_{i-1}) in nats for i = 1 .. L-1: float32 [B, L-1]."""
        features = torch.split(self.trunk(tokens[:, :-1]).flatten(0, 1), _ROWS_AT_ONCE)
        targets = torch.split(tokens[:, 1:].flatten(), _ROWS_AT_ONCE)
        parts = [
            F.cross_entropy(F.linear(rows, self.token_embd.weight), target, reduction="none")
            for rows, target in zip(features, targets, strict=True)
        ]
        return torch.cat(parts).view(tokens.shape[0], tokens.shape[1] - 1)


def _rotary(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    channel = torch.arange(0, head_width, 2, dtype=torch.float32)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * base ** (-channel / head_width)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _window_mask(length: int, window: int) -> Tensor | None:
    """True where i may see j: j <= i < j + window; None where the window hides nothing."""
    if length <= window:
        return None
    place = torch.arange(length)
    behind = place[:, None] - place[None, :]
    return (behind >= 0) & (behind < window)


class SentencePieceEncoder:
    """The BPE of a SentencePiece model as GGUF files hold it, pieces with scores.

    Of all neighbours those are joined next whose piece has the best score. Unknown characters become bytes;
    user-defined pieces are found first; no text is a control token.
    """

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]):
        vocabulary = {piece: i for i, piece in enumerate(tokens)}
        rank = {piece: -score for piece, score, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL}
        merges = [
            (rank[piece], vocabulary[piece], piece[:cut], piece[cut:])
            for piece in rank
            for cut in range(1, len(piece))
            if piece[:cut] in rank and piece[cut:] in rank
        ]
        merges.sort(key=lambda merge: merge[:2])
        self.backend = tokenizers.Tokenizer(
            models.BPE(vocabulary, [(left, right) for _, _, left, right in merges], byte_fallback=True)
        )
        self.backend.normalizer = normalizers.Replace(" ", _SPACE)
        defined = [piece for piece, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
        self.backend.add_tokens([tokenizers.AddedToken(piece, normalized=True) for piece in defined])

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, nothing added."""
        return [row.ids for row in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def is_gemma3(file: GgufFile) -> bool:
    """Is it a Gemma 3 network with a SentencePiece tokenizer, its positions not rescaled?"""
    facts = file.metadata
    return (
        facts.get("general.architecture") == "gemma3"
        and facts.get("tokenizer.ggml.model") == "llama"
        and not facts.get("tokenizer.ggml.add_space_prefix", True)
        and not any(".rope.scaling" in key for key in facts)
        and "output.weight" not in file.tensors
    )


def gemma_judge(
    file: GgufFile, *, name: str, bos_id: int | None = None, device: torch.device | str = "cpu"
) -> TokenJudge:
    """A Gemma 3 network as a judge; before a text stands the file's BOS unless `bos_id` replaces it."""
    with reading(file, "Gemma 3"):
        return _gemma_judge(file, name, bos_id, device=device)


def _gemma_judge(file: GgufFile, name: str, bos_id: int | None, *, device: torch.device | str) -> TokenJudge:
    facts = file.metadata
    config = _config(file)
    if config.num_blocks > len(file.tensors):  # before a million empty blocks are built
        raise ValueError(f"it has {len(file.tensors)} tensors, too few for {config.num_blocks} blocks")
    with torch.device("meta"):  # what is allocated is what the file holds, not what its header says
        model = GemmaModel(config)
    model.load_state_dict({key: file.tensor(key) for key in file.tensors}, assign=True)
    model.to(device).eval().requires_grad_(False)
    encode = SentencePieceEncoder(*(facts[f"tokenizer.ggml.{part}"] for part in ("tokens", "scores", "token_type")))
    return TokenJudge(
        name=name,
        nll=model.nll,
        hidden=model.trunk,
        encode=encode,
        max_length=min(LONGEST_CONTEXT, facts["gemma3.context_length"]),
        vocab_size=config.vocab_size,
        bos_id=facts["tokenizer.ggml.bos_token_id"] if bos_id is None else bos_id,
        details=judge_details(file),
        device=device,
    )


def _config(file: GgufFile) -> GemmaConfig:
    facts = {key.removeprefix("gemma3."): value for key, value in file.metadata.items()}
    return GemmaConfig(
        vocab_size=file.tensors["token_embd.weight"][0][0],
        width=facts["embedding_length"],
        num_blocks=facts["block_count"],
        num_heads=facts["attention.head_count"],
        num_kv_heads=facts["attention.head_count_kv"],
        head_width=facts["attention.key_length"],
        mlp_width=facts["feed_forward_length"],
        window=facts["attention.sliding_window"],
        rope_base=float(facts.get("rope.freq_base", 1e6)),
        norm_eps=float(np.float32(facts["attention.layer_norm_rms_epsilon"])),
    )
