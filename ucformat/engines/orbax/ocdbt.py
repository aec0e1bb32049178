"""OCDBT, TensorStore's key-value store: find the location of each value in its files.

`manifest.ocdbt` names the root of a B+tree whose nodes are in data files. A leaf contains small
values itself, and the file and byte range of others, which are stored unchanged. TensorStore
decodes nodes in memory, after our own store has read their bytes: so every kind of store works, and
values are read in place.

A manifest or node consists of a magic number, its length, a version, and a body, which may be
compressed with zstd. The body of a node has its height, the paths of data files, and the keys of
its entries, each as the length of the prefix that it shares with the one before and the rest. So a
few kilobytes can expand to gigabytes: of compressed zeros, or of long keys that differ in one byte.
The expanded size is computed before TensorStore decodes them.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote

import numpy as np

from ucformat.engines.orbax.folder import MANIFEST
from ucformat.engines.orbax.zarr_chunks import FAILURES, tensorstore
from ucformat.errors import IntegrityError, MissingData, UnsupportedError
from ucformat.reading.repeats import first_repeated
from ucformat.storage.base import ByteRange, check_key
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Store
    from ucformat.storage.decoded import Value

_MIN_LIMIT = 32 << 20  # bytes of memory that any node may take
_LIMIT_RATIO = 400  # and more per byte of the node: a real entry has ten bytes or more, of offsets that do not compress
# bytes: a manifest has a path of 50 bytes for each of about 16 versions
_MAX_INFLATED_MANIFEST = 32 << 10
_ENTRY_BYTES = 1 << 10  # memory that Python takes for an entry, besides its key and path
_MAX_ENTRIES = 1 << 20  # entries of a node, TensorStore's limit; also of files
_MAX_KEY = 0xFFFF  # bytes of a key or path
_HEADER, _TRAILER = 12, 4  # bytes of the magic number and length; of the checksum
_ZSTD = 1
_BLOCK = 128 << 10  # bytes that a block of zstd inflates to at most


def _check_manifest(data: bytes, where: str) -> None:
    """IntegrityError if a manifest would inflate to far more than any real one."""
    _body(data, _MAX_INFLATED_MANIFEST, where)


def _check_node(data: bytes, stem: int, where: str) -> None:
    """IntegrityError if the entries of a node would take far more memory than its size justifies.

    `stem` is the number of bytes that the nodes above put in front of each of its keys.
    """
    limit = _MIN_LIMIT + _LIMIT_RATIO * len(data)
    body = _body(data, limit, where)
    body.at += 1  # the height
    paths, stored = body.names()
    body.lengths(len(paths))  # of the base paths at their beginnings
    body.at += stored
    keys, _ = body.names()
    nbytes = int(keys.sum() + paths.sum()) + len(keys) * (
        int(paths.max(initial=0)) + stem + _ENTRY_BYTES
    )
    if nbytes > limit:
        raise IntegrityError(
            f"{where} has {len(data):,} bytes, and would take {nbytes:,} in memory: no save "
            "writes that"
        )


class _Body:
    """The decompressed body of a manifest or a node, parsed from its beginning."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def count(self) -> int:
        """A number in groups of seven bits, the lowest first."""
        value = shift = 0
        while self.at < len(self.data) and value <= _MAX_ENTRIES:
            byte = self.data[self.at]
            value |= (byte & 127) << shift
            self.at, shift = self.at + 1, shift + 7
            if byte < 128 and value <= _MAX_ENTRIES:
                return value
        raise self.damaged()

    def lengths(self, count: int) -> NDArray[np.int64]:
        """As many lengths, encoded like numbers."""
        if count <= 0:
            return np.zeros(0, np.int64)
        # At most four bytes each, which is more than a length of up to `_MAX_KEY` needs.
        part = np.frombuffer(self.data, np.uint8)[self.at : self.at + 4 * count].astype(np.int64)
        ends = np.flatnonzero(part < 128)[:count]
        if len(ends) < count:
            raise self.damaged()
        starts = np.concatenate(([0], ends[:-1] + 1))
        widths = ends + 1 - starts
        shifts = 7 * (np.arange(ends[-1] + 1) - np.repeat(starts, widths))
        if widths.max() > 4:
            raise self.damaged()
        out = np.add.reduceat((part[: len(shifts)] & 127) << shifts, starts)
        if out.max() > _MAX_KEY:
            raise self.damaged()
        self.at += int(ends[-1]) + 1
        return out

    def names(self) -> tuple[NDArray[np.int64], int]:
        """The lengths of all keys, or paths; and how many bytes of them are stored."""
        count = self.count()
        shared, stored = self.lengths(count - 1), self.lengths(count)
        lengths = stored.copy()
        lengths[1:] += shared
        return lengths, int(stored.sum())

    def damaged(self) -> IntegrityError:
        return IntegrityError(
            f"{self.where} is damaged: there is no valid number at byte {self.at:,} of its content"
        )


def _body(data: bytes, limit: int, where: str) -> _Body:
    """The body; IntegrityError if it has more than `limit` bytes."""
    head = _Body(data, where)
    head.at = _HEADER
    _version, packed = head.count(), head.count()
    content = data[head.at : -_TRAILER]
    if packed == _ZSTD:
        # the size of the last block is only known to be within a block
        _check_zstd(content, limit + _BLOCK, where)
        content = _inflate(content, where)
    if len(content) > limit:
        raise _too_large(len(data), limit, where)
    return _Body(content, where)


def _check_zstd(data: bytes, limit: int, where: str) -> None:
    """IntegrityError if this is not exactly one frame of zstd, or may inflate to more than `limit` bytes.

    The frame need not declare its size, but the size of each of its blocks is bounded.
    """
    if data[:4] != b"\x28\xb5\x2f\xfd" or not data[4:]:
        raise IntegrityError(f"{where} is damaged: it does not contain a frame of zstd")
    flags = data[4]
    size_flag, single, checksum, dict_flag = flags >> 6, flags >> 5 & 1, flags >> 2 & 1, flags & 3
    # After magic number and flags: the window's size, which a single segment lacks, the id of a
    # dictionary, and the size of the content.
    begin = 5 + (not single) + (0, 1, 2, 4)[dict_flag]
    at = begin + (single, 2, 4, 8)[size_flag]
    declared = int.from_bytes(data[begin:at], "little")
    nbytes, last = 0, 0
    while not last and max(nbytes, declared) <= limit:
        block = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        # The kinds: 0 plain bytes, 1 one byte that is repeated, 2 compressed, 3 reserved.
        nbytes += _BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if kind == 3 or at > len(data):
            raise IntegrityError(f"{where} is damaged: its content is a broken frame of zstd")
    if max(nbytes, declared) > limit:
        raise _too_large(len(data), limit, where)
    if at + 4 * checksum != len(data):
        raise IntegrityError(f"{where} is damaged: its content is more than a frame of zstd")


def _too_large(nbytes: int, limit: int, where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} has {nbytes:,} bytes, and would be inflated to more than {limit:,}: no save "
        "writes that"
    )


def _inflate(data: bytes, where: str) -> bytes:
    try:
        from numcodecs import zstd  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            "this checkpoint is encoded, and decoding it needs the package numcodecs, which is "
            "not installed",
            hint="pip install 'ucformat[zarr]'",
        ) from None
    try:
        return bytes(zstd.decompress(data))
    except (RuntimeError, ValueError) as error:
        raise IntegrityError(f"{where} is damaged: {error}") from None


_MAX_MANIFEST = 64 << 20  # bytes
_MAX_NODE = 256 << 20  # bytes; Orbax allows nodes of 100 MB
_MAX_NODES = 1 << 20


def read_ocdbt(store: Store, folder: str, sizes: Mapping[str, int]) -> dict[str, Value]:
    """Find every value of the newest version.

    Args:
        folder: the folder of the manifest in the store; empty for the root.

    Returns:
        the location of each value by its key, or the value itself if it is in a node.
    """
    prefix = f"{folder}/" if folder else ""
    key = prefix + MANIFEST
    if sizes[key] > _MAX_MANIFEST:
        raise UnsupportedError(f"{store.url}/{key} has {sizes[key]} bytes, too many for a manifest")
    data = store.read(key)
    _check_manifest(data, f"{store.url}/{key}")
    manifest = _dump(store, key, MANIFEST, data, None)
    if manifest.get("config", {}).get("manifest_kind", "single") != "single":
        raise UnsupportedError(
            f"{store.url}/{key} is one of several numbered manifests, which are not supported"
        )
    versions = manifest.get("versions") or []
    if not versions:
        raise IntegrityError(f"{store.url}/{key} contains no version")
    newest = max(versions, key=lambda v: v["generation_number"])
    return _walk(store, prefix, newest, sizes)


def _walk(
    store: Store, prefix: str, version: dict[str, Any], sizes: Mapping[str, int]
) -> dict[str, Value]:
    values: dict[str, Value] = {}
    todo = deque([(version["root"].get("location"), version["root_height"], b"")])
    # files and offsets, as a location can be spelled in many ways
    seen: set[tuple[str, int]] = set()
    while todo:
        location, height, stem = todo.popleft()
        if location is None:  # of an empty tree
            continue
        node_range = _locate(store, prefix, location, "btreenode", sizes)
        if (node_range.file, node_range.offset) in seen or len(seen) >= _MAX_NODES:
            raise IntegrityError(
                f"{store.url}: its OCDBT tree comes back to the node {location}, or does not end"
            )
        seen.add((node_range.file, node_range.offset))
        if node_range.nbytes > _MAX_NODE:
            raise UnsupportedError(
                f"{store.url}: the OCDBT node {location} has {node_range.nbytes} bytes, too many"
            )
        data = store.read(*node_range)
        _check_node(data, len(stem), f"{store.url}: the OCDBT node {location[:200]}")
        node = _dump(store, node_range.file, "node", data, f"btreenode::node:0:{node_range.nbytes}")
        if node["height"] != height:
            raise IntegrityError(
                f"{store.url}: the OCDBT node {location} is not of the height {height}"
            )
        for entry in node["entries"]:
            name = stem + entry["key"]
            if "location" in entry:
                todo.append((entry["location"], height - 1, stem + entry["subtree_common_prefix"]))
            elif "inline_value" in entry:
                values[_text(name)] = entry["inline_value"]
            else:
                value_location = entry["indirect_value"]
                values[_text(name)] = _locate(store, prefix, value_location, "value", sizes)
    repeated = first_repeated(v for v in values.values() if isinstance(v, ByteRange))
    if repeated is not None:
        raise IntegrityError(
            f"{store.url}: its OCDBT tree puts so many values at the same bytes of {repeated} "
            "that they are far more "
            "than it has: no save writes that"
        )
    return values


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _locate(
    store: Store, prefix: str, location: str, kind: str, sizes: Mapping[str, int]
) -> ByteRange:
    """Parse `<kind>:<base>:<path>:<offset>:<length>`, and check that the file has that range."""
    parts = re.fullmatch(rf"{kind}:([^:]*):([^:]*):([0-9]{{1,20}}):([0-9]{{1,20}})", location)
    if parts is None:
        raise IntegrityError(
            f"{store.url}: {location[:200]!r} is not the location of a {kind} in OCDBT"
        )
    file = check_key(prefix + unquote(parts[1]) + unquote(parts[2]))
    offset, nbytes = int(parts[3]), int(parts[4])
    if file not in sizes:
        raise MissingData(f"{store.url}/{file} is missing: it contains values of the checkpoint")
    if offset + nbytes > sizes[file]:
        raise MissingData(
            f"{store.url}/{file} has {sizes[file]} bytes, but values of the checkpoint reach to "
            f"byte {offset + nbytes}",
            hint="the file is truncated: restore it from another copy",
        )
    return ByteRange(file, offset, nbytes)


def _dump(store: Store, file: str, name: str, data: bytes, node: str | None) -> dict[str, Any]:
    """Decode a manifest or a node with TensorStore."""
    ts = tensorstore()
    context = ts.Context()
    try:
        base = ts.KvStore.open("memory://", context=context).result()
        base.write(name, data).result()
        dumped: dict[str, Any] = ts.ocdbt.dump(base, node, context=context).result()
    except FAILURES as error:
        reason = str(error).partition(" [")[0][:300]
        raise IntegrityError(f"{store.url}/{file} is damaged: {reason}") from None
    return dumped


# OCDBT, TensorStore's key-value store: the B+tree and the manifest that locate values in data files.
#
# The format is specified by TensorStore (https://google.github.io/tensorstore/kvstore/ocdbt). A tree
# is written whole, from its sorted keys: leaves of bounded size, one after another, then each level
# above them, and the root last.


_Item = TypeVar("_Item")

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_MAX_INLINE = 1024  # bytes; recorded for later writers, like the next two
_MAX_NODE_WRITTEN = 8 << 20
_ARITY_LOG2 = 4
_CUT = 1 << 20  # bytes of keys and values after which a node ends


class ValueLocation(NamedTuple):
    """A value in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A written node: its first key, place and height, and the sums over all below it."""

    key: bytes
    place: ValueLocation
    height: int
    keys: int
    tree_nbytes: int
    value_nbytes: int


def make_tree(values: Mapping[str, bytes | ValueLocation], file: str) -> tuple[bytes, bytes]:
    """The content of a file with the tree of all values, and that of `manifest.ocdbt`."""
    out = bytearray()
    entries = sorted((key.encode(), value) for key, value in values.items())
    leaves = _cut((len(k) + (len(v) if isinstance(v, bytes) else 16), (k, v)) for k, v in entries)
    level = [_put(out, file, _leaf(part), _sums(part), height=0) for part in leaves]
    while len(level) > 1:
        parts = list(_cut((len(node.key) + 32, node) for node in level))
        height = level[0].height + 1
        level = [_put(out, file, _inner(p), _sums_above(p), height=height) for p in parts]
    return bytes(out), _manifest(bytes(out), level[0])


def _cut(sized: Iterable[tuple[int, _Item]]) -> Iterator[list[_Item]]:
    """The items of each node: at least two, if there are."""
    part: list[_Item] = []
    nbytes = 0
    for size, item in sized:
        if nbytes + size > _CUT and len(part) > 1:
            yield part
            part, nbytes = [], 0
        part.append(item)
        nbytes += size
    yield part


_Sums = tuple[bytes, int, int, int]


def _sums(part: Sequence[tuple[bytes, bytes | ValueLocation]]) -> _Sums:
    return part[0][0], len(part), 0, sum(v.nbytes for _, v in part if isinstance(v, ValueLocation))


def _sums_above(part: Sequence[_Node]) -> _Sums:
    columns = zip(*((n.keys, n.tree_nbytes, n.value_nbytes) for n in part), strict=True)
    keys, tree_nbytes, value_nbytes = map(sum, columns)
    return part[0].key, keys, tree_nbytes, value_nbytes


def _put(out: bytearray, file: str, body: bytes, sums: _Sums, *, height: int) -> _Node:
    """Append a node."""
    node = _document(_NODE_MAGIC, bytes([height]) + body)
    key, keys, below, nbytes = sums
    place = ValueLocation(file, len(out), len(node))
    out += node
    return _Node(key, place, height, keys, below + len(node), nbytes)


def _leaf(part: Sequence[tuple[bytes, bytes | ValueLocation]]) -> bytes:
    located = [v for _, v in part if isinstance(v, ValueLocation)]
    table, numbers = _files(located)
    return b"".join(
        (
            table,
            _names([k for k, _ in part]),
            _varints(v.nbytes if isinstance(v, ValueLocation) else len(v) for _, v in part),
            _varints(int(isinstance(v, ValueLocation)) for _, v in part),
            _varints(numbers[v.file] for v in located),
            _varints(v.offset for v in located),
            *(v for _, v in part if isinstance(v, bytes)),
        )
    )


def _inner(part: Sequence[_Node]) -> bytes:
    table, numbers = _files([n.place for n in part])
    # The zeros are prefixes that all keys of a subtree share: keys are written whole here.
    return table + _names([n.key for n in part], [0] * len(part)) + _places(part, numbers)


def _places(nodes: Sequence[_Node], numbers: Mapping[str, int]) -> bytes:
    """The place and the sums of each node, as columns."""
    rows = (
        (
            numbers[n.place.file],
            n.place.offset,
            n.place.nbytes,
            n.keys,
            n.tree_nbytes,
            n.value_nbytes,
        )
        for n in nodes
    )
    return b"".join(map(_varints, zip(*rows, strict=True)))


def _files(places: Sequence[ValueLocation]) -> tuple[bytes, dict[str, int]]:
    """The table of data files, and the number of each in it."""
    files = sorted({p.file for p in places})
    names = _names([f.encode() for f in files], [0] * len(files))  # no path is relative to another
    return names, {f: n for n, f in enumerate(files)}


def _names(names: Sequence[bytes], lengths: Sequence[int] = ()) -> bytes:
    """How many names, what each shares with the one before, and what is new of it."""
    shared = [_shared(a, b) for a, b in pairwise(names)]
    suffixes = [name[n:] for name, n in zip(names, [0, *shared], strict=True)] if names else []
    return _varints([len(names), *shared, *map(len, suffixes), *lengths]) + b"".join(suffixes)


def _shared(a: bytes, b: bytes) -> int:
    """The length of the common prefix."""
    differing = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def _manifest(nodes: bytes, root: _Node) -> bytes:
    table, numbers = _files([root.place])
    body = (
        sha256(nodes).digest()[:16]  # the id of the database
        + _varints([0, _MAX_INLINE, _MAX_NODE_WRITTEN])  # a single manifest
        + bytes([_ARITY_LOG2])
        + _varints([0])  # new nodes are not compressed
        + table
        + _varints([1, 1])  # one version, the first
        + bytes([root.height])
        + _places([root], numbers)
        + struct.pack("<Q", 1)  # the time of the version
        + _varints([0])  # no older ones
    )
    return _document(_MANIFEST_MAGIC, body)


def _document(magic: int, body: bytes) -> bytes:
    """A manifest or a node, not compressed, with its length and its checksum."""
    data = struct.pack(">I", magic) + struct.pack("<Q", 18 + len(body)) + b"\0\0" + body
    return data + struct.pack("<I", checksum(data))


def _varints(values: Iterable[int]) -> bytes:
    """Numbers in groups of seven bits, the lowest first."""
    out = bytearray()
    for value in values:
        left = value
        while left > 127:
            out.append(left & 127 | 128)
            left >>= 7
        out.append(left)
    return bytes(out)
