from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdfm.data import Tokenizer
from fsdfm.generate import pieces_of
from fsdfm.generate.request import PromptEncoder
from tiny_models import BYTES

BPE = Tokenizer.train(["the cat sat on the mat, naïvely; the dog did not. €" * 20], 285)


def encoder(**changes):
    return PromptEncoder(**{"tokenizer": BYTES, "bos_id": None, "needs_bos": False, "length": 64, **changes})


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(tokens=st.lists(st.integers(0, 256), max_size=30))
def test_pieces_join_to_the_text(tokenizer, tokens):
    pieces = pieces_of(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


def test_a_character_belongs_to_the_token_that_completes_it():
    assert pieces_of(BYTES, BYTES.encode("a€b")) == ("a", "", "", "€", "b")


def test_a_prompt_and_a_suffix_surround_what_is_free():
    request = encoder().continuation("ab", "yz", length=8)
    assert request.tokens == (BYTES.eos_id, *b"ab", 0, 0, 0, *b"yz")
    assert request.frozen == (True, True, True, False, False, False, True, True)
    assert (request.num_bos, request.ends) == (1, False)
    assert encoder().continuation("ab", None).ends
    assert encoder(bos_id=7).continuation(None, None).tokens[0] == 7
    assert encoder().continuation("ab", None, begin="anywhere").tokens[0] == ord("a")


def test_gaps_and_their_escape():
    request = encoder().gaps(r"a[[2]]b\[[3]][[1]]")
    assert bytes(request.tokens[1:]) == b"a\0\0b[[3]]\0"
    assert [index for index, fixed in enumerate(request.frozen) if not fixed] == [2, 3, 10]


def test_the_space_before_a_gap_belongs_to_what_fills_it():
    request = encoder(tokenizer=BPE).gaps("the cat [[3]] sat")
    assert BPE.decode(request.tokens[1:-4]) == "the cat"
    assert BPE.decode(request.tokens[-1:]) == " sat"
    assert bytes(encoder().gaps("the cat [[1]]").tokens[1:-1]) == b"the cat "


def test_three_ways_to_name_damage():
    text = "a€bc"  # six tokens, four characters
    masks = [
        encoder().damaged(text, marks).damaged
        for marks in ([False, False, False, True, False, True], [3, 5], [(1, 2), (3, 4)])
    ]
    assert masks[0] == masks[1] == masks[2] == (False, False, False, False, True, False, True)
    request = encoder().damaged(text, [3])
    assert list(request.frozen) == [True, True, True, True, False, True, True]
    assert encoder().damaged(text).frozen == (True, *[False] * 6)


def test_the_noise_belongs_to_what_is_asked():
    def ask(prompt):
        return encoder().continuation(prompt, None)

    assert ask("one").sample_index(0) == ask("one").sample_index(0)
    indices = [copy.sample_index(block) for p in ("one", "two", None) for copy in ask(p).copies(3) for block in (0, 1)]
    assert len(set(indices)) == 18
    assert max(indices) < 2**56
    assert [copy.sample_index(0) >> 8 for copy in ask(None).copies(3)] == [0, 1, 2]
    gap, other = (replace(ask("one"), tokens=(*ask("one").tokens[:-1], token)) for token in (7, 8))
    assert gap.sample_index(0) == other.sample_index(0)  # what stands in a gap is not given
    assert replace(gap, draft=True).sample_index(0) != replace(other, draft=True).sample_index(0)  # a draft is


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.continuation("", None), "the prompt is empty"),
        (lambda t: t.continuation("x" * 64, None), "has 65 tokens and leaves no room in a length of 64"),
        (lambda t: t.continuation("x" * 63, None), "leaves no room"),
        (lambda t: t.continuation("xyz", None, length=2), "up to 64 without a loss"),
        (lambda t: t.continuation("a<|endoftext|>b", None), "ends a document; cut it there"),
        (lambda t: t.continuation("a\udcffb", None), "not a UTF-8 string"),
        (lambda t: t.continuation(None, None, length=0), "length is 0"),
        (lambda t: t.continuation(None, None, begin="middle"), "allowed are document, anywhere"),
        (lambda t: t.gaps(""), "the text is empty; give at least one word"),
        (lambda t: t.gaps("nothing is missing"), "has no gap"),
        (lambda t: t.gaps("an [[array]]"), r"\[\[ at character 3, which opens no gap"),
        (lambda t: t.gaps("a [[0]]"), "opens no gap"),
        (lambda t: t.gaps("a [[9999999999]]"), "opens no gap"),
        (lambda t: t.damaged(""), "the text is empty; give at least one word"),
        (lambda t: t.damaged([]), "the text is empty"),
        (lambda t: t.damaged([1, 999]), "token id 999 is outside"),
        (lambda t: t.damaged("abc", [True]), "1 marks for 3 tokens"),
        (lambda t: t.damaged("abc", [3]), "token position 3; allowed are 0 .. 2"),
        (lambda t: t.damaged("abc", [(2, 9)]), "allowed are 0 <= begin < end <= 3 characters"),
        (lambda t: t.damaged("abc", []), "names no token"),
        (lambda t: t.continuation("a", None).copies(0), "num is 0"),
    ],
)
def test_what_cannot_be_asked(ask, message):
    with pytest.raises(ValueError, match=message):
        ask(encoder())


def test_a_next_token_model_always_has_its_first_token():
    with pytest.raises(ValueError, match="leave it out"):
        encoder(bos_id=7, needs_bos=True).continuation("a", None, begin="anywhere")


def test_a_space_is_left_to_the_gap_behind_it_only():
    request = encoder(tokenizer=BPE).gaps("the cat [[3]] sat ")
    behind = [token for token, fixed in zip(request.tokens, request.frozen, strict=True) if fixed]
    assert BPE.decode(behind).endswith("sat ")
