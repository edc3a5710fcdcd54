"""The endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_type_hints

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from fsdfm import __version__
from fsdfm.generate import Generation, LanguageModel, State
from fsdfm.serve.config import ServeConfig
from fsdfm.serve.engine import CancelledJobError, Engine, EngineStoppedError, ExpiredJobError, Job, QueueFullError
from fsdfm.serve.guard import Guard, internal_error, log_line
from fsdfm.serve.page import page_files
from fsdfm.serve.schemas import (
    UNSUPPORTED,
    Completion,
    CompletionBody,
    ErrorEnvelope,
    FimBody,
    InfillBody,
    ModelCard,
    ModelList,
    RepairBody,
    Sampling,
    Status,
    allowed_values,
)
from fsdfm.serve.stream import EventStream, Mailbox, event, until_disconnect
from fsdfm.serve.work import RefusalError, Work, build_work

__all__ = ["build_app"]

_REFUSALS = {
    400: "What is asked cannot be done; the message says what is allowed.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request took too long to arrive.",
    413: "The request is too large.",
    429: "Too many texts wait; Retry-After says when to come again.",
    500: "A fault of the server.",
    503: "The server is shutting down.",
    504: "The text was not ready in time.",
}


def _documented(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": ErrorEnvelope, "description": _REFUSALS[code]} for code in codes}


_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}  # of every event
_TEXT_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts; with stream: server-sent events, `data: {...}` each, `data: [DONE]` at the end.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    },
    **_documented(*_REFUSALS),
}


class Service:
    """The models, the engine, and how a request becomes an answer."""

    def __init__(self, models: Mapping[str, LanguageModel], engine: Engine, config: ServeConfig):
        self.models, self.engine, self.config, self.created = models, engine, config, int(time.time())

    async def answer(self, body: Sampling, request: Request) -> Response:
        """Texts for a body: one answer, or a stream."""
        facts: dict[str, Any] = request.scope["fsdfm"]
        work = await asyncio.to_thread(build_work, body, self.models, max_canvas=self.config.max_canvas)
        facts |= {"model": work.name, "texts": len(work.requests), "steps": work.config.num_steps()}
        facts |= {"prompt_tokens": work.prompt_tokens, "stream": work.stream}
        if self.config.log_prompts:
            facts["body"] = body.model_dump(exclude_none=True)
        mailbox = Mailbox()
        jobs = self._submit(work, mailbox)
        self.engine.metrics.tokens.labels("prompt").inc(work.prompt_tokens)
        if work.stream:
            return EventStream(
                self._events(work, jobs, mailbox, facts=facts),
                seconds=self.config.body_seconds,
                on_leave=lambda: self._leave(jobs, mailbox),
            )
        return await self._whole(work, jobs, mailbox, request=request)

    def _leave(self, jobs: list[Job], mailbox: Mailbox) -> None:
        """The request is over, answered or not: nothing of it stays."""
        self.engine.cancel(jobs)
        mailbox.close()

    def _submit(self, work: Work, mailbox: Mailbox) -> list[Job]:
        deadline = time.monotonic() + self.config.request_seconds
        jobs = [
            Job(
                lm=work.lm,
                request=request,
                config=config,
                on_end=mailbox.end,
                on_state=mailbox.state if work.diffusing else None,
                deadline=deadline,
            )
            for request, config in zip(work.requests, work.configs, strict=True)
        ]
        try:
            self.engine.submit(jobs)
        except QueueFullError as full:
            raise RefusalError(
                429,
                f"{full.waiting} texts wait already; come again in {full.retry_after} s",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(full.retry_after)},
            ) from full
        except EngineStoppedError as stopped:
            raise _shutting_down() from stopped
        return jobs

    async def _whole(self, work: Work, jobs: list[Job], mailbox: Mailbox, *, request: Request) -> Response:
        """All texts in one answer; nothing where the client left."""
        gone = asyncio.create_task(until_disconnect(request.receive))
        ready = asyncio.create_task(self._collect(jobs, mailbox))
        try:
            await asyncio.wait({gone, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise ConnectionResetError("the client left")
            results = ready.result()
        finally:
            for task in (gone, ready):
                task.cancel()
            await asyncio.gather(gone, ready, return_exceptions=True)
            self._leave(jobs, mailbox)
        usage = work.usage_of(results)
        self.engine.metrics.tokens.labels("completion").inc(usage["completion_tokens"])
        request.scope["fsdfm"]["completion_tokens"] = usage["completion_tokens"]
        choices = [work.choice(index, made) for index, made in enumerate(results)]
        return JSONResponse({**work.head(), "choices": choices, "usage": usage})

    async def _collect(self, jobs: list[Job], mailbox: Mailbox) -> list[Generation]:
        made: dict[int, Generation] = {}
        while len(made) < len(jobs):
            job, state = await mailbox.next()
            if state is None:
                made[jobs.index(job)] = await _result(job)
        return [made[index] for index in range(len(jobs))]

    async def _events(
        self, work: Work, jobs: list[Job], mailbox: Mailbox, *, facts: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        """Every step, if asked for, then every text as it is ready, then the usage, then the end."""
        made: list[Generation] = []
        sent: dict[int, State] = {}
        try:
            while len(made) < len(jobs):
                job, state = await mailbox.next()
                index = jobs.index(job)
                if state is not None:
                    choice = await asyncio.to_thread(work.step_choice, index, state, sent.get(index))
                    sent[index] = state
                else:
                    made.append(await _result(job))
                    choice = work.choice(index, made[-1])
                yield event({**work.head(), "choices": [choice], **({"usage": None} if work.usage else {})})
        except RefusalError as refusal:
            facts["error"] = refusal.error["code"]
            yield event({"error": refusal.error})
            return
        except Exception as error:
            self.engine.metrics.errors.inc()
            log_line("fault", **facts, error=type(error).__name__)
            yield event({"error": internal_error(facts["request_id"]).error})
            return
        usage = work.usage_of(made)
        facts["completion_tokens"] = usage["completion_tokens"]
        self.engine.metrics.tokens.labels("completion").inc(usage["completion_tokens"])
        if work.usage:
            yield event({**work.head(), "choices": [], "usage": usage})
        yield event("[DONE]")

    def card(self, name: str) -> dict[str, Any]:
        """What is known of a model."""
        checkpoint = self.models[name].checkpoint
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "fsdfm",
            "length": checkpoint.length,
            "parameters": sum(weight.numel() for weight in checkpoint.model.parameters()),
            "vocab_size": checkpoint.tokenizer.vocab_size,
            "budgets": None if checkpoint.budgets is None else list(checkpoint.budgets),
            "advice": checkpoint.facts.get("sampling"),
        }

    def status(self) -> dict[str, Any]:
        """How the engine is; a dead one is an error."""
        if not self.engine.alive:
            raise RefusalError(503, "the engine has ended; restart the server", kind="server_error", code="engine_dead")
        running, waiting = self.engine.load
        return {"status": "ok", "running": running, "waiting": waiting}


async def _result(job: Job) -> Generation:
    """The text of a job that is over; its failure as what a client is told."""
    error = job.error
    if error is None and job.run is not None:
        return (await asyncio.to_thread(job.run.results))[0]
    if isinstance(error, ExpiredJobError):
        raise RefusalError(504, "the text was not ready in time; ask for less", kind="timeout_error", code="timeout")
    if isinstance(error, CancelledJobError):
        raise _shutting_down()
    if isinstance(error, ValueError):
        raise RefusalError(400, str(error)) from error
    raise error or RuntimeError("a job ended without a result")


def _shutting_down() -> RefusalError:
    return RefusalError(
        503,
        "the server is shutting down; come again",
        kind="server_error",
        code="shutting_down",
        headers={"retry-after": "5"},
    )


def build_app(
    models: Mapping[str, LanguageModel],
    config: ServeConfig | None = None,
    *,
    extra: str = "",
    engine: Engine | None = None,
) -> FastAPI:
    """The application: its engine starts and ends with it.

    extra   HTML that the page shows below the playground: what was measured of the models
    """
    config = config or ServeConfig()
    engine = engine or Engine(
        running=config.running, waiting=config.waiting, batch=config.batch, threads=config.threads
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(
        title="fsdfm",
        version=__version__,
        description="Few-step text: completions, infill, repair, streamed states.",
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, config=config, metrics=engine.metrics)
    if config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.state.service = service = Service(models, engine, config)
    _add_texts(app, service)
    _add_facts(app, service)
    _add_page(app, extra)
    _add_errors(app)
    _describe(app, config)
    return app


def _add_texts(app: FastAPI, service: Service) -> None:
    async def complete(body: CompletionBody, request: Request) -> Response:
        """After a prompt, before a suffix, between both, or from nothing."""
        return await service.answer(body, request)

    async def fill_in_the_middle(body: FimBody, request: Request) -> Response:
        """What stands between a prompt and a suffix."""
        return await service.answer(body, request)

    async def infill(body: InfillBody, request: Request) -> Response:
        """Fill the gaps of a text."""
        return await service.answer(body, request)

    async def repair(body: RepairBody, request: Request) -> Response:
        """Repair a text: at the places that are named, or blind."""
        return await service.answer(body, request)

    endpoints: dict[str, Callable[..., Any]] = {
        "/v1/completions": complete,
        "/v1/fim/completions": fill_in_the_middle,
        "/v1/infill": infill,
        "/v1/repair": repair,
    }
    for path, endpoint in endpoints.items():
        app.post(path, response_model=Completion, responses=_TEXT_ANSWERS)(endpoint)


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=ModelList, responses=_documented(401), summary="The models")
    async def list_models() -> Any:
        return {"object": "list", "data": [service.card(name) for name in service.models]}

    @app.get("/v1/models/{name}", response_model=ModelCard, responses=_documented(400, 401, 404), summary="A model")
    async def one_model(name: str) -> Any:
        if name not in service.models:
            raise RefusalError(
                404,
                f"the model {name!r} is not served here; allowed are {', '.join(service.models)}",
                param="model",
                code="model_not_found",
            )
        return service.card(name)

    @app.get("/health", response_model=Status, responses=_documented(503), summary="Whether the server works")
    async def health() -> Any:
        return service.status()

    @app.get("/ready", response_model=Status, responses=_documented(503), summary="Whether it takes requests")
    async def ready() -> Any:
        if not service.engine.taking:
            raise _shutting_down()
        return service.status()

    text: dict[int | str, dict[str, Any]] = {
        200: {"description": "Prometheus's format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @app.get("/metrics", response_class=Response, responses={**text, **_documented(401)}, summary="Counters")
    async def metrics() -> Response:
        running, waiting = service.engine.load
        service.engine.metrics.running.set(running)
        service.engine.metrics.waiting.set(waiting)
        return Response(service.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_page(app: FastAPI, extra: str) -> None:
    security = {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "cache-control": "no-cache",
    }

    def add(path: str, content: str, kind: str) -> None:
        async def file() -> Response:
            return Response(content, media_type=kind, headers=security)

        app.get(path, include_in_schema=False)(file)

    for path, (content, kind) in page_files(extra).items():
        add(path, content, kind)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusalError)
    async def refused(_: Request, refusal: RefusalError) -> Response:
        return JSONResponse({"error": refusal.error}, refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        body = get_type_hints(request.scope["endpoint"]).get("body", Sampling)
        return JSONResponse({"error": _validation_refusal(error, body).error}, 400)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        code = str(error.detail).lower().replace(" ", "_")
        refusal = RefusalError(error.status_code, f"{error.detail}; /openapi.json says what there is", code=code)
        return JSONResponse({"error": refusal.error}, error.status_code, dict(error.headers or {}))


def _validation_refusal(error: RequestValidationError, body: type[Sampling]) -> RefusalError:
    """The first thing that is wrong with a body and what is allowed there, without repeating what was sent."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = place[0] if place else None
    if first["type"] == "extra_forbidden":
        message, code = f"{'.'.join(place)} is no parameter of this endpoint; leave it out", "unsupported_parameter"
    elif first["type"] == "json_invalid":
        message, code, param = "the body is not JSON; send one JSON object", "invalid_json", None
    elif first["type"] == "missing":
        message, code = (
            f"{'.'.join(place) or 'the body'} is missing; allowed are {allowed_values(body, param)}",
            "missing",
        )
    elif param in UNSUPPORTED:
        message, code = f"{param} cannot be honoured; leave it out", "unsupported_parameter"
    else:
        message, code = (
            f"{param or 'the body'} is not valid; allowed are {allowed_values(body, param)}",
            "invalid_value",
        )
    return RefusalError(400, message, param=param, code=code)


def _describe(app: FastAPI, config: ServeConfig) -> None:
    """An OpenAPI that is true: no 422, which is never sent, and the key where one is asked for."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = plain()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            if config.api_key is not None:
                schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                schema["security"] = [{"key": []}]
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
