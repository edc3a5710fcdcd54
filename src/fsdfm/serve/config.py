"""How the server is set up: where it listens, who may ask, how much."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdfm.files import read_text

__all__ = ["ServeConfig", "read_api_key"]

KEY_VARIABLE = "FSDFM_API_KEY"
_SHORTEST_KEY = 16


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Limits and habits of a server.

    host, port       where it listens; only this machine reaches 127.0.0.1
    api_key          what a client must send as `Authorization: Bearer KEY`; None: nothing
    cors             origins of other pages that may ask; none unless named
    max_canvas       tokens of a text, what is given included
    running, waiting, batch   texts on their way, texts that may wait, texts of a network call
    request_seconds  after which a text is given up
    body_seconds     for a client to send its request, and to take a piece of the answer
    drain_seconds    for what is on its way when the server is told to stop
    threads          CPU threads of the engine; 0: as many as torch takes
    log_prompts      whether logs hold the texts that are asked about
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    max_body: int = 2**20
    max_canvas: int = 1024
    running: int = 16
    waiting: int = 256
    batch: int = 8
    request_seconds: float = 120.0
    body_seconds: float = 20.0
    drain_seconds: float = 30.0
    threads: int = 0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; allowed are 0 (any free one) .. 65535")
        for name in ("max_body", "max_canvas", "running", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are whole numbers >= 1")
        for name in ("waiting", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are whole numbers >= 0")
        for name in ("request_seconds", "body_seconds", "drain_seconds"):
            if not 0 < getattr(self, name) < 10**6:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are 0 < seconds < 1000000")
        for origin in self.cors:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ValueError(f"the origin {origin!r} is none; write it like https://example.org")


def read_api_key(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in a file, else that of the environment's FSDFM_API_KEY, else None; too short a one is an error."""
    where = f"the variable {KEY_VARIABLE}" if file is None else str(file)
    if file is not None:
        try:
            key = read_text(file, 4096).strip()
        except OSError as error:
            raise ValueError(f"cannot read the API key: {error}; name a file that holds it") from error
    elif KEY_VARIABLE in environment:
        key = environment[KEY_VARIABLE].strip()
    else:
        return None
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"the API key in {where} has {len(key)} characters; allowed are {_SHORTEST_KEY} and more, printable ASCII "
            "without spaces: `openssl rand -hex 24` makes one"
        )
    return key
