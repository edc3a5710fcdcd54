"""The same run on one, two and four real processes."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from fsdfm.checkpoint import load_model, load_training
from fsdfm.run import train
from small_runs import train_quietly, write_recipe
from together import refuse, together

pytestmark = pytest.mark.slow
SMALL = ("train.log_every=1", "train.steps=4", "train.save_every=2", "train.keep=9", "model.num_blocks=2")
BATCH = "train.batch_size=8"


def lines(run):
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def weights(run, step=4):
    return load_file(Path(run) / "checkpoints" / f"step-{step:010d}" / "model.safetensors")


def assert_alike(run, other, first=0):
    """The losses of a run from some line on, what is logged beside them, and the weights at the end."""
    mine, theirs = lines(run), lines(other)
    assert [line["training_step"] for line in mine] == [line["training_step"] for line in theirs]
    for line, expected in list(zip(mine, theirs, strict=True))[first:]:
        for name in {"loss", "grad_norm", "exit_rate", "path_loss", "distil_loss", "target_entropy"} & set(expected):
            assert line[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5), (line, name)
        assert line["tokens"] == expected["tokens"]
        assert line["loss_by_h_t"].keys() == expected["loss_by_h_t"].keys()
    assert_near(weights(run), weights(other))


def assert_near(ours, expected):
    """Near in norm: where a gradient is rounding alone, Adam's step is its sign, and a weight may differ by it."""
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].shape == value.shape
        assert float((ours[name] - value).norm()) <= 0.02 * float(value.norm()) + 1e-6, name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the recipes and the runs of a single process, dropout on."""
    folder = tmp_path_factory.mktemp("together")
    for kind in ("path", "fewstep"):
        recipe = write_recipe(folder, kind=kind)
        train_quietly(str(recipe), f"out={folder / kind}", *SMALL, BATCH, "sample.every=3", "sample.steps=2")
    return folder


@pytest.fixture(scope="module")
def shared(runs):
    """The same runs on 2 and 4 processes, by (kind, strategy, count); of 8 rows on 4, some ask no teacher."""
    found = {}
    for count in (2, 4):
        jobs = {}
        for kind in ("path", "fewstep"):
            for strategy in ("ddp", "fsdp"):
                out = runs / f"{kind}-{strategy}-{count}"
                found[kind, strategy, count] = out
                options = [f"out={out}", f"runtime.strategy={strategy}", "sample.every=3", "sample.steps=2"]
                jobs[out] = (str(runs / f"{kind}.toml"), *SMALL, BATCH, *options)
        together(count, train_quietly, *jobs.values())
    return found


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["path", "fewstep"])
def test_processes_change_no_loss(runs, shared, kind, strategy, count):
    out = shared[kind, strategy, count]
    assert_alike(out, runs / kind)
    assert (out / "samples.jsonl").read_text() == (runs / kind / "samples.jsonl").read_text()
    bundle = load_model(out)  # as ever
    assert bundle.facts["training_step"] == 4
    names = {path.name for path in (out / "checkpoints" / "step-0000000004").iterdir()}
    assert ("training.safetensors" in names) == (strategy == "ddp")
    assert {f"__{rank}_0.distcp" for rank in range(count)} <= names or strategy == "ddp"


def resumed(run, out):
    """A copy of a run as it was after two of its four steps."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "checkpoints" / "step-0000000004")
    return f"out={out}"


def test_what_two_processes_saved_goes_on_on_one_and_on_four(runs, shared, tmp_path):
    origin = shared["fewstep", "fsdp", 2]
    recipe = str(runs / "fewstep.toml")
    alone = tmp_path / "alone"
    said = io.StringIO()
    options = [*SMALL, BATCH, "sample.every=3", "sample.steps=2"]
    train(recipe, [resumed(origin, alone), *options], console=Console(file=said))
    assert "resuming" in said.getvalue()
    assert_alike(alone, origin)
    four, two = tmp_path / "four", tmp_path / "two"
    together(4, train_quietly, (recipe, resumed(origin, four), *options, "runtime.strategy=fsdp"))
    assert_alike(four, origin)
    jobs = [
        (recipe, resumed(origin, two), *options, "runtime.strategy=fsdp"),
        (recipe, resumed(runs / "fewstep", tmp_path / "onward"), *options, "runtime.strategy=fsdp"),
        (recipe, resumed(origin, tmp_path / "ddp"), *options, "runtime.strategy=ddp"),
    ]
    together(2, train_quietly, *jobs)
    assert all(torch.equal(value, weights(origin)[name]) for name, value in weights(two).items())  # bit by bit
    assert_alike(tmp_path / "onward", runs / "fewstep")
    assert_alike(tmp_path / "ddp", origin)


def test_shards_hold_what_one_process_would_have_written(runs, shared):
    """Both formats of a training state read as the same tensors."""
    last = Path("checkpoints") / "step-0000000002"
    whole, numbers = load_training(runs / "fewstep" / last)
    parts, same = load_training(shared["fewstep", "fsdp", 4] / last)
    assert numbers.keys() == same.keys()
    assert_near(parts, whole)


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_shard_sends_the_run_back_one_checkpoint(runs, shared, tmp_path, harm):
    out = tmp_path / "run"
    shutil.copytree(shared["path", "fsdp", 2], out)
    shard = out / "checkpoints" / "step-0000000004" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "remove":
        shard.unlink()
    else:
        shard.write_bytes(bytes(content) if harm == "flip" else bytes(content[:-10]))
    said = io.StringIO()
    options = [f"out={out}", *SMALL, BATCH, "sample.every=3", "sample.steps=2"]
    train(str(runs / "path.toml"), options, console=Console(file=said, width=300))
    assert "__1_0.distcp" in said.getvalue()
    assert "at training step 2 of 4" in said.getvalue()
    assert_alike(out, runs / "path")


def test_portions_bfloat16_transitions_and_the_student_as_its_own_teacher(runs, tmp_path):
    recipe = str(runs / "fewstep.toml")
    variants = {
        "portions": ["train.accumulate=2"],
        "student": ["objective.teacher.network=student"],
        "bfloat16": ["runtime.precision=bfloat16"],
        "links": ["model.transition_rank=4", "objective.loss=cross-entropy", "objective.teacher=none"],
    }
    common = [*SMALL, BATCH, "train.save_every=4"]
    jobs = []
    for name, options in variants.items():
        train_quietly(recipe, f"out={tmp_path / name}", *common, *options)
        for strategy in ("ddp", "fsdp"):
            out = f"out={tmp_path / name}-{strategy}"
            jobs.append((recipe, out, *common, *options, f"runtime.strategy={strategy}"))
    together(2, train_quietly, *jobs)
    for name in variants:
        for strategy in ("ddp", "fsdp"):
            out = tmp_path / f"{name}-{strategy}"
            if name != "bfloat16":
                assert_alike(out, tmp_path / name)
                continue
            for line, expected in zip(lines(out), lines(tmp_path / name), strict=True):
                assert line["loss"] == pytest.approx(expected["loss"], rel=0.03)


def test_mistakes_and_broken_losses_end_all_processes(runs, tmp_path):
    recipe = str(runs / "path.toml")
    jobs = [
        (recipe, f"out={tmp_path / 'a'}", "runtime.strategy=ddp", "train.batch_size=9"),
        (recipe, f"out={tmp_path / 'b'}", "runtime.strategy=ddp", "data.length=100000"),
        (recipe, "out=/proc/nowhere", "runtime.strategy=fsdp"),
        (recipe, f"out={tmp_path / 'c'}", "runtime.strategy=fsdp", "optim.lr=10", "optim.clip=1e30", "optim.warmup=0"),
    ]
    rows, length, folder, broken = together(2, refuse, *jobs)
    assert "9 in 1 portions over 2 processes; allowed are positive multiples of 2" in rows
    assert "length is 100000" in length
    assert "cannot write to /proc/nowhere" in folder
    assert "at training step" in broken


# --- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun(*arguments, restarts=0, plugin=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", "-m", "fsdfm", "train", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    if plugin is not None:
        environment["FSDFM_PLUGINS"] = str(plugin)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


DIES = """
import os, signal, threading, time
from pathlib import Path

def wait():
    while not any(int(path.name[5:]) >= {step} for path in Path({out!r}).glob("checkpoints/step-??????????")):
        time.sleep(0.005)
    Path({marker!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "{rank}" and not Path({marker!r}).exists():
    threading.Thread(target=wait, daemon=True).start()
"""


def one_that_dies(out, *, rank, step):
    """A plugin: a rank ends without a word, once, when the run has saved a step. From inside, no step is missed."""
    plugin = out.parent / f"dies_{rank}.py"
    plugin.write_text(DIES.format(out=str(out), marker=str(out.parent / f"died-{rank}"), rank=rank, step=step))
    return plugin


def test_killing_a_rank_ends_the_job_and_a_restart_goes_on(tmp_path):
    recipe = str(write_recipe(tmp_path, kind="fewstep"))
    options = ["train.steps=120", "train.save_every=5", "train.log_every=10", "runtime.strategy=fsdp"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    train_quietly(recipe, f"out={whole}", *options[:-1])
    launcher = torchrun(recipe, f"out={out}", *options, plugin=one_that_dies(out, rank=1, step=10))
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode != 0, said
    assert "process 0 of 2 lost another one" in said
    assert f"what {out} has saved is whole" in said.replace("\n", " ")
    saved = load_model(out).facts["training_step"]
    assert 10 <= saved < 120
    launcher = torchrun(recipe, f"out={out}", *options, restarts=1, plugin=one_that_dies(out, rank=0, step=saved + 10))
    said, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert said.count("resuming") == 2
    assert [line["training_step"] for line in lines(out)] == list(range(10, 121, 10))
    for line, expected in zip(lines(out), lines(whole), strict=True):  # rounding grows along a run
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-2)


def test_sigterm_saves_on_all_processes(tmp_path):
    recipe = str(write_recipe(tmp_path))
    out = tmp_path / "run"
    options = [f"out={out}", "train.steps=100000", "train.save_every=100000", "train.log_every=5"]
    launcher = torchrun(recipe, *options, "runtime.strategy=ddp")
    deadline = time.monotonic() + 600
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline and launcher.poll() is None:
        time.sleep(0.01)
    launcher.terminate()
    said, _ = launcher.communicate(timeout=600)
    assert "stopped and saved" in said
    assert load_model(out).facts["training_step"] > 0
