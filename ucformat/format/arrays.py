"""Arrays in Zarr v3: folder names, grids, and the `zarr.json` documents, which the format specifies to the byte."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ucformat.errors import UnsupportedError
from ucformat.format.chunking import CHUNK_BYTES, SHARD_BYTES, Grid
from ucformat.format.digest import bytes_digest, tensor_digest
from ucformat.geometry.tensor import Key
from ucformat.schema.dtypes import ITEMSIZE
from ucformat.schema.manifest import FileDoc, GridDoc, TensorDoc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = [
    "MAX_DIMS",
    "MAX_SHARDS",
    "Array",
    "array_doc",
    "array_json",
    "folder_names",
    "grid_doc",
    "group_json",
    "lay_out",
    "metadata_documents",
    "put_array",
    "put_file",
    "put_groups",
    "shard_key",
]

_MAX_NAME_BYTES = 200  # bytes; file systems allow 255
_RESERVED = frozenset({"zarr.json", "c"})


def folder_names(names: Iterable[str]) -> dict[str, str]:
    """A folder name for each name of one folder.

    All but letters, digits, `.`, `_` and `-` are percent-encoded as UTF-8, a leading dot too. A name gets a hash of
    itself as a suffix where it is longer than 200 bytes, reserved (`zarr.json`, `c`, `__…`), empty, or differs from
    another only in case. Readers take the folder from the manifest, never from the name.
    """
    plain = {name: _quoted(name) for name in names}
    seen: dict[str, int] = {}
    for folder in plain.values():
        seen[folder.lower()] = seen.get(folder.lower(), 0) + 1
    return {
        name: folder if _is_safe(folder) and seen[folder.lower()] == 1 else _with_hash(name, folder)
        for name, folder in plain.items()
    }


def _quoted(name: str) -> str:
    folder = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    return "%2E" + folder[1:] if folder.startswith(".") else folder


def _is_safe(folder: str) -> bool:
    return 0 < len(folder) <= _MAX_NAME_BYTES and folder.lower() not in _RESERVED and not folder.startswith("__")


def _with_hash(name: str, folder: str) -> str:
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    head = folder[: _MAX_NAME_BYTES - 17].rstrip("%")
    return f"{'_%5F' + head[2:] if head.startswith('__') else head}~{digest}"


def group_json() -> bytes:
    """The metadata document of a group."""
    return _json_bytes({"zarr_format": 3, "node_type": "group", "attributes": {}})


def array_json(key: Key, dtype: str, grid: Grid) -> bytes:
    """The metadata document of one tensor's array."""
    as_bytes: dict[str, Any] = {"name": "bytes"}
    if ITEMSIZE[dtype] > 1:
        as_bytes["configuration"] = {"endian": "little"}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": list(grid.chunk),
        "codecs": [as_bytes, {"name": "crc32c"}],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    from ucformat.reading.dtypes import fill_value  # NumPy, which whoever reads a manifest does without

    return _json_bytes(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(grid.shape),
            "data_type": dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.shard)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value(dtype),
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"ucformat": {"name": key.name, "state": key.state}},
        }
    )


def shard_key(array: str, shard: tuple[int, ...]) -> str:
    """The key of a shard's file below the array's folder: `<array>/c/0/1`; `<array>/c` for a 0-d tensor."""
    return "/".join([array, "c", *map(str, shard)])


def _json_bytes(document: object) -> bytes:
    return json.dumps(document, indent=1).encode()


@dataclass(frozen=True, slots=True)
class Array:
    """One tensor as it is to be stored."""

    info: TensorInfo
    grid: Grid
    path: str


#: How many dims an array has at most: TensorStore opens none of more.
MAX_DIMS = 32

#: How many shards an array has at most: readers count them before they look at files.
MAX_SHARDS = 10_000_000


def lay_out(
    infos: Sequence[TensorInfo], folder: str, chunk_bytes: int | None = None, shard_bytes: int | None = None
) -> list[Array]:
    """The arrays of these tensors below the `data` folder of an attempt; targets in bytes, None for the defaults.

    Raises:
        UnsupportedError: a tensor has more than 32 dims, which readers of Zarr do not take (TensorStore's limit), or
            would be cut into more shards than an array may have.
    """
    for info in infos:
        if len(info.shape) > MAX_DIMS:
            raise UnsupportedError(
                f"{info.name} ({info.state}) has {len(info.shape)} dims; an array has at most {MAX_DIMS}",
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
        if grid.count > MAX_SHARDS:
            raise UnsupportedError(
                f"{info.name} ({info.state}) has {info.nbytes:,} bytes, and would be cut into {grid.count:,} shards; "
                f"an array has at most {MAX_SHARDS:,}",
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


def metadata_documents(manifest: Manifest) -> Iterator[tuple[str, bytes, Key | None]]:
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
