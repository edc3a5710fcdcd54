"""What a body says of sampling is what the one config knows: names, defaults, bounds."""

import math
from dataclasses import fields

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from pydantic import ValidationError

from fsdfm.generate import SamplerConfig
from fsdfm.serve.schemas import MAX_STEPS, CompletionBody

OPTIONS = {field.name: field for field in fields(SamplerConfig) if field.name not in ("keep_states", "curve")}
BOUNDS = [(name, sort, value) for name, field in OPTIONS.items() for sort, value in field.metadata["bounds"].items()]


def test_every_option_of_the_sampler_can_be_asked_for():
    said = CompletionBody.model_json_schema()["properties"]
    assert all(said[name]["description"].startswith(field.metadata["about"]) for name, field in OPTIONS.items())
    nothing = CompletionBody.model_validate({})
    assert [getattr(nothing, name) for name in OPTIONS] == [None] * len(OPTIONS)  # then the config's defaults hold


@pytest.mark.parametrize(("name", "sort", "bound"), BOUNDS)
def test_a_schema_allows_what_the_sampler_allows(name, sort, bound):
    whole = "int" in OPTIONS[name].type
    outwards = -1 if sort.startswith("g") else 1
    beyond = bound + outwards if whole else math.nextafter(bound, outwards * math.inf)
    wrong, right = (beyond, bound) if sort.endswith("e") else (bound, math.nextafter(bound, -outwards * math.inf))
    assert getattr(SamplerConfig(**{name: right}), name) == right
    with pytest.raises(ValueError, match=f"{name} is"):
        SamplerConfig(**{name: wrong})
    with pytest.raises(ValidationError, match=name):
        CompletionBody.model_validate({name: wrong})
    if name != "steps" or right <= MAX_STEPS:
        assert getattr(CompletionBody.model_validate({name: right}), name) == right


def test_no_request_has_more_steps_than_the_server_takes():
    assert CompletionBody.model_validate({"steps": MAX_STEPS}).steps == MAX_STEPS
    with pytest.raises(ValidationError, match="steps"):
        CompletionBody.model_validate({"steps": MAX_STEPS + 1})
