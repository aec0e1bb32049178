"""A packed checkpoint made of arrays, with all that a checkpoint can say of itself, for tests."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

import ucformat
from ucformat.format.arrays import put_file
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.digest import bytes_digest
from ucformat.format.encoding import encode_tile as patch
from ucformat.format.sidecar import encode
from ucformat.format.tile_index import TileIndexWriter
from ucformat.format.tile_index import encode as encode_tile
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Block, Extent
from ucformat.reading.dtypes import dtype_name
from ucformat.schema.manifest import BaseDoc, GroupDoc, LineageDoc, Manifest, SidecarDoc, WriterDoc
from ucformat.schema.tensors import TILES, TensorDoc, TensorTable

if TYPE_CHECKING:
    from tests.fakes import Arrays
    from ucformat.checkpoint import Checkpoint
    from ucformat.format.commit import Attempt
    from ucformat.storage.base import Store

OBJECTS: dict[str, Any] = {"scheduler": {"last": 3}, "nan": {"$float": "nan"}}
FACTS: dict[str, Any] = {
    "run": "run7",
    "step": 1700,
    "metrics": {"val_loss": 2.5},
    "config": {"optimizer": {"lr": 0.1}},
    "layout": {"dp": 3},
    "producer": {"engine.name": "fake", "torch": "2.13.0", "ucformat": "0.0.1"},
    "aliases": {"head.weight": "embed.weight"},
    "groups": (GroupDoc(params=("embed.weight",), options={"lr": 0.1}),),
    "writers": (WriterDoc(rank=0, nbytes=7, seconds=0.5, stall=0.25),),
    "lineage": (LineageDoc(kind="resume", url="/nowhere/run7/1000", id="before"),),
}


def write_packed(
    store: Store, arrays: Arrays, ranks: int = 3, block_bytes: int = 512, **facts: Any
) -> Checkpoint:
    """Commit these arrays, cut flat over ranks: a file for each rank, and in it blocks, each with its checksum."""
    attempt = begin(store, {"packed": len(arrays)}, overwrite=False)
    files = [bytearray(4) for _ in range(ranks)]
    extents: list[list[Extent]] = []
    for a in arrays.values():
        found, strides, data = [], row_major(a.shape, a.itemsize), a.tobytes()
        part, most = -(-a.size // ranks), max(1, block_bytes // a.itemsize)
        for k, file in enumerate(files):
            for start in range(min(k * part, a.size), min((k + 1) * part, a.size), most):
                stop = min(start + most, (k + 1) * part, a.size)
                block = data[start * a.itemsize : stop * a.itemsize]
                at = len(file)
                file.extend(block)
                for box in flat_boxes(a.shape, start, stop):
                    flat = sum(x * s for x, s in zip(box.start, strides, strict=True))
                    where = at + flat - start * a.itemsize
                    name = f"data/{attempt.id}/rank{k}.bin"
                    found.append(
                        Extent(box, name, where, strides, Block(at, len(block), crc32c(block)))
                    )
        extents.append(found)
    for k, file in enumerate(files):
        put_file(store, f"data/{attempt.id}/rank{k}.bin", bytes(file))
    return _commit(store, attempt, arrays, extents, ("extents",), None, facts)


def write_encoded(
    store: Store,
    arrays: Arrays,
    ranks: int = 3,
    codec: str = "blosc",
    base: Checkpoint | None = None,
    name: str | None = None,
    **facts: Any,
) -> Checkpoint:
    """Commit these arrays, cut by their first dim over ranks: an encoded file for each, with a tile for each part.

    Args:
        base: a checkpoint beside this one, of which tiles are patches where these are shorter.
        name: that of the attempt.
    """
    attempt = begin(store, {"encoded": len(arrays)}, overwrite=False, name=name)
    names = [f"data/{attempt.id}/rank{k}.bin" for k in range(ranks)]
    indexes, files, ends = list(map(TileIndexWriter, names)), [b""] * ranks, [0] * ranks
    extents: list[list[Extent]] = []
    before = {} if base is None else {key: base[key].read() for key in arrays}
    for key, a in arrays.items():
        extents.append([])
        n = a.shape[0] if a.ndim else 1
        for k, file in enumerate(names):
            start, stop = n * k // ranks, n * (k + 1) // ranks
            part = a[start:stop] if a.ndim else a
            if start == stop or not part.size:
                continue
            box = Box((start,) * min(a.ndim, 1) + (0,) * (a.ndim - 1), part.shape)
            at = -(-ends[k] // 64) * 64
            elements = np.ascontiguousarray(part).view(f"V{a.itemsize}").reshape(part.shape)
            sums = fingerprint_of(elements, a.shape, box)
            old = before.get(key)
            data, patched = part.tobytes(), None
            if old is not None:
                patched = patch(data, a.itemsize, (old[start:stop] if a.ndim else old).tobytes())
            tile = encode_tile(file, at, data, a.itemsize, sums, codec, patched)
            files[k] += bytes(tile.payload) + indexes[k].add(at, tile)
            ends[k] = at + part.nbytes + 4
            block = Block(at, part.nbytes, placed=True)
            extents[-1].append(Extent(box, file, at, row_major(part.shape, a.itemsize), block))
    for file, data, index, end in zip(names, files, indexes, ends, strict=True):
        put_file(store, file, data + index.encode(end))
    requires = ("packed", "codecs", *(() if base is None else ("bases", "patches")))
    if base is not None:
        place = f"../{base.url.rpartition('/')[2]}"
        facts["bases"] = (BaseDoc(id=base.id, url=place),)
    return _commit(store, attempt, arrays, extents, requires, TILES, facts)


def _commit(
    store: Store,
    attempt: Attempt,
    arrays: Arrays,
    extents: list[list[Extent]],
    requires: tuple[str, ...],
    codec: str | None,
    facts: dict[str, Any],
) -> Checkpoint:
    stored = {n for n, _ in arrays}
    facts = {
        **FACTS,
        "aliases": {a: n for a, n in FACTS["aliases"].items() if n in stored},
        **facts,
    }
    data, path = encode(extents), f"data/{attempt.id}/extents.safetensors"
    put_file(store, path, data)
    manifest = Manifest(
        id=facts.pop("id", None) or new_id(),
        attempt=attempt.id,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        objects=put_file(store, f"objects/{attempt.id}/objects.json", json.dumps(OBJECTS).encode()),
        assets={"a/b.txt": put_file(store, f"assets/{attempt.id}/b.txt", b"asset")},
        tensors=TensorTable.of(
            TensorDoc(
                *(n, s, dtype_name(a.dtype), a.shape),
                codec=codec,
                base=0 if "patches" in requires else None,
            )
            for (n, s), a in arrays.items()
        ),
        requires=requires,
        sidecar=SidecarDoc(path=path, nbytes=len(data), digest=bytes_digest(data)),
        **facts,
    )
    commit(store, attempt, manifest)
    return ucformat.open(store)
