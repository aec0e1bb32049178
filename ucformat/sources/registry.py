"""The sources that packages register, in the order in which they are asked."""

from __future__ import annotations

import logging
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from ucformat.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.sources.base import Source

SOURCES: Registry[type[Source]] = Registry("sources", "source")

_log = logging.getLogger("ucformat")


@cache
def all_sources() -> tuple[Source, ...]:
    """A source of each registered kind, with default options, by precedence."""
    return by_precedence(_usable_sources())


def _usable_sources() -> Iterator[Source]:
    """Every source that can be made, and has the kind under which it is registered."""
    for name, source_type in SOURCES.items():
        try:
            source = source_type()
            kind = source.kind
        except Exception as error:  # noqa: BLE001 - of any package
            wrong = f"{type(error).__name__}: {error}"
        else:
            if kind == name:
                yield source
                continue
            wrong = f"its kind is {kind!r}"
        _log.warning("the source %r of %s is not used: %s", name, SOURCES.package(name), wrong)


def by_precedence(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Sort sources by precedence: each ahead of the kinds that its `before` lists.

    A source whose `before` contradicts those of the sources in front of it is logged, and left out.
    """
    chosen: dict[str, Source] = {}
    order: tuple[str, ...] = ()
    for source in sources:
        trial = {**chosen, source.kind: source}
        graph: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(trial, ()))
        for kind, candidate in trial.items():
            for later in trial.keys() & set(candidate.before):
                graph.add(later, kind)
        try:
            order = tuple(graph.static_order())
        except CycleError as error:
            _log.warning(
                "the source %r is not used: by its `before` it comes both before and after %r",
                source.kind,
                next(kind for kind in error.args[1] if kind != source.kind),
            )
            continue
        chosen = trial
    return tuple(chosen[kind] for kind in order)
