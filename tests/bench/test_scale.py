import pytest
from typer.testing import CliRunner

from fsdfm.bench.scale import bench_processes
from fsdfm.bench.train import TrainBench
from fsdfm.cli import app

TINY = TrainBench(width=16, num_blocks=1, num_heads=2, vocab_size=32, length=8, batch_size=4, steps=2)


@pytest.mark.slow
def test_processes_are_measured_against_one():
    result = bench_processes(TINY, 2)
    assert result["processes"] == 2
    assert result["throughput_ratio"] == pytest.approx(
        result["tokens_per_second"] / result["single_tokens_per_second"], rel=1e-6
    )
    assert result["throughput_ratio"] > 0


@pytest.mark.parametrize("processes", [1, 3])
def test_rows_must_be_shared_evenly(processes):
    with pytest.raises(ValueError, match=f"processes is {processes}; allowed are divisors of the 4 rows"):
        bench_processes(TINY, processes)


def test_the_command_knows_the_option():
    assert "--processes" in CliRunner().invoke(app, ["bench", "train", "--help"], env={"COLUMNS": "200"}).stdout
