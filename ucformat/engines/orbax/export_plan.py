"""Orbax checkpoints: a tree of arrays in OCDBT, which `PyTreeCheckpointer` and `StandardCheckpointer` restore.

Arrays are Zarr v2, not compressed. Their chunks lie one after another in the data files, and the
metadata, numbers and small values in the nodes of the B+tree. Data files and nodes are written
first: without `manifest.ocdbt` none of them can be found, and without `_METADATA` Orbax restores
nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.engines.orbax.folder import CHECKPOINT, MANIFEST, TREE
from ucformat.engines.orbax.ocdbt import ValueLocation, make_tree
from ucformat.engines.orbax.opened import NAMES
from ucformat.errors import UnsupportedError
from ucformat.exporters.base import (
    Span,
    Target,
    TargetFile,
    left_out,
)
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.dtypes import dtype_name
from ucformat.reading.readable import path_from_json
from ucformat.reading.trees import JAX, tensor_keys
from ucformat.reading.values import from_json, is_special, plain_form
from ucformat.schema import ITEMSIZE, TENSORSTORE_DTYPES, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.exporters.base import Part
    from ucformat.reading.readable import StatePath

_NODE_FILE = "d/nodes"
_DONE = "commit_success.txt"  # which Orbax wants on object stores
_ALIGN = 64
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


@dataclass(frozen=True, slots=True)
class _ChunkInFile:
    """A chunk of a tensor: its position and shape, and its place in a data file."""

    info: TensorInfo
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    def span(self) -> Span:
        """Its elements; those outside of the tensor are zeros."""
        inside = tuple(
            min(c, n - s) for c, n, s in zip(self.shape, self.info.shape, self.start, strict=True)
        )
        piece = Piece(Box(self.start, inside), 0, row_major(self.shape))
        return Span(self.info.dtype, Box.whole(self.shape).size, ((self.info, piece),))


class _DataFiles:
    """The data files so far."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: list[list[_ChunkInFile]] = []
        self._nbytes: list[int] = []

    def add(
        self, info: TensorInfo, start: tuple[int, ...], shape: tuple[int, ...]
    ) -> ValueLocation:
        """Place a chunk."""
        nbytes = Box.whole(shape).size * info.itemsize
        if not self._files or self._nbytes[-1] + nbytes > self._most:
            self._files.append([])
            self._nbytes.append(0)
        offset = -(-self._nbytes[-1] // _ALIGN) * _ALIGN
        self._files[-1].append(_ChunkInFile(info, start, shape, offset))
        self._nbytes[-1] = offset + nbytes
        return ValueLocation(self._name(len(self._files) - 1), offset, nbytes)

    def files(self) -> Iterator[TargetFile]:
        """All of them."""
        for number, chunks in enumerate(self._files):
            yield TargetFile(self._name(number), self._nbytes[number], partial(_parts, chunks))

    @staticmethod
    def _name(number: int) -> str:
        return f"d/{number:032x}"


def _parts(chunks: Sequence[_ChunkInFile]) -> Iterator[Part]:
    end = 0
    for chunk in chunks:
        yield bytes(chunk.offset - end)
        span = chunk.span()
        yield span
        end = chunk.offset + span.nbytes


def plan_target(
    source: Checkpoint, infos: Sequence[TensorInfo], *, max_file_bytes: int, max_chunk_bytes: int
) -> Target:
    """Plan the files of an Orbax checkpoint; the limits are those of `OrbaxExportOptions`."""
    from ucformat.engines.orbax.opened import STRINGS

    tree = tree_of(source, infos)
    _check_names(tree.leaves)
    data = _DataFiles(max_file_bytes)
    values: dict[str, bytes | ValueLocation] = {}
    placed: dict[TensorInfo, dict[str, ValueLocation]] = {}  # tied names have the same chunks
    for leaf in tree.leaves:
        if isinstance(leaf.content, SmallArray):
            dtype, shape, content = leaf.content
            values[f"{leaf.name}/.zarray"] = _zarray(dtype, shape, shape)
            values[f"{leaf.name}/{_chunk_key((0,) * len(shape))}"] = content
        elif not isinstance(leaf.content, str | None):
            info = leaf.content
            chunk = _chunk_shape(info, max_chunk_bytes)
            if info not in placed:
                placed[info] = {
                    k: data.add(info, start, chunk) for k, start in _grid(info.shape, chunk)
                }
            values[f"{leaf.name}/.zarray"] = _zarray(info.dtype, info.shape, chunk)
            values |= {f"{leaf.name}/{k}": v for k, v in placed[info].items()}
    nodes, manifest = make_tree(values, _NODE_FILE)
    files = [*data.files(), TargetFile.of(_NODE_FILE, nodes)]
    texts = {leaf.name: leaf.content for leaf in tree.leaves if isinstance(leaf.content, str)}
    if texts:
        files.append(TargetFile.of(STRINGS, json.dumps(texts).encode()))
    if tree.random_keys:
        metadatas = _array_metadatas(tree.leaves, tree.random_keys)
        files.append(TargetFile.of("array_metadatas/process_0", metadatas))
    about: dict[str, Any] = {
        "item_handlers": _HANDLER, "metrics": {}, "performance_metrics": {},
        "init_timestamp_nsecs": None, "commit_timestamp_nsecs": None, "custom_metadata": {},
    }  # fmt: skip
    files += [
        TargetFile.of(MANIFEST, manifest, last=True),
        TargetFile.of(TREE, _metadata(tree.leaves, tree.custom), last=True),
        TargetFile.of(CHECKPOINT, json.dumps(about).encode(), last=True),
        TargetFile.of(_DONE, b"Checkpoint commit was successful", last=True),
    ]
    return Target(tuple(files), (*left_out(source, infos, values=source.objects), *tree.left))


@lru_cache
def _dtypes() -> dict[str, str]:
    """The names of dtypes in Zarr v2."""
    from ucformat.engines.orbax.zarr_array import V2_DTYPES

    names = {
        name: f"{'|' if ITEMSIZE[name] == 1 else '<'}{code}" for code, name in V2_DTYPES.items()
    }
    return names | {name: name for name in TENSORSTORE_DTYPES}


def _check_names(leaves: Sequence[ExportLeaf]) -> None:
    """UnsupportedError if Orbax would store one leaf over another, or below another."""
    for name, count in Counter(leaf.name for leaf in leaves).items():
        if count > 1:
            raise UnsupportedError(
                f"two leaves of the tree would be named {name}, and Orbax stores one over the "
                "other",
                hint="rename one by a view, or leave out a state: --state",
            )
    paths = {tuple(map(str, leaf.path)) for leaf in leaves}
    for path in paths:
        for end in range(1, len(path)):
            if path[:end] in paths:
                raise UnsupportedError(
                    f"{'.'.join(path[:end])} would be a leaf of the tree, and have leaves below "
                    "it, such as "
                    f"{'.'.join(path)}",
                    hint="rename one by a view, or leave out a state: --state",
                )


def _chunk_shape(info: TensorInfo, most: int) -> tuple[int, ...]:
    """The shape of a chunk: the longest dim is halved until it is small enough."""
    shape = [max(1, n) for n in info.shape]
    while Box.whole(tuple(shape)).size * info.itemsize > most:
        longest = max(range(len(shape)), key=shape.__getitem__)
        shape[longest] = -(-shape[longest] // 2)
    return tuple(shape)


def _grid(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The key and the position of each chunk."""
    for index in product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True))):
        yield _chunk_key(index), tuple(i * c for i, c in zip(index, chunk, strict=True))


def _chunk_key(index: tuple[int, ...]) -> str:
    return ".".join(map(str, index)) or "0"


def _zarray(dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """The metadata of an array."""
    document = {
        "chunks": chunk, "compressor": None, "dimension_separator": ".", "dtype": _dtypes()[dtype],
        "fill_value": None, "filters": None, "order": "C", "shape": shape, "zarr_format": 2,
    }  # fmt: skip
    return json.dumps(document, separators=(",", ":")).encode()


def _metadata(leaves: Sequence[ExportLeaf], custom: Any) -> bytes:
    """The file that describes the tree."""
    entries: dict[str, Any] = {}
    for leaf in leaves:
        keys = [{"key": str(part), "key_type": 1 if type(part) is int else 2} for part in leaf.path]
        value: dict[str, Any] = {"value_type": leaf.kind, "skip_deserialize": leaf.content is None}
        entries[str(tuple(map(str, leaf.path)))] = {"key_metadata": keys, "value_metadata": value}
    document = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom,
    }
    return json.dumps(document).encode()


def _array_metadatas(leaves: Sequence[ExportLeaf], random_keys: Mapping[str, str]) -> bytes:
    """The file that says which arrays are JAX's typed random keys."""
    entries = []
    for leaf in leaves:
        if isinstance(leaf.content, str | None):
            continue
        shape = list(leaf.content.shape)
        about = {"param_name": leaf.name, "write_shape": shape, "chunk_shape": shape}
        extra = {"random_key_impl": random_keys[leaf.name]} if leaf.name in random_keys else None
        entries.append({"array_metadata": {**about, "ext_metadata": extra}})
    return json.dumps({"array_metadatas": entries}).encode()


# The tree that is exported to Orbax: its leaves, with their paths.
#
# What came from Orbax or JAX has its tree; so has what records the paths of a program's state. Other
# checkpoints become `{"params": {name: weight}, "exp_avg": {name: tensor}, …}`, with names that
# contain dots, and their values by name.


_NOTED_BY = ("orbax", JAX)  # the writers of trees, and the objects with what they noted besides
_EMPTY_KINDS = {type(None): "None", dict: "Dict", list: "List"}


class SmallArray(NamedTuple):
    """A small array that is no tensor of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class ExportLeaf:
    """A leaf: its path, its type in Orbax's words, and its content, if it has any."""

    path: StatePath
    kind: str
    content: TensorInfo | SmallArray | str | None

    @property
    def name(self) -> str:
        """Its name, which is also the name of its array."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """The tree.

    Attributes:
        custom: the user's metadata, with the names and states that tensors had, where their paths
            do not say them.
        random_keys: the implementation of each leaf that is one of JAX's typed random keys.
    """

    leaves: tuple[ExportLeaf, ...]
    custom: Any
    random_keys: dict[str, str]
    left: tuple[str, ...]


def tree_of(source: Checkpoint, infos: Sequence[TensorInfo]) -> OrbaxTree:
    """The tree of a checkpoint."""
    writer = source.metadata.engine.get("name")
    beside = source.objects.get(writer) if writer in _NOTED_BY else None
    recorded: dict[str, Any] = beside if isinstance(beside, dict) else {}
    kinds = {
        ".".join(map(str, path_from_json(path))): (path, kind)
        for path, kind in recorded.get("leaves", ())
    }
    values = _Values({info.key: info for info in infos})
    values.left += [f"the item {name}" for name in recorded.get("items", {})]
    for name, value in source.objects.items():
        if name != writer or not recorded:
            path, kind = kinds.pop(name, ([name], ""))
            values.add(path_from_json(path), value, kind)
    values.leaves += [ExportLeaf(path_from_json(path), kind, None) for path, kind in kinds.values()]
    keys = {
        name: kind
        for name, kind in recorded.get("random_keys", {}).items()
        if isinstance(kind, str)
    }
    leaves = [
        leaf
        for info in infos
        if info.key not in values.placed
        for leaf in _tensor_leaves(source, info, keys)
    ]
    above = {leaf.path[:end] for leaf in leaves for end in range(len(leaf.path) + 1)}
    leaves += [leaf for leaf in values.leaves if leaf.content is not None or leaf.path not in above]
    custom = next(iter(recorded.get("trees", {}).values()), None)
    if noted := _noted(leaves):
        custom = {**(custom if isinstance(custom, dict) else {}), NAMES: noted}
    leaves.sort(key=lambda leaf: tuple(map(str, leaf.path)))
    return OrbaxTree(tuple(leaves), custom, keys, tuple(values.left))


def _tensor_leaves(
    source: Checkpoint, info: TensorInfo, random_keys: Mapping[str, str]
) -> Iterator[ExportLeaf]:
    paths = source.metadata.paths.get(info.key, ())
    if not paths:
        names = [
            info.name,
            *(a for a, name in source.aliases.items() if (name, "weight") == info.key),
        ]
        paths = tuple(("params" if info.state == "weight" else info.state, name) for name in names)
    for path in paths:
        leaf = ExportLeaf(path, "np.ndarray", info)  # JAX arrays are restored only with a sharding
        yield ExportLeaf(path, "jax.Array", info) if leaf.name in random_keys else leaf


class _Values:
    """The leaves of values, the tensors that they refer to, and the values that have no place."""

    def __init__(self, infos: Mapping[Key, TensorInfo]) -> None:
        self._infos = infos
        self.leaves: list[ExportLeaf] = []
        self.left: list[str] = []
        self.placed: set[Key] = set()

    def add(self, path: StatePath, value: Any, kind: str) -> None:
        """Add the leaves of a value in its JSON form; `kind` is their type, if it is known."""
        value = plain_form(value)
        if isinstance(value, dict) and set(value) == {"$tuple"}:
            value = value["$tuple"]
        if isinstance(value, list) and value:
            for i, item in enumerate(value):
                self.add((*path, i), item, kind)
        elif isinstance(value, dict) and value and not is_special(value):
            for key, item in value.items():
                self.add((*path, *path_from_json([key])), item, kind)
        elif (leaf := self._leaf(path, value, kind)) is not None:
            self.leaves.append(leaf)
        else:
            self.left.append(f"the value {'.'.join(map(str, path))}")

    def _leaf(self, path: StatePath, value: Any, kind: str) -> ExportLeaf | None:
        """The leaf of a number, text, array, tensor or nothing; None if it has no place."""
        if not value and type(value) in _EMPTY_KINDS:
            return ExportLeaf(path, kind or _EMPTY_KINDS[type(value)], None)
        if isinstance(value, str):  # whose names Orbax reads as JSON pointers
            return (
                None
                if set("/~") & set("".join(map(str, path)))
                else ExportLeaf(path, "string", value)
            )
        if isinstance(value, dict) and set(value) == {"$ref"}:
            info = self._infos.get(Key(value["$ref"], "weight"))
            self.placed |= {info.key} if info else set()
            return ExportLeaf(path, "np.ndarray", info) if info else None
        if isinstance(value, dict) and set(value) <= {"$tensor", "$float"}:
            value = from_json(value)
        if isinstance(value, np.ndarray):
            if dtype_name(value.dtype) not in (*ZARR_DTYPES, *TENSORSTORE_DTYPES):
                return None
            return ExportLeaf(
                path,
                kind or "np.ndarray",
                SmallArray(dtype_name(value.dtype), value.shape, value.tobytes()),
            )
        if type(value) is bool:
            return ExportLeaf(path, "scalar", SmallArray("bool", (), bytes([value])))
        if isinstance(value, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
            number = np.asarray(value, "<f8" if isinstance(value, float) else "<i8")
            return ExportLeaf(path, "scalar", SmallArray(number.dtype.name, (), number.tobytes()))
        return None


def _noted(leaves: Sequence[ExportLeaf]) -> dict[str, list[str]]:
    """The name and state of each tensor whose path says another."""
    arrays = {
        tuple(map(str, leaf.path)): leaf.content
        for leaf in leaves
        if isinstance(leaf.content, TensorInfo | SmallArray) and leaf.kind != "scalar"
    }
    keys = tensor_keys({path: content.shape for path, content in arrays.items()})
    out: dict[str, list[str]] = {}
    seen: set[Key] = set()
    for path, content in arrays.items():
        key = content.key if isinstance(content, TensorInfo) else keys[path]
        if key in seen:  # a tied name has its own path
            key = Key(".".join(path[1:]), key.state)
        seen.add(key)
        if key != keys[path]:
            out[".".join(path)] = list(key)
    return out
