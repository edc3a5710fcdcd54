"""Clean context: training's masks and sampling's keys are the same numbers; rotary scaling in closed form."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from fsdfm.model import DiT, ModelConfig
from fsdfm.model.context import CanvasPattern, attend, flex
from fsdfm.model.layers import RotaryScaling, rotary_phases

SIZES = {"vocab_size": 11, "width": 16, "num_blocks": 3, "num_heads": 2, "cond_width": 8, "dropout": 0.0}


def network(**options):
    model = DiT(ModelConfig(**SIZES, **options)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("window", [None, 4, 8])
def test_canvases_read_one_after_the_other_are_those_of_training(window, next_token):
    model = network(canvas=4, window=window, next_token=next_token)
    generator = torch.Generator().manual_seed(0)
    x_1, x_t = torch.randint(11, (2, 2, 20), generator=generator)
    t, h = torch.tensor([0.3, 0.6]), torch.tensor([0.1, 0.1])
    with torch.no_grad():
        together = model.trunk(x_t, t, h, context=model.read_all(x_1))
        context, parts = None, []
        for start in range(0, 20, 4):
            own = slice(start, start + 4)
            parts.append(model.trunk(x_t[:, own], t, h, context=context))
            context = model.read(x_1[:, own], context)
    own = slice(int(next_token), None)  # a next-token model's first token is given, and what is said there nothing
    torch.testing.assert_close(torch.cat(parts, 1)[:, own], together[:, own], atol=1e-5, rtol=1e-5)
    assert context.start == 20
    assert context.length == (20 if window is None else window)


def test_a_next_token_model_speaks_of_a_canvas_from_one_before():
    """Position 4, the first of canvas 1, is said by the clean token 3 under the noise of its own canvas."""
    model = network(canvas=4, next_token=True)
    x, t = torch.arange(8)[None], torch.full((1,), 0.5)
    with torch.no_grad():
        base = model.trunk(x, t, t, context=model.read_all(x))[0]
        noised, clean = x.clone(), x.clone()
        noised[0, 7], clean[0, 3] = 9, 9
        assert not torch.equal(model.trunk(noised, t, t, context=model.read_all(x))[0, 4], base[4])
        other = model.trunk(x, t, t, context=model.read_all(clean))[0]
    assert torch.equal(other[:4], base[:4])
    assert not torch.equal(other[4], base[4])


def test_a_canvas_sees_what_is_before_it_and_nothing_behind():
    model = network(canvas=4)
    x = torch.zeros(1, 12, dtype=torch.int64)
    t = torch.full((1,), 0.5)

    def features(x_1, x_t):
        with torch.no_grad():
            return model.trunk(x_t, t, t, context=model.read_all(x_1))[0]

    base = features(x, x)
    clean, noised = x.clone(), x.clone()
    clean[0, 5], noised[0, 5] = 3, 3
    moved = (features(clean, x) != base).any(-1)
    assert moved.tolist() == [False] * 8 + [True] * 4  # the clean token of canvas 1 is seen by canvas 2 alone
    moved = (features(x, noised) != base).any(-1)
    assert moved.tolist() == [False] * 4 + [True] * 4 + [False] * 4


@pytest.mark.parametrize("next_token", [False, True])
def test_the_rows_of_the_last_block_are_the_same_after_a_context(next_token):
    model = network(canvas=4, next_token=next_token)
    x = torch.randint(11, (1, 4), generator=torch.Generator().manual_seed(0))
    t, rows = torch.full((1,), 0.5), torch.tensor([0, 3])
    with torch.no_grad():
        context = model.read(x)
        torch.testing.assert_close(
            model.features_at(x, t, t, rows=rows, context=context), model.trunk(x, t, t, context=context)[0, rows]
        )


@pytest.mark.parametrize(
    ("noised", "led", "keys"),  # each is compiled, which takes seconds where nothing is kept of it
    [(False, False, 20), pytest.param(True, False, 40, marks=pytest.mark.slow), (True, True, 36)],
)
@pytest.mark.parametrize("window", [None, 8])
def test_flex_attention_sees_the_same(noised, led, keys, window):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 20, 8, generator=generator)
    k, v = torch.randn(2, 1, 2, keys, 8, generator=generator)
    pattern = CanvasPattern(4, window, noised, led)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = flex(q, k, v, pattern=pattern, grouped=False)
    torch.testing.assert_close(found, attend(q, k, v, pattern=pattern, grouped=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("noised", "led"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("window", [None, 4, 8])
def test_canvas_by_canvas_is_attention_under_the_dense_mask(window, noised, led, dtype):
    generator = torch.Generator().manual_seed(0)
    pattern, length = CanvasPattern(4, window, noised, led), 25 if led else 20
    q = torch.randn(2, 4, length, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, pattern.num_keys(length), 8, generator=generator)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    seen = pattern.mask(length, q.device)
    masked = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), seen, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = attend(q, k, v, pattern=pattern, grouped=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found, masked.to(dtype), atol=1e-5, rtol=1e-5)
    with_mask, without = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (masked.to(dtype), found))
    torch.testing.assert_close(without, with_mask, atol=1e-4, rtol=1e-4)


def test_linear_scaling_shrinks_positions_and_ntk_keeps_the_fastest_channel():
    plain = rotary_phases(9, 8)
    linear = rotary_phases(33, 8, scaling=RotaryScaling(kind="linear", factor=4.0))
    torch.testing.assert_close(linear[0][::4], plain[0])
    ntk = rotary_phases(33, 8, scaling=RotaryScaling(kind="ntk", factor=4.0))
    long = rotary_phases(33, 8)
    torch.testing.assert_close(ntk[0][..., 0], long[0][..., 0])  # the fastest
    torch.testing.assert_close(ntk[0][::4][..., 3], plain[0][..., 3])  # the slowest: four times slower
    model = network(rotary_factor=2.0)
    x, t = torch.arange(8)[None], torch.ones(1) / 2
    assert not torch.equal(model.trunk(x, t), network().trunk(x, t))
    assert model.config.scaling == RotaryScaling(kind="ntk", factor=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 8}, "multiples of the canvas"),
        ({"canvas": 4, "window": 6}, "window is 6"),
        ({"canvas": 0}, "canvas is 0"),
        ({"rotary_factor": 0.5}, "by a factor from 1 to 65536"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES, **options)


@pytest.mark.parametrize("window", [None, 8])
def test_what_is_kept_of_a_text_grows_with_it_or_with_the_window(window):
    """Bytes held by keys and values, those behind views included: 2 x layers x width x 4 a token; docs/long.md."""
    model, kept, context = network(canvas=4, window=window), [], None
    for _ in range(12):
        with torch.no_grad():
            context = model.read(torch.zeros(1, 4, dtype=torch.int64), context)
        tensors = [t for layer in context.layers for t in (layer.keys, layer.values)]
        kept.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))
    token = 2 * SIZES["num_blocks"] * SIZES["width"] * 4
    if window is None:
        assert kept[1:] == [4 * token * (n + 1) for n in range(1, 12)]  # the first is a view of its own pass
    else:
        assert max(kept) <= (window + 4) * token  # the window, and at most the canvas that pushed another one out
        assert len(set(kept[3:])) == 1


def test_a_model_without_a_canvas_reads_nothing():
    with pytest.raises(ValueError, match="has no canvas"):
        network().read_all(torch.zeros(1, 8, dtype=torch.int64))
