"""The source for Orbax checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.engines.orbax.folder import CHECKPOINT, TREE, find_step, looks_like_orbax
from ucformat.sources.base import Source, SourceOptions, option

if TYPE_CHECKING:
    from ucformat.engines.orbax.opened import OpenOrbax
    from ucformat.storage.base import Store

__all__ = ["Orbax"]


@dataclass(frozen=True, kw_only=True)
class OrbaxOptions(SourceOptions):
    """The options of `Orbax`."""

    fill_missing: bool | None = option(
        None,
        "flag",
        "whether chunks that are not stored hold the fill value, overriding what the checkpoint records",
    )


class Orbax(Source):
    """Recognises and opens Orbax checkpoints."""

    kind = "orbax"
    title = "Orbax"
    before = ("zarr",)
    options_type = OrbaxOptions
    options: OrbaxOptions

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
