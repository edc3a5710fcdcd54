"""A corpus holds exactly the tokens of its documents, whatever happened while it was written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdfm.data import corpus as module
from fsdfm.data.corpus import Corpus, prepare
from fsdfm.data.documents import Chunk, Documents, open_documents
from fsdfm.data.tokenizer import Tokenizer

BYTES = Tokenizer.bytes()


@dataclass(frozen=True)
class Made:
    """Documents from memory, given out in chunks of a few characters."""

    documents: tuple[str, ...]
    chunk: int = 5
    weight: float = 1.0

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"made": list(self.documents)}

    def chunks(self) -> Iterator[Chunk]:
        for text in self.documents:
            yield from (Chunk(text[i : i + self.chunk], False) for i in range(0, len(text), self.chunk))
            yield Chunk("", True)


class Unread(Made):
    """The same documents, which nobody may read any more."""

    def chunks(self) -> Iterator[Chunk]:
        raise AssertionError("read again")


STORY = Made(tuple(f"Story {i}: the fox met {'another fox ' * (i % 4)}and slept." if i % 5 else "" for i in range(40)))


def make(documents: Documents, tokenizer: Tokenizer, folder: Path) -> Corpus:
    return prepare(documents, tokenizer, folder, progress=False)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make(STORY, BYTES, tmp_path_factory.mktemp("stories") / "c")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=25, deadline=None)
@given(documents=st.lists(st.text(), min_size=1, max_size=8), chunk=st.integers(1, 9), batch=st.integers(1, 40))
def test_every_document_comes_back(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, documents: list[str], chunk: int, batch: int
) -> None:
    documents = ["x", *(text.replace("▁", "") for text in documents)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BATCH_CHARS", batch)
        corpus = make(Made(tuple(documents), chunk), tokenizer, tmp_path_factory.mktemp("corpus") / "c")
    kept = [text for text in documents if text]
    assert [corpus.tokenizer.decode(corpus.document(i)) for i in range(len(corpus.starts))] == kept
    expected = [token for text in kept for token in [*tokenizer.encode(text), tokenizer.eos_id]]
    assert corpus.tokens.tolist() == expected
    header = corpus.header
    assert (header.num_documents, header.num_empty) == (len(kept), len(documents) - len(kept))
    assert header.num_tokens == len(corpus) == len(expected)
    assert [expected[i - 1] for i in corpus.starts.tolist()[1:]] == [tokenizer.eos_id] * (len(kept) - 1)


def test_small_vocabularies_take_two_bytes_a_token_and_large_ones_four(tmp_path: Path) -> None:
    record = json.loads(BYTES.definition)
    record["added_tokens"][0]["id"] = 2**16 - 1
    for last, dtype in ((2**16 - 1, np.uint16), (2**16, np.uint32)):
        record["model"]["vocab"][f"filler {last}"] = last - 1
        tokens = {key: i for key, i in record["model"]["vocab"].items() if i < 256 or i == last - 1}
        definition = {**record, "model": {**record["model"], "vocab": tokens}}
        definition["added_tokens"] = [{**record["added_tokens"][0], "id": last}]
        definition["model"]["vocab"]["<|endoftext|>"] = last
        tokenizer = Tokenizer(json.dumps(definition))
        assert tokenizer.vocab_size == last + 1
        corpus = make(Made(("ab",)), tokenizer, tmp_path / dtype.__name__)
        assert corpus.tokens.dtype == dtype
        assert corpus.tokens.tolist() == [97, 98, last]


def test_the_header_describes_the_corpus(tmp_path: Path) -> None:
    corpus = make(STORY, BYTES, tmp_path / "c")
    record = json.loads((tmp_path / "c" / "corpus.json").read_text())
    assert record["version"] == 1
    assert record["tokenizer"] == BYTES.hash == corpus.tokenizer.hash
    assert record["documents"] == STORY.identity
    assert (record["dtype"], record["vocab_size"], record["eos_id"]) == ("<u2", 257, 256)
    assert (record["num_documents"], record["num_empty"]) == (32, 8)
    assert sorted(contents(tmp_path / "c")) == ["corpus.json", "starts.bin", "tokenizer.json", "tokens.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1


def test_a_finished_corpus_is_recognised_and_another_is_not_overwritten(tmp_path: Path) -> None:
    make(STORY, BYTES, tmp_path / "c")
    before = contents(tmp_path / "c")
    make(Unread(STORY.documents), BYTES, tmp_path / "c")
    with pytest.raises(ValueError, match="corpus of another source: it was made of"):
        make(Made(("other",)), BYTES, tmp_path / "c")
    with pytest.raises(ValueError, match="corpus of another tokenizer; delete it"):
        make(STORY, Tokenizer.train(["abab" * 10], 258), tmp_path / "c")
    assert contents(tmp_path / "c") == before


def test_whatever_a_crash_leaves_on_the_disk_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is copied now and then, as a kill -9 at that moment would leave it."""
    monkeypatch.setattr(module, "_BATCH_CHARS", 100)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    reads: list[int] = []

    @dataclass(frozen=True)
    class Watched(Made):
        def chunks(self) -> Iterator[Chunk]:
            for number, chunk in enumerate(super().chunks()):
                if number % 23 == 0:
                    shutil.copytree(tmp_path / "c.partial", tmp_path / f"{number}.partial")
                yield chunk

    whole = contents(make(Watched(STORY.documents), BYTES, tmp_path / "c").folder)
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts: reads.append(len(texts)) or encode(self, texts))
    snapshots = sorted(path for path in tmp_path.glob("*.partial"))
    assert len(snapshots) > 10
    num_encoded = []
    for path in snapshots:
        reads.clear()
        make(STORY, BYTES, path.with_suffix(""))
        assert contents(path.with_suffix("")) == whole
        assert not path.exists()
        num_encoded.append(sum(reads))
    assert min(num_encoded) < max(num_encoded) / 5, "nothing was continued"


@pytest.mark.slow
def test_processes_make_the_same_bytes(tmp_path: Path, trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when begun by one process, interrupted, and finished by two."""
    monkeypatch.setattr(module, "_BATCH_CHARS", 100)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    one = contents(make(STORY, trained, tmp_path / "one").folder)

    @dataclass(frozen=True)
    class Stopping(Made):
        def chunks(self) -> Iterator[Chunk]:
            for number, chunk in enumerate(super().chunks()):
                if number == 150:
                    raise KeyboardInterrupt
                yield chunk

    for first, second in ((1, 2), (2, 1)):
        folder = tmp_path / f"{first} then {second}"
        with pytest.raises(KeyboardInterrupt):
            prepare(Stopping(STORY.documents), trained, folder, progress=False, processes=first)
        assert folder.with_name(folder.name + ".partial").is_dir()
        prepare(STORY, trained, folder, progress=False, processes=second)
        assert contents(folder) == one
    with pytest.raises(ValueError, match="processes is 0; allowed"):
        prepare(STORY, trained, tmp_path / "none", processes=0)


def test_an_interrupt_keeps_everything_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 50)
    whole = contents(make(STORY, BYTES, tmp_path / "whole").folder)

    @dataclass(frozen=True)
    class Interrupted(Made):
        def chunks(self) -> Iterator[Chunk]:
            for number, chunk in enumerate(super().chunks()):
                if number == 100:
                    raise KeyboardInterrupt
                yield chunk

    with pytest.raises(KeyboardInterrupt):
        make(Interrupted(STORY.documents), BYTES, tmp_path / "c")
    state = json.loads((tmp_path / "c.partial" / "corpus.json").read_text())
    assert not state["complete"]
    assert state["num_tokens"] > 300
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="is not finished; run prepare again"):
        Corpus.open(tmp_path / "c.partial")
    assert contents(make(STORY, BYTES, tmp_path / "c").folder) == whole


def test_an_interrupted_run_of_another_request_is_started_anew(tmp_path: Path) -> None:
    other = Made(("something else",) * 300)
    shutil.copytree(make(other, BYTES, tmp_path / "other").folder, tmp_path / "c.partial")
    whole = contents(make(STORY, BYTES, tmp_path / "whole").folder)
    assert contents(make(STORY, BYTES, tmp_path / "c").folder) == whole


def test_a_crash_just_before_the_rename_needs_no_work(tmp_path: Path) -> None:
    make(STORY, BYTES, tmp_path / "c").folder.rename(tmp_path / "d.partial")
    assert len(make(Unread(STORY.documents), BYTES, tmp_path / "d").starts) == 32


@pytest.mark.slow
def test_killed_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "big.txt"
    text.write_text("".join(f"Sentence {i} of a longer text.\n" for i in range(60_000)))
    program = (
        "import fsdfm.data.corpus as m; from fsdfm.data import *; m._SAVE_SECONDS = 0.0; m._BATCH_CHARS = 2**14\n"
        f"prepare(open_documents({str(text)!r}, ''), Tokenizer.bytes(), {str(tmp_path / 'c')!r}, progress=False)"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    header = tmp_path / "c.partial" / "corpus.json"
    deadline = time.monotonic() + 60
    while not (header.exists() and json.loads(header.read_text())["num_tokens"] > 300_000):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "c").exists()
    corpus = make(open_documents(text, ""), BYTES, tmp_path / "c")
    assert corpus.tokens[:-1].astype(np.uint8).tobytes() == text.read_bytes()
    corpus.verify()


@dataclass(frozen=True)
class Endless:
    """Documents that no memory holds, to see that none is asked to."""

    num_chunks: int
    one_document: bool
    weight: float = 1.0

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"chunks": self.num_chunks}

    def chunks(self) -> Iterator[Chunk]:
        text = "lorem ipsum " * 340
        yield from (Chunk(text, not self.one_document) for _ in range(self.num_chunks - 1))
        yield Chunk(text, True)


@pytest.mark.parametrize("one_document", [False, True])
def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_document: bool
) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 2**15)
    peaks = []
    for num_chunks in (20, 40, 320):
        tracemalloc.start()
        make(Endless(num_chunks, one_document), BYTES, tmp_path / str(num_chunks))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.1 * peaks[1], f"eight times the text, {peaks[2] / peaks[1]:.2f} times the memory"


def test_a_file_is_never_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 2**15)
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * 6 * 2**20)  # not even a space to cut at
    tracemalloc.start()
    corpus = make(open_documents(path, "<|endoftext|>"), BYTES, tmp_path / "c")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(corpus) == 6 * 2**20 + 1
    assert peak < 3 * 2**20


def test_an_empty_corpus_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    for documents in (Made(()), Made(("", "")), open_documents(tmp_path / "empty.txt")):
        with pytest.raises(ValueError, match="the corpus is empty: the inputs hold no text; name other inputs"):
            make(documents, BYTES, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_output_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ValueError, match=r"cannot write to .*file/c.*; make room there, or choose a folder you may write"
    ):
        make(STORY, BYTES, tmp_path / "file" / "c")
    with pytest.raises(ValueError, match="file exists and is not a corpus"):
        make(STORY, BYTES, tmp_path / "file")
    with pytest.raises(ValueError, match="exists and is not a corpus"):
        make(STORY, BYTES, tmp_path)
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="not an interrupted corpus, and its name is needed; move it away"):
        make(STORY, BYTES, tmp_path / "c")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ValueError, match=r"cannot write to .*Permission denied"):
        make(STORY, BYTES, tmp_path / "read-only")


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 50)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    whole = contents(make(STORY, BYTES, tmp_path / "whole").folder)
    sync, calls = module._sync, []

    def full(file: Any) -> None:
        calls.append(file)
        if len(calls) > 20:
            raise OSError(28, "No space left on device")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_sync", full)
        with pytest.raises(ValueError, match="No space left on device; make room there"):
            make(STORY, BYTES, tmp_path / "c")
    assert json.loads((tmp_path / "c.partial" / "corpus.json").read_text())["num_tokens"] > 0
    assert contents(make(STORY, BYTES, tmp_path / "c").folder) == whole


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    assert len(make(STORY, BYTES, tmp_path / "c").starts) == 32


def test_the_wrong_tokenizer_is_refused(tmp_path: Path, trained: Tokenizer) -> None:
    make(STORY, BYTES, tmp_path / "c")
    Corpus.open(tmp_path / "c", BYTES)
    with pytest.raises(ValueError, match=r"was made with tokenizer \w{12} \(257 tokens\) not with .*\(300 tokens\)"):
        Corpus.open(tmp_path / "c", trained)
    trained.save(tmp_path / "c")
    with pytest.raises(ValueError, match="was made with tokenizer"):
        _ = Corpus.open(tmp_path / "c").tokenizer


def test_damage_is_reported(tmp_path: Path) -> None:
    folder = make(STORY, BYTES, tmp_path / "c").folder
    with pytest.raises(ValueError, match=r"is not a corpus .*; make one with prepare"):
        Corpus.open(tmp_path)
    data = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match="has changed since it was written"):
        Corpus.open(folder).verify()
    (folder / "tokens.bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"tokens.bin has \d+ bytes, not the \d+ of its header"):
        Corpus.open(folder)
    (folder / "tokens.bin").unlink()
    with pytest.raises(ValueError, match=r"tokens\.bin has 0 bytes"):
        Corpus.open(folder)
    header = json.loads((folder / "corpus.json").read_text())
    for change, message in (
        ({"version": 2}, "format version 2; this program reads version 1"),
        ({"x": 1}, "is damaged"),
    ):
        (folder / "corpus.json").write_text(json.dumps(header | change))
        with pytest.raises(ValueError, match=message):
            Corpus.open(folder)
    (folder / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match="is not a corpus"):
        Corpus.open(folder)


def test_a_partial_file_shorter_than_its_header_is_reported(tmp_path: Path) -> None:
    folder = make(STORY, BYTES, tmp_path / "c").folder
    header = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps(header | {"complete": False}))
    (folder / "tokens.bin").write_bytes(b"ab")
    folder.rename(tmp_path / "d.partial")
    with pytest.raises(
        ValueError, match=r"tokens.bin is shorter than its header says; delete .*d.partial and run again"
    ):
        make(STORY, BYTES, tmp_path / "d")


@given(share=st.floats(0.001, 0.999))
@settings(max_examples=30, deadline=None)
def test_split_shares_no_document(stories: Corpus, share: float) -> None:
    train, valid = stories.split(share)
    assert len(train) + len(valid) == len(stories)
    assert np.concatenate([train.tokens, valid.tokens]).tolist() == stories.tokens.tolist()
    assert train.tokens[-1] == BYTES.eos_id
    texts = [BYTES.decode(part.document(i)) for part in (train, valid) for i in range(len(part.starts))]
    assert texts == [text for text in STORY.documents if text]
    assert min(len(train.starts), len(valid.starts)) >= 1
    assert abs(len(valid) / len(stories) - share) < 0.05


def test_split_and_document_say_what_they_allow(tmp_path: Path) -> None:
    corpus = make(Made(("one document",)), BYTES, tmp_path / "c")
    with pytest.raises(ValueError, match="is one document and cannot be split"):
        corpus.split(0.5)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="allowed are 0 < validation_share < 1"):
            corpus.split(share)
    for index in (-1, 1):
        with pytest.raises(ValueError, match="allowed are 0 <= document < 1"):
            corpus.document(index)


def test_progress_is_shown_on_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(STORY, BYTES, tmp_path / "c")
    shown = capfd.readouterr()
    assert "32 documents" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("dtype", ["O", "object", "<f4", "V2", "<u8", ">u2", "u2,u2", None, 3])
def test_only_the_two_types_of_a_token_are_mapped(tmp_path: Path, dtype: object) -> None:
    """A file of "O" would be read as addresses: whoever writes the header would own the process."""
    folder = make(STORY, BYTES, tmp_path / "c").folder
    record = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**record, "dtype": dtype}))
    with pytest.raises(ValueError, match=r"corpus.json is damaged: a corpus's dtype is .*<u2 or <u4"):
        Corpus.open(folder)


@pytest.mark.parametrize(("key", "value"), [("num_tokens", "5"), ("num_tokens", -1), ("eos_id", 1.5), ("sha256", 3)])
def test_a_header_of_wrong_types_is_damaged(tmp_path: Path, key: str, value: object) -> None:
    folder = make(STORY, BYTES, tmp_path / "c").folder
    record = json.loads((folder / "corpus.json").read_text())
    (folder / "corpus.json").write_text(json.dumps({**record, key: value}))
    with pytest.raises(ValueError, match=f"damaged: a corpus's {key} is"):
        Corpus.open(folder)
    (folder / "corpus.json").unlink()
    (folder / "corpus.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a plain file"):
        Corpus.open(folder)


def test_two_that_prepare_one_folder_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second says who is there, whatever becomes of it, and the first writes what it would have written alone."""
    monkeypatch.setattr(module, "_BATCH_CHARS", 50)
    whole = contents(make(STORY, BYTES, tmp_path / "whole").folder)

    class Shared(Made):
        def chunks(self) -> Iterator[Chunk]:
            for k, chunk in enumerate(super().chunks()):
                if k % 5 == 0:
                    with pytest.raises(ValueError, match=f"c is in use by another run .process {os.getpid()} on"):
                        make(STORY, BYTES, tmp_path / "c")
                yield chunk

    corpus = make(Shared(STORY.documents), BYTES, tmp_path / "c")
    corpus.verify()
    assert contents(corpus.folder) == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "whole"]


def test_the_checksum_is_of_what_was_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another program did to the files meanwhile is found, not blessed."""
    monkeypatch.setattr(module, "_BATCH_CHARS", 50)
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0.0)
    for name in ("tokens.bin", "starts.bin"):

        class Disturbed(Made):
            file = tmp_path / f"{name}.c.partial" / name

            def chunks(self) -> Iterator[Chunk]:
                for k, chunk in enumerate(super().chunks()):
                    if k == 200:
                        with self.file.open("r+b") as file:
                            file.write(b"\x07")
                    yield chunk

        corpus = make(Disturbed(STORY.documents), BYTES, tmp_path / f"{name}.c")
        with pytest.raises(ValueError, match=f"{name} has changed since it was written"):
            corpus.verify()


def test_what_changed_before_it_is_continued_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH_CHARS", 50)

    class Interrupted(Made):
        def chunks(self) -> Iterator[Chunk]:
            for k, chunk in enumerate(super().chunks()):
                if k == 200:
                    raise KeyboardInterrupt
                yield chunk

    with pytest.raises(KeyboardInterrupt):
        make(Interrupted(STORY.documents), BYTES, tmp_path / "c")
    with (tmp_path / "c.partial" / "tokens.bin").open("r+b") as file:
        file.write(b"\x07")
    with pytest.raises(ValueError, match=r"tokens.bin is not what was written; delete .*c.partial and run again"):
        make(STORY, BYTES, tmp_path / "c")


def test_a_corpus_of_before_has_one_checksum(tmp_path: Path) -> None:
    folder = make(STORY, BYTES, tmp_path / "c").folder
    record = json.loads((folder / "corpus.json").read_text())
    del record["starts_sha256"]
    (folder / "corpus.json").write_text(json.dumps(record))
    Corpus.open(folder).verify()
