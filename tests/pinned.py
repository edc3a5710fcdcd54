"""Whole computations held to the numbers that they gave: what a package computes stands in tests/pinned/<package>.json.

A case is a function that computes something, as much of it as can be seen from outside; it is named by what it is
called. Numbers are compared to a part in ten thousand of what stands beside them, so that another kind of CPU gives the
same; tokens, counts, words and sentences of refusal are compared exactly. Where a change of numbers is meant,

    FSDFM_PIN=1 pytest tests/flow/test_pinned.py

writes them anew, and the difference is there to be read. A case says *that* something changed; the tests beside it say
what is right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

PLACE = Path(__file__).with_suffix("")
_TOLERANCE = 1e-4
_NOTHING = 1e-6  # a difference of nearly equal numbers has other digits on another CPU
_FEW = 8


def said(ask: Callable[[], object]) -> object:
    """What a call gives, or the sentence with which it refuses."""
    try:
        return ask()
    except (ValueError, OSError, TypeError, IndexError, KeyError, RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def refused(ask: Callable[[], object]) -> object:
    """What a call gives, or how its refusal begins: what is allowed besides depends on what has been registered."""
    answer = said(ask)
    return answer.partition("; allowed")[0] if isinstance(answer, str) else answer


def chosen(package: str) -> dict[str, dict[str, Any]]:
    """Every number and word that somebody chose: constants of modules and classes, and the defaults of arguments."""
    found: dict[str, dict[str, Any]] = {}
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        module = importlib.import_module(info.name)
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == info.name}
        named = {name: value for name, value in vars(module).items() if name.isupper() and _is_plain(value)}
        for name, value in own.items():
            parts = vars(value) if inspect.isclass(value) else {"": value}
            named |= _attributes(value)
            for part, function in parts.items():
                function = getattr(function, "__func__", getattr(function, "__wrapped__", function))
                named |= _defaults(f"{name}.{part}".strip("."), function)
        found[info.name] = dict(sorted(named.items()))
    return found


def _attributes(value: Any) -> dict[str, Any]:
    """What a class says of all its objects, and which fields of a record are no part of what it is or shows."""
    if not inspect.isclass(value):
        return {}
    name = value.__name__
    plain = {key: each for key, each in vars(value).items() if not key.startswith(("__", "_is_")) and _is_plain(each)}
    own = {f"{name}.{key}": each for key, each in plain.items() if each is not None}  # None: what another module fills
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        off = [flag for flag in ("init", "repr", "compare") if not getattr(field, flag)]
        own |= {f"{name}.{field.name}": f"no {', '.join(off)}"} if off else {}
    return own


def _defaults(name: str, function: Any) -> dict[str, Any]:
    if not inspect.isfunction(function):
        return {}
    arguments = inspect.signature(function).parameters.values()
    return {f"{name}({each.name})": each.default for each in arguments if _is_plain(each.default)}


_ODD = (
    *(None, True, False, "", "x", "1", "none", (), [], {}, [1], (1, 2), {"a": 1}, math.nan, math.inf, -math.inf, 1j),
    *(-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1023, 1024, 1025, 4096, 4097, 65535, 65536),
    *(2**20, 2**20 + 1, 2**31, 2**63, 2**64 - 1, 2**64),
    *(-0.5, -1e-9, 1e-9, 0.001, 0.5, 0.99, 0.999999, 1 - 1e-12, 1.000001, 1.5, 2.5, 1e9),
)


def odd(package: str, *given: Any) -> dict[str, dict[str, str]]:
    """Which odd values are taken for the fields of a package's records, and which are refused: a letter for each.

    A record that cannot be made of nothing is changed as it is given.
    """
    found: dict[str, dict[str, str]] = {}
    root = importlib.import_module(package)
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    own = {v for m in modules for v in vars(m).values() if inspect.isclass(v) and v.__module__ == m.__name__}
    whole = [made for made in map(_made, own - {type(each) for each in given}) if made is not None]
    for record in (*whole, *given):
        names = [each.name for each in dataclasses.fields(record) if each.init]
        allowed = {name: taken(lambda v, r=record, n=name: _with(r, n, v)) for name in names}
        found[f"{type(record).__module__}.{type(record).__qualname__}"] = allowed
    return dict(sorted(found.items()))


def taken(make: Callable[[Any], object]) -> str:
    """Of every odd value + where it is taken, else the first letter of its refusal."""
    return "".join(_letter(lambda value=value: make(value)) for value in _ODD)


def taken_by_name(read: Callable[[Mapping[str, Any]], object], known: Mapping[str, Any]) -> dict[str, str]:
    """The same for every name that a reader asks of a mapping."""
    heard = _Heard(known)
    read(heard)
    return {name: taken(lambda v, n=name: summary(read({**known, n: v}))) for name in sorted(heard.asked)}


class _Heard(Mapping[str, Any]):
    """A mapping that notes what it is asked for."""

    def __init__(self, known: Mapping[str, Any]):
        self.known, self.asked = known, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return self.known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def _made(kind: Any) -> Any:
    """A record made of nothing, if it can be."""
    if not dataclasses.is_dataclass(kind) or inspect.isabstract(kind):
        return None
    try:
        return kind()
    except Exception:
        return None


def _with(record: Any, name: str, value: Any) -> object:
    return dataclasses.replace(record, **{name: value})


def _letter(ask: Callable[[], object]) -> str:
    try:
        ask()
    except Exception as error:
        return type(error).__name__[0]
    return "+"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def summary(value: Any) -> Any:
    """A value as JSON: small tensors whole, large ones by their norm and three directions, all with shape and dtype."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return _array(value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu())
    if isinstance(value, np.ndarray | np.generic):
        whole = np.asarray(value).astype(np.float64 if value.dtype.kind == "f" else np.int64)
        return _array(torch.as_tensor(whole), str(value.dtype))
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:16]
    if isinstance(value, torch.nn.Module):
        return summary(dict(value.named_parameters()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            "": type(value).__name__,
            **summary({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}),
        }
    if isinstance(value, Mapping):
        return {str(key): summary(each) for key, each in value.items()}
    if isinstance(value, tuple | list | set | frozenset | range | Iterator):
        return [summary(each) for each in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Path):
        return value.name
    return type(value).__name__ if callable(value) or type(value).__str__ is object.__str__ else str(value)


def _array(x: torch.Tensor, kind: str = "") -> Any:
    shape, flat = f"{list(x.shape)} {kind or str(x.dtype).removeprefix('torch.')}", x.flatten()
    if not x.is_floating_point():
        whole = flat.to(torch.int64)
        digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]
        return f"{shape} {whole.tolist() if len(flat) <= 2 * _FEW else digest}"
    flat = flat.double()
    odd, flat = " ".join(map(str, flat[~flat.isfinite()].tolist()[:_FEW])), torch.nan_to_num(flat, 0.0, 0.0, 0.0)
    place = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    shown = flat if len(flat) <= _FEW else torch.stack([flat @ torch.cos(place * step) for step in (0.0, 0.7, 2.1)])
    return [f"~{shape} {odd}".strip(), float(flat.norm()), *shown.tolist()]


def differences(found: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Where two summaries do not agree."""
    if isinstance(found, dict) and isinstance(kept, dict):
        for key in {**found, **kept}:
            if key not in found or key not in kept:
                yield f"{where}.{key} is {'new' if key in found else 'missing'}"
            else:
                yield from differences(found[key], kept[key], f"{where}.{key}")
    elif isinstance(found, list) and isinstance(kept, list) and len(found) == len(kept):
        size = max(found[1], kept[1]) if found and kept and _is_array(found) and _is_array(kept) else 0.0
        for place, (one, other) in enumerate(zip(found, kept, strict=True)):
            yield from (
                differences(one, other, f"{where}[{place}]")
                if not size or not place
                else _apart(one, other, size, f"{where}[{place}]")
            )
    elif isinstance(found, float) and isinstance(kept, float):
        yield from _apart(found, kept, max(abs(found), abs(kept)), where)
    elif found != kept or type(found) is not type(kept):
        yield f"{where}: {found!r}, was {kept!r}"


def _is_array(items: list[Any]) -> bool:
    return isinstance(items[0], str) and items[0].startswith("~")


def _apart(found: float, kept: float, size: float, where: str) -> Iterator[str]:
    if abs(found - kept) > _TOLERANCE * size + _NOTHING:
        yield f"{where}: {found}, was {kept}"


class Cases:
    """The cases of a package, by name.

    cases = Cases("flow")

    @cases
    def schedules() -> object: ...

    test_what_is_computed = cases.test()
    """

    def __init__(self, package: str):
        self.file = PLACE / f"{package}.json"
        self.known = dict[str, Callable[..., object]]()

    def __call__(self, case: Callable[..., object]) -> Callable[..., object]:
        """Note a case."""
        self.known[case.__name__] = case
        return case

    def test(self) -> Callable[..., None]:
        """One test per case; a case with an argument takes an empty folder."""
        import pytest

        kept = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}

        @pytest.mark.parametrize("name", self.known)
        def test(name: str, tmp_path: Path) -> None:
            case = self.known[name]
            found = summary(case(tmp_path) if inspect.signature(case).parameters else case())
            found = json.loads(json.dumps(found).replace(str(tmp_path), "FOLDER"))
            if os.environ.get("FSDFM_PIN"):
                self.write(name, found)
                return
            assert name in kept, f"{name} is not pinned; write it with FSDFM_PIN=1"
            wrong = list(differences(found, kept[name]))
            assert not wrong, "\n".join(wrong[:12])

        return test

    def write(self, name: str, found: Any) -> None:
        """Keep what a case gave; cases that are gone go."""
        kept = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        kept, tight = {**{k: v for k, v in kept.items() if k in self.known}, name: found}, (",", ":")
        lines = [f"{json.dumps(k)}: {json.dumps(_short(kept[k]), separators=tight)}" for k in sorted(kept)]
        self.file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _short(value: Any) -> Any:
    """Six digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value
