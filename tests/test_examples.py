import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


QUICK = ("add_a_rule.py",)


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.name, marks=() if file.name in QUICK else pytest.mark.slow) for file in EXAMPLES],
)
def test_examples_run(file, tmp_path):
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(file.read_text().splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    file = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
    book = nbformat.read(file, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells)  # no results are kept in it
    nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    shown = [output["data"] for cell in book.cells for output in cell.get("outputs", ()) if "data" in output]
    timelines = [data["text/html"] for data in shown if "text/html" in data]
    assert len(timelines) == 3
    assert all(html.count("<figure") == 1 and "<script" not in html for html in timelines)
