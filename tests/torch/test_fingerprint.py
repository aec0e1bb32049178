"""Fingerprints of tensors in memory: on any device, and of DTensors in any layout, those of the stored tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torch.ranks import Ranks
from ucformat.errors import UcformatError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.fingerprint import fingerprint_of, text_of, total
from ucformat.geometry.tensor import Piece
from ucformat.schema import ITEMSIZE
from ucformat.torch import fingerprint
from ucformat.torch.state import fingerprint as module
from ucformat.torch.state.elements import elements_of, host_memory

if TYPE_CHECKING:
    from pathlib import Path

#: Without that of pairs of float16, of which PyTorch warns once that it is an experiment.
DTYPES = [
    dtype
    for name in ITEMSIZE
    if isinstance(dtype := getattr(torch, name, None), torch.dtype) and dtype != torch.complex32
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits in any dtype."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 40), max_size=3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return (bits & 1 if dtype == torch.bool else bits).view(dtype).reshape(shape)


@given(tensors(), st.data())
def test_operations_on_a_device_compute_what_the_host_does(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    """Of any piece of a local tensor, wherever that is in the whole; on the host, where the test has no device."""
    shape = tuple(tensor.shape)
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    part = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))
    strides = row_major(shape)
    offset = sum(a * s for a, s in zip(start, strides, strict=True))
    around = [(data.draw(st.integers(0, 30)), data.draw(st.sampled_from([0, 0, 5]))) for _ in shape]
    whole = tuple(a + n + b for n, (a, b) in zip(part, around, strict=True))
    piece = Piece(Box(tuple(a for a, _ in around), part), offset, strides)
    elements = elements_of(piece, host_memory(tensor), tensor.element_size())
    expected = fingerprint_of(elements, whole, piece.box)
    before = data.draw(st.integers(0, 3))  # elements of the memory of which the tensor is a view
    memory = torch.zeros(before + tensor.numel(), dtype=tensor.dtype)
    memory.view(torch.uint8)[before * tensor.element_size() :] = tensor.reshape(-1).view(
        torch.uint8
    )
    view = memory[before:].reshape(shape)
    for at_once in (1 << 22, data.draw(st.integers(1, 500))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_AT_ONCE", at_once)
            found = module.sums_on_device(
                module.piece_in(module._integers(view), piece), whole, piece.box
            )
            assert total(map(torch.Tensor.tolist, found)) == expected


@pytest.mark.parametrize("at_once", [1 << 22, 5000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize(
    ("whole", "start", "part"),
    [
        ((5, 4096), (0, 1024), (5, 2048)),  # rows begin with a block
        ((7, 4096), (2, 1000), (4, 1030)),  # in the middle of one
        ((11, 1280), (1, 30), (10, 700)),  # at one of four places in a block, in turn
        ((3, 2, 3072), (0, 1, 600), (3, 1, 2000)),
        ((4, 3, 1024), (1, 0, 300), (3, 2, 600)),
        ((4, 3, 1280), (1, 0, 300), (3, 2, 600)),  # the same, but of the second dim
        ((9, 1027), (0, 3), (9, 1000)),  # at another place in each row
        ((2, 9, 100), (0, 2, 0), (2, 7, 100)),  # several rows make a longer one
        ((20_000,), (777,), (12_345,)),
    ],
)
def test_rows_of_a_larger_tensor(
    whole: tuple[int, ...],
    start: tuple[int, ...],
    part: tuple[int, ...],
    dtype: torch.dtype,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    count = math.prod(part) * dtype.itemsize
    tensor = torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(part)
    box = Box(start, part)
    elements = elements_of(Piece(box, 0, row_major(part)), host_memory(tensor), dtype.itemsize)
    sums = module.sums_on_device(module._integers(tensor), whole, box)
    assert total(map(torch.Tensor.tolist, sums)) == fingerprint_of(elements, whole, box)


def test_of_plain_tensors() -> None:
    matrix = torch.randn(50, 70)
    whole = Box.whole((50, 70))
    assert fingerprint(matrix) == text_of(fingerprint_of(matrix.numpy(), (50, 70), whole))
    assert fingerprint(matrix.t().contiguous().t()) == fingerprint(matrix)
    assert fingerprint(matrix.t()) != fingerprint(matrix)
    assert fingerprint(torch.nn.Parameter(matrix)) == fingerprint(matrix)
    assert fingerprint(torch.zeros(0, 3)) == "0" * 32
    lazy = torch.complex(matrix, matrix).conj()
    assert fingerprint(lazy) == fingerprint(lazy.resolve_conj())


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(3, device="meta"), torch.ones(3).to_sparse()],
    ids=["meta", "sparse"],
)
def test_what_has_no_elements_of_its_own_is_refused(tensor: Any) -> None:
    with pytest.raises(UcformatError, match="the tensor"):
        fingerprint(tensor)


def test_of_any_layout_on_four_ranks(tmp_path: Path) -> None:
    found = Ranks("tests.torch.fingerprint_program").run("layouts", 4, tmp_path)
    assert len(found[0]) == 3 + 9
    for rows in found:
        assert all(len(set(row)) == 1 for row in rows), rows
