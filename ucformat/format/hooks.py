"""Callbacks of commits, apart from these so that subscribing loads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.schema.manifest import AttemptDoc, Manifest
    from ucformat.storage.base import Store

__all__ = ["may_replace", "on_abandon"]

#: Called with a place, the manifest there and the id of what is to take its place, when that is begun and when it is
#: committed; whoever objects raises. `ucformat` itself subscribes who asks the catalog, so that no way leads past it.
may_replace: list[Callable[[Store, Manifest, str | None], None]] = []

#: Called with a place and the record of an attempt that needed files elsewhere, when its own files are gone from there.
on_abandon: list[Callable[[Store, AttemptDoc], None]] = []
