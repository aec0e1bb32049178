"""The packed form: each rank writes its pieces one after another in one file, tile by tile with their checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.format.chunking import CHECKSUM_BYTES, Tiling, tile_shape
from ucformat.format.extents import ALIGNMENT
from ucformat.format.sidecar import NO_BLOCK, PLACED, Columns, encode_columns
from ucformat.geometry.box import row_major
from ucformat.reading.execute import checksum, place_checksum
from ucformat.storage.upload import unit_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.format.sidecar import Column
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.storage.base import Store
    from ucformat.torch.deal import Claim, Held
    from ucformat.torch.fragments import Region

__all__ = ["packed_file", "sidecar_of", "write_packed"]


def packed_file(folder: str, rank: int) -> str:
    """The key of a rank's file below the `data` folder of an attempt."""
    return f"{folder}/rank-{rank:05d}.bin"


def write_packed(
    store: Store, key: str, regions: Sequence[tuple[Region, TensorInfo]], progress: Callable[[int], None]
) -> None:
    """Write regions of tensors to a file.

    Tiles that lie in row-major order go from their memory to the file; of the rest one at a time is copied.
    """
    tilings = [Tiling(r.box, tile_shape(i.shape, i.itemsize), i.itemsize) for r, i in regions]
    copied = np.empty(0, np.uint8)
    end = 0
    with store.create(key, unit_for(sum(t.nbytes + ALIGNMENT for t in tilings))) as out:
        for (region, _), tiling in zip(regions, tilings, strict=True):
            if gap := -end % ALIGNMENT:
                out.write(bytes(gap))
                end += gap
            for box in tiling.boxes():
                nbytes = box.size * tiling.itemsize
                place = place_checksum(key, end)
                tile = region.within(box)
                if tile.is_row_major(tiling.itemsize):
                    data = tile.memory[tile.offset : tile.offset + nbytes]
                    out.write(data.data)
                    out.write(checksum(data.data, place).to_bytes(CHECKSUM_BYTES, "little"))
                else:
                    if copied.size < nbytes + CHECKSUM_BYTES:
                        copied = np.empty(nbytes + CHECKSUM_BYTES, np.uint8)
                    data, stored = copied[:nbytes], copied[nbytes : nbytes + CHECKSUM_BYTES]
                    tile.copy_to(data, tiling.itemsize)
                    stored.data[:] = checksum(data.data, place).to_bytes(CHECKSUM_BYTES, "little")
                    out.write(copied[: nbytes + CHECKSUM_BYTES].data)
                end += nbytes + CHECKSUM_BYTES
                progress(nbytes)


def sidecar_of(
    tensors: Sequence[Held],
    claims: Sequence[Sequence[Claim]],
    dealt: Sequence[Sequence[tuple[int, int]]],
    folder: str,
) -> bytes:
    """The sidecar of what all ranks wrote: `dealt` are each rank's (claim, piece)."""
    number = {t.info.key: n for n, t in enumerate(tensors)}
    found: list[tuple[int, int, int, Tiling]] = []  # tensor, file, offset, and how it lies there
    for rank, mine in enumerate(dealt):
        end = 0
        for claim, piece in mine:
            info, box = claims[rank][claim].info, claims[rank][claim].boxes[piece]
            end += -end % ALIGNMENT
            tiling = Tiling(box, tile_shape(info.shape, info.itemsize), info.itemsize)
            if box.size:
                found.append((number[info.key], rank, end, tiling))
            end += tiling.nbytes
    found.sort(key=lambda f: (f[0], f[3].box.start))
    single = np.array([t.count == 1 for *_, t in found], np.bool_)  # a block like any other, of however many dims
    table = np.array([f[:3] for f in found], np.int64).reshape(-1, 3)
    nbytes = np.array([t.box.size * t.itemsize for *_, t in found], np.int64)

    def joined(part: Callable[[Tiling], Sequence[int]]) -> Column:
        return np.array([x for *_, t in found for x in part(t)], np.int64)

    columns = Columns(
        tensor=table[:, 0],
        file=table[:, 1],
        offset=table[:, 2],
        block_offset=np.where(single, table[:, 2], NO_BLOCK),
        block_nbytes=np.where(single, nbytes, 0),
        crc32c=np.where(single, PLACED, 0),
        start=joined(lambda t: t.box.start),
        shape=joined(lambda t: t.box.shape),
        strides=joined(
            lambda t: row_major(t.box.shape, t.itemsize) if t.count == 1 else (0,) * (len(t.tile) - 1) + (t.itemsize,)
        ),
        tile=joined(lambda t: (0,) * len(t.tile) if t.count == 1 else t.tile),
    )
    return encode_columns(columns, [packed_file(folder, r) for r in range(len(dealt))])
