"""The server under load: throughput against one text at a time, latency of a lone request, and a crowd that misbehaves.

The crowd: more clients than the engine has room for ask for texts of mixed lengths and steps; one in ten reads slowly,
one in ten leaves before the answer, one in twenty sends nonsense or too much. Every request is counted once; what is
answered must be the text that the library makes of the same request.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fsdfm.generate import LanguageModel, load
from fsdfm.runtime import versions

__all__ = ["ServeBench", "bench_serve"]

_PROMPTS = ("Once upon a time", "Lily and Ben found a map", "The little dog was", "One day, a bird")
_DOCUMENTED = {200, 400, 404, 408, 413, 429, 503, 504}


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """What is measured.

    model     the model that is served
    seconds   how long the crowd asks
    clients   how many ask at a time; None: four times what the engine has on its way
    rounds    interleaved rounds of the lone request and of the throughput
    """

    model: str = "fewstep"
    seconds: float = 60.0
    clients: int | None = None
    running: int = 4
    waiting: int = 8
    rounds: int = 5
    together: int = 8
    steps: int = 4
    length: int = 128
    threads: int = 1


@dataclass
class CrowdTally:
    """What became of requests."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def bench_serve(bench: ServeBench, on_progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Start a server, measure, stop it: ratios, percentiles, what became of every request."""
    lm = load(bench.model, threads=bench.threads)
    with _server(bench) as (port, process):
        on_progress("a lone request, and texts together against one at a time")
        lone = _measure_lone(bench, lm, port)
        on_progress(f"a crowd, for {bench.seconds:g} seconds")
        crowd = _measure_crowd(bench, lm, port=port, process=process)
    return {"setting": bench.__dict__, **lone, **crowd, "versions": versions(), "load_average": os.getloadavg()[0]}


@contextmanager
def _server(bench: ServeBench) -> Iterator[tuple[int, int]]:
    options = {"model": bench.model, "threads": bench.threads, "running": bench.running, "waiting": bench.waiting}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "fsdfm", "serve", "--port", "0", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    reading: threading.Thread | None = None
    try:
        line = next((line for line in process.stderr if '"serving"' in line), None)
        if line is None:
            raise ValueError("the server did not start; run `fsdfm serve` to see why")
        stderr = process.stderr
        reading = threading.Thread(target=lambda: [None for _ in stderr], daemon=True)  # nobody else reads it
        reading.start()
        yield int(json.loads(line)["address"].rpartition(":")[2]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(90)
        if reading is not None:
            reading.join(10)
        process.stderr.close()
    if code != 0:
        raise RuntimeError(f"the server ended with code {code}")


def _post(port: int, body: dict[str, Any] | bytes, *, timeout: float = 300) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


# --- alone and together -----------------------------------------------------------------------------------------------


def _measure_lone(bench: ServeBench, lm: LanguageModel, port: int) -> dict[str, Any]:
    """Interleaved rounds of the library alone, the server alone, and the server with several requests at once.

    What the server adds to a text is the difference of the client's time and the engine's own; it is compared with the
    library's time, because on a busy machine two processes are never given the same share of the cores.
    """
    alone: list[float] = []
    served: list[float] = []
    inside: list[float] = []
    together: list[float] = []
    for turn in range(bench.rounds):
        body = {"max_tokens": bench.length, "steps": bench.steps, "seed": turn}
        began = time.perf_counter()
        lm.generate(length=bench.length + 1, steps=bench.steps, seed=turn)
        alone.append(time.perf_counter() - began)
        began = time.perf_counter()
        _, answer = _post(port, body)
        served.append(time.perf_counter() - began)
        inside.append(answer["choices"][0]["fsdfm"]["seconds"])
        began = time.perf_counter()
        threads = [threading.Thread(target=_post, args=(port, {**body, "seed": n})) for n in range(bench.together)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together.append((time.perf_counter() - began) / bench.together)
    median = statistics.median
    added = median([whole - part for whole, part in zip(served, inside, strict=True)])
    return {
        "library_seconds": median(alone),
        "lone_seconds": median(served),
        "lone_over_library": median([b / a for a, b in zip(alone, served, strict=True)]),
        "added_seconds": added,
        "added_over_library": 1 + added / median(alone),
        "together_seconds_per_text": median(together),
        "throughput_ratio": median([b / a for a, b in zip(together, served, strict=True)]),
    }


# --- a crowd ----------------------------------------------------------------------------------------------------------


def _measure_crowd(bench: ServeBench, lm: LanguageModel, *, port: int, process: int) -> dict[str, Any]:
    tally, end = CrowdTally(), time.monotonic() + bench.seconds
    count = bench.clients or 4 * (bench.running + bench.waiting)
    memory = [_resident(process)]
    threads = [
        threading.Thread(target=_client, args=(number, port), kwargs={"tally": tally, "end": end})
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(min(1.0, bench.seconds / 20))
        memory.append(_resident(process))
    asking = sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()  # what is on its way is waited for: the end of the time cuts nothing
    left = _drain(port)
    memory.append(_resident(process))
    _check_texts(lm, tally)
    ordered = sorted(tally.seconds)

    def percentile(share: float) -> float | None:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    return {
        "clients": count,
        "sent": dict(tally.sent),
        "ended": dict(tally.ended),
        "statuses": {str(status): number for status, number in sorted(tally.statuses.items())},
        "undocumented": sum(number for status, number in tally.statuses.items() if status not in _DOCUMENTED),
        "lost": sum(tally.sent.values()) - sum(tally.ended.values()),
        "broken": sum(number for outcome, number in tally.ended.items() if outcome.endswith(("broken", "no end"))),
        "waited_for_at_the_end": asking,
        "left_in_the_engine": left,
        "wrong_texts": len(tally.wrong),
        "checked_texts": len(tally.texts),
        "texts_per_second": len(ordered) / bench.seconds,
        "p50": percentile(0.5),
        "p95": percentile(0.95),
        "p99": percentile(0.99),
        "memory_mib": {
            "first": memory[0],
            "most": max(memory),
            "last": memory[-1],
            "most_by_tenth": _most_by_part(memory, 10),
        },
    }


def _drain(port: int, seconds: float = 150) -> int:
    """Texts that the engine still has when nobody asks any more; it is given time to let go of those who left."""
    end = time.monotonic() + seconds
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/health")
            status = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        left = int(status["running"] + status["waiting"])
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def _most_by_part(values: list[float], parts: int) -> list[float]:
    """The highest of every part of a series: what levels off has equal ones at the end."""
    edges = [len(values) * part // parts for part in range(parts + 1)]
    return [max(values[begin:end]) for begin, end in pairwise(edges) if end > begin]


def _client(number: int, port: int, *, tally: CrowdTally, end: float) -> None:
    dice = random.Random(number)
    while time.monotonic() < end:
        kind = dice.choices(["plain", "stream", "slow", "leaving", "nonsense"], [60, 15, 10, 10, 5])[0]
        body = {
            "prompt": dice.choice(_PROMPTS),
            "max_tokens": dice.choice([16, 32, 64, 128]),
            "steps": dice.choice([1, 2, 4, 8]),
            "seed": dice.randrange(4),
        }
        with tally.lock:
            tally.sent[kind] += 1
        outcome = "broken"
        with suppress(OSError, http.client.HTTPException, ValueError):
            outcome = _BEHAVIOURS[kind](port, body, tally=tally, dice=dice)
        with tally.lock:
            tally.ended[f"{kind}: {outcome}"] += 1


def _plain(port: int, body: dict[str, Any], *, tally: CrowdTally, dice: random.Random) -> str:
    began = time.perf_counter()
    status, answer = _post(port, body)
    with tally.lock:
        tally.statuses[status] += 1
        if status == 200:
            tally.seconds.append(time.perf_counter() - began)
            _remember(tally, body, answer["choices"][0]["text"])
    if status == 429:
        time.sleep(dice.uniform(0.2, 1.0))  # not as long as it was told to: a crowd is impatient
    return str(status)


def _remember(tally: CrowdTally, body: dict[str, Any], text: str) -> None:
    """The same request must always be answered with the same text."""
    key = json.dumps(body, sort_keys=True)
    if tally.texts.setdefault(key, text) != text:
        tally.wrong.append(key)


def _stream(port: int, body: dict[str, Any], *, tally: CrowdTally, dice: random.Random, pause: float = 0.0) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    asked = {**body, "stream": True, "diffusing": True}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    answer = connection.getresponse()
    with tally.lock:
        tally.statuses[answer.status] += 1
    lines = []
    while line := answer.readline():
        lines.append(line)
        time.sleep(pause)
    connection.close()
    if answer.status != 200:
        time.sleep(dice.uniform(0.2, 1.0) if answer.status == 429 else 0)
        return str(answer.status)
    if b"data: [DONE]\n" not in lines:
        return _last_words(lines)
    last = json.loads(lines[-4].removeprefix(b"data: "))
    with tally.lock:
        _remember(tally, body, last["choices"][0]["text"])
    return "200"


def _last_words(lines: list[bytes]) -> str:
    """How a stream ended that had begun: with an error, as it is documented (a time-out, say), or with nothing."""
    told = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    error = json.loads(told[-1]).get("error") if told else None
    return f"200, then {error['code']}" if error else "no end"


def _slow(port: int, body: dict[str, Any], *, tally: CrowdTally, dice: random.Random) -> str:
    return _stream(port, body, tally=tally, dice=dice, pause=0.2)


def _leaving(port: int, body: dict[str, Any], *, dice: random.Random, **_: CrowdTally) -> str:
    content = json.dumps({**body, "stream": dice.random() < 0.5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
        time.sleep(dice.uniform(0, 0.5))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "left"


def _nonsense(port: int, body: dict[str, Any], *, tally: CrowdTally, dice: random.Random) -> str:
    wrong = [b"{", b"x" * (2**20 + 1), b"[]", json.dumps({**body, "steps": -1}).encode()]
    status, answer = _post(port, dice.choice(wrong))
    with tally.lock:
        tally.statuses[status] += 1
    return f"{status}" if "error" in answer else "no envelope"


_BEHAVIOURS: dict[str, Callable[..., str]] = {
    "plain": _plain,
    "stream": _stream,
    "slow": _slow,
    "leaving": _leaving,
    "nonsense": _nonsense,
}


def _check_texts(lm: LanguageModel, tally: CrowdTally, most: int = 12) -> None:
    """Some of the texts made under load against the library alone."""
    for key in sorted(tally.texts)[:: max(1, len(tally.texts) // most)]:
        body = json.loads(key)
        given = sum(lm.encoder.continuation(body["prompt"], None).frozen)
        length = given + body["max_tokens"]
        made = lm.generate(body["prompt"], length=length, steps=body["steps"], seed=body["seed"])
        written = "".join(piece for piece, fixed in zip(made.pieces, made.given, strict=True) if not fixed)
        if written != tally.texts[key]:
            tally.wrong.append(key)


def _resident(process: int) -> float:
    """Resident memory of a process in MiB; 0 where the system does not say."""
    with suppress(OSError), open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    return 0.0
