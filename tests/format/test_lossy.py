"""Lossy encodings: what errors they make is what they say, and what is no such payload is refused."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import IntegrityError, UnsupportedError, UsageError
from ucformat.format import lossy
from ucformat.format.encoding import Encoding
from ucformat.format.lossy import (
    WIDTHS,
    _codes,
    _packed,
    _unpacked,
    dequantize,
    quantize_adaptive,
    quantize_int8,
    width_for_restores,
)
from ucformat.format.lossy_states import LossyCodec

INT8, ADAPTIVE = Encoding.INT8_BLOCKWISE, Encoding.ADAPTIVE
DTYPES = (np.dtype("f4"), np.dtype("f2"), np.dtype(ml_dtypes.bfloat16))


def decoded(kind: Encoding, payload: bytes, like: np.ndarray) -> np.ndarray:
    out = np.full_like(like, 7)
    dequantize(kind, payload, out)
    return out


def moments(count: int, seed: int = 0) -> np.ndarray:
    """Second moments, over several powers of ten."""
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal(count, np.float32) * np.exp(rng.standard_normal(count))
    return (gradients.astype(np.float32) * 1e-4) ** 2


@given(
    st.integers(0, 1200),
    st.sampled_from(DTYPES),
    st.sampled_from((0.0, 1e-42, 1e-8, 1.0, 6e4)),
    st.sampled_from(("signed", "positive", "negative", "one")),
    st.sampled_from((*WIDTHS, "int8")),
    st.integers(1, 300),
    st.integers(0, 2**32),
)
def test_the_errors_are_those_that_are_said(
    count: int, dtype: np.dtype, scale: float, kind: str, width: int | str, block: int, seed: int
) -> None:
    values = np.random.default_rng(seed).uniform(-1, 1, count).astype(np.float32)
    values = {"positive": abs(values), "negative": -abs(values), "one": values * 0 + 1}.get(
        kind, values
    )
    elements = (values * np.float32(scale)).astype(dtype)
    encoding = INT8 if width == "int8" else ADAPTIVE
    if isinstance(width, str):
        found = quantize_int8(elements)
        bound = 0.08 * np.abs(elements.astype("f8")).max(initial=0)
    else:
        found = quantize_adaptive(elements, width, block)
        # bounds move by up to 0.4 of the range where that is better for the others
        bound = np.ptp(elements.astype("f8")) * (1 if width < 8 else 0.51 / 255) if count else 0
    out = decoded(encoding, found.payload, elements)
    wrong = abs(out.astype("f8") - elements.astype("f8"))
    assert found.absolute == wrong.max(initial=0)
    some = elements != 0
    assert found.relative == (wrong[some] / abs(elements[some].astype("f8"))).max(initial=0)
    assert found.absolute <= bound + abs(np.spacing(elements)).astype("f8").max(initial=0)
    assert (out[~some] == 0).all() or encoding is ADAPTIVE


@pytest.mark.parametrize("signed", [True, False])
def test_every_float_gets_the_nearest_dynamic_code(signed: bool) -> None:
    values, bounds, _ = _codes(signed=signed)
    assert len(set(values.tolist())) == 256
    assert (np.diff(values) > 0).all()
    assert values[-1] == 1
    assert bool(values[0] < 0) is signed
    rng = np.random.default_rng(1)
    some = np.concatenate([rng.uniform(0, 1, 200_000), 10 ** rng.uniform(-9, 0, 200_000), values])
    ratios = np.concatenate([some, -some] if signed else [abs(some)]).astype(np.float32)
    blocks = np.ones((len(ratios) // 255, 256), np.float32)  # each has a 1, which is its scale
    blocks[:, 1:] = ratios[: len(blocks) * 255].reshape(-1, 255)
    payload = quantize_int8(blocks).payload
    codes = np.frombuffer(payload, np.uint8, blocks.size, len(payload) - blocks.size)
    assert (codes == np.searchsorted(bounds[:-1], blocks.reshape(-1))).all()


def test_dynamic_codes_keep_small_second_moments() -> None:
    elements = moments(1 << 16)
    out = decoded(INT8, quantize_int8(elements).payload, elements)
    even = decoded(ADAPTIVE, quantize_adaptive(elements, 8, 256).payload, elements)
    missed = [(abs(found - elements) > elements / 2).mean() for found in (out, even)]
    assert missed[0] < 0.02
    assert missed[1] > 0.05


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_searched_range_has_smaller_errors(width: int) -> None:
    rows = np.random.default_rng(3).standard_t(5, (500, 64)).astype(np.float32)
    found = quantize_adaptive(rows, width, 64)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    step = (high - low) / (2**width - 1)
    whole = np.rint((rows - low) / step) * step + low
    squares = ((decoded(ADAPTIVE, found.payload, rows) - rows) ** 2).sum(axis=1)
    assert (squares <= ((whole - rows) ** 2).sum(axis=1) * 1.0001).all()
    assert squares.sum() < 0.9 * ((whole - rows) ** 2).sum()
    assert len(found.payload) == 8 + 500 * 8 + rows.size * width // 8


@given(st.sampled_from(WIDTHS), st.integers(0, 70), st.integers(0, 2**32))
def test_codes_are_packed_without_gaps(width: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << width, count).astype(np.uint8)
    packed = _packed(codes, width)
    number = sum(int(code) << k * width for k, code in enumerate(codes))
    assert packed == number.to_bytes(-(-count * width // 8), "little")
    assert (_unpacked(np.frombuffer(packed, np.uint8), width, count) == codes).all()


def test_what_is_decoded_does_not_change() -> None:
    """Bytes that were written once decode to the same values for ever."""
    int8 = struct.pack("<If", 1, -2.0) + bytes([0, 127, 128, 129, 255])
    expected = np.array([1.9859375, 0, -1.1e-6, -6.5e-6, -2], "f4")
    assert decoded(INT8, int8, expected).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    adaptive = struct.pack("<IIff", 3, 5, -1.0, 0.5) + (0o76210).to_bytes(2, "little")
    out = decoded(ADAPTIVE, adaptive, np.zeros(5, "f4"))
    assert out.tolist() == [-1, -0.5, 0, 2, 2.5]


@pytest.mark.parametrize("quantize", [quantize_int8, lambda e: quantize_adaptive(e, 4, 8)])
def test_what_cannot_be_quantized(quantize) -> None:  # type: ignore[no-untyped-def]
    for dtype in DTYPES:
        for value in (np.nan, np.inf, -np.inf):
            elements = np.zeros(600, dtype)
            elements[599] = value
            with pytest.raises(UnsupportedError, match="infinite or no numbers"):
                quantize(elements)
    for dtype in ("f8", "i4", "c8"):
        with pytest.raises(UnsupportedError, match="no lossy encoding"):
            quantize(np.zeros(6, dtype))
    nothing = quantize(np.zeros(0, "f4"))
    assert (nothing.decoded.size, nothing.absolute, nothing.relative) == (0, 0, 0)


def test_errors_beyond_what_an_encoding_promises_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = moments(1000)
    monkeypatch.setattr(lossy, "_HALF_GAP", lossy._HALF_GAP / 20)
    with pytest.raises(IntegrityError, match="further off than this encoding ever is"):
        quantize_int8(elements)
    monkeypatch.setattr(lossy, "_nearest", lambda blocks, *_: blocks * 0)
    with pytest.raises(IntegrityError, match="further off than this encoding ever is"):
        quantize_adaptive(elements, 8, 100)


def test_ranges_beyond_float32() -> None:
    with pytest.raises(UnsupportedError, match="further apart"):
        quantize_adaptive(np.array([-3e38, 3e38], "f4"), 4, 2)
    with pytest.raises(
        UnsupportedError, match="further apart"
    ):  # the largest would become infinite
        quantize_adaptive(np.array([1.9207188e37, np.finfo("f4").max], "f4"), 8, 2)


def test_a_tile_of_many_blocks_or_of_less_than_one() -> None:
    elements = moments(200_000)
    elements[:256] *= 1000  # the largest errors are in the first block
    out = decoded(ADAPTIVE, (found := quantize_adaptive(elements, 8, 256)).payload, elements)
    assert found.absolute == abs(out.astype("f8") - elements)[:256].max()
    assert len(quantize_adaptive(elements[:10], 4, 1 << 24).payload) == 8 + 8 + 5
    assert quantize_adaptive(elements[:10], 4, 1 << 24).payload[4] == 10


def test_arguments() -> None:
    for width, block in ((5, 8), (4, 0), (4, 1 << 32)):
        with pytest.raises(UsageError, match="none of the adaptive encoding"):
            quantize_adaptive(np.zeros(6, "f4"), width, block)
    with pytest.raises(UsageError, match="not a lossy one"):
        dequantize(Encoding.BLOSC, b"", np.zeros(6, "f4"))
    with pytest.raises(UnsupportedError, match="float64"):
        dequantize(INT8, b"", np.zeros(6, "f8"))
    assert [width_for_restores(n) for n in (0, 1, 2, 3, 4, 19, 20, 100)] == [2, 2, 3, 3, 4, 4, 8, 8]


def test_what_is_no_payload() -> None:
    elements = moments(1000)
    int8, adaptive = quantize_int8(elements).payload, quantize_adaptive(elements, 3, 64).payload
    for kind, good in ((INT8, int8), (ADAPTIVE, adaptive)):
        for bad in (b"", good[:3], good[:-1], good + b"\0", b"\x09" + good[1:]):
            out = np.full_like(elements, 7)
            with pytest.raises(IntegrityError, match=r"^shard 3 is damaged"):
                dequantize(kind, bad, out, "shard 3")
            assert (out == 7).all()
    with pytest.raises(IntegrityError, match="codes of 5 bits"):
        dequantize(ADAPTIVE, struct.pack("<II", 5, 1000) + bytes(8 + 625), elements.copy())
    for block in (0, 1 << 31):
        bad = adaptive[:4] + struct.pack("<I", block) + adaptive[8:]
        with pytest.raises(IntegrityError):
            dequantize(ADAPTIVE, bad, elements.copy())


def test_columns_are_cut_into_blocks() -> None:
    column = moments(1000).reshape(1000, 1)
    quantized = LossyCodec.parse("adaptive:3").quantize(column)
    assert quantized is not None
    assert len(quantized.payload) < column.nbytes / 8
