"""A server of tiny models on loopback, for tests: in a thread of this process."""

import http.client
import json
import threading
import time
from contextlib import contextmanager

import uvicorn

from fsdfm.generate import LanguageModel
from fsdfm.serve.app import build_app
from fsdfm.serve.config import ServeConfig
from fsdfm.serve.server import Connection, _listen
from tiny_models import random_bundle


def tiny_models():
    return {
        "tiny": LanguageModel(random_bundle(budgets=(1, 2, 4, 8))),
        "chain": LanguageModel(random_bundle(transition_rank=2)),
        "mask": LanguageModel(random_bundle(source="mask")),
    }


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, dict(response.getheaders()), response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        lines = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class Live:
    """Where a server is, and how to ask it."""

    def __init__(self, port, app, models):
        self.port, self.app, self.models = port, app, models
        self.engine = app.state.service.engine
        self.url = f"http://127.0.0.1:{port}"

    def connect(self, timeout=60):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method, path, body=None, **headers):
        connection = self.connect()
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        sent = {
            "content-type": "application/json",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        connection.request(method, path, content, sent)
        answer = Answer(connection.getresponse())
        connection.close()
        return answer

    def post(self, path, body=None, **headers):
        return self.ask("POST", path, body, **headers)

    def get(self, path, **headers):
        return self.ask("GET", path, **headers)

    def idle(self, seconds=30):
        """Wait until nothing runs or waits."""
        end = time.monotonic() + seconds
        while any(self.engine.load):
            assert time.monotonic() < end, "the engine is still at work"
            time.sleep(0.01)


@contextmanager
def serving(models=None, port=0, **config):
    models = models or tiny_models()
    app = build_app(models, ServeConfig(port=port, threads=1, **config))
    listening = _listen("127.0.0.1", port)
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, log_config=None, access_log=False, lifespan="on", timeout_keep_alive=20)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
        assert thread.is_alive()
    try:
        yield Live(listening.getsockname()[1], app, models)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
