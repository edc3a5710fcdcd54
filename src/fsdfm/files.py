"""Files that are whole at every moment, folders with one writer, bounded reads, checksums, the name that was meant.

    with lock(folder):                      # nobody else writes there meanwhile
        write_json(folder / "a.json", {})   # beside its place, synced, renamed into it

Every file that is written whole is written here, every lock is taken here.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

__all__ = [
    "InUseError",
    "did_you_mean",
    "file_sha256",
    "lock",
    "nearest",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_text",
    "replace_file",
    "require_plain",
    "sync",
    "write_json",
    "write_text",
]

_WORDS = 200  # bytes of a lock file that are read
_LONGEST_LINE = 2**26  # bytes: a text of a million tokens with all that is noted of it


# --- reading ----------------------------------------------------------------------------------------------------------


def require_plain(path: Path) -> None:
    """Raise unless a path is a plain file: a pipe would be waited for, a device read for ever."""
    if not path.is_file():
        if path.exists():
            raise ValueError(f"{path} is not a plain file; name one")
        raise FileNotFoundError(2, os.strerror(2), str(path))


def read_bytes(path: Path, most: int = 2**20) -> bytes:
    """A plain file of at most `most` bytes; pipes, devices and larger files are errors, unread."""
    require_plain(path)
    content = bytearray()
    with path.open("rb") as file:  # in pieces: what it says of its size may not be true
        while len(content) <= most and (piece := file.read(min(2**16, most + 1 - len(content)))):
            content += piece
    if len(content) > most:
        raise ValueError(f"{path} has more than the {most} bytes that such a file may have; get it again")
    return bytes(content)


def read_text(path: Path, most: int = 2**20) -> str:
    """The text of a plain file of at most `most` bytes, in UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def read_json(path: Path, most: int = 2**20) -> Any:
    """What a JSON file of at most `most` bytes holds; whatever is wrong with its content is a ValueError."""
    try:
        return json.loads(read_text(path, most))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_lines(path: Path, longest: int = _LONGEST_LINE) -> Iterator[str]:
    """The lines of a plain file, each with its newline, the last perhaps without; one that is too long is an error."""
    require_plain(path)
    with path.open("rb") as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise ValueError(f"{path} has a line of more than {longest} bytes; get it again")
            yield line.decode("utf-8")


def file_sha256(path: Path) -> str:
    """SHA-256 of a plain file, read in pieces."""
    require_plain(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(2**16):
            digest.update(data)
    return digest.hexdigest()


# --- writing ----------------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; where the system opens no folders, they bring themselves."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, sync it and rename it: at every moment the file is whole, old or new.

    What is no plain file (a device, a pipe) is written to as it is; a link stays one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            write(path)
        else:
            _replace(path.resolve() if path.is_symlink() else path, write)
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; make room, or choose a folder you may write to"
        ) from error


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    side = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        write(side)
        sync(side)
        side.replace(path)
    finally:
        side.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file: whole or not at all."""
    replace_file(path, lambda side: side.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: object, *, indent: int | None = 1, allow_nan: bool = True) -> None:
    """Write a JSON file: whole or not at all."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=allow_nan) + "\n")


# --- locks ------------------------------------------------------------------------------------------------------------


class InUseError(ValueError):
    """Another process, or another part of this one, has the lock."""


@contextmanager
def lock(owned: Path, *, beside: bool = False) -> Iterator[None]:
    """Keep every other writer out of a folder, or with `beside` of a file or a folder that is still to be made.

    The system holds the lock and drops it when the process ends, however it ends; a file left behind locks nothing.
    Where another has it, an `InUseError` says who.
    """
    owned = owned.resolve()
    file = owned.with_name(f".{owned.name}.lock") if beside else owned / ".lock"
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _take(fcntl, owned, file)
    except OSError as error:
        raise ValueError(
            f"cannot write to {owned}: {error.strerror or error}; make room there, or choose a folder you may write to"
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is still ours: whoever opened it already sees that it is gone
        os.close(descriptor)


def _take(fcntl: Any, owned: Path, file: Path) -> int:
    """The descriptor of a lock file that is locked and still has its name."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(descriptor, file):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode()[:_WORDS])
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, _WORDS).decode("utf-8", "replace")
            os.close(descriptor)
            who = "".join(letter for letter in holder if letter.isprintable()) or "another process"
            raise InUseError(
                f"{owned} is in use by another run ({who}); wait for it to end, or choose another place"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another process removed it between the two calls


def _is(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


# --- names ------------------------------------------------------------------------------------------------------------


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, if one is near."""
    return next(iter(get_close_matches(str(word), list(known), n=1)), None)


def did_you_mean(word: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """`did you mean 'x'?`, or where no name is near `otherwise`, or all that are allowed."""
    names = list(known)
    if (near := nearest(word, names)) is not None:
        return f"did you mean {near!r}?"
    return f"allowed are {', '.join(names)}" if otherwise is None else otherwise
