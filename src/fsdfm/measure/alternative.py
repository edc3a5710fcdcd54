"""The user's alternative: an autoregressive model that writes the same kind of text, with its cache, and its seconds.

    alternative = make_alternative("runs/tiny-causal/model", tokenizer)
    drawn = alternative.draw(64, length=256, bos_id=1, seed=0)
    drawn.columns["seconds"]

It writes in the tokens of the model that it is compared with, so that entropy and distinct-n compare: it has the same
tokenizer, or it is the llama2.c model whose tokenizer the other one's was made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fsdfm.checkpoint import causal_over
from fsdfm.data import Tokenizer
from fsdfm.measure.judges.causal import is_causal_folder, read_causal
from fsdfm.measure.rows import TokenRows
from fsdfm.measure.sampling import Drawn, read_clock
from fsdfm.model import CausalModel
from fsdfm.noise import Noise

__all__ = ["Alternative", "make_alternative"]

_STORIES15M = "stories15m"
_WARM = 4  # tokens
_STREAM = 7 << 40  # keeps its noise from that of the samples it is compared with


@dataclass(frozen=True)
class Alternative:
    """A causal model with the name that tables call it."""

    name: str
    model: CausalModel
    temperature: float = 1.0
    batch_size: int = 16

    @property
    def num_parameters(self) -> int:
        """Of the network."""
        return sum(p.numel() for p in self.model.parameters())

    def draw(self, num: int, *, length: int, bos_id: int | None, seed: int) -> Drawn:
        """`num` rows of `length` tokens, a call of the network for each token: keys and values are cached.

        A row begins with BOS; where the model it is compared with has none, with a token that is left out.
        """
        first, extra = (0, 1) if bos_id is None else (bos_id, 0)
        parts, device = [], next(self.model.parameters()).device
        self._warm_up(first)
        for start in range(0, num, self.batch_size):
            count = min(self.batch_size, num - start)
            noise = Noise(seed, [_STREAM + k for k in range(start, start + count)])
            began = read_clock(device)
            prompt = torch.full((count, 1), first, dtype=torch.int64)
            tokens = self.model.generate(prompt, length + extra, noise, temperature=self.temperature)
            seconds = (read_clock(device) - began) / count
            rows = tokens[:, extra:].to(torch.int32).numpy()
            parts.append(Drawn(rows, {"seconds": np.full(count, seconds)}))
        return Drawn.join(parts)

    def _warm_up(self, first: int) -> None:
        """A few tokens that nobody reads: what is compiled or loaded for the first text is no text's time."""
        length = min(_WARM, self.model.config.max_length)
        self.model.generate(torch.full((1, 1), first), length, Noise(0, [0]), temperature=self.temperature)

    def continue_rows(
        self, given: TokenRows, num_tokens: int, *, bos_id: int | None, copy: int, seed: int
    ) -> TokenRows:
        """What it writes behind each row: [N, num_tokens]; another `copy` has noise of its own."""
        prompts = torch.from_numpy(given.astype(np.int64))
        if bos_id is None:
            prompts = torch.cat([torch.zeros_like(prompts[:, :1]), prompts], 1)
        noise = Noise(seed, [_STREAM + (copy << 20) + k for k in range(len(prompts))])
        length = prompts.shape[1] + num_tokens
        written = self.model.generate(prompts, length, noise, temperature=self.temperature)[:, -num_tokens:]
        rows: TokenRows = written.to(torch.int32).numpy()
        return rows


def make_alternative(
    spec: str, tokenizer: Tokenizer, *, length: int, temperature: float = 1.0, batch_size: int = 16
) -> Alternative:
    """The alternative that a name means: a folder of `fsdfm train`'s causal model, or stories15m:FILE.

    length   tokens that it has to write
    """
    kind, _, file = spec.partition(":")
    if kind == _STORIES15M or spec.endswith(".bin"):
        path = Path(file if kind == _STORIES15M else spec)
        if not path.is_file():
            raise ValueError(
                f"the alternative {spec!r} is no file; give a llama2.c file, as in stories15m:stories15M.bin"
            )
        beside = path.with_name("tokenizer.bin")
        model, name = causal_over(path, tokenizer.pieces, beside if beside.is_file() else None), path.stem.lower()
    elif Path(spec).is_dir() and is_causal_folder(spec):
        model, own, _ = read_causal(spec)
        folder = Path(spec).resolve()
        name = folder.parent.name if folder.name == "model" else folder.name  # a run's model: the run
        if own.hash != tokenizer.hash:
            raise ValueError(f"{spec} has another tokenizer than the model: train it on the same prepared corpus")
    else:
        raise ValueError(f"the alternative is {spec!r}; allowed are a folder of a causal model, and stories15m:FILE")
    if length > model.config.max_length:
        raise ValueError(f"{spec} knows {model.config.max_length} tokens, and {length} are asked for: --length")
    model = model.half().float()  # as the models that ship are stored, so that its loop has as many bytes to read
    return Alternative(name, model.eval().requires_grad_(False), temperature, batch_size)
