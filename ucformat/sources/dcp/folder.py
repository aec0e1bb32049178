"""Which folders hold a checkpoint of torch.distributed.checkpoint: by its `.metadata`, or by shards of safetensors."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import NotFound, UcformatError

if TYPE_CHECKING:
    from ucformat.storage.base import Store

__all__ = ["ALONE", "FILE", "INFO", "SHARD", "has_metadata", "has_shards", "is_marker", "looks_like_dcp"]

FILE = ".metadata"
ALONE = "__0" + FILE  # of a rank that saved without collectives
SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")
INFO = "DCP_SHARDING_INFO"  # in `__metadata__` of a shard

_CLASS = b"torch.distributed.checkpoint.metadata"
_HEAD = 512
_LOOK = 10_000


def is_marker(name: str) -> bool:
    """Whether a folder with a file of this name is a checkpoint."""
    return name in (FILE, ALONE) or SHARD.fullmatch(name) is not None


def looks_like_dcp(store: Store) -> bool:
    """Whether `.metadata` is DCP's, or there are shards of its writer of safetensors."""
    return any(_CLASS in _head(store, name) for name in (FILE, ALONE)) or has_shards(store)


def has_metadata(store: Store) -> bool:
    """Whether there is a `.metadata` with anything in it."""
    return bool(_head(store, FILE))


def has_shards(store: Store) -> bool:
    """Whether a file is named as the writer of safetensors does it, and says at which offsets its pieces begin."""
    name = next((info.key for info in islice(store.list(), _LOOK) if SHARD.fullmatch(info.key)), None)
    if name is None:
        return False
    from ucformat.sources.safetensors.opened import read_header

    try:
        return INFO in read_header(store, name).metadata
    except (NotFound, UcformatError):
        return True  # nobody else writes such names: let opening tell what is wrong


def _head(store: Store, key: str) -> bytes:
    """The first bytes of a file; nothing where there is none."""
    try:
        return store.read(key, 0, min(_HEAD, store.info(key).size))
    except NotFound:
        return b""
