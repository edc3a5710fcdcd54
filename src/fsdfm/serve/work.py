"""From a body to jobs, and from results to answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from fsdfm.files import did_you_mean
from fsdfm.generate import Generation, LanguageModel, Request, SamplerConfig, SamplerOptions, State
from fsdfm.serve.schemas import (
    MAX_STEPS,
    SAMPLER_FIELDS,
    CompletionBody,
    FimBody,
    InfillBody,
    RepairBody,
    Sampling,
)

__all__ = ["RefusalError", "Work", "build_work"]

_SEEDS = 2**31  # what a random seed is drawn from: short enough to be typed again


class RefusalError(Exception):
    """An error with a status, told in OpenAI's envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.error = {"message": message, "type": kind, "param": param, "code": code}


@dataclass(kw_only=True)
class Work:
    """What one request asks: its texts, how they are sampled, how they are shown.

    requests   a text each, in the order of the choices
    configs    how each is sampled: an automatic budget is that of its text
    shows      all: the whole text; written: what is written only; echo: that and what stands before it
    """

    name: str
    lm: LanguageModel
    config: SamplerConfig
    requests: list[Request]
    configs: list[SamplerConfig] = field(default_factory=list)
    shows: Literal["all", "written", "echo"] = "all"
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    diffusing: bool = False
    details: bool = False
    asked: str | None = None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are given, those of a prompt once."""
        return sum(_count_given(request) for request in self.requests if request.copy == 0)

    def head(self) -> dict[str, Any]:
        """What every answer begins with."""
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.name}

    def part(self, given: Sequence[bool]) -> slice:
        """The tokens that are shown."""
        free = [place for place, fixed in enumerate(given) if not fixed]
        if self.shows == "all" or not free:
            return slice(0 if self.shows != "written" else len(given), len(given))
        return slice(free[0] if self.shows == "written" else 0, free[-1] + 1)

    def choice(self, index: int, made: Generation) -> dict[str, Any]:
        """A finished text."""
        part = self.part(made.given)
        text = "".join(made.pieces[part])
        behind = sum(map(len, made.pieces[part.start : self._first_free(made)])) if self.shows == "echo" else 0
        cuts = [at for stop in self.stop if (at := text.find(stop, behind)) >= 0]
        cut = text[: min(cuts)] if cuts else text
        return {
            "text": cut,
            "index": index,
            "logprobs": None,
            "finish_reason": "stop" if cuts or made.finished or self.shows == "all" else "length",
            "fsdfm": self._made(made, self.requests[index]),
        }

    def _first_free(self, made: Generation) -> int:
        return next((place for place, fixed in enumerate(made.given) if not fixed), len(made.given))

    def _made(self, made: Generation, request: Request) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "seed": made.seed,
            "copy": made.copy,
            "steps": made.steps,
            "calls": made.calls,
            "start": made.start,
            "seconds": made.seconds,
            "temperature": self.config.temperature,
            "jump": None if self.config.jump is None else str(self.config.jump),
            "warnings": list(made.warnings),
        }
        if self.details:
            facts["details"] = {
                "pieces": list(made.pieces),
                "last_changed": list(made.last_changed),
                **{name: _places(getattr(made, name)) for name in ("given", "marked", "replaced")},
                "asked": self.asked,
                "length": len(request.tokens),
            }
        return facts

    def step_choice(self, index: int, state: State, before: State | None) -> dict[str, Any]:
        """A text on its way: whole, with the characters that are other than in the state sent before."""
        part = self.part(state.given)
        pieces = state.pieces[part]
        earlier = () if before is None else before.tokens
        changed = [
            place >= len(earlier) or state.tokens[place] != earlier[place] if before is not None else False
            for place in range(len(state.tokens))
        ]
        facts: dict[str, Any] = {
            "step": state.step,
            "steps": state.steps,
            "block": state.block,
            "t": state.t,
            "changed": _spans(pieces, changed[part]),
        }
        if self.details:
            facts |= {"pieces": list(state.pieces), "changed_tokens": _places(changed), "given": _places(state.given)}
        return {"text": "".join(pieces), "index": index, "logprobs": None, "finish_reason": None, "fsdfm": facts}

    def usage_of(self, results: Sequence[Generation]) -> dict[str, int]:
        """Tokens given and written."""
        written = sum(len(made.tokens) - sum(made.given) for made in results)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
        }


def build_work(body: Sampling, models: Mapping[str, LanguageModel], *, max_canvas: int) -> Work:
    """What a body asks of which model; what cannot be done is a `RefusalError`."""
    name = next(iter(models)) if body.model is None else body.model
    if name not in models:
        raise RefusalError(
            404,
            f"the model {name!r} is not served here; {did_you_mean(name, models)}",
            param="model",
            code="model_not_found",
        )
    lm = models[name]
    try:
        options = _options(body)
        work = _TEXTS[type(body)](
            Work(name=name, lm=lm, config=SamplerConfig(**options), requests=[]), body, max_canvas
        )
    except ValueError as error:
        raise RefusalError(400, str(error), param=_named(str(error), body)) from error
    for request in work.requests:
        if len(request.tokens) > max_canvas:
            raise RefusalError(
                400,
                f"the text has {len(request.tokens)} tokens, what is given included; at most {max_canvas} are allowed "
                "here: ask for less",
                code="canvas_too_long",
            )
    try:
        configs = _configs(lm, work.requests, options)
    except ValueError as error:
        raise RefusalError(400, str(error)) from error
    num, streaming = body.n or 1, body.stream_options
    work.requests = [copy for request in work.requests for copy in request.copies(num)]
    work.configs = [config for config in configs for _ in range(num)]
    work.config = work.configs[0]
    work.stream, work.diffusing, work.details = bool(body.stream), bool(body.diffusing), bool(body.details)
    work.usage = bool(streaming and streaming.include_usage)
    if streaming is not None and not work.stream:
        raise RefusalError(400, "stream_options is only allowed with stream: true", param="stream_options")
    if work.diffusing and not work.stream:
        raise RefusalError(400, "diffusing is only allowed with stream: true", param="diffusing")
    return work


def _named(message: str, body: Sampling) -> str | None:
    """The field that a message of the library begins with."""
    first = message.partition(" ")[0]
    return first if first in type(body).model_fields else None


def _options(body: Sampling) -> SamplerOptions:
    """What a body says of sampling, and a seed."""
    said = {field.name: getattr(body, field.name) for field in SAMPLER_FIELDS}
    options = {name: value for name, value in said.items() if value is not None}
    return cast(SamplerOptions, {"seed": secrets.randbelow(_SEEDS), **options})


def _configs(lm: LanguageModel, requests: Sequence[Request], options: SamplerOptions) -> list[SamplerConfig]:
    """How each text is sampled."""
    if options.get("steps") == "auto":
        configs = [lm.sampler_config(request, **options) for request in requests]
    else:
        configs = [lm.sampler_config(**options)] * len(requests)
    for config in configs:
        if config.num_steps() > MAX_STEPS:
            raise ValueError(
                f"the grid has {config.num_steps()} steps; at most {MAX_STEPS} are allowed here: ask for less"
            )
    return configs


def _complete(work: Work, body: Any, max_canvas: int) -> Work:
    assert isinstance(body, CompletionBody | FimBody)
    if isinstance(body, CompletionBody):
        _refuse_unsupported(body)
    work.stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    prompts = [body.prompt] if body.prompt is None or isinstance(body.prompt, str) else body.prompt
    gaps, draft = getattr(body, "gaps", False), getattr(body, "start_from", None)
    if gaps:
        if body.suffix or draft or body.max_tokens:
            raise ValueError("gaps is true: suffix, start_from and max_tokens have no place then; leave them out")
        work.requests = [work.lm.encoder.gaps(prompt or "") for prompt in prompts]
        return work
    work.shows = "echo" if getattr(body, "echo", False) else "written"
    work.requests = [
        _continuation(work.lm, prompt or None, body.suffix or None, room=body.max_tokens, most=max_canvas, draft=draft)
        for prompt in prompts
    ]
    return work


def _infill(work: Work, body: Any, _: int) -> Work:
    assert isinstance(body, InfillBody)
    work.asked = body.text
    work.requests = [work.lm.encoder.gaps(body.text)]
    return work


def _repair(work: Work, body: Any, _: int) -> Work:
    assert isinstance(body, RepairBody)
    encoder = work.lm.encoder
    if body.corrupt is None:
        if body.blind:
            raise ValueError("blind is only allowed with corrupt; without damaged, every repair is blind")
        work.asked = body.text
        spans = None if body.damaged is None else [(begin, end) for begin, end in body.damaged]
        work.requests = [encoder.damaged(body.text, spans)]
        return work
    if body.damaged is not None:
        raise ValueError("corrupt damages the text itself; leave damaged out")
    corruption = work.lm.corrupt(body.text, body.corrupt, seed=work.config.seed)
    work.asked = corruption.text
    work.requests = [encoder.damaged(corruption.tokens, None if body.blind else corruption.damaged)]
    return work


_TEXTS = {CompletionBody: _complete, FimBody: _complete, InfillBody: _infill, RepairBody: _repair}


def _continuation(
    lm: LanguageModel, prompt: str | None, suffix: str | None, *, room: int | None, most: int, draft: str | None
) -> Request:
    """A canvas with room for `room` tokens between prompt and suffix, or with a draft between them."""
    length = lm.checkpoint.length
    fixed = _count_fixed(lm, prompt, suffix)
    if draft is not None:
        if room is not None:
            raise ValueError("start_from has a length of its own; leave max_tokens out")
        return _drafted(lm, prompt, suffix, draft=draft)
    if room is None:
        room = length - fixed
        if room < 1:
            raise ValueError(
                f"what is given has {fixed} tokens and leaves no room in the model's {length}; shorten it, or say "
                "max_tokens"
            )
    if fixed + room > most:
        raise ValueError(
            f"max_tokens is {room} and {fixed} tokens are given; at most {most} in all are allowed here: ask for less"
        )
    return lm.encoder.continuation(prompt, suffix, length=fixed + room)


def _count_fixed(lm: LanguageModel, prompt: str | None, suffix: str | None) -> int:
    """Tokens that stand fast, the first one of the document included."""
    most = 8 + sum(len(text.encode()) for text in (prompt, suffix) if text)  # no tokenizer has more
    return sum(lm.encoder.continuation(prompt, suffix, length=most).frozen)


def _drafted(lm: LanguageModel, prompt: str | None, suffix: str | None, *, draft: str) -> Request:
    """A draft between prompt and suffix, every token of which may change."""
    if prompt is None:
        whole = lm.encoder.damaged(draft)
        tokens = list(whole.tokens[whole.num_bos :])
    else:
        most = 8 + len(draft.encode())
        ending = lm.encoder.continuation(None, draft, length=most)
        tokens = [t for t, fixed in zip(ending.tokens, ending.frozen, strict=True) if fixed][ending.num_bos :]
    canvas = lm.encoder.continuation(prompt, suffix, length=_count_fixed(lm, prompt, suffix) + len(tokens))
    draws = iter(tokens)
    filled = tuple(t if fixed else next(draws) for t, fixed in zip(canvas.tokens, canvas.frozen, strict=True))
    return replace(canvas, tokens=filled, draft=True, ends=False)


def _refuse_unsupported(body: CompletionBody) -> None:
    """Parameters of OpenAI's that mean nothing here; harmless values pass."""
    reasons = {
        "logprobs": (body.logprobs is not None, "a token is revised at every step and has no one probability"),
        "logit_bias": (bool(body.logit_bias), "it is not supported"),
        "best_of": (body.best_of not in (None, body.n or 1), "texts are not ranked; use n"),
        "presence_penalty": (bool(body.presence_penalty), "all tokens are written at once, none after another"),
        "frequency_penalty": (bool(body.frequency_penalty), "all tokens are written at once, none after another"),
    }
    for name, (given, reason) in reasons.items():
        if given:
            raise RefusalError(
                400, f"{name} cannot be honoured: {reason}; leave it out", param=name, code="unsupported_parameter"
            )


def _count_given(request: Request) -> int:
    if request.draft or request.blind:
        return len(request.tokens) - request.num_bos
    return sum(request.frozen) - request.num_bos


def _places(flags: Sequence[bool]) -> list[int]:
    return [place for place, flag in enumerate(flags) if flag]


def _spans(pieces: Sequence[str], changed: Sequence[bool]) -> list[list[int]]:
    """The characters [begin, end) of changed tokens, neighbours joined."""
    spans: list[list[int]] = []
    at = 0
    for piece, flag in zip(pieces, changed, strict=True):
        end = at + len(piece)
        if flag and spans and spans[-1][1] == at:
            spans[-1][1] = end
        elif flag and end > at:
            spans.append([at, end])
        at = end
    return spans
