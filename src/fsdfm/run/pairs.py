"""Coupled pairs: what a parent makes of noise, kept to train on."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fsdfm import data, flow
from fsdfm.checkpoint import load_model
from fsdfm.learn.couple import DRAWS, Coupler, couple
from fsdfm.model.weights import weights_sha256
from fsdfm.run.objects import named
from fsdfm.runtime import Runtime, RuntimeConfig

__all__ = ["make_pairs"]


def make_pairs(
    parent: str | Path,
    out: str | Path,
    *,
    num_pairs: int,
    steps: int = 64,
    length: int | None = None,
    jump: str = "exact",
    draws: str = "free",
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 16,
    config: RuntimeConfig | None = None,
    console: Console | None = None,
) -> int:
    """Let a parent run for many steps and keep its pairs (x_0, x_1): discrete reflow's data; resumable.

    Train on them with `model.parent` the same parent and `data.pairs` the folder.

    draws         `free`, or `tied` to the noise: x_1 is then a more certain function of x_0 (`fsdfm.flow.tie`)
    temperature   of the parent's posteriors
    config        device, precision and threads
    """
    bundle = load_model(parent)
    rule, tie = named(flow.JUMPS, jump, "jump"), named(DRAWS, draws, "draws")
    if tie is not None and jump != "exact":
        raise ValueError(f"jump is {jump!r} with tied draws; they are made for the exact rule: leave it out")
    length = length or bundle.length
    coupler = Coupler(
        bundle.path,
        length,
        flow.Grid.uniform(steps),
        jump=rule,
        seed=seed,
        first_token=bundle.bos_id,
        filter=None if temperature == 1 else flow.Filter(temperature=temperature),
        draws=tie,
    )
    about = {"parent": weights_sha256(bundle.model), "steps": steps, "jump": jump, "seed": seed}
    about |= {"draws": draws, "temperature": temperature}
    header = data.PairHeader(length=length, vocab_size=bundle.path.source.vocab_size, about=about)
    with (
        Runtime(config or RuntimeConfig(device="cpu")) as runtime,
        data.PairWriter(out, header) as writer,
        Progress(console=console or Console(stderr=True)) as progress,
    ):
        runtime.place(bundle.model.eval())
        task = progress.add_task("couple", total=num_pairs, completed=writer.count)
        made = couple(bundle.model, coupler, writer, num_pairs=num_pairs, batch_size=batch_size, device=runtime.device)
        with runtime.autocast():
            for count in made:
                progress.update(task, completed=count)
        return writer.count
