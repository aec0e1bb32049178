"""A foreign checkpoint made of plain files, for tests that need any source at all: every tensor cut flat over ranks."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ucformat.format.digest import with_own_digest
from ucformat.format.objects import encode_range, put_ranges
from ucformat.format.structure import manifest_bytes, read_manifest
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.flat_buffer import flat_boxes
from ucformat.geometry.tensor import Extent, Key, TensorInfo, TensorList
from ucformat.reading.dtypes import dtype_name, numpy_dtype
from ucformat.reading.readable import CheckpointMetadata
from ucformat.schema import MANIFEST
from ucformat.schema.manifest import PerRankDoc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.reading.readable import FileRecord
    from ucformat.storage.base import Store

Arrays = dict[tuple[str, str], Any]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Random bits, NaNs of all kinds included."""
    size = math.prod(shape) * numpy_dtype(dtype).itemsize
    bits = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8).copy()
    if dtype == "bool":
        bits &= 1
    return bits.view(numpy_dtype(dtype)).reshape(shape)


def manifest_file(document: Any) -> bytes:
    """What somebody puts in place of a manifest who knows the format: its digest is right."""
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != "digest"}
    return with_own_digest(json.dumps(document).encode())


def give_values(store: Store, ranks: Sequence[Mapping[str, Any]], *begins: int) -> None:
    """Give a committed checkpoint these values of each rank, in a file that begins at rank 0, and one at each other."""
    manifest, version = read_manifest(store)
    folder, ends = f"objects/{manifest.attempt}", [*begins, len(ranks)]
    files = [
        put_ranges(store, folder, begin, [encode_range(values) for values in ranks[begin:end]])
        for begin, end in pairwise([0, *ends])
    ]
    names = dict.fromkeys(name for values in ranks for name in values)
    doc = PerRankDoc(ranks=len(ranks), names=tuple(names), files=tuple(files))
    store.replace(MANIFEST, manifest_bytes(manifest.model_copy(update={"per_rank": doc})), version)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, in dtype and shape."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


@dataclass
class FakeSource:
    """Writes the arrays into `rank<k>.bin` files of a store, and reads them from there."""

    store: Store
    metadata: CheckpointMetadata
    offsets: Mapping[Key, int]
    ranks: int
    kind: str = "fake"

    @classmethod
    def write(cls, store: Store, arrays: Arrays, ranks: int = 3, **facts: Any) -> FakeSource:
        infos, offsets = [], {}
        files = [bytearray(4) for _ in range(ranks)]
        for (name, state), a in arrays.items():
            key = Key(name, state)
            infos.append(TensorInfo(name, state, dtype_name(a.dtype), a.shape))
            offsets[key] = len(files[0])
            part = -(-a.size // ranks) * a.itemsize
            data = a.tobytes()
            for k in range(ranks):
                files[k] += data[k * part : (k + 1) * part].ljust(part, b"\0")
        for k, file in enumerate(files):
            with store.create(f"rank{k}.bin") as out:
                out.write(bytes(file))
        groups = {n: i for i, g in enumerate(facts.get("groups", ())) for n in g["params"]}
        names = tuple(f"rank{k}.bin" for k in range(ranks))
        return cls(
            store,
            CheckpointMetadata(tensor_list=TensorList(tuple(infos), groups), files=names, **facts),
            offsets,
            ranks,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        info = next(i for i in self.metadata.tensor_list.tensors if i.key == key)
        part = -(-info.size // self.ranks)
        strides = row_major(info.shape, info.itemsize)
        for k in range(self.ranks):
            start, stop = min(k * part, info.size), min((k + 1) * part, info.size)
            for box in flat_boxes(info.shape, start, stop):
                flat = sum(a * s for a, s in zip(box.start, strides, strict=True))
                yield Extent(
                    box, f"rank{k}.bin", self.offsets[key] + flat - start * info.itemsize, strides
                )

    def records(self) -> Iterator[FileRecord]:
        return iter(())


ODD: Arrays = {
    ("embed.weight", "weight"): random_array((211, 30), "bfloat16", 1),
    ("embed.weight", "master"): random_array((211, 30), "float32", 2),
    ("embed.weight", "exp_avg"): random_array((211, 30), "float32", 3),
    ("embed.weight", "step"): random_array((), "float32", 4),
    ("norm.bias", "weight"): random_array((7,), "float16", 5),
    ("experts.w1", "weight"): random_array((4, 24, 40), "float8_e4m3fn", 6),
    ("experts.w2", "weight"): random_array((4, 24, 40), "float8_e5m2", 7),
    ("mask", "weight"): random_array((3, 5), "bool", 8),
    ("empty", "weight"): random_array((0, 4), "int64", 9),
    ("table", "weight"): random_array((64, 64), "complex128", 10),
}
"""Odd shapes and many dtypes."""
