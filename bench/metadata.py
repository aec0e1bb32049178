"""Metadata of 100,000 shards, 1,000 tensors cut over 100 ranks: bytes, and the time to open it, beside PyTorch DCP's.

`python -m bench.metadata`. DCP's `.metadata` is what its FileSystemWriter makes of the results of
100 ranks; ours are the manifest and the sidecar of the packed form, with a checksum for each shard.
DCP's is opened by its FileSystemReader, which unpickles it; ours by `ucformat.open`, and the
extents of all tensors are read and checked, as columns. Page-cached, interleaved, imports done.
"""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

import ucformat
from bench.common import OUT, median, table, targets
from ucformat.format.arrays import put_file
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.sidecar import Columns, encode_columns
from ucformat.format.universal import Universal
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

TENSORS, SHARDS, ROUNDS = 1000, 100, 7
NAMES = [f"model.layers.{t // 10}.mlp.experts.{t % 10}.up_proj.weight" for t in range(TENSORS)]


def main() -> None:
    folder = OUT / "metadata"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "dcp").mkdir(parents=True)
    shapes = np.random.default_rng(0).integers(SHARDS, 8192, (TENSORS, 2))
    cuts = np.arange(SHARDS + 1) * shapes[:, :1] // SHARDS  # first row of each shard, and the end
    theirs = write_dcp(folder / "dcp", shapes, cuts)
    begun = time.perf_counter()
    data = encode_columns(
        columns(shapes, cuts), [f"data/{'0' * 20}/rank-{k:05d}.bin" for k in range(SHARDS)]
    )
    encoding = time.perf_counter() - begun
    ours = write_ours(folder / "ours", shapes, data)

    seconds: dict[str, list[float]] = {
        "dcp": [],
        "ours": [],
        "manifest": [],
        "extents": [],
        "plan": [],
    }
    for _ in range(ROUNDS):
        seconds["dcp"].append(timed(lambda: read_dcp(folder / "dcp")))
        seconds["ours"].append(timed(lambda: extents(folder / "ours")))
        seconds["manifest"].append(timed(lambda: ucformat.open(folder / "ours")))
        ck = extents(folder / "ours")
        key = next(iter(ck.tensors))
        seconds["extents"].append(timed(lambda ck=ck, key=key: list(ck.source.extents(key))))  # type: ignore[misc]
        seconds["plan"].append(timed(lambda ck=ck, key=key: ck[key].plan()))  # type: ignore[misc]
    ms = {k: median(v) * 1e3 for k, v in seconds.items()}
    shards = TENSORS * SHARDS
    rows = [
        [
            "DCP `.metadata`",
            f"{theirs / 1e3:,.0f}",
            f"{theirs / shards:.1f}",
            f"{ms['dcp']:,.0f}",
            "1.0",
            "1.0",
        ],
        [
            "manifest + sidecar",
            f"{ours / 1e3:,.0f}",
            f"{ours / shards:.1f}",
            f"{ms['ours']:,.0f}",
            f"{theirs / ours:.1f}",
            f"{ms['dcp'] / ms['ours']:.1f}",
        ],
    ]
    head = ["", "kB", "bytes a shard", "opened in, ms", "DCP ÷ it, bytes", "DCP ÷ it, time"]
    print(f"{TENSORS:,} tensors × {SHARDS} shards, {ROUNDS} interleaved rounds, medians:\n")
    print(table(head, rows))
    reading = f"as objects: {ms['extents']:.2f} ms; planning to read it: {ms['plan']:.1f} ms."
    print(
        f"\nucformat alone: the manifest has {(ours - len(data)) / 1e3:,.0f} kB and opens in {ms['manifest']:.0f} ms; "
        f"the sidecar has {len(data) / 1e3:,.0f} kB and is encoded from columns in {encoding * 1e3:.0f} ms.\n"
        f"The {SHARDS} extents of one tensor {reading}\n"
    )
    print(
        targets(
            ("DCP ÷ manifest and sidecar, bytes", ">= 5", theirs / ours),
            ("DCP ÷ manifest and sidecar, time", ">= 5", ms["dcp"] / ms["ours"]),
        )
    )


def write_dcp(folder: Path, shapes: NDArray[np.int64], cuts: NDArray[np.int64]) -> int:
    """DCP's metadata of float32 tensors cut along dim 0, a file for each rank; its bytes."""
    tensors, results = {}, []
    ends = [0] * SHARDS
    for name, (rows, columns), edges in zip(NAMES, shapes.tolist(), cuts.tolist(), strict=True):
        chunks = []
        for k, (a, b) in enumerate(pairwise(edges)):
            offsets, nbytes = torch.Size([a, 0]), (b - a) * columns * 4
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([b - a, columns])))
            info = _StorageInfo(f"__{k}_0.distcp", ends[k], nbytes)
            results.append(WriteResult(MetadataIndex(name, offsets, k), nbytes, info))
            ends[k] += nbytes
        properties = TensorProperties(dtype=torch.float32)
        tensors[name] = TensorStorageMetadata(properties, torch.Size([rows, columns]), chunks)
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(Metadata(tensors, planner_data={n: (n,) for n in NAMES}), [results])
    return (folder / ".metadata").stat().st_size


def columns(shapes: NDArray[np.int64], cuts: NDArray[np.int64]) -> Columns:
    """The same shards as extents, each with a checksum (any number of 32 bits)."""
    n = TENSORS * SHARDS
    wide = np.repeat(shapes[:, 1], SHARDS)
    high = np.diff(cuts)
    nbytes = high * shapes[:, 1:] * 4
    offset = (np.cumsum(nbytes, axis=0) - nbytes).reshape(n)
    zero = np.zeros(n, np.int64)

    def pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([first.reshape(n), second], axis=1).reshape(2 * n)

    return Columns(
        tensor=np.repeat(np.arange(TENSORS), SHARDS),
        file=np.tile(np.arange(SHARDS), TENSORS),
        offset=offset,
        block_offset=offset,
        block_nbytes=nbytes.reshape(n),
        crc32c=np.random.default_rng(1).integers(0, 1 << 32, n),
        start=pairs(cuts[:, :-1], zero),
        shape=pairs(high, wide),
        strides=pairs(wide * 4, zero + 4),
    )


def write_ours(place: Path, shapes: NDArray[np.int64], data: bytes) -> int:
    """A packed checkpoint that has all but the files of the ranks; the bytes of its manifest and sidecar."""
    store = LocalStore(place)
    attempt = begin(store, {"bench": "metadata"}, overwrite=False)
    doc = put_file(store, f"{attempt.folder('data')}/extents.safetensors", data)
    tensors = TensorTable.of(
        TensorDoc(name, "weight", "float32", (rows, columns))
        for name, (rows, columns) in zip(NAMES, shapes.tolist(), strict=True)
    )
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created=datetime.now(UTC),
        sidecar=SidecarDoc(**doc.model_dump()),
        tensors=tensors,
    )
    commit(store, attempt, manifest)
    return (place / "manifest.json").stat().st_size + len(data)


def timed(act: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def read_dcp(folder: Path) -> Metadata:
    """As loading from a DCP checkpoint begins."""
    found = FileSystemReader(folder).read_metadata()
    assert len(found.storage_data) == TENSORS * SHARDS
    return found


def extents(place: Path) -> ucformat.Checkpoint:
    """Open, with all extents read and checked."""
    ck = ucformat.open(place)
    assert isinstance(ck.source, Universal)
    assert len(ck.source.sidecar().columns) == TENSORS * SHARDS
    return ck


if __name__ == "__main__":
    main()
