"""Between the engine's thread and a client: a mailbox for what happens, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from fsdfm.generate import State
from fsdfm.serve.engine import Job

__all__ = ["EventStream", "Mailbox", "event", "until_disconnect"]

_MOST_STATES = 64

Letter = tuple[Job, State | None]
"""A state of a job, or its end."""


class Mailbox:
    """What the engine tells a request. The engine never waits: of states that nobody fetches, old ones are dropped.

    A job knows its mailbox and a letter its job: `close` opens this circle, so that a text nobody fetches is gone with
    its request and does not wait for the garbage collector, which counts objects and not the tensors they hold.
    """

    def __init__(self, most: int = _MOST_STATES) -> None:
        self._loop, self._most = asyncio.get_running_loop(), most
        self._letters: deque[Letter] = deque()
        self._filled = asyncio.Event()
        self._open = True

    def close(self) -> None:
        """Nobody fetches any more: forget what is here, take nothing new; called in the loop's thread."""
        self._open = False
        self._letters.clear()

    def state(self, job: Job, state: State) -> None:
        """A step was taken; called in the engine's thread."""
        self._tell((job, state))

    def end(self, job: Job) -> None:
        """A job is over; called in the engine's thread."""
        self._tell((job, None))

    async def next(self) -> Letter:
        """The next letter."""
        while not self._letters:
            self._filled.clear()
            await self._filled.wait()
        return self._letters.popleft()

    def _tell(self, letter: Letter) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is there
            self._loop.call_soon_threadsafe(self._put, letter)

    def _put(self, letter: Letter) -> None:
        if not self._open:
            return
        if sum(state is not None for _, state in self._letters) >= self._most and letter[1] is not None:
            oldest = next(place for place, (_, state) in enumerate(self._letters) if state is not None)
            del self._letters[oldest]
        self._letters.append(letter)
        self._filled.set()


def event(content: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return f"data: {content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)}\n\n".encode()


async def until_disconnect(receive: Callable[[], Any]) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; ends when the client leaves or takes nothing for `seconds`, and then tells `on_leave`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, seconds: float, on_leave: Callable[[], None]):
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events, self.seconds, self.on_leave = events, seconds, on_leave

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Send until the end or until nobody reads."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        gone = asyncio.create_task(until_disconnect(receive))
        sending = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except TimeoutError:
            scope["fsdfm"]["left"] = "took nothing"
        finally:
            for task in (gone, sending):
                task.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
            self.on_leave()

    async def _send_all(self, send: Any) -> None:
        async for content in self.events:
            async with asyncio.timeout(self.seconds):
                await send({"type": "http.response.body", "body": content, "more_body": True})
        async with asyncio.timeout(self.seconds):
            await send({"type": "http.response.body", "body": b"", "more_body": False})
