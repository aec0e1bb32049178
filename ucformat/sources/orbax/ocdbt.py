"""OCDBT, TensorStore's key-value store: where in its files each value lies.

`manifest.ocdbt` names the root of a B+tree whose nodes lie in data files; a leaf holds small values itself, and says of
others in which file and where they are, as they were written. TensorStore decodes nodes out of memory, each after its
bytes were read through our own store: so any store serves, and values are read in place.

A manifest and a node are each a magic number, their length, a version, and a body that zstd may have compressed. The
body of a node has its height, the paths of data files, and the keys of its entries, where each says how much of it is
like the one before. So a few kilobytes may stand for gigabytes: of zeros that were compressed, or of long keys that
differ in one byte. How much they stand for is computed before TensorStore unpacks them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.sources.orbax.folder import MANIFEST
from ucformat.sources.zarr.chunks import tensorstore
from ucformat.storage.base import ByteRange, check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ucformat.sources.zarr.values import Value
    from ucformat.storage.base import Store

__all__ = ["read_ocdbt"]

_FLOOR = 32 << 20  # bytes that any node may become
_RATIO = 400  # and for each of its bytes: real entries take ten of them, offsets that do not shrink
_MANIFEST = 32 << 10  # bytes of a manifest once inflated: it has a path of 50 bytes for each of 16 versions or so
_ENTRY = 1 << 10  # bytes that an entry takes in Python, besides its key and path
_MANY = 1 << 20  # entries of a node, by TensorStore's limit; no more files either
_LONG = 0xFFFF  # bytes of a key or path
_HEADER, _TRAILER = 12, 4  # bytes of the mark and the length; those of a checksum
_ZSTD = 1
_BLOCK = 128 << 10  # bytes that a block of zstd inflates to at most


def _check_manifest(data: bytes, where: str) -> None:
    """IntegrityError where a manifest would be far larger, inflated, than any is; `where` names it in messages."""
    _body(data, _MANIFEST, where)


def _check_node(data: bytes, stem: int, where: str) -> None:
    """IntegrityError where the entries of a node would take far more memory than its bytes can stand for.

    `stem` is how many bytes come before each of its keys, as the nodes above it say.
    """
    most = _FLOOR + _RATIO * len(data)
    body = _body(data, most, where)
    body.at += 1  # the height
    paths, own = body.names()
    body.lengths(len(paths))  # of the parts of them that are base paths
    body.at += own
    keys, _ = body.names()
    nbytes = int(keys.sum() + paths.sum()) + len(keys) * (int(paths.max(initial=0)) + stem + _ENTRY)
    if nbytes > most:
        raise IntegrityError(
            f"{where} has {len(data):,} bytes, and would take {nbytes:,} in memory: no save writes that"
        )


class _Body:
    """What is in a manifest or a node, read from its beginning on."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def count(self) -> int:
        """A number in groups of seven bits, the lowest first."""
        value = shift = 0
        while self.at < len(self.data) and value <= _MANY:
            byte = self.data[self.at]
            value |= (byte & 127) << shift
            self.at, shift = self.at + 1, shift + 7
            if byte < 128 and value <= _MANY:
                return value
        raise self.damaged()

    def lengths(self, count: int) -> NDArray[np.int64]:
        """So many lengths, written as numbers are."""
        if count <= 0:
            return np.zeros(0, np.int64)
        part = np.frombuffer(self.data, np.uint8)[self.at : self.at + 4 * count].astype(np.int64)
        ends = np.flatnonzero(part < 128)[:count]
        if len(ends) < count:
            raise self.damaged()
        starts = np.concatenate(([0], ends[:-1] + 1))
        widths = ends + 1 - starts
        shifts = 7 * (np.arange(ends[-1] + 1) - np.repeat(starts, widths))
        if widths.max() > 4 or (out := np.add.reduceat((part[: len(shifts)] & 127) << shifts, starts)).max() > _LONG:
            raise self.damaged()
        self.at += int(ends[-1]) + 1
        return out

    def names(self) -> tuple[NDArray[np.int64], int]:
        """The lengths of all keys, or paths; and how many bytes of them are stored."""
        count = self.count()
        shared, own = self.lengths(count - 1), self.lengths(count)
        lengths = own.copy()
        lengths[1:] += shared
        return lengths, int(own.sum())

    def damaged(self) -> IntegrityError:
        return IntegrityError(f"{self.where} is damaged: at byte {self.at:,} of its content is no number that may be")


def _body(data: bytes, most: int, where: str) -> _Body:
    """What is in it; IntegrityError where that is more than `most` bytes."""
    head = _Body(data, where)
    head.at = _HEADER
    _version, packed = head.count(), head.count()
    content = data[head.at : -_TRAILER]
    if packed == _ZSTD:
        _check_zstd(content, most + _BLOCK, where)  # the last block is told no better than that
        content = _inflate(content, where)
    if len(content) > most:
        raise _too_large(len(data), most, where)
    return _Body(content, where)


def _check_zstd(data: bytes, most: int, where: str) -> None:
    """IntegrityError where this is not one frame of zstd, or is one that may inflate to more than `most` bytes.

    Its header need not tell how many those are, but what each of its blocks may become is bounded.
    """
    if len(data) < 6 or data[:4] != b"\x28\xb5\x2f\xfd":
        raise IntegrityError(f"{where} is damaged: it does not hold a frame of zstd")
    told, whole, summed, named = data[4] >> 6, data[4] >> 5 & 1, data[4] >> 2 & 1, data[4] & 3
    begin = 5 + (not whole) + (0, 1, 2, 4)[named]
    at = begin + (whole, 2, 4, 8)[told]
    says = int.from_bytes(data[begin:at], "little")
    nbytes, last = 0, 0
    while not last and max(nbytes, says) <= most:
        block = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        nbytes += _BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if kind == 3 or at > len(data):
            raise IntegrityError(f"{where} is damaged: its content is a broken frame of zstd")
    if max(nbytes, says) > most:
        raise _too_large(len(data), most, where)
    if at + 4 * summed != len(data):
        raise IntegrityError(f"{where} is damaged: its content is more than a frame of zstd")


def _too_large(nbytes: int, most: int, where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} has {nbytes:,} bytes, and would be inflated to more than {most:,}: no save writes that"
    )


def _inflate(data: bytes, where: str) -> bytes:
    try:
        from numcodecs import zstd  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            "this checkpoint is encoded, and decoding it needs the package numcodecs, which is not installed",
            hint="pip install 'ucformat[zarr]'",
        ) from None
    try:
        return bytes(zstd.decompress(data))
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from None


_MAX_MANIFEST = 64 << 20  # bytes
_MAX_NODE = 256 << 20  # bytes; Orbax lets nodes of 100 MB be
_MAX_NODES = 1 << 20
_FAILURES = (ValueError, TypeError, RuntimeError, OverflowError, KeyError, NotImplementedError)


def read_ocdbt(store: Store, folder: str, sizes: Mapping[str, int]) -> dict[str, Value]:
    """Every value of the newest version, by its key; `sizes` are those of the store's files.

    Raises:
        IntegrityError: a node is damaged, or speaks of bytes that are not there.
        MissingData: a data file is not there.
    """
    prefix = f"{folder}/" if folder else ""
    key = prefix + MANIFEST
    if sizes[key] > _MAX_MANIFEST:
        raise UnsupportedError(f"{store.url}/{key} has {sizes[key]} bytes, too many for a manifest")
    data = store.read(key)
    _check_manifest(data, f"{store.url}/{key}")
    manifest = _dump(store, key, MANIFEST, data, None)
    if manifest.get("config", {}).get("manifest_kind", "single") != "single":
        raise UnsupportedError(f"{store.url}/{key} is one of numbered manifests, which are not read")
    versions = manifest.get("versions") or []
    if not versions:
        raise IntegrityError(f"{store.url}/{key} holds no version")
    newest = max(versions, key=lambda v: v["generation_number"])
    return _walk(store, prefix, newest, sizes)


def _walk(store: Store, prefix: str, version: dict[str, Any], sizes: Mapping[str, int]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    todo = deque([(version["root"].get("location"), version["root_height"], b"")])
    seen: set[tuple[str, int]] = set()  # places in files: what is said of them has many spellings
    while todo:
        location, height, stem = todo.popleft()
        if location is None:  # of an empty tree
            continue
        held = _locate(store, prefix, location, "btreenode", sizes)
        if (held.file, held.offset) in seen or len(seen) >= _MAX_NODES:
            raise IntegrityError(f"{store.url}: its OCDBT tree comes back to the node {location}, or does not end")
        seen.add((held.file, held.offset))
        if held.nbytes > _MAX_NODE:
            raise UnsupportedError(f"{store.url}: the OCDBT node {location} has {held.nbytes} bytes, too many")
        data = store.read(*held)
        _check_node(data, len(stem), f"{store.url}: the OCDBT node {location[:200]}")
        node = _dump(store, held.file, "node", data, f"btreenode::node:0:{held.nbytes}")
        if node["height"] != height:
            raise IntegrityError(f"{store.url}: the OCDBT node {location} is not of the height {height}")
        for entry in node["entries"]:
            name = stem + entry["key"]
            if "location" in entry:
                todo.append((entry["location"], height - 1, stem + entry["subtree_common_prefix"]))
            elif "inline_value" in entry:
                values[_text(name)] = entry["inline_value"]
            else:
                values[_text(name)] = _locate(store, prefix, entry["indirect_value"], "value", sizes)
    return values


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _locate(store: Store, prefix: str, location: str, kind: str, sizes: Mapping[str, int]) -> ByteRange:
    """The range of a file that `<kind>:<base>:<path>:<offset>:<length>` means."""
    parts = location.split(":")
    if len(parts) != 5 or parts[0] != kind or not parts[3].isdecimal() or not parts[4].isdecimal():
        raise IntegrityError(f"{store.url}: {location[:200]!r} is no place of a {kind} in OCDBT")
    file = check_key(prefix + unquote(parts[1]) + unquote(parts[2]))
    offset, nbytes = int(parts[3]), int(parts[4])
    if file not in sizes:
        raise MissingData(f"{store.url}/{file} is missing: values of the checkpoint lie in it")
    if offset + nbytes > sizes[file]:
        raise MissingData(
            f"{store.url}/{file} has {sizes[file]} bytes, but values of the checkpoint reach to byte {offset + nbytes}",
            hint="the file is truncated: restore it from another copy",
        )
    return ByteRange(file, offset, nbytes)


def _dump(store: Store, file: str, name: str, data: bytes, node: str | None) -> dict[str, Any]:
    """What a manifest or a node says, decoded from its bytes."""
    ts = tensorstore()
    context = ts.Context()
    try:
        base = ts.KvStore.open("memory://", context=context).result()
        base.write(name, data).result()
        found: dict[str, Any] = ts.ocdbt.dump(base, node, context=context).result()
    except _FAILURES as error:
        reason = str(error).partition(" [")[0][:300]
        raise IntegrityError(f"{store.url}/{file} is damaged: {reason}") from None
    return found
