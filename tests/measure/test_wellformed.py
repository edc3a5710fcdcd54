"""Checks of texts: each passes what is right, fails what is wrong, and says nothing of what it does not apply to."""

from __future__ import annotations

import math

import pytest

from fsdfm.measure.wellformed import check_texts, names_kept, quotes_close, sentences_end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One day Lily met Tom in the park by the tree. They played a lot. At last Lily said that Tom was nice.", 1.0),
        (
            "One day Lily met a dog in the park by the tree. They played a lot. At last Lily said that Ben was nice.",
            0.0,
        ),
        ("Lily met a dog in the park by the tree and they played. At last the dog said that Lily was nice.", 1.0),
        (
            "One day a girl met a dog in the park by the tree. They played a lot. At last she went home. She slept.",
            None,
        ),
        ("", None),
    ],
)
def test_names_stay(text: str, expected: float | None) -> None:
    found = names_kept(text)
    assert math.isnan(found) if expected is None else found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('She ran.\n"Stop!" he said.\nand then', 1.0),
        ('She said "no."\nThey left.', 1.0),
        ("She ran and\nThey left.", 0.0),
        ("only one paragraph", None),
    ],
)
def test_sentences_end(text: str, expected: float | None) -> None:
    found = sentences_end(text)
    assert math.isnan(found) if expected is None else found == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"Stop!" he said.\nThe "end', 1.0),  # the last paragraph may be cut off
        ('"Stop! he said.\nThe end', 0.0),
        ("\u201cStop!\u201d he said.\nThe end", 1.0),
        ("\u201dStop!\u201c he said.\nThe end", 0.0),
        ("\u201cStop!\u201c he said.\nThe end", 0.0),
        ("Stop, he said.\nThe end", None),
    ],
)
def test_quotes_close(text: str, expected: float | None) -> None:
    found = quotes_close(text)
    assert math.isnan(found) if expected is None else found == expected


def test_all_checks_of_all_texts() -> None:
    found = check_texts(["a.\nb", '"a.\nb'])
    assert set(found) == {"names_kept", "sentences_end", "quotes_close"}
    assert found["sentences_end"].tolist() == [1.0, 1.0]
    assert math.isnan(found["quotes_close"][0])
    assert found["quotes_close"][1] == 0.0
