"""The packed form: each rank writes its pieces one after another in one file, and tells their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.format.checksum import checksum
from ucformat.format.sidecar import Columns, encode_columns
from ucformat.geometry.box import row_major
from ucformat.storage.upload import unit_for
from ucformat.torch.fragments import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ucformat.geometry.box import Box
    from ucformat.storage.base import Store
    from ucformat.torch.deal import Claim, Held
    from ucformat.torch.fragments import Region

__all__ = ["packed_file", "sidecar_of", "write_packed"]

_ALIGNED = 64  # bytes: each piece begins at a multiple, for those who map the file


def packed_file(folder: str, rank: int) -> str:
    """The key of a rank's file below the `data` folder of an attempt."""
    return f"{folder}/rank-{rank:05d}.bin"


def write_packed(
    store: Store, key: str, regions: Sequence[tuple[Region, int]], progress: Callable[[int], None]
) -> NDArray[np.uint32]:
    """Write regions, each with its itemsize, to a file; the CRC-32C of their blocks, one after another.

    What lies in row-major order goes from its memory to the file; of the rest one block at a time is copied.
    """
    sums: list[int] = []
    end = 0
    nbytes = sum(region.box.size * itemsize + _ALIGNED for region, itemsize in regions)
    with store.create(key, unit_for(nbytes)) as out:
        for region, itemsize in regions:
            if gap := -end % _ALIGNED:
                out.write(bytes(gap))
            for box in blocks_of(region.box, itemsize):
                data = region.within(box).row_major(itemsize).data
                sums.append(checksum(data))
                out.write(data)
                progress(len(data))
            end += gap + region.box.size * itemsize
    return np.array(sums, np.uint32)


def sidecar_of(
    tensors: Sequence[Held],
    claims: Sequence[Sequence[Claim]],
    dealt: Sequence[Sequence[tuple[int, int]]],
    sums: Sequence[NDArray[np.uint32]],
    folder: str,
) -> bytes:
    """The sidecar of what all ranks wrote: `dealt` are each rank's (claim, piece), `sums` its blocks' checksums."""
    number = {t.info.key: n for n, t in enumerate(tensors)}
    rows: list[tuple[int, int, int, int, int]] = []  # tensor, file, offset, bytes, checksum
    boxes: list[Box] = []
    for rank, (mine, crcs) in enumerate(zip(dealt, sums, strict=True)):
        end, at = 0, 0
        for claim, piece in mine:
            info, box = claims[rank][claim].info, claims[rank][claim].boxes[piece]
            end += -end % _ALIGNED
            for block in blocks_of(box, info.itemsize):
                nbytes = block.size * info.itemsize
                rows.append((number[info.key], rank, end, nbytes, int(crcs[at])))
                boxes.append(block)
                end, at = end + nbytes, at + 1
    order = sorted(range(len(rows)), key=lambda i: (rows[i][0], boxes[i].start))
    table = np.array([rows[i] for i in order], np.int64).reshape(-1, 5)
    itemsizes = [t.info.itemsize for t in tensors]

    def joined(part: Callable[[int], tuple[int, ...]]) -> NDArray[np.int64]:
        return np.array([x for i in order for x in part(i)], np.int64)

    columns = Columns(
        tensor=table[:, 0],
        file=table[:, 1],
        offset=table[:, 2],
        block_offset=table[:, 2],
        block_nbytes=table[:, 3],
        crc32c=table[:, 4],
        start=joined(lambda i: boxes[i].start),
        shape=joined(lambda i: boxes[i].shape),
        strides=joined(lambda i: row_major(boxes[i].shape, itemsizes[rows[i][0]])),
    )
    return encode_columns(columns, [packed_file(folder, r) for r in range(len(dealt))])
