"""The process: models loaded, a port opened, signals heard, work drained."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

import torch
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fsdfm.checkpoint.embedded import embedded_models, find_model, name_of
from fsdfm.generate import LanguageModel, load
from fsdfm.runtime import Precision
from fsdfm.serve.app import build_app
from fsdfm.serve.config import ServeConfig
from fsdfm.serve.guard import log, log_line

__all__ = ["load_models", "run_server", "warm_up"]


def load_models(
    names: Sequence[str] = (),
    *,
    device: str = "auto",
    precision: Precision | Literal["int8"] = "float32",
    threads: int = 0,
) -> dict[str, LanguageModel]:
    """Models by the names they are asked for: an embedded one's own, else its folder's; the embedded ones unless said.

    Nothing of their files is held: a folder that is replaced or spoilt later changes nothing that is served.
    """
    models: dict[str, LanguageModel] = {}
    for each in names or list(embedded_models()):
        folder = find_model(each)
        name = name_of(folder) if folder in embedded_models().values() else folder.resolve().name
        if name in models:
            raise ValueError(f"two models are called {name!r}; rename the folder of one of them")
        models[name] = lm = _load(each, device=device, precision=precision, threads=threads)
        for value in (*lm.checkpoint.model.parameters(), *lm.checkpoint.model.buffers()):
            if value.device.type == "cpu":
                value.data = value.data.clone()  # a weight may be a view of its file
    if not models:
        raise ValueError("this build of fsdfm has no embedded model; name one: fsdfm serve --model FOLDER")
    return models


def _load(name: str, *, device: str, precision: Precision | Literal["int8"], threads: int) -> LanguageModel:
    with _room_for(name):
        return load(name, device=device, precision=precision, threads=threads)


@contextmanager
def _room_for(name: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _no_room(name) from error
    except RuntimeError as error:
        if "allocate" in str(error):
            raise _no_room(name) from error
        raise


def _no_room(name: str) -> ValueError:
    return ValueError(f"there is not enough memory for the model {name}; serve fewer models, or one with int8 weights")


def warm_up(models: Mapping[str, LanguageModel]) -> None:
    """A short text of each model: what is compiled or set up for the first one must not keep the first client waiting.

    A causal head's loop is compiled once per machine (15 to 25 s), in one way for plain draws and another for filtered.
    """
    for name, lm in models.items():
        began = time.monotonic()
        with _room_for(name):
            length = min(16, lm.checkpoint.length)
            lm.generate(length=length, steps=1, seed=0)
            lm.generate(length=length, steps=1, seed=0, top_p=0.9)
        log_line("ready", model=name, seconds=round(time.monotonic() - began, 2))


def run_server(models: dict[str, LanguageModel], config: ServeConfig, *, extra: str = "") -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what is on its way and return. Listens once every model has spoken."""
    _log_to_stderr()
    app = build_app(models, config, extra=extra)
    _listen(config.host, config.port).close()  # a port that is taken is said first
    warm_up(models)
    listening = _listen(config.host, config.port)
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if config.api_key is None and not _is_loopback(host):
        log_line("warning", message="other machines reach this server and no API key is asked for")
    settings = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=20,
        timeout_graceful_shutdown=int(config.drain_seconds) + 1,
        h11_max_incomplete_event_size=65_536,
    )
    server = _Server(settings, app.state.service.engine.refuse_new)
    log_line("serving", address=address, models=list(models), threads=torch.get_num_threads())
    server.run(sockets=[listening])
    log_line("stopped")


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is forgotten when it breaks.

    uvicorn's own keeps the timer of an answered connection that its client resets, and with the timer the connection,
    its request and its buffers, for `timeout_keep_alive` seconds: memory that grows with the resets per second.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, by a farewell or by a reset."""
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()


class _Server(uvicorn.Server):
    """Ends in order, with exit code 0, when it is told to stop; told twice, at once."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]):
        super().__init__(config)
        self._on_stop = on_stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear SIGINT and SIGTERM, and do not raise them again at the end."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._told) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _told(self, _: int, __: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_stop()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --host and --port"
        ) from error
    listening.listen(512)
    return listening


def _is_loopback(host: Any) -> bool:
    return str(host) == "::1" or str(host).startswith("127.")


def _log_to_stderr() -> None:
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
