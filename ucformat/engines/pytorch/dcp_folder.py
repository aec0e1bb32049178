"""The folders of torch.distributed.checkpoint: how they are recognised, and checks that their files are complete."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import NotFound, UcformatError
from ucformat.sources.distcp import METADATA

if TYPE_CHECKING:
    from ucformat.storage.base import Store


RANK_METADATA = "__0" + METADATA  # of a rank that saved without collectives


SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")


INFO = "DCP_SHARDING_INFO"  # in `__metadata__` of a shard


_ITEMS = re.compile(r"__\d+_\d+\.distcp")


_METADATA_MODULE = b"torch.distributed.checkpoint.metadata"


_HEAD = 512


_MAX_LISTED = 10_000


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
