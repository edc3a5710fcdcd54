import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


QUICK = ("add_a_rule.py", "own_network.py")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.name, marks=() if file.name in QUICK else pytest.mark.slow) for file in EXAMPLES],
)
def test_examples_run(file, tmp_path):
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(file.read_text().splitlines()) <= 80
