"""Text to tokens, tokens to a model: train, prepare, import, export, reflow."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fsdfm.cli.completion import complete_models, complete_recipes
from fsdfm.cli.options import SEPARATOR, OutOption, SeparatorOption, console
from fsdfm.cli.sampling import NoiseSamplingOptions, takes_groups
from fsdfm.terminal import say

__all__ = ["export", "import_weights", "prepare", "reflow", "train"]


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name, such as tiny-dfm, or the path of a TOML file.", autocompletion=complete_recipes
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Values to replace: train.steps=100 out=DIR.")] = None,
) -> None:
    """Train what a recipe says; the same command again resumes it. Ctrl-C saves first."""
    from fsdfm.run import train as run_recipe

    result = run_recipe(recipe, overrides or [])
    if not result.speaks:  # another process of the run does
        return
    state = "finished" if result.finished else "stopped and saved; the same command resumes it"
    say(console, f"{result.folder}: {state}, training step {result.training_step}")


def prepare(
    *,
    inputs: Annotated[list[str], typer.Argument(help="Text, .jsonl or .parquet files, hf:NAME, or builtin:pydoc.")],
    out: OutOption,
    tokenizer: Annotated[str, typer.Option(help="bytes, gpt2, bpe:SIZE (trained on the text), or a path.")] = "gpt2",
    separator: SeparatorOption = SEPARATOR,
    field: Annotated[str, typer.Option(help="Holds the document in JSON lines, Parquet and datasets.")] = "text",
    max_documents: Annotated[int | None, typer.Option(help="Stop after so many documents.")] = None,
    processes: Annotated[int, typer.Option(help="That encode text at once; the corpus is the same.", min=1)] = 1,
) -> None:
    """Turn text into a packed corpus of tokens; interrupted, the same command resumes it."""
    from fsdfm.config import DataConfig
    from fsdfm.run import prepare_corpus

    config = DataConfig(
        inputs=tuple(inputs), tokenizer=tokenizer, separator=separator, field=field, max_documents=max_documents
    )
    corpus = prepare_corpus(config, out, processes=processes)
    say(console, f"{out}: {len(corpus.starts):,} documents, {len(corpus):,} tokens")


def import_weights(
    *,
    source: Annotated[
        str,
        typer.Argument(
            help="A file or folder of weights, or a model on the hub: owner/name[@revision].", metavar="WEIGHTS"
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write to; imported/NAME unless said.")] = None,
    format: Annotated[
        str, typer.Option(help="auto (what is in it tells), llama2c, fs-dfm (the paper's .pth) or huggingface.")
    ] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="llama2c: its tokenizer.bin, else behind the weights. fs-dfm: gpt2, or a path.")
    ] = None,
    half: Annotated[bool, typer.Option(help="Store the weights as float16; huggingface: as bfloat16.")] = False,
    texts: Annotated[
        list[str] | None, typer.Option(help="llama2c: keep only the tokens that these inputs use.")
    ] = None,
    separator: SeparatorOption = SEPARATOR,
    min_count: Annotated[
        int | None, typer.Option(help="llama2c: how often the texts must use a token for it to be kept.", min=1)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="fs-dfm: the paper's size: 0.17b, 1.3b or 1.7b.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="fs-dfm: or a JSON file with the settings; else shapes tell.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="fs-dfm, peer: ema, raw or teacher; ema where there are any.")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="peer: mdlm, duo, sdtt, sedd-absorb, sedd-uniform, hdlm-epsilon, hdlm-gamma, if files do not say."
        ),
    ] = None,
    flow_source: Annotated[
        str | None, typer.Option(help="huggingface, autoregressive: uniform (unless said), mask or mixture.")
    ] = None,
    shift: Annotated[bool, typer.Option(help="huggingface, autoregressive: keep the next-token shift.")] = True,
    length: Annotated[
        int | None, typer.Option(help="huggingface: tokens per block; 1024, or what the model knows.", min=1)
    ] = None,
) -> None:
    """Make a checkpoint of other people's weights, to generate, evaluate and train with; runs nothing in them."""
    given = dict(locals())
    from fsdfm.run import ImportConfig
    from fsdfm.run import import_weights as run_import

    names = (
        "tokenizer",
        "half",
        "separator",
        "min_count",
        "preset",
        "config",
        "weights",
        "flow_source",
        "shift",
        "length",
        "system",
    )
    said = ImportConfig(texts=tuple(texts or ()), **{name: given[name] for name in names})
    out = out or Path("imported") / Path(source.partition("@")[0]).name
    checkpoint = run_import(source, out, said, format=format)
    parameters, network = sum(p.numel() for p in checkpoint.model.parameters()), checkpoint.model.config
    known = (
        f", {checkpoint.facts['weights']} ({checkpoint.facts['imported']['group']})"
        if "imported" in checkpoint.facts
        else ""
    )
    say(
        console,
        f"{out}: {parameters:,} parameters, {network.vocab_size:,} tokens{known}, "
        f"{'step-aware' if network.is_step_aware else 'not step-aware'}",
    )


def export(
    *,
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A run, whose newest checkpoint is taken, a checkpoint, or a model's name.",
            autocompletion=complete_models,
        ),
    ],
    out: OutOption,
    half: Annotated[bool, typer.Option(help="Store the weights as float16.")] = False,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            help="How the model is best sampled, NAME=VALUE: jump=spaced, temperature=1:0.9,8:0.85 (steps:value), or "
            "none; may be repeated. As it was unless said."
        ),
    ] = None,
    fit_curve: Annotated[
        str | None,
        typer.Option(help="Text it was not trained on: fit the entropy curve that --steps auto wants, and advise it."),
    ] = None,
    rotary: Annotated[
        str | None,
        typer.Option(help="ntk:2: rows twice as long as in training, at scaled rotary angles (or linear:2)."),
    ] = None,
    format: Annotated[
        str, typer.Option(help="checkpoint, or onnx: a folder that writes text without PyTorch (generate.py in it).")
    ] = "checkpoint",
) -> None:
    """Make a folder to share of a run: the averaged weights, tokenizer and model card, no training state."""
    if format == "onnx":
        if half or sampling is not None or fit_curve is not None or rotary is not None:
            raise ValueError(
                "--half, --sampling, --fit-curve and --rotary are not used with --format onnx; leave them out"
            )
        from fsdfm.adapters.onnx import export_onnx

        return say(console, f"{export_onnx(checkpoint, out)}: python {out / 'generate.py'} 'Once upon a time'")
    if format != "checkpoint":
        raise ValueError(f"--format is {format!r}; allowed are checkpoint and onnx")
    from fsdfm.generate import read_advice
    from fsdfm.run import export as run_export

    advice = None if sampling is None else read_advice(sampling)
    made = run_export(checkpoint, out, half=half, sampling=advice, curve_text=fit_curve, rotary=rotary)
    parameters = sum(p.numel() for p in made.model.parameters())
    say(console, f"{out}: {parameters:,} parameters")


@takes_groups
def reflow(
    *,
    parent: Annotated[
        str,
        typer.Argument(
            help="The checkpoint, run or model whose trajectories are kept.", autocompletion=complete_models
        ),
    ],
    out: OutOption,
    num: Annotated[int, typer.Option(help="Pairs in all; what is there already counts.", min=1)] = 4096,
    steps: Annotated[int, typer.Option(help="Network calls of a pair.", min=1)] = 64,
    length: Annotated[int | None, typer.Option(help="Tokens; the parent's length unless given.", min=1)] = None,
    draws: Annotated[str, typer.Option(help="free, or quantile: read off the noise, less is left to guess.")] = "free",
    corpus: Annotated[
        Path | None, typer.Option(help="Prepared text that pairs begin on the way to, or end in (--autoregressive).")
    ] = None,
    autoregressive: Annotated[
        Path | None, typer.Option(help="A llama2.c .bin: pairs are text and the noise it would turn into this text.")
    ] = None,
    autoregressive_tokenizer: Annotated[
        Path | None, typer.Option(help="Its tokenizer.bin, if not behind the weights.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs made at a time; it does not change them.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    precision: Annotated[str, typer.Option(help="Of matrix products: auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: torch's own choice.")] = 0,
    sampling: NoiseSamplingOptions,
) -> None:
    """Keep pairs of noise and what a parent makes of it, to train on (discrete reflow); interrupted, it resumes."""
    given = dict(locals())
    from typing import cast

    from fsdfm.run import PairsConfig, make_inverse_pairs, make_pairs, make_timed_pairs
    from fsdfm.runtime import Precision, RuntimeConfig

    own = {name: given[name] for name in ("num", "steps", "length", "draws", "batch_size")}
    config = PairsConfig(**{**asdict(sampling), **own})
    runtime = RuntimeConfig(device=device, precision=cast(Precision, precision), threads=threads)
    if corpus is None and autoregressive is not None:
        raise ValueError("--autoregressive needs --corpus: the text that noise is made for")
    if corpus is None:
        count = make_pairs(parent, out, config, runtime=runtime)
    elif autoregressive is None:
        count = make_timed_pairs(parent, corpus, out, config=config, runtime=runtime)
    else:
        count = make_inverse_pairs(
            parent,
            autoregressive,
            corpus,
            out=out,
            config=config,
            autoregressive_tokenizer=autoregressive_tokenizer,
            runtime=runtime,
        )
    say(console, f"{out}: {count:,} pairs; train on them with data.pairs={out}")
