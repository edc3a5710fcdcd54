"""Long texts of canvas models: read once, written canvas after canvas, streamed."""

import pytest
import torch

from fsdfm.checkpoint import Checkpoint, load_model
from fsdfm.flow import MixturePath, UniformSource
from fsdfm.generate import LanguageModel
from fsdfm.model import DiT, ModelConfig
from tiny_models import BYTES


def canvas_model(window=16, tokenizer=BYTES, bos_id=None, **options):
    vocab_size = tokenizer.vocab_size
    config = ModelConfig(
        vocab_size=vocab_size, width=16, num_blocks=2, num_heads=2, cond_width=8, canvas=8, window=window, **options
    )
    model = DiT(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.2)
    return LanguageModel(Checkpoint(model, MixturePath(UniformSource(vocab_size)), tokenizer, 32, bos_id=bos_id))


def test_a_canvas_is_read_once_whatever_the_calls():
    lm, reads, calls = canvas_model(), [], []
    read, trunk = lm.checkpoint.model.read, lm.checkpoint.model.features_at
    lm.checkpoint.model.read = lambda tokens, context: (reads.append(tokens.shape[1]), read(tokens, context))[1]
    lm.checkpoint.model.features_at = lambda x, *rest, **more: (calls.append(x.shape[1]), trunk(x, *rest, **more))[1]
    made = lm.generate(length=64, steps=3, begin="anywhere", suffix="x")
    assert made.blocks == 8
    assert reads == [8] * 7
    assert set(calls) == {8}
    assert len(calls) <= 24
    assert len(made.tokens) == 64


def test_a_text_depends_on_its_request_alone():
    lm = canvas_model(window=None)
    alone = lm.generate("abc", length=40, steps=2, suffix="z")
    pair = lm.generate(["abc", "other"], length=40, steps=2, suffix="z")
    assert pair[0].tokens == alone.tokens
    assert pair[0].tokens != pair[1].tokens


def test_blocks_stream_as_they_are_done():
    lm = canvas_model()
    whole = lm.generate("It was a long", length=60, steps=2, suffix="!")
    stream = lm.stream("It was a long", length=60, steps=2, suffix="!")
    blocks = stream.blocks()
    first = next(blocks)
    assert len(first) < len(whole.text)
    joined = first + "".join(blocks)
    assert joined.replace("\ufffd", "") == whole.text.replace("\ufffd", "")
    assert stream.result.tokens == whole.tokens


def test_the_space_between_two_blocks_is_kept():
    """A tokenizer that writes words with the space before them, over a network that speaks of the next token."""
    shipped = load_model("parent")
    lm = canvas_model(tokenizer=shipped.tokenizer, bos_id=shipped.bos_id, next_token=True)
    prompt, suffix = "Once upon a time there was a cat, and", "and they lived happily ever after, to the end of it."
    stream = lm.stream(prompt, length=48, steps=2, suffix=suffix)
    assert stream.num_blocks == 6
    blocks = [*stream.blocks()]
    assert "".join(blocks) == stream.result.text
    assert stream.result.text.startswith(prompt)
    assert stream.result.text.endswith(suffix)  # longer than a canvas: nothing is written in the last one
    assert len(blocks) == 5  # the first canvas is given, too, and comes with the second


def test_a_prompt_is_read_and_changes_what_follows():
    lm = canvas_model(window=None)
    long = "x" * 20
    made = lm.generate(long, length=40, steps=2, suffix="z")
    other = lm.generate("y" + long[1:], length=40, steps=2, suffix="z")
    assert made.text.startswith(long)
    assert made.tokens[20:] != other.tokens[20:]
    assert any("not seen until then" in sentence for sentence in made.warnings)


def test_canvases_beyond_those_of_a_byte_have_noise_of_their_own():
    """Canvas 256 is not canvas 0 of another copy: its number goes on above."""
    lm = canvas_model()
    request, seen = lm.encoder.continuation("abc", None, length=40), set()
    for copy in request.copies(3):
        seen |= {copy.sample_index(block) for block in range(600)}
    assert len(seen) == 3 * 600
    assert max(seen) < 2**56
    with pytest.raises(ValueError, match="4096 canvases of 8"):
        lm.generate(length=8 * 4096 + 1, steps=1)


def test_generate_tells_of_blocks_as_they_are_done():
    lm, told = canvas_model(), []
    read = lm.checkpoint.model.read
    lm.checkpoint.model.read = lambda tokens, context: (told.append("read"), read(tokens, context))[1]
    made = lm.generate("It was", length=30, steps=1, suffix="!", on_block=told.append)
    plain = canvas_model().generate("It was", length=30, steps=1, suffix="!")
    assert made.tokens == plain.tokens
    texts = [word for word in told if word != "read"]
    assert "".join(texts).startswith("It was")
    assert len(texts) > 1
    assert told.index(texts[0]) < len(told) - 1 - told[::-1].index("read")  # told before the last canvas is begun
    with pytest.raises(ValueError, match="on_block follows one text"):
        lm.generate(["a", "b"], on_block=told.append)
    with pytest.raises(ValueError, match="on_block follows one text"):
        lm.generate("a", num=2, on_block=told.append)
