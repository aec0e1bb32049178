"""The arrays of a checkpoint that is being written: where each lies, its documents, and small files beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import Refused
from ucformat.format.chunking import CHUNK_BYTES, SHARD_BYTES, Grid
from ucformat.format.digest import bytes_digest, tensor_digest
from ucformat.format.names import folder_names
from ucformat.format.zarr_json import array_json, group_json
from ucformat.geometry.tensor import Key
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.schema.manifest import FileDoc, GridDoc, TensorDoc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = [
    "MOST_DIMS",
    "MOST_SHARDS",
    "Array",
    "array_doc",
    "documents",
    "grid_doc",
    "lay_out",
    "put_array",
    "put_file",
    "put_groups",
]


@dataclass(frozen=True, slots=True)
class Array:
    """One tensor as it is to be stored."""

    info: TensorInfo
    grid: Grid
    path: str


#: How many dims an array has at most: TensorStore opens none of more.
MOST_DIMS = 32

#: How many shards an array has at most: readers count them before they look at files.
MOST_SHARDS = 10_000_000


def lay_out(
    infos: Sequence[TensorInfo], folder: str, chunk_bytes: int | None = None, shard_bytes: int | None = None
) -> list[Array]:
    """The arrays of these tensors below the `data` folder of an attempt; targets in bytes, None for the defaults.

    Raises:
        Refused: a tensor has more than 32 dims, which readers of Zarr do not take (TensorStore's limit), or would be
            cut into more shards than an array may have.
    """
    for info in infos:
        if len(info.shape) > MOST_DIMS:
            raise Refused(
                f"{info.name} ({info.state}) has {len(info.shape)} dims; an array has at most {MOST_DIMS}",
                hint="reshape the tensor before it is saved; or keep it in a packed or virtual checkpoint",
            )
    states = folder_names(dict.fromkeys(i.state for i in infos))
    folders = {s: folder_names(i.name for i in infos if i.state == s) for s in states}
    arrays = [
        Array(
            i,
            Grid.of(i.shape, i.itemsize, chunk_bytes, shard_bytes),
            f"{folder}/{states[i.state]}/{folders[i.state][i.name]}",
        )
        for i in infos
    ]
    for info, grid in ((a.info, a.grid) for a in arrays):
        if grid.count > MOST_SHARDS:
            raise Refused(
                f"{info.name} ({info.state}) has {info.nbytes:,} bytes, and would be cut into {grid.count:,} shards; "
                f"an array has at most {MOST_SHARDS:,}",
                hint="take larger shards, or leave this tensor out",
            )
    return arrays


def grid_doc(chunk_bytes: int | None, shard_bytes: int | None) -> GridDoc:
    """The targets of `lay_out`, as the manifest records them."""
    return GridDoc(chunk_bytes=chunk_bytes or CHUNK_BYTES, shard_bytes=shard_bytes or SHARD_BYTES)


def put_groups(store: Store, arrays: Iterable[Array]) -> None:
    """Put the `zarr.json` of the group and of each state."""
    for group in _groups(a.path for a in arrays):
        put_file(store, f"{group}/zarr.json", group_json())


def put_array(store: Store, array: Array) -> None:
    """Put the `zarr.json` of one array."""
    put_file(store, f"{array.path}/zarr.json", array_json(array.info.key, array.info.dtype, array.grid))


def documents(manifest: Manifest) -> Iterator[tuple[str, bytes, Key | None]]:
    """Every `zarr.json` of a checkpoint's arrays, and of the groups that they lie in: key, bytes, and whose it is."""
    stored = [(t, t.path) for t in manifest.tensors if t.path is not None]
    for group in _groups(path for _, path in stored):
        yield f"{group}/zarr.json", group_json(), None
    for doc, path in stored:
        key, grid = Key(doc.name, doc.state), Grid(doc.shape, doc.chunk or (), doc.shard or (), ITEMSIZE[doc.dtype])
        yield f"{path}/zarr.json", array_json(key, doc.dtype, grid), key


def _groups(paths: Iterable[str]) -> list[str]:
    """The folders that arrays lie in: those of states, and what these lie in."""
    states = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    return list(dict.fromkeys([*(state.rpartition("/")[0] for state in states), *states]))


def array_doc(array: Array, leaves: Mapping[tuple[int, ...], bytes]) -> TensorDoc:
    """What the manifest says of an array; `leaves` are the digests of each shard's chunks."""
    info, grid = array.info, array.grid
    return TensorDoc(
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=info.shape,
        chunk=grid.chunk,
        shard=grid.shard,
        nbytes=info.nbytes,
        digest=tensor_digest(info.dtype, grid, leaves),
        path=array.path,
    )


def put_file(store: Store, key: str, data: bytes) -> FileDoc:
    """Put a small file, and what the manifest says of it."""
    with store.create(key) as out:
        out.write(data)
    return FileDoc(path=key, nbytes=len(data), digest=bytes_digest(data))
