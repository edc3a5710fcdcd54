"""Recipes: one dataclass per part of a run, composed; TOML in and out, strict.

    recipe = load_recipe("tiny-dfm", ["train.steps=100", "model.width=128"])

A recipe is a name (of a file that ships with the package) or the path of a TOML file. An unknown key is an error that
names the nearest known one, a wrong type an error that names the right one, a key that the chosen kind does not use an
error that says so; nothing is ignored.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

import fsdfm.measure.reward  # noqa: F401  (gives rewards their names)
import fsdfm.peers  # noqa: F401  (gives their objectives and rules their names)
from fsdfm.data import SEPARATOR
from fsdfm.files import did_you_mean, nearest, read_text
from fsdfm.generate import SamplerConfig
from fsdfm.learn import OBJECTIVES, PathConfig
from fsdfm.learn.objective import SectionConfig
from fsdfm.learn.optim import OptimConfig
from fsdfm.learn.registry import Registry
from fsdfm.learn.trainer import TrainerConfig
from fsdfm.model import ARCHITECTURES
from fsdfm.plugins import import_plugin, is_imported
from fsdfm.runtime import RuntimeConfig
from fsdfm.terminal import printable

__all__ = [
    "DataConfig",
    "FlowConfig",
    "HeldOutConfig",
    "ModelSection",
    "Recipe",
    "SampleConfig",
    "differences",
    "find_recipe",
    "load_recipe",
    "parse",
    "read_values",
    "recipe_names",
    "to_toml",
]

_T = TypeVar("_T")
_CAUSAL = "causal"  # the one architecture that is no denoiser


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, its tokens and how they become blocks."""

    inputs: tuple[str, ...] = ("builtin:pydoc",)  # files, hf:NAME:CONFIG:SPLIT, or builtin:pydoc
    tokenizer: str | None = None  # bytes, gpt2, bpe:SIZE (trained on the text), a path; None: that of the parent
    corpus: str | None = None  # the folder of the packed tokens, made when missing; None: inside the run's
    separator: str = SEPARATOR  # stands between the documents of a text file; "": the file is one document
    field: str = "text"  # holds the document in JSON lines, Parquet and hub datasets
    max_documents: int | None = None  # None: all
    pairs: str | None = None  # a folder of coupled pairs made by the parent: discrete reflow, in place of text
    text_share: float = 0.0  # of rows that are text where `pairs` is set
    step_pairs: tuple[str, ...] = ()  # folders of pairs that take the rows' place at large steps
    step_pairs_from: tuple[float, ...] = ()  # the smallest step size h of each: 0.25 is a step of four calls
    length: int = 1024  # tokens per block
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

    architecture: str = "dit"  # causal: the baseline and judge, trained on the next token; or one of your own
    network: dict[str, Any] | None = None  # of one of your own: the keys of its config, all but vocab_size
    preset: str | None = None  # tiny, stories, 170m, 1300m, 1700m: a size with fresh weights
    parent: str | None = None  # a run or checkpoint to start from
    llama2c: str | None = None  # an autoregressive llama2.c .bin to start from
    llama2c_tokenizer: str | None = None  # its tokenizer.bin; None: it stands behind the weights
    min_count: int | None = None  # llama2.c tokens that the text uses more rarely are dropped; None: 1
    width: int | None = None  # None, here and below: as the preset or parent has it
    num_blocks: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    mlp_width: int | None = None
    cond_width: int | None = None
    style: Literal["paper", "llama"] | None = None
    dropout: float | None = None
    open_steps: int | None = None  # of training, until the attention of an imported model is open; None: at once
    add_mask: bool = False  # the parent has a uniform source: its vocabulary gains the mask, for flow.source = "mask"
    reset_head: bool = False  # the parent's last layer starts from zero: for outputs that will mean something else
    transition_rank: int | None = None  # of a CRF between neighbours, which the text's counts begin; None: the parent's
    transition_gates: int | None = None  # inner width of gates by which transitions depend on the text; None: no more
    causal_blocks: int | None = None  # of a causal head over the trunk; None: as the parent has it
    causal_start: str | None = None  # a llama2.c .bin whose first and last blocks the causal head starts from

    def __post_init__(self) -> None:
        known = (*ARCHITECTURES, _CAUSAL)
        if self.architecture not in known:
            hint = did_you_mean(self.architecture, known, "or name the module that adds it in `plugins`")
            raise ValueError(f"architecture is {self.architecture!r}; allowed are {', '.join(known)} ({hint})")
        if self.network is not None and self.architecture in ("dit", _CAUSAL):
            raise ValueError(
                f'network is not used by model.architecture = "{self.architecture}"; remove it, or set '
                "model.architecture to the network of your own whose keys these are"
            )
        if self.llama2c is not None and self.min_count is None:
            object.__setattr__(self, "min_count", 1)


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """How noise becomes data."""

    source: Literal["uniform", "mask", "mixture"] = "uniform"
    mask_share: float | None = None  # of a mixture; None: 0.5
    schedule: Literal["polynomial", "cosine", "exponential"] = "polynomial"
    exponent: float | None = None  # of a polynomial; None: 1
    rate: float | None = None  # of an exponential; None: 2

    def __post_init__(self) -> None:
        for key, (choice, user, default) in _FLOW_KEYS.items():
            chosen = getattr(self, choice)
            if chosen == user:
                object.__setattr__(self, key, default if getattr(self, key) is None else getattr(self, key))
            elif getattr(self, key) is not None:
                raise ValueError(
                    f'{key} is not used by flow.{choice} = "{chosen}"; remove it, or set flow.{choice} to "{user}"'
                )


_FLOW_KEYS = {  # key -> the choice that it belongs to, the one that uses it, its default there
    "mask_share": ("source", "mixture", 0.5),
    "exponent": ("schedule", "polynomial", 1.0),
    "rate": ("schedule", "exponential", 2.0),
}


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Text to look at while training."""

    every: int = 0  # training steps; 0: never
    num: int = 2
    length: int | None = None  # tokens; None: a whole block
    steps: int | None = None  # this and the rest as in `fsdfm generate --model` of this run, from nothing but noise
    temperature: float | None = None
    final_temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    jump: str | None = None
    grid: str = "uniform"
    renoise: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 0 or self.num < 1:
            raise ValueError(
                f"every is {self.every} and num {self.num}; allowed are every >= 0 (0: never) and num >= 1"
            )
        self.sampler()

    def sampler(self) -> SamplerConfig:
        """The options of sampling."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("every", "num", "length")}
        return SamplerConfig(**said)


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
    plugins: tuple[str, ...] = ()  # modules to import first, which register objectives and teachers of your own
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelSection = field(default_factory=ModelSection)
    flow: FlowConfig = field(default_factory=FlowConfig)
    objective: SectionConfig = field(default_factory=PathConfig, metadata={"registry": OBJECTIVES})
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
    """The file of a recipe, by its path or its name; a name that ships is no file of the current folder."""
    if str(name) in recipe_names():  # whatever lies here: a recipe may name plugins, whose code runs
        return next(path for folder in _folders() if (path := folder / f"{name}.toml").is_file())
    if Path(name).is_file():
        return Path(name)
    known = recipe_names()
    hint = did_you_mean(Path(name).stem, known, f"there are {', '.join(known)}, or give a TOML file")
    raise ValueError(f"there is no recipe {str(name)!r}; {hint}")


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe with some of its values replaced by `a.b=c`; `a.b=none` takes a value back to its default.

    An override that chooses another kind (objective.kind, objective.teacher, flow.source, flow.schedule) begins that
    part anew: what the file says there and the new kind does not use is dropped. So is the file's data.corpus where
    data.inputs is replaced: other text needs a corpus of its own. The modules of `plugins` are imported.
    """
    path = find_recipe(name)
    values = read_values(path)
    values.setdefault("out", f"runs/{path.stem}")
    given = {_override(values, override) for override in overrides}
    if "data.inputs" in given and "data.corpus" not in given:
        values.get("data", {}).pop("corpus", None)
    _import_plugins(values.get("plugins", []), path)
    _drop_replaced(Recipe, values, given)
    _drop_replaced_flow(values, given)
    return parse(Recipe, values)


def _import_plugins(named: Any, recipe: Path) -> None:
    """Import what a recipe names, and say so; one in a run's folder names nothing: that may come from anywhere."""
    wanted = [name for name in (named if isinstance(named, list) else [named]) if not is_imported(name)]
    if wanted and any((recipe.parent / beside).exists() for beside in _OF_RUNS):
        raise ValueError(
            f"{recipe} stands in a run's folder and names the plugin {wanted[0]!r:.80}, whose code would run; if you "
            "trust it, name it yourself: fsdfm --plugin FILE.py COMMAND ..."
        )
    for name in wanted:
        sys.stderr.write(printable(f"{recipe} names the plugin {name}: importing it\n"))
        import_plugin(name)


_OF_RUNS = ("run.json", "checkpoints", "metrics.jsonl", "training.safetensors")  # what stands beside a run's recipe


def read_values(path: Path) -> dict[str, Any]:
    """What a TOML file says, unchecked."""
    try:
        values: dict[str, Any] = tomlkit.parse(read_text(path)).unwrap()
    except (OSError, ValueError, TOMLKitError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    return values


def _override(values: dict[str, Any], override: str) -> str:
    """Put a value in its place; the key."""
    key, equals, text = override.partition("=")
    key = key.strip()
    *sections, name = key.split(".")
    if not equals or not name:
        raise ValueError(f"{override!r} is not an override; write section.key=value, such as train.steps=100")
    for dotted, section in zip(accumulate(sections, "{}.{}".format), sections, strict=True):
        inner = values.setdefault(section, {})
        if isinstance(inner, str) and dotted in _NAMED_SECTIONS:
            inner = values[section] = {"kind": inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{override!r}: {section} is a value, not a section; write section.key=value")
        values = inner
    if key in _NAMED_SECTIONS:
        values[name] = {"kind": text.strip().strip("\"'")}
        return f"{key}.kind"
    if text.strip() == "none" and key.removesuffix(".kind") not in _NAMED_SECTIONS:
        values.pop(name, None)
    else:
        values[name] = _value(text.strip())
    return key


_NAMED_SECTIONS = ("objective.teacher", "objective.reward")  # a bare string is their kind, and `none` is one


def _drop_replaced(cls: type[Any], values: dict[str, Any], given: set[str], *, where: str = "") -> None:
    """Drop what a file says of a kind that an override has replaced, where the new kind does not use it."""
    for f in fields(cls):
        registry: Registry | None = f.metadata.get("registry")
        section = values.get(f.name)
        if registry is None or not isinstance(section, dict):
            continue
        here = f"{where}{f.name}."
        entry = registry.get(str(section.get("kind", registry.default)))
        if entry is None:
            continue
        known = {inner.name for inner in fields(entry.config)}
        for key in [key for key in section if here + "kind" in given and key not in known]:
            if not any(name == here + key or name.startswith(f"{here}{key}.") for name in given):
                del section[key]
        _drop_replaced(entry.config, section, given, where=here)


def _drop_replaced_flow(values: dict[str, Any], given: set[str]) -> None:
    flow = values.get("flow", {})
    for key, (choice, user, _) in _FLOW_KEYS.items():
        if f"flow.{choice}" in given and flow.get(choice) != user and f"flow.{key}" not in given:
            flow.pop(key, None)


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
    registries = {f.name: f.metadata["registry"] for f in fields(cls) if "registry" in f.metadata}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ValueError(f"{where}{key} is not a key of a recipe; {_nearest(key, known, where)}")
    missing = [f.name for f in fields(cls) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing; add it to the recipe")
    parsed = {
        key: _parse_kind(registries[key], value, f"{where}{key}")
        if key in registries
        else _convert(value, hints[key], f"{where}{key}")
        for key, value in values.items()
    }
    try:
        return cls(**parsed)
    except ValueError as error:
        raise ValueError(f"{where}{error}" if where and not str(error).startswith(where) else str(error)) from error


def _parse_kind(registry: Registry, value: Any, where: str) -> Any:
    """A section whose keys depend on its kind; a bare string is the kind."""
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}; it is a section: write [{where}] or {where}.key=value")
    kind = value.get("kind", registry.default)
    entry = registry.find(kind)
    known = {f.name for f in fields(entry.config)}
    for key in value:
        users = [name for name, other in registry.items() if key in {f.name for f in fields(other.config)}]
        if key not in known and users:
            choices = " or ".join(f'"{name}"' for name in users)
            raise ValueError(
                f'{where}.{key} is not used by {where}.kind = "{kind}"; remove it, or set {where}.kind to {choices}'
            )
    return parse(entry.config, value, f"{where}.")


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _nearest(key: str, known: Sequence[str], where: str) -> str:
    """The known key that was meant: one of this section, or one of the same name elsewhere."""
    if where + key in _MOVED:
        return f"it is now {_MOVED[where + key]}"
    if (near := nearest(key, known)) is not None:
        return f"did you mean {where}{near}?"
    elsewhere = [dotted for dotted in _all_keys(Recipe) if dotted.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    near = nearest(where + key, _all_keys(Recipe))
    return f"did you mean {near}?" if near else f"allowed here are {', '.join(known)}"


_MOVED = {
    "objective.path_below_h": 'objective.teacher.from_h, and objective.teacher = "none" asks no teacher',
    **{f"objective.{key}": f"objective.teacher.{key}" for key in ("average", "jump", "network", "temperature")},
}


def _all_keys(cls: Any, prefix: str = "") -> list[str]:
    keys: list[str] = []
    hints = get_type_hints(cls)
    for f in fields(cls):
        registry: Registry | None = f.metadata.get("registry")
        kinds = [hints[f.name]] if registry is None else [entry.config for entry in registry.values()]
        for kind in kinds:
            keys += _all_keys(kind, f"{prefix}{f.name}.") if is_dataclass(kind) else [prefix + f.name]
    return keys


def _convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as its field wants it, or an error that says what is allowed."""
    origin, options = get_origin(kind), get_args(kind)
    if is_dataclass(kind) or origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is {value!r}; it is a section: write [{where}] or {where}.key=value")
        return dict(value) if origin is dict else parse(kind, value, f"{where}.")
    if origin in (Union, types.UnionType):
        (inner,) = [option for option in options if option is not type(None)]
        return _convert(value, inner, where)
    if origin is Literal:
        return _one_of(value, options, where)
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_convert(item, options[0], where) for item in items)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r}; it must be {_KINDS[kind]}")
    return value


def _one_of(value: Any, options: Sequence[Any], where: str) -> Any:
    if value not in options:
        near = nearest(value, map(str, options))
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ValueError(f"{where} is {value!r}; allowed are {', '.join(map(repr, options))}{hint}")
    return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string (in quotes)"}
