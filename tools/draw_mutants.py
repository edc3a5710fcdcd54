"""Random edits that make the code wrong, drawn by a seed from the source alone, as lines for tests/mutants.toml.

    python tools/draw_mutants.py --seed 3 --num 130
    python tools/draw_mutants.py --seed 3 --num 130 --covered .coverage    tests that run the line before all others

The second needs what `COVERAGE_FILE=.coverage pytest --cov=src/fsdfm --cov-context=test tests/*/test_pinned.py` notes.
A line of the source is drawn, then one of the faults that can be put into it: another sign or operator, operands
swapped or one left out, a bound moved by one, a condition turned round, a call or an argument left out, a number
changed, a statement forgotten. Packages have fixed shares. No test is looked at. Messages, annotations, progress bars
and devices are left alone; what cannot be imported, or changes nothing, is for the reader to take out.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS, MOST = ROOT / "src" / "fsdfm", ROOT / "tests", 8
SHARES = {
    **{"flow": 24, "learn": 21, "measure": 13, "generate": 12, "model": 9},
    **{"data": 7, "peers": 5, "checkpoint": 4, "serve": 3, "run": 2},
}
_SIGNS: dict[type[ast.operator], str] = {
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"},
    **{ast.Mod: "//", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "*"},
}
_COMPARED: dict[type[ast.cmpop], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
_OTHER = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "sum": "mean", "mean": "sum", "sin": "cos"},
    **{"cos": "sin", "floor": "ceil", "ceil": "floor", "exp": "expm1", "expm1": "exp", "log": "log1p"},
    **{"log1p": "log", "argmax": "argmin", "argmin": "argmax", "zeros": "ones", "ones": "zeros", "softmax": "sigmoid"},
    **{"zeros_like": "ones_like", "ones_like": "zeros_like", "minimum": "maximum", "maximum": "minimum"},
    **{"sorted": "list", "abs": "float", "round": "int", "isfinite": "isnan", "extend": "append"},
}
_FORGOTTEN = {
    *("clamp", "clamp_", "clip", "clone", "copy", "detach", "abs", "exp", "log", "sqrt", "flip", "cumsum", "strip"),
    *("masked_fill", "transpose", "unsqueeze", "squeeze", "flatten", "expand", "lower", "resolve", "double", "square"),
}
_SAYS = {"warn", "say", "print", "write_line", "update", "advance", "log", "note", "print_exc", "describe", "escape"}
_DEVICES = {"device", "non_blocking", "pin_memory", "daemon", "name", "console", "help", "description", "stacklevel"}
_DEVICES |= {"encoding", "default_factory", "repr", "generic", "strict"}


@dataclass(frozen=True)
class Fault:
    """Text from `start` to `end` of a file, by character, becomes `new`."""

    line: int
    start: int
    end: int
    new: str


class _Finder(ast.NodeVisitor):
    """All faults that can be put into one file."""

    def __init__(self, text: str):
        self.text, self.found, self.inner = text, list[Fault](), 0
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines(keepends=True)

    def place(self, line: int, column: int) -> int:
        """A place as characters; ast counts columns in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends, with the brackets around it left out."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)

    def words(self, node: ast.expr | ast.stmt) -> str:
        """A node's text."""
        start, end = self.span(node)
        return self.text[start:end]

    def add(self, node: ast.expr | ast.stmt, new: str) -> None:
        """Note that a node may become other text."""
        start, end = self.span(node)
        if new != self.text[start:end]:
            self.found.append(Fault(node.lineno, start, end, new))

    # -- what is left alone --

    def visit(self, node: ast.AST) -> None:
        """Messages, imports and assertions are passed over."""
        if not isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """No annotations, no decorators."""
        if node.name not in ("__repr__", "__str__", "describe"):
            for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
                self.visit(default)
            self.inner += 1
            for statement in node.body:
                self.visit(statement)
            self.inner -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """The same."""
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its body."""
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """No annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Not the names of a module."""
        if not any(isinstance(t, ast.Name) and t.id in ("__all__", "T") for t in node.targets):
            self.generic_visit(node)

    # -- faults --

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call may be forgotten; a docstring is none."""
        if isinstance(node.value, ast.Constant):
            return
        made = isinstance(node.value, ast.Call) and self.words(node.value).startswith("super()")
        if isinstance(node.value, ast.Call) and _name(node.value.func) not in _SAYS and self.inner and not made:
            self.add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Another operator, or none."""
        target, value = self.words(node.target), self.words(node.value)
        self.add(node, f"{target} {_SIGNS.get(type(node.op), '-')}= {value}")
        self.add(node, f"{target} = {value}")
        self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator, operands swapped, one left out."""
        left, right = self.words(node.left), self.words(node.right)
        start, end = self.span(node.left)[1], self.span(node.right)[0]
        between = self.text[start:end]
        if (sign := _SIGNS.get(type(node.op))) and self.inner and not any(map(_is_text, (node.left, node.right))):
            old = _TEXT[type(node.op)]
            if between.count(old) == 1:
                self.found.append(Fault(node.lineno, start, end, between.replace(old, sign)))
            if isinstance(node.op, ast.Sub | ast.Div | ast.FloorDiv | ast.Pow | ast.Mod):
                self.add(node, f"({right}) {old} ({left})")
            self.add(node, f"({left})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """A bound moved, or turned round."""
        if len(node.ops) == 1 and (new := _COMPARED.get(type(node.ops[0]))):
            self.add(node, f"{self.words(node.left)} {new} {self.words(node.comparators[0])}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """The other word, or one condition left out."""
        word = " or " if isinstance(node.op, ast.And) else " and "
        same = " and " if isinstance(node.op, ast.And) else " or "
        parts = [f"({self.words(value)})" for value in node.values]
        self.add(node, f"({word.join(parts)})")
        for left_out in range(len(parts)):
            self.add(node, f"({same.join(part for place, part in enumerate(parts) if place != left_out)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without it."""
        self.add(node, self.words(node.operand))
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The other way round."""
        self.add(node, f"{self.words(node.orelse)} if {self.words(node.test)} else {self.words(node.body)}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Never, or turned round."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.add(node.test, f"not ({self.words(node.test)})")
            self.add(node.test, "False")
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """The strictness of a zip of equals changes nothing."""
        if node.arg not in _DEVICES:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Another number."""
        if isinstance(node.value, bool):
            self.add(node, str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, str(node.value + 1))
            if node.value:
                self.add(node, str(node.value - 1))
        elif isinstance(node.value, float):
            self.add(node, repr(node.value * 2 if node.value else 0.5))

    def visit_Slice(self, node: ast.Slice) -> None:
        """A bound off by one."""
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                self.add(bound, f"{self.words(bound)} + 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A call or an argument forgotten, arguments swapped, the opposite function."""
        name = _name(node.func)
        if name in _SAYS - {"update", "log"} or name in (
            "getLogger",
            "TypeVar",
            "NewType",
            "cast",
            "Option",
            "Argument",
        ):
            return
        self._function(node, name)
        self._arguments(node, name)
        self.generic_visit(node)

    def _function(self, node: ast.Call, name: str) -> None:
        if name in _OTHER:
            end = self.span(node.func)[1]
            self.found.append(Fault(node.lineno, end - len(name), end, _OTHER[name]))
        if isinstance(node.func, ast.Attribute) and name in _FORGOTTEN:
            value = self.words(node.func.value)
            whole = value in ("torch", "np", "math", "F") and node.args
            self.add(node, f"({self.words(node.args[0])})" if whole else value)

    def _arguments(self, node: ast.Call, name: str) -> None:
        if name == "where" and len(node.args) == 3:
            a, b, c = (self.words(argument) for argument in node.args)
            self.add(node, f"{self.words(node.func)}({a}, {c}, {b})")
        elif len(node.args) >= 2 and all(isinstance(a, ast.Name | ast.Attribute) for a in node.args[:2]):
            parts = [self.words(a) for a in (node.args[1], node.args[0], *node.args[2:])]
            parts += [self.words(k.value) if k.arg is None else f"{k.arg}={self.words(k.value)}" for k in node.keywords]
            if all(k.arg for k in node.keywords):
                self.add(node, f"{self.words(node.func)}({', '.join(parts)})")
        for left_out in node.keywords:
            if left_out.arg is None or left_out.arg in _DEVICES:
                continue
            kept = [self.words(a) for a in node.args]
            kept += [
                f"**{self.words(k.value)}" if k.arg is None else f"{k.arg}={self.words(k.value)}"
                for k in node.keywords
                if k is not left_out
            ]
            self.add(node, f"{self.words(node.func)}({', '.join(kept)})")


_TEXT: dict[type[ast.operator], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    **{ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@"},
}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def faults(path: Path) -> tuple[str, dict[int, list[Fault]]]:
    """A file's text and its faults by line."""
    text = path.read_text("utf-8")
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    lines: dict[int, list[Fault]] = {}
    for fault in finder.found:
        lines.setdefault(fault.line, []).append(fault)
    return text, lines


def edit(text: str, fault: Fault) -> tuple[str, str] | None:
    """The lines around a fault, as they are and with it, as few as stand in the file once; None: it changes nothing."""
    first, last = text.rfind("\n", 0, fault.start) + 1, text.find("\n", fault.end)
    mutated = text[: fault.start] + fault.new + text[fault.end :]
    try:
        if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text)):
            return None
    except SyntaxError:
        return None
    while text.count(text[first:last]) > 1 and first:
        first = text.rfind("\n", 0, first - 1) + 1
    added = len(mutated) - len(text)
    old, new = text[first:last], mutated[first : last + added]
    while old.startswith(" ") and new.startswith(" ") and text.count(old[1:]) == 1:
        old, new = old[1:], new[1:]
    return old, new


def draw(seed: int, num: int) -> Iterator[tuple[str, str, str]]:
    """(file, old, new), `num` of them, by a package's share and then by a line of it."""
    chance = random.Random(seed)
    places = {
        package: [
            (path, text, line, found)
            for path in sorted((SOURCE / package).rglob("*.py"))
            for text, lines in [faults(path)]
            for line, found in sorted(lines.items())
        ]
        for package in SHARES
    }
    seen, count = set[tuple[Path, int]](), 0
    while count < num:
        package = chance.choices(list(SHARES), list(SHARES.values()))[0]
        path, text, line, found = chance.choice(places[package])
        made = edit(text, chance.choice(found))
        if made is not None and (path, line) not in seen:
            seen.add((path, line))
            count += 1
            yield path.relative_to(SOURCE).as_posix(), *made


def covered(file: str, old: str, data: CoverageData) -> str:
    """The tests of a run under coverage that ran a text of a file: its own package's first, of these the smallest."""
    path = SOURCE / file
    text = path.read_text("utf-8")
    first = text[: text.index(old)].count("\n") + 1
    ran = data.contexts_by_lineno(str(path))
    tests = {name for line in range(first, first + old.count("\n") + 1) for name in ran.get(line, ()) if "|" in name}
    names = {test.partition("|")[0].removeprefix("tests/"): _size(test, data) for test in sorted(tests)}
    return " ".join(sorted(names, key=lambda name: (not name.startswith(file.partition("/")[0]), names[name], name)))


@functools.cache
def _size(test: str, data: CoverageData) -> int:
    """How many lines a test runs: what runs few of them ends soon, and is near to them."""
    data.set_query_context(test)
    lines = sum(len(data.lines(file) or ()) for file in data.measured_files())
    data.set_query_contexts(None)
    return lines


def related(file: str) -> str:
    """The fast tests that may notice an edit of a file: what its package has pinned, its own, those that import it."""
    package, _, module = file.removesuffix(".py").rpartition("/")
    folder, name = TESTS / package, f"{package}/{module}".replace("/", ".")
    pinned = TESTS / package.partition("/")[0] / "test_pinned.py"
    ranked: dict[Path, int] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        near = path.parent in (folder, folder.parent) and path.parent != TESTS
        if path == pinned:
            ranked[path] = 0
        elif path == folder / f"test_{module}.py":
            ranked[path] = 1
        elif name in _imported(path):
            ranked[path] = 2 if near else 3
        elif near and path.parent == folder:
            ranked[path] = 4
    chosen = sorted(ranked, key=lambda path: (ranked[path], path.stat().st_size))[:MOST]
    return " ".join(path.relative_to(TESTS).as_posix() for path in chosen)


@functools.cache
def _imported(test: Path) -> frozenset[str]:
    """The modules under fsdfm whose names a test file imports, where they are defined."""
    found = set[str]()
    for node in ast.walk(ast.parse(test.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdfm."):
            where = str(node.module).removeprefix("fsdfm.")
            found |= {_defined(where, each.name) for each in node.names} | {where}
    return frozenset(found)


@functools.cache
def _defined(package: str, name: str) -> str:
    """Where a package takes a name from."""
    init = SOURCE / package.replace(".", "/") / "__init__.py"
    for node in ast.walk(ast.parse(init.read_text("utf-8"))) if init.exists() else ():
        if isinstance(node, ast.ImportFrom) and any(each.name == name for each in node.names):
            return str(node.module).removeprefix("fsdfm.")
    return package


def main() -> None:
    """Write the edits, a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=[], help="these packages alone")
    parser.add_argument("--covered", type=Path, help="a data file of coverage with a context per test")
    asked = parser.parse_args()
    for package in set(SHARES) - set(asked.only or SHARES):
        del SHARES[package]
    data = CoverageData(str(asked.covered)) if asked.covered else None
    if data is not None:
        data.read()
    for file, old, new in draw(asked.seed, asked.num):
        tests = related(file)
        if data is not None and (near := covered(file, old, data)):
            tests = f"{near}\n{tests}"
        sys.stdout.write(json.dumps([file, old, new, tests], ensure_ascii=False) + ",\n")


if __name__ == "__main__":
    main()
