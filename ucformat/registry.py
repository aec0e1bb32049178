"""What packages register by entry points: sources, exporters, integrations, stores, views and commands.

The engines of this package are registered by its own entry points, exactly as those of another
package are by theirs. Reading the names imports nothing; an object is imported when it is needed.
A package that cannot be imported is told of once, and hides no other.
"""

from __future__ import annotations

import logging
import re
import sys
from functools import cache, partial
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ucformat.errors import UcformatError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
        return _points(self.group)[name].package


class _Point(NamedTuple):
    """An entry point: its name, the package that registers it, and what imports its object."""

    name: str
    package: str
    load: Callable[[], Any]


def _failure(what: str, point: _Point, error: Exception) -> PluginError:
    package = point.package
    return PluginError(
        f"the {what} {point.name!r} of {package} cannot be used: {type(error).__name__}: {error}",
        hint=f"update or uninstall {package}; everything else works without it",
    )


@cache
def _points(group: str) -> dict[str, _Point]:
    """The entry points of a group by name; of several with one name this package's own, or the first."""
    points = {point.name: point for point in _own_points(group)}
    for point in _points_of_others(group):
        first = points.setdefault(point.name, point)
        if first is not point:
            _log.warning(
                "%s registers %r in %s, as %s does, whose is used",
                *(point.package, point.name, group, first.package),
            )
    return points


def _own_points(group: str) -> Iterator[_Point]:
    """This package's own entry points, from the file of which its metadata is made.

    An installation from a working tree has the metadata of the day on which it was installed.
    """
    section = ""
    for line in Path(__file__).with_name("entry_points.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and section == group:
            name, value = line.split(" = ")
            yield _Point(name, _OWN, partial(_load, *value.split(":")))


def _load(module: str, attribute: str) -> object:
    return getattr(import_module(module), attribute)


def _points_of_others(group: str) -> Iterator[_Point]:
    if not _others_register():
        return
    from importlib.metadata import entry_points  # which takes as long as all that help imports

    for point in entry_points(group=group):
        package = _OWN if point.dist is None else point.dist.name
        if package != _OWN:
            yield _Point(point.name, package, point.load)


@cache
def _others_register() -> bool:
    """Whether other installed packages may register something for this one."""
    finders = [f for f in sys.meta_path if hasattr(f, "find_distributions")]
    return finders != [PathFinder] or any(map(_may_register, sys.path))


def _may_register(folder: str) -> bool:
    """Whether a package in a folder or archive of `sys.path` may register something."""
    place = Path(folder)
    try:
        if place.is_file() or place.suffix == ".egg":  # which are not searched
            return True
        return any(
            f"[{_OWN}.".encode() in file.read_bytes()
            for file in place.glob("*-info/entry_points.txt")
            if not re.fullmatch(rf"{_OWN}(-\d.*)?", file.parent.stem)
        )
    except OSError:  # importlib.metadata knows what to do with a folder that cannot be read
        return True
