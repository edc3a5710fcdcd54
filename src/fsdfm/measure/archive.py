"""Sample files: everything that was sampled, as JSON lines, so that another judge can score the same samples.

The first line says whose samples these are. Every other line is one sample (`kind` text, continuation or repair), a
real row (`real`), the likelihood bound (`bound`), or says that a row of a table is complete (`row`). Lines are only
ever added: an interrupted run resumes behind the last whole one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from fsdfm.files import read_lines
from fsdfm.measure.rows import TokenRows
from fsdfm.measure.sampling import Drawn

__all__ = ["FORMAT", "Archive", "first_difference"]

FORMAT, FORMAT_VERSION = "fsdfm-samples", 1


class Archive:
    """A sample file.

    header   whose samples these are: model, sampler, seed, tokenizer
    """

    def __init__(self, file: Path, header: Mapping[str, Any]):
        self.file, self.header = file, header

    @classmethod
    def create(cls, file: Path, header: Mapping[str, Any], same: Sequence[str]) -> Archive:
        """A new file, or the one that is there if its header has the `same` values."""
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, **header}
        if file.exists() and file.stat().st_size:
            found = cls.open(file)
            if (reason := first_difference(found.header, header, same)) is not None:
                raise ValueError(f"{file} holds other samples: {reason}; give --samples another file")
            _drop_half_line(file)
            return found
        archive = cls(file, json.loads(json.dumps(header)))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            archive._append([header])
        except OSError as error:
            raise ValueError(f"cannot write {file}: {error.strerror}; choose a file you may write to") from error
        return archive

    @classmethod
    def open(cls, file: Path) -> Archive:
        """A file that is there."""
        try:
            header = json.loads(next(read_lines(file), ""))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not a sample file ({error}); give one that --samples wrote") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f"{file} is not a sample file; give one that --samples wrote")
        if header.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"{file} has format version {header.get('format_version')}; this fsdfm reads 1")
        return cls(file, header)

    # --- writing ------------------------------------------------------------------------------------------------------

    def add(
        self,
        kind: str,
        steps: int,
        drawn: Drawn,
        *,
        temperature: float,
        first: int,
        text: Callable[[Sequence[int]], str],
    ) -> None:
        """Add samples `first`, `first` + 1, ... of a kind."""
        self._append(
            {
                "kind": kind,
                "steps": steps,
                "temperature": temperature,
                "sample": first + k,
                "text": text(drawn.tokens[k].tolist()),
                "tokens": drawn.tokens[k].tolist(),
                **{name: float(column[k]) for name, column in drawn.columns.items()},
            }
            for k in range(len(drawn))
        )

    def add_real(self, rows: TokenRows, text: Callable[[Sequence[int]], str]) -> None:
        """Add the real rows that are not there yet."""
        known = sum(1 for _ in self._records("real"))
        self._append(
            {"kind": "real", "sample": k, "text": text(row), "tokens": row}
            for k, row in enumerate(rows[known:].tolist(), start=known)
        )

    def add_record(self, kind: str, **values: Any) -> None:
        """Add anything else: the bound, or that a row is complete; what stands there already is not added again."""
        record = json.loads(json.dumps({"kind": kind, **values}))
        if record not in list(self._records(kind)):
            self._append([record])

    def _append(self, records: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            for record in records:
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")

    # --- reading ------------------------------------------------------------------------------------------------------

    def drawn(self, kind: str, steps: int, *, temperature: float, num: int) -> Drawn | None:
        """Samples 0, 1, ... of a kind, up to `num` or the first that is missing; None: there is none."""
        found: dict[int, dict[str, Any]] = {}
        for record in self._records(kind):
            if (record["steps"], record["temperature"]) == (steps, temperature) and record["sample"] < num:
                found[record["sample"]] = record
        whole = [found[k] for k in takewhile(found.__contains__, count())]
        if not whole:
            return None
        names = [name for name in whole[0] if name not in ("kind", "steps", "temperature", "sample", "text", "tokens")]
        return Drawn(
            np.array([record["tokens"] for record in whole], dtype=np.int32),
            {name: np.array([record[name] for record in whole], dtype=np.float64) for name in names},
        )

    def real(self) -> TokenRows | None:
        """The real rows, if there are any."""
        rows = [record["tokens"] for record in self._records("real")]
        return np.array(rows, dtype=np.int32) if rows else None

    def has(self, kind: str) -> bool:
        """Whether there is any record of a kind."""
        return next(self._records(kind), None) is not None

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Every record of a kind, in order."""
        return list(self._records(kind))

    def _records(self, kind: str) -> Iterator[dict[str, Any]]:
        start = f'{{"kind": "{kind}"'  # what a line of this kind begins with: the others need not be parsed
        for line in read_lines(self.file):
            if line.startswith(start) and line.endswith("\n"):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{self.file} is damaged: a line is not JSON ({error})") from error


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The first of these values that differs, in words; `a.b` is b within a."""
    for name in names:
        before, now = (json.loads(json.dumps(_reach(record, name))) for record in (old, new))
        if before != now:
            return f"its {name.replace('.', ' ')} is {before!r:.60}, now it is {now!r:.60}"
    return None


def _reach(record: Any, name: str) -> Any:
    for part in name.split("."):
        record = record.get(part) if isinstance(record, Mapping) else None
    return record


def _drop_half_line(file: Path) -> None:
    """Cut off a last line that was not finished."""
    with file.open("rb+") as lines:
        content_end = lines.seek(0, 2)
        place = content_end
        while place > 0:
            start = max(0, place - 65536)
            lines.seek(start)
            newline = lines.read(place - start).rfind(b"\n")
            if newline >= 0:
                lines.truncate(start + newline + 1)
                return
            place = start
