"""A small autoregressive model of the same parts: the baseline, and a judge of other models' text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdfm.flow.categorical import Filter
from fsdfm.model.causal_loop import CausalParts, CausalTexts, can_loop, draw_texts
from fsdfm.model.few_rows import LARGE
from fsdfm.model.layers import Block, Cache, Norm, StackConfig, embedding, initialise, linear, rotary_phases
from fsdfm.noise import Noise, Purpose

__all__ = ["CausalConfig", "CausalModel"]

_ROWS_AT_ONCE = 512  # positions whose logits live at the same time in `nll`


@dataclass(frozen=True, kw_only=True)
class CausalConfig(StackConfig):
    """The architecture of a `CausalModel`; `max_length` is the longest text it was trained on."""

    max_length: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("max_length")


class CausalModel(nn.Module):
    """A causal transformer: logits [B, L, V] of p(x_{i+1} | x_0 .. x_i)."""

    def __init__(self, config: CausalConfig, *, seed: int = 0):
        super().__init__()
        self.config = config
        self.embedding = embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, causal=True) for _ in range(config.num_blocks))
        self.norm = Norm(config)
        self.head = linear(config.width, config.vocab_size, bias=config.style == "paper")
        initialise(self, config.num_blocks, seed)
        nn.init.zeros_(self.head.weight)

    def trunk(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Normed features [B, L, C]; with caches, of the tokens that follow the cached ones."""
        start = caches[0].length if caches else 0
        end = start + tokens.shape[1]
        if end > self.config.max_length:
            raise ValueError(
                f"the text has {end} tokens; this model knows at most {self.config.max_length}: give it windows"
            )
        rotary = rotary_phases(tokens.shape[1], self.config.head_width, start=start, device=tokens.device)
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, caches[i] if caches else None)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token after every position: [B, L, V]."""
        return self.head(self.trunk(tokens))  # type: ignore[no-any-return]

    def nll(self, tokens: Tensor) -> Tensor:
        """-log p(x_i | x_0 .. x_{i-1}) in nats for i = 1 .. L-1: float32 [B, L-1]; the first token is given."""
        features = torch.split(self.trunk(tokens[:, :-1]).flatten(0, 1), _ROWS_AT_ONCE)
        targets = torch.split(tokens[:, 1:].flatten(), _ROWS_AT_ONCE)
        parts = [
            F.cross_entropy(self.head(rows).float(), target, reduction="none")
            for rows, target in zip(features, targets, strict=True)
        ]
        return torch.cat(parts).view(tokens.shape[0], tokens.shape[1] - 1)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, noise: Noise, *, temperature: float = 1.0, eos_id: int | None = None
    ) -> Tensor:
        """Continue a prompt [B, P] to `length` tokens, [B, length], by inverse-CDF draws in float64.

        Temperature 0 takes the likeliest token. After its first new `eos_id` a row holds nothing else.
        """
        batch, given = prompt.shape
        if self.training:
            raise ValueError("the model is in training mode; call eval() first, or dropout disturbs the text")
        if not 1 <= given <= length <= self.config.max_length:
            raise ValueError(
                f"the prompt has {given} tokens and length is {length}; "
                f"allowed are 1 <= prompt <= length <= {self.config.max_length}"
            )
        if len(noise) != batch or temperature < 0:
            raise ValueError(
                f"noise has {len(noise)} rows and temperature is {temperature}; "
                f"allowed are {batch} rows, one for each of the prompt, and temperature >= 0"
            )
        uniform = noise.uniform(Purpose.DESTINATION, length)
        if temperature and can_loop(self.blocks, self.embedding.weight):
            tokens = self._generate_together(prompt, uniform, Filter(temperature=temperature))
            return tokens if eos_id is None else _ended(tokens, given, eos_id)
        caches = [Cache(length) for _ in self.blocks]
        tokens = torch.empty(batch, length, dtype=torch.int64, device=prompt.device)
        tokens[:, :given] = prompt
        new = prompt
        for i in range(given, length):
            logits = self.head(self.trunk(new, caches)[:, -1])
            tokens[:, i] = _draw(logits, uniform[:, i], temperature)
            new = tokens[:, i : i + 1]
        return tokens if eos_id is None else _ended(tokens, given, eos_id)

    def _generate_together(self, prompt: Tensor, u: Tensor, filter: Filter) -> Tensor:
        """Prompts [B, P] continued to the length of u [B, L], on a CPU, some texts side by side.

        The law of x_2 .. x_L, in which the first token is an input of its own: `causal_loop.CausalParts`.
        """
        parts = CausalParts(self.blocks, self.norm, self.embedding.weight, self.head)
        (batch, given), length = prompt.shape, u.shape[1]
        x = F.pad(prompt, (0, length - given))
        inputs = F.pad(self.embedding(prompt[:, :1]), (0, 0, 0, length - 2)) if length > 1 else None
        for first in range(0, batch if inputs is not None else 0, LARGE):
            own = slice(first, first + LARGE)
            assert inputs is not None
            caches = [[Cache(length) for _ in self.blocks] for _ in x[own]]
            if given > 1:
                for text, kept in zip(prompt[own], caches, strict=True):
                    self.trunk(text[None, :-1], kept)
            texts = CausalTexts(
                x[own, 1:].contiguous(),
                torch.ones_like(x[own, 1:], dtype=torch.bool),
                inputs=inputs[own],
                base=None,
                starts=[given - 1] * len(caches),
                ends=[length - 1] * len(caches),
                caches=caches,
                u=u[own, 1:].contiguous(),
                filter=filter,
                banned=torch.zeros(len(caches), self.config.vocab_size),
            )
            x[own, 1:] = draw_texts(parts, texts)
        return x


def _ended(tokens: Tensor, given: int, eos_id: int) -> Tensor:
    """Tokens [B, L] with nothing but `eos_id` behind the first that is not given."""
    ended = (tokens[:, given:] == eos_id).long().cumsum(1) > 0
    return torch.cat([tokens[:, :given], torch.where(ended, eos_id, tokens[:, given:])], 1)


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """x = min{v : CDF(v) >= u} of softmax(logits / temperature), in float64: logits [B, V], uniform [B] -> [B]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    cdf = torch.softmax(logits.double() / temperature, dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:]).squeeze(1)
