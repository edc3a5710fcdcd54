"""Result files: what was measured of one model, written by whoever measures and read by whoever shows.

evaluation = Evaluation(model={"name": "FS-DFM"}, judge={"name": "gpt2-large"})
evaluation = evaluation.with_row(Row(steps=8, metrics={"token_perplexity": Measured(31.5, 30.2, 32.9)}))
save_evaluation(evaluation, Path("fs-dfm.json"))  # after every row: an interruption keeps the finished ones
load_evaluation(Path("fs-dfm.json")).row(8).metrics["token_perplexity"].low

One JSON object per file. A metric stands as {"value", "low", "high"}, with a 95 % interval, beside the other keys of
its row; one that was not measured is absent. JSON has no infinity: it stands as "inf", and what is no number as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fsdfm.files import read_json, write_json

__all__ = ["FORMAT", "FORMAT_VERSION", "Evaluation", "Measured", "Row", "load_evaluation", "save_evaluation"]

FORMAT, FORMAT_VERSION = "fsdfm-evaluation", 1
_LARGEST_FILE = 2**26  # bytes; a result file has some ten thousand
_MOST_STEPS = 2**30
_NAN = float("nan")
_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": _NAN}
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """A number with its 95 % interval; `low` and `high` are NaN where there is none.

    facts   what else belongs to it: `n`, `seeds`; of real text, `band`: the two ends within which text counts as real
    """

    value: float
    low: float = _NAN
    high: float = _NAN
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"the interval [{self.low:g}, {self.high:g}] is empty; low must not exceed high")

    @property
    def has_interval(self) -> bool:
        """Whether both ends of the interval are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def band(self) -> tuple[float, float]:
        """Where the guard's band begins and ends; the interval, where no band is given."""
        low, high = self.facts.get("band", (self.low, self.high))
        return low, high

    def to_json(self) -> dict[str, Any]:
        """The mapping of a result file."""
        return {"value": self.value, "low": self.low, "high": self.high, **self.facts}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Measured:
        """The measured number that a mapping holds; no `low` or `high`: no interval."""
        low, high = (_number(record.get(name), name) for name in ("low", "high"))
        facts = {name: value for name, value in record.items() if name not in ("value", "low", "high")}
        if "band" in facts:
            facts["band"] = _band(facts["band"])
        return cls(_number(record["value"], "value"), low, high, facts)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One budget of one model.

    steps         steps of the sampler
    calls         calls of the network; None: as many as steps
    seconds       for all samples; `seconds_per_sample` beside it
    flags         why its perplexities are not to be believed alone, in words; empty: no reason
    matched       what its temperature was matched to, {"to": "data", "entropy_bits": 7.9}; None: it was not
    metrics       name -> Measured: token_perplexity, perplexity, entropy_bits, distinct_2, accuracy, mauve ...
    facts         anything else
    """

    steps: int
    calls: int | None = None
    num_samples: int | None = None
    seconds: float | None = None
    seconds_per_sample: float | None = None
    temperature: float = 1.0
    flags: tuple[str, ...] = ()
    matched: Mapping[str, Any] | None = None
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, count in (("steps", self.steps), ("calls", self.num_calls)):
            if not 1 <= count <= _MOST_STEPS:
                raise ValueError(f"{name} is {_shown(count)}; allowed are whole numbers from 1 to {_MOST_STEPS}")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; allowed are finite numbers >= 0")

    @property
    def num_calls(self) -> int:
        """Calls of the network for one sample."""
        return self.steps if self.calls is None else self.calls

    @property
    def key(self) -> tuple[int, float, str | None]:
        """What makes a row the only one of its kind: steps, temperature, and what it was matched to.

        A matched row's temperature is found, not chosen, and is no part of it.
        """
        if self.matched is None:
            return self.steps, self.temperature, None
        return self.steps, _FOUND, json.dumps(self.matched.get("to"))

    def to_json(self) -> dict[str, Any]:
        """The mapping of a result file: metrics stand beside the other keys."""
        own = {name: getattr(self, name) for name in _ROW_KEYS}
        return {**own, **{name: m.to_json() for name, m in self.metrics.items()}, **self.facts}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """The row that a mapping holds; every mapping in it that has a "value" is a metric."""
        metrics, rest = _split(record)
        return cls(
            steps=_whole(rest.pop("steps", None), "steps"),
            calls=_optional(_whole, rest, "calls"),
            num_samples=_optional(_whole, rest, "num_samples"),
            seconds=_optional(_number, rest, "seconds"),
            seconds_per_sample=_optional(_number, rest, "seconds_per_sample"),
            temperature=_number(rest.pop("temperature", 1.0), "temperature"),
            flags=_words(rest.pop("flags", None) or [], "flags"),
            matched=_optional(_mapping, rest, "matched"),
            metrics=metrics,
            facts=rest,
        )


_FOUND = -1.0  # stands for a temperature that was found, not chosen
_ROW_KEYS = tuple(f.name for f in fields(Row) if f.name not in ("metrics", "facts"))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that one result file says of one model.

    model      name, folder, checkpoint_sha256, config, num_parameters
    sampler    jump, grid, temperature, top_k, top_p, length, start
    judge      name, dtype, and its scale: `real` and `shuffled` held-out text
    data       held_out, held_out_sha256, training, n_real
    rows       one per budget, and the matched ones
    real       the metrics of held-out text
    bound      the likelihood bound
    frontier   rows at other temperatures
    controls   the metrics of negative controls, by their names: text without sense that was built to please a metric
    alternatives   autoregressive models that write the same kind of text: rows whose facts hold a `name`
    alternative_frontier   the same models at other temperatures
    facts      anything else: dtype, device, threads, seed, num_samples, commit, versions, started, seconds
    """

    model: Mapping[str, Any]
    sampler: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    real: Mapping[str, Measured] = field(default_factory=dict)
    bound: Measured | None = None
    frontier: tuple[Row, ...] = ()
    controls: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    alternatives: tuple[Row, ...] = ()
    alternative_frontier: tuple[Row, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, rows in (("rows", self.rows), ("frontier", self.frontier)):
            keys = [row.key for row in rows]
            if double := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"{name} holds steps {double[0]} twice at one temperature; keep one")

    @property
    def name(self) -> str:
        """The model's name."""
        return str(self.model["name"])

    @property
    def plain(self) -> tuple[Row, ...]:
        """The rows whose temperature was not matched to anything, few steps first."""
        return tuple(sorted((row for row in self.rows if row.matched is None), key=lambda row: row.steps))

    @property
    def matched(self) -> tuple[Row, ...]:
        """The rows whose temperature was found so that their entropy equals another's, few steps first."""
        return tuple(sorted((row for row in self.rows if row.matched is not None), key=lambda row: row.steps))

    def row(self, steps: int) -> Row | None:
        """The plain row of a budget, if it was measured."""
        return next((row for row in self.plain if row.steps == steps), None)

    def with_row(self, row: Row) -> Evaluation:
        """This evaluation with one more row, or with a newer one in the place of the same."""
        return replace(self, rows=_put(self.rows, row))

    def with_frontier(self, row: Row) -> Evaluation:
        """This evaluation with one more row of the frontier, or with a newer one in the place of the same."""
        return replace(self, frontier=_put(self.frontier, row))

    @property
    def swept_alternatives(self) -> dict[str, Evaluation]:
        """The autoregressive models that were measured at several temperatures, each as a model of its own, by name."""
        found: dict[str, list[Row]] = {}
        for row in self.alternative_frontier:
            found.setdefault(str(row.facts.get("name")), []).append(row)
        base = {str(row.facts.get("name")): row for row in self.alternatives}
        return {
            name: Evaluation(
                model={"name": name},
                judge=self.judge,
                rows=(base[name],) if name in base else (),
                frontier=tuple(row for row in rows if name not in base or row.key != base[name].key),
            )
            for name, rows in found.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The mapping of a result file, without the values that JSON cannot hold."""
        record = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in ("model", "sampler", "judge", "data")},
            **self.facts,
            "rows": [row.to_json() for row in self.rows],
            "real": {name: m.to_json() for name, m in self.real.items()},
            "bound": None if self.bound is None else self.bound.to_json(),
            "frontier": [row.to_json() for row in self.frontier],
        }
        if self.alternatives:
            record["alternatives"] = [row.to_json() for row in self.alternatives]
        if self.alternative_frontier:
            record["alternative_frontier"] = [row.to_json() for row in self.alternative_frontier]
        if self.controls:
            record["controls"] = {
                who: {name: m.to_json() for name, m in found.items()} for who, found in self.controls.items()
            }
        return {name: _plain(value) for name, value in record.items()}

    @classmethod
    def from_json(cls, record: Any) -> Evaluation:
        """The evaluation that a mapping holds; unknown keys are facts, missing metrics are gaps."""
        rest = dict(_mapping(record, "the file"))
        _check_format(rest.pop("format", None), rest.pop("format_version", None))
        model = _mapping(rest.pop("model", None), "model")
        if not isinstance(model.get("name"), str) or not model["name"].strip():
            raise ValueError(f'the model\'s name is {model.get("name")!r}; it must be some text, {{"name": "FS-DFM"}}')
        bound = rest.pop("bound", None)
        return cls(
            model=model,
            sampler=_mapping(rest.pop("sampler", None) or {}, "sampler"),
            judge=_mapping(rest.pop("judge", None) or {}, "judge"),
            data=_mapping(rest.pop("data", None) or {}, "data"),
            rows=_rows(rest.pop("rows", None) or [], "rows"),
            real=_split(_mapping(rest.pop("real", None) or {}, "real"))[0],
            bound=None if bound is None else _within("bound", _measured, bound),
            frontier=_rows(rest.pop("frontier", None) or [], "frontier"),
            alternatives=_rows(rest.pop("alternatives", None) or [], "alternatives"),
            alternative_frontier=_rows(rest.pop("alternative_frontier", None) or [], "alternative_frontier"),
            controls={
                name: _within(f"controls.{name}", lambda each: _split(_mapping(each, "it"))[0], found)
                for name, found in _mapping(rest.pop("controls", None) or {}, "controls").items()
            },
            facts=rest,
        )


# --- files ------------------------------------------------------------------------------------------------------------


def save_evaluation(evaluation: Evaluation, file: Path) -> None:
    """Write a result file: at every moment it is whole."""
    write_json(file, evaluation.to_json(), allow_nan=False)


def load_evaluation(file: Path) -> Evaluation:
    """Read a result file; a ValueError says in one sentence what is wrong with it."""
    if file.exists() and not file.is_file():
        raise ValueError(f"cannot read {file}: it is not a plain file; give a file that `fsdfm evaluate` wrote")
    try:
        return Evaluation.from_json(read_json(file, _LARGEST_FILE))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; give a file that `fsdfm evaluate` wrote") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file} is not JSON ({error.msg}, line {error.lineno}); give a file that `fsdfm evaluate` wrote"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text; give a file that `fsdfm evaluate` wrote") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a result file: {error}") from error


# --- the parts of a record --------------------------------------------------------------------------------------------


def _check_format(name: Any, version: Any) -> None:
    if name != FORMAT:
        raise ValueError(f"its format is {name!r}; it must be {FORMAT!r}, which `fsdfm evaluate` writes")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"its format_version is {version!r}; this fsdfm reads {FORMAT_VERSION}: use the one it is from"
        )


def _put(rows: tuple[Row, ...], row: Row) -> tuple[Row, ...]:
    if row.key in (keys := [old.key for old in rows]):
        place = keys.index(row.key)
        return (*rows[:place], row, *rows[place + 1 :])
    return (*rows, row)


def _rows(records: Any, name: str) -> tuple[Row, ...]:
    if not isinstance(records, list):
        raise ValueError(f"{name} is {_shown(records)}; it must be a list of rows")
    return tuple(
        _within(f"{name}[{n}]", Row.from_json, _mapping(record, f"{name}[{n}]")) for n, record in enumerate(records)
    )


def _split(record: Mapping[str, Any]) -> tuple[dict[str, Measured], dict[str, Any]]:
    """The metrics of a record, and what else it holds."""
    metrics = {k: v for k, v in record.items() if isinstance(v, Mapping) and "value" in v}
    rest = {k: v for k, v in record.items() if k not in metrics}
    return {k: _within(k, Measured.from_json, v) for k, v in metrics.items()}, rest


def _measured(record: Any) -> Measured:
    if "value" not in _mapping(record, "it"):
        raise ValueError('it has no "value"')
    return Measured.from_json(record)


def _within(place: str, read: Callable[[Any], T], record: Any) -> T:
    """Read a part of a record; an error says where it stands."""
    try:
        return read(record)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _optional(read: Callable[[Any, str], T], record: dict[str, Any], name: str) -> T | None:
    value = record.pop(name, None)
    return None if value is None else read(value, name)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {_shown(value)}; it must be an object {{...}}")
    return value


def _words(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{name} is {_shown(value)}; it must be a list of texts")
    return tuple(value)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {_shown(value)}; it must be a whole number")
    return value


def _number(value: Any, name: str) -> float:
    if value is None:
        return _NAN
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    try:
        if not isinstance(value, bool) and isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name} is {_shown(value)}; it must be a number, null (not a number) or 'inf'")


def _band(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"band is {_shown(value)}; it must be [low, high]")
    return _number(value[0], "band's low"), _number(value[1], "band's high")


def _shown(value: Any) -> str:
    return "missing" if value is None else f"{value!r:.60}"


def _plain(value: Any) -> Any:
    """The value with nothing that JSON cannot hold: NaN is null, infinities are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
