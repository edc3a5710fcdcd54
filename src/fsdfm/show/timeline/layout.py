"""Text on a grid of cells: tokens wrapped at words, wide characters two cells wide, nothing beyond the last column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len

from fsdfm.show.timeline.glyphs import clusters, visible
from fsdfm.show.timeline.tokens import LEGEND_TITLE, Key, Token

__all__ = ["Segment", "lay_legend", "lay_tokens"]


@dataclass
class Segment:
    """What of a token stands in one row: clusters side by side from `column` on, and how they are drawn."""

    row: int
    column: int
    look: Token | Key | None
    clusters: list[str] = field(default_factory=list)

    @property
    def cells(self) -> int:
        """How many cells it takes."""
        return sum(map(cell_len, self.clusters))


def lay_tokens(tokens: Sequence[Token], columns: int) -> list[Segment]:
    """Wrap tokens at words; a space may hang one cell beyond the edge, so a line never begins with a word's space."""
    segments: list[Segment] = []
    row = column = 0
    for word in _words(tokens):
        width = sum(cell_len(cluster) for _, cluster in word)
        limit = columns + (word[0][1] == " ")
        if column > 0 and column + width > limit:
            row, column = row + 1, 0
        for token, cluster in word:
            if cluster == "\n":
                row, column = row + 1, 0
                continue
            if column + cell_len(cluster) > limit:  # a word longer than a line
                row, column = row + 1, 0
            last = segments[-1] if segments else None
            if last is None or last.look is not token or last.row != row:
                last = Segment(row, column, token)
                segments.append(last)
            last.clusters.append(cluster)
            column += cell_len(cluster)
    return [
        segment for segment, after in zip(segments, [*segments, None][1:], strict=True) if not _hangs(segment, after)
    ]


def _hangs(segment: Segment, after: Segment | None) -> bool:
    """Whether all of it is the space before a word that went to the next line: the word is chip enough."""
    return after is not None and after.look is segment.look and not "".join(segment.clusters).strip()


def _words(tokens: Sequence[Token]) -> Iterator[list[tuple[Token, str]]]:
    """What is not broken: runs of narrow clusters; a space, a line break or a wide character stands alone."""
    word: list[tuple[Token, str]] = []
    for token in tokens:
        for cluster in clusters(visible(token.piece)):
            if cluster in (" ", "\n") or cell_len(cluster) > 1:
                if word:
                    yield word
                yield [(token, cluster)]
                word = []
            else:
                word.append((token, cluster))
    if word:
        yield word


def lay_legend(keys: Sequence[Key], columns: int) -> list[Segment]:
    """A line of title, then each entry as a chip and its count, wrapped between entries."""
    segments = [Segment(0, 0, None, list(LEGEND_TITLE))]
    row, column = 1, 0
    for key in keys:
        chip, count = f" {key.label} " if key.bin or key.marked else key.label, f"{key.count}"
        width = len(chip) + 1 + len(count)
        if column > 0 and column + width > columns:
            row, column = row + 1, 0
        segments.append(Segment(row, column, key, list(chip)))
        segments.append(Segment(row, column + len(chip) + 1, None, list(count)))
        column += width + 3
    return segments
