"""Our exact posterior under diffusers' schedulers: the laws they write, against enumeration and against our rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers", minversion="0.40", reason="pip install diffusers")

from worlds import world  # noqa: E402

from fsdfm.adapters.diffusers import sample_with_scheduler  # noqa: E402
from fsdfm.flow import ExactDenoiser, ExactJump, Grid, MixturePath, PolynomialSchedule, sample  # noqa: E402
from fsdfm.flow.exact import all_states, posterior_table, sampler_law, total_variation  # noqa: E402
from fsdfm.noise import Noise  # noqa: E402
from fsdfm.peers.llada import LLaDARule  # noqa: E402
from tiny_models import random_bundle  # noqa: E402

TEXTS = 20_000
CHANCE = 0.02  # of the total variation of so many texts over at most 16 states


def law_of(texts: Tensor, vocab: int) -> Tensor:
    place = (texts * vocab ** torch.arange(texts.shape[1] - 1, -1, -1)).sum(-1)
    return torch.bincount(place, minlength=vocab ** texts.shape[1]).double() / len(texts)


def run(scheduler: object, path: MixturePath, p_1: Tensor, steps: int, **options: object) -> Tensor:
    denoiser, generator = ExactDenoiser(path, p_1=p_1), torch.Generator().manual_seed(0)
    x_0 = path.source.sample(Noise(0, range(TEXTS)), p_1.ndim)
    x_1 = sample_with_scheduler(denoiser, path, x_0, scheduler=scheduler, steps=steps, generator=generator, **options)
    return law_of(x_1, path.source.vocab_size)


def ddim_law(path: MixturePath, p_1: Tensor, steps: int) -> Tensor:
    """The law of D3PM's ancestral sampler with the exact posterior, by enumeration."""
    vocab, length = path.source.vocab_size, p_1.ndim
    denoiser, states = ExactDenoiser(path, p_1=p_1), all_states(vocab, length)
    law, eye = torch.full((len(states),), 1 / len(states), dtype=torch.float64), torch.eye(vocab, dtype=torch.float64)
    for index in range(steps):
        alpha_t, alpha_s = index / steps, (index + 1) / steps
        probs = posterior_table(denoiser, path, length, t=float(alpha_t), h=1 / steps)
        forward = alpha_s * eye + (1 - alpha_s) / vocab  # q(x_s | x_1): [x_1, x_s]
        onward = alpha_t / alpha_s * eye + (1 - alpha_t / alpha_s) / vocab  # q(x_t | x_s): [x_s, x_t]
        back = forward[:, None, :] * onward.T[None]  # [x_1, x_t, x_s]
        back = back / back.sum(-1, keepdim=True)
        kernel = torch.ones(len(states), len(states), dtype=torch.float64)
        for position in range(length):
            own = torch.einsum("nv,nvs->ns", probs[:, position], back[:, states[:, position]].permute(1, 0, 2))
            kernel *= own[:, states[:, position]]
        law = law @ kernel
    return law


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_discrete_ddim_writes_the_law_of_d3pm(steps: int) -> None:
    path, p_1 = world("uniform", PolynomialSchedule(1), vocab=4)
    found = run(diffusers.DiscreteDDIMScheduler(), path, p_1, steps, temperature=1.0)
    assert total_variation(found, ddim_law(path, p_1, steps)) < CHANCE
    start = torch.full((16,), 1 / 16, dtype=torch.float64)
    ours = sampler_law(ExactDenoiser(path, p_1=p_1), path, start, grid=Grid.uniform(steps), jump=ExactJump())
    if steps == 1:
        assert total_variation(ddim_law(path, p_1, 1), ours) < 1e-9  # one call is one redraw under both


def test_both_converge_to_the_data() -> None:
    path, p_1 = world("uniform", PolynomialSchedule(1), vocab=4)
    start, data = torch.full((16,), 1 / 16, dtype=torch.float64), p_1.flatten()
    many = Grid.uniform(64)
    ours = sampler_law(ExactDenoiser(path, p_1=p_1), path, start, grid=many, jump=ExactJump())
    assert total_variation(ddim_law(path, p_1, 64), data) < 0.02
    assert total_variation(ours, data) < 0.02


def test_an_unbounded_entropy_is_one_call_of_ours() -> None:
    path, p_1 = world("uniform", PolynomialSchedule(1), vocab=4)
    scheduler = diffusers.EntropyBoundScheduler(entropy_bound=1e9, t_max=1.0, t_min=1.0)
    start = torch.full((16,), 1 / 16, dtype=torch.float64)
    ours = sampler_law(ExactDenoiser(path, p_1=p_1), path, start, grid=Grid.uniform(1), jump=ExactJump())
    assert total_variation(run(scheduler, path, p_1, 1), ours) < CHANCE


@pytest.mark.slow
def test_block_refinement_is_lladas_order() -> None:
    path, p_1 = world("mask", PolynomialSchedule(1), vocab=3)
    scheduler = diffusers.BlockRefinementScheduler(threshold=2.0)
    found = run(scheduler, path, p_1, 2, temperature=1.0)
    noise = Noise(0, range(TEXTS))
    ours = sample(
        ExactDenoiser(path, p_1=p_1),
        path,
        path.source.sample(noise, 2),
        grid=Grid.uniform(2),
        rule=LLaDARule(temperature=1.0),
        noise=noise,
    )
    assert total_variation(found, law_of(ours, 4)) < 2 * CHANCE
    assert float(found.view(4, 4)[3].sum() + found.view(4, 4)[:, 3].sum()) == 0  # no mask is left


def test_a_model_of_ours_with_a_prompt() -> None:
    bundle = random_bundle(length=12)
    x_0 = bundle.path.source.sample(Noise(0, range(2)), 12)
    frozen = torch.zeros_like(x_0, dtype=torch.bool)
    frozen[:, :3] = True
    x_1 = sample_with_scheduler(
        bundle.model, bundle.path, x_0, scheduler=diffusers.DiscreteDDIMScheduler(), steps=3, frozen=frozen
    )
    assert torch.equal(x_1[:, :3], x_0[:, :3])
    linked = random_bundle(length=12, transition_rank=2)
    with pytest.raises(ValueError, match="joint posterior"):
        sample_with_scheduler(linked.model, linked.path, x_0, scheduler=diffusers.DiscreteDDIMScheduler(), steps=3)
