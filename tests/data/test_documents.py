"""Documents arrive complete and in order, however their text is cut on the way."""

import contextlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdfm.cli import options
from fsdfm.config import DataConfig
from fsdfm.data import SEPARATOR, parquet
from fsdfm.data import documents as module
from fsdfm.data.documents import Chunk, Documents, PythonDocs, cut, open_documents, texts
from fsdfm.data.parquet import read_pages
from fsdfm.data.tokenizer import Tokenizer
from fsdfm.measure import evaluation

WORDS = st.lists(st.sampled_from(["the", "or", "a", "é", "b.", "12"]), max_size=60)


def read(documents: Documents) -> list[str]:
    """Whole documents, put together from their chunks."""
    found, parts = [], []
    for text, last, _ in documents.chunks():
        parts.append(text)
        if last:
            found.append("".join(parts))
            parts = []
    assert not parts, "the last document has no end"
    return found


def in_chunks(text: str, size: int) -> list[Chunk]:
    return [*(Chunk(text[i : i + size], False) for i in range(0, len(text), size)), Chunk("", True)]


@given(st.text(alphabet="ab \n", max_size=80), st.integers(1, 20), st.integers(1, 9))
def test_cutting_keeps_the_text_and_does_not_depend_on_the_chunks(text: str, size: int, chunk: int) -> None:
    pieces = list(cut(in_chunks(text, chunk), size))
    assert "".join(piece.text for piece in pieces) == text
    assert [p.text for p in pieces] == [p.text for p in cut([Chunk(text, True)], size)]
    assert max(len(piece.text) for piece in pieces) <= size
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@settings(max_examples=200)
@given(words=WORDS, size=st.integers(12, 40))
def test_cutting_at_words_changes_no_token(tokenizer: Tokenizer, words: list[str], size: int) -> None:
    text = " ".join(words)
    pieces = [p.text if p.first else tokenizer.continuation(p.text) for p in cut([Chunk(text, True)], size)]
    assert [i for row in tokenizer.encode_batch(pieces) for i in row] == tokenizer.encode(text)


def test_one_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "\ufeff\r\n naïve \x00 <|endoftext|>\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(open_documents(tmp_path / "a.txt", "")) == [text]


def test_a_text_file_is_split_at_the_marker_that_everybody_writes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Once.\n<|endoftext|>\nTwice.\n<|endoftext|>\n")
    assert read(open_documents(tmp_path / "a.txt")) == ["Once.", "Twice.", ""]
    assert DataConfig().separator == evaluation.EvaluationRequest.separator == options.SEPARATOR == SEPARATOR


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.text(alphabet="ab<|>\n é🙂"), min_size=1, max_size=6),
    separator=st.sampled_from(["<|end|>", "|", "\n\n"]),
    block=st.integers(1, 7),
)
def test_separators_are_found_across_reads(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], separator: str, block: int
) -> None:
    text = separator.join(parts)
    path = tmp_path_factory.mktemp("separators") / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_READ_BYTES", block)
        assert read(open_documents(path, separator)) == [part.strip() for part in text.split(separator)]


def test_undecodable_bytes_are_named_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode() * 5 + "café".encode("latin1"))
    for size in (2**20, 3, 1):
        monkeypatch.setattr(module, "_READ_BYTES", size)
        with pytest.raises(ValueError, match=r"latin1.txt is not UTF-8 at byte 13; .*iconv"):
            read(open_documents(path))
    path.write_bytes("é".encode()[:1])
    with pytest.raises(ValueError, match="not UTF-8 at byte 0"):
        read(open_documents(path))


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"body": "one\ntwo", "id": 1}, {"body": None}, {"body": "\u2028 drei"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read(open_documents(path, field="body")) == ["one\ntwo", "", "\u2028 drei"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", r"a.jsonl:2 is not JSON"),
        (b"[1]", r"a.jsonl:2 is a JSON list"),
        (b'{"body": "x"}', r"a.jsonl:2 has no field 'text'; give field=NAME, one of \['body'\]"),
        (b'{"text": 3}', r"a.jsonl:2: field 'text' is int, not text"),
        (b'{"text": "\xff"}', r"a.jsonl:2 is not UTF-8"),
        (b'{"text": "\\ud800"}', r"a.jsonl:2 holds half a surrogate pair"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=message):
        read(open_documents(path))


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"row {i}" for i in range(200)]
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(201)), "text": [*rows, None]}), path, row_group_size=50)
    assert read(open_documents(path)) == [*rows, ""]
    with pytest.raises(ValueError, match=r"no column 'body'; give field=NAME, one of \['n', 'text'\]"):
        read(open_documents(path, field="body"))
    with pytest.raises(ValueError, match="field 'n' is int"):
        read(open_documents(path, field="n"))
    path.write_text("no")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        read(open_documents(path))


def test_hugging_face_datasets_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    pulled: list[int] = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        calls.append((name, config, split, streaming))
        if name == "no/such":
            raise FileNotFoundError("no dataset of this name")
        return ({"text": f"row {pulled.append(i) or i}"} for i in range(10**9))

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read(open_documents("hf:a/b", max_documents=3)) == ["row 0", "row 1", "row 2"]
    assert len(pulled) == 3
    next(open_documents("hf:Salesforce/wikitext:wikitext-103-raw-v1:validation").chunks())
    next(open_documents("hf:a/b::test").chunks())
    assert calls == [
        ("a/b", None, "train", True),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "validation", True),
        ("a/b", None, "test", True),
    ]
    with pytest.raises(
        ValueError, match=r"cannot open hf:no/such .*no dataset of this name; write hf:NAME:CONFIG:SPLIT"
    ):
        read(open_documents("hf:no/such"))
    with pytest.raises(ValueError, match="no field 'body'"):
        read(open_documents("hf:a/b", field="body"))


@pytest.mark.parametrize(("name", "package"), [("hf:a/b", "datasets"), ("a.parquet", "pyarrow")])
def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    (tmp_path / "a.parquet").touch()
    monkeypatch.chdir(tmp_path)
    for part in (package, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(ValueError, match=f"needs the package {package}; run pip install {package}"):
        read(open_documents(name))


def test_python_documents_itself_in_english() -> None:
    first = [chunk.text for chunk, _ in zip(PythonDocs().chunks(), range(300), strict=False)]
    again = [chunk.text for chunk, _ in zip(PythonDocs().chunks(), range(300), strict=False)]
    assert first == again
    assert all(text == text.strip() != "" for text in first)
    words = " ".join(first).lower().split()
    assert 0.02 < words.count("the") / len(words) < 0.1, "that is no English"
    assert len(words) > 10_000


def test_python_documents_all_topics_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = module._library_modules()
    assert {"json/decoder.py", "textwrap.py", "unittest/case.py"} < set(modules)
    assert not [name for name in modules if "site-packages" in name or "/test/" in name]
    (tmp_path / "old.py").write_text("print 'a module of Python 2'")
    some = {"textwrap.py": modules["textwrap.py"], "old.py": tmp_path / "old.py"}
    monkeypatch.setattr(module, "_library_modules", lambda: some)
    found = {chunk.text for chunk in PythonDocs().chunks()}
    assert {text.strip() for text in topics.values()} < found
    assert {textwrap.__doc__.strip(), inspect.getdoc(textwrap.dedent)} < found
    assert any(inspect.getdoc(textwrap.TextWrapper.wrap) in text for text in found)


def test_inputs_follow_each_other_and_stop_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one|two")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n{"text": "four"}\n')
    names = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    assert read(open_documents(names, "|")) == ["one", "two", "three", "four"]
    assert read(open_documents(names, "|", max_documents=3)) == ["one", "two", "three"]
    assert list(texts(open_documents(names))) == ["one|two", "three", "four"]
    shares = [chunk.done or 0.0 for chunk in open_documents(names, "|").chunks()]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_identity_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 10**6)
    before = open_documents(path).identity
    assert open_documents(path, "|").identity != before
    assert open_documents(path, max_documents=1).identity != before
    path.write_bytes(b"x" * 10**6)
    assert open_documents(path).identity == before
    for content in (b"y" + b"x" * (10**6 - 1), b"x" * (10**6 - 1) + b"y", b"x" * 500_000 + b"y" + b"x" * 499_999, b"x"):
        path.write_bytes(content)
        assert open_documents(path).identity != before
    assert json.loads(json.dumps(before)) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": []}, "there is no input"),
        ({"inputs": "missing.txt"}, "missing.txt is not a file"),
        ({"inputs": "builtin:pydocs"}, "the one built-in corpus is builtin:pydoc"),
        ({"inputs": "hf:"}, "write hf:NAME"),
        ({"inputs": "hf:a:b:c:d"}, "write hf:NAME"),
        ({"inputs": "builtin:pydoc", "max_documents": 0}, "max_documents is 0; allowed are 1 and more"),
    ],
)
def test_bad_inputs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_documents(**options)


def test_a_small_parquet_file_does_not_become_gigabytes(tmp_path: Path) -> None:
    """64 rows that are one text of a megabyte: 468 bytes; a batch of them was 64 MB, and so on up."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 10**6] * 64}), path, compression="zstd")
    before = pyarrow.total_allocated_bytes()
    sizes = []
    for chunk in open_documents(path).chunks():
        sizes.append(len(chunk.text))
        assert pyarrow.total_allocated_bytes() - before < 8 * 10**6
    assert sizes == [10**6] * 64


def varint(number: int, size: int = 0) -> bytes:
    """A whole number as Thrift writes it, in so many bytes at least."""
    number, found = 2 * number, []
    while number > 127 or len(found) < size - 1:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


@pytest.mark.parametrize("honest", [True, False], ids=["", "whose footer says little"])
@pytest.mark.parametrize("groups", [1, 40], ids=["", "in many groups"])
def test_a_parquet_bomb_is_refused_unread(
    honest: bool, groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages say themselves how large they become, and all of them count: a footer may say anything."""
    path = tmp_path / "a.parquet"
    rows, size = ["a" * (10**6 // groups)] * groups, 4 + 10**6 // groups
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False, "row_group_size": 1}
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, **options)
    if not honest:
        whole, meta = path.read_bytes(), pyarrow.parquet.read_metadata(path)
        size = meta.row_group(0).column(0).total_uncompressed_size
        start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        footer = whole[start:].replace(varint(size), varint(99, len(varint(size))))
        path.write_bytes(whole[:start] + footer)
        assert pyarrow.parquet.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 99
    assert sum(map(len, read(open_documents(path)))) == len(rows) * len(rows[0])
    monkeypatch.setattr(parquet, "BOMB_BYTES", 10**5)
    with pytest.raises(ValueError, match=r"\d+ bytes unpack to 1\d{5,6} by row group \d+; allowed is 200-fold"):
        list(open_documents(path).chunks())
    pyarrow.parquet.write_table(pyarrow.table({"text": [["nested"]]}), path)
    with pytest.raises(ValueError, match="no text in column 'text'"):
        list(open_documents(path).chunks())


def test_texts_written_as_differences_are_read_one_by_one(tmp_path: Path) -> None:
    """DELTA_BYTE_ARRAY: a few bytes say very many texts that begin alike."""
    path = tmp_path / "a.parquet"
    rows = ["a" * 10**5 + str(number) for number in range(90)]
    options = {"compression": "zstd", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), path, **options)
    before = pyarrow.total_allocated_bytes()
    found = []
    for chunk in open_documents(path).chunks():
        found.append(chunk.text)
        assert pyarrow.total_allocated_bytes() - before < 10 * 10**5
    assert found == rows


@pytest.mark.parametrize("place", range(4, 60))
def test_a_parquet_file_with_a_spoilt_page_is_one_sentence(place: int, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a tale", "b"]}), path, use_dictionary=False)
    whole = bytearray(path.read_bytes())
    for value in (0x00, 0x7F, 0xFF):
        spoilt = bytes([*whole[:place], value, *whole[place + 1 :]])
        path.write_bytes(spoilt)
        with contextlib.suppress(ValueError):
            read(open_documents(path))


def test_the_pages_of_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{number} and so on" for number in range(5000)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), path, data_page_size=4096, dictionary_pagesize_limit=9000
    )
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(0)
    with path.open("rb") as file:
        start = column.dictionary_page_offset
        pages = [*read_pages(file, start, start + column.total_compressed_size)]
    assert len(pages) > 5
    headers = column.total_compressed_size - sum(page.packed for page in pages)
    assert 10 * len(pages) < headers < 200 * len(pages)
    assert sum(page.unpacked for page in pages) == column.total_uncompressed_size - headers
    monkeypatch.setattr(parquet, "BOMB_BYTES", 0)
    monkeypatch.setattr(parquet, "BOMB_RATIO", 0)
    with pytest.raises(ValueError, match=rf": {pages[0].packed} bytes unpack to {pages[0].unpacked} by row group 0"):
        read(open_documents(path))


def test_json_lines_are_shallow_and_of_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"a.jsonl:1 is not JSON"):
        list(open_documents(path).chunks())
    path.write_text('{"text": "a"}\n{"text": "' + "a" * 1000 + '"}\n')
    monkeypatch.setattr(module, "_LONGEST_DOCUMENT", 100)
    with pytest.raises(ValueError, match=r"a.jsonl:2 has more than 100 bytes"):
        list(open_documents(path).chunks())
