"""The source for checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.pytorch.dcp_folder import (
    RANK_METADATA,
    has_items,
    has_metadata,
    has_shards,
    is_marker,
    looks_like_dcp,
)
from ucformat.errors import MissingData, UnsupportedError
from ucformat.sources.base import Source
from ucformat.sources.distcp import METADATA, ItemOptions
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.engines.pytorch.dcp_shards import OpenShards
    from ucformat.sources.distcp.opened import OpenDcp
    from ucformat.storage.base import Store


__all__ = ["Dcp"]


class Dcp(Source):
    """Recognises and opens checkpoints of torch.distributed.checkpoint."""

    kind = "dcp"
    title = "PyTorch DCP"
    before = ("safetensors", "torch_save")
    options_type = ItemOptions
    options: ItemOptions

    def is_marker(self, name: str) -> bool:
        """Whether only a DCP checkpoint has a file of this name."""
        return is_marker(name)

    def find(self, store: Store) -> bool:
        """Whether the folder has DCP's `.metadata`, or shards of its safetensors writer."""
        return looks_like_dcp(store)

    def open(self, store: Store) -> OpenDcp | OpenShards:
        """Open it: read `.metadata`, and the items of the training step; other items are read when needed."""
        if not has_metadata(store):
            if has_shards(store):
                from ucformat.engines.pytorch.dcp_shards import OpenShards

                return OpenShards(store)
            if not exists(store, RANK_METADATA) and has_items(store):
                raise MissingData(
                    f"{store.url} has files of ranks, and no {METADATA} (or an empty one), which describes them",
                    hint="the save did not finish, or the file was not copied: its name begins with a dot",
                )
            raise UnsupportedError(
                f"{store.url} was saved without collectives: each rank has metadata of its own",
                hint="save with torch.distributed.checkpoint.save(…, no_dist=False, use_collectives=True)",
            )
        from ucformat.sources.distcp.metadata import Items, read_metadata
        from ucformat.sources.distcp.opened import OpenDcp

        how = self.options
        items = Items(store, read_metadata(store, allow=how.allow), how.allow)
        return OpenDcp(items, how.groups, how.owners)


# The folders of torch.distributed.checkpoint: how they are recognised, and checks that their files
# are complete.
