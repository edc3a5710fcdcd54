"""llama2.c files made here, with llama2.c's own arithmetic written out in numpy."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

STORIES = [
    "Once upon a time, there was a little dog. The dog liked to play.",
    "One day the little dog saw a big ball.\nThe ball was red — so red!",
    "The dog and the ball went home. They were happy. The end.",
]
SPECIAL = ["<unk>", "\n<s>\n", "\n</s>\n"]


def learn_pieces(texts: Sequence[str], num_merges: int) -> list[str]:
    """Single characters and the products of a plain BPE training, best first."""
    words = [list(" " + text) for text in texts]
    merged: list[str] = []
    while len(merged) < num_merges:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        product = "".join(pairs.most_common(1)[0][0])
        if product not in merged:
            merged.append(product)
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if "".join(word[i : i + 2]) == product:
                    word[i : i + 2] = [product]
    return merged + sorted(set("".join(texts)) - {"—"})  # one character is left to its bytes


PIECES = [*learn_pieces(STORIES, 120), "<s", "<", ">"]  # one merge short of the name <s>
VOCAB_SIZE = 259 + len(PIECES)


def write_vocabulary(path: Path, *, header: bool = True, named_bytes: bool = False) -> Path:
    """A tokenizer.bin, in its present or older forms."""
    raw_bytes = [f"<0x{b:02X}>" if named_bytes else chr(b) for b in range(256)]
    pieces = [piece.encode() for piece in [*SPECIAL, *raw_bytes, *PIECES]]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    body = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in zip(scores, pieces, strict=True))
    path.write_bytes((struct.pack("<i", max(map(len, pieces))) if header else b"") + body)
    return path


@dataclass
class Llama:
    """A random llama2.c checkpoint and its arithmetic, one position at a time as run.c has it."""

    width: int = 24
    hidden: int = 20
    num_blocks: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    shared: bool = True
    max_length: int = 32

    def __post_init__(self) -> None:
        generator = np.random.default_rng(0)
        n, width, hidden = self.num_blocks, self.width, self.hidden
        kv_width = width // self.num_heads * self.num_kv_heads
        shapes = {
            "embedding": (VOCAB_SIZE, width),
            "norm_attention": (n, width),
            "q": (n, width, width),
            "k": (n, kv_width, width),
            "v": (n, kv_width, width),
            "o": (n, width, width),
            "norm_mlp": (n, width),
            "w1": (n, hidden, width),
            "w2": (n, width, hidden),
            "w3": (n, hidden, width),
            "norm": (width,),
            "angles": (2, self.max_length, width // self.num_heads // 2),
            "head": (VOCAB_SIZE, width),
        }
        self.weights = {name: generator.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}
        if self.shared:
            del self.weights["head"]

    def write(self, path: Path) -> Path:
        sizes = (self.width, self.hidden, self.num_blocks, self.num_heads, self.num_kv_heads)
        header = struct.pack("<7i", *sizes, VOCAB_SIZE if self.shared else -VOCAB_SIZE, self.max_length)
        path.write_bytes(header + b"".join(array.tobytes() for array in self.weights.values()))
        return path

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        w, keys, values, rows = self.weights, {}, {}, []
        head_width = self.width // self.num_heads
        for position, token in enumerate(tokens):
            x = w["embedding"][token].astype(np.float64)
            for i in range(self.num_blocks):
                y = self._norm(x, w["norm_attention"][i])
                q = self._turn(w["q"][i] @ y, position, head_width)
                keys[i, position] = self._turn(w["k"][i] @ y, position, head_width)
                values[i, position] = w["v"][i] @ y
                joined = np.zeros(self.width)
                for head in range(self.num_heads):
                    own = slice(head * head_width, (head + 1) * head_width)
                    kv = head // (self.num_heads // self.num_kv_heads)
                    theirs = slice(kv * head_width, (kv + 1) * head_width)
                    scores = [q[own] @ keys[i, p][theirs] / math.sqrt(head_width) for p in range(position + 1)]
                    probs = np.exp(np.array(scores) - max(scores))
                    probs /= probs.sum()
                    joined[own] = sum(probs[p] * values[i, p][theirs] for p in range(position + 1))
                x = x + w["o"][i] @ joined
                y = self._norm(x, w["norm_mlp"][i])
                gate = w["w1"][i] @ y
                x = x + w["w2"][i] @ (gate / (1 + np.exp(-gate)) * (w["w3"][i] @ y))
            rows.append(w.get("head", w["embedding"]) @ self._norm(x, w["norm"]))
        return np.stack(rows)

    @staticmethod
    def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x**2).mean() + 1e-5)

    @staticmethod
    def _turn(x: np.ndarray, position: int, head_width: int) -> np.ndarray:
        turned = x.copy()
        for i in range(0, len(x), 2):  # neighbours, as run.c has it
            angle = position * 10000 ** (-(i % head_width) / head_width)
            turned[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
            turned[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
        return turned
