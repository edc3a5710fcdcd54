"""Edits that make the code wrong, one at a time: does a fast test notice?

    python tools/mutants.py                         every edit of tests/mutants.toml
    python tools/mutants.py flow/rule serve         those of files whose name holds one of these
    python tools/mutants.py --jobs 2 --again        two at a time; also those whose verdict is known

An edit is [file under src/fsdfm, old text, new text, tests]: the old text stands there once; tests are files or folders
under tests, and pytest's own options; a line each where some are to be run before others. It is tried on its fast
tests, to the first failure, in a process that is forked from one that has imported everything: an edit within functions
replaces their code there, another one is imported from a copy of the source. The test that failed, or those that did
not end, must pass without the edit, else they would say nothing. Verdicts are kept (.mutants/results.jsonl) and hold as
long as the edit, its file and its tests are the same: a run that was stopped resumes. The tree itself is never written
to.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import hashlib
import importlib
import inspect
import json
import math
import os
import pkgutil
import py_compile
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS, KEPT = ROOT / "src" / "fsdfm", ROOT / "tests", ROOT / ".mutants" / "results.jsonl"
_ONLY = (
    "-o",
    "addopts=--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "--assert=plain",
    "-q",
    "-x",
    "-m",
    "not slow",
)
_SAID = {0: "passed", 5: "nothing"}  # by pytest's exit code; 5: no test was run
_VERDICT = {"passed": "SURVIVED", "failed": "caught", "timeout": "timeout"}
_TOGETHER = 25  # tests of one process, where no edit is
_NOTICED = ("caught", "timeout")  # an edit that makes a test wait for ever is noticed, too


@dataclass(frozen=True)
class Edit:
    """One edit; without a file, tests alone, a line each."""

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"

    def changes(self) -> bool:
        """Whether it changes anything; else it is tests alone."""
        return self.old != self.new

    def runs(self) -> list[list[str]]:
        """What pytest is told, run after run: paths that exist are taken under tests."""
        if not self.file:
            return [["--maxfail=0", *self.tests.splitlines()]]
        return [[_under_tests(word) for word in shlex.split(line)] for line in self.tests.splitlines()]

    def key(self) -> str:
        """Changes with the edit, its file and its tests."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode())
        paths = [SOURCE / self.file] if self.file else []
        for path in (Path(word.partition("::")[0]) for words in self.runs() for word in words):
            paths += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
        for path in paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:24]


def _under_tests(word: str) -> str:
    file, mark, test = word.partition("::")
    return f"{TESTS / file}{mark}{test}" if (TESTS / file).exists() else word


@dataclass
class Copy:
    """A source tree in which one text at a time is another; the large files are links."""

    place: Path
    edit: Edit | None = None
    process: int = 0
    until: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        shutil.copytree(SOURCE, self.place / "src/fsdfm", ignore=shutil.ignore_patterns("assets", "__pycache__"))
        checked = py_compile.PycInvalidationMode.CHECKED_HASH  # an edited file is seen to be another, whatever its time
        compileall.compile_dir(self.place / "src", quiet=2, invalidation_mode=checked)
        (self.place / "src/fsdfm/assets").symlink_to(SOURCE / "assets")
        (self.place / "recipes").symlink_to(ROOT / "recipes")

    @property
    def passed(self) -> Path:
        """The tests that passed, a line each."""
        return self.place / "passed.txt"

    @property
    def told(self) -> Path:
        """What the tests print, and behind it the first that failed."""
        return self.place / "told.txt"

    def start(self, edit: Edit, seconds: float) -> None:
        """Make the edit and start its tests."""
        if edit.file:
            text = (SOURCE / edit.file).read_text("utf-8")
            if text.count(edit.old) != 1:
                raise ValueError(f"{edit.file} holds {edit.old!r} {text.count(edit.old)} times; mend its line")
            (self.place / "src/fsdfm" / edit.file).write_text(text.replace(edit.old, edit.new), "utf-8")
        self.edit, self.started = edit, time.monotonic()
        self.until = self.started + seconds
        self.passed.unlink(missing_ok=True)
        self.process = os.fork()
        if self.process == 0:
            _run_tests(self, edit)

    def poll(self) -> tuple[str, str] | None:
        """What the tests say and why, once they have ended; None before."""
        assert self.edit is not None
        ended, status = os.waitpid(self.process, os.WNOHANG)
        late = not ended and time.monotonic() > self.until
        if not ended and not late:
            return None
        self.end()
        if self.edit.file:
            shutil.copy2(SOURCE / self.edit.file, self.place / "src/fsdfm" / self.edit.file)
        self.edit = None
        if late:
            return "timeout", "its tests did not end"
        last = (self.told.read_text("utf-8", "replace").strip().splitlines() or [""])[-1]
        return _SAID.get(os.waitstatus_to_exitcode(status), "failed"), last

    def end(self) -> None:
        """End the tests and whatever they started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.process, 0)
        self.process = 0


class _Witness:
    """Hears which test fails first, and which pass."""

    def __init__(self) -> None:
        self.failed, self.passed = "", dict[str, bool]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test, or what it needs, has ended."""
        self.passed[report.nodeid] = report.passed and self.passed.get(report.nodeid, True)
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """A file was read."""
        if report.failed:
            self.pytest_runtest_logreport(report)


def _run_tests(copy: Copy, edit: Edit) -> None:
    """In a forked process: pytest on this source; does not return."""
    code, source = 1, copy.place / "src"
    try:
        os.setsid()  # so that it and all it starts are ended together
        out = os.open(copy.told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(ROOT)
        os.environ |= {"PYTHONPATH": f"{source}{os.pathsep}{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True  # an edit of the same length in the same second would be read from the old one
        sys.path[:0] = [str(source), str(TESTS)]
        if edit.file and not _replace_code(edit):
            _forget(SOURCE, TESTS)  # and import it anew, from the copy
        import pytest

        witness = _Witness()
        for words in edit.runs():
            code = int(pytest.main([*_ONLY, *words], plugins=[witness]))
            if code not in _SAID:
                break
        copy.passed.write_text("".join(f"{test}\n" for test, passed in witness.passed.items() if passed), "utf-8")
        sys.stdout.write(f"\n{witness.failed}\n" if witness.failed else "")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _replace_code(edit: Edit) -> bool:
    """Give the functions of this process the code of an edit; False: it changes more than what functions do."""
    path = SOURCE / edit.file
    text = path.read_text("utf-8")
    if "numba" in text:  # which compiles a file and keeps that
        return False
    try:
        old, new = (compile(each, str(path), "exec") for each in (text, text.replace(edit.old, edit.new)))
        changed = {_key(before): (after, outermost) for before, after, outermost in _changed(old, new)}
    except (SyntaxError, LookupError):
        return False
    found = [each for each in gc.get_objects() if type(each) is FunctionType and _key(each.__code__) in changed]
    here = {_key(each.__code__): len(each.__code__.co_freevars) for each in found}
    if not changed or any(key not in here and outermost for key, (_, outermost) in changed.items()):
        return False
    if any(len(changed[key][0].co_freevars) != free for key, free in here.items()):
        return False
    for function in found:
        function.__code__ = changed[_key(function.__code__)][0]
    return True


def _changed(old: CodeType, new: CodeType, *, outermost: bool = True) -> Iterator[tuple[CodeType, CodeType, bool]]:
    """Functions whose code is another, what it becomes, and whether they stand in no function themselves."""
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
    is_function, same = bool(old.co_flags & inspect.CO_OPTIMIZED), _own(old) == _own(new)
    if not same and not is_function:
        raise LookupError
    below = [
        each
        for before, after in (zip(*inner, strict=True) if len(inner[0]) == len(inner[1]) else ())
        for each in _changed(before, after, outermost=outermost and not is_function)
    ]
    if is_function and (below or not same):
        yield old, new, outermost
    yield from below


def _own(code: CodeType) -> tuple[object, ...]:
    """What a piece of code does, without its lines and without what functions within it do."""
    values = [repr(each) if not isinstance(each, CodeType) else each.co_name for each in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, values


def _key(code: CodeType) -> tuple[object, ...]:
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code, code.co_names


def _forget(*places: Path) -> None:
    """Import what is in these folders anew."""
    for name, module in list(sys.modules.items()):
        if any(str(getattr(module, "__file__", None)).startswith(f"{place}{os.sep}") for place in places):
            del sys.modules[name]


@dataclass
class Verdicts:
    """What tests said, by the key of the edit, in memory and in a file."""

    file: Path
    known: dict[str, tuple[str, str]] = field(default_factory=dict)

    def read(self) -> None:
        """Take what earlier runs found; half a line is the end of one that was killed."""
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                record = json.loads(line)
                self.known[record["key"]] = (record["said"], record["why"])

    def add(self, edit: Edit, found: tuple[str, str], seconds: float) -> None:
        """Note what the tests of an edit said."""
        key = edit.key()
        self.known[key] = found
        line = {"key": key, "said": found[0], "why": found[1], "seconds": round(seconds, 1), **asdict(edit)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def witness(self, edit: Edit) -> Edit | None:
        """What is to be run without the edit: the test that failed because of it, or all those that did not end."""
        said, why = self.known.get(edit.key(), ("", ""))
        if not edit.changes() or said not in ("failed", "timeout"):
            return None
        return Edit("", "", "", why) if said == "failed" else replace(edit, new=edit.old)

    def of(self, edit: Edit) -> tuple[str, str] | None:
        """caught, timeout, SURVIVED or BROKEN, and why; None: not known yet."""
        if (found := self.known.get(edit.key())) is None:
            return None
        if (witness := self.witness(edit)) is not None and self.known.get(witness.key(), found)[0] != "passed":
            return "BROKEN", f"without the edit, too: {found[1]}"
        return _VERDICT.get(found[0], "BROKEN"), found[1]


def try_all(
    edits: Sequence[Edit], verdicts: Verdicts, copies: Sequence[Copy], *, seconds: float, until: float = math.inf
) -> None:
    """Run what is not known yet: the tests with each edit begun before `until`, and those that failed without it."""
    untried = [edit for edit in edits if edit.key() not in verdicts.known]
    _run_each(untried, verdicts, copies, seconds=seconds, until=until)
    _run_together(_witnesses(edits, verdicts), verdicts, copies[0], seconds=seconds)
    _run_each(_witnesses(edits, verdicts), verdicts, copies, seconds=seconds)


def _witnesses(edits: Sequence[Edit], verdicts: Verdicts) -> list[Edit]:
    """What is to be run without an edit and was not yet."""
    found = {w.key(): w for edit in edits if (w := verdicts.witness(edit)) is not None}
    return [witness for key, witness in found.items() if key not in verdicts.known]


def _run_together(alone: Sequence[Edit], verdicts: Verdicts, copy: Copy, *, seconds: float) -> None:
    """Run single tests without an edit, many in one process; only that one passed is believed."""
    alone = [edit for edit in alone if "::" in edit.tests]
    for start in range(0, len(alone), _TOGETHER):
        group = alone[start : start + _TOGETHER]
        copy.start(Edit("", "", "", "\n".join(edit.tests for edit in group)), seconds)
        while copy.poll() is None:
            time.sleep(0.05)
        passed = set(copy.passed.read_text("utf-8").splitlines()) if copy.passed.exists() else set()
        for edit in (edit for edit in group if edit.tests in passed):
            verdicts.add(edit, ("passed", "with others"), time.monotonic() - copy.started)
        sys.stdout.write(f"without edits: {len(passed)} of {len(group)} passed\n")


def _run_each(
    edits: Sequence[Edit], verdicts: Verdicts, copies: Sequence[Copy], *, seconds: float, until: float = math.inf
) -> None:
    """Run the tests of every edit, one edit in a copy."""
    waiting = list(edits)
    while waiting or any(copy.edit for copy in copies):
        waiting = waiting if time.monotonic() < until else []
        for copy in copies:
            if copy.edit is not None:
                edit, found = copy.edit, copy.poll()
                if found is not None:
                    verdicts.add(edit, found, time.monotonic() - copy.started)
                    _show(verdicts, edit, len(waiting))
            if copy.edit is None and waiting:
                _begin(copy, waiting.pop(0), verdicts, seconds=seconds)
        time.sleep(0.05)


def _begin(copy: Copy, edit: Edit, verdicts: Verdicts, *, seconds: float) -> None:
    try:
        copy.start(edit, seconds)
    except (OSError, ValueError) as error:
        verdicts.known[edit.key()] = ("broken", str(error))


def _show(verdicts: Verdicts, edit: Edit, left: int) -> None:
    said, why = verdicts.known[edit.key()]
    sys.stdout.write(f"{left:4d} left  {said:8s} {edit if edit.changes() else 'alone'}  {why}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _copies(count: int) -> Iterator[list[Copy]]:
    """Source trees; at the end nothing of them is left, nor of what runs in them."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies = [Copy(Path(place) / str(number)) for number in range(count)]
        try:
            yield copies
        finally:
            for copy in copies:
                copy.end()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help="only files whose name holds one of these")
    parser.add_argument("--list", type=Path, default=TESTS / "mutants.toml", help="the edits")
    parser.add_argument("--results", type=Path, default=KEPT, help="where verdicts are kept")
    parser.add_argument("--jobs", type=int, default=1, help="edits at a time")
    parser.add_argument("--seconds", type=float, default=300, help="for one edit's tests")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no edit is begun later; the next run resumes")
    parser.add_argument("--again", action="store_true", help="also edits whose verdict is known")
    return parser.parse_args()


def _import_once() -> None:
    """Import what tests need and what takes seconds: forked processes have it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(SOURCE.parent))
    modules = [each.name for each in pkgutil.walk_packages([str(SOURCE)], "fsdfm.") if "__" not in each.name]
    for name in ("pytest", "hypothesis.strategies", "scipy.stats", "typer.testing", "PIL.Image", *modules):
        with contextlib.suppress(ImportError):  # an optional package is missing: its tests are skipped
            importlib.import_module(name)
    sys.path.remove(str(SOURCE.parent))


def main() -> int:
    """Try the edits; 1 where one is not noticed."""
    asked = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends with us
    edits = [Edit(*line) for line in tomllib.loads(asked.list.read_text("utf-8"))["mutants"]]
    edits = [edit for edit in edits if not asked.parts or any(part in edit.file for part in asked.parts)]
    verdicts = Verdicts(asked.results)
    if not asked.again:
        verdicts.read()
    _import_once()
    with _copies(asked.jobs) as copies:
        until = time.monotonic() + 60 * asked.minutes
        try_all(edits, verdicts, copies, seconds=asked.seconds, until=until)
    found = {edit: verdicts.of(edit) or ("UNTRIED", "its tests were not run") for edit in edits}
    for edit, (verdict, why) in found.items():
        if verdict not in _NOTICED:
            sys.stdout.write(f"{verdict}: {edit}\n    {why}\n")
    noticed = sum(verdict in _NOTICED for verdict, _ in found.values())
    sys.stdout.write(f"{noticed} of {len(edits)} edits are noticed by the fast tests\n")
    return int(noticed < len(edits))


if __name__ == "__main__":
    sys.exit(main())
