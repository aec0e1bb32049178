"""The connections of two ranks in one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from tests.patience import PATIENCE
from ucformat.torch.comm.group import connect_by_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.torch.comm.bulk import Links

__all__ = ["pair"]


@contextmanager
def pair() -> Iterator[tuple[Links, Links]]:
    """The links of rank 0 and of rank 1, until the block ends."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: connect_by_store(dist.PrefixStore("pair", store), rank, 2, PATIENCE),
            (0, 1),
        )
    try:
        yield first, second
    finally:
        first.end()
        second.end()
