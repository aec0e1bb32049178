"""The source for Orbax checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.engines.orbax.folder import CHECKPOINT, TREE, find_step, looks_like_orbax
from ucformat.sources.base import Source, SourceOptions, option
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.engines.orbax.opened import OpenOrbax
    from ucformat.engines.orbax.zarr_opened import OpenZarr
    from ucformat.storage.base import Store


__all__ = ["Orbax", "Zarr"]


@dataclass(frozen=True, kw_only=True)
class OrbaxSourceOptions(SourceOptions):
    """The options of `Orbax`."""

    fill_missing: bool | None = option(
        None,
        "flag",
        "whether chunks that are not stored hold the fill value, overriding what the checkpoint "
        "records",
    )


class Orbax(Source):
    """Recognises and opens Orbax checkpoints."""

    kind = "orbax"
    title = "Orbax"
    before = ("zarr",)
    options_type = OrbaxSourceOptions
    options: OrbaxSourceOptions

    def is_marker(self, name: str) -> bool:
        """Whether only a step or an item of Orbax has a file of this name."""
        return name in (TREE, CHECKPOINT)

    def find(self, store: Store) -> bool:
        """Whether Orbax wrote this folder: an item, a step, or a folder of steps."""
        return looks_like_orbax(store)

    def open(self, store: Store) -> OpenOrbax:
        """Open a step or an item: reads metadata, numbers and, in OCDBT, the nodes of the B+tree."""
        from ucformat.engines.orbax.opened import OpenOrbax

        return OpenOrbax(store, find_step(store), fill_missing=self.options.fill_missing)


# The source for Zarr groups and arrays.


# one of them makes a folder a node of a hierarchy
_NODE_FILES = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


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
        return any(exists(store, name) for name in _NODE_FILES)

    def open(self, store: Store) -> OpenZarr:
        """Open it: lists the folder, and reads the metadata of every node in it."""
        from ucformat.engines.orbax.zarr_opened import OpenZarr

        return OpenZarr(store, fill_missing=self.options.fill_missing)
