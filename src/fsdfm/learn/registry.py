"""Names that a recipe gives as `kind`, each with its config and the function that builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

from fsdfm.files import did_you_mean

__all__ = ["Entry", "Registry", "find_named"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """A frozen dataclass whose fields are the keys of a recipe's section, and what makes an object of it."""

    config: type[Any]
    build: Callable[..., Any]


class Registry(Mapping[str, Entry]):
    """A table of kinds; `hint` is said where a kind is unknown."""

    def __init__(self, where: str, default: str, *, hint: str = ""):
        self.where, self.default, self.hint = where, default, hint
        self._entries: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, name: str, config: type[Any], build: Callable[..., Any]) -> None:
        """Add a kind; its config has the field `kind` with the name as default. A module may register its own again."""
        entry = Entry(config, build)
        if not is_dataclass(config) or getattr(config, "kind", None) != name:
            raise ValueError(f'{config.__name__} must be a frozen dataclass with the field kind: str = "{name}"')
        known = self._entries.get(name)
        if known is not None and known.config.__qualname__ != config.__qualname__:
            raise ValueError(f"{self.where} {name!r} is registered already, by {known.config.__module__}; take another")
        self._entries[name] = entry

    def find(self, name: object) -> Entry:
        """The entry of a kind; a ValueError names the allowed ones."""
        return find_named(self, str(name), self.where, hint=self.hint)

    def build(self, config: Any, *arguments: Any) -> Any:
        """The object of a config."""
        return self.find(config.kind).build(config, *arguments)


def find_named(known: Mapping[str, _T], name: str, where: str, *, hint: str = "") -> _T:
    """What a name means; `where` it stands is said if it means nothing."""
    if name in known:
        return known[name]
    near = did_you_mean(name, known, otherwise=hint)
    raise ValueError(f"{where} is {name!r}; allowed are {', '.join(known)}{near and f' ({near})'}")
