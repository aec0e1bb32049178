"""What packages register by entry points: sources, exporters, integrations, stores, views and commands.

The engines of this package are registered by its own entry points, exactly as those of another
package are by theirs. Reading the names imports nothing; an object is imported when it is needed.
A package that cannot be imported is told of once, and hides no other.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from ucformat.errors import UcformatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.metadata import EntryPoint

T = TypeVar("T")

_OWN = "ucformat"
_log = logging.getLogger(_OWN)


class PluginError(UcformatError):
    """An installed package registers something for ucformat that cannot be imported."""


class Registry(Generic[T]):
    """The objects that packages register in one group of entry points, by name."""

    def __init__(self, group: str, what: str) -> None:
        self.group, self.what = f"{_OWN}.{group}", what
        self._objects: dict[str, T] = {}
        self._failures: dict[str, PluginError] = {}
        self._told: set[str] = set()

    @property
    def failures(self) -> tuple[PluginError, ...]:
        """Why objects could not be imported so far."""
        return tuple(self._failures.values())

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted; imports nothing."""
        return tuple(sorted({**_points(self.group), **self._objects}))

    def __contains__(self, name: object) -> bool:
        return name in self._objects or name in _points(self.group)

    def __getitem__(self, name: str) -> T:
        """Import the object of a name.

        Raises:
            UsageError: no package registers the name.
            PluginError: the package that registers it cannot be imported.
        """
        if name in self._objects:
            return self._objects[name]
        point = _points(self.group).get(name)
        if point is None:
            raise UsageError(
                f"there is no {self.what} {name!r}", hint=f"there are: {', '.join(self.names())}"
            )
        if name in self._failures:
            raise self._failures[name]
        try:
            self._objects[name] = point.load()
        except Exception as error:
            self._failures[name] = failure = _failure(self.what, point, error)
            raise failure from error
        return self._objects[name]

    def items(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, T]]:
        """Import objects, with their names; those that cannot be imported are left out, and told of once.

        Args:
            names: of the objects (default: all).
        """
        for name in self.names() if names is None else names:
            try:
                yield name, self[name]
            except PluginError as failure:
                if name not in self._told:
                    self._told.add(name)
                    _log.warning("%s; %s", failure.message, failure.hint)

    def package(self, name: str) -> str:
        """The package that registers a name."""
        return _package(_points(self.group)[name])


def _failure(what: str, point: EntryPoint, error: Exception) -> PluginError:
    package = _package(point)
    return PluginError(
        f"the {what} {point.name!r} of {package} cannot be used: {type(error).__name__}: {error}",
        hint=f"update or uninstall {package}; everything else works without it",
    )


def _package(point: EntryPoint) -> str:
    """The name of the package that registers an entry point."""
    return point.dist.name if point.dist is not None else _OWN


@cache
def _own_points() -> dict[str, list[EntryPoint]]:
    """This package's own entry points by group, from the file of which its metadata is made.

    An installation from a working tree has the metadata of the day on which it was installed.
    """
    from configparser import ConfigParser  # here, because most commands need no plugin to start
    from importlib.metadata import EntryPoint

    file = ConfigParser(delimiters="=")
    file.read(Path(__file__).with_name("entry_points.txt"), encoding="utf-8")
    return {
        group: [EntryPoint(name, value, group) for name, value in section.items()]
        for group, section in file.items()
    }


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; of several with one name this package's own, or the first."""
    from importlib.metadata import entry_points

    points = {point.name: point for point in _own_points().get(group, ())}
    for point in entry_points(group=group):
        if _package(point) == _OWN:
            continue
        first = points.setdefault(point.name, point)
        if first is not point:
            _log.warning(
                "%s registers %r in %s, as %s does, whose is used",
                *(_package(point), point.name, group, _package(first)),
            )
    return points
