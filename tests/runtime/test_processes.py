"""Processes that agree, share and fail together."""

import os

import pytest
import torch

from fsdfm.runtime import ALONE, Processes, Runtime, RuntimeConfig, require_strategy, share_threads, spawn_local
from together import agree, together


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 6, 20])
def test_shares_are_all_of_it_in_order_and_even(count, size):
    items = list(range(size))
    shares = [Processes(rank, count).share(items) for rank in range(count)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_alone_agrees_with_itself():
    assert ALONE.is_rank0
    assert ALONE.gather("x") == ["x"]
    assert ALONE.map(str, [1, 2]) == ["1", "2"]
    assert list(ALONE.rounds(str, [1, 2])) == [["1"], ["2"]]
    assert ALONE.mean(0.5) == 0.5
    assert ALONE.any(True)
    assert not ALONE.any(False)
    assert ALONE.on_rank0(lambda: 7) == 7
    with ALONE.in_turn():
        pass
    tensor = torch.ones(2)
    assert ALONE.whole({"a": tensor})["a"] is not None
    with pytest.raises(RuntimeError, match="gloo"), ALONE.watch("nothing"):
        raise RuntimeError("gloo")  # nobody else to lose


@pytest.mark.slow
def test_processes_agree_share_and_fail_together(tmp_path):
    assert together(3, agree, (tmp_path,))[0][0] == 0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_without_torchrun_there_is_a_group_of_one(strategy):
    with Runtime(RuntimeConfig(device="cpu", strategy=strategy)) as runtime:
        assert (runtime.processes.rank, runtime.processes.count) == (0, 1)
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()


def test_one_strategy_for_several_processes_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="'single', but torchrun started 4 processes.*runtime.strategy=ddp"):
        require_strategy(RuntimeConfig())
    require_strategy(RuntimeConfig(strategy="fsdp"))
    with pytest.raises(ValueError, match="'cuda:1' for all 4 processes"):
        Runtime(RuntimeConfig(device="cuda:1", strategy="ddp"))


# --- processes that the first one starts ------------------------------------------------------------------------------


def test_one_process_starts_no_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with spawn_local(1, pytest.fail):  # what torchrun started is enough
        pass
    with pytest.raises(ValueError, match="processes is 2, but torchrun started 4"), spawn_local(2, pytest.fail):
        pass
    with pytest.raises(ValueError, match="processes is 0"), spawn_local(0, pytest.fail):
        pass


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [share_threads(count) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]


@pytest.mark.slow
def test_spawned_processes_meet_and_the_environment_is_what_it_was(tmp_path):
    before = dict(os.environ)
    with spawn_local(2, agree, tmp_path):
        assert agree(tmp_path) == (0, os.getpid())
    assert dict(os.environ) == before
