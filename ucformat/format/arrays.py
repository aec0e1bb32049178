"""Arrays in Zarr v3: folder names, grids, and the `zarr.json` documents, which the format specifies to the byte."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.format.chunking import CHUNK_BYTES, SHARD_BYTES, Grid
from ucformat.format.digest import bytes_digest, tensor_digest, tensor_fingerprint
from ucformat.geometry.tensor import Key
from ucformat.schema import ITEMSIZE, ZARR_DTYPES
from ucformat.schema.limits import MAX_ARRAY_DIMS, MAX_BLOSC, MAX_SHARDS
from ucformat.schema.manifest import FileDoc, GridDoc
from ucformat.schema.tensors import BLOSC, TensorDoc, quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ucformat.geometry.tensor import TensorInfo
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store


_MAX_NAME_BYTES = 200  # bytes; file systems allow 255
_RESERVED = frozenset({"zarr.json", "c"})

#: The name of the first dim of the arrays of a run, and of its coordinate.
STEP = "step"


def folder_names(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """Choose the names of folders that are siblings.

    All characters except letters, digits, `.`, `_` and `-` are percent-encoded as UTF-8, and so is
    a leading dot. A name gets a hash of itself as a suffix if it is longer than 200 bytes, reserved
    (`zarr.json`, `c`, `__…`), empty, or differs from another only in case. Readers take the folder
    from the manifest, never from the name.

    Args:
        taken: names that siblings have which are not among these.
    """
    plain = {name: quoted(name) for name in names}
    counts: dict[str, int] = {}
    for folder in (*plain.values(), *taken):
        counts[folder.lower()] = counts.get(folder.lower(), 0) + 1
    return {
        name: _safe(name, folder) if counts[folder.lower()] == 1 else _with_hash(name, folder)
        for name, folder in plain.items()
    }


def _safe(name: str, folder: str) -> str:
    return folder if _is_safe(folder) else _with_hash(name, folder)


def _is_safe(folder: str) -> bool:
    return (
        0 < len(folder) <= _MAX_NAME_BYTES
        and folder.lower() not in _RESERVED
        and not folder.startswith("__")
    )


def _with_hash(name: str, folder: str) -> str:
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    head = folder[: _MAX_NAME_BYTES - 17].rstrip("%")
    return f"{'_%5F' + head[2:] if head.startswith('__') else head}~{digest}"


def group_json() -> bytes:
    """The `zarr.json` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=1).encode()


def array_json(key: Key, dtype: str, grid: Grid, codec: str | None = None) -> bytes:
    """The `zarr.json` of a tensor's array."""
    attributes = json.dumps(_attributes(key, dtype), indent=1).replace("\n", "\n ")
    return f"{_until_attributes(dtype, grid, codec)}{attributes}\n}}".encode()


def _attributes(key: Key, dtype: str) -> dict[str, Any]:
    return {
        "ucformat": {"name": key.name, "state": key.state}
        | ({} if dtype in ZARR_DTYPES else {"dtype": dtype})
    }


@lru_cache(256)
def _until_attributes(dtype: str, grid: Grid, codec: str | None) -> str:
    """The document up to its attributes: the layers of a model have few grids, and indented JSON is slow to make."""
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": list(grid.chunk),
        "codecs": [_bytes_codec(dtype), *_compressors(grid, codec), {"name": "crc32c"}],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    return json.dumps(_document(dtype, grid.shape, grid.shard, codecs, {}), indent=1).removesuffix(
        "{}\n}"
    )


def _document(
    dtype: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    codecs: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    # here, so that reading a manifest does not import NumPy
    from ucformat.reading.dtypes import fill_value, zarr_dtype

    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": zarr_dtype(dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value(dtype),
        "codecs": codecs,
        "attributes": attributes,
    }


def _bytes_codec(dtype: str) -> dict[str, Any]:
    endian = {"configuration": {"endian": "little"}} if ITEMSIZE[dtype] > 1 else {}
    return {"name": "bytes", **endian}


def _compressors(grid: Grid, codec: str | None) -> list[dict[str, Any]]:
    if codec is None:
        return []
    # as `encoding.compress` does it; zarr-python and TensorStore write chunks of the same form
    configuration = {
        "typesize": grid.itemsize,
        "cname": "zstd",
        "clevel": 1,
        "shuffle": "shuffle",
        "blocksize": grid.chunk_nbytes,
    }
    return [{"name": codec, "configuration": configuration}]


def chunked_array_json(info: TensorInfo, chunk: tuple[int, ...], steps: int | None = None) -> bytes:
    """The `zarr.json` of an array without shards and checksums, as a store offers it that makes chunks when asked.

    Its dims are named by their size (`size_4096`, a second one of that size `size_4096_2`), because
    to xarray dims of one name have one size in all arrays of a group.

    Args:
        steps: number of steps of a run, which are a first dim, of which each chunk has one
            (default: there is no such dim).
    """
    codecs, attributes = [_bytes_codec(info.dtype)], _attributes(info.key, info.dtype)
    before = [info.shape[:d].count(n) for d, n in enumerate(info.shape)]
    names = [
        f"size_{n}_{k + 1}" if k else f"size_{n}" for n, k in zip(info.shape, before, strict=True)
    ]
    shape = info.shape
    if steps is not None:
        shape, chunk, names = (steps, *shape), (1, *chunk), [STEP, *names]
    document = _document(info.dtype, shape, chunk, codecs, attributes)
    return json.dumps(document | {"dimension_names": names}).encode()


def steps_json(count: int) -> bytes:
    """The `zarr.json` of the coordinate of the arrays of a run, in one chunk: the numbers of its steps."""
    document = _document("int64", (count,), (count,), [_bytes_codec("int64")], {})
    return json.dumps(document | {"dimension_names": [STEP]}).encode()


def shard_key(array: str, shard: tuple[int, ...]) -> str:
    """The key of a shard's file: `<array>/c/0/1`; `<array>/c` for a 0-d tensor."""
    return "/".join([array, "c", *map(str, shard)])


def shard_places(key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The folders of arrays of which a file may be a shard, and its coordinates: `shard_key` reversed."""
    parts = key.split("/")
    for at, part in enumerate(parts):
        if part == "c" and all(n.isdecimal() for n in parts[at + 1 :]):
            yield "/".join(parts[:at]), tuple(map(int, parts[at + 1 :]))


def array_folders(keys: Iterable[Key], taken: Collection[str] = ()) -> dict[Key, str]:
    """Choose the folders of arrays, below the attempt's `data` folder.

    Args:
        taken: names of other arrays in the folder of each state.
    """
    by_state: dict[str, list[str]] = {}
    for name, state in keys:
        by_state.setdefault(state, []).append(name)
    states = folder_names(by_state)
    return {
        Key(name, state): f"{states[state]}/{folder}"
        for state, names in by_state.items()
        for name, folder in folder_names(names, taken).items()
    }


def own_folder(key: Key) -> str:
    """Choose the folder of an array as `array_folders` does, if no other name differs from its own only in case."""
    return "/".join(_safe(name, quoted(name)) for name in (key.state, key.name))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor, its grids, the key of the folder that it is stored in, and how its chunks are encoded."""

    info: TensorInfo
    grid: Grid
    path: str
    codec: str | None = None


def lay_out(
    infos: Sequence[TensorInfo],
    folder: str,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    folders: Mapping[Key, str] | None = None,
    codec: str | None = None,
) -> list[StoredArray]:
    """Choose grids and folders for tensors.

    Args:
        folders: of arrays, below `folder`, if these are not all tensors of the checkpoint (default:
            `array_folders`).
    """
    for info in infos:
        if len(info.shape) > MAX_ARRAY_DIMS:
            raise UnsupportedError(
                f"{info.name} ({info.state}) has {len(info.shape)} dims; an array has at most "
                f"{MAX_ARRAY_DIMS}",
                hint=(
                    "reshape the tensor before saving it, or keep it in a packed or virtual "
                    "checkpoint"
                ),
            )
    folder_of = array_folders(i.key for i in infos) if folders is None else folders
    arrays = [
        StoredArray(
            i,
            Grid.of(i.shape, i.itemsize, chunk_bytes, shard_bytes),
            f"{folder}/{folder_of[i.key]}",
            codec,
        )
        for i in infos
    ]
    for info, grid in ((a.info, a.grid) for a in arrays):
        if grid.count > MAX_SHARDS:
            raise UnsupportedError(
                f"{info.name} ({info.state}) has {info.nbytes:,} bytes, and would be cut into "
                f"{grid.count:,} shards; "
                f"an array has at most {MAX_SHARDS:,}",
                hint="take larger shards, or leave this tensor out",
            )
        if codec is not None and grid.chunk_nbytes > MAX_BLOSC:
            raise UnsupportedError(
                f"{info.name} ({info.state}) would have chunks of {grid.chunk_nbytes:,} bytes; "
                f"Blosc compresses {MAX_BLOSC:,} at most",
                hint="take smaller chunks, or no codec",
            )
    return arrays


def grid_doc(chunk_bytes: int | None, shard_bytes: int | None) -> GridDoc:
    """The sizes given to `lay_out` as the manifest records them."""
    return GridDoc(chunk_bytes=chunk_bytes or CHUNK_BYTES, shard_bytes=shard_bytes or SHARD_BYTES)


def put_groups(store: Store, arrays: Iterable[StoredArray]) -> None:
    """Write the `zarr.json` of the root group and of each state's group."""
    for group in _groups(a.path for a in arrays):
        put_file(store, f"{group}/zarr.json", group_json())


def put_array(store: Store, array: StoredArray) -> None:
    """Write the `zarr.json` of an array."""
    document = array_json(array.info.key, array.info.dtype, array.grid, array.codec)
    put_file(store, f"{array.path}/zarr.json", document)


def metadata_documents(manifest: Manifest) -> Iterator[tuple[str, bytes, Key | None]]:
    """Every `zarr.json`: its key, its bytes, and the tensor that it describes (None: a group)."""
    stored = [(t, t.path) for t in manifest.tensors if t.path is not None]
    for group in _groups(path for _, path in stored):
        yield f"{group}/zarr.json", group_json(), None
    for doc, path in stored:
        # only who knows dtype and codec knows the document
        if doc.dtype not in ITEMSIZE or doc.codec not in (None, BLOSC):
            continue
        key = Key(doc.name, doc.state)
        grid = Grid(doc.shape, doc.chunk or (), doc.shard or (), doc.unit)
        yield f"{path}/zarr.json", array_json(key, doc.dtype, grid, doc.codec), key


def _groups(paths: Iterable[str]) -> list[str]:
    """The folders of the states, and the folders that contain these."""
    states = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    return list(dict.fromkeys([*(state.rpartition("/")[0] for state in states), *states]))


def array_doc(array: StoredArray, shards: Mapping[tuple[int, ...], bytes]) -> TensorDoc:
    """An array's entry in the manifest; `shards` as for `tensor_digest`."""
    info, grid = array.info, array.grid
    return TensorDoc(
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=info.shape,
        chunk=grid.chunk,
        shard=grid.shard,
        digest=tensor_digest(info.dtype, grid, shards),
        fingerprint=tensor_fingerprint(shards.values()),
        path=array.path,
        codec=array.codec,
    )


def put_file(store: Store, key: str, data: bytes) -> FileDoc:
    """Write a small file."""
    with store.create(key) as out:
        out.write(data)
    return FileDoc(path=key, nbytes=len(data), digest=bytes_digest(data))


# Which tensors are stored together although the others are arrays.
#
# An array needs two files, its document and a shard, whatever its size. A checkpoint of many small
# tensors would consist of nothing else, so these are written to a few packed files beside the arrays.


#: A tensor is small if it has fewer bytes.
SMALL_BYTES = 256 << 10

#: A checkpoint with more small tensors than this has none of them as an array.
MOST_SMALL_ARRAYS = 1000

# beside the folders of states
_PACKED_NAME = re.compile(r"(?:rank|small|tiles)-[0-9]+\.bin|extents\.safetensors", re.IGNORECASE)


def is_small(info: TensorInfo) -> bool:
    """Whether a tensor is packed in a checkpoint that has many small ones; all ranks find the same.

    So are those of a state whose folder would have the name of a packed file.
    """
    return info.nbytes < SMALL_BYTES or _PACKED_NAME.fullmatch(info.state) is not None


def packed_keys(infos: Iterable[TensorInfo]) -> Collection[Key]:
    """The small tensors, if there are too many for arrays; otherwise none."""
    small = {info.key for info in infos if is_small(info)}
    return small if len(small) > MOST_SMALL_ARRAYS else ()
