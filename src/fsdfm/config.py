"""Recipes: one dataclass a part of a run, composed; TOML in and out, strict.

    recipe = load_recipe("tiny-dfm", ["train.steps=100", "model.width=128"])

A recipe is a name (of a file that ships with the package) or the path of a TOML file. An unknown key is an error that
names the nearest known one, a wrong type an error that names the right one; nothing is ignored.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

from fsdfm.files import did_you_mean, nearest
from fsdfm.learn.optim import OptimConfig
from fsdfm.learn.trainer import TrainerConfig
from fsdfm.runtime import RuntimeConfig

__all__ = [
    "DataConfig",
    "FlowConfig",
    "HeldOutConfig",
    "ModelSection",
    "ObjectiveConfig",
    "Recipe",
    "SampleConfig",
    "differences",
    "find_recipe",
    "load_recipe",
    "parse",
    "recipe_names",
    "to_toml",
]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, its tokens and how they become blocks."""

    inputs: tuple[str, ...] = ("builtin:pydoc",)  # files, hf:NAME:CONFIG:SPLIT, or builtin:pydoc
    tokenizer: str | None = None  # bytes, gpt2, bpe:SIZE (trained on the text), a path; None: that of the parent
    corpus: str | None = None  # the folder of the packed tokens, made when missing; None: inside the run's
    separator: str | None = None  # stands between the documents of a text file
    field: str = "text"  # holds the document in JSON lines, Parquet and hub datasets
    max_documents: int | None = None  # None: all
    pairs: str | None = None  # a folder of coupled pairs made by the parent: discrete reflow, in place of text
    text_share: float = 0.0  # of rows that are text where `pairs` is set
    step_pairs: tuple[str, ...] = ()  # folders of pairs that take the rows' place at large steps
    step_pairs_from: tuple[float, ...] = ()  # the smallest step size h of each: 0.25 is a step of four calls
    length: int = 1024  # tokens a block
    short_share: float = 0.0  # of rows cut to a shorter random length, so that short texts are in distribution
    shortest: int = 1  # tokens of such a row at least
    document_starts: float = 0.0  # share of rows that begin where a document begins
    given_share: float = 0.0  # of rows with a prompt, or all but a gap, given: so that both are in distribution

    def __post_init__(self) -> None:
        if self.text_share and self.pairs is None:
            raise ValueError("text_share is set, but pairs is not, so that all rows are text; leave it out")
        if len(self.step_pairs) != len(self.step_pairs_from):
            raise ValueError(
                f"step_pairs has {len(self.step_pairs)} folders and step_pairs_from {len(self.step_pairs_from)} step "
                "sizes; give one to each"
            )
        if not all(0 < h <= 1 for h in self.step_pairs_from):
            raise ValueError(f"step_pairs_from is {list(self.step_pairs_from)}; allowed are step sizes 0 < h <= 1")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which network, and where its weights come from: fresh, a parent, or a llama2.c checkpoint."""

    preset: str | None = None  # tiny, 170m, 1300m, 1700m: a size with fresh weights
    parent: str | None = None  # a run or checkpoint to start from
    llama2c: str | None = None  # an autoregressive llama2.c .bin to start from
    llama2c_tokenizer: str | None = None  # its tokenizer.bin; None: it stands behind the weights
    min_count: int = 1  # llama2.c tokens that the text uses more rarely are dropped
    width: int | None = None  # None, here and below: as the preset or parent has it
    num_blocks: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    mlp_width: int | None = None
    cond_width: int | None = None
    style: Literal["paper", "llama"] | None = None
    dropout: float | None = None
    transition_rank: int | None = None  # of links between neighbours, which the text's counts begin; None: the parent's


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """How noise becomes data."""

    source: Literal["uniform", "mask", "mixture"] = "uniform"
    mask_share: float = 0.5  # of a mixture
    schedule: Literal["polynomial", "cosine", "exponential"] = "polynomial"
    exponent: float = 1.0  # of a polynomial
    rate: float = 2.0  # of an exponential


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a batch asks of the model."""

    kind: Literal["path", "fewstep"] = "path"
    loss: Literal["generalised-kl", "cross-entropy"] = "generalised-kl"
    times: Literal["multiples-of-h", "fine"] = "multiples-of-h"
    smallest_h: int = -10  # log2 of the smallest step size: the one of pre-training, the first of the few-step grid
    teacher: str = "rk4"  # rk2, rk4, classical-rk4, heun, midpoint, chained
    average: Literal["logits", "probabilities"] | None = None  # None: what the teacher's tableau says
    jump: Literal["exact", "single", "instant"] = "exact"  # the teacher's own steps
    weights: str = "TB-20"  # how often each step size is drawn: TB-10, TB-20, PU, G, AG
    anneal_every: int = 10_000  # training steps after which AG doubles its weights
    mirrored: bool = False  # the weights in the other order: the paper's words taken literally
    path_below_h: float = 2.0**-9  # smaller steps take the path loss, the others the teacher
    temperature: float = 1.0  # of teacher and student in the distillation
    network: Literal["ema", "student"] = "ema"  # who the teacher asks
    spaced_share: float = 0.0  # of rows whose turned positions are spaced as the jump rule `spaced` takes them

    def __post_init__(self) -> None:
        if not 0 <= self.spaced_share <= 1:
            raise ValueError(f"spaced_share is {self.spaced_share}; allowed are 0 <= spaced_share <= 1")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text to look at while training."""

    every: int = 0  # training steps; 0: never
    num: int = 2
    steps: int = 64
    length: int | None = None  # tokens; None: a whole block

    def __post_init__(self) -> None:
        if self.every < 0 or self.num < 1 or self.steps < 1:
            raise ValueError(
                f"every is {self.every}, num {self.num} and steps {self.steps}; "
                "allowed are every >= 0 (0: never), num >= 1 and steps >= 1"
            )


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """Text that the run is not trained on, to see while it trains whether it learns or remembers."""

    inputs: tuple[str, ...] = ()  # as data.inputs, with its separator and field; none: nothing is measured
    every: int = 500  # training steps between two measurements of the averaged weights
    num: int = 64  # rows, always the same with the same noise

    def __post_init__(self) -> None:
        if self.every < 1 or self.num < 1:
            raise ValueError(f"every is {self.every} and num {self.num}; allowed are whole numbers >= 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete run."""

    out: str  # the run's folder; the same command again resumes what is there
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelSection = field(default_factory=ModelSection)
    flow: FlowConfig = field(default_factory=FlowConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainerConfig = field(default_factory=TrainerConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


# --- finding and reading ----------------------------------------------------------------------------------------------


def _folders() -> list[Path]:
    """Where recipes stand: inside an installed package, or at the top of a checkout."""
    here = Path(__file__).resolve().parent
    return [folder for folder in (here / "recipes", here.parents[1] / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    return sorted({path.stem for folder in _folders() for path in folder.glob("*.toml")})


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, by its path or its name."""
    if Path(name).is_file():
        return Path(name)
    for folder in _folders():
        if (path := folder / f"{name}.toml").is_file():
            return path
    known = recipe_names()
    hint = did_you_mean(Path(name).stem, known, f"there are {', '.join(known)}, or give a TOML file")
    raise ValueError(f"there is no recipe {str(name)!r}; {hint}")


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe with some of its values replaced by `a.b=c`; `a.b=none` takes a value back to its default."""
    path = find_recipe(name)
    try:
        values = tomlkit.parse(path.read_text("utf-8")).unwrap()
    except (OSError, UnicodeDecodeError, TOMLKitError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    values.setdefault("out", f"runs/{path.stem}")
    for override in overrides:
        _override(values, override)
    return parse(Recipe, values)


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name:
        raise ValueError(f"{override!r} is not an override; write section.key=value, such as train.steps=100")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{override!r}: {section} is a value, not a section; write section.key=value")
        values = inner
    if text.strip() == "none":
        values.pop(name, None)
    else:
        values[name] = _value(text.strip())


def _value(text: str) -> Any:
    """What TOML makes of a value; what it cannot read is a string, so that paths need no quotes."""
    try:
        return tomlkit.parse(f"value = {text}").unwrap()["value"]
    except TOMLKitError:
        return text


def to_toml(recipe: Recipe) -> str:
    """All values of a recipe, defaults included, as TOML that `load_recipe` reads back."""
    document = tomlkit.document()
    for name, value in _known(asdict(recipe)).items():
        document[name] = value
    return tomlkit.dumps(document)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values that are None, which TOML cannot say: leaving them out means the same."""
    kept = {name: value for name, value in values.items() if value is not None}
    return {
        name: _known(v) if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v for name, v in kept.items()
    }


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two recipes differ, with both values."""
    before, after = _flat(asdict(old)), _flat(asdict(new))
    return {key: (before.get(key), after.get(key)) for key in after if before.get(key) != after.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# --- strictness -------------------------------------------------------------------------------------------------------


def parse(cls: type[_T], values: Mapping[str, Any], where: str = "") -> _T:
    """A config dataclass of a mapping, every key and type checked."""
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}{key} is not a key of a recipe; {_nearest(key, known, where)}")
    missing = [f.name for f in fields(cls) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing; add it to the recipe")
    parsed = {key: _convert(value, hints[key], f"{where}{key}") for key, value in values.items()}
    try:
        return cls(**parsed)
    except ValueError as error:
        raise ValueError(f"{where}{error}" if where and not str(error).startswith(where) else str(error)) from error


def _required(f: Any) -> bool:
    from dataclasses import MISSING

    return f.default is MISSING and f.default_factory is MISSING


def _nearest(key: str, known: Sequence[str], where: str) -> str:
    """The known key that was meant: one of this section, or one of the same name elsewhere."""
    if (near := nearest(key, known)) is not None:
        return f"did you mean {where}{near}?"
    elsewhere = [dotted for dotted in _all_keys(Recipe) if dotted.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    near = nearest(where + key, _all_keys(Recipe))
    return f"did you mean {near}?" if near else f"allowed here are {', '.join(known)}"


def _all_keys(cls: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, kind in get_type_hints(cls).items():
        keys += _all_keys(kind, f"{prefix}{name}.") if is_dataclass(kind) else [prefix + name]
    return keys


def _convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as its field wants it, or an error that says what is allowed."""
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r}; it is a section: write [{where}] or {where}.key=value")
        return parse(kind, value, f"{where}.")  # type: ignore[arg-type]
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = [option for option in options if option is not type(None)]
        return _convert(value, inner, where)
    if origin is Literal:
        if value not in options:
            near = nearest(value, map(str, options))
            hint = f" (did you mean {near!r}?)" if near else ""
            raise ValueError(f"{where} is {value!r}; allowed are {', '.join(map(repr, options))}{hint}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, options[0], where) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r}; it must be {_KINDS[kind]}")
    return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string (in quotes)"}
