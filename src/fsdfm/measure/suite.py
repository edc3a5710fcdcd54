"""What is measured of a set of samples: every number with its interval, and the guard's flags."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdfm.measure.collapse import TOLERANCE, leave_band
from fsdfm.measure.copying import Copying, find_copies
from fsdfm.measure.distances import Scale, split_scale
from fsdfm.measure.evidence import Evidence
from fsdfm.measure.judges import Judge, Scores
from fsdfm.measure.kept import ScoreStore
from fsdfm.measure.mauve import Features, compute_mauve
from fsdfm.measure.metrics import distinct_n, duplicates, repetition, self_bleu, unigram_entropy_bits
from fsdfm.measure.results import Measured
from fsdfm.measure.rows import Piece, Reader, TokenRows, score_pieces, shuffle_pieces
from fsdfm.measure.sampling import Drawn
from fsdfm.measure.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    jackknife,
    sequence_perplexity,
    token_perplexity,
)
from fsdfm.noise import Noise
from fsdfm.runtime import ALONE, Processes

__all__ = ["CONTROL_ROWS", "METRICS", "MetricSuite", "OnProgress"]

METRICS = (
    *(
        "perplexity",
        "diversity",
        "distances",
        "trajectory",
        "copying",
        "mauve",
        "accuracy",
        "continuation",
        "brier",
        "bound",
    ),
)
"""What can be chosen. Entropy and distinct-n are always measured: the guard needs them."""

CONTROL_ROWS = 16  # rows of a negative control that the judges read: nonsense is told from text by few

OnProgress = Callable[[str, int, int], None]
"""Hears what is being done, how much of it is done, and how much there is."""

_ROWS_AT_ONCE = 32  # rows judged together: fixed, since a judge's last digits may move with its batch
_ORDERS = (1, 2, 4)  # of distinct-n
_MAUVE_SPLITS = 32  # of real text into two halves
_FEWEST = 3  # samples for a statistic that compares samples and leaves some out

_R = TypeVar("_R")
_Arrays = Sequence[npt.NDArray[np.integer]]


@dataclass(frozen=True)
class MetricSuite:
    """Measures sets of samples of equal length.

    real       held-out rows, as many as there are samples or fewer; the guard's band and MAUVE's reference
    training   the tokens of the training text, for copying; only the first process needs it
    features   text to vectors, for MAUVE and distances
    evidence   what samples are compared with beyond perplexity; None: nothing
    store      where scores of real text and of controls are kept; None: nowhere
    second     another judge, whose perplexities are called `second_...`
    spare      more held-out rows: with as many as `real` holds, MAUVE has a scale
    processes  share what a network reads and what is left out in turn; all of them get every number
    """

    reader: Reader
    metrics: Collection[str]
    judge: Judge | None = None
    real: TokenRows | None = None
    training: npt.NDArray[Any] | None = None
    features: Features | None = None
    seed: int = 0
    on_progress: OnProgress = field(default=lambda *_: None)
    processes: Processes = ALONE
    evidence: Evidence | None = None
    store: ScoreStore | None = None
    second: Judge | None = None
    spare: TokenRows | None = None

    # --- one set ------------------------------------------------------------------------------------------------------

    def texts(self, drawn: Drawn, name: str, *, light: bool = False, kept: bool = False) -> dict[str, Measured]:
        """What the texts say by themselves.

        light   perplexity, entropy and distinct-n only
        kept    the judges' words are kept: these texts are the same in other evaluations
        """
        found: dict[str, Measured] = {}
        score = MetricSuite.score_kept if kept else MetricSuite.score
        if "perplexity" in self.metrics:
            found |= self.perplexities(score(self, drawn.tokens, name))
        found |= {key: _measured(interval) for key, interval in self.watched(drawn.tokens).items()}
        if light:
            return found
        if "perplexity" in self.metrics and self.second is not None:
            found |= self.perplexities(score(self.as_second(), drawn.tokens, name), "second_")
        if "diversity" in self.metrics:
            found |= self._diversity(drawn.tokens)
        if self.evidence is not None:
            found |= self.compared(drawn.tokens)
        if "copying" in self.metrics:
            found |= self._copying(drawn.tokens)
        if "trajectory" in self.metrics and "logits" in drawn.columns:
            found["model_entropy_bits"] = self.ratio(drawn, "bits", "logits")
            found["jumps_per_token"] = self.ratio(drawn, "jumps", "free")
        return found

    def real_texts(self, rows: TokenRows, name: str) -> dict[str, Measured]:
        """What real rows say: as `texts`, but compared with other real rows, and scores are kept."""
        found = self.perplexities(self.score_kept(rows, name)) if self.judge is not None else {}
        if self.second is not None:
            found |= self.perplexities(self.as_second().score_kept(rows, name), "second_")
        found |= {key: _measured(interval) for key, interval in self.watched(rows).items()}
        if "diversity" in self.metrics:
            found |= self._diversity(rows)
        if self.evidence is not None:
            found |= self.processes.on_rank0(self.evidence.measure_real)
        if "copying" in self.metrics:
            found |= self._copying(rows)
        return found

    def control_texts(self, rows: TokenRows, name: str) -> dict[str, Measured]:
        """What a negative control's rows say; the judge reads the first of them only."""
        found: dict[str, Measured] = {}
        if "perplexity" in self.metrics:
            found |= self.perplexities(self.score_kept(rows[:CONTROL_ROWS], name))
            if self.second is not None:
                found |= self.perplexities(self.as_second().score_kept(rows[:CONTROL_ROWS], name), "second_")
        found |= {key: _measured(interval) for key, interval in self.watched(rows).items()}
        if "diversity" in self.metrics:
            found |= self._diversity(rows)
        if self.evidence is not None:
            found |= self.compared(rows)
        if "copying" in self.metrics:
            found |= self._copying(rows)
        if "mauve" in self.metrics:
            found |= self.mauve(rows, name)
        return found

    def as_second(self) -> MetricSuite:
        """The suite with the second judge in the place of the first."""
        return replace(self, judge=self.second)

    def compared(self, rows: TokenRows) -> dict[str, Measured]:
        """Distances, n-grams and checks, by the first process."""
        evidence = self.evidence
        assert evidence is not None
        return self.processes.on_rank0(lambda: evidence.measure(rows))

    def watched(self, rows: TokenRows) -> dict[str, Interval]:
        """What the guard watches: entropy and distinct-n."""
        tokens = self._arrays(rows)
        entropies = [unigram_entropy_bits(row) for row in tokens]
        found = {"entropy_bits": bootstrap_mean(entropies, seed=self.seed)}
        for n in _ORDERS:
            found[f"distinct_{n}"] = self._jackknife(partial(distinct_n, n=n), tokens)
        return found

    def entropy(self, rows: TokenRows, *, border: int) -> Measured:
        """The mean unigram entropy, in bits, of what stands at `border` or behind it."""
        return _measured(bootstrap_mean([unigram_entropy_bits(row[border:]) for row in rows], seed=self.seed))

    def flags(self, rows: TokenRows, real: Mapping[str, Measured]) -> tuple[str, ...]:
        """How the samples leave the band of real text, in words; as many samples as real rows are compared."""
        if self.real is None:
            return ()
        band = {name: Interval(m.value, m.low, m.high) for name, m in real.items() if name in TOLERANCE}
        measured = {name: found.value for name, found in self.watched(rows[: len(self.real)]).items()}
        told = []
        for flag in leave_band(measured, band):
            kind, (low, high) = "collapse" if flag.side == "below" else "noise", flag.band
            told.append(f"{kind}: {flag.metric} {flag.side} real text's {low:.3g} .. {high:.3g}")
        return tuple(told)

    def entropy_bits(self, rows: TokenRows) -> float:
        """The mean unigram entropy of the samples, to the last digit the same on every process: it decides."""
        return self.processes.on_rank0(
            lambda: float(np.mean([unigram_entropy_bits(row) for row in self._arrays(rows)]))
        )

    def ratio(self, drawn: Drawn, top: str, bottom: str) -> Measured:
        """The ratio of two columns' sums."""
        a, b = (torch.from_numpy(drawn.columns[name]) for name in (top, bottom))
        return _measured(_safe_ratio(a, b, self.seed))

    # --- judging ------------------------------------------------------------------------------------------------------

    def score(self, rows: TokenRows, name: str, *, border: int = 0) -> Scores:
        """The judge's word on rows, from `border` on, given what stands before it."""
        return self._score(rows, name, lambda some, first: self.reader.pieces(some, border=border, first=first))

    def score_kept(self, rows: TokenRows, name: str) -> Scores:
        """The judge's word on rows that are the same in every evaluation: from the store, if it has it."""
        return self._kept(rows, name, lambda some, first: self.reader.pieces(some, first=first))

    def score_shuffled(self, rows: TokenRows, name: str) -> Scores:
        """The judge's word on rows whose documents have their words shuffled; it is kept, too."""

        def read(some: TokenRows, first: int) -> list[Piece]:
            return shuffle_pieces(self.reader.pieces(some, first=first), seed=self.seed)

        return self._kept(rows, name, read)

    def _kept(self, rows: TokenRows, name: str, read: Callable[[TokenRows, int], list[Piece]]) -> Scores:
        store, judge = self.store, self.judge
        if store is None:
            return self._score(rows, name, read)
        assert judge is not None
        key = store.key(judge, read(rows, 0), len(rows))
        found = self.processes.on_rank0(lambda: store.get(key))
        if found is None:
            found = self._score(rows, name, read)
            if self.processes.is_rank0:
                store.put(key, found)
        return found

    def _score(self, rows: TokenRows, name: str, read: Callable[[TokenRows, int], list[Piece]]) -> Scores:
        judge = self.judge
        assert judge is not None
        parts = self._by_parts(
            rows,
            f"{name}: {judge.name} reads",
            lambda some, first: score_pieces(judge, read(some, first), len(some), first=first),
        )
        return _join(parts)

    def perplexities(self, scores: Scores, prefix: str = "") -> dict[str, Measured]:
        """Token-level and sequence-mean perplexity; not a number where no sample holds a word."""
        if not int(scores.num_tokens.sum()):
            nothing = Measured(float("nan"))
            return {f"{prefix}token_perplexity": nothing, f"{prefix}perplexity": nothing}
        return {
            f"{prefix}token_perplexity": _measured(token_perplexity(scores, seed=self.seed)),
            f"{prefix}perplexity": _measured(sequence_perplexity(scores, seed=self.seed)),
        }

    # --- parts --------------------------------------------------------------------------------------------------------

    def _arrays(self, rows: TokenRows) -> _Arrays:
        """The rows without what is given in front."""
        return list(rows[:, self.reader.num_bos :])

    def _by_parts(self, rows: TokenRows, name: str, function: Callable[[TokenRows, int], _R]) -> list[_R]:
        """A function of some rows and the index of their first, for all rows, by all processes."""
        parts: list[_R] = []
        self.on_progress(name, 0, len(rows))
        for found in self.processes.rounds(
            lambda first: function(rows[first : first + _ROWS_AT_ONCE], first), range(0, len(rows), _ROWS_AT_ONCE)
        ):
            parts += found
            self.on_progress(name, min(len(parts) * _ROWS_AT_ONCE, len(rows)), len(rows))
        return parts

    def _jackknife(self, statistic: Callable[[_Arrays], float], tokens: _Arrays) -> Interval:
        return _share(jackknife(statistic, tokens, processes=self.processes))

    def _diversity(self, rows: TokenRows) -> dict[str, Measured]:
        tokens = self._arrays(rows)
        repeated = bootstrap_mean([repetition(row) for row in tokens], seed=self.seed)
        found = {"repetition": _measured(repeated)}
        if len(tokens) >= _FEWEST:
            found["self_bleu"] = _measured(self._jackknife(lambda part: float(self_bleu(part).mean()), tokens))
            found["duplicates"] = _measured(self._jackknife(duplicates, tokens))
        return found

    def _copying(self, rows: TokenRows) -> dict[str, Measured]:
        copies = self.processes.on_rank0(lambda: self._find_copies(rows))
        share = _safe_ratio(torch.from_numpy(copies.copied), torch.from_numpy(copies.num_ngrams), self.seed)
        longest = bootstrap_mean(torch.from_numpy(copies.longest), seed=self.seed)
        facts = {"max": int(copies.longest.max())}
        return {
            "copied_8grams": _measured(share),
            "longest_copy": Measured(longest.value, longest.low, longest.high, facts),
        }

    def _find_copies(self, rows: TokenRows) -> Copying:
        assert self.training is not None
        return find_copies(self._arrays(rows), self.training)

    def mauve(self, rows: TokenRows, name: str) -> dict[str, Measured]:
        """MAUVE against the real rows; its ends are the smallest and the largest over seeds of k-means.

        mauve_z is 1 - MAUVE in deviations of real text against real text, where there is as much of it again.
        """
        real = self._reference
        if real is None or len(rows) < 2:
            return {}
        features = self._embed(rows, name)
        result = self.processes.on_rank0(lambda: compute_mauve(real, features))
        facts = {"n": list(result.num_texts), "seeds": len(result.seeds), "buckets": result.num_buckets}
        found = {"mauve": Measured(result.mean, result.low, result.high, facts)}
        scale = self._mauve_scale
        if scale is not None and scale.sd > 0 and len(rows) == scale.size:
            near, middle, far = (scale.z(1 - score) for score in (result.high, result.mean, result.low))
            known = {"real_mean": 1 - scale.mean, "real_sd": scale.sd, "n": scale.size}
            found["mauve_z"] = Measured(middle, near, far, known)
        return found

    @cached_property
    def _mauve_scale(self) -> Scale | None:
        """How far 1 - MAUVE of two sets of real text is from 0 by chance; None: there is not twice as much of it."""
        real, spare = self._reference, self.spare
        if real is None or spare is None or len(spare) != len(real):
            return None
        pool = np.concatenate((real, self._embed(spare, "more real text")))
        noise = Noise(self.seed, range(_MAUVE_SPLITS))
        return self.processes.on_rank0(lambda: split_scale(_unlike, pool, size=len(real), noise=noise))

    @cached_property
    def _reference(self) -> npt.NDArray[np.float32] | None:
        return None if self.real is None or len(self.real) < 2 else self._embed(self.real, "real text")

    def _embed(self, rows: TokenRows, name: str) -> npt.NDArray[np.float32]:
        features, text = self.features, self.reader.text
        assert features is not None
        parts = self._by_parts(rows, f"{name}: MAUVE", lambda some, _: features([text(row) for row in some.tolist()]))
        return np.concatenate(parts)


def _unlike(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> float:
    return 1 - compute_mauve(a, b).mean


def _join(parts: Sequence[Scores]) -> Scores:
    return Scores(torch.cat([part.nll for part in parts]), torch.cat([part.num_tokens for part in parts]))


def _safe_ratio(top: Tensor, bottom: Tensor, seed: int) -> Interval:
    """The bootstrapped ratio of sums; not a number where there is nothing to divide by."""
    if not float(bottom.sum()):
        return Interval(float("nan"), float("nan"), float("nan"))
    return bootstrap_ratio(top, bottom, seed=seed)


def _share(interval: Interval) -> Interval:
    """The interval of a share, which is never below 0 nor above 1."""
    return Interval(interval.value, max(0.0, interval.low), min(1.0, interval.high))


def _measured(interval: Interval) -> Measured:
    return Measured(interval.value, interval.low, interval.high)
