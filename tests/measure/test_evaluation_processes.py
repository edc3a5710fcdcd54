"""The same evaluation by one, two and three real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fsdfm.checkpoint import save_model
from fsdfm.measure.evaluation import EvaluationRequest
from fsdfm.measure.results import load_evaluation
from tiny_models import random_bundle, save_judges
from together import evaluate_quietly, refuse_evaluation, together

pytestmark = pytest.mark.slow
STORIES = "<|endoftext|>".join(f"The {k} cats sat on {k * k} mats, and then they slept. " for k in range(80))
OF_THIS_RUN = ("seconds", "started", "processes", "threads", "commit")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, two judges, text, and what one process measures with the first judge: one.json, one.jsonl."""
    folder = tmp_path_factory.mktemp("evaluate-together")
    save_model(folder / "tiny", random_bundle(length=24, bos_id=3))
    save_judges(folder)
    (folder / "held.txt").write_text(STORIES)
    evaluate_quietly(asked(folder, "one"))
    return folder


def asked(folder, name, **changes):
    """Everything that can be asked for, of 35 samples: no number of processes has equal shares of them."""
    request = EvaluationRequest(
        model=str(folder / "tiny"),
        judge=str(folder / "judge"),
        held_out=str(folder / "held.txt"),
        training=(str(folder / "held.txt"),),
        steps="2",
        num=35,
        matched=("4.5",),
        frontier="0.7",
        json=folder / f"{name}.json",
        samples=folder / f"{name}.jsonl",
        batch_size=4,
        threads=1,
    )
    return replace(request, **changes)


def other_judge(folder, name):
    file = folder / f"{name}.json"
    return EvaluationRequest(from_samples=folder / "one.jsonl", judge=str(folder / "other"), json=file, threads=1)


def without_times(record):
    if isinstance(record, dict):
        return {key: without_times(value) for key, value in record.items() if not key.startswith(OF_THIS_RUN)}
    return [without_times(value) for value in record] if isinstance(record, list) else record


def numbers(file):
    """All that a result file says of the samples, to the last digit."""
    return without_times(json.loads(file.read_text()))


def samples(file):
    return [without_times(json.loads(line)) for line in file.read_text().splitlines()]


def half_done(folder, name):
    """What one process had left when it was stopped in its second row, the matched one."""
    record = json.loads((folder / "one.json").read_text())
    record |= {"rows": record["rows"][:1], "frontier": []}
    (folder / f"{name}.json").write_text(json.dumps(record))
    lines = (folder / "one.jsonl").read_text().splitlines(keepends=True)
    second = next(k for k, line in enumerate(lines) if line.startswith('{"kind": "row"')) + 1
    (folder / f"{name}.jsonl").write_text("".join(lines[: second + 10]) + lines[second + 10][:40])
    return asked(folder, name)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_change_no_number(files, count):
    name = f"by-{count}"
    [spoke] = together(count, evaluate_quietly, (asked(files, name),))
    assert spoke.count("2 steps at temperature 1,") == 1
    assert numbers(files / f"{name}.json") == numbers(files / "one.json")
    assert samples(files / f"{name}.jsonl") == samples(files / "one.jsonl")
    assert json.loads((files / f"{name}.json").read_text())["processes"] == count


def test_two_go_on_where_one_was_and_read_its_samples(files):
    jobs = [half_done(files, "resumed"), other_judge(files, "other-by-2")]
    spoke, _ = together(2, evaluate_quietly, *((job,) for job in jobs))
    assert "1 row there already" in spoke
    assert numbers(files / "resumed.json") == numbers(files / "one.json")
    assert samples(files / "resumed.jsonl") == samples(files / "one.jsonl")
    evaluate_quietly(other_judge(files, "other-by-1"))
    assert numbers(files / "other-by-2.json") == numbers(files / "other-by-1.json")


def test_mistakes_end_all_processes_and_one_says_so(files, tmp_path):
    shutil.copy(files / "one.json", tmp_path / "other.json")
    good = asked(files, "refused", json=None, samples=None)
    wrong = {
        "num is 1;": replace(good, num=1),
        "is not a folder": replace(good, model=str(tmp_path / "no")),
        "nowhere.bin is not a file": replace(good, judge="nowhere.bin"),
        "is not a file": replace(good, held_out=str(tmp_path / "no")),
        "its seed is 0, now it is 1": replace(good, seed=1, json=tmp_path / "other.json"),
        "is not JSON": replace(good, json=files / "held.txt"),
        "holds other samples": replace(good, seed=1, samples=files / "one.jsonl"),
        "holds no complete row of these budgets": replace(other_judge(files, "no"), json=None, steps="64"),
        "--seed is given with --from-samples": replace(other_judge(files, "no"), json=None, seed=1),
        "processes is 2, but torchrun started 2 already": replace(good, processes=2),
    }
    told = together(2, refuse_evaluation, *((request,) for request in wrong.values()))
    for message, (found, *_) in zip(wrong, told, strict=True):
        assert message in found


# --- started by the command itself, and by torchrun -------------------------------------------------------------------


def command(files, out, *, steps, launcher=("-m", "fsdfm"), more=()):
    words = ["evaluate", str(files / "tiny"), "--judge", str(files / "judge"), "--held-out", str(files / "held.txt")]
    words += ["--metrics", "perplexity", "--num", "16", "--steps", steps, "--json", str(out), *more]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for_a_row(process, out):
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if out.exists() and load_evaluation(out).rows:
            return
        time.sleep(0.02)
    pytest.fail(f"no row before the end: {process.communicate()}")


def children(process):
    """The other processes of an evaluation, the newest last."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in found if b"resource_tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_keeps_its_rows(files, tmp_path, end):
    out = tmp_path / "a.json"
    process = command(files, out, steps="1,2000", more=["--processes", "2"])
    wait_for_a_row(process, out)
    others = children(process)
    os.kill(process.pid, end)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"stopped with 1 finished row, in {out}; the same command resumes" in told
    assert "Traceback" not in told
    assert [row.steps for row in load_evaluation(out).rows] == [1]
    assert not any(Path(f"/proc/{other}").exists() for other in others)


def test_bereft_it_says_so_and_goes_on(files, tmp_path):
    out, whole = tmp_path / "a.json", tmp_path / "whole.json"
    process = command(files, out, steps="1,500", more=["--processes", "2", "--batch-size", "1"])
    wait_for_a_row(process, out)
    os.kill(children(process)[-1], signal.SIGKILL)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "error: process 0 of 2 lost another one" in told
    assert f"what {out} holds is whole: the same command resumes from there" in told
    assert [row.steps for row in load_evaluation(out).rows] == [1]
    for file, more in ((out, ["--processes", "2"]), (whole, [])):
        process = command(files, file, steps="1,2", more=more)
        _, told = process.communicate(timeout=300)
        assert process.returncode == 0, told
    assert numbers(out) == numbers(whole)


def test_torchrun_starts_it_and_a_lost_process_ends_it(files, tmp_path):
    out = tmp_path / "a.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1", "-m"]
    process = command(files, out, steps="1,2000", launcher=[*launcher, "--", "fsdfm"])
    wait_for_a_row(process, out)
    os.kill(children(process)[-1], signal.SIGKILL)
    _, told = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "stopped with 1 finished row" in told or "lost another one" in told
    assert [row.steps for row in load_evaluation(out).rows] == [1]
