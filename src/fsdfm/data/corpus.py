"""Text to a packed corpus: one memory-mapped file of tokens in which every document ends with EOS.

    corpus/
      corpus.json     the header: format version, tokenizer, source, counts, dtype, checksum
      tokens.bin      the tokens, uint16 where the vocabulary fits, else uint32
      starts.bin      the index of every document's first token, int64
      tokenizer.json  the tokenizer that made it

`prepare` writes to `corpus.partial` beside it and renames at the end; what it finds there from an interrupted run with
the same source and tokenizer it continues. A lock keeps a second `prepare` out meanwhile. The checksums are of what was
encoded, not of what a file was found to hold afterwards.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fsdfm.data.documents import Documents, TextPiece, cut
from fsdfm.data.tokenizer import Tokenizer
from fsdfm.files import file_sha256, lock, read_text, sync, write_json, write_text
from fsdfm.terminal import draws_bars

__all__ = ["FORMAT_VERSION", "Corpus", "Header", "prepare"]

FORMAT_VERSION = 1
_HEADER, _TOKENS, _STARTS, _TOKENIZER = "corpus.json", "tokens.bin", "starts.bin", "tokenizer.json"
_START_TYPE = np.dtype("<i8")
_TOKEN_TYPES = ("<u2", "<u4")  # what a header may name: numpy reads a file of "O" as addresses
_LARGEST_HEADER = 2**26  # bytes; it lists every input
_BATCH_CHARS = 2**20  # encoded at once
_SAVE_SECONDS = 10.0  # between two points from which an interrupted run continues


@dataclass(frozen=True)
class Header:
    """What a corpus says about itself; while `complete` is false, how far `prepare` has come."""

    version: int
    complete: bool
    tokenizer: str  # the tokenizer's hash
    vocab_size: int
    eos_id: int
    dtype: str
    documents: Mapping[str, Any]  # the source's identity
    num_documents: int = 0
    num_empty: int = 0  # documents without text, which are left out
    num_tokens: int = 0
    num_pieces: int = 0  # pieces of the source that are in the file
    document_start: int = 0  # where the document being written begins
    sha256: str = ""  # of tokens.bin, as far as the header speaks of it
    starts_sha256: str = ""  # of starts.bin likewise

    def __post_init__(self) -> None:
        counts = ("vocab_size", "eos_id", "num_documents", "num_empty", "num_tokens", "num_pieces", "document_start")
        wrong = [name for name in counts if type(getattr(self, name)) is not int or getattr(self, name) < 0]
        wrong += [name for name in ("tokenizer", "sha256", "starts_sha256") if not isinstance(getattr(self, name), str)]
        wrong += [] if self.dtype in _TOKEN_TYPES else ["dtype"]
        wrong += [] if isinstance(self.documents, Mapping) else ["documents"]
        if wrong:
            raise ValueError(
                f"a corpus's {wrong[0]} is {getattr(self, wrong[0])!r:.80}; allowed are counts, and as dtype "
                f"{' or '.join(_TOKEN_TYPES)}"
            )

    @classmethod
    def new(cls, documents: Documents, tokenizer: Tokenizer) -> Header:
        """The header of a corpus of which nothing is written yet."""
        return cls(
            version=FORMAT_VERSION,
            complete=False,
            tokenizer=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            dtype="<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
            documents=json.loads(json.dumps(documents.identity)),
        )

    @classmethod
    def read(cls, folder: Path) -> Header:
        """The header in a folder."""
        path = folder / _HEADER
        try:
            record = json.loads(read_text(path, _LARGEST_HEADER))
            version = record["version"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{folder} is not a corpus ({path.name}: {error}); make one with prepare") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{folder} is a corpus of format version {version}; this program reads version {FORMAT_VERSION}: "
                "update it, or prepare the corpus again"
            )
        known = {field.name for field in fields(cls)}
        if not known - {"starts_sha256"} <= set(record) <= known:
            raise ValueError(f"{path} is damaged: it has the keys {sorted(record)}; prepare the corpus again")
        try:
            return cls(**record)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; prepare the corpus again") from error

    def write(self, folder: Path) -> None:
        """Write the header beside its old self, then in its place."""
        write_json(folder / _HEADER, asdict(self), indent=2)

    def same_request(self, other: Header) -> bool:
        """Were both asked for with the same source and tokenizer?"""
        return (self.documents, self.tokenizer) == (other.documents, other.tokenizer)


class Corpus:
    """A packed corpus, mapped into memory: `tokens` [num_tokens] and the `starts` of its documents.

    corpus = Corpus.open("corpus")
    corpus.tokenizer.decode(corpus.document(0))
    """

    def __init__(self, folder: Path, header: Header, tokens: npt.NDArray[Any], *, starts: npt.NDArray[np.int64]):
        self.folder, self.header, self.tokens, self.starts = folder, header, tokens, starts

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> Corpus:
        """Map a prepared corpus; with `tokenizer`, check that it is the one the corpus was made with."""
        folder = Path(folder)
        header = Header.read(folder)
        if not header.complete:
            raise ValueError(f"{folder} is not finished; run prepare again")
        corpus = cls(
            folder,
            header,
            _map(folder / _TOKENS, np.dtype(header.dtype), header.num_tokens),
            starts=_map(folder / _STARTS, _START_TYPE, header.num_documents),
        )
        if tokenizer is not None:
            corpus.require(tokenizer)
        return corpus

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Corpus({str(self.folder)!r}, {len(self.starts):,} documents, {len(self):,} tokens)"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus."""
        tokenizer = Tokenizer.load(self.folder / _TOKENIZER)
        self.require(tokenizer)
        return tokenizer

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise unless the corpus was made with this tokenizer."""
        if tokenizer.hash != self.header.tokenizer:
            raise ValueError(
                f"{self.folder} was made with tokenizer {self.header.tokenizer[:12]} ({self.header.vocab_size} tokens) "
                f"not with {tokenizer.hash[:12]} ({tokenizer.vocab_size} tokens); prepare the text again with that"
            )

    def document(self, index: int) -> npt.NDArray[Any]:
        """The tokens of a document, without the EOS that ends it."""
        if not 0 <= index < len(self.starts):
            raise ValueError(f"document is {index}; allowed are 0 <= document < {len(self.starts)}")
        end = self.starts[index + 1] if index + 1 < len(self.starts) else len(self)
        return self.tokens[self.starts[index] : end - 1]

    def count_followers(self, vocab_size: int, *, most: int = 20_000_000) -> torch.Tensor:
        """How often each token follows each, in the first `most` tokens: sparse float32 [vocab_size, vocab_size]."""
        tokens = self.tokens[:most].astype(np.int64)
        pairs, counts = np.unique(tokens[:-1] * vocab_size + tokens[1:], return_counts=True)
        where = torch.from_numpy(np.stack([pairs // vocab_size, pairs % vocab_size]))
        shape = (vocab_size, vocab_size)
        return torch.sparse_coo_tensor(where, torch.from_numpy(counts).float(), shape, check_invariants=True).coalesce()

    def verify(self) -> None:
        """Raise unless what is on the disk is what was encoded (reads both files whole)."""
        for name, meant in ((_TOKENS, self.header.sha256), (_STARTS, self.header.starts_sha256)):
            if meant != file_sha256(self.folder / name) and (meant or name == _TOKENS):  # older headers have one only
                raise ValueError(f"{self.folder / name} has changed since it was written; prepare the corpus again")

    def split(self, validation_share: float) -> tuple[Corpus, Corpus]:
        """Training and validation parts: the last documents, about `validation_share` of the tokens, are held out."""
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share is {validation_share}; allowed are 0 < validation_share < 1")
        document = int(np.searchsorted(self.starts, len(self) * (1 - validation_share)))
        document = min(document, len(self.starts) - 1)
        if document < 1:
            raise ValueError(f"{self.folder} is one document and cannot be split; prepare a separate validation corpus")
        at = int(self.starts[document])
        return (
            Corpus(self.folder, self.header, self.tokens[:at], starts=self.starts[:document]),
            Corpus(self.folder, self.header, self.tokens[at:], starts=self.starts[document:] - at),
        )


def prepare(
    documents: Documents, tokenizer: Tokenizer, folder: str | Path, *, progress: bool = True, processes: int = 1
) -> Corpus:
    """Tokenize documents into a packed corpus, in constant memory; interrupted, it continues when called again.

        documents = open_documents("stories.txt", separator="<|endoftext|>")
        corpus = prepare(documents, Tokenizer.bytes(), "corpus")

    A finished corpus of the same source and tokenizer is returned as it is; anything else in the folder is an error.
    With several `processes` one reads and writes and the others encode: the same bytes, interrupted or not.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}; allowed are whole numbers >= 1")
    folder = Path(folder).resolve()
    header = Header.new(documents, tokenizer)
    if (folder / _HEADER).exists():
        return _reopen(folder, header)
    with lock(folder, beside=True):
        return _prepare(documents, tokenizer, folder, header=header, progress=progress, processes=processes)


def _prepare(
    documents: Documents, tokenizer: Tokenizer, folder: Path, *, header: Header, progress: bool, processes: int
) -> Corpus:
    """`prepare`, in a folder that nobody else writes to."""
    if (folder / _HEADER).exists():  # another made it before the lock was ours
        return _reopen(folder, header)
    partial = _start(folder)
    if (partial / _HEADER).exists() and (found := Header.read(partial)).same_request(header):
        header = found
    if not header.complete:
        with _Writer(partial, header) as writer:
            _fill(writer, documents, tokenizer, progress=progress, processes=processes)
        _finish(writer, tokenizer)
    with _writing(folder):
        if folder.exists():
            folder.rmdir()  # it is empty; not every system renames onto it
        partial.replace(folder)
        sync(folder.parent)
    return Corpus.open(folder)


def _reopen(folder: Path, wanted: Header) -> Corpus:
    corpus = Corpus.open(folder)
    if corpus.header.same_request(wanted):
        return corpus
    if corpus.header.documents == wanted.documents:
        raise ValueError(f"{folder} is a corpus of another tokenizer; delete it, or prepare into another folder")
    found, asked = (_source_name(header.documents) for header in (corpus.header, wanted))
    changed = "their text has changed since" if found == asked else f"not of {asked}"
    raise ValueError(
        f"{folder} is a corpus of another source: it was made of {found}, {changed}; delete it, or give another folder "
        "(data.corpus)"
    )


def _source_name(documents: Mapping[str, Any]) -> str:
    """The inputs that a corpus was made of, as people name them."""
    parts = [part for part in documents.get("parts", [documents]) if isinstance(part, Mapping)]
    names = []
    for part in parts:
        name = str(part.get("name", part.get("kind", "unknown inputs")))
        separator = part.get("separator")
        names.append(
            name if "separator" not in part else f"{name} ({f'split at {separator}' if separator else 'whole'})"
        )
    most = documents.get("max_documents")
    return ", ".join(names) + (f", the first {most} documents" if most else "")


def _start(folder: Path) -> Path:
    """The folder to write in, once it is clear that the result can take its place."""
    partial = folder.with_name(folder.name + ".partial")
    with _writing(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise ValueError(f"{folder} exists and is not a corpus; prepare into another folder")
        partial.mkdir(parents=True, exist_ok=True)
        if any(partial.iterdir()) and not any(partial.glob(_HEADER + "*")):
            raise ValueError(f"{partial} is not an interrupted corpus, and its name is needed; move it away")
    return partial


def _fill(writer: _Writer, documents: Documents, tokenizer: Tokenizer, *, progress: bool, processes: int) -> None:
    pieces = islice(cut(documents.chunks()), writer.header.num_pieces, None)
    with _bar(progress) as bar, _encoder(tokenizer, processes) as encode:
        task = bar.add_task("tokenize", total=None, tokens="")
        for batch, ids in encode(_batched(pieces)):
            writer.append(batch, ids)
            done, header = batch[-1].done, writer.header
            counts = f"{header.num_documents:,} documents, {header.num_tokens:,} tokens"
            bar.update(task, total=None if done is None else 1.0, completed=done or 0.0, tokens=counts)


_Encoded = Iterator[tuple[list[TextPiece], list[list[int]]]]


@contextmanager
def _encoder(tokenizer: Tokenizer, processes: int) -> Iterator[Callable[[Iterable[list[TextPiece]]], _Encoded]]:
    """From batches to (batch, tokens), in order: here, or in processes with at most two batches each under way."""
    if processes == 1:
        yield lambda batches: ((batch, _encode(tokenizer, batch)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin_encoding, initargs=(tokenizer.definition,)
    ) as pool:

        def encode(batches: Iterable[list[TextPiece]]) -> _Encoded:
            under_way: deque[tuple[list[TextPiece], Future[list[list[int]]]]] = deque()
            for batch in batches:
                under_way.append((batch, pool.submit(_encode_there, batch)))
                if len(under_way) >= 2 * processes:
                    first, future = under_way.popleft()
                    yield first, future.result()
            for first, future in under_way:
                yield first, future.result()

        try:
            yield encode
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(tokenizer: Tokenizer, batch: list[TextPiece]) -> list[list[int]]:
    return tokenizer.encode_batch([p.text if p.first else tokenizer.continuation(p.text) for p in batch])


_THERE: list[Tokenizer] = []  # of a process that encodes


def _begin_encoding(definition: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that writes is the one to hear it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many processes as were asked for, and no threads beside them
    _THERE[:] = [Tokenizer(definition)]


def _encode_there(batch: list[TextPiece]) -> list[list[int]]:
    return _encode(_THERE[0], batch)


def _finish(writer: _Writer, tokenizer: Tokenizer) -> None:
    if writer.header.num_tokens == 0:
        shutil.rmtree(writer.folder)
        raise ValueError(
            "the corpus is empty: the inputs hold no text; name other inputs, or another field or separator"
        )
    with _writing(writer.folder):
        write_text(writer.folder / _TOKENIZER, tokenizer.definition)
        replace(writer.header, complete=True).write(writer.folder)
        sync(writer.folder)


class _Writer:
    """The files of an unfinished corpus; `header` always describes a state that can be continued."""

    def __init__(self, folder: Path, header: Header):
        self.folder = folder
        self._saved = time.monotonic()
        with _writing(folder):
            header.write(folder)  # first, so that what is found here can always be told from a stranger's files
            size = header.num_tokens * np.dtype(header.dtype).itemsize
            self._tokens, tokens_hash = _open_at(folder / _TOKENS, size, header.sha256)
            size = header.num_documents * _START_TYPE.itemsize
            self._starts, starts_hash = _open_at(folder / _STARTS, size, header.starts_sha256)
        self._state = header, tokens_hash, starts_hash  # one name: an interrupt finds the three before or after a batch

    @property
    def header(self) -> Header:
        """What is written so far."""
        return self._state[0]

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        with _writing(self.folder), self._tokens, self._starts:
            self.save()

    def append(self, pieces: Sequence[TextPiece], ids: Sequence[Sequence[int]]) -> None:
        """Write the tokens of some pieces, and now and then a point to continue from."""
        tokens, starts, header = _pack(self.header, pieces, ids)
        with _writing(self.folder):
            content = np.asarray(tokens, dtype=header.dtype).tobytes()
            index = np.asarray(starts, dtype=_START_TYPE).tobytes()
            self._tokens.write(content)
            self._starts.write(index)
            tokens_hash, starts_hash = self._state[1].copy(), self._state[2].copy()
            tokens_hash.update(content)
            starts_hash.update(index)
            sums = {"sha256": tokens_hash.hexdigest(), "starts_sha256": starts_hash.hexdigest()}
            self._state = replace(header, **sums), tokens_hash, starts_hash
            if time.monotonic() - self._saved >= _SAVE_SECONDS:
                self.save()

    def save(self) -> None:
        """Bring the data to the disk, then the header that speaks of it."""
        for file in (self._tokens, self._starts):
            _sync(file)
        self.header.write(self.folder)
        self._saved = time.monotonic()


def _pack(
    header: Header, pieces: Sequence[TextPiece], ids: Sequence[Sequence[int]]
) -> tuple[list[int], list[int], Header]:
    """The tokens of pieces with an EOS after every document, where the documents start, and the header after them."""
    tokens: list[int] = []
    starts: list[int] = []
    start, num_empty = header.document_start, header.num_empty
    for piece, row in zip(pieces, ids, strict=True):
        tokens += row
        end = header.num_tokens + len(tokens)
        if piece.last and end == start:
            num_empty += 1
        elif piece.last:
            tokens.append(header.eos_id)
            starts.append(start)
            start = end + 1
    after = replace(
        header,
        num_documents=header.num_documents + len(starts),
        num_empty=num_empty,
        num_tokens=header.num_tokens + len(tokens),
        num_pieces=header.num_pieces + len(pieces),
        document_start=start,
    )
    return tokens, starts, after


def _batched(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bar(visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[tokens]}"))
    console = Console(stderr=True)
    disable = not visible or (console.is_jupyter and not draws_bars(console))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=disable)


def _open_at(path: Path, size: int, sha256: str) -> tuple[BinaryIO, Any]:
    """A file to continue after its first `size` bytes, and the hash of them, which must be the header's."""
    if size and (not path.is_file() or path.stat().st_size < size):
        raise ValueError(f"{path} is shorter than its header says; delete {path.parent} and run again")
    path.touch()
    file = path.open("r+b")
    file.truncate(size)
    digest = hashlib.sha256()
    while data := file.read(2**20):
        digest.update(data)
    if size and sha256 and digest.hexdigest() != sha256:
        file.close()
        raise ValueError(f"{path} is not what was written; delete {path.parent} and run again")
    return file, digest


def _map(path: Path, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    size = path.stat().st_size if path.exists() else 0
    if size != length * dtype.itemsize or length < 1:
        raise ValueError(f"{path} has {size} bytes, not the {length * dtype.itemsize} of its header; prepare it again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one sentence that a folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder}: {error.strerror or error}; make room there, or choose a folder you may write to"
        ) from error


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
