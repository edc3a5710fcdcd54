"""A zip archive whose members are stored, not compressed: where each one lies in the file.

Only the archive's directory is read, and nothing of it is believed before it is checked against the size of the file:
a compressed member (a zip bomb), one that ends behind the file, or two that share bytes are errors. Members larger
than 4 GiB (zip64) are read as well.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

__all__ = ["Member", "ZipArchive"]

_END = struct.Struct("<4s4H2LH")  # end of the directory: PK\5\6
_END64_PLACE = struct.Struct("<4sLQL")  # where its zip64 form is: PK\6\7
_END64 = struct.Struct("<4sQ2H2L4Q")  # PK\6\6
_ENTRY = struct.Struct("<4s6H3L5H2L")  # one member in the directory: PK\1\2
_LOCAL = struct.Struct("<4s5H3L2H")  # what stands before a member's bytes: PK\3\4
_LONGEST_COMMENT = 2**16 - 1
_LARGEST_DIRECTORY = 2**24  # about 150,000 members; in memory it takes some times more
_IN_EXTRA_2, _IN_EXTRA_4 = 2**16 - 1, 2**32 - 1  # "see the zip64 form"
_PIECE = 2**20


@dataclass(frozen=True)
class Member:
    """A member's local header, its size, and the CRC-32 of its bytes."""

    header: int
    size: int
    crc: int


class ZipArchive:
    """The members of a zip file, by name; `read_into` fills a buffer with the bytes of one of them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path} is not a file; name a .pth file")
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise ValueError(f"cannot read {self.path}: {error.strerror}") from error
        try:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            self.members = self._read_directory()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ZipArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def error(self, what: str) -> ValueError:
        """A sentence that begins with the file."""
        return ValueError(f"{self.path} {what}; get it again")

    def read(self, name: str) -> bytes:
        """All bytes of a member."""
        buffer = bytearray(self.members[name].size)
        self.read_into(memoryview(buffer), name)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, name: str, offset: int = 0) -> None:
        """Fill the buffer with a member's bytes from `offset` on, after checking the CRC-32 of the whole member."""
        member = self.members[name]
        start = self._start(name)
        whole = offset == 0 and len(buffer) == member.size
        crc = 0 if whole else self._crc(start, member.size)
        self._fill(buffer, start + offset)
        if (zlib.crc32(buffer) if whole else crc) != member.crc:
            raise self.error(f"is damaged: the bytes of its member {name[:80]!r} are not what was written")

    def _start(self, name: str) -> int:
        member = self.members[name]
        fields = _LOCAL.unpack(self._bytes(member.header, _LOCAL.size))
        start = member.header + _LOCAL.size + int(fields[-2]) + int(fields[-1])
        if fields[0] != b"PK\3\4" or start + member.size > self.num_bytes:
            raise self.error(f"is damaged: its member {name[:80]!r} is not where the directory says")
        return start

    def _crc(self, start: int, size: int) -> int:
        crc, piece = 0, bytearray(min(size, _PIECE))
        for done in range(0, size, _PIECE):
            part = memoryview(piece)[: min(_PIECE, size - done)]
            self._fill(part, start + done)
            crc = zlib.crc32(part, crc)
        return crc

    def _fill(self, buffer: memoryview, start: int) -> None:
        self._file.seek(start)
        done = 0
        while done < len(buffer):
            count = self._file.readinto(buffer[done:])
            if not count:
                raise self.error("became shorter while it was read")
            done += count

    def _bytes(self, start: int, count: int) -> bytes:
        """Exactly `count` bytes, which must lie within the file."""
        if not 0 <= start <= self.num_bytes - count:
            raise self.error("is damaged or cut off: its directory points outside of it")
        buffer = bytearray(count)
        self._fill(memoryview(buffer), start)
        return bytes(buffer)

    # --- the directory ------------------------------------------------------------------------------------------------

    def _read_directory(self) -> dict[str, Member]:
        start, size, count = self._find_directory()
        if size > _LARGEST_DIRECTORY:
            raise self.error(f"has a directory of {size} bytes; allowed are up to {_LARGEST_DIRECTORY}")
        directory = self._bytes(start, size)
        members: dict[str, Member] = {}
        place = 0
        for _ in range(count):
            if place + _ENTRY.size > size:
                raise self.error(f"is damaged: its directory ends before {count} members")
            name, member, place = self._parse_entry(directory, place)
            if name in members:
                raise self.error(f"holds the member {name[:80]!r} twice")
            members[name] = member
        self._check_apart(members, start)
        return members

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the directory is, its size, and its number of members."""
        tail_start = max(0, self.num_bytes - _END.size - _LONGEST_COMMENT)
        tail = self._bytes(tail_start, self.num_bytes - tail_start)
        at = tail.rfind(b"PK\5\6")
        if at < 0 or at + _END.size > len(tail):
            raise self.error("is no .pth file, or it is cut off: it does not end as a zip archive does")
        _, _, _, _, count, size, start, _ = _END.unpack_from(tail, at)
        if count == _IN_EXTRA_2 or _IN_EXTRA_4 in (size, start):
            place = self._bytes(tail_start + at - _END64_PLACE.size, _END64_PLACE.size)
            sign, _, where, _ = _END64_PLACE.unpack(place)
            fields = _END64.unpack(self._bytes(where, _END64.size))
            if (sign, fields[0]) != (b"PK\6\7", b"PK\6\6"):
                raise self.error("is damaged: the end of its zip directory is broken")
            count, size, start = fields[-3:]
        return start, size, count

    def _parse_entry(self, directory: bytes, place: int) -> tuple[str, Member, int]:
        fields = _ENTRY.unpack_from(directory, place)
        sign, flags, method, crc = fields[0], fields[3], fields[4], fields[7]
        compressed, size, name_length, extra_length, comment_length = fields[8:13]
        header = fields[16]
        middle = place + _ENTRY.size + name_length
        end = middle + extra_length + comment_length
        if sign != b"PK\1\2" or end > len(directory):
            raise self.error("is damaged: its zip directory is broken")
        name = directory[place + _ENTRY.size : middle].decode("utf-8", errors="replace")
        extra = directory[middle : middle + extra_length]
        size, compressed, header = self._widen(extra, size, compressed, header)
        if method != 0 or flags & 1 or compressed != size:
            raise self.error(f"has a compressed or encrypted member, {name[:80]!r}, which PyTorch never writes")
        if header + _LOCAL.size + size > self.num_bytes:
            raise self.error(f"is cut off: its member {name[:80]!r} of {size} bytes ends behind its {self.num_bytes}")
        return name, Member(header, size, crc), end

    def _widen(self, extra: bytes, *narrow: int) -> list[int]:
        """The numbers of an entry, those that do not fit into 32 bits taken from its zip64 field."""
        place = 0
        wide = b""
        while place + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, place)
            if kind == 1:
                wide = extra[place + 4 : place + 4 + length]
            place += 4 + length
        values = []
        for value in narrow:
            if value == _IN_EXTRA_4:
                if len(wide) < 8:
                    raise self.error("is damaged: a zip64 field is missing")
                value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
            values.append(value)
        return values

    def _check_apart(self, members: dict[str, Member], directory: int) -> None:
        """Raise where two members share bytes: a small file could then unpack to a huge one."""
        ordered = sorted(members.values(), key=lambda member: member.header)
        ends = [*(member.header for member in ordered), directory]
        if any(
            member.header + _LOCAL.size + member.size > end
            for member, (_, end) in zip(ordered, pairwise(ends), strict=True)
        ):
            raise self.error("is damaged: two of its members share bytes")
