import numpy as np
import pytest

from fsdfm.measure.judges import Scores
from fsdfm.measure.rows import Piece, Reader, cut_rows, score_pieces
from tiny_models import BYTES

EOS = BYTES.eos_id


def packed(*documents):
    tokens, starts = [], []
    for document in documents:
        starts.append(len(tokens))
        tokens += [*BYTES.encode(document), EOS]
    return np.array(tokens), np.array(starts)


def test_rows_begin_where_documents_do_and_never_overlap():
    tokens, starts = packed("one story", "two", "three is longer", "four", "five")
    rows = cut_rows(tokens, starts, 12)
    reader = Reader(BYTES)
    assert [reader.text(row) for row in rows.tolist()] == [
        "one story\n\ntw",
        "three is lon",
        "four\n\nfive\n\n".strip(),
    ][: len(rows)]
    assert len(rows) == 2  # the third would need more than there is
    assert (
        cut_rows(tokens, starts, 12, begin="anywhere").flatten().tolist() == tokens[: len(tokens) // 12 * 12].tolist()
    )


def test_a_first_token_takes_the_place_of_the_last():
    tokens, starts = packed("abcdef", "ghijkl")
    rows = cut_rows(tokens, starts, 5, bos_id=7)
    assert rows[:, 0].tolist() == [7, 7]
    assert Reader(BYTES, 7).text(rows[1].tolist()) == "ghij"
    with pytest.raises(ValueError, match="length is 1"):
        cut_rows(tokens, starts, 1, bos_id=7)


def test_only_what_stands_behind_the_border_is_scored_given_its_own_document():
    row = np.array([[*BYTES.encode("ab"), EOS, *BYTES.encode("cdef"), EOS, *BYTES.encode("gh")]], dtype=np.int32)
    reader = Reader(BYTES)
    assert reader.pieces(row) == [Piece(0, "ab"), Piece(0, "cdef"), Piece(0, "gh")]
    assert reader.pieces(row, border=5) == [Piece(0, "ef", "cd"), Piece(0, "gh")]
    assert reader.pieces(row, border=3) == [Piece(0, "cdef"), Piece(0, "gh")]
    assert reader.pieces(row, border=7) == [Piece(0, "gh")]
    accent = np.array([BYTES.encode("né!")], dtype=np.int32)  # the border parts the two bytes of é
    assert reader.pieces(accent, border=2) == [Piece(0, "é!", "n")]


def test_a_rows_score_is_the_sum_of_its_documents():
    class Counter:
        name, facts = "counter", {}

        def score(self, texts, *, prefixes=None):
            import torch

            return Scores(torch.tensor([float(len(text)) for text in texts]).double(), torch.ones(len(texts)).long())

    scores = score_pieces(Counter(), [Piece(5, "ab"), Piece(5, "cde"), Piece(7, "f")], 3, first=5)
    assert scores.nll.tolist() == [5, 0, 1]
    assert scores.num_tokens.tolist() == [2, 0, 1]
    assert score_pieces(Counter(), [], 2).num_tokens.tolist() == [0, 0]
