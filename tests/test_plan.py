"""What `fsdfm plan` says against what a run really needs."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fsdfm.bench.train import TrainBench, step_flops
from fsdfm.cli import app, planning
from fsdfm.config import load_recipe
from fsdfm.model import DiT, ModelConfig
from fsdfm.plan import Workload, estimate_flops, estimate_memory, tokens_per_second
from fsdfm.run import make_workload
from fsdfm.runtime import Runtime, RuntimeConfig

SMALL = {"vocab_size": 512, "width": 64, "num_blocks": 3, "num_heads": 4, "cond_width": 16}
TOLERANCE = 0.15


def saved_bytes(config, *, rows, length, bfloat16):
    """Bytes that autograd keeps of a trunk for the backward pass, counted a storage at a time, without the weights."""
    model, seen = DiT(config).train(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    runtime = Runtime(RuntimeConfig(device="cpu", precision="bfloat16" if bfloat16 else "float32"))

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # kept, lest another takes its address
        return tensor

    x_t, t = torch.zeros(rows, length, dtype=torch.int64), torch.rand(rows)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, runtime.dropout(0, 0, range(rows)), runtime.autocast():
        model.trunk(x_t, t, t)
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "change",
    [{}, {"dropout": 0.0}, {"style": "llama"}, {"num_kv_heads": 1}, {"mlp_width": 96}],
    ids=str,
)
def test_activations_are_what_autograd_keeps(change, bfloat16):
    config = ModelConfig(**{**SMALL, **change})
    work = Workload(model=config, length=256, batch_size=8, bfloat16=bfloat16)
    kept = saved_bytes(config, rows=8, length=256, bfloat16=bfloat16)
    assert estimate_memory(work, "single").activations == pytest.approx(kept, rel=0.04)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks come from the Linux kernel")
@pytest.mark.parametrize("kind", ["path", "fewstep", "portions"])
def test_the_estimate_is_within_15_percent_of_the_measured_peak(kind):
    """A fresh process whose allocator gives back at once what is freed, so that its peak is what was in use."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-m", "peaks", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    measured, estimated = json.loads(done.stdout)
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def test_sharding_divides_the_state_and_nothing_else():
    work = Workload(model=ModelConfig(**SMALL), length=64, batch_size=32, accumulate=2)
    one, ddp, fsdp = (estimate_memory(work, name, n) for name, n in (("single", 1), ("ddp", 4), ("fsdp", 4)))
    for part in ("weights", "average", "moments"):
        assert getattr(ddp, part) == getattr(one, part) == pytest.approx(4 * getattr(fsdp, part))
    assert ddp.activations == fsdp.activations == pytest.approx(one.activations / 4)
    assert (ddp.gathered, one.gathered) == (0, 0)
    assert fsdp.gathered > 0
    assert one.weights == 4 * work.num_parameters == 4 * sum(p.numel() for p in DiT(work.model).parameters())
    assert one.total == pytest.approx(sum(vars(one).values()))


def test_flops_agree_with_the_benchmarks_formula():
    setting = TrainBench()
    work = Workload(model=setting.config(), length=setting.length, batch_size=setting.batch_size)
    assert estimate_flops(work) * work.tokens == pytest.approx(step_flops(setting), rel=0.01)
    taught = Workload(model=setting.config(), length=256, batch_size=16, stages=4, teacher_share=1 / 3)
    assert 1.3 < estimate_flops(taught) / estimate_flops(work) < 1 + 4 / 9
    assert tokens_per_second(work, 2e12, 4) == pytest.approx(8e12 / estimate_flops(work))


def test_a_recipe_becomes_a_workload_even_before_its_parent_exists():
    work = make_workload(load_recipe("paper-1700m-fewstep"))
    assert work.num_parameters == pytest.approx(1.705e9, rel=2e-3)
    assert (work.stages, work.model.conditioning, work.bfloat16) == (4, "step", True)
    assert work.teacher_share == pytest.approx(1 / 3)
    tiny = make_workload(load_recipe("tiny-dfm", ["runtime.device=cpu"]))
    assert (tiny.stages, tiny.bfloat16, tiny.model.vocab_size) == (0, False, 2048)
    with pytest.raises(ValueError, match="model.parent nowhere is not there, and no recipe makes it"):
        make_workload(load_recipe("tiny-fewstep", ["model.parent=nowhere"]))


@pytest.mark.parametrize(
    ("strategy", "processes", "sentence"),
    [("single", 2, "processes is 2"), ("ddp", 0, "processes is 0"), ("fsdp", 3, "allowed are multiples of 3")],
)
def test_what_cannot_be_is_an_error(strategy, processes, sentence):
    work = Workload(model=ModelConfig(**SMALL), length=64, batch_size=32)
    with pytest.raises(ValueError, match=sentence):
        estimate_memory(work, strategy, processes)
    with pytest.raises(ValueError, match="flops is 0"):
        tokens_per_second(work, 0)


@pytest.mark.slow
def test_every_line_fits_a_terminal_of_80_columns(monkeypatch):
    console = Console(width=80, file=io.StringIO())
    monkeypatch.setattr(planning, "console", console)
    assert CliRunner().invoke(app, ["plan", "paper-1300m-fewstep"]).exit_code == 0
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 8
    assert max(map(len, lines)) <= 80


def test_the_command_prints_a_table(tmp_path):
    file = tmp_path / "plan.json"
    result = CliRunner().invoke(
        app, ["plan", "paper-170m-dfm", "--processes", "1,8", "--json", str(file)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    for words in ("169.6 M parameters", "fsdp", "tokens/s per process", "activations"):
        assert words in result.stdout
    record = json.loads(file.read_text())
    assert [(row["strategy"], row["processes"]) for row in record["rows"]] == [("single", 1), ("ddp", 8), ("fsdp", 8)]
    for wrong, sentence in (("x", "whole numbers"), ("7", "divisors of train.batch_size")):
        failed = CliRunner().invoke(app, ["plan", "paper-170m-dfm", "--processes", wrong])
        assert sentence in str(failed.exception)
