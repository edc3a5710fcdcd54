"""Edits that make the code wrong, one at a time: does a test notice?

    python tools/mutants.py                 # every edit of tests/mutants.toml
    python tools/mutants.py flow/rule       # those of files whose name holds this

An edit is [file under src/fsdfm, old text, new text, tests]: the old text stands there once; tests are files or folders
under tests, and pytest's own options. Every edit is tried in a copy of the source, on its fast tests only. An edit that
no test notices is a survivor.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, LIST = ROOT / "src" / "fsdfm", ROOT / "tests" / "mutants.toml"
SECONDS = 900  # an edit that makes a test wait for ever is noticed, too
_NO_TESTS = 5  # pytest's code where nothing was run


def copied_source(place: Path, file: str, old: str, *, new: str) -> Path:
    """A source tree in which one text is another; the large files are links."""
    shutil.copytree(SOURCE, place / "src" / "fsdfm", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (place / "src" / "fsdfm" / "assets").symlink_to(SOURCE / "assets")
    (place / "recipes").symlink_to(ROOT / "recipes")
    path = place / "src" / "fsdfm" / file
    text = path.read_text("utf-8")
    if text.count(old) != 1:
        raise ValueError(f"{file} holds {old!r} {text.count(old)} times; mend its line in {LIST.name}")
    path.write_text(text.replace(old, new), "utf-8")
    return place / "src"


def verdict(edit: list[str]) -> tuple[str, str]:
    """caught, SURVIVED or BROKEN, and what the edit was."""
    file, old, new, tests = edit
    told = f"{file}: {old!r} -> {new!r}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = copied_source(Path(folder), file, old, new=new)
        except (OSError, ValueError) as error:
            return "BROKEN", str(error)
        paths = [str(ROOT / "tests" / word) if (ROOT / "tests" / word).exists() else word for word in tests.split()]
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "-m", "not slow", *paths]
        environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return "caught", told
    if done.returncode == _NO_TESTS:
        return "BROKEN", f"{told}: no test was run"
    return ("SURVIVED" if done.returncode == 0 else "caught"), told


def main(part: str = "") -> int:
    """Try the edits, several at once; 1 where one survives."""
    edits = [edit for edit in tomllib.loads(LIST.read_text("utf-8"))["mutants"] if part in edit[0]]
    counts = {"caught": 0, "SURVIVED": 0, "BROKEN": 0}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for word, told in pool.map(verdict, edits):
            counts[word] += 1
            if word != "caught":
                sys.stdout.write(f"{word}: {told}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{counts['caught']} of {len(edits)} edits are noticed by the fast tests\n")
    return int(counts["caught"] < len(edits))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
