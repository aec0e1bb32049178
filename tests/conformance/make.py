"""Make the conformance corpus: `python -m tests.conformance.make [FOLDER]`, by default `tests/conformance/cases`.

Valid checkpoints are written with the package, invalid ones are edits of these. All is the same
every time.
"""

# ruff: noqa: E501 - tables

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import math
import os
import struct
import sys
import zlib
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import numpy as np
from crc32c import crc32c

import ucformat
from tests.fakes import FakeSource, random_array
from tests.packed import write_encoded
from ucformat.checkpoint import Checkpoint
from ucformat.format.arrays import array_json, folder_names, shard_key
from ucformat.format.chunking import Grid, Tiling, chunk_shape
from ucformat.format.digest import bytes_digest, own_digest, tensor_digest, with_own_digest
from ucformat.format.shard import check_shard, write_shard
from ucformat.format.structure import manifest_bytes
from ucformat.format.tile_index import TileIndexWriter, encode
from ucformat.format.universal import Universal
from ucformat.geometry.fingerprint import fingerprint_of
from ucformat.geometry.tensor import Key, Piece
from ucformat.jobs.finished import FinishedDoc
from ucformat.jobs.patch_files import TilesJob, TilesPlan
from ucformat.jobs.shards import WriteOptions
from ucformat.reading.dtypes import dtype_name, numpy_dtype
from ucformat.schema import ITEMSIZE
from ucformat.schema.manifest import Manifest, SidecarDoc
from ucformat.schema.tensors import TensorDoc, TensorTable, quoted
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tests.fakes import Arrays

    Files = dict[str, bytes]
    Columns = dict[str, list[int]]
    Edit = Callable[[Any], object]

CASES = Path(__file__).parent / "cases"
ATTEMPT = "0123456789abcdef0123"
DATA = f"data/{ATTEMPT}"
CREATED = "2026-01-01T00:00:00Z"
MODIFIED = 1_700_000_000.25

SHAPES: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {
    ("a", "weight"): ("bfloat16", (5, 6)),
    ("a", "exp_avg"): ("float32", (5, 6)),
    ("a", "step"): ("float32", ()),
    ("ü/.b", "weight"): ("int8", (7,)),
    ("none", "weight"): ("int64", (0, 3)),
}
OBJECTS: dict[str, Any] = {
    "plain": [None, True, 1, 2.5, "text ü", {}],
    "$int:5": {"$$dollar": 1, "$int:-1": 2},
    "floats": [{"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}],
    "bytes": {"$bytes": "AAEC"},
    "stream": {"$stream": "AAEC"},
    "complex": {"$complex": [0.5, {"$float": "nan"}]},
    "set": {"$set": [1, 2]},
    "tuple": {"$tuple": [1, [2]]},
    "slice": {"$slice": [1, None, 2]},
    "time": {"$datetime": "2026-01-01T00:00:00"},
    "path": {"$path": "/a/b"},
    "dtype": {"$dtype": "bfloat16"},
    "tensor": {"$tensor": {"dtype": "uint16", "shape": [2], "data": "AAECAw=="}},
    "ref": {"$ref": "a"},
    "object": {"$class": "module.Class", "$args": [1], "$state": {"x": 1}},
    "named tuple": {"$class": "module.Pair", "$fields": ["x", "y"], "$args": [1, {"$tuple": [2]}]},
    "of a class": {"$class": "module.Mode", "$value": 1},
    "packed": {"$packed": {"a": [1, {"$ref": "a"}], "$int:0": None}},
    "opaque": {"$opaque": "gAROLg=="},
    "dict": {"$dict": [[1.5, "a"], [{"$tuple": [1, 2]}, "b"]]},
}
NOTHING = TensorTable.of(())
ROWS = ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c")
DIMS = ("start", "shape", "strides", "tile")


def arrays() -> Arrays:
    """The elements, which are random bits."""
    return {
        key: random_array(shape, dtype, seed)
        for seed, (key, (dtype, shape)) in enumerate(SHAPES.items())
    }


def facts(**more: Any) -> dict[str, Any]:
    """What a manifest says besides its tensors."""
    return {
        "id": "0" * 32,
        "attempt": ATTEMPT,
        "created": CREATED,
        "aliases": {"tied": "a"},
        "step": 3,
        **more,
    }


def of_every_dtype() -> Arrays:
    """A tensor of each dtype, of random bits."""
    return {
        (dtype, "weight"): random_array((3, 4), dtype, seed) for seed, dtype in enumerate(ITEMSIZE)
    }


def made_of_arrays(tensors: Arrays | None = None) -> Files:
    """Arrays, in several shards of several chunks, some of them padded."""
    if tensors is not None:
        return _files(
            Checkpoint(FakeSource.write(MemoryStore(f"conformance-{uuid4().hex}"), tensors)),
            {"aliases": {}},
        )
    source = MemoryStore(f"conformance-{uuid4().hex}")
    with source.create("vocab.txt") as out:
        out.write(b"a\nb\n")
    return _files(
        Checkpoint(FakeSource.write(source, arrays(), objects=OBJECTS, assets=("vocab.txt",))), {}
    )


def compressed() -> Arrays:
    """Elements that shrink, whatever the version of the compressor, and such that do not."""
    return {
        ("even", "weight"): np.repeat(np.arange(8, dtype="f4"), 1000).reshape(40, 200),
        ("odd", "weight"): np.full((33, 130), 7, "u1"),
        **{key: a for key, a in arrays().items() if key[1] != "exp_avg"},
    }


def made_of_compressed_arrays() -> Files:
    """Arrays of compressed chunks, some of them padded."""
    source = FakeSource.write(MemoryStore(f"conformance-{uuid4().hex}"), compressed())
    more = {"aliases": {}, "requires": ("codecs",)}
    return _files(Checkpoint(source), more, codec="blosc", chunk_bytes=1024, shard_bytes=4096)


def encoded_files() -> Files:
    """Encoded files of two ranks: tiles that shrink and others, several in a file, with zeros between them."""
    store = MemoryStore(f"conformance-{uuid4().hex}")
    ck = write_encoded(store, compressed(), 2, name=ATTEMPT)
    about = facts(tensors=ck.manifest.tensors, sidecar=ck.manifest.sidecar, aliases={})
    made = Manifest.model_validate({**about, "requires": ck.manifest.requires})
    return {
        **{i.key: store.read(i.key) for i in store.list("data")},
        "manifest.json": manifest_bytes(made),
    }


def patched_arrays(step: int) -> Arrays:
    """Elements of which all change a little, few change, or none do."""
    out = compressed()
    for n in range(1, step):
        out["even", "weight"] = out["even", "weight"] + np.float32(n)
        out["odd", "weight"][n::9, 3] = 8
        out["odd", "weight"][20, 40:90] += n
    return out


def patched_files() -> Files:
    """Three checkpoints in one folder, saved by different ranks: 3 is a patch of 2, and that of 1."""
    folder, ck = Path(mkdtemp()), None
    out: Files = {}
    for n in (1, 2, 3):
        store = LocalStore(folder / str(n))
        ck = write_encoded(store, patched_arrays(n), n, base=ck, name=ATTEMPT, id=f"{n - 1:032x}")
        m = ck.manifest
        about = facts(tensors=m.tensors, sidecar=m.sidecar, aliases={}, id=m.id, bases=m.bases)
        made = Manifest.model_validate({**about, "requires": m.requires})
        out |= {f"{n}/{i.key}": store.read(i.key) for i in store.list("data")}
        out[f"{n}/manifest.json"] = manifest_bytes(made)
    return out


def moments() -> Arrays:
    """States of optimizers, with and without signs, over some powers of ten."""
    numbers = (np.arange(2600) * 7919 % 2603 - 1300).astype("f4") / np.float32(1300)
    signed = numbers.reshape(50, 52)
    signed = signed * signed * signed  # `** 3` is rounded as the processor's instructions allow
    return {
        ("w", "exp_avg"): signed,
        ("w", "exp_avg_sq"): signed * signed,
        ("half", "exp_avg"): signed.astype("f2"),
        ("brain", "exp_avg"): signed.astype(numpy_dtype("bfloat16")),
        **{("w", f"bits{n}"): signed * np.float32(n) + 1 for n in (2, 3, 4, 8)},
        ("brain", "bits4"): signed.astype(numpy_dtype("bfloat16")),
        ("few", "exp_avg"): signed[0, :1],  # which does not become smaller
        ("w", "step"): np.array(3, "f4"),
    }


ENCODE = {"exp_avg*": "int8-blockwise"} | {
    f"bits{n}": f"adaptive:{restores}" for n, restores in ((2, 1), (3, 3), (4, 19), (8, 20))
}


def lossy_files() -> tuple[Files, Arrays]:
    """States that are encoded with loss, and what they decode to."""
    source = Checkpoint(FakeSource.write(MemoryStore(f"conformance-{uuid4().hex}"), moments()))
    infos, store = [*source.tensors.values()], MemoryStore(f"conformance-{uuid4().hex}")
    options = WriteOptions(encode=ENCODE)
    with TilesJob(source, None, store, ATTEMPT, TilesPlan(infos, {}, {}), options) as job:
        done = job.record({n: job.run(n) for n in range(job.count)})
        job.take_finished(FinishedDoc.model_validate_json(done))
        docs, _ = job.finish()
        sidecar, requires = job.put_sidecar()
    about = facts(tensors=TensorTable.of(docs.values()), sidecar=sidecar, aliases={})
    made = Manifest.model_validate({**about, "requires": (*requires, "lossy")})
    files = {i.key: store.read(i.key) for i in store.list("data")}
    files["manifest.json"] = manifest_bytes(made)
    ck = Checkpoint(Universal(stored(files))).with_lossy()
    return files, {key: ck[key].read() for key in moments()}


def encoded(files: Files) -> Files:
    """The same with encoded files, in which no tile has become shorter."""
    source = Universal(stored(files))
    out = edited(files, with_codec)
    for name in (n for n in source.sidecar().files if n in files):
        index, data, end = TileIndexWriter(name), b"", 0
        for start, (number, box) in sorted(source.sidecar().tiles_in(name).items()):
            t = source.manifest.tensors[number]
            end = start + box.size * t.unit
            tile = files[name][start:end]
            sums = fingerprint_of(
                np.frombuffer(tile, f"V{t.unit}").reshape(box.shape), t.shape, box
            )
            written = encode(name, start, tile, t.unit, sums, "raw")
            data += tile + index.add(start, written)
        out[name] = data + index.encode(end + 4)
    return out


def with_codec(m: Any) -> None:
    """Give all tensors the codec of encoded files."""
    m["requires"].append("codecs")
    for kind in m["tensors"]["kinds"]:
        kind["codec"] = "tiles"


def _files(
    opened: Checkpoint,
    more: dict[str, Any],
    *,
    codec: Literal["blosc"] | None = None,
    chunk_bytes: int = 16,
    shard_bytes: int = 64,
) -> Files:
    store = MemoryStore(f"conformance-{uuid4().hex}")
    ck = ucformat.convert(
        opened, store, codec=codec, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes
    )
    files = {
        i.key: store.read(i.key)
        for i in store.list()
        if i.key.split("/")[0] in ("data", "objects", "assets")
    }
    text = ck.manifest.model_dump_json().replace(ck.manifest.attempt, ATTEMPT)
    made = Manifest.model_validate_json(text).model_copy(
        update={
            **facts(**more),
            "created": Manifest.model_validate(facts(tensors=NOTHING)).created,
            "lineage": (),
            "verified": None,
            "producer": {"engine.name": "conformance"},
            "metrics": {"loss": math.nan, "accuracy": 0.5},
        }
    )
    out_files = {key.replace(ck.manifest.attempt, ATTEMPT): data for key, data in files.items()}
    return out_files | {f"attempts/{ATTEMPT}.json": record(), "manifest.json": manifest_bytes(made)}


def record() -> bytes:
    """The record of an attempt."""
    head = {
        "format": "ucformat-attempt",
        "version": 1,
        "attempt": ATTEMPT,
        "plan": bytes_digest(b""),
    }
    return json.dumps({**head, "owner": "conformance", "started": CREATED}, indent=1).encode()


def rows(*, elsewhere: bool = False) -> tuple[Columns, Files]:
    """Extents of every kind, as the sidecar lists them, and the files in which they lie.

    Args:
        elsewhere: of the kinds that only files of others may have.
    """
    columns: Columns = {name: [] for name in (*ROWS, *DIMS)}
    files = [bytearray(64), bytearray()]

    def add(
        tensor: int, file: int, offset: int, block: tuple[int, int, int], **dims: tuple[int, ...]
    ) -> None:
        for name, value in zip(ROWS, (tensor, file, offset, *block), strict=True):
            columns[name].append(value)
        for name in DIMS:
            columns[name] += dims.get(name, (0,) * len(dims["start"]))

    weight, average, step, vector, _ = arrays().values()
    for k, (low, high) in enumerate(
        ((0, 2), (2, 5))
    ):  # by rows over both files: checksums in the sidecar
        data, at = weight[low:high].tobytes(), len(files[k])
        files[k] += data
        add(
            0,
            k,
            at,
            (at, len(data), crc32c(data)),
            start=(low, 0),
            shape=(high - low, 6),
            strides=(12, 2),
        )
        files[k] += bytes(-len(files[k]) % 64)
    for k, (low, high) in enumerate(
        ((0, 3), (3, 5))
    ):  # tiles of 2 by 4, each with a placed checksum
        at = len(files[k])
        bounds = (
            [(max(low, r), min(high, r + 2)) for r in range(low // 2 * 2, high, 2)],
            [(0, 4), (4, 6)],
        )
        for (r, s), (c, d) in product(*bounds):
            data = average[r:s, c:d].tobytes()
            files[k] += data + placed(k, len(files[k]), data)
        add(
            1, k, at, (-1, 0, 0), start=(low, 0), shape=(high - low, 6), strides=(0, 4), tile=(2, 4)
        )
        files[k] += bytes(-len(files[k]) % 64)
    at, data = len(files[0]), step.tobytes()  # without dims: one block with a placed checksum
    files[0] += data + placed(0, at, data)
    add(2, 0, at, (at, 4, -2), start=(), shape=(), strides=())
    for k in range(2):  # replicas: one with a checksum behind it, one with a stride
        files[k] += bytes(-len(files[k]) % 64)
        at, data = len(files[k]), vector.tobytes()
        if k == 0:
            crc = crc32c(data).to_bytes(4, "little") if elsewhere else placed(k, at, data)
            files[k] += data + crc
            add(3, k, at, (at, 7, -1 if elsewhere else -2), start=(0,), shape=(7,), strides=(1,))
        else:
            data = b"".join(bytes([b, 0xEE]) for b in data)[:-1]
            files[k] += data
            block = (-1, 0, 0) if elsewhere else (at, len(data), crc32c(data))
            add(3, k, at, block, start=(0,), shape=(7,), strides=(2,))
    return columns, {f"{DATA}/rank{k}.bin": bytes(file) for k, file in enumerate(files)}


DESCRIBED: dict[str, Any] = {
    "tensors": 5,
    "folder": DATA,
    "meshes": [{"sizes": [2, 2], "strides": [1, 2]}, {"sizes": [3], "ranks": [4, 0, 2]}],
    "distributions": [
        {"mesh": 1},
        {"mesh": 0, "cuts": [[0, 1], [1, 0]]},
        {"mesh": 0, "cuts": [[1, 0]], "flat": 1, "part": 13},
        {"mesh": 1, "flat": 0, "part": 4},
    ],
}
#: Of each tensor: its number, distribution, writer, position and tile.
PLACES: list[tuple[int, int, int, int, tuple[int, ...]]] = [
    (2, 0, 1, 0, ()), (4, 0, 2, 0, (1, 1)), (0, 1, 0, 0, (2, 4)), (1, 2, 0, 9, (2, 2)), (3, 3, 0, 3, (5,)),
]  # fmt: skip
#: A dim that is cut twice, with parts that are empty; one rank; ranks in no order, and in two meshes.
CUT: dict[str, Any] = {
    "tensors": 5,
    "folder": DATA,
    "meshes": [
        {"sizes": [2, 3], "strides": [3, 1]},
        {"sizes": [2, 2], "ranks": [5, 1, 0, 3]},
        {"sizes": [1], "first": 7, "strides": [0]},
        {"sizes": [1, 2], "first": 2, "strides": [0, 4]},
    ],
    "distributions": [
        {"mesh": 2},
        {"mesh": 0, "cuts": [[0, 0], [0, 1]]},
        {"mesh": 1, "cuts": [[1, 1], [1, 0]]},
        {"mesh": 3, "cuts": [[0, 1]]},
    ],
}
CUT_PLACES: list[tuple[int, int, int, int, tuple[int, ...]]] = [
    (2, 0, 0, 0, ()), (0, 1, 0, 0, (2, 4)), (1, 2, 0, 0, (4, 3)), (3, 3, 0, 0, (2,)), (4, 3, 0, 0, (1, 3)),
]  # fmt: skip
#: Flat buffers: two tensors in one, with padding between them; one of tensors that are cut, written
#: by two replicas; and one over listed ranks, of which some have no part.
FLAT: dict[str, Any] = {
    "tensors": 5,
    "folder": DATA,
    "meshes": [
        {"sizes": [3], "strides": [1]},
        {"sizes": [2, 2, 2], "strides": [4, 2, 1]},
        {"sizes": [4], "ranks": [6, 7, 1, 2]},
    ],
    "distributions": [
        {"mesh": 0, "flat": 0, "part": 15},
        {"mesh": 1, "cuts": [[1, 2]], "flat": 0, "part": 9},
        {"mesh": 2, "flat": 0, "part": 2},
    ],
}
FLAT_PLACES: list[tuple[int, int, int, int, tuple[int, ...]]] = [
    (0, 0, 0, 2, (2, 4)), (3, 0, 0, 35, (3,)), (1, 1, 1, 2, (2, 2)), (2, 2, 0, 5, ()), (4, 2, 0, 7, (1, 1)),
]  # fmt: skip


def described_rows(
    told: dict[str, Any] = DESCRIBED,
    places: Sequence[tuple[int, int, int, int, tuple[int, ...]]] = PLACES,
) -> tuple[Columns, Files]:
    """Each tensor as a mesh has stored it."""
    from ucformat.geometry.distribution import Cut, Distribution, RankMesh

    columns: Columns = {name: [] for name in (*ROWS, *DIMS)}
    more: Columns = {
        name: [] for name in ("described", "distribution", "writer", "position", "described_tile")
    }
    meshes = [
        RankMesh(
            tuple(m["sizes"]),
            m.get("first", 0),
            tuple(m.get("strides", ())),
            tuple(m.get("ranks", ())),
        )
        for m in told["meshes"]
    ]
    files: dict[int, bytearray] = {
        rank: bytearray() for rank in sorted({int(r) for m in meshes for r in m.ranks.flat})
    }
    distributions = [
        Distribution(
            meshes[d["mesh"]],
            tuple(Cut(*c) for c in d.get("cuts", ())),
            d.get("flat"),
            d.get("part", 0),
        )
        for d in told["distributions"]
    ]
    tensors = list(arrays().values())
    for number, which, writer, position, tile in places:
        a = tensors[number]
        d = dataclasses.replace(distributions[which], position=position)
        for name, value in zip(more, (number, which, writer, position), strict=False):
            more[name].append(value)
        more["described_tile"] += tile
        for at in product(*map(range, d.mesh.sizes)):
            file = files[int(d.mesh.ranks[at])]
            for box in d.boxes(a.shape, at) if d.copy_of(at) == writer else ():
                file += bytes(-len(file) % 64)
                ranges = zip(box.start, box.stop, tile, strict=True)
                bounds = [
                    [(max(a, r), min(b, r + t)) for r in range(a // t * t, b, t)]
                    for a, b, t in ranges
                ]
                for one in product(*bounds):
                    data = a[tuple(slice(*bound) for bound in one)].tobytes()
                    name = f"rank-{int(d.mesh.ranks[at]):05}"
                    file += data + placed_in(name, len(file), data)
    return {**columns, **more}, {
        f"{DATA}/rank-{rank:05}.bin": bytes(data) for rank, data in files.items() if data
    }


def placed(file: int, offset: int, data: bytes) -> bytes:
    """The checksum of a tile, and of the place where it lies."""
    return placed_in(f"rank{file}", offset, data)


def placed_in(name: str, offset: int, data: bytes) -> bytes:
    """The same, in a file of any name."""
    return crc32c(f"{ATTEMPT}/{name}.bin".encode() + struct.pack("<Q", offset) + data).to_bytes(
        4, "little"
    )


def sidecar(columns: Columns, files: list[str], **changed: Any) -> bytes:
    """The sidecar of these columns; `changed` are packed columns, or metadata."""
    n = str(len(columns["tensor"]))
    meta = {"format": "ucformat-extents", "extents": n, "files": json.dumps(files)}
    meta |= {k: v for k, v in changed.items() if isinstance(v, str)}
    packed = {name: pack(name, values) for name, values in columns.items()}
    packed |= {k: v for k, v in changed.items() if isinstance(v, bytes)}
    header: dict[str, Any] = {"__metadata__": meta}
    end = 0
    for name, data in packed.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [end, end := end + len(data)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(packed.values())


def pack(name: str, values: list[int]) -> bytes:
    """A column as it is stored; compressed at level 0, which every zlib does alike."""
    if name in ("tensor", "file", "offset", "block_offset"):
        values = [b - a for a, b in zip([0, *values], values, strict=False)]
    words = [(v % 2**64).to_bytes(8, "little") for v in values]
    return zlib.compress(b"".join(bytes(w[k] for w in words) for k in range(8)), 0)


def packed_files(
    columns: Columns,
    files: Files,
    names: list[str] | None = None,
    requires: Sequence[str] = ("packed", "extents"),
    **changed: Any,
) -> Files:
    """A packed checkpoint of these extents."""
    data = sidecar(columns, list(files) if names is None else names, **changed)
    path = f"{DATA}/extents.safetensors"
    tensors = TensorTable.of(
        TensorDoc(n, s, dtype, shape) for (n, s), (dtype, shape) in SHAPES.items()
    )
    doc = SidecarDoc(path=path, nbytes=len(data), digest=bytes_digest(data))
    made = manifest_bytes(
        Manifest.model_validate(facts(tensors=tensors, sidecar=doc, requires=requires))
    )
    return {**files, path: data, "manifest.json": made}


def safetensors_files() -> Files:
    """A packed checkpoint whose only file is one of safetensors; its header is the block of an extent without elements."""
    header: dict[str, Any] = {}
    data, names = b"", {"bfloat16": "BF16", "float32": "F32", "int8": "I8", "int64": "I64"}
    for ((name, state), (dtype, shape)), a in zip(SHAPES.items(), arrays().values(), strict=True):
        offsets = [len(data), len(data) + a.nbytes]
        header[f"{name}.{state}"] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": offsets,
        }
        data += a.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    columns: Columns = {name: [] for name in (*ROWS, *DIMS)}

    def add(tensor: int, begin: int, body: bytes, **dims: tuple[int, ...]) -> None:
        for name, value in zip(
            ROWS, (tensor, 0, begin, begin, len(body), crc32c(body)), strict=True
        ):
            columns[name].append(value)
        for name in DIMS:
            columns[name] += dims.get(name, (0,) * len(dims["start"]))

    add(0, 0, head, start=(0, 0), shape=(0, 0))
    begin = len(head)
    for number, a in enumerate(arrays().values()):
        strides = tuple(a.itemsize * math.prod(a.shape[d + 1 :]) for d in range(a.ndim))
        rows = [(0, 2), (2, len(a))] if number == 0 else [(0, len(a))] if a.ndim else []
        for low, high in rows if a.size else ():
            body = a[low:high].tobytes()
            add(
                number,
                begin,
                body,
                start=(low, *(0 for _ in a.shape[1:])),
                shape=(high - low, *a.shape[1:]),
                strides=strides,
            )
            begin += len(body)
        if not a.ndim:
            add(number, begin, a.tobytes(), start=(), shape=(), strides=())
            begin += a.nbytes
    files = {f"{DATA}/weights/model.safetensors": head + data}
    return packed_files(columns, files, requires=["extents"])


def described_files(
    columns: Columns | None = None, of: Any = (DESCRIBED, PLACES), **changed: Any
) -> Files:
    """A packed checkpoint whose sidecar describes all tensors; `columns` and members of the description may differ."""
    rows_of, files = described_rows(*of)
    told = json.dumps({**of[0], **changed})
    return packed_files({**rows_of, **(columns or {})}, files, [], ["packed"], described=told)


def mixed_files(flat: Files) -> Files:
    """Arrays, and beside them small tensors: one that the sidecar lists, one that it describes."""
    packed = {("a", "step"), ("ü/.b", "weight")}
    made = Manifest.model_validate_json(flat["manifest.json"])
    folders = [f"{t.path}/" for t in made.tensors if (t.name, t.state) in packed]
    docs = [
        TensorDoc(t.name, t.state, t.dtype, t.shape) if (t.name, t.state) in packed else t
        for t in made.tensors
    ]
    number = {(t.name, t.state): n for n, t in enumerate(docs)}
    step, vector = (arrays()[key].tobytes() for key in [("a", "step"), ("ü/.b", "weight")])
    block = (number["ü/.b", "weight"], 0, 0, 0, len(vector), crc32c(vector))
    columns: Columns = {name: [value] for name, value in zip(ROWS, block, strict=True)}
    columns |= {"start": [0], "shape": [len(vector)], "strides": [1]}
    columns |= {
        "described": [number["a", "step"]],
        "distribution": [0],
        "writer": [0],
        "position": [0],
    }
    columns["described_tile"] = []
    told = {
        "tensors": 1,
        "folder": DATA,
        "meshes": [{"sizes": [1], "strides": [0]}],
        "distributions": [{"mesh": 0}],
    }
    data = sidecar(columns, [f"{DATA}/small-00000.bin"], described=json.dumps(told))
    path = f"{DATA}/extents.safetensors"
    doc = SidecarDoc(path=path, nbytes=len(data), digest=bytes_digest(data))
    table = {"tensors": TensorTable.of(docs), "requires": ("packed", "extents")}
    changed = made.model_copy(update={**table, "sidecar": doc})
    gone = (*folders, f"{DATA}/step/")
    return {
        **{key: data for key, data in flat.items() if not key.startswith(gone)},
        f"{DATA}/small-00000.bin": vector,
        f"{DATA}/rank-00000.bin": step + placed_in("rank-00000", 0, step),
        path: data,
        "manifest.json": manifest_bytes(changed),
    }


def virtual_files() -> Files:
    """One whose files lie elsewhere; `manifest.json.in` still lacks its place and its digest."""
    columns, files = rows(elsewhere=True)
    inside = {k.replace(DATA, "sources/0123456789abcdef0123"): v for k, v in files.items()}
    names = [f"roots/0/{ATTEMPT}/rank{k}.bin" for k in range(2)]
    found = packed_files(columns, {}, names, ["packed", "extents", "virtual"])
    m = json.loads(found.pop("manifest.json"))
    del m["digest"]
    m["sidecar"]["roots"] = ["@PLACE@/sources"]
    sizes = [len(data) for data in files.values()]
    m["sidecar"]["sources"] = [
        {"path": p, "nbytes": n, "modified": MODIFIED} for p, n in zip(names, sizes, strict=True)
    ]
    return {**found, **inside, "manifest.json.in": json.dumps(m, indent=1).encode()}


def based_files(whole: Files, second: tuple[str, str] = ("2", "2")) -> Files:
    """Three checkpoints in one folder: 3 has the last tensor from 2, which has it from 1, and the first from 1.

    Args:
        second: the name of 2, and how it is spelled in a url.
    """
    ids = [f"{n:032x}" for n in range(3)]
    prints = {Key(d.name, d.state): d.fingerprint for d in parsed_table(made_of_arrays())}
    keys = [Key(d.name, d.state) for d in parsed_table(whole)]
    whole = edited(whole, lambda m: m["tensors"].update(fingerprint=[prints[key] for key in keys]))
    first = edited(whole, lambda m: m.update(id=ids[0]))

    def on(number: int, *bases: int, of: dict[int, int]) -> Files:
        """A checkpoint with tensors of bases, by number."""

        def change(m: Any) -> None:
            urls = [{"id": ids[n - 1], "url": f"../{second[1] if n == 2 else n}"} for n in bases]
            m.update(id=ids[number - 1], bases=urls, requires=[*m.get("requires", ()), "bases"])
            t = m["tensors"]
            for row, base in of.items():
                kind = {k: v for k, v in t["kinds"][t["kind"][row]].items() if k in REFERENCED}
                t["kinds"].append({**kind, "base": base})
                t["kind"][row] = len(t["kinds"]) - 1
                if t.get("digest"):
                    t["digest"][row] = None
                t.get("path", {}).pop(str(row), None)

        return edited(whole, change)

    last = max(n for n, d in enumerate(parsed_table(whole)) if d.nbytes)
    middle = on(2, 1, of=dict.fromkeys(range(len(keys)), 0))
    third = on(3, 2, 1, of={last: 0, 0: 1})
    return {
        **{f"1/{path}": data for path, data in first.items()},
        f"{second[0]}/manifest.json": middle["manifest.json"],
        **{
            f"{second[0]}/{path}": data
            for path, data in middle.items()
            if path.startswith(("objects", "assets"))
        },
        **{f"3/{path}": data for path, data in third.items()},
    }


def partial_files(whole: Files) -> Files:
    """The same, of which 3 has the tensors of bases as they were at steps 2 and -1, and counts tokens."""
    files = based_files(whole)

    def change(m: Any) -> None:
        m["requires"].append("steps")
        m["tensors"]["kinds"][-2]["step"] = 2
        m["tensors"]["kinds"][-1]["step"] = -1
        layer = {"seen": [5, 4], "held": [5, 3], "stored": [5, 0]}
        m["window"] = {"steps": 2, "at": 1, "groups": [["a*"], ["*"]], "update": ["master.*"]}
        m["experts"] = {"lost": 0.25, "layers": {"layers.0.experts": layer}}

    return edited(files, change, "3/manifest.json")


def older(want: dict[str, Any], steps: dict[int, int]) -> dict[str, Any]:
    """The same with the steps of tensors that are older, by number of those that have elements."""
    want = copy.deepcopy(want)
    with_elements = [t for t in want["tensors"] if 0 not in t["shape"]]
    for number, step in steps.items():
        with_elements[number]["step"] = step
    return want


def parsed_table(files: Files) -> TensorTable:
    """The tensors of a checkpoint."""
    return Manifest.model_validate_json(files["manifest.json"]).tensors


#: The members of a kind of tensors of a base.
REFERENCED = ("state", "dtype", "shape", "itemsize", "at")


def edited(files: Files, change: Edit, name: str = "") -> Files:
    """The same with another manifest, under the right digest."""
    name = name or next(n for n in ("manifest.json", "manifest.json.in") if n in files)
    m = json.loads(files[name])
    m.pop("digest", None)
    change(m)
    data = json.dumps(m, indent=1).encode()
    return {**files, name: data if name.endswith(".in") else with_own_digest(data)}


def flipped(files: Files, name: str, at: int) -> Files:
    """The same with one bit of a file changed."""
    data = bytearray(files[name])
    data[at] ^= 1
    return {**files, name: bytes(data)}


#: Values that each of three ranks has.
PER_RANK: dict[str, list[Any]] = {
    "rng": [{"$bytes": "AAEC"}, {"$bytes": ""}, None],
    "loader.ü": [{"at": n, "of": {"$tuple": [n, {"$float": "nan"}]}} for n in range(3)],
}


def changed(files: Files, name: str, change: Callable[[bytes], bytes]) -> Files:
    """The same with a file changed, or without it if that makes it empty."""
    data = change(files[name])
    return {k: data if k == name else v for k, v in files.items() if k != name or data}


def objects_of(files: Files, data: bytes) -> Files:
    """The same with other objects, under the right digest."""
    name = f"objects/{ATTEMPT}/objects.json"
    return edited(
        {**files, name: data},
        lambda m: m["objects"].update(nbytes=len(data), digest=bytes_digest(data)),
    )


def per_rank_of(files: Files, *parts: list[bytes], move: int = 0) -> Files:
    """The same with values of each rank, in files with these ranges; `move` is added to the offset of the last one."""
    first, added, docs = 0, {}, []
    for ranges in parts:
        name, data, index = f"objects/{ATTEMPT}/per_rank-{first:05}.bin", b"", b""
        for n, body in enumerate(ranges):
            offset = len(data) + (move if n == len(ranges) - 1 else 0)
            index += offset.to_bytes(8, "little") + (len(body) + 4).to_bytes(8, "little")
            data += body + crc32c(body).to_bytes(4, "little")
        added[name] = data = data + index + crc32c(index).to_bytes(4, "little")
        doc = {
            "path": name,
            "nbytes": len(data),
            "digest": bytes_digest(data),
            "first": first,
            "ranks": len(ranges),
        }
        docs.append(doc)
        first += len(ranges)
    return edited(
        {**files, **added},
        lambda m: m.update(per_rank={"ranks": first, "names": [*PER_RANK], "files": docs}),
    )


def of_two_files(files: Files) -> Files:
    """The same with values of each rank in two files; the last one lacks a name, which has no value there."""
    first, second, last = ranges_of(PER_RANK)
    less = {name: value for name, value in json.loads(last).items() if value is not None}
    return per_rank_of(files, [first], [second, json.dumps(less, ensure_ascii=False).encode()])


def ranges_of(values: dict[str, list[Any]]) -> list[bytes]:
    """The JSON of each rank's values."""
    ranks = zip(*values.values(), strict=True)
    return [
        json.dumps(dict(zip(values, of_rank, strict=True)), ensure_ascii=False).encode()
        for of_rank in ranks
    ]


def expected_of(tensors: Arrays) -> dict[str, Any]:
    """What a reader must give of these tensors, and nothing else."""
    listed = [
        {"name": n, "state": s, "dtype": dtype_name(a.dtype), "shape": list(a.shape), "sha256": hashlib.sha256(a.tobytes()).hexdigest()}
        for (n, s), a in tensors.items()
    ]  # fmt: skip
    return {"tensors": listed, "aliases": {}, "objects": {}, "per_rank": {}, "assets": {}}


def expected(**more: Any) -> dict[str, Any]:
    """What a reader must give."""
    listed = [
        {
            "name": n,
            "state": s,
            "dtype": d,
            "shape": shape,
            "sha256": hashlib.sha256(a.tobytes()).hexdigest(),
        }
        for ((n, s), (d, shape)), a in zip(SHAPES.items(), arrays().values(), strict=True)
    ]
    return {
        "tensors": listed,
        "aliases": {"tied": "a"},
        "objects": {},
        "per_rank": {},
        "assets": {},
        **more,
    }


def valid() -> dict[str, tuple[str, Files, dict[str, Any]]]:
    """Of each valid checkpoint what is special, its files, and what a reader must give."""
    flat, (columns, files) = made_of_arrays(), rows()
    vocabulary = {"vocab.txt": hashlib.sha256(b"a\nb\n").hexdigest()}
    all_of_it = expected(objects=OBJECTS, assets=vocabulary)
    few = {"format", "version", "id", "attempt", "created", "tensors", "aliases"}
    strays = {
        "tombstone.json": b'{"format": "ucformat-tombstone"}',
        "needed-by/x.json": b"{}",
        "data/ffffffffffffffffffff/rank0.bin": b"of another attempt",
        "ucformat-catalog.json": b"no JSON",
    }

    def unknown(m: Any) -> None:
        kinds = ("resume", "distill", "acme.prune")
        m.update(new={"a": 1}, minor=7, lineage=[{"kind": k, "url": "x", "new": 1} for k in kinds])
        m["acme.origin"] = [{"x": 1}]
        for t in (m["tensors"], *m["tensors"]["kinds"]):
            t.update(new=[1])
        m["tensors"]["kinds"][1]["state"] = "state of tomorrow"

    def spelled_out(m: Any) -> None:
        """What no writer has reason to do: other orders, names and kinds that are not used, every folder listed."""
        t = m["tensors"]
        paths = [
            f"{t['kinds'][k]['path']}/{quoted(t['names'][n])}"
            for n, k in zip(t["name"], t["kind"], strict=True)
        ]
        t["names"], t["kinds"] = (
            ["unused", *reversed(t["names"])],
            [*reversed(t["kinds"]), {**t["kinds"][3], "state": "unused"}],
        )
        t["name"] = [len(t["names"]) - 1 - n for n in t["name"]]
        t["kind"] = [len(t["kinds"]) - 2 - k for k in t["kind"]]
        t["path"] = {str(n): path for n, path in enumerate(paths)} | t.get("path", {})
        t["at"] = {"0": [["model", 0, "a"], ["tied"]]}
        for k in t["kinds"]:
            k.update(path="elsewhere", at=[["model", ["x.", ""]]])
        m["tensors"] = dict(reversed(t.items()))

    document = f"{DATA}/exp_avg/a/zarr.json"
    renamed = changed(flat, document, lambda d: d.replace(b'"exp_avg"', b'"state of tomorrow"'))
    tomorrow = copy.deepcopy(all_of_it)
    tomorrow["tensors"][1]["state"] = "state of tomorrow"
    permuted = {
        name: [v for at in (6, 5, 4, 3, 2, 1, 0) for v in by_row(columns, name, at)]
        for name in (*ROWS, *DIMS)
    }
    lossy, decoded = lossy_files()
    nothing = manifest_bytes(Manifest.model_validate({**facts(tensors=NOTHING), "aliases": {}}))
    return {
        "arrays": ("arrays, objects in every spelling, an asset, an alias, a NaN metric", flat, all_of_it),
        "per-rank": ("values of each rank", per_rank_of(flat, ranges_of(PER_RANK)), {**all_of_it, "per_rank": PER_RANK}),
        "per-rank-files": ("values of each rank in two files; the last rank lacks a name", of_two_files(flat), {**all_of_it, "per_rank": PER_RANK}),
        "packed": ("blocks with checksums in the sidecar and in the file, tiles, replicas, a stride", packed_files(columns, files), expected()),
        "packed-permuted": ("the rows of the sidecar in another order", packed_files(permuted, files), expected()),
        "safetensors": ("a safetensors file, whose header has a block", safetensors_files(), expected()),
        "described": ("tensors that the sidecar describes", described_files(), expected()),
        "described-cut": ("a dim that is cut twice, empty parts, listed ranks", described_files(of=(CUT, CUT_PLACES)), expected()),
        "described-flats": ("several flat buffers, one of cut tensors, one over listed ranks", described_files(of=(FLAT, FLAT_PLACES)), expected()),
        "newer-dtype": ("a dtype that version 1 has not, of one tensor", newer_dtype(flat), less(all_of_it, 0, "acme.float5")),
        "newer-dtype-described": ("a dtype that version 1 has not, in files with other tensors", edited(described_files(), later_dtype), less(expected(), 0, "acme.float5")),
        "deep": ("values of 128 levels", deep(flat, 128), {**all_of_it, "objects": nested(128)}),
        "mixed": ("small tensors beside arrays, listed and described", mixed_files(flat), all_of_it),
        "required": ("no member of the manifest but those that are required", edited(flat, lambda m: [m.pop(k) for k in [*m] if k not in few]), expected()),
        "unknown": ("unknown members, an unknown state", edited(renamed, unknown), tomorrow),
        "spelled-out": ("a table of tensors that is longer than it need be", edited(flat, spelled_out), all_of_it),
        "strays": ("files that a reader ignores, a tombstone beside a manifest among them", {**flat, **strays}, all_of_it),
        "dtypes": ("a tensor of every dtype", made_of_arrays(of_every_dtype()), expected_of(of_every_dtype())),
        "compressed": ("arrays of compressed chunks", made_of_compressed_arrays(), expected_of(compressed())),
        "compressed-newer": ("a codec that version 1 has not, of one tensor", edited(made_of_compressed_arrays(), later_codec), less(expected_of(compressed()), 0)),
        "encoded": ("encoded packed files", encoded_files(), expected_of(compressed())),
        "lossy": ("states that are encoded with loss", lossy, expected_of(decoded)),
        "patched": ("patches of patches", patched_files(), {**expected_of(patched_arrays(3)), "at": "3"}),
        "encoded-described": ("encoded files of described tensors, with tiles as they are", encoded(described_files()), expected()),
        "nothing": ("no tensors", {"manifest.json": nothing}, {"tensors": [], "aliases": {}, "objects": {}, "per_rank": {}, "assets": {}}),
        "virtual": ("files elsewhere", virtual_files(), expected(roots=["sources"], modified=MODIFIED)),
        "based": ("tensors of a base, which has one of them from its own", based_files(flat), {**all_of_it, "at": "3"}),
        "partial": ("tensors of a base that are older", partial_files(flat), {**older(all_of_it, {-1: 2, 0: -1}), "at": "3"}),
        "based-name": ("a base whose name is escaped", based_files(flat, ("#2 50%", "%232 50%25")), {**all_of_it, "at": "3"}),
    }  # fmt: skip


def later_dtype(m: Any) -> None:
    """Give the first tensor a dtype of elements of the same size."""
    m["tensors"]["kinds"][0].update(dtype="acme.float5", itemsize=2)


def later_codec(m: Any) -> None:
    """Give the first tensor another codec."""
    m["tensors"]["kinds"][0].update(codec="acme.zfp")


def newer_dtype(flat: Files) -> Files:
    """The first tensor has an unknown dtype, which its digest covers, too."""
    kind = json.loads(flat["manifest.json"])["tensors"]["kinds"][0]
    grid = Grid((5, 6), tuple(kind["chunk"]), tuple(kind["shard"]), 2)
    leaves = {
        shard: check_shard(stored(flat), shard_key(f"{DATA}/weight/a", shard), grid, shard)[0]
        for shard in grid.shards()
    }

    def change(m: Any) -> None:
        later_dtype(m)
        m["tensors"]["digest"][0] = tensor_digest("acme.float5", grid, leaves)

    return edited(flat, change)


def stored(files: Files) -> MemoryStore:
    """A store with these files."""
    store = MemoryStore(f"conformance-{uuid4().hex}")
    for name, data in files.items():
        with store.create(name) as out:
            out.write(data)
    return store


def less(want: dict[str, Any], number: int, dtype: str | None = None) -> dict[str, Any]:
    """The same, but for a tensor, perhaps of another dtype, that only a later reader can read."""
    want = copy.deepcopy(want)
    tensor = want["tensors"][number]
    del tensor["sha256"]
    tensor.update(dtype=dtype or tensor["dtype"], error="upgrade")
    return want


def nested(levels: int) -> Any:
    """An object of so many levels."""
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def deep(files: Files, levels: int) -> Files:
    """The same with objects of so many levels."""
    return objects_of(files, json.dumps(nested(levels)).encode())


def by_row(columns: Columns, name: str, row: int) -> list[int]:
    """What a column has of one extent."""
    ndims = [len(list(SHAPES.values())[t][1]) for t in columns["tensor"]]
    return (
        columns[name][row : row + 1]
        if name in ROWS
        else columns[name][sum(ndims[:row]) : sum(ndims[: row + 1])]
    )


def invalid() -> dict[str, tuple[str, str, Files]]:
    """Of each invalid checkpoint the class of error, what is wrong, and its files."""
    from tests.conformance.faults import (
        of_arrays,
        of_based,
        of_compressed,
        of_encoded,
        of_lossy,
        of_packed,
        of_partial,
        of_patches,
        of_virtual,
    )

    columns, files = rows()
    return {
        **of_arrays(made_of_arrays()),
        **of_compressed(made_of_compressed_arrays()),
        **of_encoded(encoded_files()),
        **of_lossy(lossy_files()[0]),
        **of_packed(columns, files),
        **of_virtual(virtual_files()),
        **of_based(based_files(made_of_arrays())),
        **of_patches(patched_files()),
        **of_partial(partial_files(made_of_arrays())),
    }


def vectors() -> dict[str, Any]:
    """Grids, folder names and digests."""
    shapes: list[tuple[tuple[int, ...], str]] = [
        ((), "float64"), ((0,), "int8"), ((7,), "bool"), ((16384,), "float32"), ((700_000_001,), "float32"),
        ((4096, 14336), "bfloat16"), ((16384, 53248), "float32"), ((128256, 4096), "bfloat16"), ((50257, 1600), "float32"),
        ((256, 7168, 2048), "bfloat16"), ((256, 256, 8, 8), "float32"), ((3, 100_000_000), "uint8"), ((0, 5_000_000), "int64"),
        ((151936, 896), "float8_e5m2"), ((600, 1103), "complex128"), ((1009, 1013), "float64"),
        ((5, 2048, 2048), "float32"), ((12, 2048, 1024), "bfloat16"), ((28, 3, 4096, 4096), "bfloat16"),
        ((2048, 1024, 3, 3), "float32"), ((6, 5_000_000, 15), "int8"),
    ]  # fmt: skip
    grids: list[Any] = []
    for (shape, dtype), target in product(shapes, (None, 1 << 16)):
        grid = Grid.of(shape, ITEMSIZE[dtype], target)
        tile = Tiling.of(shape, ITEMSIZE[dtype]).tile
        assert grid.chunk == chunk_shape(shape, ITEMSIZE[dtype], target or 1 << 20)
        row: dict[str, Any] = {
            "dtype": dtype,
            "shape": shape,
            "target": target or 1 << 20,
            "limit": 128 << 20,
        }
        grids.append(
            {**row, "chunk": grid.chunk, "shard": grid.shard, **({} if target else {"tile": tile})}
        )
    folders = [
        ["a", "a.weight", "a/b", "ü", ".hidden", "..", "", "c", "C", "zarr.json", "__x", "_x", "~", "a\0b", "a b"],
        ["Case", "case", "other"], ["n" * 200], ["n" * 201], ["ü" * 40], ["__" + "ü" * 40], ["a%2Fb", "a/b"], ["é", "É"],
    ]  # fmt: skip
    digests = []
    for (dtype, shape), chunk, shard in (
        (("float32", (4, 5)), (4, 5), (4, 5)), (("float32", (4, 5)), (2, 2), (4, 4)), (("int8", ()), (), ()),
        (("int64", (0, 3)), (1, 3), (1, 3)), (("bfloat16", (7,)), (3,), (6,)),
    ):  # fmt: skip
        grid = Grid(shape, chunk, shard, ITEMSIZE[dtype])
        elements = bytes(k % 251 for k in range(math.prod(shape) * grid.itemsize))
        digests.append(
            {
                "dtype": dtype,
                "shape": shape,
                "chunk": chunk,
                "shard": shard,
                **written(grid, dtype, elements),
            }
        )
    zarr = [
        {"name": name, "state": "weight", "dtype": dtype, "shape": shape, "chunk": chunk, "shard": shard,
         "document": array_json(Key(name, "weight"), dtype, Grid(shape, chunk, shard, ITEMSIZE[dtype])).decode()}
        for name, dtype, shape, chunk, shard in (
            ("ü", "float32", (3,), (2,), (4,)), ('"\\/\b\f\n\r\t\x01\x7f😀', "int8", (), (), ()),
            ("c", "complex64", (0, 3), (1, 3), (1, 3)), ("x2", "float4_e2m1fn_x2", (3,), (2,), (4,)),
            ("half", "complex32", (3,), (2,), (4,)),
        )
    ]  # fmt: skip
    compressed_grid = Grid((40, 6), (16, 6), (32, 6), 2)
    zarr.append(
        {"name": "a", "state": "weight", "dtype": "bfloat16", "shape": (40, 6), "chunk": (16, 6), "shard": (32, 6),
         "codec": "blosc", "document": array_json(Key("a", "weight"), "bfloat16", compressed_grid, "blosc").decode()}
    )  # fmt: skip
    document = b'{\n "format": "x"\n}'
    whole = with_own_digest(document)
    own = {
        "document": document.decode(),
        "with_digest": whole.decode(),
        "digest": own_digest(whole),
    }
    checks = [
        {"bytes": data.hex(), "crc32c": crc32c(data), "sha256": bytes_digest(data)}
        for data in (b"", b"123456789", bytes(32))
    ]
    return {
        "grids": grids,
        "folders": [
            {"names": names, "folders": list(folder_names(names).values())} for names in folders
        ],
        "tensors": digests,
        "zarr": zarr,
        "document": own,
        "checksums": checks,
    }


def written(grid: Grid, dtype: str, elements: bytes) -> dict[str, Any]:
    """The digest and the files of an array."""
    store, leaves = MemoryStore(f"conformance-{uuid4().hex}"), {}
    array = np.frombuffer(elements, numpy_dtype(dtype)).reshape(grid.shape)
    for shard in grid.shards():

        def fill(piece: Piece, out: NDArray[np.uint8]) -> None:
            box = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            strides = tuple(s * grid.itemsize for s in piece.strides)
            np.ndarray(piece.box.shape, array.dtype, out, strides=strides)[...] = array[box]

        leaves[shard] = write_shard(store, "/".join(["c", *map(str, shard)]), grid, shard, fill)
    files = {info.key: base64.b64encode(store.read(info.key)).decode() for info in store.list()}
    return {
        "elements": base64.b64encode(elements).decode(),
        "digest": tensor_digest(dtype, grid, leaves),
        "files": files,
    }


def main(folder: Path = CASES) -> None:
    """Write all of it to a folder that is empty, or absent."""
    bases: dict[str, Files] = {}
    for name, (says, files, want) in valid().items():
        is_base = name in (
            "arrays",
            "compressed",
            "encoded",
            "packed",
            "described",
            "virtual",
            "based",
            "patched",
        )
        put(folder, name, files, {"says": says, **want}, {} if is_base else bases)
        if is_base:
            bases[name] = files
    for name, (fault, says, files) in invalid().items():
        error, _, stage = fault.partition(":")
        virtual = (
            {"roots": ["sources"], "modified": MODIFIED} if "manifest.json.in" in files else {}
        )
        based = {"at": "3"} if "3/manifest.json" in files else {}
        put(
            folder,
            name,
            files,
            {"says": says, "error": error, "found": stage or "read", **virtual, **based},
            bases,
        )
    (folder / "vectors.json").write_text(json.dumps(vectors(), indent=1) + "\n")


def put(
    folder: Path, name: str, files: Files, want: dict[str, Any], bases: dict[str, Files]
) -> None:
    """Write what one checkpoint has and its base has not, and beside it what a reader must make of it."""
    alike = {
        base: sum(there.get(k) == data for k, data in files.items())
        for base, there in bases.items()
    }
    base = max(alike, key=lambda n: alike[n], default="")
    there = bases[base] if base and alike[base] else {}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for path, data in files.items():
        if there.get(path) != data:
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_bytes(data)
    if there:
        want = {**want, "base": base, "removed": [path for path in there if path not in files]}
    (folder / f"{name}.json").write_text(json.dumps(want, indent=1) + "\n")


if __name__ == "__main__":
    os.environ["UCP_CATALOG"] = (
        f"sqlite:///{mkdtemp()}/catalog.db"  # what is made here is nobody's checkpoint
    )
    main(*map(Path, sys.argv[1:]))
