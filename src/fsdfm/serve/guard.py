"""What stands before every request: its number, its key, its size, its log line; and the envelope of every error."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fsdfm.serve.config import ServeConfig
from fsdfm.serve.metrics import Metrics
from fsdfm.serve.work import RefusalError

__all__ = ["Guard", "log", "log_line"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("fsdfm.serve")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN = ("/", "/page.js", "/page.css", "/health", "/ready", "/openapi.json")
_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))


def log_line(event: str, **facts: Any) -> None:
    """One JSON object per line, in ASCII: nothing in it can act on a terminal."""
    log.info(json.dumps({"time": round(time.time(), 3), "event": event, **facts}, default=str))


class Guard:
    """Every request passes here, and every failure comes back as an answer."""

    def __init__(self, app: Application, *, config: ServeConfig, metrics: Metrics):
        self.app, self.config, self.metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Number, check and log a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, told = time.monotonic(), _Told(send, _request_id(scope))
        scope["fsdfm"] = {"request_id": told.request_id}
        if scope["method"] == "HEAD":  # what GET says, without its body: uvicorn leaves that out
            scope = {**scope, "method": "GET"}
        try:
            self._authorise(scope)
            await self.app(scope, await self._buffered(scope, receive), told)
        except RefusalError as refusal:
            await told.refuse(refusal)
        except asyncio.CancelledError:
            told.status = told.status or 499
            raise
        except ConnectionError:
            told.status = told.status or 499
        except Exception as error:
            self.metrics.errors.inc()
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = [f"{frame.filename.rpartition('fsdfm/')[2]}:{frame.lineno}" for frame in frames]
            log_line("fault", **scope["fsdfm"], error=type(error).__name__, where=where)
            await told.refuse(internal_error(told.request_id))
        finally:
            self._account(scope, told.status or 499, time.monotonic() - began)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        path = getattr(scope.get("route"), "path", "other")
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.request_seconds.labels(path).observe(seconds)
        facts = {"method": scope["method"], "path": path, "status": status, "ms": round(1000 * seconds, 1)}
        log_line("request", **scope["fsdfm"], **facts)

    def _authorise(self, scope: Scope) -> None:
        if self.config.api_key is None or scope["path"] in _OPEN:
            return
        scheme, _, key = _header(scope, b"authorization").decode("latin-1").partition(" ")
        known = hmac.compare_digest(key.strip().encode(), self.config.api_key.encode())
        if scheme.lower() != "bearer" or not known:
            raise RefusalError(
                401,
                "the API key is missing or wrong; send it as the header Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _buffered(self, scope: Scope, receive: Receive) -> Receive:
        """The body, read whole within its limits of size and time; then what the client does further."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        most = self.config.max_body
        length = _header(scope, b"content-length")
        if length and not length.isdigit():
            raise self._too_large()
        try:
            async with asyncio.timeout(self.config.body_seconds):
                if length and int(length) > most:
                    await _discard(receive, 4 * most)
                    raise self._too_large()
                body = await self._read(receive, most)
        except TimeoutError as error:
            raise RefusalError(
                408,
                f"the request did not arrive within {self.config.body_seconds:g} seconds",
                code="request_timeout",
                headers={"connection": "close"},
            ) from error
        first = True

        async def replay() -> Message:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}
            return await receive()

        return replay

    async def _read(self, receive: Receive, most: int) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client left before its request was complete")
            body += message.get("body", b"")
            if len(body) > most:
                if message.get("more_body", False):
                    await _discard(receive, 4 * most)
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> RefusalError:
        message = f"the request is larger than the {self.config.max_body} bytes that are allowed; send less"
        return RefusalError(413, message, code="request_too_large", headers={"connection": "close"})


class _Told:
    """What a client is told: remembers the status, adds the request's number."""

    def __init__(self, send: Send, request_id: str):
        self._send, self.request_id, self.status = send, request_id, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = ((b"x-request-id", self.request_id.encode()), *_HEADERS)
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)

    async def refuse(self, refusal: RefusalError) -> None:
        """Answer with an error, unless an answer has begun."""
        if self.status:
            return
        body = json.dumps({"error": refusal.error}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": refusal.status, "headers": pairs})
        await self({"type": "http.response.body", "body": body})


async def _discard(receive: Receive, most: int) -> None:
    """Read on for a while without keeping it: a client that still sends would not see why it is refused."""
    read = 0
    while read < most:
        message = await receive()
        read += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def internal_error(request_id: str) -> RefusalError:
    """What is said of a fault of ours: nothing of its inside."""
    return RefusalError(
        500,
        f"the server failed at this request; its log knows more of request {request_id}",
        kind="server_error",
        code="internal_error",
    )


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _request_id(scope: Scope) -> str:
    """The client's own, if it is harmless, else a new one."""
    own = _header(scope, b"x-request-id").decode("latin-1")
    return own if _ID.fullmatch(own) else secrets.token_hex(8)
