"""What bodies become and how texts are shown; see tests/pinned.py."""

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from pydantic import ValidationError

from fsdfm.generate import LanguageModel
from fsdfm.serve.schemas import CompletionBody, FimBody, InfillBody, RepairBody
from fsdfm.serve.work import RefusalError, build_work
from pinned import Cases, chosen
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


@cases
def numbers_that_were_chosen() -> object:
    return chosen("fsdfm.serve")


test_what_is_computed = cases.test()
