import json
import os

import pytest
import torch

from fsdfm.data import (
    Blocks,
    PairHeader,
    Pairs,
    PairsAndText,
    PairWriter,
    StepPairs,
    Tokenizer,
    batches,
    open_documents,
    prepare,
)

HEADER = PairHeader(length=4, vocab_size=300, about={"parent": "abc", "steps": 64, "seed": 1})


def some(start, count):
    x_0 = torch.arange(start * 4, (start + count) * 4).view(count, 4) % 300
    return x_0, (x_0 + 1) % 300


def test_pairs_come_back_each_once_an_epoch(tmp_path):
    with PairWriter(tmp_path / "pairs", HEADER) as writer:
        writer.append(*some(0, 5))
        writer.append(*some(5, 2))
        assert writer.count == 7
    pairs = Pairs(tmp_path / "pairs", seed=3)
    assert len(pairs) == 7
    epoch = pairs.rows(range(7))
    assert torch.equal(epoch.x_1, (epoch.x_0 + 1) % 300)
    assert sorted(epoch.x_0[:, 0].tolist()) == [4 * k for k in range(7)]
    assert epoch.x_0[:, 0].tolist() != pairs.rows(range(7, 14)).x_0[:, 0].tolist()
    stream = batches(pairs, 2, start=4)
    first = next(stream)
    assert torch.equal(first.x_0, pairs.rows([4, 5]).x_0)
    assert first.next_sample == 6


def test_an_interrupted_row_is_dropped_and_made_again(tmp_path):
    with PairWriter(tmp_path, HEADER) as writer:
        writer.append(*some(0, 3))
    with (tmp_path / "pairs.bin").open("ab") as file:
        file.write(b"half")
    with PairWriter(tmp_path, HEADER) as writer:
        assert writer.count == 3
        writer.append(*some(3, 1))
    assert len(Pairs(tmp_path)) == 4
    assert sorted(Pairs(tmp_path).rows(range(4)).x_0[:, 0].tolist()) == [0, 4, 8, 12]


def test_another_request_for_the_same_folder_is_an_error(tmp_path):
    PairWriter(tmp_path, HEADER).close()
    with pytest.raises(ValueError, match="other pairs"):
        PairWriter(tmp_path, PairHeader(length=4, vocab_size=300, about={"parent": "other"}))


@pytest.mark.parametrize(
    ("x_0", "x_1", "match"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 5), "must be"),
        (torch.zeros(2, 3), torch.zeros(2, 3), "must be"),
        (torch.zeros(2, 4), torch.full((2, 4), 300), "outside"),
    ],
)
def test_bad_pairs_are_errors(tmp_path, x_0, x_1, match):
    with PairWriter(tmp_path, HEADER) as writer, pytest.raises(ValueError, match=match):
        writer.append(x_0.long(), x_1.long())


def test_what_holds_no_pairs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no pairs"):
        Pairs(tmp_path)
    PairWriter(tmp_path, HEADER).close()
    with pytest.raises(ValueError, match="no finished pair"):
        Pairs(tmp_path)
    (tmp_path / "pairs.json").write_text(json.dumps({"version": 9}))
    with pytest.raises(ValueError, match="version 9"):
        Pairs(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        PairWriter(blocked / "x", HEADER)


def test_pairs_and_text_share_the_rows(tmp_path):
    with PairWriter(tmp_path / "pairs", HEADER) as writer:
        writer.append(*some(0, 40))
    (tmp_path / "text.txt").write_text("All cats sleep. " * 20)
    corpus = prepare(open_documents((str(tmp_path / "text.txt"),)), Tokenizer.bytes(), tmp_path / "corpus")
    pairs, text = Pairs(tmp_path / "pairs", seed=3), Blocks(corpus, 4, seed=3, given_share=1.0)
    both = PairsAndText(pairs, text, 0.3)
    rows = both.rows(range(400))
    is_text = rows.x_0[:, 0] < 0
    assert 0.2 < float(is_text.double().mean()) < 0.4
    assert bool((rows.x_0[is_text] == -1).all())
    assert torch.equal(rows.x_1[is_text], text.rows(range(400)).x_1[is_text])
    assert torch.equal(rows.x_1[~is_text], pairs.rows(range(400)).x_1[~is_text])
    assert torch.equal(rows.x_0[~is_text], pairs.rows(range(400)).x_0[~is_text])
    assert not bool(rows.given[~is_text].any())
    assert torch.equal(rows.given[is_text], text.rows(range(400)).given[is_text])
    assert torch.equal(both.rows([7]).x_1[0], rows.x_1[7]), "whatever the batch"
    with pytest.raises(ValueError, match="text_share is 2; allowed are 0 <= text_share <= 1"):
        PairsAndText(pairs, text, 2)


def test_pairs_for_large_steps_come_beside_the_rows(tmp_path):
    for name, start in (("small", 0), ("four", 10), ("one", 20)):
        with PairWriter(tmp_path / name, HEADER) as writer:
            writer.append(*some(start, 5))
    small, four, one = (Pairs(tmp_path / name, seed=1) for name in ("small", "four", "one"))
    rows = StepPairs(small, ((1.0, one), (0.25, four))).rows([3, 8])
    assert torch.equal(rows.x_1, small.rows([3, 8]).x_1)
    assert [h for h, _, _ in rows.larger] == [0.25, 1.0]
    assert torch.equal(rows.larger[0][1], four.rows([3, 8]).x_0)
    assert torch.equal(rows.larger[1][2], one.rows([3, 8]).x_1)


def test_two_writers_of_one_folder_do_not_meet(tmp_path):
    """Both would number their pairs from what they found, and write over each other's rows."""
    with PairWriter(tmp_path, HEADER) as writer:
        writer.append(*some(0, 2))
        with pytest.raises(ValueError, match=f"in use by another run .process {os.getpid()} on"):
            PairWriter(tmp_path, HEADER)
        assert len(Pairs(tmp_path)) == 2  # what is there may be read meanwhile
    with pytest.raises(ValueError, match="other pairs"):
        PairWriter(tmp_path, PairHeader(length=9, vocab_size=50, about={}))
    with PairWriter(tmp_path, HEADER) as writer:  # a refusal gives the lock back
        assert writer.count == 2


@pytest.mark.parametrize(("vocab_size", "size"), [(2**16 - 1, 2), (2**16, 2), (2**16 + 1, 4)])
def test_tokens_take_as_many_bytes_as_they_need(vocab_size, size):
    header = PairHeader(length=4, vocab_size=vocab_size, about={})
    assert header.dtype.itemsize == size


def test_which_rows_are_text_says_nothing_of_their_lengths(tmp_path):
    """The two choices have numbers of their own: half of the rows of text are short, as half of all are."""
    with PairWriter(tmp_path / "pairs", HEADER) as writer:
        writer.append(*some(0, 5))
    (tmp_path / "text.txt").write_text("All cats sleep. " * 20)
    corpus = prepare(open_documents((str(tmp_path / "text.txt"),)), Tokenizer.bytes(), tmp_path / "corpus")
    text = Blocks(corpus, 4, seed=3, short_share=0.5)
    rows = PairsAndText(Pairs(tmp_path / "pairs", seed=3), text, 0.5).rows(range(400))
    short = ~rows.real[rows.x_0[:, 0] < 0].all(1)
    assert 0.4 < float(short.double().mean()) < 0.6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"about": None}, "about is None"),
        ({"about": {"timed": True}}, "seed is None"),
        ({"about": {"timed": True, "seed": "x"}}, "seed is 'x'"),
        ({"length": 0}, "length 0"),
    ],
)
def test_a_header_of_strange_kinds_is_refused(tmp_path, change, words):
    with PairWriter(tmp_path, PairHeader(2, 5, {"seed": 0})) as writer:
        writer.append(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    record = json.loads((tmp_path / "pairs.json").read_text())
    (tmp_path / "pairs.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(ValueError, match=f"is damaged: .*{words}"):
        Pairs(tmp_path)


def test_tokens_beyond_the_vocabulary_are_damage(tmp_path):
    """They went into the network's table as they were: an IndexError in training, on a GPU worse."""
    with PairWriter(tmp_path, PairHeader(2, 5, {"seed": 0})) as writer:
        writer.append(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    (tmp_path / "pairs.bin").write_bytes(b"\x04\x00" * 3 + b"\x05\x00")
    with pytest.raises(ValueError, match="holds the token 5, and tokens are below 5"):
        Pairs(tmp_path).rows([0])


def test_rows_in_a_pipe_are_refused(tmp_path):
    PairWriter(tmp_path, PairHeader(2, 5, {"seed": 0})).close()
    (tmp_path / "pairs.bin").unlink()
    os.mkfifo(tmp_path / "pairs.bin")
    with pytest.raises(ValueError, match="not a plain file"):
        Pairs(tmp_path)
