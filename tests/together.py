"""Real processes that compute together, as torchrun would start them, without its seconds."""

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from fsdfm.measure.evaluation import run_evaluation
from fsdfm.runtime import EchoError, Processes
from small_runs import train_quietly

_CONTEXT = multiprocessing.get_context("forkserver")  # forks of one process that has torch: quick to start
_CONTEXT.set_forkserver_preload(["fsdfm.run", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def together(count: int, function: Callable[..., Any], *jobs: tuple[Any, ...], seconds: float = 900.0) -> list[Any]:
    """What a function returns for each job, one after the other, in the first of so many processes; none may fail.

    The function must stand in a module that the new processes can import: this one, or another beside it.
    """
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(count)]
    ports = free_ports(len(jobs))
    started = [
        _CONTEXT.Process(target=_work, args=((rank, count), sender, function, jobs, ports), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(started, pipes, strict=True):
        process.start()
        sender.close()
    results = [_receive(receiver, seconds) for receiver, _ in pipes]
    for process in started:
        process.join(5)
        process.kill()
    failed = [result for result in results if isinstance(result, str)]
    assert not failed, "\n".join(failed)
    return results[0]


def _receive(receiver: Any, seconds: float) -> Any:
    try:
        return receiver.recv() if receiver.poll(seconds) else "it never came back"
    except EOFError:
        return "it died"


def _work(who: tuple[int, int], sender: Any, function: Callable[..., Any], jobs: Any, ports: list[int]) -> None:
    torch.set_num_threads(1)
    rank, count = who
    results = []
    try:
        for job, port in zip(jobs, ports, strict=True):
            if count > 1:
                numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
            results.append(function(*job))
        sender.send(results)
    except BaseException:
        sender.send(f"process {rank} of {count}: {traceback.format_exc()}")


# --- what they do -----------------------------------------------------------------------------------------------------


def agree(folder):
    """Everything that processes say to each other, in one meeting."""
    processes = Processes.join(torch.device("cpu"))
    rank, count = processes.rank, processes.count
    assert processes.gather(rank) == list(range(count))
    assert processes.map(lambda item: (item, item * item), range(7)) == [(item, item * item) for item in range(7)]
    assert [text for found in processes.rounds(str, range(7)) for text in found] == list("0123456")
    assert processes.mean(float(rank)) == (count - 1) / 2
    assert processes.mean(float("nan") if rank else 1.0) != processes.mean(float("nan") if rank else 1.0)
    assert processes.any(rank == count - 1)
    assert not processes.any(False)
    assert processes.on_rank0(lambda: f"from {rank}") == "from 0"
    with pytest.raises(ValueError, match="no room"):
        processes.on_rank0(lambda: fail("no room"))
    with processes.in_turn():
        made = folder / "made"
        if processes.is_rank0:
            time.sleep(0.2)
            made.write_text("whole")
        assert made.read_text() == "whole"
    with pytest.raises(ValueError, match="no luck"), processes.in_turn():
        fail("no luck") if processes.is_rank0 else pytest.fail("the first had failed")
    with pytest.raises(ValueError, match="lost another one.*all is saved"), processes.watch("all is saved"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes"), processes.watch("all is saved"):
        raise RuntimeError("shapes do not fit")
    processes.leave()
    return rank, os.getpid()


def fail(sentence):
    raise ValueError(sentence)


def refuse(recipe, *options):
    """The message of a run that must fail, on every process alike."""
    with pytest.raises(ValueError, match=".") as caught:
        train_quietly(recipe, *options)
    torch.distributed.destroy_process_group()
    return str(caught.value)


def evaluate_quietly(request):
    """Evaluate as `fsdfm evaluate` does; what was told."""
    said = io.StringIO()
    outcome = run_evaluation(request, console=Console(file=said, width=300))
    assert outcome.finished
    assert outcome.speaks == bool(said.getvalue())  # one process does
    return said.getvalue()


def refuse_evaluation(request):
    """The message of an evaluation that must fail, on every process; whether another one says it."""
    with pytest.raises(ValueError, match=".") as caught:
        run_evaluation(request, console=Console(file=io.StringIO()))
    if torch.distributed.is_initialized():
        assert isinstance(caught.value, EchoError) == (torch.distributed.get_rank() > 0)
        torch.distributed.destroy_process_group()
    return str(caught.value), type(caught.value).__name__
