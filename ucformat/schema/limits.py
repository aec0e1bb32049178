"""The limits of a checkpoint and of its documents (docs/spec/format.md, "Limits").

`check_json` is for the values of documents that come from users, so its errors say where they are;
`values.loads` keeps the same limits for documents that are read.
"""

from __future__ import annotations

from typing import Any

#: The levels of objects and arrays in a document, its own included: common parsers stop there.
MAX_DEPTH = 128
#: The characters of a name, state, path or url.
MAX_TEXT = 1 << 16

MAX_INTEGER = 1 << 62  # of an integer whose meaning this format defines
MAX_BITS = 1 << 13  # of an integer in a value: Python's JSON parser stops at 4300 digits

MAX_EDGE = 1 << 62  # of a tensor: offsets fit into 64 bits
MAX_DIMS = 64  # of a tensor: torch's own limit
MAX_ARRAY_DIMS = 32  # of an array: TensorStore opens none with more
MAX_SHARDS = 10_000_000  # of an array: readers refuse more before they access any file
MAX_BLOSC = (1 << 31) - 17  # bytes that Blosc encodes at once, of a chunk or tile
MAX_SPAN = 1 << 60  # of offsets and sizes in files
MAX_TILES = 1 << 20  # of an extent
MAX_TILE_BYTES = 1 << 24  # of a tile of an encoded file: bounds what few stored bytes decode to

#: How often documents may name any byte of a file, and bytes of further reads of it for which that
#: does not matter.
MOST_READS, FREE_READS = 16, 64 << 20

MAX_RANKS = 1 << 20  # that save one checkpoint
MAX_BASES = 1 << 12  # of a checkpoint
MAX_CHAIN = 64  # checkpoints of which each is based on the next
MAX_BATCH = 1 << 16  # steps whose deltas are stored together
MOST_COMMITS = 2**53 - 1  # every database and every JSON reader is exact up to it


def check_json(value: Any, label: str, depth: int = MAX_DEPTH) -> None:
    """Check that JSON values keep the limits of documents."""
    # a path is a pair of the path above it and a key, as most are never shown
    waiting: list[tuple[Any, int, tuple[Any, ...]]] = [(value, 0, ())]
    while waiting:
        item, level, path = waiting.pop()
        if isinstance(item, str):
            _check_text(item, label, path)
        elif isinstance(item, dict):
            if len(set(map(str, item))) < len(item):
                raise _error(
                    label, path, "has two keys that are the same text in JSON", "make all keys text"
                )
            for key, inner in item.items():
                if type(key) not in (str, int):
                    raise _error(
                        label, path, f"has the key {ascii(key)[:100]}", "JSON has only text as keys"
                    )
                _check_text(str(key), label, path)
                waiting.append((inner, level + 1, (path, key)))
        elif isinstance(item, list | tuple):
            waiting += [(inner, level + 1, (path, number)) for number, inner in enumerate(item)]
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise _error(
                label,
                path,
                f"is an integer of {item.bit_length():,} bits",
                f"at most {MAX_BITS:,} are stored",
            )
        if level > depth:
            raise _error(
                label,
                path,
                f"is nested deeper than {depth} levels",
                "flatten it, or store it as a file",
            )


def _check_text(text: str, label: str, path: tuple[Any, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        reason = f"is or has the text {text[:100]!a}, which is not Unicode"
        raise _error(label, path, reason, "decode it by another encoding, or store bytes") from None


def _error(label: str, path: tuple[Any, ...], reason: str, advice: str) -> ValueError:
    parts: list[str] = []
    while path and len(parts) < _MAX_NAMED:
        path, part = path
        parts.append(ascii(part)[:100].strip("'"))
    where = ".".join(reversed(parts))
    return ValueError(f"{label}{f' ({where})' if where else ''} {reason}: {advice}")


_MAX_NAMED = 8  # of the innermost keys that an error names
