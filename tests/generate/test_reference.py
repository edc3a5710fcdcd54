"""Texts of a shipped model, through everything that `generate` does, against the sampler in forty plain lines."""

from __future__ import annotations

import math

import pytest
import torch

from fsdfm.checkpoint.embedded import embedded_models
from fsdfm.generate import load
from fsdfm.noise import Noise
from plain_sampler import plain_sample


@pytest.fixture(scope="module")
def parent():
    if "parent" not in embedded_models():
        pytest.skip("the parent is not in this build")
    return load("parent", device="cpu", threads=1)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {"jump": "exact", "temperature": 1.0}),
        ("Once upon", {"jump": "exact", "temperature": 0.8, "top_p": 0.9}),
        ("Once upon", {"jump": "single", "temperature": 0.7, "top_k": 50}),
    ],
)
def test_texts_of_the_parent_are_those_of_the_definition(parent, prompt, options) -> None:
    steps, seed = 3, 5
    request = parent.encoder.continuation(prompt, None, length=14)
    found = parent.run([request], steps=steps, seed=seed, start=0.0, **options)[0]
    checkpoint = parent.checkpoint
    noise = Noise(seed, [request.sample_index(0)])
    frozen = torch.tensor([request.frozen])
    x_0 = torch.where(frozen, torch.tensor([request.tokens]), checkpoint.path.source.sample(noise, len(request.tokens)))

    @torch.no_grad()
    def logits(x_t, t):
        told = torch.full((1,), t, dtype=torch.float64)
        answer = checkpoint.model(x_t, told, torch.full_like(told, 1 / steps)).double()
        bos, eos = checkpoint.bos_id, checkpoint.tokenizer.eos_id
        if bos is not None and bos != eos:
            answer[..., bos] = -math.inf
        return answer

    narrowing = (options["temperature"], options.get("top_k"), options.get("top_p"))
    (expected,) = plain_sample(
        logits, checkpoint.path, x_0, steps=steps, rule=options["jump"], noise=noise, frozen=frozen, narrowing=narrowing
    )
    expected = expected[request.num_bos :]
    eos = checkpoint.tokenizer.eos_id
    free = [i for i, fixed in enumerate(request.frozen[request.num_bos :]) if not fixed]
    end = next((i for i in free if expected[i] == eos), len(expected))
    assert list(found.tokens) == expected[:end]
