"""The Zarr form: shards are written by their owners, who receive what other ranks hold of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ucformat.format.arrays import shard_key
from ucformat.format.shard import write_shard
from ucformat.geometry.box import Box, row_major
from ucformat.torch.fragments import Region, copy_common, dense_region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucformat.format.arrays import Array
    from ucformat.format.shard import Band
    from ucformat.storage.base import Store
    from ucformat.torch.deal import Bundle, Fragment, Message, Shard
    from ucformat.torch.group import Group
    from ucformat.torch.memory import Memory

    RegionOf = Callable[[Fragment], Region]

__all__ = ["Leaves", "write_shards"]

#: Number of the tensor, shard, digests of its chunks.
Leaves = list[tuple[int, tuple[int, ...], bytes]]


def write_shards(
    store: Store,
    group: Group,
    arrays: Sequence[Array],
    bundles: Sequence[Bundle],
    messages: Sequence[Message],
    region_of: RegionOf,
    progress: Callable[[int], None],
    threads: int = 1,
) -> Leaves:
    """Write this rank's bundles, and send what others need for theirs; the digests of what was written.

    `region_of` gives where a fragment of this rank lies. So many `threads` write the shards of a bundle. At most one
    bundle, or one shard that is larger, is held of what others sent, and one message of what is sent. A rank that
    cannot write goes on to receive and send, so that nobody waits for it in vain, and raises at the end.
    """
    failures: list[BaseException] = []
    sender = threading.Thread(
        target=_send_all, args=(group, arrays, messages, region_of, failures), name="ucformat-send"
    )
    sender.start()
    leaves: Leaves = []
    try:
        with ThreadPoolExecutor(threads, "ucformat-write") as pool:
            for bundle in bundles:
                received = _receive(group, arrays, bundle)
                if not failures:

                    def write(shard: Shard, received: dict[Fragment, Memory] = received) -> bytes:
                        return _write(store, group.rank, arrays, shard, received, region_of, progress)

                    try:
                        found = list((map if threads == 1 else pool.map)(write, bundle.shards))
                        leaves += [(s.tensor, s.at, f) for s, f in zip(bundle.shards, found, strict=True)]
                    except Exception as error:  # noqa: BLE001 - raised below
                        failures.append(error)
    finally:
        sender.join()
    if failures:
        raise failures[0]
    return leaves


def _send_all(
    group: Group,
    arrays: Sequence[Array],
    messages: Sequence[Message],
    region_of: RegionOf,
    failures: list[BaseException],
) -> None:
    try:
        for message in messages:
            sizes = [arrays[f.tensor].info.itemsize for f in message.fragments]
            parts = [region_of(f).row_major(n) for f, n in zip(message.fragments, sizes, strict=True)]
            group.send(np.concatenate(parts) if len(parts) > 1 else parts[0], message.to, bulk=True)
    except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for this one
        failures.append(error)


def _receive(group: Group, arrays: Sequence[Array], bundle: Bundle) -> dict[Fragment, Memory]:
    """The bytes that other ranks hold of a bundle's shards, by fragment."""
    by_sender: dict[int, list[Fragment]] = {}
    for shard in bundle.shards:
        for f in shard.fragments:
            if f.sender != group.rank:
                by_sender.setdefault(f.sender, []).append(f)
    out: dict[Fragment, Memory] = {}
    buffers: dict[int, Memory] = {}
    for sender, fragments in by_sender.items():
        sizes = [f.box.size * arrays[f.tensor].info.itemsize for f in fragments]
        buffers[sender] = np.empty(sum(sizes), np.uint8)
        out |= dict(zip(fragments, np.split(buffers[sender], np.cumsum(sizes)[:-1]), strict=True))
    group.receive_all(buffers, bulk=True)
    return out


def _write(
    store: Store,
    rank: int,
    arrays: Sequence[Array],
    shard: Shard,
    received: dict[Fragment, Memory],
    region_of: RegionOf,
    progress: Callable[[int], None],
) -> bytes:
    """Write one shard; the digests of its chunks."""
    array = arrays[shard.tensor]
    itemsize = array.info.itemsize
    regions = [
        region_of(f) if f.sender == rank else dense_region(f.box, received[f], itemsize) for f in shard.fragments
    ]

    def fill(band: Band, raw: NDArray[np.uint8]) -> None:
        target = Region(Box(band.box.start, band.padded), raw, 0, row_major(band.padded, itemsize))
        for region in regions:
            copy_common(region, target, itemsize)
        progress(band.box.size * itemsize)

    return write_shard(store, shard_key(array.path, shard.at), array.grid, shard.at, fill)
