"""Texts of unequal length in one call: padded to the end of their bucket, and each bit for bit what it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdfm.flow import Question
from fsdfm.generate import LanguageModel
from fsdfm.generate.invariant import BUCKET, BatchInvariant
from fsdfm.model import CRFConfig, DiT, Transformer, TransformerConfig
from fsdfm.model.causal_head import CausalHeadConfig
from fsdfm.runtime import Runtime, RuntimeConfig
from tiny_models import random_bundle

CPU = Runtime(RuntimeConfig(device="cpu"))
HEADS = {"independent": None, "crf": CRFConfig(rank=3), "causal": CausalHeadConfig(num_blocks=1, cond_width=8)}
LENGTHS = (33, 40, 41, 63)  # of one bucket


def network(head=None):
    """A small network that listens to everything, with a joint head or without."""
    model = random_bundle(length=64).model
    if head is not None:
        model = model.with_posterior(head)
        generator = torch.Generator().manual_seed(3)
        for weight in model.joint.parameters():
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def question(length, *, rows=None, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    x_t = torch.randint(0, 256, (1, length), generator=generator)
    t = torch.rand(1, generator=generator, dtype=torch.float64)
    return Question(x_t, t, (1 - t) / 2, rows)


def texts(posterior, length):
    """A draw, and the laws of all positions: bits of both."""
    u = torch.linspace(0.01, 0.99, length, dtype=torch.float64)[None]
    laws = [tile if own is None else tile[own] for _, tile, own in posterior.marginals(torch.arange(length))]
    held = posterior.given(torch.full((1, length), -1))
    return held.draw(torch.zeros(1, dtype=torch.int64), u), torch.cat(laws)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rows", [1, 4])
def test_company_changes_no_bit(head, rows):
    """`rows` = 4 is how devices other than a CPU compute: padded, with a mask, several samples at a time."""
    denoiser = BatchInvariant(network(HEADS[head]), CPU, rows=rows)
    asked = [question(length) for length in LENGTHS]
    together = denoiser.posteriors(asked)
    backwards = denoiser.posteriors(asked[::-1])[::-1]
    for each, *found in zip(asked, together, backwards, strict=True):
        length = each.x_t.shape[1]
        alone = texts(denoiser.posterior(each.x_t, each.t, each.h), length)
        for other in found:
            text, laws = texts(other, length)
            assert torch.equal(text, alone[0])
            assert torch.equal(laws, alone[1])


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_are_named_share_a_call_too(rows):
    denoiser = BatchInvariant(network(), CPU, rows=rows)
    some = torch.tensor([0, 3, 17, 32])
    asked = [question(33, rows=some), question(40), question(40, rows=torch.tensor([39]))]
    for each, found in zip(asked, denoiser.posteriors(asked), strict=True):
        rows_asked = torch.arange(each.x_t.shape[1]) if each.rows is None else each.rows
        (_, laws, _), *_ = found.marginals(rows_asked)
        (_, alone, _), *_ = denoiser.posterior(each.x_t, each.t, each.h, rows=each.rows).marginals(rows_asked)
        assert torch.equal(laws, alone)


@pytest.mark.parametrize("head", HEADS)
def test_padding_changes_laws_by_rounding_only(head):
    model = network(HEADS[head])
    plain, padded = BatchInvariant(model, CPU), BatchInvariant(model, CPU, rows=4)
    for length in LENGTHS:
        each = question(length)
        expected = plain.trunk(each.x_t, each.t, each.h)
        found = padded.trunk(each.x_t, each.t, each.h)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-5)
        laws = [texts(one.posterior(each.x_t, each.t, each.h), length)[1] for one in (plain, padded)]
        assert torch.allclose(*laws, atol=1e-5)


def networks_with_masks():
    yield network()
    config = TransformerConfig(vocab_size=257, width=32, num_blocks=2, num_heads=4, num_kv_heads=2)
    model = Transformer(config, seed=1)
    model.head.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    yield model.eval()


@torch.no_grad()
@pytest.mark.parametrize("model", [*networks_with_masks()], ids=["dit", "transformer"])
def test_what_is_hidden_changes_nothing(model):
    """Neither features elsewhere nor those of picked rows know what stands in the padding."""
    each = question(48)
    keys = (torch.arange(48) < 40)[None]
    other = torch.where(keys, each.x_t, (each.x_t + 7) % 256)
    rows = torch.tensor([0, 5, 39])
    for options in ({}, {"rows": rows}):
        one, two = (model.trunk(x_t, each.t, each.h, keys=keys, **options) for x_t in (each.x_t, other))
        seen = slice(None) if options else (slice(None), slice(40))
        assert torch.equal(one[seen], two[seen])
        whole = model.trunk(each.x_t[:, :40], each.t, each.h, **({"rows": rows} if options else {}))
        assert torch.allclose(one[seen], whole, atol=1e-5)
    assert not torch.equal(model.trunk(each.x_t, each.t, each.h)[:, :40], model.trunk(other, each.t, each.h)[:, :40])


def test_groups_are_buckets_and_full_ones_stand_apart():
    padded, plain = BatchInvariant(network(), CPU, rows=4), BatchInvariant(network(), CPU)
    groups = {length: padded.group(question(length)) for length in (BUCKET, BUCKET + 1, 2 * BUCKET - 1, 2 * BUCKET)}
    assert groups[BUCKET + 1] == groups[2 * BUCKET - 1]
    assert len(set(groups.values())) == 3
    assert plain.group(question(BUCKET + 1)) == plain.group(question(2 * BUCKET)) != plain.group(question(BUCKET))


def test_a_network_that_takes_no_mask_is_never_padded():
    class Plain(DiT):
        def trunk(self, x_t, t, h=None):
            assert x_t.shape[1] in LENGTHS
            return super().trunk(x_t, t, h)

    model = Plain(network().config).eval()
    denoiser = BatchInvariant(model, CPU, rows=4)
    assert len({denoiser.group(question(length)) for length in LENGTHS}) == len(LENGTHS)
    assert len(denoiser.posteriors([question(40, seed=1), question(40, seed=2)])) == 2


def test_a_question_is_about_one_text():
    each = question(40)
    two = replace(each, x_t=each.x_t.expand(2, -1), t=each.t.expand(2), h=each.h.expand(2))
    with pytest.raises(ValueError, match=r"\[1, 2\] texts; allowed is one each"):
        BatchInvariant(network(), CPU).posteriors([each, two])


@pytest.mark.parametrize("rows", [1, 4])
def test_texts_of_all_lengths_are_written_alike(rows):
    """Whole texts, padded or not, agree with those of the other arithmetic but for draws at the edge of rounding."""
    lm = LanguageModel(random_bundle(length=64))
    plain = [lm.generate("Once", length=length, steps=3, seed=length).tokens for length in LENGTHS]
    lm.network = BatchInvariant(lm.checkpoint.model, lm.runtime, rows=rows)
    found = [lm.generate("Once", length=length, steps=3, seed=length).tokens for length in LENGTHS]
    same = sum(a == b for one, two in zip(plain, found, strict=True) for a, b in zip(one, two, strict=False))
    assert same >= (0.97 if rows > 1 else 1.0) * sum(map(len, plain))
