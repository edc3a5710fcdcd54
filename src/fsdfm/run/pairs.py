"""Coupled pairs: what a parent makes of noise, kept to train on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fsdfm import data, flow
from fsdfm.checkpoint import Bundle, load_model
from fsdfm.learn.couple import DRAWS, Coupler, couple
from fsdfm.model.weights import weights_sha256
from fsdfm.run.objects import named
from fsdfm.runtime import Runtime, RuntimeConfig

__all__ = ["PairsConfig", "make_pairs"]


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """How a parent's pairs are made."""

    num: int = 4096  # in all; what is there already counts
    steps: int = 64  # of the sampler
    length: int | None = None  # tokens; None: the parent's
    jump: str = "exact"  # the sampler's rule
    draws: str = "free"  # or `tied` to the noise: x_1 is then a more certain function of x_0 (`fsdfm.flow.tie`)
    temperature: float = 1.0  # of the parent's posteriors
    seed: int = 0
    batch_size: int = 16  # made at a time; it does not change them


def make_pairs(
    parent: str | Path,
    out: str | Path,
    config: PairsConfig | None = None,
    *,
    runtime: RuntimeConfig | None = None,
    console: Console | None = None,
) -> int:
    """Let a parent run for many steps and keep its pairs (x_0, x_1): discrete reflow's data; resumable.

    Train on them with `model.parent` the same parent and `data.pairs` the folder.
    """
    config = config or PairsConfig()
    bundle = load_model(parent)
    coupler = _coupler(bundle, config)
    about = asdict(config)
    for name in ("num", "length", "batch_size"):
        del about[name]
    about["parent"] = weights_sha256(bundle.model)
    header = data.PairHeader(length=coupler.length, vocab_size=bundle.path.source.vocab_size, about=about)
    with (
        Runtime(runtime or RuntimeConfig()) as machine,
        data.PairWriter(out, header) as writer,
        Progress(console=console or Console(stderr=True)) as progress,
    ):
        machine.place(bundle.model.eval())
        task = progress.add_task("couple", total=config.num, completed=writer.count)
        made = couple(
            bundle.model,
            coupler,
            writer,
            num_pairs=config.num,
            batch_size=config.batch_size,
            device=machine.device,
        )
        with machine.autocast():
            for count in made:
                progress.update(task, completed=count)
        return writer.count


def _coupler(bundle: Bundle, config: PairsConfig) -> Coupler:
    rule, draws = named(flow.JUMPS, config.jump, "jump"), named(DRAWS, config.draws, "draws")
    if draws is not None and config.jump not in ("exact", "spaced"):
        raise ValueError(f"jump is {config.jump!r} with tied draws; allowed are exact and spaced")
    return Coupler(
        bundle.path,
        config.length or bundle.length,
        flow.Grid.uniform(config.steps),
        jump=rule,
        seed=config.seed,
        first_token=bundle.bos_id,
        filter=None if config.temperature == 1 else flow.Filter(temperature=config.temperature),
        draws=draws,
    )
