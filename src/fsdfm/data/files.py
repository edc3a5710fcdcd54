"""Files on the disk: their checksum, and that they are really there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["file_sha256", "sync"]


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
