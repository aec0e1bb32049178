"""How often documents name the same bytes of files: a small file must not cost the reading of far more than its size.

Names that share bytes are common: tied tensors, views of one buffer. So any byte may be named
`MOST_READS` times, and `FREE_READS` bytes of reads come on top; then reading everything takes time
in proportion to the files, whatever they contain. This holds without knowing their sizes, since
bytes that a file lacks are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucformat.schema.limits import FREE_READS, MOST_READS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ucformat.storage.base import ByteRange


def repeated_bytes(begins: NDArray[np.int64], stops: NDArray[np.int64]) -> float:
    """The bytes of reads beyond `MOST_READS` of each byte, of all ranges of one file."""
    at = np.concatenate([begins, stops])
    change = np.concatenate([np.ones(len(begins), np.int64), np.full(len(stops), -1)])
    order = np.argsort(at, kind="stable")
    depth = np.cumsum(change[order])[:-1]
    return float((np.maximum(depth - MOST_READS, 0) * np.diff(at[order]).astype(np.float64)).sum())


def are_repeated(begins: NDArray[np.int64], stops: NDArray[np.int64]) -> bool:
    """Whether ranges of one file name its bytes far more often than any writer does."""
    return len(begins) > MOST_READS and repeated_bytes(begins, stops) > FREE_READS


def first_repeated(ranges: Iterable[ByteRange]) -> str | None:
    """The first file whose bytes are named far more often than any writer does; None if there is none."""
    by_file: dict[str, tuple[list[int], list[int]]] = {}
    for file, offset, nbytes in ranges:
        begins, stops = by_file.setdefault(file, ([], []))
        begins.append(offset)
        stops.append(offset + nbytes)
    ends = (
        (file, np.array(begins, np.int64), np.array(stops, np.int64))
        for file, (begins, stops) in by_file.items()
    )
    return next((file for file, begins, stops in ends if are_repeated(begins, stops)), None)
