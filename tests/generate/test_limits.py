"""What is too much is refused before it is tokenised or allocated, and nothing is quadratic in the request."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest

from fsdfm.checkpoint.folder import _LONGEST
from fsdfm.data import Tokenizer
from fsdfm.generate import LanguageModel
from fsdfm.generate.request import PromptEncoder, longest_text
from fsdfm.generate.result import pieces_of
from tiny_models import random_bundle

BYTES = Tokenizer.bytes()


def encoder(length: int = 32) -> PromptEncoder:
    return PromptEncoder(BYTES, None, needs_bos=False, length=length)


def refused(call, match: str) -> None:
    """The call is refused, and takes hardly any memory for it."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=match):
        call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def test_gaps_are_counted_before_they_are_made():
    refused(lambda: encoder().gaps("x" + "[[999999]]" * 400), "tokens are too many; at most 4112 are possible")


@pytest.mark.parametrize("length", [10**8, 10**9, 10**30])
def test_a_length_is_checked_before_it_is_made(length):
    refused(lambda: encoder().continuation("x", None, length=length), f"{length} tokens are too many")


def test_what_is_too_long_never_reaches_the_sampler(monkeypatch):
    """Tensors are no business of tracemalloc: no run is begun, in which they would be made."""
    lm = LanguageModel(random_bundle(length=32))
    monkeypatch.setattr("fsdfm.generate.model.GenerationRun", lambda *_, **__: pytest.fail("begun"))
    for call in (
        lambda: lm.generate("x", length=10**9),
        lambda: lm.generate(length=10**9, num=3),
        lambda: lm.stream("x", length=10**9),
        lambda: lm.infill("x[[999999]]"),
        lambda: lm.infill("x" + "[[4000]]" * 500),
        lambda: lm.repair([1] * 10**5),
    ):
        refused(call, "tokens are too many")


def test_a_checkpoint_of_the_greatest_length_takes_no_memory_by_itself():
    """Its length is a number that a stranger wrote: nothing is made of that size before it is asked for."""
    tracemalloc.start()
    asked = encoder(_LONGEST)
    assert asked.most > 10**6
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize("length", [float("inf"), 2.0, "3", None, 0, True])
def test_a_length_is_a_whole_number(length):
    if length is None:
        assert len(encoder().continuation("x", None, length=length).tokens) == 32
    else:
        with pytest.raises(ValueError, match="length is .*; allowed are whole numbers >= 1"):
            encoder().continuation("x", None, length=length)


def test_long_texts_are_refused_untokenised(monkeypatch):
    asked = encoder()
    _ = asked.most, asked._longest_token
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    text = "a" * 10**6
    for call in (
        lambda: asked.continuation(text, None),
        lambda: asked.continuation(None, text),
        lambda: asked.gaps(text),
        lambda: asked.damaged(text),
    ):
        refused(call, "characters, more than 4112 tokens")
    with pytest.raises(ValueError, match="20000 tokens are too many"):
        asked.damaged([1] * 20_000)


def test_the_longest_text_is_256_blocks():
    assert longest_text(32) == 32 + 255 * 16
    assert longest_text(33, extra=1) == 33 + 255 * 16
    with pytest.raises(ValueError, match="needs at least 2 tokens"):
        longest_text(1, extra=1)


def test_what_is_no_text_is_a_sentence():
    for wrong in (3, b"bytes", ["a"]):
        with pytest.raises(ValueError, match="allowed is a string"):
            encoder().gaps(wrong)


def test_spans_mark_the_tokens_that_they_touch():
    rng = random.Random(3)
    text = "naïve 🙂 foxes and crows"
    tokens = BYTES.encode(text)
    for _ in range(50):
        spans = [tuple(sorted(rng.sample(range(len(text) + 1), 2))) for _ in range(rng.randrange(1, 5))]
        marked = encoder().damaged(text, spans).damaged[1:]
        at, expected = 0, []
        for piece in pieces_of(BYTES, tokens):
            expected.append(any(begin < at + len(piece) and at < end for begin, end in spans))
            at += len(piece)
        assert list(marked) == expected


def test_spans_and_positions_cost_no_more_than_their_number(monkeypatch):
    """4,000 characters and 2,000 spans: as many decoded tokens as there are, not their square."""
    decoded = [0]
    decode = Tokenizer.decode

    def count(self, ids, **options):
        decoded[0] += len(list(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", count)
    text = "ab" * 2000
    marked = encoder().damaged(text, [(k, k + 1) for k in range(0, 4000, 2)]).damaged
    assert sum(marked) == 2000
    assert decoded[0] < 100 * len(text)


def pieces_by_definition(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, ...]:
    text, bounds = tokenizer.decode(tokens), [0]
    for k in range(1, len(tokens)):
        part = tokenizer.decode(tokens[:k])
        agree = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
        bounds.append(max(bounds[-1], agree))
    return tuple(text[a:b] for a, b in pairwise([*bounds, len(text)]))


def test_pieces_are_those_of_the_definition():
    rng = random.Random(0)
    trained = Tokenizer.train(iter(["the fox", "naïve 🙂 été", "日本語 text "] * 150), 262)
    words = ["the ", "naïve", "🙂", "日本", " a", "\n"]
    for tokenizer in (BYTES, trained):
        for _ in range(10):
            tokens = tokenizer.encode("".join(rng.choice(words) for _ in range(120)))
            for _ in range(5):
                tokens[rng.randrange(len(tokens))] = rng.randrange(tokenizer.vocab_size)
            assert pieces_of(tokenizer, tokens) == pieces_by_definition(tokenizer, tokens)
