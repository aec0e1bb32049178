"""Make the golden checkpoints of this version of the format: small ones that every later version must read.

    python -m tests.golden.make FORM

writes one of each form that is written today to `tests/golden/v<version>`: the checkpoint in a
folder, and what it must hold in a JSON file beside it (seeds and SHA-256 of the tensors, facts). It
overwrites nothing: once a form is released its folder is never made anew. When a form changes, the
new one gets a name of its own, and the old one's data stay.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

import ucformat
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.digest import bytes_digest
from ucformat.format.sidecar import Columns, encode, encode_columns
from ucformat.geometry.box import row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Block, Extent
from ucformat.reading.dtypes import dtype_name
from ucformat.schema import ZARR_DTYPES
from ucformat.schema.manifest import FORMAT_VERSION, GroupDoc, Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.fakes import Arrays
    from ucformat.format.commit import Attempt
    from ucformat.storage.base import Store

HERE = Path(__file__).parent
CHUNK, SHARD = 64, 256

#: (name, state) -> dtype, shape; the seed is the place in this list.
TENSORS: list[tuple[str, str, str, tuple[int, ...]]] = [
    ("embed.weight", "weight", "bfloat16", (13, 6)),
    ("embed.weight", "master", "float32", (13, 6)),
    ("embed.weight", "exp_avg", "float32", (13, 6)),
    ("embed.weight", "step", "float32", ()),
    ("norm.bias", "weight", "float16", (7,)),
    ("experts", "weight", "float8_e4m3fn", (3, 8, 10)),
    ("experts", "scale", "float8_e5m2", (3, 1)),
    ("square", "weight", "float64", (16, 16)),
    ("empty", "weight", "int64", (0, 4)),
    *((f"dtypes.{d}", "weight", d, (3, 5)) for d in ZARR_DTYPES),
    *(
        (n, "weight", "int32", (2, 3))
        for n in ("../../x", "a", "a/b", "zarr.json", "c", "n" * 300, "Case", "case")
    ),
    *((n, "weight", "uint8", (5,)) for n in ("__x", "", "ü/ß", ".hidden", "a\0b", "~")),
]

#: Large enough for the default sizes to cut them, into chunks that are tiles, rows, and parts of a
#: vector.
LARGE: list[tuple[str, str, str, tuple[int, ...]]] = [
    ("embed.weight", "weight", "bfloat16", (1504, 704)),
    ("norm.bias", "weight", "uint8", (2_500_001,)),
    ("square", "weight", "float32", (600, 1103)),
    ("square", "exp_avg", "float32", (5, 303, 401)),
]
PERIOD = 251  # elements of a large tensor that are repeated, so that the repository stays small

FACTS: dict[str, Any] = {
    "groups": (
        {"params": ["embed.weight", "square"], "lr": 0.1, "betas": [0.9, 0.95], "foreach": None},
        {"params": ["norm.bias"], "lr": {"$float": "inf"}, "state": {"step": 3}},
    ),
    "aliases": {"head.weight": "embed.weight"},
    "objects": {
        "scheduler": {"last": 3},
        "nan": {"$float": "nan"},
        "rng": {"$tensor": {"dtype": "uint8", "shape": [3], "data": "AQID"}},
        "$int:5": ["text ü", True, None, {"$bytes": "AAEC"}],
    },
    "step": 17,
    "layout": {"zero": 3, "dp": 3},
    "engine": {"name": "golden", "version": "1"},
}
ASSETS = {"tokenizer/vocab.txt": "a\nü\n".encode()}


def values(dtype: str, shape: tuple[int, ...], seed: int, period: int | None) -> NDArray[Any]:
    """Random elements, the first `period` of them again and again."""
    some: NDArray[Any] = random_array(shape if period is None else (period,), dtype, seed)
    return some if period is None else np.resize(some, shape)


def tensors(
    listed: Sequence[tuple[str, str, str, tuple[int, ...]]] = TENSORS, period: int | None = None
) -> Arrays:
    """The values, from their seeds."""
    return {(n, s): values(d, shape, seed, period) for seed, (n, s, d, shape) in enumerate(listed)}


def make_arrays(store: Store) -> Checkpoint:
    """One of arrays with tiny chunks and many shards."""
    return ucformat.convert(_foreign(tensors()), store, chunk_bytes=CHUNK, shard_bytes=SHARD)


def make_default(store: Store) -> Checkpoint:
    """One of arrays with chunks and shards of the default sizes."""
    return ucformat.convert(_foreign(tensors(LARGE, PERIOD)), store)


def make_safetensors(store: Store) -> Checkpoint:
    """One whose weights are a safetensors file, and the other states arrays."""
    arrays = {
        key: a for key, a in tensors().items() if not dtype_name(a.dtype).startswith("complex")
    }
    return ucformat.convert(_foreign(arrays), store, weights="safetensors")


def _foreign(arrays: Arrays) -> Checkpoint:
    source = MemoryStore("golden-source")
    for name, data in ASSETS.items():
        with source.create(name) as out:
            out.write(data)
    return Checkpoint(FakeSource.write(source, arrays, assets=tuple(ASSETS), **FACTS))


def make_packed(store: Store, ranks: int = 2) -> Checkpoint:
    """One whose tensors lie in a file for each rank, with checksums in the sidecar, or placed behind the bytes."""
    arrays = tensors()
    attempt = begin(store, {"golden": "packed"}, overwrite=False)
    files = [bytearray(6) for _ in range(ranks)]
    extents: list[list[Extent]] = []
    for number, a in enumerate(arrays.values()):
        found, strides = [], row_major(a.shape, a.itemsize)
        part = -(-a.size // ranks)
        for k, file in enumerate(files):
            start, stop = min(k * part, a.size), min((k + 1) * part, a.size)
            data, at = a.tobytes()[start * a.itemsize : stop * a.itemsize], len(file)
            placed = number % 2 == 1 and bool(data)
            place = f"{attempt.id}/rank{k}.bin".encode() + at.to_bytes(8, "little")
            crc = crc32c(place + data if placed else data)
            file.extend(data + (crc.to_bytes(4, "little") if placed else b""))
            block = Block(at, len(data), None if placed else crc, placed=placed)
            for box in flat_boxes(a.shape, start, stop):
                flat = sum(x * s for x, s in zip(box.start, strides, strict=True))
                offset = at + flat - start * a.itemsize
                found.append(Extent(box, f"data/{attempt.id}/rank{k}.bin", offset, strides, block))
        extents.append(found)
    return _commit(store, attempt, arrays, files, encode(extents), ("packed", "extents"))


def make_tiles(store: Store, ranks: int = 2) -> Checkpoint:
    """One whose tensors lie in tiles, in a file for each rank, with placed checksums, as docs/spec/format.md has it."""
    arrays = tensors()
    attempt = begin(store, {"golden": "packed-tiles"}, overwrite=False)
    files = [bytearray() for _ in range(ranks)]
    rows: dict[str, list[int]] = {f.name: [] for f in fields(Columns)}
    for number, a in enumerate(arrays.values()):
        edges = tuple(-(-n // 3) or 1 for n in a.shape)
        for k, file in enumerate(files[: ranks if a.ndim else 1]):
            box = [(0, n) for n in a.shape]
            box[:1] = [(k * n // ranks, (k + 1) * n // ranks) for n in a.shape[:1]]
            file.extend(bytes(-len(file) % 64))
            row = {
                "tensor": number,
                "file": k,
                "offset": len(file),
                "block_offset": -1,
                "block_nbytes": 0,
                "crc32c": 0,
            }
            if not a.ndim:  # without dims there are no tiles, but a block
                row |= {"block_offset": len(file), "block_nbytes": a.nbytes, "crc32c": -2}
            dims = {"start": [x for x, _ in box], "shape": [y - x for x, y in box], "tile": edges}
            dims["strides"] = [0] * (a.ndim - 1) + [a.itemsize] * (a.ndim > 0)
            for tile in product(
                *(range(x // e, -(-y // e)) for (x, y), e in zip(box, edges, strict=True))
            ):
                at = zip(tile, edges, box, strict=True)
                data = a[
                    tuple(slice(max(x, i * e), min(y, (i + 1) * e)) for i, e, (x, y) in at)
                ].tobytes()
                place = f"{attempt.id}/rank{k}.bin".encode() + len(file).to_bytes(8, "little")
                file.extend(data + crc32c(place + data).to_bytes(4, "little"))
            for name, more in {**{n: [v] for n, v in row.items()}, **dims}.items():
                rows[name] += more
    columns = Columns(**{name: np.array(column, np.int64) for name, column in rows.items()})
    paths = [f"data/{attempt.id}/rank{k}.bin" for k in range(ranks)]
    return _commit(store, attempt, arrays, files, encode_columns(columns, paths), ("packed",))


def _commit(
    store: Store,
    attempt: Attempt,
    arrays: Arrays,
    files: Sequence[bytearray],
    sidecar: bytes,
    requires: tuple[str, ...],
) -> Checkpoint:
    for k, file in enumerate(files):
        with store.create(f"data/{attempt.id}/rank{k}.bin") as out:
            out.write(bytes(file))
    path = f"data/{attempt.id}/extents.safetensors"
    with store.create(path) as out:
        out.write(sidecar)
    groups = (
        GroupDoc(params=tuple(g["params"]), options={k: v for k, v in g.items() if k != "params"})
        for g in FACTS["groups"]
    )
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        step=FACTS["step"],
        layout=FACTS["layout"],
        requires=requires,
        aliases=FACTS["aliases"],
        groups=tuple(groups),
        producer={f"engine.{k}": v for k, v in FACTS["engine"].items()},
        tensors=TensorTable.of(
            TensorDoc(n, s, dtype_name(a.dtype), a.shape) for (n, s), a in arrays.items()
        ),
        sidecar=SidecarDoc(path=path, nbytes=len(sidecar), digest=bytes_digest(sidecar)),
    )
    commit(store, attempt, manifest)
    return ucformat.open(store)


def expected(ck: Checkpoint, form: str) -> dict[str, Any]:
    """What a reader must find: none of it comes from reading the checkpoint, but for the digests of its arrays."""
    docs = {(d.name, d.state): d for d in ck.manifest.tensors}
    objects = FACTS["objects"] if ck.manifest.objects else {}
    assets = {n: hashlib.sha256(ASSETS[n]).hexdigest() for n in ck.manifest.assets}
    listed, period = (LARGE, PERIOD) if form == "default-sizes" else (TENSORS, None)
    return {
        "tensors": [
            {
                "name": n,
                "state": s,
                "dtype": dtype,
                "shape": shape,
                "seed": seed,
                **({} if period is None else {"period": period}),
                "sha256": hashlib.sha256(values(dtype, shape, seed, period).tobytes()).hexdigest(),
                "digest": docs[n, s].digest,
            }
            for seed, (n, s, dtype, shape) in enumerate(listed)
            if (n, s) in docs
        ],
        "facts": {**FACTS, "objects": objects},
        "assets": assets,
    }


#: What is written today.
FORMS = {
    "arrays": make_arrays,
    "default-sizes": make_default,
    "packed": make_packed,
    "packed-tiles": make_tiles,
    "safetensors": make_safetensors,
}


def main(form: str) -> None:
    """Make the one of this form."""
    place = HERE / f"v{FORMAT_VERSION}" / form
    place.mkdir(parents=True)  # fails where it is already
    ck = FORMS[form](LocalStore(place))
    for file in (place / "attempts").iterdir():  # who made it is nobody's business
        file.write_text(json.dumps({**json.loads(file.read_text()), "owner": "golden:1"}, indent=1))
    place.with_suffix(".json").write_text(
        json.dumps(expected(ck, form), indent=1, ensure_ascii=True) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
