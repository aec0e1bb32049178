"""How safetensors files are recognised: one by itself, or those of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.sources.model_files import find_assets, root_files
from ucformat.sources.safetensors.folder import INDEX, SUFFIX, choose, choose_file
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.sources.safetensors.opened import OpenSafetensors
    from ucformat.storage.base import Store

__all__ = ["Safetensors"]


class Safetensors:
    """How safetensors files are recognised and opened: one by itself, or those of a folder."""

    kind = "safetensors"
    title = "safetensors"

    def marks(self, name: str) -> bool:
        """Whether it is a safetensors file, or the index of several."""
        return name.endswith((SUFFIX, INDEX))

    def find(self, store: Store) -> bool:
        """Whether the folder has such a file, or is a pipeline whose folders have."""
        if exists(store, "model" + SUFFIX) or exists(store, "model_index.json"):
            return True
        return any("/" not in key and self.marks(key) for key in root_files(store))

    def open(self, store: Store) -> OpenSafetensors:
        """Open the one checkpoint of a folder; reads the header of each of its files."""
        from ucformat.sources.safetensors.opened import OpenSafetensors

        infos = root_files(store)
        chosen = choose(infos, store.url)
        return OpenSafetensors(store, chosen, find_assets(infos.values()))

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - its name says all
        """Whether it is such a file by its name."""
        return self.marks(key)

    def open_file(self, store: Store, key: str) -> OpenSafetensors:
        """Open a file alone, or an index with the shards that it names."""
        from ucformat.sources.safetensors.opened import OpenSafetensors

        return OpenSafetensors(store, choose_file(key, lambda: root_files(store)), (), folder=key)
