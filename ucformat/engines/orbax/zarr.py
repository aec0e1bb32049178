"""The source for Zarr groups and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.sources.base import Source, SourceOptions, option
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.engines.orbax.zarr_opened import OpenZarr
    from ucformat.storage.base import Store

__all__ = ["Zarr"]

# one of them makes a folder a node of a hierarchy
_NODES = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


@dataclass(frozen=True, kw_only=True)
class ZarrOptions(SourceOptions):
    """The options of `Zarr`."""

    fill_missing: bool = option(
        default=False,
        how="flag",
        text="chunks that are not stored hold the fill value, instead of being an error",
    )


class Zarr(Source):
    """Recognises and opens Zarr groups and arrays."""

    kind = "zarr"
    title = "Zarr v2 and v3"
    before = ("safetensors", "torch_save")
    options_type = ZarrOptions
    options: ZarrOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with a file of this name is a group of Zarr v2.

        Searching a tree of folders does not find groups of v3: `zarr.json` is in every array, too,
        and in a universal checkpoint that was never committed.
        """
        return name in (".zgroup", ".zmetadata")

    def find(self, store: Store) -> bool:
        """Whether the folder is a group or an array."""
        return any(exists(store, name) for name in _NODES)

    def open(self, store: Store) -> OpenZarr:
        """Open it: lists the folder, and reads the metadata of every node in it."""
        from ucformat.engines.orbax.zarr_opened import OpenZarr

        return OpenZarr(store, fill_missing=self.options.fill_missing)
