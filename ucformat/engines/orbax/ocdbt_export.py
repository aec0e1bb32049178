"""OCDBT, TensorStore's key-value store: the B+tree and the manifest that locate values in data files.

The format is specified by TensorStore (https://google.github.io/tensorstore/kvstore/ocdbt). A tree
is written whole, from its sorted keys: leaves of bounded size, one after another, then each level
above them, and the root last.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_MAX_INLINE = 1024  # bytes; recorded for later writers, like the next two
_MAX_NODE = 8 << 20
_ARITY_LOG2 = 4
_CUT = 1 << 20  # bytes of keys and values after which a node ends


class Located(NamedTuple):
    """A value in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that was written: its first key, place and height, and the sums over all nodes below it."""

    key: bytes
    place: Located
    height: int
    keys: int
    tree_nbytes: int
    value_nbytes: int


def make_tree(values: Mapping[str, bytes | Located], file: str) -> tuple[bytes, bytes]:
    """Write the tree of all values.

    Returns:
        The content of that file, and that of `manifest.ocdbt`.
    """
    out = bytearray()
    entries = sorted((key.encode(), value) for key, value in values.items())
    leaves = _cut((len(k) + (len(v) if isinstance(v, bytes) else 16), (k, v)) for k, v in entries)
    level = [_put(out, file, _leaf(part), _sums(part), height=0) for part in leaves]
    while len(level) > 1:
        parts = list(_cut((len(node.key) + 32, node) for node in level))
        level = [
            _put(out, file, _inner(part), _sums_above(part), height=part[0].height + 1)
            for part in parts
        ]
    return bytes(out), _manifest(bytes(out), level[0])


def _cut(sized: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """The items of each node: at least two, if there are."""
    part: list[T] = []
    nbytes = 0
    for size, item in sized:
        if nbytes + size > _CUT and len(part) > 1:
            yield part
            part, nbytes = [], 0
        part.append(item)
        nbytes += size
    yield part


_Sums = tuple[bytes, int, int, int]


def _sums(part: Sequence[tuple[bytes, bytes | Located]]) -> _Sums:
    return part[0][0], len(part), 0, sum(v.nbytes for _, v in part if isinstance(v, Located))


def _sums_above(part: Sequence[_Node]) -> _Sums:
    return (
        part[0].key,
        sum(n.keys for n in part),
        sum(n.tree_nbytes for n in part),
        sum(n.value_nbytes for n in part),
    )


def _put(out: bytearray, file: str, body: bytes, sums: _Sums, *, height: int) -> _Node:
    """Append a node."""
    node = _document(_NODE_MAGIC, bytes([height]) + body)
    key, keys, below, nbytes = sums
    place = Located(file, len(out), len(node))
    out += node
    return _Node(key, place, height, keys, below + len(node), nbytes)


def _leaf(part: Sequence[tuple[bytes, bytes | Located]]) -> bytes:
    located = [v for _, v in part if isinstance(v, Located)]
    table, numbers = _files(located)
    return b"".join(
        (
            table,
            _names([k for k, _ in part]),
            _varints(v.nbytes if isinstance(v, Located) else len(v) for _, v in part),
            _varints(int(isinstance(v, Located)) for _, v in part),
            _varints(numbers[v.file] for v in located),
            _varints(v.offset for v in located),
            *(v for _, v in part if isinstance(v, bytes)),
        )
    )


def _inner(part: Sequence[_Node]) -> bytes:
    table, numbers = _files([n.place for n in part])
    return table + _names([n.key for n in part], [0] * len(part)) + _places(part, numbers)


def _places(nodes: Sequence[_Node], numbers: Mapping[str, int]) -> bytes:
    """The place and the sums of each node, as columns."""
    columns: tuple[Iterable[int], ...] = (
        (numbers[n.place.file] for n in nodes),
        (n.place.offset for n in nodes),
        (n.place.nbytes for n in nodes),
        (n.keys for n in nodes),
        (n.tree_nbytes for n in nodes),
        (n.value_nbytes for n in nodes),
    )
    return b"".join(map(_varints, columns))


def _files(places: Sequence[Located]) -> tuple[bytes, dict[str, int]]:
    """The table of data files, and the number of each in it."""
    files = sorted({p.file for p in places})
    names = _names([f.encode() for f in files], [0] * len(files))  # no path is relative to another
    return names, {f: n for n, f in enumerate(files)}


def _names(names: Sequence[bytes], lengths: Sequence[int] = ()) -> bytes:
    """How many names, the length of each, which begins with a prefix of the one before, and what is new of it."""
    shared = [_shared(a, b) for a, b in pairwise(names)]
    own = [name[n:] for name, n in zip(names, [0, *shared], strict=True)] if names else []
    return _varints([len(names), *shared, *map(len, own), *lengths]) + b"".join(own)


def _shared(a: bytes, b: bytes) -> int:
    """The length of the common prefix."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _manifest(nodes: bytes, root: _Node) -> bytes:
    table, numbers = _files([root.place])
    body = (
        sha256(nodes).digest()[:16]  # the id of the database
        + _varints([0, _MAX_INLINE, _MAX_NODE])  # a single manifest
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
