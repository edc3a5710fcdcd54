"""Coupled pairs: what a parent makes of noise, kept to train on."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fsdfm import data, flow
from fsdfm.checkpoint import load_model
from fsdfm.learn.couple import Coupler, couple
from fsdfm.model.weights import weights_sha256
from fsdfm.run.objects import named

__all__ = ["make_pairs"]


def make_pairs(
    parent: str | Path,
    out: str | Path,
    *,
    num_pairs: int,
    steps: int = 64,
    length: int | None = None,
    jump: str = "exact",
    seed: int = 0,
    batch_size: int = 16,
    console: Console | None = None,
) -> int:
    """Let a parent run for many steps and keep its pairs (x_0, x_1): discrete reflow's data; resumable.

    Train on them with `model.parent` the same parent and `data.pairs` the folder.
    """
    bundle = load_model(parent)
    rule = named(flow.JUMPS, jump, "jump")
    length = length or bundle.length
    coupler = Coupler(bundle.path, length, flow.Grid.uniform(steps), jump=rule, seed=seed, first_token=bundle.bos_id)
    about = {"parent": weights_sha256(bundle.model), "steps": steps, "jump": jump, "seed": seed}
    header = data.PairHeader(length=length, vocab_size=bundle.path.source.vocab_size, about=about)
    with data.PairWriter(out, header) as writer, Progress(console=console or Console(stderr=True)) as progress:
        task = progress.add_task("couple", total=num_pairs, completed=writer.count)
        for count in couple(bundle.model.eval(), coupler, writer, num_pairs=num_pairs, batch_size=batch_size):
            progress.update(task, completed=count)
        return writer.count
