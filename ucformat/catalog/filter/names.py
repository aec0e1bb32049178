"""The names of metrics and the paths of configurations, which only a catalog knows."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ucformat.catalog.filter.pointing import pointing_error
from ucformat.catalog.filter.syntax import Sort, atoms
from ucformat.catalog.filter.values import spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ucformat.catalog.filter.syntax import Node
    from ucformat.catalog.filter.values import Key

__all__ = ["Names", "check_known", "nearest", "paths_of", "used_keys", "used_names"]

_COMPARED = 100  # characters of a name that are compared with others


@dataclass(frozen=True)
class Names:
    """Names of metrics, and paths of configurations such as `("optimizer", "lr")`: all that are known, or are used."""

    metrics: frozenset[str] = frozenset()
    configs: frozenset[tuple[str, ...]] = frozenset()

    def written(self) -> list[str]:
        """How filters write them, sorted."""
        metrics = {spell(("metric", name)) for name in self.metrics}
        return sorted(metrics | {spell(("config", *path)) for path in self.configs})

    def has(self, key: Key) -> bool:
        """Whether there is such a metric or path; where nothing is known, everything may be there."""
        root, *rest = key.parts
        path = tuple(rest)
        if root == "metric":
            return not self.metrics or path[0] in self.metrics
        if root != "config" or not self.configs or any(known[: len(path)] == path for known in self.configs):
            return True
        return any(path[:i] in self.configs and path[i].isdigit() for i in range(1, len(path)))  # into a list


def used_names(node: Node | Sort) -> Names:
    """The metrics and the configuration paths that a filter or an order uses."""
    keys = [key.parts for key in _keys(node)]
    return Names(
        frozenset(parts[1] for parts in keys if parts[0] == "metric" and len(parts) == 2),
        frozenset(parts[1:] for parts in keys if parts[0] == "config" and len(parts) > 1),
    )


def check_known(node: Node | Sort, known: Names, text: str | None = None) -> None:
    """UsageError where a metric or a configuration path is used that is not `known`.

    It points into `text`, where that is what the node was read from.
    """
    for key in _keys(node):
        if not known.has(key):
            near = nearest(str(key), [name for name in known.written() if name.startswith(f"{key.parts[0]}.")])
            what = "metric" if key.parts[0] == "metric" else "configuration"
            hint = near or f"no {what} in this catalog has a name like it"
            raise pointing_error(f"unknown key {key}", text, key.at, hint=hint)


def used_keys(node: Node | Sort) -> set[str]:
    """The keys that a filter or an order uses, as filters write them."""
    return set(map(str, _keys(node)))


def paths_of(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths to all values of a configuration that are not objects themselves, as `Names` takes them."""
    left: list[tuple[tuple[str, ...], Any]] = [((), document)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict) and value:
            left.extend(((*path, str(key)), below) for key, below in value.items())
        elif path:
            yield path


def nearest(name: str, options: Iterable[str]) -> str | None:
    """A hint that offers the options most like `name`, if there are any."""
    found = get_close_matches(name[:_COMPARED], [option[:_COMPARED] for option in options], n=3)
    return f"did you mean {' or '.join(found)}?" if found else None


def _keys(node: Node | Sort) -> list[Key]:
    return [by.key for by in node.keys] if isinstance(node, Sort) else [atom.key for atom in atoms(node)]
