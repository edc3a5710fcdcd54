"""What bodies become and how texts are shown; see tests/pinned.py."""

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fastapi.testclient import TestClient
from pydantic import ValidationError

from fsdfm.generate import LanguageModel
from fsdfm.serve import server as server_module
from fsdfm.serve.app import build_app
from fsdfm.serve.config import ServeConfig
from fsdfm.serve.schemas import CompletionBody, FimBody, InfillBody, RepairBody
from fsdfm.serve.server import run_server, warm_up
from fsdfm.serve.work import RefusalError, build_work
from pinned import Cases, chosen, odd, said
from tiny_models import known_bundle, random_bundle, wants

cases = Cases("serve")
MODELS = {
    "tiny": LanguageModel(random_bundle(length=16, bos_id=256, budgets=(1, 2))),
    "mask": LanguageModel(random_bundle(source="mask", length=16)),
    "sure": LanguageModel(known_bundle(wants(65, 66, 67, 68, 256), length=16)),
}


def asked(kind, canvas: int = 24, /, **body) -> object:
    """The work of a body, its answers and its steps; or how it is refused."""
    try:
        work = build_work(kind.model_validate({"seed": 7, "steps": 2, **body}), MODELS, max_canvas=canvas)
    except RefusalError as refusal:
        return [refusal.status, refusal.error, refusal.headers]
    except ValidationError as error:
        return [error.errors()[0]["type"], list(map(str, error.errors()[0]["loc"]))]
    made = work.lm.run(work.requests, keep_states=True, **{"seed": work.config.seed, "steps": work.config.steps})
    choices = [work.choice(index, each) for index, each in enumerate(made)]
    for choice in choices:
        choice["fsdfm"]["seconds"] = 0.0
    states = made[0].states
    steps = [work.step_choice(0, state, before) for state, before in zip(states, (None, *states[:-1]), strict=True)]
    head = {**work.head(), "id": work.id[:5], "created": 0}
    flags = [work.shows, work.stop, work.stream, work.usage, work.diffusing, work.details, work.asked]
    return [
        head,
        flags,
        work.prompt_tokens,
        choices,
        steps,
        work.usage_of(made),
        work.config.to_json(),
        [r.frozen for r in work.requests],
    ]


@cases
def completions() -> object:
    found: list[object] = []
    for body in (
        {},
        {"prompt": "ab", "max_tokens": 6},
        {"prompt": ["ab", "c"], "n": 2, "echo": True, "details": True},
        {"prompt": "ab", "suffix": "yz", "echo": True},
        {"prompt": "", "model": "mask"},
        {"prompt": "x", "model": "sure", "max_tokens": 9},
        {"prompt": "x", "model": "sure", "max_tokens": 9, "stop": "C"},
        {"prompt": "xC", "model": "sure", "max_tokens": 9, "stop": ["D", "BC"], "echo": True},
        {"prompt": "xA", "model": "sure", "max_tokens": 9, "stop": "A", "echo": True},
        {"prompt": "a[[3]]b[[2]]", "gaps": True},
        {"prompt": "a[[3]]b", "gaps": True, "suffix": "x"},
        {"prompt": "a", "start_from": "some draft"},
        {"prompt": "a", "start_from": "some draft", "suffix": "b", "start": 0.3},
        {"start_from": "some draft", "max_tokens": 3},
        {"prompt": "a", "stream": True, "diffusing": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "diffusing": True},
        {"prompt": "a", "stream_options": {}},
        {"prompt": "a" * 15},
        {"prompt": "a" * 14},
        {"prompt": "ab", "max_tokens": 21},
        {"prompt": "ab", "max_tokens": 22},
        {"prompt": "a", "logprobs": 1},
        {"prompt": "a", "logit_bias": {"1": 2.0}},
        {"prompt": "a", "logit_bias": {}},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "best_of": 2, "n": 2},
        {"prompt": "a", "presence_penalty": 0.5},
        {"prompt": "a", "frequency_penalty": 0.0},
        {"prompt": "a", "model": "tinny"},
        {"prompt": "a", "temperature": 0.7, "top_k": 3, "jump": "spaced"},
        {"prompt": "a", "grid": "0,0.5,1", "steps": None},
        {"prompt": "a", "grid": ",".join(str(k / 1026) for k in range(1026)) + ",1", "steps": None},
        {"prompt": "a<|endoftext|>"},
    ):
        found.append(asked(CompletionBody, **body))
    return found


@cases
def other_texts() -> object:
    return [
        asked(FimBody, prompt="ab", suffix="cd"),
        asked(FimBody, prompt="ab", max_tokens=3, details=True),
        asked(FimBody, suffix="cd"),
        asked(InfillBody, text="a[[3]]b", details=True),
        asked(InfillBody, text="nothing"),
        asked(InfillBody, text="a[[30]]"),
        asked(InfillBody, 4, text="a[[3]]"),
        asked(InfillBody, 5, text="a[[3]]"),
        asked(RepairBody, text="some text", damaged=[[0, 2], [5, 6]], details=True),
        asked(RepairBody, text="some text", damaged=[[5, 20]]),
        asked(RepairBody, text="some text", damaged=[[5]]),
        asked(RepairBody, text="some text"),
        asked(RepairBody, text="some text", corrupt=0.5, details=True),
        asked(RepairBody, text="some text", corrupt=0.5, blind=True),
        asked(RepairBody, text="some text", blind=True),
        asked(RepairBody, text="some text", corrupt=0.5, damaged=[[0, 1]]),
        asked(RepairBody, text="some text", corrupt=1.5),
        asked(RepairBody, text="some text", model="mask", damaged=[[0, 2]]),
    ]


@cases
def limits() -> object:
    found: list[object] = []
    for name, values in {
        "n": (0, 1, 16, 17),
        "max_tokens": (0, 1, 2**20, 2**20 + 1, 1.0),
        "steps": (0, 1, 1024, 1025, "auto", "x"),
        "prompt": ("a" * 65_536, "a" * 65_537, [], ["a"] * 16, ["a"] * 17, 3),
        "stop": ("", "a" * 128, "a" * 129, ["a"] * 4, ["a"] * 5),
        "model": ("m" * 512, "m" * 513),
        "user": ("m" * 513,),
        "temperature": (0, 0.1, float("inf")),
        "top_p": (0, 1, 1.1),
        "start": (-0.1, 0, 1),
        "seed": (-1, 2**64 - 1, 2**64),
        "unknown": (1,),
        "stream": ("yes", True),
    }.items():
        for value in values:
            try:
                CompletionBody.model_validate({name: value})
                found.append([name, "taken"])
            except ValidationError as error:
                found.append([name, error.errors()[0]["type"]])
    return [*found, [kind.model_json_schema() for kind in (CompletionBody, FimBody, InfillBody, RepairBody)]]


BODIES = {
    "/v1/completions": [
        {"prompt": "ab", "max_tokens": 6},
        {"prompt": ["ab", "c"], "n": 2, "echo": True, "details": True},
        {"prompt": "a", "max_tokens": 5, "stream": True},
        {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 5, "stream": True, "diffusing": True},
        {"prompt": "a", "max_tokens": 10**6},
        {"prompt": "a", "temperature": -1},
        {"prompt": "a", "steps": 2.5},
        {"prompt": "a", "n": 1000},
        {"prompt": "a", "logprobs": 3},
        {"prompt": "a", "zzz": 3},
        {"prompt": "a", "model": "nobody"},
        {"prompt": 3},
        {},
    ],
    "/v1/infill": [{"text": "a [[3]] b"}, {"text": "a"}, {}],
    "/v1/repair": [{"text": "abcdef", "damaged": [[1, 3]]}, {"text": "abcdef"}, {"text": "a", "damaged": 3}],
    "/v1/fim/completions": [{"prompt": "ab", "suffix": "yz", "max_tokens": 4}, {"prompt": "a", "suffix": 3}],
}


@cases
def answers() -> object:
    """What clients are told, with the server's numbers of requests and times left out."""
    key, found, kept = "0123456789abcdef", dict[str, object](), ("content-type", "x-request-id", "allow", "connection")
    config = ServeConfig(api_key=key, cors=("https://a.example",), max_body=600, max_canvas=24, running=2, waiting=9)
    app = build_app(MODELS, config)
    kept = (*kept, "www-authenticate", "cache-control", "access-control-allow-origin", "x-content-type-options")

    def told(answer) -> list[object]:
        own = {name: answer.headers[name] for name in kept if name in answer.headers}
        own |= {"x-request-id": bool(own["x-request-id"]) if "mine" not in own["x-request-id"] else "mine"}
        text = re.sub(
            r'("(?:id|created|seconds|fingerprint|system_fingerprint)": ?)("[^"]*"|[0-9.e-]+)', r"\g<1>0", answer.text
        )
        return [answer.status_code, own, text]

    with TestClient(app, raise_server_exceptions=False) as client:
        auth = {"authorization": f"Bearer {key}", "x-request-id": "mine-1"}
        for path, bodies in BODIES.items():
            for number, body in enumerate(bodies):
                body = {"seed": 7, "steps": 2, **({"model": "tiny"} if body else {}), **body}
                found[f"{path} {number}"] = told(client.post(path, json=body, headers=auth))
        for name, headers in {
            "small letters": {"authorization": f"bearer {key}"},
            "capitals": {"authorization": f"BEARER  {key} "},
            "basic": {"authorization": f"Basic {key}"},
            "wrong": {"authorization": f"Bearer {key}x", "x-request-id": "<b>"},
            "none": {},
            "page": {**auth, "origin": "https://a.example"},
            "other page": {**auth, "origin": "https://b.example"},
        }.items():
            found[name] = told(client.get("/v1/models", headers=headers))[:2]
        for name, path in {
            "one": "/v1/models/tiny",
            "no": "/v1/models/no",
            "health": "/health",
            "ready": "/ready",
        }.items():
            found[name] = told(client.get(path, headers=auth))
        for name, (method, path) in {
            "head": ("HEAD", "/health"),
            "put": ("PUT", "/health"),
            "off": ("GET", "/x"),
        }.items():
            found[name] = told(client.request(method, path, headers=auth))
        for size in (600, 601, 5000):
            found[f"{size} bytes"] = told(client.post("/v1/infill", content=b" " * size, headers=auth))
        found["json"] = told(
            client.post("/v1/infill", content=b"{no", headers={**auth, "content-type": "application/json"})
        )
        found["length"] = told(client.post("/v1/infill", content=b"{}", headers={**auth, "content-length": "x"}))
        counted = client.get("/metrics", headers=auth).text.splitlines()
        found["metrics"] = [
            line
            for line in counted
            if line.startswith("fsdfm") and not re.search("seconds_(bucket|sum)|created|batch_size|calls", line)
        ]
        found["page"] = [client.get("/").status_code, client.get("/page.js").headers["content-type"]]
    return found


@cases
def first_words() -> object:
    """What every model says before anybody is served."""
    asked: list[object] = []
    models = {
        name: SimpleNamespace(
            checkpoint=SimpleNamespace(length=length), generate=lambda n=name, **options: asked.append([n, options])
        )
        for name, length in {"short": 9, "long": 99}.items()
    }
    warm_up(models)
    return asked


@cases
def served() -> object:
    """What the server under it is told, and in which order things happen."""
    happened: list[object] = []

    class Listening:
        def getsockname(self):
            return ("127.0.0.1", 7)

        def close(self):
            happened.append("closed")

    def config(app, **options):
        happened.append({name: value for name, value in options.items() if name != "http"})
        return SimpleNamespace(app=app)

    def server(settings, refuse):
        return SimpleNamespace(run=lambda sockets: happened.append(["run", len(sockets), refuse.__name__]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "uvicorn", SimpleNamespace(Config=config))
        patch.setattr(server_module, "_Server", server)
        patch.setattr(server_module, "_listen", lambda *where: (happened.append(list(where)), Listening())[1])
        patch.setattr(server_module, "warm_up", lambda models: happened.append(list(models)))
        patch.setattr(server_module, "_log_to_stderr", lambda: happened.append("log"))
        patch.setattr(server_module, "log_line", lambda event, **facts: happened.append([event, sorted(facts)]))
        for host, key in (("127.0.0.1", None), ("0.0.0.0", None), ("0.0.0.0", "0123456789abcdef")):
            run_server(MODELS, ServeConfig(host=host, port=7, api_key=key, drain_seconds=3))
    return happened


@cases
def settings() -> object:
    """What a server may be told."""
    found: list[object] = []
    for name, values in {
        "port": (-1, 0, 65535, 65536),
        "max_body": (0, 1),
        "running": (0, 1),
        "waiting": (-1, 0),
        "threads": (-1, 0),
        "drain_seconds": (0, 1e-9, 10**6, 999999),
        "cors": (("*",), ("http://a",), ("ftp://a",)),
    }.items():
        found += [said(lambda n=name, v=v: getattr(ServeConfig(**{n: v}), n)) for v in values]
    return found


@cases
def what_is_allowed() -> object:
    return odd("fsdfm.serve")


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.serve")


test_what_is_computed = cases.test()
