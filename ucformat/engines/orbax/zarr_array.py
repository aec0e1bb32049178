"""The metadata of a Zarr array, version 2 or 3, checked and in a common form, and its codecs.

A chain of codecs consists of any number of `transpose`, then `bytes` or `sharding_indexed`, then
codecs from bytes to bytes. If these leave the elements as they are in memory, chunks are *raw*, and
are read in place; all others are decoded whole.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.schema import ITEMSIZE, TENSORSTORE_DTYPES, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection

Codec = dict[str, Any]

#: The supported codecs from bytes to bytes. Their compression levels do not matter for decoding.
_CODECS: dict[str, Codec] = {
    "crc32c": {},
    "gzip": {"level": 5},
    "zstd": {"level": 3, "checksum": False},
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0},
}

_DTYPES = {*ZARR_DTYPES, *TENSORSTORE_DTYPES}

_MAX_DEPTH = 4  # shards within shards
_MAX_CODECS = 8  # codecs in a chain: each may expand the output of the one before
# its metadata, or a chunk
_ARRAY_FILE = re.compile(r"\.zarray|\.zattrs|zarr\.json|c|(c[./])?\d+([./]\d+)*")


def is_file_of(arrays: Collection[str], key: str) -> bool:
    """Whether a file is the metadata or a chunk of an array, by its name."""
    parts = key.split("/")
    splits = (("/".join(parts[:n]), "/".join(parts[n:])) for n in range(len(parts)))
    return any(path in arrays and _ARRAY_FILE.fullmatch(name) for path, name in splits)


@dataclass(frozen=True, slots=True)
class Raw:
    """A chunk of plain elements: its axes, slowest first, and whether a CRC-32C follows."""

    order: tuple[int, ...]
    checked: bool


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a stored value contains many chunks, and an index of them."""

    chunk: tuple[int, ...]
    codecs: tuple[Codec, ...]
    index_endian: str
    index_checked: bool
    index_first: bool


def _check_chain(
    where: str, codecs: Any, shape: tuple[int, ...], itemsize: int, depth: int = 0
) -> tuple[Codec, ...]:
    """Normalise an array's `codecs`; `shape` is that of the chunk that they encode."""
    if not isinstance(codecs, list) or depth > _MAX_DEPTH:
        raise IntegrityError(f"{where}: its codecs are not a list, or are nested too deeply")
    if len(codecs) > _MAX_CODECS:
        raise IntegrityError(f"{where}: {len(codecs)} codecs one after another are too many")
    out: list[Codec] = []
    stage = 0  # 0: arrays, 1: bytes
    for codec in codecs:
        name, config = _named(where, codec)
        if name == "transpose" and stage == 0:
            checked: Codec = {"order": _order(where, config, len(shape))}
            shape = tuple(shape[i] for i in checked["order"])
        elif name == "bytes" and stage == 0:
            checked, stage = {"endian": _endian(where, config, itemsize)}, 1
        elif name == "sharding_indexed" and stage == 0:
            checked, stage = _shards(where, config, shape, itemsize, depth), 1
        elif name in _CODECS and stage == 1:
            checked = _CODECS[name]
        elif name in (*_CODECS, "transpose", "bytes", "sharding_indexed"):
            raise IntegrityError(f"{where}: its codec {name!r} is in the wrong place of the chain")
        else:
            raise UnsupportedError(
                f"{where}: chunks encoded with {name!r} are not read",
                hint=f"those are: {', '.join(['bytes', 'transpose', 'sharding_indexed', *_CODECS])}; write the array "
                "anew with one of them",
            )
        out.append({"name": name, "configuration": checked} if checked else {"name": name})
    if stage == 0:
        raise IntegrityError(f"{where}: none of its codecs converts an array to bytes")
    return tuple(out)


def _named(where: str, codec: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(codec, str):
        return codec, {}
    if isinstance(codec, dict) and isinstance(name := codec.get("name"), str):
        config = codec.get("configuration", {})
        if isinstance(config, dict):
            return name, config
    raise IntegrityError(f"{where}: {str(codec)[:80]!r} is not a codec")


def _order(where: str, config: dict[str, Any], ndim: int) -> list[int]:
    order = config.get("order")
    if order in ("C", "F"):
        return list(range(ndim))[:: 1 if order == "C" else -1]
    if (
        not isinstance(order, list)
        or any(type(i) is not int for i in order)
        or sorted(order) != list(range(ndim))
    ):
        raise IntegrityError(
            f"{where}: the order {str(order)[:80]} of its codec 'transpose' is not one of {ndim} "
            "axes"
        )
    return cast("list[int]", order)


def _endian(where: str, config: dict[str, Any], itemsize: int) -> str:
    endian = config.get("endian", "little" if itemsize == 1 else None)
    if endian is None:
        raise UnsupportedError(
            f"{where}: its codec 'bytes' has no `endian`, so the order of bytes is unknown",
            hint="add the `endian` of the machine that wrote the array to its zarr.json",
        )
    if endian not in ("little", "big"):
        raise IntegrityError(
            f"{where}: its codec 'bytes' has the unknown endian {str(endian)[:80]!r}"
        )
    return str(endian)


def _shards(
    where: str, config: dict[str, Any], shape: tuple[int, ...], itemsize: int, depth: int
) -> dict[str, Any]:
    inner = config.get("chunk_shape")
    if (
        not isinstance(inner, list)
        or len(inner) != len(shape)
        or any(type(c) is not int or c < 1 or n % c for c, n in zip(inner, shape, strict=True))
    ):
        raise IntegrityError(
            f"{where}: shards of {list(shape)} cannot be split into chunks of {str(inner)[:80]}"
        )
    location = config.get("index_location", "end")
    if location not in ("start", "end"):
        raise IntegrityError(f"{where}: its shards have an index at {str(location)[:80]!r}")
    codecs = _check_chain(where, config.get("codecs"), tuple(inner), itemsize, depth + 1)
    index = (*(1 for _ in inner), 2)
    index_codecs = _check_chain(where, config.get("index_codecs"), index, 8, _MAX_DEPTH)
    return {
        "chunk_shape": inner,
        "codecs": list(codecs),
        "index_codecs": list(index_codecs),
        "index_location": location,
    }


def _raw_layout(codecs: tuple[Codec, ...], ndim: int, itemsize: int) -> Raw | None:
    """The layout of a chunk that is stored raw; None if it must be decoded."""
    order = tuple(range(ndim))
    names = [c["name"] for c in codecs]
    first = names.index("bytes") if "bytes" in names else -1
    if first < 0 or names[first + 1 :] not in ([], ["crc32c"]):
        return None
    if itemsize > 1 and codecs[first]["configuration"]["endian"] != "little":
        return None
    for codec in codecs[:first]:
        order = tuple(order[i] for i in codec["configuration"]["order"])
    return Raw(order, checked=len(names) > first + 1)


def _sharding_of(codecs: tuple[Codec, ...]) -> Sharding | None:
    """How a stored value contains many chunks; None if it is, or is decoded as, one."""
    if [c["name"] for c in codecs] != ["sharding_indexed"]:
        return None
    config = codecs[0]["configuration"]
    index = config["index_codecs"]
    if [c["name"] for c in index] not in (["bytes"], ["bytes", "crc32c"]):
        return None
    return Sharding(
        tuple(config["chunk_shape"]),
        tuple(config["codecs"]),
        index[0]["configuration"]["endian"],
        len(index) > 1,
        config["index_location"] == "start",
    )


_MAX_DIMS = 32  # TensorStore's
_MAX_BYTES = 1 << 62  # of an array or a chunk: what strides and offsets can represent
_V2_DTYPE = re.compile(r"([<>|])([biufc]\d{1,2})")
V2_DTYPES = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64", "u1": "uint8", "u2": "uint16",
    "u4": "uint32", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_V3_KEYS = frozenset((
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs",
    "attributes", "dimension_names", "storage_transformers", "consolidated_metadata",
))  # fmt: skip


@dataclass(frozen=True)
class ZarrArray:
    """One array: its tensor, its chunks, and how the keys of stored values are made.

    `stored` is the shape of one stored value: a chunk, or a shard of many. `stream` is the
    compression (`zlib` or `bz2`) of Zarr v2 after all `codecs`, for which Zarr v3 has no codec.
    """

    path: str  # in the group; "" if the array is the root
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    codecs: tuple[Codec, ...]
    prefix: str
    separator: str
    fill_value: Any
    stream: str | None = None

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def sharding(self) -> Sharding | None:
        """How a stored value contains many chunks; None if it is one."""
        return None if self.stream else _sharding_of(self.codecs)

    @cached_property
    def chunk(self) -> tuple[int, ...]:
        """The shape of a chunk: the unit of decoding."""
        return self.sharding.chunk if self.sharding else self.stored

    @cached_property
    def chunk_codecs(self) -> tuple[Codec, ...]:
        """The codecs of a chunk."""
        return self.sharding.codecs if self.sharding else self.codecs

    @cached_property
    def raw(self) -> Raw | None:
        """The layout of a chunk that is stored raw; None if it must be decoded."""
        if self.stream:
            return None
        return _raw_layout(self.chunk_codecs, len(self.shape), self.itemsize)

    @cached_property
    def chunk_nbytes(self) -> int:
        """Bytes of a decoded chunk; one at the edge is stored whole."""
        return math.prod(self.chunk) * self.itemsize

    def key(self, at: tuple[int, ...]) -> str:
        """The key of a stored value."""
        parts = [self.prefix] if self.prefix else []
        name = self.separator.join([*parts, *map(str, at)]) or "0"
        return f"{self.path}/{name}" if self.path else name


def parse_v2(path: str, where: str, doc: Any) -> ZarrArray:
    """Parse a `.zarray` document."""
    if not isinstance(doc, dict) or doc.get("zarr_format") != 2:
        raise IntegrityError(f"{where} is not the metadata of a Zarr v2 array")
    dtype, endian = _v2_dtype(where, doc.get("dtype"))
    shape = _sizes(where, "shape", doc.get("shape"))
    chunks = _sizes(where, "chunks", doc.get("chunks"))
    if filters := doc.get("filters"):
        listed = filters[:5] if isinstance(filters, list) else [filters]
        names = [str(f.get("id") if isinstance(f, dict) else f)[:80] for f in listed]
        raise UnsupportedError(
            f"{where}: chunks with the filters {', '.join(names)} are not read",
            hint="write the array anew without filters",
        )
    order = doc.get("order", "C")
    if order not in ("C", "F"):
        raise IntegrityError(f"{where}: its order is {str(order)[:80]!r}, not C or F")
    codecs: list[Codec] = []
    if order == "F" and len(shape) > 1:
        codecs.append({"name": "transpose", "configuration": {"order": "F"}})
    codecs.append({"name": "bytes", "configuration": {"endian": endian}})
    stream = None
    compressor = doc.get("compressor")
    if compressor is not None:
        name = compressor.get("id") if isinstance(compressor, dict) else None
        if name in ("zstd", "gzip", "blosc"):
            codecs.append({"name": name})
        elif name in ("zlib", "bz2"):
            stream = str(name)
        else:
            raise UnsupportedError(
                f"{where}: chunks compressed with {str(name or compressor)[:80]!r} are not read",
                hint=(
                    "those are: zstd, gzip, blosc, zlib, bz2; write the array anew with one of them"
                ),
            )
    separator, fill = doc.get("dimension_separator", "."), doc.get("fill_value")
    array = ZarrArray(path, dtype, shape, chunks, (), "", separator, fill, stream)
    return _checked(where, array, codecs)


def parse_v3(path: str, where: str, doc: Any) -> ZarrArray:
    """Parse the `zarr.json` document of an array."""
    if not isinstance(doc, dict) or doc.get("zarr_format") != 3 or doc.get("node_type") != "array":
        raise IntegrityError(f"{where} is not the metadata of a Zarr v3 array")
    for key, value in doc.items():
        if key not in _V3_KEYS and not (
            isinstance(value, dict) and value.get("must_understand") is False
        ):
            raise UnsupportedError(f"{where} has the extension {key[:80]!r}, which is not known")
    if doc.get("storage_transformers"):
        raise UnsupportedError(f"{where} has storage transformers, which are not known")
    dtype = doc.get("data_type")
    if isinstance(dtype, dict) and not dtype.get("configuration"):
        dtype = dtype.get("name")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _unknown_dtype(where, dtype)
    grid, encoding = doc.get("chunk_grid"), doc.get("chunk_key_encoding")
    if not isinstance(grid, dict) or not isinstance(encoding, dict | str):
        raise IntegrityError(f"{where} has no chunk_grid or no chunk_key_encoding")
    if grid.get("name") != "regular" or not isinstance(grid.get("configuration"), dict):
        raise UnsupportedError(
            f"{where}: the chunk grid {str(grid.get('name'))[:80]!r} is not read, only 'regular'"
        )
    chunks = _sizes(where, "chunk_shape", grid["configuration"].get("chunk_shape"))
    encoding = {"name": encoding} if isinstance(encoding, str) else encoding
    config = encoding.get("configuration") or {}
    if encoding.get("name") not in ("default", "v2") or not isinstance(config, dict):
        raise UnsupportedError(
            f"{where}: the chunk keys {str(encoding.get('name'))[:80]!r} are not known"
        )
    prefix, default = ("c", "/") if encoding["name"] == "default" else ("", ".")
    shape = _sizes(where, "shape", doc.get("shape"))
    separator = config.get("separator", default)
    fill = doc.get("fill_value")
    array = ZarrArray(path, dtype, shape, chunks, (), prefix, separator, fill)
    return _checked(where, array, doc.get("codecs"))


def _checked(where: str, array: ZarrArray, codecs: Any) -> ZarrArray:
    """The array with its codecs, after the checks that both versions share."""
    shape, chunks, itemsize = array.shape, array.stored, ITEMSIZE[array.dtype]
    if array.separator not in (".", "/"):
        raise IntegrityError(
            f"{where}: its chunk keys are separated by {str(array.separator)[:80]!r}, not by '.' "
            "or '/'"
        )
    if len(chunks) != len(shape) or any(c < 1 for c, n in zip(chunks, shape, strict=True) if n):
        raise IntegrityError(
            f"{where}: an array of {list(shape)} cannot be split into chunks of {list(chunks)}"
        )
    chunks = tuple(max(c, 1) for c in chunks)
    if math.prod(shape) * itemsize > _MAX_BYTES or math.prod(chunks) * itemsize > _MAX_BYTES:
        raise IntegrityError(
            f"{where}: an array of {list(shape)} in chunks of {list(chunks)} is too large"
        )
    chain = _check_chain(where, codecs, chunks, itemsize)
    return replace(array, stored=chunks, codecs=chain)


def _sizes(where: str, label: str, sizes: Any) -> tuple[int, ...]:
    if (
        not isinstance(sizes, list)
        or len(sizes) > _MAX_DIMS
        or any(type(n) is not int or not 0 <= n <= _MAX_BYTES for n in sizes)
    ):
        raise IntegrityError(f"{where}: its {label} is {str(sizes)[:80]}, not a list of sizes")
    return tuple(sizes)


def _v2_dtype(where: str, dtype: Any) -> tuple[str, str]:
    """The name of the data type, and its byte order."""
    if isinstance(dtype, str):
        if dtype in TENSORSTORE_DTYPES:
            return dtype, "little"
        m = _V2_DTYPE.fullmatch(dtype)
        name = V2_DTYPES.get(m[2]) if m else None
        if m and name and (m[1] != "|" or ITEMSIZE[name] == 1):
            return name, "big" if m[1] == ">" else "little"
    raise _unknown_dtype(where, dtype)


def _unknown_dtype(where: str, dtype: Any) -> UnsupportedError:
    void = isinstance(dtype, str) and re.fullmatch(r"[<>|]V\d+", dtype)
    hint = (
        "it may be bfloat16 or float8: if so, write that name into the metadata" if void else None
    )
    return UnsupportedError(
        f"{where}: the data type {str(dtype)[:80]!r} is not read",
        hint=hint or f"those are: {', '.join(sorted(_DTYPES))}",
    )
