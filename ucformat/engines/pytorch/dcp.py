"""The source for checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import MissingData, NotFound, UcformatError, UnsupportedError
from ucformat.sources.base import PickleOptions, Source, option
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.engines.pytorch.dcp_shards import OpenShards
    from ucformat.sources.distcp.opened import OpenDcp
    from ucformat.storage.base import ByteRange, Store


__all__ = ["Dcp", "DcpOptions"]


@dataclass(frozen=True, kw_only=True)
class DcpOptions(PickleOptions):
    """The options of `Dcp`."""

    groups: Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the parameters of each optimizer group, in order, if the states are numbered",
    )
    owners: Mapping[str, str] | None = option(
        None,
        "document",
        "the path of the model that each optimizer trains, by the optimizer's, both joined by dots",
    )


class Dcp(Source):
    """Recognises and opens checkpoints of torch.distributed.checkpoint."""

    kind = "dcp"
    title = "PyTorch DCP"
    before = ("safetensors", "torch_save")
    options_type = DcpOptions
    options: DcpOptions

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
        if exists(store, "meta.pt"):
            from ucformat.engines.lightning.meta import OpenLightning

            return OpenLightning(items, how.groups, how.owners, how.allow)
        return OpenDcp(items, how.groups, how.owners)


# The folders of torch.distributed.checkpoint: how they are recognised, and checks that their files
# are complete.

METADATA = ".metadata"
RANK_METADATA = "__0" + METADATA  # of a rank that saved without collectives
SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
INFO = "DCP_SHARDING_INFO"  # in `__metadata__` of a shard

_ITEMS = re.compile(r"__\d+_\d+\.distcp")
_METADATA_MODULE = b"torch.distributed.checkpoint.metadata"
_HEAD = 512
_MAX_LISTED = 10_000
_RESTORE_HINT = "restore it from another copy of the checkpoint: each rank wrote its own files, and all are needed"


def is_marker(name: str) -> bool:
    """Whether only a DCP checkpoint has a file of this name."""
    return name in (METADATA, RANK_METADATA) or SHARD.fullmatch(name) is not None


def looks_like_dcp(store: Store) -> bool:
    """Whether a folder has DCP's `.metadata`, or shards of its safetensors writer, or files of ranks."""
    if any(
        _METADATA_MODULE in _head(store, name) for name in (METADATA, RANK_METADATA)
    ) or has_shards(store):
        return True
    return has_items(store)


def has_items(store: Store) -> bool:
    """Whether a folder has files of ranks, such as `__0_0.distcp`."""
    return any(_ITEMS.fullmatch(info.key) for info in islice(store.list(), _MAX_LISTED))


def has_metadata(store: Store) -> bool:
    """Whether a folder has a `.metadata` that is not empty."""
    return bool(_head(store, METADATA))


def has_shards(store: Store) -> bool:
    """Whether a folder has shards of DCP's safetensors writer, by their names and the metadata of the first."""
    name = next(
        (info.key for info in islice(store.list(), _MAX_LISTED) if SHARD.fullmatch(info.key)), None
    )
    if name is None:
        return False
    from ucformat.sources.safetensors import read_header

    try:
        return INFO in read_header(store, name).metadata
    except (NotFound, UcformatError):
        return True  # no other program writes such names: opening it reports the problem


def _head(store: Store, key: str) -> bytes:
    """The first bytes of a file; empty if there is no such file."""
    try:
        return store.read(key, 0, min(_HEAD, store.info(key).size))
    except NotFound:
        return b""


class Files:
    """The files of a store and their sizes, listed once when first needed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._sizes: dict[str, int] | None = None

    def check(self, stored: ByteRange, label: str) -> None:
        """Check that a file has all bytes of an item."""
        if self._sizes is None:
            self._sizes = {info.key: info.size for info in self.store.list()}
        size = self._sizes.get(stored.file)
        if size is None:
            raise MissingData(f"{stored.file} is missing; it holds {label}", hint=_RESTORE_HINT)
        if stored.offset + stored.nbytes > size:
            raise MissingData(
                f"{stored.file} ends at byte {size:,}, but {label} is stored at {stored.offset:,} to "
                f"{stored.offset + stored.nbytes:,}",
                hint=_RESTORE_HINT,
            )
