"""The source for GGUF files, and which of a folder are its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.errors import UsageError, first_names
from ucformat.sources.base import Source
from ucformat.sources.model_files import (
    complete_shards,
    file_sets,
    find_assets,
    parse_shard_name,
    root_files,
)

if TYPE_CHECKING:
    from ucformat.engines.gguf.opened import OpenGguf
    from ucformat.storage.base import Store

__all__ = ["Gguf"]

_SUFFIX = ".gguf"


class Gguf(Source):
    """Recognises and opens GGUF files: a single one, or the splits of one model."""

    kind = "gguf"
    title = "GGUF"
    before = ("torch_save",)

    def is_marker(self, name: str) -> bool:
        """Whether it is a GGUF file."""
        return name.endswith(_SUFFIX)

    def find(self, store: Store) -> bool:
        """Whether the folder has GGUF files and no other weights of Hugging Face."""
        names = [key for key in root_files(store) if "/" not in key]
        others = (".safetensors", ".safetensors.index.json", ".bin.index.json", "pytorch_model.bin")
        return any(map(self.is_marker, names)) and not any(n.endswith(others) for n in names)

    def open(self, store: Store) -> OpenGguf:
        """Open the only model of a folder, by the headers of its files."""
        from ucformat.engines.gguf.opened import OpenGguf

        infos = root_files(store)
        sets = file_sets((n for n in infos if "/" not in n and self.is_marker(n)), "\0")
        if len(sets) > 1:
            raise UsageError(
                f"{store.url} holds several GGUF models: {first_names(sets, 10)}",
                hint=f"open a file of one of them: {store.url}/{min(next(iter(sets.values()))[0])}",
            )
        ((names, _),) = sets.values()
        part = self.options.part is True
        files = complete_shards(names, part=part)
        return OpenGguf(store, files, find_assets(infos.values(), files), part=part)

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - the name suffices
        """Whether the file is named as a GGUF file."""
        return self.is_marker(key)

    def open_file(self, store: Store, key: str) -> OpenGguf:
        """Open a file; of a split, as llama.cpp does, the first one for all."""
        from ucformat.engines.gguf.opened import OpenGguf

        part, split = self.options.part is True, parse_shard_name(key)
        names = [key]
        if split is not None and split[1] == 1 and not part:
            beside = (n for n in root_files(store) if parse_shard_name(n))
            names = [n for n in beside if (parse_shard_name(n) or ("",))[0] == split[0]]
            names = complete_shards(names)
        return OpenGguf(store, names, folder=key, part=part)
