"""Files on the disk: their checksum, and that they are really there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["file_sha256", "sync", "write_text"]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(2**16):
            digest.update(data)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk; where the system opens no folders, they bring themselves."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file beside its place and rename it: at every moment it is whole, the old one or the new."""
    side = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with side.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        side.replace(path)
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror}; make room, or choose a folder you may write to"
        ) from error
    finally:
        side.unlink(missing_ok=True)
