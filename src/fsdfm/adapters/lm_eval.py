"""The lm-evaluation-harness asks a model of ours: likelihoods, rolling likelihoods, continuations.

A denoiser has no log-probability in closed form. Two laws have one that can be estimated, both with what is given
(context, first token) standing clean from t = 0 on:

    bound      -log p(x_1) <= the path integral of `fsdfm.measure.nll_bound`: of the flow with many steps
    one-call   p(x_1) = E_{x_0} p(x_1 | x_0), the joint posterior at t = 0: of a text drawn in one call, temperature 1,
               estimated by a mean over K draws of x_0; exact under the mask source, whose x_0 is one state, and on
               average a bound, too, for E log(mean) <= log p

A joint posterior (causal head, CRF) takes `one-call` unless told, an independent one `bound`. Either is a mean of
independent estimates, whose standard error is kept for each request. Requests of one context share their noise, so that
choices are compared under the same one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import torch
from lm_eval.api.model import LM
from torch import Tensor

from fsdfm.flow import Posterior
from fsdfm.generate import LanguageModel, Request, SamplerOptions
from fsdfm.generate.run import cut_blocks
from fsdfm.measure.nll_bound import nll_bound
from fsdfm.model.causal_head import CausalPosterior
from fsdfm.noise import Noise

__all__ = ["FlowLM", "LikelihoodConfig", "Scored", "evaluate_tasks"]

_TOKENS = 256  # that a task's text may have where it does not say


@dataclass(frozen=True, kw_only=True)
class LikelihoodConfig:
    """How a log-likelihood is estimated.

    kind      bound, one-call, or auto: as the posterior is
    repeats   independent estimates of every request; their spread is its error
    draws     bound: times drawn for one of them
    """

    kind: Literal["auto", "bound", "one-call"] = "auto"
    repeats: int = 8
    draws: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("auto", "bound", "one-call"):
            raise ValueError(f"kind is {self.kind!r}; allowed are auto, bound, one-call")
        if self.repeats < 2 or self.draws < 1:
            raise ValueError(f"repeats is {self.repeats}, draws {self.draws}; allowed are repeats >= 2, draws >= 1")


@dataclass(frozen=True)
class Scored:
    """The log-likelihood of a continuation in nats, its Monte-Carlo standard error, and whether it is the likeliest."""

    log_prob: float
    error: float
    greedy: bool


class FlowLM(LM):  # type: ignore[misc]  # the harness has no types
    """A model of ours, as the harness wants it: `simple_evaluate(FlowLM(fsdfm.load(...)), tasks=[...])`."""

    def __init__(self, lm: LanguageModel, config: LikelihoodConfig | None = None, **options: Any):
        super().__init__()
        self.lm, self.config, self.options = lm, config or LikelihoodConfig(), options
        joint = getattr(lm.checkpoint.model, "joint", None) is not None
        self.kind = ("one-call" if joint else "bound") if self.config.kind == "auto" else self.config.kind
        self.errors: list[float] = []
        self._choices: dict[tuple[str, int], list[Scored]] = {}

    # --- what the harness calls ---------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """log p(continuation | context), and whether every token of it is the likeliest at its place."""
        found = []
        for request in requests:
            context, continuation = request.args
            scored = self.score(*self._encode(context, continuation))
            choices = self._choices.setdefault((str(request.task_name), int(request.doc_id or 0)), [])
            choices.append(scored)
            found.append((scored.log_prob, scored.greedy))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """log p of whole texts, a block at a time as generation writes them."""
        return [self.score([], self.lm.checkpoint.tokenizer.encode(request.args[0])).log_prob for request in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """What the sampler writes, as the model advises or the caller said, cut at the first stop sequence."""
        asked = [self._request(context, dict(options)) for context, options in (each.args for each in requests)]
        texts = []
        for (request, start, options), each in zip(asked, requests, strict=True):
            written = self.lm.run([request], **options)[0]
            texts.append(_cut("".join(written.pieces[start:]), each.args[1].get("until")))
        return texts

    def report(self) -> dict[str, Any]:
        """What is computed, its errors in nats, and how many choices they leave open.

        within_two_errors   the share of questions whose two best answers differ by less than two standard errors
        """
        close = [_is_close(choices) for choices in self._choices.values() if len(choices) > 1]
        return {
            **asdict(self.config),
            "kind": self.kind,
            "requests": len(self.errors),
            "median_error": median(self.errors) if self.errors else 0.0,
            "largest_error": max(self.errors, default=0.0),
            "questions": len(close),
            "within_two_errors": sum(close) / len(close) if close else 0.0,
        }

    # --- likelihood ---------------------------------------------------------------------------------------------------

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Scored:
        """log p(continuation | context) of tokens; a context that does not fit loses its beginning."""
        if not continuation:
            return Scored(0.0, 0.0, True)
        model, extra = self.lm.checkpoint, 1
        room = model.length - extra
        tokens = [*context, *continuation]
        if len(continuation) <= room:
            tokens = tokens[-room:]
        fixed = len(tokens) - len(continuation)
        index = int.from_bytes(hashlib.sha256(repr(list(context)).encode()).digest()[:5], "big") << 8
        total, variance, greedy, done = 0.0, 0.0, True, fixed
        for block in cut_blocks(len(tokens), room):
            if block.stop <= fixed:
                continue
            part = self._score_block(tokens[block.start : block.stop], done - block.start, index)
            total, variance, greedy = total + part.log_prob, variance + part.error**2, greedy and part.greedy
            done, index = block.stop, index + self.config.repeats
        self.errors.append(math.sqrt(variance))
        return Scored(total, math.sqrt(variance), greedy)

    def _score_block(self, tokens: Sequence[int], known: int, index: int) -> Scored:
        """Of one block behind its first token, of which the first `known` tokens are given."""
        model = self.lm.checkpoint
        first = model.tokenizer.eos_id if model.bos_id is None else model.bos_id
        x_1 = torch.tensor([[first, *tokens]], device=self.lm.runtime.device)
        given = torch.zeros_like(x_1, dtype=torch.bool)
        given[:, : 1 + known] = True
        noise = Noise(self.config.seed, range(index, index + self.config.repeats), device=x_1.device)
        x_1, given = x_1.expand(self.config.repeats, -1), given.expand(self.config.repeats, -1)
        posterior = self._first_call(x_1, given, noise)
        greedy = _is_greedy(posterior, x_1, given)
        if self.kind == "one-call":
            logs = posterior.log_prob(x_1).double()
            mean = float(torch.logsumexp(logs, 0)) - math.log(len(logs))
            return Scored(mean, float((logs - mean).exp().std()) / math.sqrt(len(logs)), greedy)
        bound = nll_bound(
            self.lm.network,
            model.path,
            x_1,
            given=given,
            draws=self.config.draws,
            seed=self.config.seed,
            first=index,
        )
        count = len(tokens) - known
        return Scored(-bound.nats_per_token * count, bound.standard_error * count, greedy)

    def _first_call(self, x_1: Tensor, given: Tensor, noise: Noise) -> Posterior:
        """The posterior at t = 0, told that one step is to come."""
        path = self.lm.checkpoint.path
        x_0 = torch.where(given, x_1, path.source.sample(noise, x_1.shape[1]))
        precise = torch.float32 if x_1.device.type == "mps" else torch.float64
        t = torch.zeros(len(x_1), dtype=precise, device=x_1.device)
        every = torch.arange(x_1.numel(), device=x_1.device)
        posterior = self.lm.network.posterior(x_0, t, torch.ones_like(t), rows=every)
        if isinstance(posterior, CausalPosterior):  # its marginals are those given the tokens before
            posterior = replace(posterior, x_t=x_1)
        return posterior.given(torch.where(given, x_1, -1), forbidden=path.source.mask_token)

    # --- text ---------------------------------------------------------------------------------------------------------

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; spaces at the end of the context belong to the continuation, as tokens have them."""
        bare = context.rstrip()
        continuation, tokenizer = context[len(bare) :] + continuation, self.lm.checkpoint.tokenizer
        if not bare:
            return [], tokenizer.encode(continuation)
        before, whole = tokenizer.encode(bare), tokenizer.encode(bare + continuation)
        return whole[: len(before)], whole[len(before) :]

    def _request(self, context: str, asked: dict[str, Any]) -> tuple[Request, int, SamplerOptions]:
        """What is to be written, where it starts, and how; what the caller of `FlowLM` said goes before the task."""
        model = self.lm.checkpoint
        wanted = int(asked.get("max_gen_toks") or asked.get("max_tokens") or _TOKENS)
        free = min(wanted, max(1, model.length // 2))
        tokens = model.tokenizer.encode(context)[-(model.length - 1 - free) :] if context else []
        first = model.tokenizer.eos_id if model.bos_id is None else model.bos_id
        frozen = [True] * (1 + len(tokens)) + [False] * free
        request = Request(tokens=(first, *tokens, *[0] * free), frozen=tuple(frozen), num_bos=1, ends=True)
        sampled = bool(asked.get("do_sample")) and float(asked.get("temperature") or 0) > 0
        own = {name: asked[name] for name in ("temperature", "top_p", "top_k") if sampled and asked.get(name)}
        return request, len(tokens), {**own, **self.options}  # type: ignore[typeddict-item]


def _is_greedy(posterior: Posterior, x_1: Tensor, given: Tensor) -> bool:
    """Whether each free token is the likeliest at its place, the laws of all draws of noise taken together."""
    rows = (~given).flatten().nonzero()[:, 0]
    count = len(rows) // len(x_1)  # the same positions are free in every draw
    total: Tensor | None = None
    for part, tile, own in posterior.marginals(rows):
        probs = torch.softmax((tile if own is None else tile[own]).float(), -1)
        total = probs.new_zeros(count, probs.shape[-1]) if total is None else total
        total.index_add_(0, torch.arange(len(rows), device=probs.device)[part] % count, probs)
    assert total is not None
    return bool((total.argmax(-1) == x_1[0][~given[0]]).all())


def _is_close(choices: Sequence[Scored]) -> bool:
    best, second = sorted(choices, key=lambda scored: -scored.log_prob)[:2]
    return best.log_prob - second.log_prob < 2 * math.hypot(best.error, second.error)


def _cut(text: str, until: str | Sequence[str] | None) -> str:
    """The text before the first of the stop sequences."""
    stops = [until] if isinstance(until, str) else [*(until or ())]
    return text[: min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))]


def evaluate_tasks(
    lm: LanguageModel,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    likelihood: LikelihoodConfig | None = None,
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """Run tasks of the harness: what it found, with the errors of our likelihoods, and its table.

    folder    of task files of your own (YAML), beside the harness's
    options   of the sampler, for tasks that let the model write
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    asked = FlowLM(lm, likelihood, **options)
    manager = TaskManager(include_path=folder)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ValueError(
            f"--tasks names {unknown[0]!r}, which the harness does not know; `lm_eval ls tasks` lists them"
        )
    try:
        found = simple_evaluate(
            asked, tasks=[*tasks], num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
        )
    except (ConnectionError, OSError) as error:
        raise ValueError(
            f"the data of {', '.join(tasks)} cannot be had ({type(error).__name__}: {str(error)[:120]}); connect, or "
            "name local files in a task file of your own"
        ) from error
    assert found is not None
    kept = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")
    record = {"format": "fsdfm-tasks", "model": lm.checkpoint.loaded, "likelihood": asked.report()}
    return {**record, **{name: found[name] for name in kept if name in found}}, str(make_table(found))
