"""How ByteCheckpoint's checkpoints are recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.bytecheckpoint.folder import _PARTS, LATEST, _is_ours, _latest, find_folder
from ucformat.sources.base import Source
from ucformat.sources.distcp import ItemOptions

if TYPE_CHECKING:
    from ucformat.engines.bytecheckpoint.opened import OpenByteCheckpoint
    from ucformat.storage.base import Store


__all__ = ["ByteCheckpoint"]


_ALLOW = ("bytecheckpoint",)


class ByteCheckpoint(Source):
    """How ByteCheckpoint's checkpoints are recognised and opened."""

    kind = "bytecheckpoint"
    title = "ByteCheckpoint"
    before = ("dcp", "megatron")  # it has the files of both
    options_type = ItemOptions
    options: ItemOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with such a file is a checkpoint."""
        return name == LATEST

    def find(self, store: Store) -> bool:
        """Whether this is a save folder, the folder of a step, or that of a model or optimizer."""
        if _is_ours(store, "") or any(_is_ours(store, f"{part}/") for part in _PARTS):
            return True
        step = _latest(store)
        return step is not None and any(
            _is_ours(store, f"global_step_{step}/{part}/") for part in _PARTS
        )

    def open(self, store: Store) -> OpenByteCheckpoint:
        """Open the newest step of a save folder, or the step at the store's root, reading `.metadata`."""
        from ucformat.engines.bytecheckpoint.opened import OpenByteCheckpoint

        allow = (*_ALLOW, *self.options.allow)
        return OpenByteCheckpoint(
            store, find_folder(store), allow, self.options.groups, self.options.owners
        )
