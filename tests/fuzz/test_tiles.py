"""Encoded tiles that are damaged, or claim to be large: nothing is written beside the tile, and little is allocated."""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import harmless, mutated
from tests.fuzz.test_inflated import resident
from ucformat.errors import IntegrityError
from ucformat.format.encoding import (
    Encoding,
    apply_overwrite,
    compress,
    decode_tile,
    overwrite_patch,
    xor_patch,
)
from ucformat.format.lossy import dequantize, quantize_adaptive, quantize_int8

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decode_between_others"]

LOSSY = (Encoding.INT8_BLOCKWISE, Encoding.ADAPTIVE)
COUNT = 700  # elements of a tile
_CANARY = b"\xc5" * 64
_FIXED = 4 << 20  # bytes that are allocated whatever the tile is
_TIMES = 12  # the bytes of a tile: for places of elements of one byte


def decode_between_others(kind: int, payload: bytes, itemsize: int, count: int) -> bytes:
    """Decode a tile that lies between bytes which are not its own."""
    nbytes = count * itemsize
    around = bytearray(_CANARY + bytes(nbytes) + _CANARY)
    out = memoryview(around)[64 : 64 + nbytes]
    try:
        if kind in LOSSY:
            dtype = np.float16 if itemsize == 2 else np.float32
            dequantize(Encoding(kind), payload, np.frombuffer(out, dtype, nbytes // 4))
        else:
            decode_tile(kind, payload, out, itemsize)
    finally:
        assert around.startswith(_CANARY)
        assert around.endswith(_CANARY)
    return bytes(out)


@cache
def payloads(kind: Encoding, itemsize: int) -> tuple[bytes, ...]:
    """Some that are right."""
    rng = np.random.default_rng(itemsize)
    changed = rng.random(COUNT) < 0.05
    near = rng.integers(0, 3, (COUNT, itemsize), np.uint8)
    rows = np.repeat(rng.random(COUNT // 10) < 0.1, 10)
    floats = rng.standard_normal(COUNT * itemsize // 4).astype("f4")
    match kind:
        case Encoding.RAW:
            return (near.tobytes(), b"")
        case Encoding.SAME:
            return (b"", b"x")
        case Encoding.BLOSC:
            return tuple(compress(a.tobytes(), itemsize) for a in (near, near * 91, near * 0))
        case Encoding.XOR:
            return tuple(xor_patch(a.tobytes(), near.tobytes(), itemsize) for a in (near, near * 3))
        case Encoding.OVERWRITE:
            patches = (overwrite_patch(near.tobytes(), itemsize, c) for c in (changed, rows))
            return tuple(p for p in patches if p is not None)
        case Encoding.INT8_BLOCKWISE:
            return (quantize_int8(floats).payload, quantize_int8(abs(floats)).payload)
        case Encoding.ADAPTIVE:
            return tuple(quantize_adaptive(floats, width, 64).payload for width in (2, 3, 8))


@settings(max_examples=300)
@given(st.data(), st.sampled_from(Encoding), st.sampled_from((1, 2, 4, 8, 16)))
def test_a_damaged_payload(data: st.DataObject, kind: Encoding, itemsize: int) -> None:
    payload = data.draw(mutated(payloads(kind, itemsize)))
    nbytes = COUNT * itemsize
    harmless(
        lambda: decode_between_others(kind, payload, itemsize, COUNT),
        nbytes + len(payload),
        constant=_FIXED,
        factor=_TIMES,
    )


@given(st.integers(0, 7), st.binary(max_size=200), st.sampled_from((1, 2, 4, 16)))
def test_any_bytes(kind: int, payload: bytes, itemsize: int) -> None:
    harmless(lambda: decode_between_others(kind, payload, itemsize, 100), 400, constant=_FIXED)


MANY = 1 << 30
BOMBS: dict[str, tuple[Encoding, Callable[[], bytes]]] = {
    "zeros": (Encoding.BLOSC, lambda: compress(bytes(200 << 20), 1)),
    "zeros as a patch": (Encoding.XOR, lambda: compress(bytes(200 << 20), 1)),
    "a header": (
        Encoding.BLOSC,
        lambda: struct.pack("<BBBBIII", 2, 1, 0x91, 1, MANY, MANY, 16),
    ),
    "runs": (Encoding.OVERWRITE, lambda: struct.pack("<III", MANY, MANY, 0)),
    "elements": (Encoding.OVERWRITE, lambda: struct.pack("<5I", 1, MANY, 8, 0, MANY - 1)),
    "runs of zeros": (
        Encoding.OVERWRITE,
        lambda: struct.pack("<III", 100, 100, 1 << 16) + compress(bytes(200 << 20), 4),
    ),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_payload_that_claims_to_be_large(what: str) -> None:
    kind, make = BOMBS[what]
    payload = make()
    with resident(8 << 20), pytest.raises(IntegrityError):
        decode_between_others(kind, payload, 1, 1 << 12)


def test_the_memory_of_a_patch_of_a_large_tile() -> None:
    """What is allocated besides the patch itself does not grow with the tile."""
    elements = np.zeros(16 << 20, np.uint8)
    changed = np.zeros(elements.size, np.bool_)
    changed[::12] = True
    patch = overwrite_patch(elements.data, 1, changed)
    assert patch is not None
    out = np.ones_like(elements)
    with resident(int(1.2 * elements.nbytes)):
        apply_overwrite(patch, out.data, 1)
    assert (out == ~changed).all()
