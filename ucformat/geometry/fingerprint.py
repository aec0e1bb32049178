"""Fingerprints of tensors, which add up: the same in memory, in every form, and under every layout.

A fingerprint is the sum over the elements of a tensor of their bits times a key of their place,
modulo 2^64 in two lanes (docs/spec/format.md, "Fingerprints"). So that of a tensor is the sum of those of its
parts, whoever has them. It finds accidents, not attacks: whoever chooses the values can choose them
so that it stays the same.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ucformat.geometry.box import offset_of, row_major

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucformat.geometry.box import Box

try:
    from ucformat._native import fingerprint as _native_sums

    NATIVE = True
except ImportError:
    NATIVE = False

#: The sums of the two lanes.
Sums = tuple[int, int]
Words = NDArray[np.unsignedinteger[Any]]

NO_ELEMENTS: Sums = (0, 0)
LANES = 2
WORD_BYTES = 4  # of an element that is larger, which has several
BLOCK = 1024  # words that share the number of their block
_AT_ONCE = 1 << 16  # words of which Python computes the keys at once
MODULUS = 1 << 64


def fingerprint_of(elements: NDArray[np.generic], shape: Sequence[int], box: Box) -> Sums:
    """The part of a box in the fingerprint of a tensor.

    Args:
        elements: those of the box, anywhere in memory.
        shape: that of the whole tensor.
    """
    # NumPy has no dim left for the words of an element of an array that has all
    longer = [dim for dim, n in enumerate(elements.shape) if n != 1]
    words, count = _words(elements.squeeze())
    steps = row_major((*shape, count))
    first = offset_of((*box.start, 0), steps)
    steps = (*(steps[dim] for dim in longer), steps[-1])
    if NATIVE:
        return _native_sums(words.data, steps, first)
    return _sums_in_python(words, steps, first)


def total(parts: Iterable[Sums]) -> Sums:
    """The fingerprint of all elements of parts that have none in common."""
    low = high = 0
    for a, b in parts:
        low, high = low + a, high + b
    return low % MODULUS, high % MODULUS


def added(a: bytes, b: bytes) -> bytes:
    """The sums of as many fingerprints, lane by lane, of each of which two have parts; one may be empty: no parts."""
    if not a or not b:
        return a or b
    both: NDArray[np.uint64] = np.frombuffer(a, "<u8") + np.frombuffer(b, "<u8")
    return both.tobytes()


def packed_sums(parts: Iterable[tuple[int, Sums]], count: int) -> bytes:
    """The sums of so many fingerprints, lane by lane, from parts of them by their numbers."""
    sums = [NO_ELEMENTS] * count
    for number, part in parts:
        sums[number] = total((sums[number], part))
    return np.array(sums, "<u8").tobytes()


def summed(numbers: Sequence[int], sums: NDArray[np.uint64], count: int) -> bytes:
    """As `packed_sums`, from a row of sums for each number."""
    out = np.zeros((count, LANES), "<u8")
    np.add.at(out, numbers, sums)
    return out.tobytes()


def unpacked_sums(data: bytes) -> list[Sums]:
    """What `packed_sums` has packed."""
    return [(low, high) for low, high in np.frombuffer(data, "<u8").reshape(-1, LANES).tolist()]


def text_of(sums: Sums) -> str:
    """A fingerprint as 32 hexadecimal digits."""
    return "".join(f"{lane:016x}" for lane in sums)


def texts_of(sums: NDArray[np.uint64]) -> list[str]:
    """Each row as `text_of` writes it."""
    text = sums.astype(">u8").tobytes().hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def _words(elements: NDArray[np.generic]) -> tuple[Words, int]:
    """The words of elements, in a dim of their own, and how many an element has."""
    nbytes = min(elements.itemsize, WORD_BYTES)
    count = elements.itemsize // nbytes
    words: Words = elements.view([("words", f"<u{nbytes}", (count,))])["words"]
    return words, count


def _sums_in_python(words: Words, steps: Sequence[int], first: int) -> Sums:
    """The sums of words; `steps` are how far the next one in each dim is in the tensor."""
    if words.size > _AT_ONCE:
        dim = int(np.argmax(words.shape))
        half = words.shape[dim] // 2
        at = (slice(None),) * dim
        return total(
            (
                _sums_in_python(words[(*at, slice(half))], steps, first),
                _sums_in_python(words[(*at, slice(half, None))], steps, first + half * steps[dim]),
            )
        )
    places = np.full(words.shape, first, np.uint64)
    for dim, (n, step) in enumerate(zip(words.shape, steps, strict=True)):
        along = np.arange(n, dtype=np.uint64) * np.uint64(step)
        places += along.reshape(-1, *(1,) * (words.ndim - dim - 1))
    block, within = np.divmod(places, np.uint64(BLOCK))
    low, high = (
        int(
            (
                table[within]
                * (_splitmix64(block * np.uint64(LANES) + np.uint64(lane)) | 1)
                * words
            ).sum()
        )
        for lane, table in enumerate(tables())
    )
    return low, high


@cache
def tables() -> list[NDArray[np.uint64]]:
    """For each lane, odd numbers below 2^32, by the place within a block."""
    places = np.arange(BLOCK, dtype=np.uint64) * np.uint64(LANES)
    lanes = (~(places + np.uint64(lane)) for lane in range(LANES))
    return [_splitmix64(seeds) & np.uint64(0xFFFFFFFF) | np.uint64(1) for seeds in lanes]


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The first output of SplitMix64 of each seed."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
