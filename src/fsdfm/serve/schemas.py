"""What is asked and answered, as OpenAPI describes it: OpenAI's completions, and what few-step text has beyond them."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from fsdfm.generate import SamplerConfig, SamplerOptions

__all__ = [
    "UNSUPPORTED",
    "Completion",
    "CompletionBody",
    "ErrorEnvelope",
    "FimBody",
    "InfillBody",
    "ModelCard",
    "ModelList",
    "RepairBody",
    "Status",
    "allowed_values",
]

MAX_TEXT = 65_536
MAX_PROMPTS = 16
MAX_N = 16
MAX_STEPS = 1024  # of a served text, whatever the sampler allows

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Span = Annotated[list[int], Field(min_length=2, max_length=2)]


class _Body(BaseModel):
    """Nothing is silently ignored: an unknown field is an error that names it."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = Field(default=False, description="An event with the usage before the end.")


SAMPLER_FIELDS = tuple(field for field in fields(SamplerConfig) if field.name not in ("keep_states", "curve"))
"""What a body says of sampling: the options of `SamplerConfig`, by their names; a stream has its own way of states."""


def _sampler_fields() -> dict[str, Any]:
    """name -> (type in JSON, field). A rule or grid has a name here; None and what is left out are the default."""
    kinds, limits = get_type_hints(SamplerOptions), {"steps": {"le": MAX_STEPS}, "grid": {"max_length": MAX_TEXT}}
    made = {}
    for field in SAMPLER_FIELDS:
        kind = next(kind for kind in (get_args(kinds[field.name]) or (kinds[field.name],)) if kind in (int, float, str))
        about = {"description": field.metadata["about"], **field.metadata["bounds"], **limits.get(field.name, {})}
        if kind is float:
            about["allow_inf_nan"] = False
        if field.name == "seed":
            about["description"] += " A random one unless said; the answer names it."
        made[field.name] = (kind | None, Field(default=None, **about))
    calls = Annotated[int, Field(ge=1, le=MAX_STEPS)] | Literal["auto"] | None
    about = next(field for field in SAMPLER_FIELDS if field.name == "steps").metadata["about"]
    made["steps"] = (calls, Field(default=None, description=about))
    return made


if TYPE_CHECKING:
    _SamplerBody = _Body
else:
    _SamplerBody = create_model("_SamplerBody", __base__=_Body, **_sampler_fields())


class Sampling(_SamplerBody):
    """How a text is sampled: the options every endpoint has."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="One of /v1/models; the server's first unless said."
    )
    n: int | None = Field(default=1, ge=1, le=MAX_N, description="How many texts.")
    stream: bool | None = Field(default=False, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    diffusing: bool | None = Field(
        default=False,
        description="With stream: an event for every step; its text replaces that of the events before.",
    )
    details: bool | None = Field(
        default=False,
        description="Also the tokens: their pieces of text, the step that changed each last, what is given.",
    )
    user: Annotated[str, StringConstraints(max_length=512)] | None = Field(default=None, description="Ignored.")


class _Continuation(Sampling):
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Tokens to write at most; what the model's length leaves unless said. The text is written into "
        "exactly so much room, and may end before.",
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = Field(
        default=None, description="The text is cut before the first of these."
    )


class CompletionBody(_Continuation):
    """A text after a prompt, before a suffix, between both, or from nothing."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] | None = Field(
        default=None, description="What the text begins with; several give several texts. Empty: nothing is given."
    )
    suffix: Text | None = Field(default=None, description="What stands behind the text.")
    echo: bool | None = Field(default=False, description="Whether the answer begins with the prompt.")
    gaps: bool | None = Field(
        default=False, description=r"Read [[6]] in the prompt as a gap of six tokens; the answer is the whole text."
    )
    start_from: Text | None = Field(
        default=None,
        description="A draft of the text to be written; it is noised back to `start`, or as far as the model finds it "
        "damaged, which takes eight more calls, and written anew from there.",
    )
    logprobs: int | None = Field(default=None, description="Refused: tokens are revised, none has one probability.")
    logit_bias: dict[str, float] | None = Field(default=None, description="Refused unless empty.")
    best_of: int | None = Field(default=None, description="Refused unless it is n.")
    presence_penalty: float | None = Field(default=None, description="Refused unless 0.")
    frequency_penalty: float | None = Field(default=None, description="Refused unless 0.")


UNSUPPORTED = ("logprobs", "logit_bias", "best_of", "presence_penalty", "frequency_penalty")
"""What OpenAI has and a completion here refuses, whatever is sent but a value that asks for nothing."""


class FimBody(_Continuation):
    """A text between a prompt and a suffix."""

    prompt: Text
    suffix: Text | None = None


class InfillBody(Sampling):
    """A text with gaps."""

    text: Text = Field(description=r"[[6]] is a gap of six tokens, \[[ the two characters.")


class RepairBody(Sampling):
    """A damaged text."""

    text: Text
    damaged: list[Span] | None = Field(
        default=None,
        max_length=1024,
        description="Damaged characters, [begin, end); these are written anew and the rest stands fast. Left out: "
        "the model looks for tokens that are surely wrong, and writes those anew.",
    )
    corrupt: float | None = Field(
        default=None, gt=0, le=1, description="First replace this share of the tokens by noise, to see it repaired."
    )
    blind: bool | None = Field(default=False, description="With corrupt: do not tell the model where.")


@functools.cache
def allowed_values(body: type[BaseModel], name: str | None) -> str:
    """What a field may be, in words, as the schema says it."""
    schema = body.model_json_schema()
    return _in_words(schema["properties"][name]) if name in schema["properties"] else "JSON objects"


def _in_words(kind: dict[str, Any]) -> str:
    if "anyOf" in kind:
        return " or ".join(_in_words(each) for each in kind["anyOf"] if each.get("type") != "null")
    if "const" in kind:
        return repr(kind["const"])
    if kind.get("type") == "array":
        return f"lists{_range(kind, 'minItems', 'maxItems')} of {_in_words(kind['items'])}"
    if kind.get("type") == "string":
        return f"texts{_range(kind, 'minLength', 'maxLength')}{' characters' if 'maxLength' in kind else ''}"
    if kind.get("type") == "boolean":
        return "true and false"
    numbers = {"integer": "whole numbers", "number": "numbers"}.get(kind.get("type", ""))
    if numbers is None:
        return "JSON objects"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = [f"{sign} {kind[name]}" for name, sign in signs.items() if name in kind]
    return " ".join([numbers, " and ".join(limits)]).strip()


def _range(kind: dict[str, Any], least: str, most: str) -> str:
    if most not in kind:
        return ""
    low, high = kind.get(least, 0), kind[most]
    return f" of {low}" if low == high else f" of {low} to {high}" if low else f" of at most {high}"


# --- answers ----------------------------------------------------------------------------------------------------------


class Usage(BaseModel):
    """Tokens given and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Details(BaseModel):
    """A text token by token.

    pieces         the text of every token; joined they are the text
    last_changed   the step that changed it last; 0: none did
    given, marked, replaced   token positions: stood fast; said to be damaged; other than before the repair
    length         tokens of the canvas, what `lm.generate` calls so: a first token that begins the document counts
    """

    pieces: list[str]
    last_changed: list[int]
    given: list[int]
    marked: list[int]
    replaced: list[int]
    asked: str | None = None
    length: int


class Made(BaseModel):
    """How a text came about."""

    seed: int
    copy_: int = Field(serialization_alias="copy", validation_alias="copy")
    steps: int
    calls: int
    start: float
    seconds: float
    temperature: float | None
    jump: str | None
    warnings: list[str]
    details: Details | None = None


class Choice(BaseModel):
    """One text. finish_reason `stop`: it is complete, or a stop was met; `length`: the room is full."""

    text: str
    index: int
    logprobs: None = None
    finish_reason: Literal["stop", "length"]
    fsdfm: Made


class Completion(BaseModel):
    """The answer: OpenAI's, and `fsdfm` in every choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    length: int
    parameters: int
    vocab_size: int
    budgets: list[int] | None
    advice: dict[str, Any] | None


class ModelList(BaseModel):
    """The models, the default first."""

    object: Literal["list"]
    data: list[ModelCard]


class Status(BaseModel):
    """How the server is."""

    status: str
    running: int = 0
    waiting: int = 0


class ErrorBody(BaseModel):
    """What was wrong, what is allowed, where."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """OpenAI's envelope of an error."""

    error: ErrorBody
