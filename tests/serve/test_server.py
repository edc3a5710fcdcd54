"""The process: signals, kill -9, folders replaced, spoilt weights, bad options."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import uvicorn

from fsdfm.checkpoint import save_model
from fsdfm.serve.config import ServeConfig, read_api_key
from fsdfm.serve.server import _Server, load_models, warm_up
from tiny_models import random_bundle


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "tiny", random_bundle())
    return tmp_path / "tiny"


class Process:
    """`fsdfm serve` as a process of its own."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "fsdfm", "serve", "--port", "0", "--threads", "1", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else line)
            if '"serving"' in line:
                self.url = self.lines[-1]["address"]
                break
        self._reading = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self._reading.start()

    def end(self, number):
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reading.join()
        self.process.stderr.close()
        return code

    def post(self, body):
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]


BODY = {"prompt": "abc", "max_tokens": 12, "steps": 2, "seed": 1}


@pytest.mark.slow
def test_sigterm_finishes_what_is_on_its_way_and_ends_with_0(folder):
    server, texts = Process("--model", str(folder)), []
    long = {"max_tokens": 30, "steps": 300, "seed": 1}
    asking = threading.Thread(target=lambda: texts.append(server.post(long)))
    asking.start()
    time.sleep(0.5)
    code = server.end(signal.SIGTERM)
    asking.join(60)
    assert code == 0
    assert len(texts) == 1


@pytest.mark.slow
def test_a_killed_server_starts_again_and_says_the_same(folder):
    first = Process("--model", str(folder))
    text = first.post(BODY)
    events = [line["event"] for line in first.lines if isinstance(line, dict)]
    assert events.index("ready") < events.index("serving")
    assert first.end(signal.SIGKILL) != 0
    again = Process("--model", str(folder))
    assert again.post(BODY) == text
    assert again.end(signal.SIGTERM) == 0


def test_a_folder_spoilt_while_serving_changes_nothing(folder):
    models = load_models([str(folder)])
    before = models["tiny"].generate("abc", steps=2).text
    for file in folder.iterdir():
        with file.open("r+b") as content:  # in place, as no careful writer would
            content.truncate(0)
    assert models["tiny"].generate("abc", steps=2).text == before


def test_spoilt_weights_are_refused_before_anybody_is_served(folder):
    bundle = random_bundle()
    with torch.no_grad():
        next(iter(bundle.model.parameters())).fill_(float("nan"))
    save_model(folder.parent / "spoilt", bundle)
    with pytest.raises(ValueError, match="NaN"):
        load_models([str(folder.parent / "spoilt")])


def test_a_model_too_large_for_the_memory_is_said_to_be(folder, monkeypatch):
    def load(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes")

    monkeypatch.setattr("fsdfm.serve.server.load", load)
    with pytest.raises(ValueError, match="not enough memory"):
        load_models([str(folder)])


def test_the_first_client_finds_everything_ready(folder, monkeypatch, caplog):
    """What is compiled for a first text is compiled before anybody can ask."""
    models, told = load_models([str(folder)]), []
    monkeypatch.setattr(models["tiny"], "generate", lambda **options: told.append(options))
    with caplog.at_level("INFO", logger="fsdfm.serve"):
        warm_up(models)
    assert [options.get("top_p") for options in told] == [None, 0.9]  # plain draws, and filtered ones
    assert '"ready", "model": "tiny"' in caplog.text

    def fails(**_):
        raise MemoryError

    monkeypatch.setattr(models["tiny"], "generate", fails)
    with pytest.raises(ValueError, match="not enough memory for the model tiny"):
        warm_up(models)


def test_two_models_of_one_name_are_refused(folder, tmp_path):
    save_model(tmp_path / "other" / "tiny", random_bundle())
    with pytest.raises(ValueError, match="two models"):
        load_models([str(folder), str(tmp_path / "other" / "tiny")])


@pytest.mark.slow
def test_a_port_in_use_is_one_sentence(folder):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "fsdfm", "serve", "--model", str(folder), "--port"]
        run = subprocess.run([*command, str(taken.getsockname()[1])], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: cannot listen on 127.0.0.1 port")
    assert run.stderr.count("\n") == 1


def test_a_key_comes_from_a_file_or_the_environment(tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef\n")
    assert read_api_key(tmp_path / "key", {}) == "0123456789abcdef"
    assert read_api_key(None, {"FSDFM_API_KEY": "fedcba9876543210"}) == "fedcba9876543210"
    assert read_api_key(None, {}) is None
    with pytest.raises(ValueError, match="characters; allowed"):
        read_api_key(None, {"FSDFM_API_KEY": "short"})
    with pytest.raises(ValueError, match="cannot read"):
        read_api_key(tmp_path / "none", {})


@pytest.mark.parametrize(
    "wrong", [{"port": 70_000}, {"running": 0}, {"waiting": -1}, {"request_seconds": 0}, {"cors": ("example.org",)}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"allowed|like"):
        ServeConfig(**wrong)


def test_who_hears_signals_afterwards_is_who_did_before():
    server = _Server(uvicorn.Config(lambda: None, log_config=None), lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with server.capture_signals():
        assert signal.getsignal(signal.SIGTERM) == server._told
    assert {number: signal.getsignal(number) for number in before} == before
