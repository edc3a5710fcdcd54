"""Texts of the shipped models, through everything that `generate` does, against the samplers in forty plain lines.

Both are asked within one run, so that no number of one machine is written down.
"""

from __future__ import annotations

import math

import pytest
import torch

from fsdfm.checkpoint.embedded import embedded_models
from fsdfm.generate import load
from fsdfm.noise import Noise
from plain_sampler import plain_joint_sample, plain_sample


def shipped(name):
    if name not in embedded_models():
        pytest.skip(f"the model {name} is not in this build")
    return load(name, device="cpu", threads=1)


@pytest.fixture(scope="module")
def parent():
    return shipped("parent")


@pytest.fixture(scope="module")
def fewstep():
    lm = shipped("fewstep")
    if type(lm.checkpoint.model.joint).__name__ != "CausalHead":
        pytest.skip("the shipped few-step model has no causal head")
    return lm


def start(lm, request, seed):
    """The noise of a request, what is frozen in it, and x_0."""
    noise, frozen = Noise(seed, [request.sample_index(0)]), torch.tensor([request.frozen])
    x_0 = torch.where(
        frozen, torch.tensor([request.tokens]), lm.checkpoint.path.source.sample(noise, len(request.tokens))
    )
    return noise, frozen, x_0


def without_bos(lm, logits):
    """No text holds the token that begins a document, where that is another than the one that ends it."""
    bos, eos = lm.checkpoint.bos_id, lm.checkpoint.tokenizer.eos_id
    if bos is not None and bos != eos:
        logits[..., bos] = -math.inf
    return logits


def told(t, steps):
    time = torch.full((1,), t, dtype=torch.float64)
    return time, torch.full_like(time, 1 / steps)


def text_of(lm, request, x):
    """The tokens of a text up to the end of the document."""
    x, eos = x[request.num_bos :], lm.checkpoint.tokenizer.eos_id
    free = [i for i, fixed in enumerate(request.frozen[request.num_bos :]) if not fixed]
    return x[: next((i for i in free if x[i] == eos), len(x))]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (None, {"jump": "exact", "temperature": 1.0}),
        ("Once upon", {"jump": "exact", "temperature": 0.8, "top_p": 0.9}),
        ("Once upon", {"jump": "single", "temperature": 0.7, "top_k": 50}),
    ],
)
def test_texts_of_the_parent_are_those_of_the_definition(parent, prompt, options) -> None:
    steps, seed, checkpoint = 3, 5, parent.checkpoint
    request = parent.encoder.continuation(prompt, None, length=14)
    found = parent.run([request], steps=steps, seed=seed, start=0.0, **options)[0]
    noise, frozen, x_0 = start(parent, request, seed)

    @torch.no_grad()
    def logits(x_t, t):
        return without_bos(parent, checkpoint.model(x_t, *told(t, steps)).double())

    narrowing = (options["temperature"], options.get("top_k"), options.get("top_p"))
    (expected,) = plain_sample(
        logits, checkpoint.path, x_0, steps=steps, rule=options["jump"], noise=noise, frozen=frozen, narrowing=narrowing
    )
    assert list(found.tokens) == text_of(parent, request, expected)


@pytest.mark.parametrize(
    ("prompt", "steps", "options"),
    [
        ("Once upon", 1, {}),  # as it is advised
        (None, 3, {"jump": "spaced"}),
        ("Once upon", 3, {"jump": "exact", "temperature": 1.1}),
        ("Once upon", 2, {"jump": "spaced", "temperature": 0.9, "top_k": 50, "top_p": 0.9}),
    ],
)
def test_texts_of_the_few_step_model_are_those_of_the_definition(fewstep, prompt, steps, options) -> None:
    """Its posterior is drawn left to right: every conditional law by teacher forcing, one whole pass a token."""
    seed, checkpoint = 5, fewstep.checkpoint
    request = fewstep.encoder.continuation(prompt, None, length=14)
    found = fewstep.run([request], steps=steps, seed=seed, start=0.0, **options)[0]
    config = fewstep.sampler_config(steps=steps, **options)
    noise, frozen, x_0 = start(fewstep, request, seed)

    @torch.no_grad()
    def law(x, t):
        time, h = told(t, steps)
        features = checkpoint.model.trunk(torch.tensor([x]), time, h)

        def conditional(text):
            rest = [0] * (len(x) - len(text))  # nobody sees what stands behind
            read = checkpoint.model.joint.read(checkpoint.model, features, torch.tensor([text + rest]), t=time, h=h)
            return without_bos(fewstep, checkpoint.model.logits_at(read[0, len(text)][None])[0].double()).tolist()

        return torch.no_grad()(conditional)

    expected = plain_joint_sample(
        law,
        checkpoint.path,
        x_0[0].tolist(),
        steps=steps,
        rule=str(config.jump),
        noise=noise,
        frozen=frozen[0].tolist(),
        narrowing=(config.temperature, config.top_k, config.top_p),
    )
    assert list(found.tokens) == text_of(fewstep, request, expected)
