"""Where text comes from: files, JSON lines, Parquet, the Hugging Face hub, or Python's own documentation.

Every source is a stream of chunks of bounded size, so that a corpus larger than memory, or one document larger than
memory, costs no more than a small one. `open_documents` turns what a user writes into one such stream.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import importlib
import json
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fsdfm.data.parquet import check_parquet

__all__ = [
    "SEPARATOR",
    "Chunk",
    "Documents",
    "HubDataset",
    "JsonLinesFile",
    "Parquet",
    "PythonDocs",
    "TextFile",
    "TextPiece",
    "cut",
    "open_documents",
    "texts",
]

SEPARATOR = "<|endoftext|>"
"""Stands between the documents of a text file unless another separator is named."""

_READ_BYTES = 2**18
_PIECE_CHARS = 2**14
_TESTS = {"test", "tests", "idle_test"}
_LONGEST_DOCUMENT = 2**28  # bytes of one that is read whole, as those of JSON lines are
_SAMPLE_BYTES, _NUM_SAMPLES = 2**16, 16
# Byte-pair merges never cross from a word into the space after it, so a cut there changes no token.
_SAFE_CUTS = (re.compile(r"(?<=\S) (?=\S)"), re.compile(r"(?<=\S)\s"))


class Chunk(NamedTuple):
    """A part of a document's text."""

    text: str
    last: bool  # does the document end here?
    done: float | None = None  # share of the source read so far, where it is known


class TextPiece(NamedTuple):
    """A part of a document's text, short enough to be encoded at once."""

    text: str
    first: bool  # does the document begin here?
    last: bool
    done: float | None = None


class Documents(Protocol):
    """A source of documents that can be read again from the start and says what it is."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides the text, as JSON: two sources with one identity give the same documents."""

    @property
    def weight(self) -> float:
        """The size of the source relative to others, in bytes where it is known."""

    def chunks(self) -> Iterator[Chunk]:
        """The text from the start, in chunks of bounded size; the last chunk of a document says so."""


def open_documents(
    inputs: str | Path | Sequence[str | Path],
    separator: str = SEPARATOR,
    field: str = "text",
    *,
    max_documents: int | None = None,
) -> Documents:
    """The documents that a user's inputs name, in the order given.

    An input is a text file (documents with the `separator` between them; with "" it is one document), a `.jsonl`
    or `.parquet` file with the text in `field`, `hf:NAME[:CONFIG[:SPLIT]]` for a Hugging Face dataset, or
    `builtin:pydoc` for the documentation that comes with Python.
    """
    inputs = [inputs] if isinstance(inputs, (str, Path)) else list(inputs)
    if not inputs:
        raise ValueError("there is no input; name a text file, a dataset (hf:NAME) or builtin:pydoc")
    if max_documents is not None and max_documents < 1:
        raise ValueError(f"max_documents is {max_documents}; allowed are 1 and more, or None for all")
    return _Chain(tuple(_open(str(name), separator or None, field) for name in inputs), max_documents)


def texts(documents: Documents) -> Iterator[str]:
    """The text of the documents as strings of bounded length, to train a tokenizer on."""
    return (piece.text for piece in cut(documents.chunks()))


def cut(chunks: Iterable[Chunk], size: int = _PIECE_CHARS) -> Iterator[TextPiece]:
    """Re-cut documents into pieces of at most `size` characters, at places where that changes no token.

    Only where half a piece holds no white space after a word is the cut anywhere: other tokens, but the same text.
    """
    buffer, first = "", True
    for text, last, done in chunks:
        buffer += text
        start = 0
        while len(buffer) - start > size:
            end = _cut_before(buffer, start, start + size)
            yield TextPiece(buffer[start:end], first, False, done)
            start, first = end, False
        buffer = buffer[start:]
        if last:
            yield TextPiece(buffer, first, True, done)
            buffer, first = "", True


def _cut_before(text: str, start: int, end: int) -> int:
    for pattern in _SAFE_CUTS:
        if spots := [match.start() for match in pattern.finditer(text, (start + end + 1) // 2, end)]:
            return spots[-1]
    return end


@dataclass(frozen=True)
class TextFile:
    """A UTF-8 text file: one document, or several with a separator between them, white space around each removed."""

    path: Path
    separator: str | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, content and separator."""
        return {"kind": "text", "separator": self.separator, **_file_identity(self.path)}

    @property
    def weight(self) -> float:
        """The file's bytes."""
        return self.path.stat().st_size

    def chunks(self) -> Iterator[Chunk]:
        """The decoded text, split at the separators."""
        if self.separator is None:
            yield from (Chunk(text, False, done) for text, done in _decoded(self.path))
            yield Chunk("", True, 1.0)
        else:
            yield from _stripped(_split(_decoded(self.path), self.separator))


@dataclass(frozen=True)
class JsonLinesFile:
    """A file with one JSON object per line and the document's text in one of its fields."""

    path: Path
    field: str = "text"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, content and field."""
        return {"kind": "jsonl", "field": self.field, **_file_identity(self.path)}

    @property
    def weight(self) -> float:
        """The file's bytes."""
        return self.path.stat().st_size

    def chunks(self) -> Iterator[Chunk]:
        """One chunk a line; blank lines are passed over."""
        read, size = 0, self.weight
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_DOCUMENT + 1), b""), 1):
                read += len(line)
                _check_size(len(line), f"{self.path}:{number}")
                if line.strip():
                    where = f"{self.path}:{number}"
                    yield Chunk(_field(_json_object(line, where), self.field, where), True, read / size)


@dataclass(frozen=True)
class Parquet:
    """A Parquet file with the documents' text in one of its columns; needs pyarrow."""

    path: Path
    field: str = "text"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, content and column."""
        return {"kind": "parquet", "field": self.field, **_file_identity(self.path)}

    @property
    def weight(self) -> float:
        """The file's bytes."""
        return self.path.stat().st_size

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per row, read a few rows at a time."""
        pyarrow = _import("pyarrow.parquet", f"reading {self.path}", "pyarrow")
        try:
            with pyarrow.ParquetFile(self.path) as file:
                names, nested = file.schema_arrow.names, self.field not in file.schema.names
        except Exception as error:
            raise ValueError(f"{self.path} is not a Parquet file: {error}") from error
        if self.field not in names or nested:
            what = "no column" if self.field not in names else "no text in column"
            raise ValueError(f"{self.path} has {what} {self.field!r}; give field=NAME, one of {names}")
        try:
            yield from self._rows(pyarrow)
        except (OSError, NotImplementedError, MemoryError) as error:  # of pyarrow
            reason = str(error).partition("\n")[0] or "it needs more memory than there is"
            raise ValueError(f"{self.path} cannot be read: {reason[:200]}; write it again") from error

    def _rows(self, pyarrow: Any) -> Iterator[Chunk]:
        # Repeated texts are kept once, for a file of a few bytes can repeat a long one very often; where a text is
        # written as what differs from the one before, which pyarrow cannot keep once, one is read at a time.
        with pyarrow.ParquetFile(self.path) as file:
            metadata = file.metadata
            check_parquet(self.path, metadata, self.field)
            differences = _DIFFERENCES in _encodings(metadata, self.field)
        once = {"read_dictionary": None if differences else [self.field]}
        with pyarrow.ParquetFile(self.path, **once) as file:
            rows, row = metadata.num_rows, 0
            for group in range(metadata.num_row_groups):  # one after the other: a batch would take parts of many
                some = {"batch_size": 1 if differences else 64, "row_groups": [group], "columns": [self.field]}
                for batch in file.iter_batches(**some):
                    for text in batch.column(0):
                        row += 1
                        where = f"{self.path} row {row}"
                        yield Chunk(_field({self.field: text.as_py()}, self.field, where), True, row / rows)


_DIFFERENCES = "DELTA_BYTE_ARRAY"


def _encodings(metadata: Any, field: str) -> set[str]:
    """How the values of a column are written, in any group of rows."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return {name for column in columns if column.path_in_schema == field for name in column.encodings}


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face hub, streamed; needs the package datasets and a network."""

    name: str
    config: str | None = None
    split: str = "train"
    field: str = "text"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, configuration, split and field."""
        return {"kind": "hf", "name": self.name, "config": self.config, "split": self.split, "field": self.field}

    @property
    def weight(self) -> float:
        """Unknown before it is read."""
        return 1.0

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per row, in the dataset's order."""
        datasets = _import("datasets", f"the dataset hf:{self.name}", "datasets")
        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except Exception as error:
            raise ValueError(
                f"cannot open hf:{self.name} (configuration {self.config}, split {self.split}): {error}; "
                "write hf:NAME:CONFIG:SPLIT and check the network"
            ) from error
        for number, row in enumerate(rows):
            yield Chunk(_field(row, self.field, f"hf:{self.name} row {number}"), True)


@dataclass(frozen=True)
class PythonDocs:
    """Python's own documentation: its help topics and the docstrings of the standard library's modules.

    Real English on every machine that runs Python, without a download. Modules are read, never imported; topics and
    modules stand in an order mixed by name, so that any part of the corpus is like any other.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """The version of Python: another one has other documentation."""
        return {"kind": "builtin:pydoc", "python": platform.python_version()}

    @property
    def weight(self) -> float:
        """About its bytes."""
        return 2.5e6

    def chunks(self) -> Iterator[Chunk]:
        """One document a topic, module introduction, top-level class or top-level function."""
        from pydoc_data.topics import topics

        sources: dict[str, str | Path] = {**topics, **_library_modules()}
        names = sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest())
        for number, name in enumerate(names, 1):
            source = sources[name]
            for text in [source] if isinstance(source, str) else _docstrings(source):
                yield Chunk(text.strip(), True, number / len(names))


@dataclass(frozen=True)
class _Chain:
    """Several sources one after the other, and no more than `max_documents` of their documents."""

    parts: tuple[Documents, ...]
    max_documents: int | None = None

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"parts": [dict(part.identity) for part in self.parts], "max_documents": self.max_documents}

    @property
    def weight(self) -> float:
        return sum(part.weight for part in self.parts)

    def chunks(self) -> Iterator[Chunk]:
        total, before, count = self.weight or 1.0, 0.0, 0
        for part in self.parts:
            weight = part.weight
            for text, last, done in part.chunks():
                count += last
                share = None if done is None else (before + weight * done) / total
                if self.max_documents is not None:
                    share = max(share or 0.0, count / self.max_documents)
                yield Chunk(text, last, share)
                if count == self.max_documents:
                    return
            before += weight


def _open(name: str, separator: str | None, field: str) -> Documents:
    if name == "builtin:pydoc":
        return PythonDocs()
    if name.startswith("builtin:"):
        raise ValueError(f"input is {name!r}; the one built-in corpus is builtin:pydoc")
    if name.startswith("hf:"):
        dataset, config, split = [*name.split(":")[1:4], "", ""][:3]
        if not dataset or name.count(":") > 3:
            raise ValueError(f"input is {name!r}; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
        return HubDataset(dataset, config or None, split or "train", field)
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"input {name} is not a file; name a text file, a dataset (hf:NAME) or builtin:pydoc")
    if path.suffix in {".jsonl", ".ndjson", ".json"}:
        return JsonLinesFile(path, field)
    return Parquet(path, field) if path.suffix == ".parquet" else TextFile(path, separator)


def _file_identity(path: Path) -> dict[str, Any]:
    """Name, size and a hash of up to 16 samples of 64 KiB: all of a small file, and a quick look at a large one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return {"name": path.name, "bytes": size, "fingerprint": digest.hexdigest()}


def _decoded(path: Path) -> Iterator[tuple[str, float]]:
    """The file's text and the share of it read so far."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    read, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while True:
            data = file.read(_READ_BYTES)
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 at byte {read - held + error.start}; convert it, for example with "
                    "iconv -f latin1 -t utf-8"
                ) from error
            read += len(data)
            if not data:
                return
            yield text, read / max(read, size)


def _split(parts: Iterable[tuple[str, float]], separator: str) -> Iterator[Chunk]:
    """Documents between separators, one of which may stand across two parts."""
    buffer, done = "", 0.0
    for text, done in parts:
        *documents, buffer = (buffer + text).split(separator)
        yield from (Chunk(document, True, done) for document in documents)
        safe = len(buffer) - len(separator) + 1
        if safe > 0:
            yield Chunk(buffer[:safe], False, done)
            buffer = buffer[safe:]
    yield Chunk(buffer, True, done)


def _stripped(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Documents without the white space around them."""
    space, begun = "", False
    for text, last, done in chunks:
        text = space + text if begun else text.lstrip()
        begun = begun or bool(text)
        kept = text.rstrip()
        space = text[len(kept) :]
        if kept or last:
            yield Chunk(kept, last, done)
        if last:
            space, begun = "", False


def _check_size(size: int, where: str) -> None:
    if size > _LONGEST_DOCUMENT:
        raise ValueError(f"{where} has more than {_LONGEST_DOCUMENT} bytes; allowed are documents up to that: cut it")


def _json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8; convert the file, for example with iconv -f latin1 -t utf-8"
        ) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); write one JSON object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a JSON {type(row).__name__}; write one JSON object per line")
    return row


def _field(row: Mapping[str, Any], field: str, where: str) -> str:
    """The text of a row; a null is an empty document."""
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}; give field=NAME, one of {sorted(row)}")
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: field {field!r} is {type(text).__name__}, not text; give field=NAME of a text field"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair, which no UTF-8 text has; remove it") from error
    return text


def _import(module: str, purpose: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{purpose} needs the package {package}; run pip install {package}") from error


def _library_modules() -> dict[str, Path]:
    """The source files of the standard library, by their name in it; tests are no documentation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Path] = {}
    for module in sys.stdlib_module_names:
        file = root / f"{module}.py"
        paths = [file] if file.is_file() else (root / module).rglob("*.py")
        found |= {path.relative_to(root).as_posix(): path for path in paths}
    return {name: path for name, path in found.items() if not _TESTS & set(path.relative_to(root).parts)}


def _docstrings(path: Path) -> Iterator[str]:
    """The documentation of a module: its own docstring, then one text a documented top-level class or function."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the standard library are not ours to mend
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in [tree, *tree.body]:
        parts: Iterable[ast.AST] = [tree] if node is tree else ast.walk(node)
        found = [ast.get_docstring(part) for part in parts if isinstance(part, _DOCUMENTED)]
        if text := "\n\n".join(filter(None, found)):
            yield text


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
