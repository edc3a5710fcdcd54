"""Coupled pairs to train on: what a parent makes of noise, or text with inverse-autoregressive noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, causal_over, load_model
from fsdfm.files import file_sha256
from fsdfm.generate import SamplerConfig
from fsdfm.learn.reflow import DRAWS, InverseAutoregressive, PairMaker, Perturbed, Reflow, collect_pairs
from fsdfm.learn.registry import find_named
from fsdfm.model.weights import weights_sha256
from fsdfm.runtime import Runtime, RuntimeConfig
from fsdfm.terminal import moving_bar

__all__ = ["PairsConfig", "make_inverse_pairs", "make_pairs", "make_timed_pairs"]


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """How a parent's pairs are made."""

    num: int = 4096  # in all; what is there already counts
    length: int | None = None  # tokens; None: the parent's
    draws: str = "free"  # or quantile: x_1 is then a more certain function of x_0 (`fsdfm.flow.coupling`)
    batch_size: int = 16  # made at a time; it does not change them
    steps: int = 64  # this and the rest as in `SamplerConfig`, the parent's own advice included
    seed: int = 0
    jump: str | None = None
    temperature: float | None = None
    final_temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    grid: str = "uniform"

    def sampler(self, checkpoint: Checkpoint) -> SamplerConfig:
        """The options of sampling, and where they say nothing what the parent advises."""
        names = ("steps", "seed", "jump", "temperature", "final_temperature", "top_p", "top_k", "grid")
        return SamplerConfig(**{name: getattr(self, name) for name in names}).advised(checkpoint.facts.get("sampling"))


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
    checkpoint = load_model(parent)
    sampler = config.sampler(checkpoint)
    maker = _pair_maker(checkpoint, config, sampler)
    about = {
        "steps": sampler.num_steps(),
        "jump": sampler.jump or "exact",
        "draws": config.draws,
        "temperature": 1.0 if sampler.temperature is None else sampler.temperature,
        "seed": sampler.seed,
        "parent": weights_sha256(checkpoint.model),
    }
    others = {name: getattr(sampler, name) for name in ("final_temperature", "top_p", "top_k")}
    others["grid"] = None if config.grid == "uniform" else config.grid
    about |= {name: value for name, value in others.items() if value is not None}
    header = data.PairHeader(length=maker.length, vocab_size=checkpoint.path.source.vocab_size, about=about)
    with Runtime(runtime or RuntimeConfig()) as machine:
        machine.place(checkpoint.model.eval())
        return _fill(maker, out, header, config=config, machine=machine, console=console)


def make_timed_pairs(
    parent: str | Path,
    corpus: str | Path,
    out: str | Path,
    *,
    config: PairsConfig | None = None,
    runtime: RuntimeConfig | None = None,
    console: Console | None = None,
) -> int:
    """Noise rows of a packed corpus, each to a time of its own, let a parent continue from there, keep both; resumable.

    Train on them with the path loss, `model.parent` the same parent and `data.pairs` the folder.
    """
    config = config or PairsConfig()
    if config.draws != "free" or config.grid != "uniform":
        raise ValueError(
            f"draws is {config.draws!r} and grid {config.grid!r} with --corpus; pairs that remember their time have "
            "free draws on a uniform grid: leave both out"
        )
    checkpoint = load_model(parent)
    sampler, first = config.sampler(checkpoint), checkpoint.bos_id
    length = config.length or checkpoint.length
    blocks = data.Blocks(data.Corpus.open(corpus, checkpoint.tokenizer), length, config.seed, document_starts=1.0)

    def text(samples: Sequence[int]) -> Tensor:
        rows = blocks.rows(samples).x_1
        return rows if first is None else data.begin_with(first, rows)

    about = {
        **{"timed": True, "steps": sampler.num_steps(), "jump": sampler.jump or "exact", "seed": sampler.seed},
        **{"temperature": 1.0 if sampler.temperature is None else sampler.temperature, "corpus": Path(corpus).name},
        "parent": weights_sha256(checkpoint.model),
    }
    header = data.PairHeader(length=length, vocab_size=checkpoint.path.source.vocab_size, about=about)
    maker = Perturbed(
        checkpoint.model,
        checkpoint.path,
        text,
        partial(data.pair_times, sampler.seed),
        sampler.num_steps(),
        rule=sampler.rule(),
        seed=sampler.seed,
        first_token=first is not None,
        filter=sampler.filter(),
    )
    with Runtime(runtime or RuntimeConfig()) as machine:
        machine.place(checkpoint.model.eval())
        return _fill(maker, out, header, config=config, machine=machine, console=console)


def make_inverse_pairs(
    parent: str | Path,
    autoregressive: str | Path,
    corpus: str | Path,
    *,
    out: str | Path,
    config: PairsConfig | None = None,
    autoregressive_tokenizer: str | Path | None = None,
    runtime: RuntimeConfig | None = None,
    console: Console | None = None,
) -> int:
    """Rows of a packed corpus, each with the noise that an autoregressive model turns into it; resumable.

    parent   whose tokenizer, length and first token they are for
    autoregressive             a llama2.c .bin whose tokenizer the parent's was made of
    autoregressive_tokenizer   its tokenizer.bin
    config   num, length, seed and batch_size count here
    """
    config = config or PairsConfig()
    checkpoint = load_model(parent)
    first = checkpoint.bos_id
    if first is None:
        raise ValueError(
            f"{parent} has no first token that is given; inverse-autoregressive noise needs something to precede a text"
        )
    length = config.length or checkpoint.length
    causal = causal_over(autoregressive, checkpoint.tokenizer.pieces, autoregressive_tokenizer).eval()
    blocks = data.Blocks(data.Corpus.open(corpus, checkpoint.tokenizer), length, config.seed, document_starts=1.0)

    def text(samples: Sequence[int]) -> Tensor:
        return data.begin_with(first, blocks.rows(samples).x_1)

    about = {"autoregressive": file_sha256(Path(autoregressive)), "corpus": Path(corpus).name, "seed": config.seed}
    header = data.PairHeader(length=length, vocab_size=checkpoint.path.source.vocab_size, about=about)
    with Runtime(runtime or RuntimeConfig()) as machine:
        machine.place(causal)
        maker = InverseAutoregressive(text, causal, flow.alike(checkpoint.model.head.weight), config.seed)
        return _fill(maker, out, header, config=config, machine=machine, console=console)


def _fill(
    maker: PairMaker,
    out: str | Path,
    header: data.PairHeader,
    *,
    config: PairsConfig,
    machine: Runtime,
    console: Console | None,
) -> int:
    """Make pairs until the folder has as many, with a bar."""
    num, batch_size = config.num, config.batch_size
    with data.PairWriter(out, header) as writer, moving_bar(console or Console(stderr=True), logged=True) as progress:
        task = progress.add_task("reflow", total=num, completed=writer.count)
        with machine.autocast():
            for count in collect_pairs(maker, writer, num_pairs=num, batch_size=batch_size, device=machine.device):
                progress.update(task, completed=count)
        return writer.count


def _pair_maker(checkpoint: Checkpoint, config: PairsConfig, sampler: SamplerConfig) -> Reflow:
    draws = find_named(DRAWS, config.draws, "draws")
    if draws is not None and sampler.jump not in (None, "exact", "spaced"):
        raise ValueError(f"jump is {sampler.jump!r} with draws quantile; allowed are exact and spaced")
    return Reflow(
        checkpoint.model,
        checkpoint.path,
        config.length or checkpoint.length,
        flow.Grid(sampler.make_grid(torch.zeros(1, dtype=torch.float64), checkpoint.path.schedule).times[0]),
        rule=sampler.rule(),
        seed=sampler.seed,
        first_token=checkpoint.bos_id,
        filter=sampler.filter(),
        draws=draws,
        order=None if draws is None else flow.alike(checkpoint.model.head.weight),
    )
