"""How checkpoints of torch_checkpointing are recognised."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.engines.torch_checkpointing.folder import DEFAULT_FILE, METADATA
from ucformat.errors import NotFound
from ucformat.sources.base import Source, option
from ucformat.sources.distcp import ItemOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.engines.torch_checkpointing.opened import OpenTorchCheckpointing
    from ucformat.storage.base import Store

__all__ = ["TorchCheckpointing"]

_MARKS = (b"nested_path_to_metadata", b"world_size")  # keys of the pickled dictionary
_HEAD = 512  # bytes of it that are read to recognise it
_PICKLE = 32 << 10  # bytes of a file of torch.save that are searched for DTensors
_MAX_LISTED = 10_000


@dataclass(frozen=True, kw_only=True)
class TorchCheckpointingOptions(ItemOptions):
    """The options of `TorchCheckpointing`."""

    some_ranks: Sequence[str] | None = option(
        None, "document", "items that not all ranks saved, and whose other files are not missing"
    )


class TorchCheckpointing(Source):
    """How checkpoints of torch_checkpointing are recognised and opened."""

    kind = "torch_checkpointing"
    title = "torch_checkpointing"
    before = ("safetensors", "torch_save")
    options_type = TorchCheckpointingOptions
    options: TorchCheckpointingOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with such a file may be a checkpoint."""
        return name == METADATA

    def find(self, store: Store) -> bool:
        """Whether the folder has its pickled metadata, or nothing but files of ranks with DTensors."""
        try:
            head = store.read(METADATA, 0, min(_HEAD, store.info(METADATA).size))
        except NotFound:
            return _has_parts(store)
        return any(mark in head for mark in _MARKS)

    def open(self, store: Store) -> OpenTorchCheckpointing:
        """Open it: read the metadata, and the pickles and headers of the files of all ranks."""
        from ucformat.engines.torch_checkpointing.opened import OpenTorchCheckpointing

        o = self.options
        return OpenTorchCheckpointing(store, o.allow, o.groups, o.owners, o.some_ranks or ())


def _has_parts(store: Store) -> bool:
    """Whether all files of torch.save are those of ranks, and some have DTensors: of items without a resharder."""
    infos = islice(store.list(), _MAX_LISTED)
    names = [info.key for info in infos if info.key.endswith(".pt") and "/" not in info.key]
    matches = [DEFAULT_FILE.fullmatch(name) for name in names]
    if not all(matches) or len({m[2] for m in matches if m}) < 2:
        return False
    firsts = [m[0] for m in matches if m and int(m[2]) == 0]
    return any(
        b"torch.distributed" in store.read(name, 0, min(_PICKLE, store.info(name).size))
        for name in firsts
    )
