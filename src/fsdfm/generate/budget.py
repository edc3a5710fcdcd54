"""The budget of a request: which times to visit, and how many, from one measured curve.

Let H(k) be the nats per token that a model has left about a position when a share k of the text is known (k = kappa).
Positions redrawn in a step from k to k' are drawn as if they did not know of each other; one after the other they would
have had H falling under them. So a step wastes, per token of the text, the excess

    e(k, k') = integral_k^k' (H(k) - H(u)) du,            E(grid) = sum over steps of e

which under the mask source with the true posterior is exactly the KL of the sampler's path from the data's, divided by
the length (the integral of H alone is the entropy per token: the chain rule over random orders), and bounds the KL of
the texts. Under the uniform source, and for a network, it is a model of the loss, fitted by H.

The best grid of S steps minimises E: a shortest path over a fine grid of k, solved exactly (`EntropyCurve.plan`). From
it follows what a target needs: so many calls, the calls for so much excess, the calls that fit in so many milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fsdfm.noise import Noise, Purpose

if TYPE_CHECKING:
    from fsdfm.generate.model import LanguageModel

__all__ = ["BudgetTarget", "EntropyCurve", "fit_curve", "seconds_per_call"]

Floats = npt.NDArray[np.float64]
_CELLS = 64
_MOST_PLANNED = 256  # steps; above it equal steps in kappa are as good
DEFAULT_EXCESS = 0.3  # nats per token
MOST_AUTOMATIC = 64  # calls


@dataclass(frozen=True)
class EntropyCurve:
    """H at equally spaced shares k = 0 .. 1 of known text, in nats per token; it may not grow."""

    nats: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.nats) < 3 or not all(math.isfinite(value) and value >= 0 for value in self.nats):
            raise ValueError(f"the curve is {self.nats!r:.80}; give at least 3 numbers >= 0, nats at shares 0 .. 1")

    def at(self, share: Floats) -> Floats:
        """H at some shares: the curve made monotone, straight lines between its points."""
        falling = np.minimum.accumulate(np.asarray(self.nats, dtype=np.float64))
        found: Floats = np.interp(share, np.linspace(0, 1, len(falling)), falling)
        return found

    def excess(self, shares: Sequence[float]) -> float:
        """E of a grid of shares k_0 < ... < 1, in nats per token."""
        fine = 256
        total = 0.0
        for low, high in pairwise(shares):
            inner = low + (high - low) * (np.arange(fine) + 0.5) / fine
            total += (high - low) * float(self.at(np.array([low]))[0] - self.at(inner).mean())
        return total

    def plan(self, steps: int, start: float = 0.0) -> list[float]:
        """The shares k_0 = start < ... < k_S = 1 of least excess."""
        if steps > _MOST_PLANNED:
            return [*np.linspace(start, 1, steps + 1)]
        cells = max(_CELLS, 2 * steps)
        share = np.linspace(start, 1, cells + 1)
        middle = (share[1:] + share[:-1]) / 2
        width = (1 - start) / cells
        area = np.concatenate([[0.0], np.cumsum(self.at(middle)) * width])
        first, last = np.arange(cells + 1)[:, None], np.arange(cells + 1)[None, :]
        cost = np.where(
            last > first, self.at(share)[:, None] * (share[last] - share[first]) - area[last] + area[first], 1e9
        )
        best, choice = cost[0].copy(), []
        for _ in range(steps - 1):  # best[j]: least excess of a path of so many steps from 0 to j
            through = best[:, None] + cost
            choice.append(through.argmin(0))
            best = through.min(0)
        place, path = cells, [cells]
        for back in reversed(choice):
            place = int(back[place])
            path.append(place)
        return [float(share[index]) for index in [0, *reversed(path)]]

    def steps_for(self, excess: float, start: float = 0.0) -> int:
        """The fewest calls whose best grid wastes at most so many nats per token that is written, a share 1 - start.

        MOST_AUTOMATIC if none does.
        """
        low, high = 1, MOST_AUTOMATIC
        while low < high:
            middle = (low + high) // 2
            if self.excess(self.plan(middle, start)) <= excess * (1 - start):
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True)
class BudgetTarget:
    """What an automatic budget aims at: `quality` nats of excess per token, so many `calls`, or `ms` milliseconds."""

    kind: str = "quality"
    value: float = DEFAULT_EXCESS

    @classmethod
    def read(cls, text: str) -> BudgetTarget:
        """Of quality=0.3, calls=8 or ms=500."""
        kind, _, number = str(text).partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if kind not in ("quality", "calls", "ms") or not 0 < value < math.inf or (kind == "calls" and value % 1):
            raise ValueError(f"target is {text!r:.80}; allowed are quality=0.3 (nats per token), calls=8 and ms=500")
        return cls(kind, value)

    def steps(
        self,
        curve: EntropyCurve | None,
        seconds: float | None = None,
        *,
        share: float = 0.0,
        in_order: bool = False,
    ) -> int:
        """How many calls: `seconds` is what one takes, where the target is a time.

        share      of the text that is known from the start: what is left to write needs fewer calls
        in_order   whether each position is drawn knowing those before it, so that a step wastes nothing, e = 0
        """
        if self.kind == "calls":
            return int(self.value)
        if self.kind == "ms":
            assert seconds is not None
            return max(1, min(MOST_AUTOMATIC, int(self.value / 1000 / seconds)))
        if curve is None and in_order:
            return 1
        if curve is None:
            raise ValueError(
                "an automatic budget needs the model's entropy curve, which this one does not advise; fit it "
                "(fsdfm export MODEL --out FOLDER --fit-curve valid.txt), or say target calls=8"
            )
        return curve.steps_for(self.value, share)


@torch.no_grad()
def fit_curve(lm: LanguageModel, texts: Sequence[str], *, points: int = 17, seed: int = 0) -> EntropyCurve:
    """H of a model on some texts: -log p(x_1^i | x_t) at positions whose turn is still to come, mean over both.

    The mean over texts of the loss at positions that show noise at time t = kappa^-1(k); one call per text and point.
    """
    path, length, found = lm.checkpoint.path, _written_at_once(lm), []
    rows = [lm.encoder.damaged(text).tokens[:length] for text in texts]
    for point in range(points - 1):
        k = point / (points - 1)
        total, count = 0.0, 0
        for index, row in enumerate(rows):
            x_1, noise = torch.tensor([row]), Noise(seed, [index])
            hidden = noise.uniform(Purpose.PATH, len(row)) >= k
            hidden[:, 0] = False
            x_t = torch.where(hidden, path.source.sample(noise, len(row)), x_1)
            t = path.schedule.kappa_inverse(torch.tensor([k], dtype=torch.float64))
            asked = hidden.flatten().nonzero()[:, 0]
            posterior = lm.network.posterior(x_t, t, torch.full_like(t, 2.0**-10), rows=asked)
            for part, tile, own in posterior.marginals(asked):
                logits = (tile if own is None else tile[own]).float()
                log_p = torch.log_softmax(logits, -1).gather(-1, x_1.flatten()[asked[part], None])
                total, count = total - float(log_p.sum()), count + len(log_p)
        found.append(total / max(1, count))
    return EntropyCurve((*found, found[-1] * 0.5 if points == 2 else max(0.0, 2 * found[-1] - found[-2])))


def _written_at_once(lm: LanguageModel) -> int:
    """Tokens of a call: the training length, or a canvas."""
    return getattr(lm.checkpoint.model.config, "canvas", None) or lm.checkpoint.length


def seconds_per_call(lm: LanguageModel, length: int) -> float:
    """What a call for one text of this length takes here: the faster of two, the head on all rows included."""
    x_t = torch.zeros(1, min(length, _written_at_once(lm)), dtype=torch.int64, device=lm.runtime.device)
    t = torch.full((1,), 0.5, dtype=torch.float64, device=lm.runtime.device)
    took = []
    for _ in range(2):
        began = time.perf_counter()
        rows = torch.arange(x_t.shape[1], device=x_t.device)
        for _ in lm.network.posterior(x_t, t, t, rows=rows).marginals(rows):
            pass
        took.append(time.perf_counter() - began)
    return min(took)
