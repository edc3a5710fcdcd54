"""Coupled pairs to train on: what a parent makes of noise, or text with the noise that spells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from fsdfm import data, flow
from fsdfm.checkpoint import Checkpoint, causal_over, load_model
from fsdfm.files import file_sha256
from fsdfm.learn.reflow import DRAWS, InverseAutoregressive, PairMaker, Reflow, couple
from fsdfm.model.weights import weights_sha256
from fsdfm.run.build import begin_with, named
from fsdfm.runtime import Runtime, RuntimeConfig

__all__ = ["PairsConfig", "make_coded_pairs", "make_pairs"]


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """How a parent's pairs are made."""

    num: int = 4096  # in all; what is there already counts
    steps: int = 64  # of the sampler
    length: int | None = None  # tokens; None: the parent's
    jump: str = "exact"  # the sampler's rule
    draws: str = "free"  # or `tied` to the noise: x_1 is then a more certain function of x_0 (`fsdfm.flow.coupling`)
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
    with Runtime(runtime or RuntimeConfig()) as machine:
        machine.place(bundle.model.eval())
        return _fill(coupler, out, header, config=config, machine=machine, console=console)


def make_coded_pairs(
    parent: str | Path,
    coder: str | Path,
    corpus: str | Path,
    out: str | Path,
    config: PairsConfig | None = None,
    *,
    coder_tokenizer: str | Path | None = None,
    runtime: RuntimeConfig | None = None,
    console: Console | None = None,
) -> int:
    """Rows of a packed corpus, each with the noise that spells it under an autoregressive model; resumable.

    parent   whose tokenizer, length and first token they are for
    coder    a llama2.c .bin whose tokenizer the parent's was made of; `coder_tokenizer` is its tokenizer.bin
    config   num, length, seed and batch_size count here
    """
    config = config or PairsConfig()
    bundle = load_model(parent)
    first = bundle.bos_id
    if first is None:
        raise ValueError(f"{parent} has no first token that is given; coded noise needs something to precede a text")
    length = config.length or bundle.length
    causal = causal_over(coder, bundle.tokenizer.pieces, coder_tokenizer).eval()
    blocks = data.Blocks(data.Corpus.open(corpus, bundle.tokenizer), length, config.seed, document_starts=1.0)

    def text(samples: Sequence[int]) -> Tensor:
        return begin_with(first, blocks.rows(samples).x_1)

    about = {"coder": file_sha256(Path(coder)), "corpus": Path(corpus).name, "seed": config.seed}
    header = data.PairHeader(length=length, vocab_size=bundle.path.source.vocab_size, about=about)
    with Runtime(runtime or RuntimeConfig()) as machine:
        machine.place(causal)
        maker = InverseAutoregressive(text, causal, flow.alike(bundle.model.head.weight), config.seed)
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
    with data.PairWriter(out, header) as writer, Progress(console=console or Console(stderr=True)) as progress:
        task = progress.add_task("couple", total=num, completed=writer.count)
        with machine.autocast():
            for count in couple(maker, writer, num_pairs=num, batch_size=batch_size, device=machine.device):
                progress.update(task, completed=count)
        return writer.count


def _coupler(bundle: Checkpoint, config: PairsConfig) -> Reflow:
    rule, draws = named(flow.RULES, config.jump, "jump"), named(DRAWS, config.draws, "draws")
    if draws is not None and config.jump not in ("exact", "spaced"):
        raise ValueError(f"jump is {config.jump!r} with tied draws; allowed are exact and spaced")
    return Reflow(
        bundle.model,
        bundle.path,
        config.length or bundle.length,
        flow.Grid.uniform(config.steps),
        rule=rule,
        seed=config.seed,
        first_token=bundle.bos_id,
        filter=None if config.temperature == 1 else flow.Filter(temperature=config.temperature),
        draws=draws,
        order=None if draws is None else flow.alike(bundle.model.head.weight),
    )
