"""A recipe small enough to train in a test, and the command that trains it."""

import io
from pathlib import Path

import torch
from rich.console import Console

from fsdfm.run import train

TINY = """
[data]
inputs = ["{text}"]
tokenizer = "bytes"
corpus = "{corpus}"
length = 16
[model]
preset = "tiny"
width = 16
num_blocks = 1
num_heads = 2
cond_width = 8
dropout = 0.2
[objective]
kind = "{kind}"
{teacher}
[optim]
lr = 1e-2
warmup = 3
[train]
steps = 12
batch_size = 8
log_every = 2
save_every = 3
[runtime]
device = "cpu"
threads = 1
"""


def write_recipe(folder: Path, *, kind: str = "path", text: str | None = None) -> Path:
    """A recipe and its text in a folder; it trains in well under a second."""
    story = "".join(f"The {k} cats sat on {k * k} mats. " for k in range(200)) if text is None else text
    (folder / "text.txt").write_text(story)
    teacher = 'teacher = { kind = "shortcut", tableau = "rk2" }' if kind == "fewstep" else ""
    recipe = folder / f"{kind}.toml"
    recipe.write_text(TINY.format(text=folder / "text.txt", corpus=folder / "corpus", kind=kind, teacher=teacher))
    return recipe


def train_quietly(recipe: str, *overrides: str) -> None:
    """Train in a process of its own; its output would only mix with the tests'."""
    torch.set_num_threads(1)
    train(recipe, list(overrides), console=Console(file=io.StringIO()))
