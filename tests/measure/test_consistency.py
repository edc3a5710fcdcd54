"""Names and topics across the blocks of a text."""

import math

import pytest

from fsdfm.measure.consistency import find_names, name_recurrence, rarity, topic_likeness


def test_names_are_capitalised_words_within_a_sentence():
    text = "Then Tom met Mr. Brown, Anna and the Lady of Rome. He left. I saw Mrs. Hill; Otto slept"
    assert find_names(text) == {"Tom", "Brown", "Anna", "Rome", "Hill", "Otto"}


def test_a_name_recurs_where_it_stands_in_a_block_before():
    blocks = ["we saw Tom", "then Anna and Tom", "nobody", "with Tom, Otto"]
    found, count = name_recurrence(blocks, range(1, 2))
    assert found.tolist() == [1, 0, 0]
    assert count.tolist() == [2, 0, 2]
    found, count = name_recurrence(blocks, range(2, 4))  # only the last block has blocks so far before it
    assert (found.tolist(), count.tolist()) == ([1], [2])


def test_topics_are_alike_in_their_rare_words():
    weight = rarity(["the sea the ship", "the king", "the sea", "the queen"])
    assert weight["the"] == 0
    assert weight["sea"] == pytest.approx(math.log(2))
    blocks = ["the ship", "a Ship", "the king", "nothing known"]
    assert topic_likeness(blocks, 1, weight).tolist() == pytest.approx([1, 0, 0])
    assert topic_likeness(["ship sea", "sea"], 1, weight).tolist() == pytest.approx([1 / math.sqrt(5)])
    assert topic_likeness(blocks, 3, weight).tolist() == [0]
