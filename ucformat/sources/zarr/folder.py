"""Which folders are nodes of a Zarr hierarchy: by the names of their metadata documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.storage.base import Store

__all__ = ["V2", "V3", "looks_like_zarr"]

V3 = "zarr.json"
V2 = (".zgroup", ".zarray", ".zmetadata")  # one of them makes a folder a node of Zarr v2


def looks_like_zarr(store: Store) -> bool:
    """Whether this folder is a group or an array."""
    return any(exists(store, name) for name in (V3, *V2))
