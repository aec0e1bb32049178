"""Who hears of a change made through a catalog; apart from the catalog, so that subscribing loads none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.catalog.catalog import Catalog

__all__ = ["on_change"]

#: Called after every change that the documents beside checkpoints have to hold, with the serials of these checkpoints.
#: `ucformat` itself subscribes who writes them, so that no import leads to a catalog that nobody listens to.
on_change: list[Callable[[Catalog, frozenset[int]], object]] = []
