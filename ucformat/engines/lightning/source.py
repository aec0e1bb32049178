"""The source for sharded checkpoints of Lightning and Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.engines.lightning import META, VERSION
from ucformat.sources.base import Source
from ucformat.sources.distcp import METADATA, ItemOptions
from ucformat.sources.registry import SOURCES
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.engines.lightning.opened import OpenLightning
    from ucformat.storage.base import Store

__all__ = ["Lightning"]


class Lightning(Source):
    """Recognises and opens sharded checkpoints: PyTorch DCP's files, and `meta.pt`."""

    kind = "lightning"
    title = "Lightning and Fabric"
    before = ("dcp", "torch_save")
    packages = ("lightning", "lightning_fabric", "pytorch_lightning")
    options_type = ItemOptions
    options: ItemOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with this file may be such a checkpoint; `meta.pt` alone is not."""
        return name == METADATA

    def find(self, store: Store) -> bool:
        """Whether the folder has `meta.pt` beside a checkpoint of PyTorch DCP."""
        return exists(store, METADATA) and exists(store, META) and SOURCES["dcp"]().find(store)

    def program(self, value: Mapping[Any, Any]) -> dict[str, str]:
        """Lightning's version, which all its checkpoints record."""
        return {"name": "lightning", "version": str(value[VERSION])} if VERSION in value else {}

    def open(self, store: Store) -> OpenLightning:
        """Open it: read `.metadata` and `meta.pt`, and the items of the training step."""
        from ucformat.engines.lightning.opened import OpenLightning
        from ucformat.sources.distcp.metadata import Items, read_metadata

        allow = self.options.allow
        items = Items(store, read_metadata(store, allow=allow), allow)
        return OpenLightning(items, self.options.groups, self.options.owners, allow)
