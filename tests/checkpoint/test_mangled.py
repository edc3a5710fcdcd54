"""Files that are damaged or hostile load correctly or are refused in one sentence; no code runs, no memory grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("mangle.py")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is bounded by /proc here")
@pytest.mark.parametrize(("count", "seed"), [(60, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_mangled_files_give_one_clear_sentence_and_nothing_else(count: int, seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(count), str(seed), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["failures"] == []
    assert summary["canary"] == []
    assert summary["refused"] + summary["loaded"] == count
    assert summary["refused"] > count // 2
    assert summary["grown_mib"] < 64
