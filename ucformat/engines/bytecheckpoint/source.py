"""How ByteCheckpoint's checkpoints are recognised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.bytecheckpoint.folder import LATEST, find_folder, looks_like_bytecheckpoint
from ucformat.sources.base import Source
from ucformat.sources.distcp import ItemOptions

if TYPE_CHECKING:
    from ucformat.engines.bytecheckpoint.opened import OpenByteCheckpoint
    from ucformat.storage.base import Store


__all__ = ["ByteCheckpoint"]

_ALLOW = ("bytecheckpoint",)


class ByteCheckpoint(Source):
    """How ByteCheckpoint's checkpoints are recognised and opened; its options are those of PyTorch DCP."""

    kind = "bytecheckpoint"
    title = "ByteCheckpoint"
    before = ("dcp", "megatron")  # it has the files of both
    options_type = ItemOptions
    options: ItemOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with such a file is a checkpoint; `extra_state_rank_0.pt` is one level further down."""
        return name == LATEST

    def find(self, store: Store) -> bool:
        """Whether there is a `.metadata` of ByteCheckpoint's at one of its usual paths."""
        return looks_like_bytecheckpoint(store)

    def open(self, store: Store) -> OpenByteCheckpoint:
        """Open the newest step of a save folder, or the step at the store's root, reading `.metadata`."""
        from ucformat.engines.bytecheckpoint.opened import OpenByteCheckpoint

        allow = (*_ALLOW, *self.options.allow)
        return OpenByteCheckpoint(
            store, find_folder(store), allow, self.options.groups, self.options.owners
        )


# The files of one ByteCheckpoint checkpoint.
#
# A save folder holds `latest_checkpointed_iteration.txt`, a number N, and the folders
# `global_step_N`. One of these holds `model` and `optimizer`, each with `.metadata` and a file
# `__R_K.distcp` of each rank R; `extra_state` with `extra_state_rank_R.pt`; and the data loader's
# own files.
