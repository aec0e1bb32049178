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
from typing import TYPE_CHECKING, Any

from ucformat.engines.orbax.folder import CHECKPOINT, MANIFEST, TREE
from ucformat.engines.orbax.ocdbt_export import Located, make_tree
from ucformat.engines.orbax.zarr_array import ML_DTYPES
from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import (
    Exporter,
    ExportOptions,
    Span,
    Target,
    TargetFile,
    left_out,
    option,
)
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece, TensorInfo
from ucformat.schema import ITEMSIZE, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.orbax.export_tree import Leaf
    from ucformat.exporters.base import Part


_NODES = "d/nodes"
_DONE = "commit_success.txt"  # which Orbax wants on object stores
_ALIGN = 64
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


@dataclass(frozen=True, kw_only=True)
class OrbaxOptions(ExportOptions):
    """The options of `OrbaxExporter`."""

    max_file_bytes: int = option(
        1 << 30, "size", "size of a data file after which another begins; 1 GiB by default"
    )
    max_chunk_bytes: int = option(
        64 << 20,
        "size",
        "maximum size of a chunk, of which Orbax reads no part alone; 64 MiB by default",
    )

    def __post_init__(self) -> None:
        if self.max_file_bytes < 1 or self.max_chunk_bytes < ITEMSIZE["complex128"]:
            raise UsageError("a data file must have at least 1 byte, and a chunk 16 bytes")


@dataclass(frozen=True, slots=True)
class _Chunk:
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


class _Data:
    """The data files so far."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: list[list[_Chunk]] = []
        self._nbytes: list[int] = []

    def add(self, info: TensorInfo, start: tuple[int, ...], shape: tuple[int, ...]) -> Located:
        """Place a chunk."""
        nbytes = Box.whole(shape).size * info.itemsize
        if not self._files or self._nbytes[-1] + nbytes > self._most:
            self._files.append([])
            self._nbytes.append(0)
        offset = -(-self._nbytes[-1] // _ALIGN) * _ALIGN
        self._files[-1].append(_Chunk(info, start, shape, offset))
        self._nbytes[-1] = offset + nbytes
        return Located(self._name(len(self._files) - 1), offset, nbytes)

    def files(self) -> Iterator[TargetFile]:
        """All of them."""
        for number, chunks in enumerate(self._files):
            yield TargetFile(self._name(number), self._nbytes[number], partial(_parts, chunks))

    @staticmethod
    def _name(number: int) -> str:
        return f"d/{number:032x}"


def _parts(chunks: Sequence[_Chunk]) -> Iterator[Part]:
    at = 0
    for chunk in chunks:
        yield bytes(chunk.offset - at)
        span = chunk.span()
        yield span
        at = chunk.offset + span.nbytes


class OrbaxExporter(Exporter):
    """Plans the files of an Orbax checkpoint."""

    kind = "orbax"
    title = "Orbax"
    summary = "Orbax, for JAX."
    options_type = OrbaxOptions
    dtypes = (*ZARR_DTYPES, *ML_DTYPES)

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.orbax.export_tree import Array, tree_of
        from ucformat.engines.orbax.tree import STRINGS

        tree = tree_of(source, infos)
        _check_names(tree.leaves)
        data = _Data(self.options.max_file_bytes)
        values: dict[str, bytes | Located] = {}
        placed: dict[TensorInfo, dict[str, Located]] = {}  # tied names have the same chunks
        for leaf in tree.leaves:
            if isinstance(leaf.content, Array):
                values[f"{leaf.name}/.zarray"] = _zarray(
                    leaf.content.dtype, leaf.content.shape, leaf.content.shape
                )
                values[f"{leaf.name}/{_key((0,) * len(leaf.content.shape))}"] = leaf.content.data
            elif not isinstance(leaf.content, str | None):
                info = leaf.content
                chunk = _chunk_shape(info, self.options.max_chunk_bytes)
                if info not in placed:
                    placed[info] = {
                        k: data.add(info, start, chunk) for k, start in _grid(info.shape, chunk)
                    }
                values[f"{leaf.name}/.zarray"] = _zarray(info.dtype, info.shape, chunk)
                values |= {f"{leaf.name}/{k}": v for k, v in placed[info].items()}
        nodes, manifest = make_tree(values, _NODES)
        files = [*data.files(), TargetFile.of(_NODES, nodes)]
        if texts := {
            leaf.name: leaf.content for leaf in tree.leaves if isinstance(leaf.content, str)
        }:
            files.append(TargetFile.of(STRINGS, json.dumps(texts).encode()))
        if tree.random_keys:
            files.append(
                TargetFile.of(
                    "array_metadatas/process_0", _array_metadatas(tree.leaves, tree.random_keys)
                )
            )
        about: dict[str, Any] = {
            "item_handlers": _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": None,
            "commit_timestamp_nsecs": None,
            "custom_metadata": {},
        }
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
    return names | {name: name for name in ML_DTYPES}


def _check_names(leaves: Sequence[Leaf]) -> None:
    """UnsupportedError if Orbax would store one leaf over another, or below another."""
    for name, count in Counter(leaf.name for leaf in leaves).items():
        if count > 1:
            raise UnsupportedError(
                f"two leaves of the tree would be named {name}, and Orbax stores one over the other",
                hint="rename one by a view, or leave out a state: --state",
            )
    paths = {tuple(map(str, leaf.path)) for leaf in leaves}
    for path in paths:
        for end in range(1, len(path)):
            if path[:end] in paths:
                raise UnsupportedError(
                    f"{'.'.join(path[:end])} would be a leaf of the tree, and have leaves below it, such as "
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
    for at in product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True))):
        yield _key(at), tuple(i * c for i, c in zip(at, chunk, strict=True))


def _key(at: tuple[int, ...]) -> str:
    return ".".join(map(str, at)) or "0"


def _zarray(dtype: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> bytes:
    """The metadata of an array."""
    document = {
        "chunks": chunk,
        "compressor": None,
        "dimension_separator": ".",
        "dtype": _dtypes()[dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": shape,
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _metadata(leaves: Sequence[Leaf], custom: Any) -> bytes:
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


def _array_metadatas(leaves: Sequence[Leaf], random_keys: Mapping[str, str]) -> bytes:
    """The file that says which arrays are JAX's typed random keys."""
    found = []
    for leaf in leaves:
        if isinstance(leaf.content, str | None):
            continue
        shape = list(leaf.content.shape)
        extra = {"random_key_impl": random_keys[leaf.name]} if leaf.name in random_keys else None
        about = {
            "param_name": leaf.name,
            "write_shape": shape,
            "chunk_shape": shape,
            "ext_metadata": extra,
        }
        found.append({"array_metadata": about})
    return json.dumps({"array_metadatas": found}).encode()
