"""One engine for many texts: their questions go to the network together, step by step.

Every text is a `GenerationRun` of its own, which asks questions (x_t, t, h, rows) and is told posteriors. The engine's
one thread collects the open question of every running text, puts those that fit together into one network call and
gives each text its part of the answer. Texts join and leave between calls, whatever step the others are in.

What fits together: questions of one model whose lengths fall into one bucket (`fsdfm.generate.invariant`). How the
network computes them is made so that a text is bit for bit what it would be alone: on a CPU one after the other,
without padding; elsewhere padded to the end of the bucket, as it would be alone, the padding hidden from attention.

Who is next: the text that has been served least, in positions computed; a text that joins starts from the least served
of the others. A short text therefore passes a long one, and no text waits for ever.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from fsdfm.flow import Posterior, Question
from fsdfm.generate import LanguageModel, Request, SamplerConfig, State
from fsdfm.generate.run import Event, GenerationRun
from fsdfm.serve.metrics import Metrics

__all__ = ["CancelledJobError", "Engine", "EngineStoppedError", "ExpiredJobError", "Job", "QueueFullError"]

CancelReason = Literal["disconnected", "timeout", "shutdown"]


class QueueFullError(Exception):
    """More texts wait than may; `retry_after` seconds from now there should be room."""

    def __init__(self, waiting: int, retry_after: int):
        super().__init__(f"{waiting} texts wait already")
        self.waiting, self.retry_after = waiting, retry_after


class EngineStoppedError(Exception):
    """The engine takes no more work."""


class CancelledJobError(Exception):
    """Nobody wants the text any more."""


class ExpiredJobError(Exception):
    """The text was not there in time."""


@dataclass(eq=False, kw_only=True)
class Job:
    """A text to be made, and who is told of it; both are called in the engine's thread and must return at once.

    on_end     once, at the end: with `run` complete, or with an `error`
    on_state   at every step
    deadline   of `time.monotonic`
    """

    lm: LanguageModel
    request: Request
    config: SamplerConfig
    on_end: Callable[[Job], None]
    on_state: Callable[[Job, State], None] | None = None
    deadline: float = math.inf
    run: GenerationRun | None = None
    error: Exception | None = None
    cancelled: bool = False
    submitted: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Seat:
    """A running text: its open question, and how much it has been served."""

    job: Job
    events: Generator[Event, Posterior | None, None]
    served: float
    began: float
    question: Question | None = None

    def key(self) -> tuple[int, Hashable]:
        """What fits together has the same; who asks a denoiser of its own asks alone."""
        assert self.question is not None
        if self.question.denoiser is not None:
            return id(self.question.denoiser), None
        return id(self.job.lm.network), self.job.lm.network.group(self.question)

    def serve(self) -> None:
        """Count a call, in positions computed."""
        assert self.question is not None
        self.served += self.question.x_t.shape[1]

    def advance(self, posterior: Posterior | None) -> bool:
        """On to the next question; whether there is one."""
        try:
            event = self.events.send(posterior)
            while not isinstance(event, Question):
                if self.job.on_state is not None and self.job.run is not None:
                    self.job.on_state(self.job, self.job.run.state(event, 0))
                event = self.events.send(None)
        except StopIteration:
            return False
        self.question = event
        return True


class Engine:
    """Makes texts, many at a time, in one thread.

    running   texts on their way at a time
    waiting   texts that may wait; one more is refused
    batch     questions of one network call
    threads   CPU threads of the network; 0: as torch has them
    """

    def __init__(
        self,
        *,
        running: int = 16,
        waiting: int = 256,
        batch: int = 8,
        threads: int = 0,
        metrics: Metrics | None = None,
    ):
        self.most_running, self.most_waiting, self.batch, self.threads = running, waiting, batch, threads
        self.metrics = metrics or Metrics()
        self._waiting: deque[Job] = deque()
        self._seats: list[_Seat] = []
        self._wake = threading.Condition()
        self._stop, self._taking = False, True
        self._seconds = 0.5  # of a text, a running mean
        self._thread = threading.Thread(target=self._work, name="fsdfm-engine", daemon=True)

    # --- for callers, from any thread ---------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Begin to work."""
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether the thread works."""
        return self._thread.is_alive()

    @property
    def taking(self) -> bool:
        """Whether new work is taken."""
        return self._taking

    @property
    def load(self) -> tuple[int, int]:
        """Texts running and waiting."""
        with self._wake:
            return len(self._seats), len(self._waiting)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of these jobs, or none."""
        with self._wake:
            if not self._taking:
                raise EngineStoppedError("the server is shutting down")
            waiting = len(self._waiting)
            if len(self._seats) + waiting + len(jobs) > self.most_running + self.most_waiting:
                raise QueueFullError(waiting, self._retry_after(waiting))
            self._waiting.extend(jobs)
            self._wake.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Drop jobs: those that wait now, those that run before their next step."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def stop(self, seconds: float = 0.0) -> None:
        """Take nothing new, finish what is there for so many seconds, cancel the rest, end the thread."""
        with self._wake:
            self._taking = False
        end = time.monotonic() + seconds
        while any(self.load) and time.monotonic() < end and self.alive:
            time.sleep(0.02)
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout=60)

    def refuse_new(self) -> None:
        """Take nothing new from now on."""
        with self._wake:
            self._taking = False

    def _retry_after(self, waiting: int) -> int:
        return min(60, max(1, math.ceil(waiting * self._seconds)))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)  # of this thread: OpenMP counts for each by itself
        while self._await_work():
            try:
                self._sweep()
                self._admit()
                self._take_turn()
            except Exception as error:  # a fault of ours must not leave anybody waiting
                for seat in list(self._seats):
                    self._leave(seat, error)
        for seat in list(self._seats):
            self._leave(seat, CancelledJobError("the server is shutting down"))
        with self._wake:
            left, self._waiting = list(self._waiting), deque()
        for job in left:
            self._end(job, CancelledJobError("the server is shutting down"))

    def _await_work(self) -> bool:
        with self._wake:
            while not self._stop and not self._seats and not self._waiting:
                self._wake.wait()
            return not self._stop

    def _sweep(self) -> None:
        """Away with what nobody wants any more."""
        now = time.monotonic()
        with self._wake:
            gone = [job for job in self._waiting if job.cancelled or job.deadline < now]
            for job in gone:
                self._waiting.remove(job)
        for job in gone:
            self._end(job, _reason(job))
        for seat in list(self._seats):
            if seat.job.cancelled or seat.job.deadline < now:
                self._leave(seat, _reason(seat.job))

    def _admit(self) -> None:
        while len(self._seats) < self.most_running:
            with self._wake:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self.metrics.waiting.set(len(self._waiting))
            now = time.monotonic()
            self.metrics.queue_seconds.observe(now - job.submitted)
            least = min((seat.served for seat in self._seats), default=0.0)
            try:
                job.run = GenerationRun(job.lm.checkpoint, job.lm.network, [job.request], config=job.config)
            except Exception as error:
                self._end(job, error)
                continue
            seat = _Seat(job, job.run.events(), least, now)
            with self._wake:
                self._seats.append(seat)
            self._advance(seat, None)

    def _take_turn(self) -> None:
        """One network call for the text served least and those that fit to it."""
        if not self._seats:
            return
        ordered = sorted(self._seats, key=lambda seat: seat.served)
        key = ordered[0].key()
        group = [seat for seat in ordered if seat.key() == key][: self.batch]
        try:
            began = time.perf_counter()
            answers = _ask(group)
            self.metrics.call_seconds.observe(time.perf_counter() - began)
        except Exception as error:
            if len(group) == 1:
                self._leave(group[0], error)
            for seat in group if len(group) > 1 else ():
                self._answer_alone(seat)
            return
        self.metrics.calls.inc()
        self.metrics.batch_size.observe(len(group))
        for seat, posterior in zip(group, answers, strict=True):
            seat.serve()
            began = time.perf_counter()
            self._advance(seat, posterior)
            self.metrics.step_seconds.observe(time.perf_counter() - began)

    def _answer_alone(self, seat: _Seat) -> None:
        """After a call for several failed: whose fault was it?"""
        try:
            (posterior,) = _ask([seat])
        except Exception as error:
            self._leave(seat, error)
            return
        seat.serve()
        self._advance(seat, posterior)

    def _advance(self, seat: _Seat, posterior: Posterior | None) -> None:
        try:
            with torch.no_grad():
                goes_on = seat.advance(posterior)
        except Exception as error:
            self._leave(seat, error)
            return
        if not goes_on:
            self._leave(seat, None)

    def _leave(self, seat: _Seat, error: Exception | None) -> None:
        with self._wake:
            self._seats.remove(seat)
        with suppress(Exception):
            seat.events.close()
        if error is None:
            self._seconds += 0.1 * ((time.monotonic() - seat.began) / max(1, len(self._seats) + 1) - self._seconds)
        self._end(seat.job, error)

    def _end(self, job: Job, error: Exception | None) -> None:
        job.error = error
        self.metrics.running.set(len(self._seats))
        if isinstance(error, CancelledJobError | ExpiredJobError):
            self.metrics.cancelled.labels("timeout" if isinstance(error, ExpiredJobError) else "cancelled").inc()
        with suppress(Exception):
            job.on_end(job)


def _reason(job: Job) -> Exception:
    return (
        CancelledJobError("the request was cancelled")
        if job.cancelled
        else ExpiredJobError("the text was not ready in time")
    )


def _ask(group: Sequence[_Seat]) -> list[Posterior]:
    """What the network says to the questions of a group, in one call."""
    questions = [seat.question for seat in group if seat.question is not None]
    alone = questions[0].denoiser
    if alone is not None:
        return [alone.posterior(each.x_t, each.t, each.h, rows=each.rows) for each in questions]
    return group[0].job.lm.network.posteriors(questions)
