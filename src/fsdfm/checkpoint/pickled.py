"""Pickle programs, interpreted by a machine that cannot call, import or build anything of its own.

`pickle.load` runs whatever the file says. Here the opcodes are taken apart by the standard library's `pickletools` and
carried out by a machine that knows numbers, strings, lists and dicts, and for the rest asks its caller: a name that
the caller does not list is an error, and what a listed name means is the caller's function, never the file's. The
program's length and the number of its opcodes are bounded; the memo is a dict, so a huge index costs nothing.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Inert", "interpret"]

LONGEST_PROGRAM = 2**24
MOST_OPCODES = 10**6  # a checkpoint of 300 tensors with its optimiser has about 30,000

Call = Callable[[tuple[Any, ...]], Any]

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


@dataclass(frozen=True)
class Name:
    """A function or class that the program names; it is never looked up."""

    name: str


class Inert:
    """Stands for an object that nobody needs: whatever the program does to it has no effect."""


def interpret(program: bytes, calls: Mapping[str, Call], persistent: Call) -> Any:
    """The object that a pickle program describes.

    calls        what calling a name with a tuple of arguments gives; no other name may occur
    persistent   what a persistent id, a tuple, stands for
    """
    if len(program) > LONGEST_PROGRAM:
        raise ValueError(f"the pickle has {len(program)} bytes; allowed are up to {LONGEST_PROGRAM}")
    machine = _Machine(calls, persistent)
    try:
        for count, (name, argument) in enumerate(_opcodes(program)):
            if count >= MOST_OPCODES:
                raise ValueError(f"the pickle has more than {MOST_OPCODES} opcodes")
            machine.step(name, argument)
    except (IndexError, KeyError):  # an empty stack; a memo that was never written
        raise ValueError("the pickle is broken") from None
    if len(machine.stack) != 1:
        raise ValueError("the pickle is broken: it does not end with one object")
    return machine.stack[0]


def _opcodes(program: bytes) -> Iterator[tuple[str, Any]]:
    """The opcodes of a program and their arguments; what cannot be one is said without quoting the file."""
    opcodes = pickletools.genops(program)
    while True:
        try:
            opcode, argument, _ = next(opcodes)
        except StopIteration:
            return
        except ValueError as error:
            raise ValueError("the pickle is broken: it holds something that is no opcode") from error
        yield opcode.name, argument


class _Machine:
    """The stack and the memo of the pickle language."""

    def __init__(self, calls: Mapping[str, Call], persistent: Call):
        self.calls, self.persistent = calls, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.steps: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self.stack.append(_MARK),
            "POP": lambda _: self._drop(),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "MEMOIZE": lambda _: self._put(len(self.memo)),
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "TUPLE": lambda _: self.stack.append(tuple(self._marked())),
            "FROZENSET": lambda _: self.stack.append(self._marked()),
            "APPEND": lambda _: self._extend([self.stack.pop()]),
            "APPENDS": lambda _: self._extend(self._marked()),
            "ADDITEMS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._update(self._last(2)),
            "SETITEMS": lambda _: self._update(self._marked()),
            "GLOBAL": lambda text: self._name(*text.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._last(2)),
            "REDUCE": lambda _: self._call(),
            "NEWOBJ": lambda _: self._call(),
            "BUILD": lambda _: self._drop(),  # attributes: nothing here has any
            "BINPERSID": lambda _: self.stack.append(self.persistent(_tuple(self.stack.pop()))),
        }

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _VALUES:
            self.stack.append(argument)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._last(_TUPLES[name])))
        elif name in self.steps:
            self.steps[name](argument)
        else:
            raise ValueError(f"the pickle uses the opcode {name}, which no weights need")

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def _drop(self) -> None:
        self.stack.pop()

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _marked(self) -> list[Any]:
        """Everything above the last mark, which goes too."""
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Inert):
            raise ValueError("the pickle is broken: it appends to something that is no list")

    def _update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if len(values) % 2 or not isinstance(target, dict | Inert):
            raise ValueError("the pickle is broken: it sets items of something that is no dict")
        if isinstance(target, dict):
            # Other keys need a hash, which nested tuples make exponentially slow; weights have names.
            pairs = zip(values[::2], values[1::2], strict=True)
            target.update((key, value) for key, value in pairs if isinstance(key, str | int))

    def _name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "?"
        if full not in self.calls:
            raise ValueError(f"the pickle names {full[:80]!r}, which no weights need, and which was not looked at")
        self.stack.append(Name(full))

    def _call(self) -> None:
        function, arguments = self._last(2)
        if not isinstance(function, Name):
            raise ValueError("the pickle is broken: it calls something that is no function")
        self.stack.append(self.calls[function.name](_tuple(arguments)))


def _tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise ValueError("the pickle is broken: arguments are no tuple")
    return value
