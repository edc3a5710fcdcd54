"""The prompt's keys and values: exact where they are fresh, nearly so where they are old."""

import pytest
import torch

from fsdfm.generate import LanguageModel, SamplerConfig
from fsdfm.generate.cache import PromptCache
from tiny_models import random_bundle

PROMPT = "a prompt of some length"


def laws(denoiser, x_t, t, h):
    rows = torch.arange(x_t.numel())
    tiles = [tile if own is None else tile[own] for _, tile, own in denoiser.posterior(x_t, t, h).marginals(rows)]
    return torch.log_softmax(torch.cat(tiles), -1)


@pytest.mark.parametrize("bos_id", [None, 1])
def test_fresh_keys_are_exact_and_old_ones_are_near(bos_id):
    """Call 1 computes all; call 2, asked the same, gives the same; asked another state, it is close to it."""
    lm = LanguageModel(random_bundle(bos_id=bos_id))
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randint(256, (2, 24), generator=generator)
    frozen = torch.zeros_like(x_t, dtype=torch.bool)
    frozen[:, :12] = True
    frozen[1, 20:] = True
    t = torch.tensor([0.5, 0.25], dtype=torch.float64)
    cache = PromptCache(lm.network, frozen)
    first, exact = laws(cache, x_t, t, t / 8), laws(lm.network, x_t, t, t / 8)
    torch.testing.assert_close(first, exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(laws(cache, x_t, t, t / 8), exact, atol=1e-4, rtol=1e-4)
    later = torch.where(frozen, x_t, torch.randint(256, x_t.shape, generator=generator))
    near, true = laws(cache, later, t + 0.125, t / 8), laws(lm.network, later, t + 0.125, t / 8)
    free = ~frozen.flatten()
    divergence = (true.exp() * (true - near)).sum(-1)
    assert 0 < float(divergence[free].mean()) < 0.5
    renewed = PromptCache(lm.network, frozen, refresh=1)
    laws(renewed, x_t, t, t / 8)
    torch.testing.assert_close(laws(renewed, later, t + 0.125, t / 8), true, atol=1e-4, rtol=1e-4)


def test_it_computes_only_what_is_free():
    lm = LanguageModel(random_bundle())
    seen = []
    inner = lm.checkpoint.model.features_beside
    lm.checkpoint.model.features_beside = lambda x, t, h, **rest: (seen.append(x.shape[1]), inner(x, t, h, **rest))[1]
    plain = lm.generate(PROMPT, length=32, steps=4)
    kept = lm.generate(PROMPT, length=32, steps=4, cache="prompt")
    given = sum(plain.given)
    assert seen[0] == 32
    assert set(seen[1:]) == {32 - given - 1}  # and the token that begins the document
    assert kept.tokens[:given] == plain.tokens[:given]
    seen.clear()
    lm.generate(PROMPT, length=32, steps=4, cache="prompt:2")
    assert seen.count(32) == 2


def test_off_is_the_default_and_other_words_are_refused():
    assert SamplerConfig().refresh() is None
    assert "cache" not in SamplerConfig().to_json()
    assert SamplerConfig(cache="prompt:4").refresh() == 4
    for wrong in ("on", "prompt:x", "prompt:-1"):
        with pytest.raises(ValueError, match="cache is"):
            SamplerConfig(cache=wrong)


@pytest.mark.parametrize("posterior", ["causal", "crf"])
def test_joint_heads_read_the_kept_features(posterior):
    from fsdfm.model import CausalHeadConfig, CRFConfig

    config = CausalHeadConfig(num_blocks=1, cond_width=8) if posterior == "causal" else CRFConfig(rank=2)
    lm = LanguageModel(random_bundle(posterior=config))
    assert len(lm.generate(PROMPT, length=28, steps=2, cache="prompt").tokens) == 27
