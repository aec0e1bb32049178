"""The universal checkpoint on disk: Zarr arrays, manifest, commit, verify; writer and reader.

The callbacks of commits are defined here, so that subscribing imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.schema.manifest import AttemptDoc, Manifest
    from ucformat.storage.base import Store

__all__ = ["may_replace", "on_abandon"]

#: Called with a place, its manifest and the id of the checkpoint that is to replace it, at the
#: beginning and at commit; a subscriber objects by raising. The package subscribes a function that
#: asks the catalog, so no code can bypass it.
may_replace: list[Callable[[Store, Manifest, str | None], None]] = []

#: Called with a place and the record of an attempt that needed files elsewhere, after its own files
#: were removed.
on_abandon: list[Callable[[Store, AttemptDoc], None]] = []
