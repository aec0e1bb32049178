"""Fingerprints of boxes in a file that is taken in parts: those of the same boxes in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import NO_ELEMENTS, fingerprint_of, total
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs.file_fingerprints import FileFingerprints
from ucformat.schema import ITEMSIZE

NBYTES = 4096
CUT = 16  # bytes, of which parts of the file are multiples


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[TensorInfo, Box, int]]:
    """Boxes of tensors anywhere in a file, also in the same bytes."""
    placed = []
    for n in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex128"]))
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        start = tuple(draw(st.integers(0, 3)) for _ in shape)
        whole = tuple(a + s + draw(st.integers(0, 3)) for a, s in zip(start, shape, strict=True))
        box, unit = Box(start, shape), ITEMSIZE[dtype]
        begin = unit * draw(st.integers(0, (NBYTES - box.size * unit) // unit))
        placed.append((TensorInfo(f"t{n}", "weight", dtype, whole), box, begin))
    return sorted(placed, key=lambda p: p[2])


@given(boxes(), st.lists(st.integers(1, NBYTES // CUT), max_size=20), st.integers(0, 2**32))
def test_parts_add_up_to_each_box(
    placed: list[tuple[TensorInfo, Box, int]], cuts: list[int], seed: int
) -> None:
    data = np.random.default_rng(seed).bytes(NBYTES)
    file = FileFingerprints(placed)
    edges = sorted({0, *(CUT * cut for cut in cuts), NBYTES})
    for a, b in pairwise(edges):
        file.take(memoryview(data)[a:b])
    for n, (info, box, begin) in enumerate(placed):
        elements = np.ndarray(box.shape, f"V{info.itemsize}", data, begin)
        expected = fingerprint_of(elements, info.shape, box)
        assert total([NO_ELEMENTS, *(p for k, p in file.parts if k == n)]) == expected
