"""Metrics of generated tokens: pure functions of token ids, each with its definition and unit.

A sample is a sequence of token ids; a set of samples is any sequence of them, or an int64 tensor [N, L]. All of these
numbers depend on the length of the samples, those over a set also on their count: compare equal with equal.

| what                        | function                     | over     | unit                        |
| --------------------------- | ---------------------------- | -------- | --------------------------- |
| unigram entropy of a sample | `unigram_entropy_bits`       | a sample | bits (`..._nats`: nats)     |
| uncertainty of the model    | `distribution_entropy_bits`  | a logit  | bits                        |
| repetition                  | `repetition`                 | a sample | share of n-grams            |
| distinct-n                  | `distinct_n`                 | the set  | share of n-grams            |
| self-BLEU                   | `self_bleu`                  | the set  | 0 .. 1, one number per sample |
| duplicates                  | `duplicates`                 | the set  | share of samples            |
| repair accuracy             | `token_accuracy`             | a sample | share of replaced tokens    |
| jumps                       | `count_jumps`                | a sample | changes of a position       |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.flow import Rows, Source
from fsdfm.noise import Noise, Purpose

__all__ = [
    "EntropyMeter",
    "Samples",
    "count_jumps",
    "distinct_n",
    "distribution_entropy_bits",
    "duplicates",
    "repetition",
    "replace_tokens",
    "self_bleu",
    "to_row",
    "token_accuracy",
    "unigram_entropy_bits",
    "unigram_entropy_nats",
]

Tokens = Sequence[int] | npt.NDArray[np.integer] | Tensor
Samples = Sequence[Tokens] | Tensor
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_BLEU_ORDER = 4
_BLEU_SMOOTHING = 0.1  # matches taken for none, as in NLTK's method 1
_ROWS_AT_ONCE = 256  # rows of logits whose entropy is computed together


# --- one sample -------------------------------------------------------------------------------------------------------


def unigram_entropy_bits(tokens: Tokens) -> float:
    """The entropy of a sample's token counts, in bits: H = -sum_v (c_v/n) log2(c_v/n), at most log2 n.

    This is what the paper's code reports as entropy.
    """
    row = to_row(tokens)
    if not len(row):
        raise ValueError("the sample is empty and has no entropy; leave it out")
    share = np.unique(row, return_counts=True)[1] / len(row)
    return float(np.abs(np.sum(share * np.log2(share))))


def unigram_entropy_nats(tokens: Tokens) -> float:
    """`unigram_entropy_bits` in nats, as Duo and BD3-LM report it: bits * ln 2."""
    return unigram_entropy_bits(tokens) * math.log(2)


def repetition(tokens: Tokens, n: int = 4) -> float:
    """The share of a sample's n-grams that stood in it before: 1 - (different n-grams) / (n-grams); 0 if too short."""
    grams, _ = _ngrams([tokens], n)
    return 1 - len(np.unique(grams)) / len(grams) if len(grams) else 0.0


def token_accuracy(x: Tensor, x_1: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the positions in `where` hold the true token, and how many there are: int64 [B] each.

    Their ratio of sums is the token accuracy of a repair, `where` being what was replaced.
    """
    if not x.shape == x_1.shape == where.shape:
        shapes = ", ".join(str(tuple(part.shape)) for part in (x, x_1, where))
        raise ValueError(f"x, x_1 and where have the shapes {shapes}; they must agree")
    return ((x == x_1) & where).sum(1), where.sum(1)


def replace_tokens(x_1: Tensor, source: Source, noise: Noise, *, share: float = 0.5) -> tuple[Tensor, Tensor]:
    """Replace round(share * L) positions of each row, chosen at random, by tokens of the source.

    Returns the damaged rows and which positions were replaced, bool [B, L]. A uniform source may draw the true token.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; allowed are 0 <= share <= 1; the paper replaces 0.5")
    length = x_1.shape[1]
    order = noise.uniform(Purpose.DATA, length).argsort(1).argsort(1)
    replaced = (order < round(share * length)).to(x_1.device)
    return torch.where(replaced, source.sample(noise, length).to(x_1.device), x_1), replaced


def count_jumps(jumps: Iterable[Tensor]) -> Tensor:
    """The number of changes of each sample's positions over a trajectory: int64 [B], from `Step.jumps` [B, L].

    Divided by the number of positions it is the mean jumps per token.
    """
    counts = [step.sum(1) for step in jumps]
    if not counts:
        raise ValueError("there are no steps to count jumps of; give those of a trajectory")
    return torch.stack(counts).sum(0)


def distribution_entropy_bits(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits) in bits, of each distribution: [..., V] -> float64 [...]."""
    flat = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    parts = [_softmax_entropy(rows) for rows in torch.split(flat, _ROWS_AT_ONCE)]
    return torch.cat(parts).view(logits.shape[:-1]) / math.log(2)


def _softmax_entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits.double(), -1)
    return -torch.where(log_probs > -torch.inf, log_probs.exp() * log_probs, 0.0).sum(-1)


class EntropyMeter:
    """A sampler's hook that notes how uncertain the model is and changes nothing.

        meter = EntropyMeter(num_samples=8)
        sample(denoiser, path, x_0, grid=grid, noise=noise, hook=meter)
        meter.total_bits.sum() / meter.num_logits.sum()  # mean entropy of the model's distributions, in bits

    Counted are the distributions that the sampler asks for, before its filter; a rule that needs the head only where a
    position jumps asks only there.
    """

    def __init__(self, num_samples: int):
        self.total_bits = torch.zeros(num_samples, dtype=torch.float64)
        self.num_logits = torch.zeros(num_samples, dtype=torch.int64)

    def __call__(self, logits: Tensor, rows: Rows) -> Tensor:
        """Note the entropies of logits [N, V], and give them back."""
        sample = rows.sample.cpu()
        self.total_bits.index_add_(0, sample, distribution_entropy_bits(logits).cpu())
        self.num_logits.index_add_(0, sample, torch.ones_like(sample))
        return logits


# --- a set of samples -------------------------------------------------------------------------------------------------


def distinct_n(samples: Samples, n: int) -> float:
    """The share of different n-grams among all n-grams of the set (not of each sample)."""
    grams, _ = _ngrams(samples, n)
    if not len(grams):
        raise ValueError(f"no sample has {n} tokens; distinct-{n} needs longer samples")
    return len(np.unique(grams)) / len(grams)


def duplicates(samples: Samples) -> float:
    """The share of samples that equal an earlier one: 1 - (different samples) / (samples)."""
    rows = [to_row(sample).tobytes() for sample in samples]
    if not rows:
        raise ValueError("there are no samples; give at least one")
    return 1 - len(set(rows)) / len(rows)


def self_bleu(samples: Samples) -> Floats:
    """BLEU-4 of every sample against all others as its references: float64 [N]; the mean is the set's self-BLEU.

        BLEU = min(1, exp(1 - r/c)) * (p_1 p_2 p_3 p_4)^(1/4)

    p_n is the clipped precision: an n-gram counts at most as often as in the reference that has it most often. c is
    the sample's length and r the nearest length of a reference, the shorter of two. For p_n without a match 0.1
    matches are taken, and an n-gram order longer than the sample is left out. Exact and linear in the text: the
    clipping needs only the two largest counts of each n-gram.
    """
    rows = [to_row(sample) for sample in samples]
    lengths = np.array([len(row) for row in rows])
    if len(rows) < 2 or lengths.min() < 1:
        raise ValueError(f"self-BLEU compares samples, and {len(rows)} are given; give two or more, none of them empty")
    log_precision, orders = np.zeros(len(rows)), np.zeros(len(rows))
    for n in range(1, _BLEU_ORDER + 1):
        matched, total = _clipped_matches(rows, n)
        long_enough = total > 0
        kept = np.where(matched > 0, matched, _BLEU_SMOOTHING)[long_enough]
        log_precision[long_enough] += np.log(kept / total[long_enough])
        orders += long_enough
    scores: Floats = _brevity(lengths) * np.exp(log_precision / orders)
    return scores


def _clipped_matches(rows: Sequence[Integers], n: int) -> tuple[Integers, Integers]:
    """Clipped matches of each sample with the others, and its number of n-grams."""
    grams, owners = _ngrams(rows, n)
    pairs, counts = np.unique(grams * len(rows) + owners, return_counts=True)  # one number a pair: quick to sort
    order = np.lexsort((-counts, pairs // len(rows)))  # by n-gram, the largest count first
    gram, owner, count = pairs[order] // len(rows), pairs[order] % len(rows), counts[order]
    first = np.flatnonzero(np.diff(gram, prepend=-1))
    which = np.cumsum(np.diff(gram, prepend=-1) != 0) - 1
    largest = count[first]
    follows = np.append(gram, -1)[first + 1] == gram[first]
    second = np.where(follows, np.append(count, 0)[first + 1], 0)
    is_largest = np.zeros(len(count), dtype=bool)
    is_largest[first] = True
    others = np.where(is_largest, second[which], largest[which])
    clipped = np.minimum(count, others)
    return _sum_by(owner, clipped, len(rows)), _sum_by(owner, count, len(rows))


def _sum_by(owner: Integers, values: Integers, num_owners: int) -> Integers:
    total = np.zeros(num_owners, dtype=np.int64)
    np.add.at(total, owner, values)
    return total


def _brevity(lengths: Integers) -> Floats:
    """min(1, exp(1 - r/c)) with the nearest length r of another sample, the shorter of two that are equally near."""
    ordered = np.sort(lengths)
    place = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
    below = np.where(place > 0, ordered[place - 1], -np.inf)
    above = np.append(ordered, np.inf)[place + 1]
    nearest = np.where(lengths - below <= above - lengths, below, above)
    penalty: Floats = np.minimum(1.0, np.exp(1 - nearest / lengths))
    return penalty


def to_row(tokens: Tokens) -> Integers:
    """The token ids of a sample: int64 [L]."""
    row = tokens.cpu().numpy() if isinstance(tokens, Tensor) else np.asarray(tokens)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
        raise ValueError(f"a sample has shape {row.shape} and type {row.dtype}; give one row of token ids per sample")
    return row.astype(np.int64)


def _ngrams(samples: Samples, n: int) -> tuple[Integers, Integers]:
    """Every n-gram of the set as a number, equal only for equal n-grams, and the sample it stands in."""
    if n < 1:
        raise ValueError(f"n is {n}; allowed are n >= 1")
    rows = [to_row(sample) for sample in samples]
    starts = [max(0, len(row) - n + 1) for row in rows]
    owners = np.repeat(np.arange(len(rows)), starts)
    grams = np.zeros(len(owners), dtype=np.int64)
    for k in range(n):  # number the pairs (n-gram so far, next token): below 2^63, since both are
        token = np.concatenate([row[k : k + count] for row, count in zip(rows, starts, strict=True)] or [grams])
        number = np.unique(token, return_inverse=True)[1]
        grams = np.unique(grams * (len(token) + 1) + number, return_inverse=True)[1]
    return grams, owners
