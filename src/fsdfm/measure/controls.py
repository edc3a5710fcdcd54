"""Negative controls: samplers of nonsense, each built to please one kind of metric, and the metrics that they fool.

    material = Material(real_rows, ends=sentence_ends(tokenizer))
    rows = CONTROLS["cycle"].sample(material, Noise(0, range(256)), 256)
    find_blindness(metrics, real=..., models=..., controls=...)

None of them has a trained parameter and none of them writes sense. A metric that ranks one of them above a model, or
above real text, does not measure what is wanted: it is *blind* there, and a report says so. `top-k`, `mirror-k`,
`periodic-k` and `phrase-bank` are the four samplers of "Hacking Generative Perplexity" (Franca and Tong 2026, arXiv
2606.08417); k is chosen here, where the paper lists several: the number at which their unigram entropy is nearest to
that of real text. `phrases`, `cycle` and `echo` are of the same kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fsdfm.measure.metrics import unigram_entropy_bits
from fsdfm.measure.results import Evaluation, Measured
from fsdfm.noise import Noise, Purpose

__all__ = [
    "CONTROLS",
    "DIRECTIONS",
    "PER_TEXT",
    "Blindness",
    "Control",
    "Direction",
    "Material",
    "blind_metrics",
    "find_blindness",
    "sample_controls",
    "sentence_ends",
]

Integers = npt.NDArray[np.int64]
TokenRows = npt.NDArray[np.int32]
_MARKS, _QUOTES = ".!?", "\"'\u201d\u2019)"
_SPAN = (8, 24)  # tokens of a span that `stitched` takes
_PHRASE = 4  # tokens of a phrase
_BANK_PHRASE = 5  # tokens of a phrase of the bank
_LONGEST_ORDER = 4


# --- what controls are made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Material:
    """Real text that controls are made of: rows of tokens [M, L] that no sample is compared with.

    ends      bool [V]: does a token end a sentence? Without it sentences cannot be told apart
    borders   tokens that part documents: a judge reads what stands between them by itself, so that text of frequent
              tokens with these among them would be many short texts, and never be said twice in one
    """

    rows: npt.NDArray[np.integer]
    ends: npt.NDArray[np.bool_] | None = None
    borders: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or min(self.rows.shape) < 1:
            raise ValueError(f"rows have the shape {self.rows.shape}; give [M, L] with at least one row of text")

    @cached_property
    def tokens(self) -> Integers:
        """All tokens, one row after the other."""
        return self.rows.astype(np.int64).ravel()

    @cached_property
    def counts(self) -> tuple[Integers, npt.NDArray[np.float64]]:
        """The different tokens, and the cumulative share of each."""
        values, counts = np.unique(self.tokens, return_counts=True)
        return values, np.cumsum(counts) / len(self.tokens)

    @cached_property
    def entropy_bits(self) -> float:
        """Mean unigram entropy of the rows: what a control has to have."""
        return float(np.mean([unigram_entropy_bits(row) for row in self.rows]))

    @cached_property
    def sentences(self) -> list[Integers]:
        """The sentences of all rows that begin and end inside their row."""
        if self.ends is None:
            return []
        found: list[Integers] = []
        for row in self.rows.astype(np.int64):
            stops = np.flatnonzero(self.ends[row]) + 1
            found += [row[a:b] for a, b in itertools.pairwise(stops) if b > a]
        return found

    @cached_property
    def by_frequency(self) -> tuple[Integers, Integers]:
        """The different tokens but those that part documents, the most frequent first, and how often each stands."""
        values, counts = np.unique(self.tokens[~np.isin(self.tokens, list(self.borders))], return_counts=True)
        if not len(values):
            raise ValueError("the rows hold nothing but borders of documents; give text")
        order = np.lexsort((values, -counts))
        return values[order], counts[order]

    def phrases(self, size: int) -> Integers:
        """Different phrases of `size` tokens, the most frequent first: [P, size]."""
        windows = np.lib.stride_tricks.sliding_window_view(self.rows.astype(np.int64), size, axis=1)
        values, counts = np.unique(windows.reshape(-1, size), axis=0, return_counts=True)
        ordered: Integers = values[np.lexsort((*values.T[::-1], -counts))]
        return ordered

    @cached_property
    def followers(self) -> Mapping[tuple[int, ...], Integers]:
        """What follows each context of 0 .. 3 tokens, as often as it does."""
        found: dict[tuple[int, ...], list[int]] = {}
        for row in self.rows.tolist():
            for i, token in enumerate(row):
                for order in range(min(i, _LONGEST_ORDER - 1) + 1):
                    found.setdefault(tuple(row[i - order : i]), []).append(token)
        return {context: np.array(tokens, dtype=np.int64) for context, tokens in found.items()}


def sentence_ends(decode: Callable[[Sequence[int]], str], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which tokens end a sentence: those whose text ends with . ! or ?, quotes and spaces behind it left out."""
    texts = (decode([token]).rstrip().rstrip(_QUOTES) for token in range(vocab_size))
    return np.array([text.endswith(tuple(_MARKS)) for text in texts], dtype=bool)


# --- controls ---------------------------------------------------------------------------------------------------------

Draw = Callable[[Material, Noise, int], Sequence[npt.ArrayLike]]
"""Material, one row of randomness per sample, and a length -> one row of at least so many tokens per sample."""


@dataclass(frozen=True)
class Control:
    """A sampler of nonsense: its name, what it is, and the metric that it is built to please."""

    name: str
    what: str
    pleases: str
    draw: Draw

    def sample(self, material: Material, noise: Noise, length: int) -> TokenRows:
        """Rows of `length` tokens, one for each row of the noise: int32 [N, length]; a function of (seed, sample)."""
        if length < 1:
            raise ValueError(f"length is {length}; allowed are 1 token and more")
        rows = [np.asarray(row, dtype=np.int32)[:length] for row in self.draw(material, noise, length)]
        return np.stack(rows) if rows else np.empty((0, length), dtype=np.int32)


def _uniform(noise: Noise, length: int, step: int = 0) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = noise.uniform(Purpose.CONTROL, length, step).cpu().numpy()
    return found


def _unigram(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    values, cdf = material.counts
    return list(values[np.minimum(np.searchsorted(cdf, _uniform(noise, length)), len(values) - 1)])


def _markov(order: int) -> Draw:
    """x_i ~ what follows the last `order` - 1 tokens in real text, or fewer of them where these never stood there."""

    def draw(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
        return [_walk(material.followers, uniform, order) for uniform in _uniform(noise, length).tolist()]

    return draw


def _walk(followers: Mapping[tuple[int, ...], Integers], uniform: Sequence[float], order: int) -> list[int]:
    row: list[int] = []
    for u in uniform:
        context = tuple(row[-(order - 1) :])
        while context not in followers:
            context = context[1:]
        choices = followers[context]
        row.append(int(choices[int(u * len(choices))]))
    return row


def _fill(pieces: Sequence[Integers], uniform: Sequence[float], length: int) -> Integers:
    """Pieces drawn with replacement until there are `length` tokens."""
    chosen, size = [], 0
    for u in uniform:
        chosen.append(pieces[int(u * len(pieces))])
        size += len(chosen[-1])
        if size >= length:
            break
    return np.concatenate(chosen)


def _sentences(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    if not material.sentences:
        raise ValueError("the material holds no whole sentence; give longer rows, and `ends` of its tokenizer")
    return [_fill(material.sentences, uniform, length) for uniform in _uniform(noise, length).tolist()]


def _stitched(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    places, sizes = _uniform(noise, length), _uniform(noise, length, step=1)
    shortest, longest = _SPAN
    rows = []
    for u, v in zip(places, sizes, strict=True):
        starts = (u * len(material.tokens)).astype(np.int64)
        lengths = shortest + (v * (longest - shortest + 1)).astype(np.int64)
        spans = [np.take(material.tokens, range(s, s + n), mode="wrap") for s, n in zip(starts, lengths, strict=True)]
        rows.append(np.concatenate(spans[: -(-length // shortest)]))
    return rows


def _phrases(size: int) -> Draw:
    """Phrases drawn evenly from the K most frequent, K such that the entropy is nearest to that of real text."""

    def draw(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
        uniform, known = _uniform(noise, -(-length // size)), material.phrases(size)

        def rows(count: int) -> Integers:
            return known[(uniform * count).astype(np.int64)].reshape(len(uniform), -1)

        return list(rows(_nearest(rows, 1, len(known), target=material.entropy_bits)))

    return draw


def _frequent(material: Material, uniform: npt.NDArray[np.float64], count: int) -> Integers:
    """Tokens drawn by their frequency among the `count` most frequent ones."""
    values, counts = material.by_frequency
    cdf = np.cumsum(counts[:count]) / counts[:count].sum()
    return values[np.minimum(np.searchsorted(cdf, uniform, side="right"), count - 1)]


def _top_k(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    """Frequent tokens, each by itself; how many such that the entropy is nearest to that of real text."""
    uniform = _uniform(noise, length)

    def rows(count: int) -> Integers:
        return _frequent(material, uniform, count)

    return list(rows(_nearest(rows, 1, len(material.by_frequency[0]), target=material.entropy_bits)))


def _mirror(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    """Frequent tokens, each by itself, and then the same ones in the same order."""
    uniform = _uniform(noise, max(1, length // 2))

    def rows(count: int) -> Integers:
        half = _frequent(material, uniform, count)
        return np.stack([np.resize(row, length) for row in half])

    return list(rows(_nearest(rows, 1, len(material.by_frequency[0]), target=material.entropy_bits)))


def _periodic(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    """The 2^H most frequent tokens by their frequency, again and again: every sample is the same."""
    values, _ = material.by_frequency
    size = min(max(2, round(2**material.entropy_bits)), len(values), length)
    return [np.resize(values[:size], length)] * len(noise)


def _cycle(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    """K different frequent tokens in a random order, again and again: entropy log2 K, which is made real text's."""
    values, counts = np.unique(material.tokens, return_counts=True)
    size = min(max(2, round(2**material.entropy_bits)), len(values), length)
    frequent = values[np.lexsort((values, -counts))][: max(size, len(values) // 2)]
    order = _uniform(noise, len(frequent)).argsort(1)[:, :size]
    return [np.resize(row, length) for row in frequent[order]]


def _echo(material: Material, noise: Noise, length: int) -> Sequence[npt.ArrayLike]:
    """A span of real text said again and again; a length of the span such that the entropy is as near as it can be."""
    starts = (_uniform(noise, 1)[:, 0] * len(material.tokens)).astype(np.int64)

    def rows(size: int) -> Integers:
        spans = np.take(material.tokens, starts[:, None] + np.arange(size), mode="wrap")
        return np.stack([np.resize(span, length) for span in spans])

    half = max(1, length // 2)  # every span is said twice at least
    return list(rows(_nearest(rows, 1, half, target=material.entropy_bits)))


def _nearest(rows: Callable[[int], Integers], low: int, high: int, *, target: float) -> int:
    """The size in low .. high whose rows have the mean entropy nearest to the target; entropy rises with the size."""

    def entropy(size: int) -> float:
        return float(np.mean([unigram_entropy_bits(row) for row in rows(size)]))

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if entropy(middle) < target else (low, middle)
    return min((low, high), key=lambda size: abs(entropy(size) - target))


_TABLE = (
    Control("unigram", "tokens drawn by their frequency", "entropy, distinct-1", _unigram),
    Control("markov-2", "each token drawn by what follows the one before", "2-gram profiles", _markov(2)),
    Control("markov-4", "each token drawn by what follows the last three", "n-gram profiles", _markov(4)),
    Control("sentences", "real sentences of different texts in random order", "perplexity, distinct-n", _sentences),
    Control("stitched", "spans of 8 to 24 tokens of real text, joined", "distinct-n, n-gram precision", _stitched),
    Control("phrases", "frequent 4-token phrases, at real text's entropy", "perplexity, entropy", _phrases(_PHRASE)),
    Control("top-k", "the most frequent tokens at random, at real text's entropy", "perplexity, entropy", _top_k),
    Control("mirror-k", "half a text of frequent tokens at random, said twice", "perplexity, entropy", _mirror),
    Control(
        "periodic-k", "the 2^H most frequent tokens in that order, again and again", "perplexity, entropy", _periodic
    ),
    Control("phrase-bank", "frequent 5-token phrases, at real text's entropy", "perplexity", _phrases(_BANK_PHRASE)),
    Control("cycle", "2^H different tokens again and again, H real text's entropy", "perplexity, entropy", _cycle),
    Control("echo", "one span of real text again and again", "perplexity", _echo),
)
CONTROLS: Mapping[str, Control] = MappingProxyType({control.name: control for control in _TABLE})
"""By name."""


def sample_controls(material: Material, *, num: int, length: int, seed: int = 0) -> dict[str, TokenRows]:
    """`num` rows of every control that the material allows."""
    noise = Noise(seed, range(num))
    possible = [c for c in CONTROLS.values() if c.name != "sentences" or material.sentences]
    return {control.name: control.sample(material, noise, length) for control in possible}


# --- blindness --------------------------------------------------------------------------------------------------------

Direction = Literal["lower", "higher", "nearer"]
"""Which of two numbers is the better one: the lower, the higher, or that which is nearer to real text's."""

DIRECTIONS: Mapping[str, Direction] = MappingProxyType(
    {
        **dict.fromkeys(("token_perplexity", "perplexity", "ngram_precision_bits", "ngram_recall_bits"), "lower"),
        **dict.fromkeys(("second_token_perplexity", "second_perplexity"), "lower"),
        **dict.fromkeys(("energy_style_z", "energy_ngram_z", "energy_meaning_z", "mmd_meaning_z"), "lower"),
        **dict.fromkeys(("mmd_style_z", "mmd_ngram_z"), "lower"),
        **dict.fromkeys(("energy_judge_z", "mmd_judge_z", "energy_trunk_z", "mmd_trunk_z"), "lower"),
        **dict.fromkeys(("mauve_z", "ngram_recall_z"), "lower"),
        **dict.fromkeys(("mauve", "brier_lm"), "higher"),
        **dict.fromkeys(("entropy_bits", "distinct_1", "distinct_2", "distinct_4"), "nearer"),
        **dict.fromkeys(("self_bleu", "repetition", "copied_8grams", "ngram_precision_z"), "nearer"),
        **dict.fromkeys(("names_kept", "sentences_end", "quotes_close"), "nearer"),
    }
)
"""Of the metrics that rank texts."""

PER_TEXT = frozenset(
    (
        *("token_perplexity", "perplexity", "second_token_perplexity", "second_perplexity", "entropy_bits"),
        *("repetition", "copied_8grams", "names_kept", "sentences_end", "quotes_close"),
    )
)
"""Of those, what is said of each text by itself, so that it does not move with the number of texts."""

Scored = Mapping[str, Mapping[str, Measured]]
"""Who -> metric -> number."""


@dataclass(frozen=True)
class Blindness:
    """A metric that was fooled: by which controls, above real text and above which models."""

    metric: str
    above_real: tuple[str, ...] = ()
    above_models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{', '.join(self.above_real)} above real text"] if self.above_real else []
        parts += [f"{', '.join(controls)} above {model}" for model, controls in self.above_models.items()]
        return f"{self.metric} is blind: it ranks {'; '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """The mapping of a result file."""
        above = {model: list(controls) for model, controls in self.above_models.items()}
        return {"metric": self.metric, "above_real": list(self.above_real), "above_models": above}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Blindness:
        """The mark that a mapping holds."""
        above = {str(model): tuple(controls) for model, controls in dict(record.get("above_models", {})).items()}
        return cls(str(record["metric"]), tuple(record.get("above_real", ())), above)


def find_blindness(
    real: Mapping[str, Measured],
    models: Scored,
    controls: Scored,
    *,
    directions: Mapping[str, Direction] = DIRECTIONS,
) -> list[Blindness]:
    """The metrics that surely rank a control above real text or above a model: their intervals do not meet.

    Under a metric of the kind "nearer" nothing can stand above real text; a control stands above a model where it is
    surely nearer to real text.
    """
    marks = []
    for metric, direction in directions.items():
        if metric not in real:
            continue
        rank = _Rank(direction, real[metric])
        scored = {name: found[metric] for name, found in controls.items() if metric in found}
        above_real = () if direction == "nearer" else _above(scored, real[metric], rank)
        above = {name: _above(scored, found[metric], rank) for name, found in models.items() if metric in found}
        above = {name: found for name, found in above.items() if found}
        if above_real or above:
            marks.append(Blindness(metric, above_real, above))
    return marks


def blind_metrics(evaluation: Evaluation, *, lent: Evaluation | None = None) -> list[Blindness]:
    """The metrics of an evaluation that rank a negative control above one of its rows, or above real text.

    Rows of another number of texts than the controls have are ranked only by what each text says by itself: distinct-n
    and the like move with the number.

    lent   another evaluation, of the same judge, whose controls stand in for those that this one has not
    """
    source = evaluation if lent is None else lent
    count = source.facts.get("num_samples")
    budgets = [row.steps for row in evaluation.plain]
    rows = {
        f"{row.steps}{f' at {row.temperature:g}' if budgets.count(row.steps) > 1 else ''} steps": row
        for row in evaluation.plain
    }
    rows |= {str(row.facts["name"]): row for row in evaluation.alternatives if "name" in row.facts}
    models = {
        name: row.metrics if lent is None and row.num_samples in (None, count) else _alone(row.metrics)
        for name, row in rows.items()
    }
    real = evaluation.real if lent is None or evaluation.real else lent.real
    return find_blindness(real if lent is None else _alone(real), models, source.controls)


def _alone(metrics: Mapping[str, Measured]) -> dict[str, Measured]:
    return {name: found for name, found in metrics.items() if name in PER_TEXT}


def _above(controls: Mapping[str, Measured], other: Measured, rank: _Rank) -> tuple[str, ...]:
    return tuple(name for name, found in controls.items() if rank.worst(found) < rank.best(other))


@dataclass(frozen=True)
class _Rank:
    """Numbers as losses, the smaller the better; the ends of an interval are its best and its worst."""

    direction: Direction
    real: Measured

    def best(self, found: Measured) -> float:
        inside = self.direction == "nearer" and found.has_interval and found.low <= self.real.value <= found.high
        return 0.0 if inside else min(map(self._loss, _ends(found)))

    def worst(self, found: Measured) -> float:
        return max(map(self._loss, _ends(found)))

    def _loss(self, value: float) -> float:
        if self.direction == "nearer":
            return abs(value - self.real.value)
        return value if self.direction == "lower" else -value


def _ends(found: Measured) -> tuple[float, ...]:
    return (found.value, found.low, found.high) if found.has_interval else (found.value,)
