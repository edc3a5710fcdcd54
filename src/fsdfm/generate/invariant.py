"""The model's arithmetic, made the same whatever else is in the batch.

A matrix product rounds differently when its number of rows changes, so the same row in another batch would have other
last digits, and sooner or later another token. Hence no call has a shape that depends on the batch: on a CPU every call
is about one sample, whose own coins decide how many rows it asks for; elsewhere the trunk takes eight samples at a
time, the head HEAD_ROWS positions, and what is missing is filled up.

Texts of unequal length share a call where their lengths fall into one bucket, of 225 .. 256 tokens, say. On a CPU each
is computed by itself and nothing is padded. Elsewhere a text is padded to the end of its bucket and the padding hidden
from attention, *also where it is alone*: its shapes are a function of the text, which is bit for bit the same in any
batch. One that fills its bucket has no padding and no mask, and shares calls with its like only.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdfm.flow import Posterior, Question, SplitNetwork, network_posterior
from fsdfm.model.context import Context
from fsdfm.runtime import Runtime

__all__ = ["BUCKET", "HEAD_ROWS", "AfterContext", "BatchInvariant"]

HEAD_ROWS = 128  # what the sampler asks of a head at a time
BUCKET = 32  # tokens: texts whose lengths are equal when rounded up to a multiple share a call
_ROWS = {"cpu": 1}
_ROWS_ELSEWHERE = 8


class BatchInvariant:
    """A denoiser in two parts whose result for a row does not depend on the rows beside it.

    rows     samples of a call of the trunk; by the device unless said
    """

    def __init__(self, model: SplitNetwork, runtime: Runtime, *, rows: int | None = None):
        self.model, self.runtime = model, runtime
        self.rows = rows or _ROWS.get(runtime.device.type, _ROWS_ELSEWHERE)
        self.samples_apart = self.rows == 1  # what the sampler asks of the head is of one sample, too
        self.pads = self.rows > 1 and "keys" in inspect.signature(model.trunk).parameters

    @property
    def joint(self) -> Any:
        """The model's joint head, if it has one."""
        return getattr(self.model, "joint", None)

    @property
    def vocabulary(self) -> Any:
        """The module that gives the logits, where that is a product and no more."""
        return getattr(self.model, "vocabulary", None)

    @torch.no_grad()
    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """p_{1|t}(. | x_t) at the rows that somebody will ask about; None: any."""
        return network_posterior(self, x_t, t, h=h, rows=rows)

    def group(self, question: Question) -> Hashable:
        """Questions of equal groups may be answered together."""
        length = question.x_t.shape[1]
        if self.rows == 1:
            return -(-length // BUCKET)
        return length + self._padding(length), self._padding(length) > 0

    @torch.no_grad()
    def posteriors(self, questions: Sequence[Question]) -> list[Posterior]:
        """The answers to questions of one group, about one text each, bit for bit what each would be alone."""
        if any(len(each.x_t) != 1 for each in questions):
            raise ValueError(f"questions are about {[len(each.x_t) for each in questions]} texts; allowed is one each")
        if self.rows == 1:
            return [self.posterior(each.x_t, each.t, each.h, rows=each.rows) for each in questions]
        features = self._features([(each.x_t, each.t, each.h) for each in questions])
        return [
            network_posterior(_Computed(self, found), each.x_t, each.t, h=each.h, rows=each.rows)
            for each, found in zip(questions, features, strict=True)
        ]

    @torch.no_grad()
    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C], `rows` samples at a time."""
        return self._features([(x_t, t, h)])[0]

    def _features(self, asked: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        """Features [B, L, C] of batches (x_t, t, h) of one group."""
        lengths = torch.cat([torch.full((len(x_t),), x_t.shape[1]) for x_t, _, _ in asked])
        width = int(lengths[0]) + self._padding(int(lengths[0]))
        x_t = torch.cat([F.pad(x_t, (0, width - x_t.shape[1])) for x_t, _, _ in asked])
        values = [x_t, *(torch.cat([each[place] for each in asked]) for place in (1, 2))]
        hidden: list[Tensor] = []
        if self._padding(int(lengths[0])):
            hidden = [(torch.arange(width) < lengths[:, None]).to(x_t.device)]
        parts = []
        for start in range(0, len(x_t), self.rows):
            part = slice(start, start + self.rows)
            filled = [_fill(value[part], self.rows) for value in (*values, *hidden)]
            with self.runtime.autocast():
                features = self.model.trunk(*filled[:3], **({"keys": filled[3]} if hidden else {}))
            parts.append(features[: len(x_t[part])].to(torch.float32))
        found = torch.split(torch.cat(parts), [len(x_t) for x_t, _, _ in asked])
        return [own[:, : x_t.shape[1]] for own, (x_t, _, _) in zip(found, asked, strict=True)]

    def _padding(self, length: int) -> int:
        """Tokens that are missing to the end of the bucket."""
        return -length % BUCKET if self.pads else 0

    @torch.no_grad()
    def features_at(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor) -> Tensor:
        """The features of positions b * L + i, in order: int64 [N] -> [N, C].

        How many rows a sample has is its own affair (its coins decide), so a sample asked alone keeps its shapes. One
        with no rows is not computed: of 1,024 steps over 256 positions nearly half have nothing to draw.
        """
        features_at = getattr(self.model, "features_at", None)
        if self.rows > 1 or self.runtime.config.compile or features_at is None:
            return self.trunk(x_t, t, h).flatten(0, 1)[rows]
        parts, length = [], x_t.shape[1]
        counts = torch.bincount(rows // length, minlength=len(x_t)).tolist()
        for sample, own in enumerate(torch.split(rows, counts)):
            if len(own) == 0:
                continue
            one = slice(sample, sample + 1)
            with self.runtime.autocast():
                found = features_at(x_t[one], t[one], h[one], rows=own - sample * length)
            parts.append(found.to(torch.float32))
        return torch.cat(parts) if parts else torch.empty(0, 0)

    @torch.no_grad()
    def read(self, tokens: Tensor, context: Context | None) -> Context:
        """What the model makes of one more canvas [1, C] of clean text."""
        with self.runtime.autocast():
            found: Context = self.model.read(tokens, context)  # type: ignore[attr-defined]  # canvas models have it
        return found

    def after(self, contexts: Sequence[Context | None]) -> AfterContext:
        """This network about texts that continue what was read, a context per sample."""
        return AfterContext(self, contexts)

    @torch.no_grad()
    def logits_at(self, features: Tensor) -> Tensor:
        """The head at chosen rows, of one sample where a call is about one, HEAD_ROWS at a time: [N, C] -> [N, V]."""
        parts = []
        for part in torch.split(features, HEAD_ROWS):
            missing = 0 if self.rows == 1 else HEAD_ROWS - len(part)
            with self.runtime.autocast():
                logits = self.model.logits_at(F.pad(part, (0, 0, 0, missing)) if missing else part)
            parts.append(logits[: len(part)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # without a copy where the sampler asks


@dataclass(frozen=True)
class _Computed:
    """A network whose trunk has run on one question already."""

    network: BatchInvariant
    features: Tensor
    samples_apart = False

    @property
    def joint(self) -> Any:
        """The model's joint head, if it has one."""
        return self.network.joint

    @property
    def vocabulary(self) -> Any:
        """The module that gives the logits, where that is a product and no more."""
        return self.network.vocabulary

    @property
    def model(self) -> SplitNetwork:
        """What it wraps, whose embedding a joint head may read."""
        return self.network.model

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """The features of the one text."""
        del x_t, t, h
        return self.features

    def features_at(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor) -> Tensor:
        """The features of the rows."""
        del x_t, t, h
        return self.features.flatten(0, 1)[rows]

    def logits_at(self, features: Tensor) -> Tensor:
        """The head of the network."""
        return self.network.logits_at(features)


class AfterContext:
    """A network that sees, for every sample, what was read before it; one sample at a time."""

    samples_apart = True

    def __init__(self, network: BatchInvariant, contexts: Sequence[Context | None]):
        self.network, self.contexts = network, contexts
        self.model: Any = network.model
        self.logits_at = network.logits_at

    @property
    def joint(self) -> Any:
        """The model's joint head, if it has one."""
        return self.network.joint

    @property
    def vocabulary(self) -> Any:
        """The module that gives the logits, where that is a product and no more."""
        return self.network.vocabulary

    @torch.no_grad()
    def posterior(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor | None = None) -> Posterior:
        """p_{1|t}(. | x_t, what was read)."""
        return network_posterior(self, x_t, t, h=h, rows=rows)

    def trunk(self, x_t: Tensor, t: Tensor, h: Tensor) -> Tensor:
        """Features [B, L, C]."""
        parts = []
        for sample, context in enumerate(self.contexts):
            one = slice(sample, sample + 1)
            with self.network.runtime.autocast():
                parts.append(self.model.trunk(x_t[one], t[one], h[one], context=context).to(torch.float32))
        return torch.cat(parts)

    def features_at(self, x_t: Tensor, t: Tensor, h: Tensor, *, rows: Tensor) -> Tensor:
        """The features of positions b * L + i, in order: int64 [N] -> [N, C]; a sample without rows is not computed."""
        parts, length = [], x_t.shape[1]
        counts = torch.bincount(rows // length, minlength=len(x_t)).tolist()
        for sample, own in enumerate(torch.split(rows, counts)):
            if len(own):
                one, context = slice(sample, sample + 1), self.contexts[sample]
                own = own - sample * length
                with self.network.runtime.autocast():
                    found = self.model.features_at(x_t[one], t[one], h[one], rows=own, context=context)
                parts.append(found.to(torch.float32))
        return torch.cat(parts) if parts else torch.empty(0, 0)


def _fill(value: Tensor, rows: int) -> Tensor:
    """The value with its last row repeated up to `rows` rows."""
    return torch.cat([value, value[-1:].expand(rows - len(value), *value.shape[1:])]) if len(value) < rows else value
