"""What a Parquet file says of its own size, page by page, before anything of it is unpacked.

A file of a few bytes can unpack to gigabytes. Its footer says how many, but whoever wrote it may say less, and pyarrow
makes room for what stands in the header of each page. So those headers are read here: Thrift's compact protocol, of
which two numbers are asked for and the rest is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

__all__ = ["BOMB_BYTES", "BOMB_RATIO", "ParquetPage", "check_parquet", "read_pages"]

BOMB_BYTES, BOMB_RATIO = 2**26, 200  # text is packed to a twentieth at best
_LARGEST_HEADER = 2**20  # statistics of a text column may hold two of its texts
_DEEPEST = 16
_UNPACKED, _PACKED = 2, 3  # fields of a page's header, both i32


class ParquetPage(NamedTuple):
    """One page of a column."""

    packed: int
    unpacked: int


def check_parquet(path: Path, metadata: Any, field: str) -> None:
    """Raise where a column unpacks to more than text can; `metadata` is pyarrow's."""
    packed = unpacked = 0
    with path.open("rb") as file:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                if column.path_in_schema.split(".")[0] != field:
                    continue
                for page in _pages_of(path, file, column):
                    packed, unpacked = packed + page.packed, unpacked + page.unpacked
                    if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * packed:
                        raise ValueError(
                            f"{path}: {packed} bytes unpack to {unpacked} by row group {number}; allowed is "
                            f"{BOMB_RATIO}-fold"
                        )


def _pages_of(path: Path, file: BinaryIO, column: Any) -> Iterator[ParquetPage]:
    places = [column.data_page_offset, column.dictionary_page_offset if column.has_dictionary_page else None]
    start = min(place for place in places if place is not None and place > 0)
    try:
        yield from read_pages(file, start, start + column.total_compressed_size)
    except (IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} has a page that cannot be read at byte {file.tell()}; write it again") from error


def read_pages(file: BinaryIO, start: int, end: int) -> Iterator[ParquetPage]:
    """The pages between two places of a file; IndexError where there is none."""
    while start < end:
        file.seek(start)
        header = _Header(file.read(min(_LARGEST_HEADER, end - start)))
        numbers = header.struct()
        page = ParquetPage(numbers[_PACKED], numbers[_UNPACKED])
        if page.packed < 0 or page.unpacked < 0:
            raise IndexError("a page of a negative size")
        yield page
        start += header.place + page.packed


class _Header:
    """Reads Thrift's compact protocol; IndexError beyond its end."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """The whole numbers of a struct by their fields; other fields are passed over."""
        found: dict[int, int] = {_PACKED: -1, _UNPACKED: -1}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self._number()
            value = self._value(kind, depth + 1)
            if value is not None:
                found[field] = value
        return found

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if not byte & 128:
                return value
            if shift > 63:
                raise IndexError("a number without an end")

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self.data):
            raise IndexError("beyond the end")

    def _value(self, kind: int, depth: int) -> int | None:
        """A field's value: a number where it is a whole one."""
        if depth > _DEEPEST:
            raise IndexError("too deep")
        if kind in (4, 5, 6):  # i16, i32, i64
            return self._number()
        if kind == 3:
            self._skip(1)
        elif kind == 7:  # double
            self._skip(8)
        elif kind == 8:  # binary
            self._skip(self._varint())
        elif kind in (9, 10):  # list, set
            head = self._byte()
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._element(head & 15, depth)
        elif kind == 12:
            self.struct(depth)
        elif kind not in (1, 2):  # a boolean stands in its head
            raise IndexError("a kind that no page has")
        return None

    def _element(self, kind: int, depth: int) -> None:
        if kind in (1, 2):
            self._skip(1)
        else:
            self._value(kind, depth + 1)
