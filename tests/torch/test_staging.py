"""The copy for which training waits: to host memory that another process maps."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torch.test_fragments import raw, tensors
from ucformat.geometry.local import Dim, IndexRun
from ucformat.geometry.tensor import TensorInfo
from ucformat.torch.saving import background as staging
from ucformat.torch.saving.background import HostBuffer, room_for, stage
from ucformat.torch.state.elements import elements_of, map_shared, row_major_bytes
from ucformat.torch.state.local import LocalShard, LocalState, local_of, pieces_in

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def staged(
    locals_: list[LocalShard], pool: ThreadPoolExecutor
) -> list[tuple[TensorInfo, list[bytes]]]:
    """The bytes of each tensor's pieces, as another process finds them."""
    state = LocalState(tuple(locals_))
    buffer = HostBuffer(room_for(state))
    try:
        listed, slots = stage(state, buffer, pool)
        for local in locals_:  # training goes on
            local.tensor.zero_()
        shared = map_shared(buffer.fd, buffer.nbytes)
        out = []
        for (info, pieces), (begin, end) in zip(listed, slots, strict=True):
            memory = shared[begin:end]
            assert begin % 64 == 0
            out.append(
                (
                    info,
                    [
                        row_major_bytes(elements_of(p, memory, info.itemsize)).tobytes()
                        for p in pieces
                    ],
                )
            )
        assert all(a <= b for (_, a), (b, _) in pairwise(slots))
        return out
    finally:
        buffer.close()


@given(st.lists(tensors(), max_size=4))
def test_any_tensors_are_staged_as_they_were(
    pool: ThreadPoolExecutor, found: list[torch.Tensor]
) -> None:
    locals_ = [local_of(f"t{n}", "weight", t) for n, t in enumerate(found)]
    expected = [
        (x.info, [raw(t).tobytes()] if x.pieces else [])
        for x, t in zip(locals_, found, strict=True)
    ]
    assert staged(locals_, pool) == expected


def test_each_piece_of_a_shard_is_staged(pool: ThreadPoolExecutor) -> None:
    """A dim of several runs, in memory that is transposed."""
    tensor = torch.arange(35, dtype=torch.float32).reshape(5, 7).t()
    dims = (
        Dim(7, (IndexRun(range(3)), IndexRun(range(20, 24), 3))),
        Dim(5, (IndexRun(range(1, 3)), IndexRun(range(8, 11), 2))),
    )
    info = TensorInfo("t", "weight", "float32", (30, 30))
    local = LocalShard(info, pieces_in(tensor, dims), tensor)
    cuts = [
        (slice(0, 3), slice(0, 2)),
        (slice(0, 3), slice(2, 5)),
        (slice(3, 7), slice(0, 2)),
        (slice(3, 7), slice(2, 5)),
    ]
    expected = [raw(tensor[cut]).tobytes() for cut in cuts]
    ((_, found),) = staged([local], pool)
    assert found == expected


def test_large_tensors_are_copied_by_several_threads(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_COPY_BYTES", 1000)
    tensor = torch.arange(2501, dtype=torch.float32)
    local = local_of("t", "weight", tensor)
    copies: list = []
    buffer = HostBuffer(room_for(LocalState((local,))))
    try:
        staging._copy_pieces(local, buffer.memory[: local.nbytes], copies)
        assert len(copies) == 11
        for copy in copies:
            copy()
        assert np.array_equal(buffer.memory[: local.nbytes].view(np.float32), tensor.numpy())
    finally:
        buffer.close()


def test_memory_is_asked_for_in_pages_and_given_back() -> None:
    buffer = HostBuffer(1)
    assert buffer.nbytes == mmap.PAGESIZE == os.fstat(buffer.fd).st_size
    assert os.get_inheritable(buffer.fd) is False
    other = map_shared(buffer.fd, buffer.nbytes)
    buffer.memory[7] = 9
    assert other[7] == 9
    fd = buffer.fd
    buffer.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert other[7] == 9  # whoever has it mapped keeps it
    assert HostBuffer(0).nbytes == mmap.PAGESIZE


def test_room_is_that_of_the_slots(pool: ThreadPoolExecutor) -> None:
    found = [torch.ones(n, dtype=torch.uint8) for n in (0, 1, 64, 65, 3)]
    state = LocalState(tuple(local_of(f"t{n}", "weight", t) for n, t in enumerate(found)))
    assert room_for(state) == 0 + 64 + 64 + 128 + 64
    buffer = HostBuffer(room_for(state))
    try:
        _, slots = stage(state, buffer, pool)
        assert slots == ((0, 0), (0, 1), (64, 128), (128, 193), (256, 259))
    finally:
        buffer.close()
