"""Encodings of tiles with loss, for the moments of optimizers: blocks of codes of 2 to 8 bits.

`quantize_int8` is for moments in general, and `quantize_adaptive` for embedding tables and their moments, with
a number of bits that depends on that of restores. Both say the largest errors of what will be decoded; decoding is
float32 arithmetic in a fixed order, so it gives the same bits everywhere (docs/adr/0054-codecs-and-patches.md).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from ucformat.errors import IntegrityError, UnsupportedError, UsageError
from ucformat.format.encoding import Encoding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from ucformat.storage.base import Bytes

    Floats = NDArray[np.float32]
    Limits = NDArray[np.float64]

__all__ = [
    "WIDTHS",
    "Quantized",
    "dequantize",
    "quantize_adaptive",
    "quantize_int8",
    "width_for_restores",
]

#: Bits of a code of `quantize_adaptive`.
WIDTHS = (2, 3, 4, 8)
BLOCK = 256  # elements of `quantize_int8` that share a scale
_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_AT_ONCE = 1 << 16  # elements that are computed at once, about: they stay in the cache


class Quantized(NamedTuple):
    """A payload, what it decodes to, and the largest errors of that."""

    encoding: Encoding
    payload: bytes
    decoded: NDArray[Any]
    absolute: float
    relative: float  # to the element; of those that are not zero

    @property
    def octets(self) -> NDArray[np.uint8]:
        """The bytes of what it decodes to."""
        return self.decoded.reshape(-1).view(np.uint8)

    def is_exact(self, elements: NDArray[Any]) -> bool:
        """Whether it decodes to the very bits of the elements."""
        bits = f"u{elements.itemsize}"
        return bool((self.decoded.view(bits) == elements.view(bits)).all())


def quantize_int8(elements: NDArray[Any]) -> Quantized:
    """Quantize to 8 bits in blocks of 256 elements, by the *dynamic* codes of 8-bit optimizers.

    Codes are dense around zero as floats are, over seven powers of ten: with evenly spaced ones most second
    moments of a block would become zero, whose root a step is divided by. They have no sign where no element is
    negative.

    Args:
        elements: of float32, float16 or bfloat16.

    Raises:
        UnsupportedError: of another dtype, or not all finite.
    """
    with np.errstate(invalid="ignore"):  # what is no number is refused below
        signed = bool((elements < 0).any())
    _, bounds, table = _codes(signed=signed)
    scales, codes, limits = [], [], []
    for blocks in _blocks_of(elements, BLOCK):
        largest = np.abs(blocks).argmax(axis=1, keepdims=True)
        scale = np.take_along_axis(blocks, largest, axis=1)  # has a sign, so the largest is exact
        ratios = blocks / np.where(scale, scale, np.float32(1))
        code = table[ratios.view(np.uint32) >> 16]
        code += ratios > bounds[code]
        limits.append(np.abs(scale[:, 0]) * (_HALF_GAP if signed else _HALF_GAP / 2))
        scales.append(scale)
        codes.append(code)
    parts = (*scales, *(code.reshape(-1) for code in codes))
    payload = b"".join((_INT8_HEADER.pack(signed), *(part.tobytes() for part in parts)))
    payload = payload[: _int8_size(elements.size)]  # the last block was filled up
    return _with_errors(Encoding.INT8_BLOCKWISE, payload, elements, BLOCK, limits)


def quantize_adaptive(elements: NDArray[Any], width: int, block: int) -> Quantized:
    """Quantize to evenly spaced codes of a few bits between two bounds for each block, after Check-N-Run.

    The bounds begin as the smallest and the largest element. With fewer than 8 bits, they are brought closer together
    step by step, each time on the side where it costs less, and those with the smallest sum of squared errors are
    kept.

    Args:
        elements: of float32, float16 or bfloat16.
        width: 2, 3, 4 or 8 bits.
        block: elements that share bounds: those of a row.

    Raises:
        UnsupportedError: of another dtype, or not all finite.
    """
    if width not in WIDTHS or not 0 < block < 1 << 32:
        raise UsageError(
            f"codes of {width} bits in blocks of {block:,} are none of the adaptive encoding",
            hint=f"widths are {', '.join(map(str, WIDTHS))} bits, and a block is a row",
        )
    levels = np.float32((1 << width) - 1)
    block = max(1, min(block, elements.size))
    bounds, codes, limits = [], [], []
    part = np.float64(0.5) / levels + (_STEPS * _PART if width < 8 else 0)
    for blocks in _blocks_of(elements, block):
        extent = blocks.max(axis=1).astype(np.float64) - blocks.min(axis=1)
        limits.append(extent * part + np.abs(blocks).max(axis=1) * _ROUNDING)
        low, step = _range(blocks, levels, searched=width < 8)
        bounds.append(np.concatenate((low, step), axis=1))
        codes.append(_nearest(blocks, low, step, levels).astype(np.uint8).reshape(-1))
    packed = _packed(np.concatenate(codes)[: elements.size], width) if codes else b""
    header = _ADAPTIVE_HEADER.pack(width, block)
    payload = b"".join((header, *(part.tobytes() for part in bounds), packed))
    return _with_errors(Encoding.ADAPTIVE, payload, elements, block, limits)


def width_for_restores(restores: int) -> int:
    """The bits that are chosen for a training that is restored so often; the limits are ours."""
    return 2 if restores <= 1 else 3 if restores <= 3 else 4 if restores < 20 else 8


def dequantize(encoding: int, payload: Bytes, out: NDArray[Any], where: str = "the tile") -> None:
    """Decode the payload of a lossy encoding into `out`, of float32, float16 or bfloat16.

    Args:
        where: what is decoded, for messages.

    Raises:
        IntegrityError: the payload is not of so many elements. Nothing was written.
        UnsupportedError: `out` has another dtype.
    """
    _check_dtype(out)
    payload = memoryview(payload)
    with np.errstate(all="ignore"):  # what the numbers are is for checksums to judge
        match encoding:
            case Encoding.INT8_BLOCKWISE:
                _from_int8(payload, out, where)
            case Encoding.ADAPTIVE:
                _from_adaptive(payload, out, where)
            case _:
                raise UsageError(f"{where} has the encoding {encoding}, which is not a lossy one")


# blocks of 256, by dynamic codes: a header, a scale for each block, a code for each element

_INT8_HEADER = struct.Struct("<I")  # 1 where codes have a sign, else 0
#: Half of the longest distance between two codes with a sign, for float32 arithmetic.
_HALF_GAP = 0.9 / 64 / 2 * (1 + 1e-6)


@cache
def _codes(*, signed: bool) -> tuple[Floats, Floats, NDArray[np.uint8]]:
    """The 256 values in ascending order; the bounds between them; and what finds the nearest one.

    The values are 0, 1, and for each of seven powers of ten the middles of equal parts between a tenth of it and
    itself: one part below 10^-6, twice as many each time (twice that without signs, which have half of the codes).

    The last one has, for the upper half of a float32, the code of the smallest value with it. As the bounds are
    further apart than such values, the code of any other is that, or the next one.
    """
    values = [0.0, 1.0]
    for power in range(7):
        parts = 1 << power + (not signed)
        for part in range(parts):
            # a quotient of integers, so that it is rounded once
            value = (2 * parts + 9 * (2 * part + 1)) / (20 * parts * 10 ** (6 - power))
            values += (value, -value) if signed else (value,)
    table: Floats = np.array(sorted(values), np.float32)
    bounds: Floats = np.append((table[1:] + table[:-1]) / np.float32(2), np.float32(np.inf))
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.stack((halves, halves | 0xFFFF)).view(np.float32)
    smallest = np.nan_to_num(ends.min(axis=0), nan=0, posinf=1, neginf=-1)
    return table, bounds, np.searchsorted(bounds[:-1], smallest).astype(np.uint8)


def _int8_size(count: int) -> int:
    return _INT8_HEADER.size + 4 * -(-count // BLOCK) + count


def _from_int8(payload: memoryview, out: NDArray[Any], where: str) -> None:
    if len(payload) != _int8_size(out.size):
        raise _wrong_size(payload, out, where)
    (signed,) = _INT8_HEADER.unpack_from(payload)
    if signed > 1:
        raise IntegrityError(f"{where} is damaged: its codes are of an unknown kind")
    values, _, _ = _codes(signed=bool(signed))
    blocks = -(-out.size // BLOCK)
    scales = np.frombuffer(payload, "<f4", blocks, _INT8_HEADER.size)
    codes = np.frombuffer(payload, np.uint8, out.size, _INT8_HEADER.size + 4 * blocks)
    _decode_blocks(out, codes, BLOCK, lambda code, some: values[code] * scales[some, None])


# evenly spaced codes: a header, two numbers for each block, and codes of so many bits, the lowest first

_ADAPTIVE_HEADER = struct.Struct("<II")  # bits of a code, elements of a block
#: The search goes through so many steps of a part of the range; further on nothing was gained.
_STEPS, _PART = 16, np.float32(1 / 40)
#: By what arithmetic may be off, of the largest number of a block.
_ROUNDING = 4 * np.finfo(np.float32).eps


def _range(blocks: Floats, levels: np.float32, *, searched: bool) -> tuple[Floats, Floats]:
    """The lowest value of each block, and the distance between two codes."""
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        step: Floats = (high - low) / levels
    if not np.isfinite(step).all():
        raise _too_far_apart()
    if not searched:
        return low, step
    part = (high - low) * _PART
    best, least = [low, step], _squares(blocks, low, step, levels)
    for _ in range(_STEPS):
        bounds = ((low + part, high), (low, high - part))
        steps = [(top - bottom) / levels for bottom, top in bounds]
        errors = [
            _squares(blocks, bottom, step, levels)
            for (bottom, _), step in zip(bounds, steps, strict=True)
        ]
        left = errors[0] < errors[1]
        low, high = np.where(left, low + part, low), np.where(left, high, high - part)
        error = np.where(left, *errors)
        better = error < least
        best[0] = np.where(better, low, best[0])
        best[1] = np.where(better, np.where(left, *steps), best[1])
        least = np.where(better, error, least)
    return best[0], best[1]


def _nearest(blocks: Floats, low: Floats, step: Floats, levels: np.float32) -> Floats:
    codes: Floats = blocks - low
    codes /= np.where(step, step, np.float32(1))
    np.rint(codes, out=codes)
    return np.clip(codes, np.float32(0), levels, out=codes)


def _squares(blocks: Floats, low: Floats, step: Floats, levels: np.float32) -> Floats:
    """The sum of squared errors of each block."""
    wrong = _nearest(blocks, low, step, levels)
    wrong *= step
    wrong += low
    wrong -= blocks
    sums: Floats = np.einsum("ij,ij->i", wrong, wrong, dtype=np.float64)[:, None]
    return sums


def _packed(codes: NDArray[np.uint8], width: int) -> bytes:
    """Codes of so many bits, one after another; eight of them have whole bytes."""
    if width == 8:
        return codes.tobytes()
    eights = np.zeros((-(-codes.size // 8), 8), np.uint32)
    eights.reshape(-1)[: codes.size] = codes
    words = np.bitwise_or.reduce(eights << _shifts(width), axis=1)
    packed: bytes = words.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].tobytes()
    return packed[: -(-codes.size * width // 8)]


def _unpacked(packed: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint8]:
    if width == 8:
        return packed
    words = np.zeros((-(-count // 8), 4), np.uint8)
    eights = np.zeros((len(words), width), np.uint8)
    eights.reshape(-1)[: packed.size] = packed
    words[:, :width] = eights
    codes = words.view("<u4") >> _shifts(width) & np.uint32((1 << width) - 1)
    return codes.astype(np.uint8).reshape(-1)[:count]


def _shifts(width: int) -> NDArray[np.uint32]:
    return np.arange(8, dtype=np.uint32) * np.uint32(width)


def _from_adaptive(payload: memoryview, out: NDArray[Any], where: str) -> None:
    if len(payload) < _ADAPTIVE_HEADER.size:
        raise _wrong_size(payload, out, where)
    width, block = _ADAPTIVE_HEADER.unpack_from(payload)
    if width not in WIDTHS or not block:
        raise IntegrityError(
            f"{where} is damaged: codes of {width} bits in blocks of {block:,} are not known"
        )
    blocks = -(-out.size // block)
    at = _ADAPTIVE_HEADER.size + 8 * blocks
    if len(payload) != at + -(-out.size * width // 8):
        raise _wrong_size(payload, out, where)
    bounds = np.frombuffer(payload, "<f4", 2 * blocks, _ADAPTIVE_HEADER.size).reshape(-1, 2)
    codes = _unpacked(np.frombuffer(payload, np.uint8, offset=at), width, out.size)
    _decode_blocks(
        out,
        codes,
        block,
        lambda code, some: code.astype(np.float32) * bounds[some, 1:] + bounds[some, :1],
    )


# what both share

_LOSSLESS = "save this tensor without a lossy encoding"


def _check_dtype(array: NDArray[Any]) -> None:
    if array.dtype not in _DTYPES:
        raise UnsupportedError(f"elements of {array.dtype} have no lossy encoding", hint=_LOSSLESS)


def _blocks_of(elements: NDArray[Any], block: int) -> Iterator[Floats]:
    """The elements as rows of blocks, some at a time; the last block is filled up with its last element."""
    _check_dtype(elements)
    flat = elements.reshape(-1)
    some = max(1, _AT_ONCE // block) * block
    for first in range(0, flat.size, some):
        part = flat[first : first + some].astype(np.float32)
        if not np.isfinite(part).all():
            raise UnsupportedError(
                "elements that are infinite or no numbers have no lossy encoding", hint=_LOSSLESS
            )
        yield np.pad(part, (0, -part.size % block), "edge").reshape(-1, block)


def _decode_blocks(
    out: NDArray[Any],
    codes: NDArray[np.uint8],
    block: int,
    decode: Callable[[NDArray[np.uint8], slice], Floats],
) -> None:
    """Decode codes that are given as rows of blocks, some at a time."""
    flat = out.reshape(-1)
    whole = flat.size // block
    step = max(1, _AT_ONCE // block)
    for first in range(0, whole, step):
        some = slice(first, min(first + step, whole))
        places = slice(some.start * block, some.stop * block)
        flat[places] = decode(codes[places].reshape(-1, block), some).reshape(-1)
    if flat.size > whole * block:
        last = decode(codes[whole * block :][None], slice(whole, whole + 1))
        flat[whole * block :] = last.reshape(-1)


def _with_errors(
    encoding: Encoding,
    payload: bytes,
    elements: NDArray[Any],
    block: int,
    limits: Sequence[Limits],
) -> Quantized:
    """Decode it again, since only this says what will be read.

    Args:
        limits: the error that the encoding promises for each block, before decoded elements are rounded to the dtype.

    Raises:
        IntegrityError: an error is larger: memory or arithmetic of this machine is damaged.
    """
    flat = elements.reshape(-1)
    decoded = np.empty_like(flat)
    dequantize(encoding, payload, decoded)
    absolute = relative = 0.0
    of_block = np.concatenate(limits) if limits else np.empty(0)
    precision: Any = ml_dtypes.finfo(elements.dtype)  # type: ignore[no-untyped-call]
    eps, least = float(precision.eps), float(precision.smallest_subnormal)
    for first in range(0, flat.size, _AT_ONCE):
        exact = np.abs(flat[first : first + _AT_ONCE].astype(np.float64))
        part = decoded[first : first + _AT_ONCE].astype(np.float64)
        wrong = np.abs(part - flat[first : first + _AT_ONCE].astype(np.float64))
        if not np.isfinite(wrong).all():
            raise _too_far_apart()
        limit = of_block[np.arange(first, first + wrong.size) // block]
        if (wrong > limit + (exact + limit) * eps + least).any():
            raise IntegrityError(
                f"elements that were encoded with loss ({encoding.name.lower()}) are further off than "
                "this encoding ever is",
                hint="the memory of this host is damaged, perhaps: test it; nothing was written",
            )
        absolute = max(absolute, float(wrong.max()))
        some = exact != 0
        relative = max(relative, float((wrong[some] / exact[some]).max(initial=0)))
    return Quantized(encoding, payload, decoded.reshape(elements.shape), absolute, relative)


def _too_far_apart() -> UnsupportedError:
    return UnsupportedError("elements are further apart than float32 can tell", hint=_LOSSLESS)


def _wrong_size(payload: memoryview, out: NDArray[Any], where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: its {len(payload):,} bytes do not decode to {out.size:,} elements"
    )
