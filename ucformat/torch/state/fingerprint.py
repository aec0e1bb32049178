"""Fingerprints of tensors in memory, on any device, which are those of the same tensors in a checkpoint."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ucformat.errors import UsageError
from ucformat.geometry.box import offset_of, row_major
from ucformat.geometry.fingerprint import (
    BLOCK,
    LANES,
    MODULUS,
    NO_ELEMENTS,
    WORD_BYTES,
    fingerprint_of,
    tables,
    text_of,
    total,
)
from ucformat.jobs.run import default_workers
from ucformat.torch.state.elements import elements_of, host_memory
from ucformat.torch.state.local import coordinate_of, local_of
from ucformat.torch.state.memory import keep_current_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Piece
    from ucformat.torch.state.local import LocalShard

__all__ = ["fingerprint", "piece_fingerprint", "piece_in", "pieces_fingerprints"]

_AT_ONCE = 1 << 22  # elements whose products are in the memory of a device at once
_LARGE = 1 << 16  # elements of a piece that is worth a thread
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def fingerprint(tensor: torch.Tensor) -> str:
    """The fingerprint of a tensor in memory, as `Tensor.fingerprint` is of a stored one.

    Of a DTensor it is that of the whole; all ranks of its mesh call this together, and get the same.

    Args:
        tensor: a plain tensor on any device, or a DTensor.

    Returns:
        32 hexadecimal digits.

    Raises:
        UsageError: the tensor has no elements of its own, such as one on `meta`; or it is sharded
            in a way that is not known.
    """
    shard = local_of("the tensor", "weight", tensor)
    own = [piece_fingerprint(shard, piece) for piece in shard.pieces]
    if not isinstance(tensor, DTensor):
        return text_of(total(own))
    if shard.distribution is None:
        raise UsageError(
            f"how a DTensor with {tensor.placements} is sharded is not known",
            hint="take that of tensor.full_tensor()",
        )
    mesh = tensor.device_mesh
    at = coordinate_of(mesh)
    counted = at is not None and shard.distribution.copy_of(at) == 0
    sums = torch.tensor([_signed(lane) for lane in total(own if counted else ())])
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        device = "cpu" if "gloo" in dist.get_backend(group) else tensor.device
        sums = sums.to(device)
        dist.all_reduce(sums, group=group)
    low, high = sums.tolist()
    return text_of((low % MODULUS, high % MODULUS))


def piece_fingerprint(shard: LocalShard, piece: Piece) -> Sums:
    """The part of a piece in the fingerprint of its tensor, computed where it is."""
    if shard.tensor.device.type == "cpu":
        elements = elements_of(piece, host_memory(shard.tensor), shard.info.itemsize)
        return fingerprint_of(elements, shard.info.shape, piece.box)
    return sums_on_device(shard.tensor, shard.info.shape, piece)


def pieces_fingerprints(
    pieces: Iterable[tuple[LocalShard, Piece]], threads: int | None = None
) -> list[Sums]:
    """The parts of pieces in the fingerprints of their tensors.

    Args:
        threads: how many compute them (None: one for each core).
    """
    with ThreadPoolExecutor(
        threads or default_workers(), initializer=keep_current_device()
    ) as pool:
        sums = [
            pool.submit(piece_fingerprint, shard, piece)
            if piece.box.size >= _LARGE
            else piece_fingerprint(shard, piece)
            for shard, piece in pieces
        ]
        return [part.result() if isinstance(part, Future) else part for part in sums]


def piece_in(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the elements of a piece as a view of the tensor that it is in.

    Args:
        tensor: perhaps a view itself; contiguous on any device but the host.
    """
    at = tensor.storage_offset() + piece.offset
    return tensor.as_strided(piece.box.shape, piece.strides, at)


def sums_on_device(tensor: torch.Tensor, shape: tuple[int, ...], piece: Piece) -> Sums:
    """As `fingerprint_of`, by operations of PyTorch on the device of a tensor, in bounded memory.

    Args:
        tensor: what the piece is in; its offset and strides are those in row-major order.
    """
    if tensor.element_size() <= WORD_BYTES:  # PyTorch cannot copy elements of some dtypes
        tensor = tensor.view(_INTEGERS[tensor.element_size()])
    elements = piece_in(tensor.contiguous(), piece)
    steps = row_major(shape)
    parts = list(_parts(elements, steps, offset_of(piece.box.start, steps)))
    if not parts:
        return NO_ELEMENTS
    low, high = torch.stack(parts).sum(0).tolist()
    return low % MODULUS, high % MODULUS


def _parts(elements: torch.Tensor, steps: tuple[int, ...], first: int) -> Iterator[torch.Tensor]:
    """The sums of parts of elements.

    Args:
        steps: how far apart the numbers of neighbours in each dim are.
        first: the number of the first element.
    """
    if elements.numel() > _AT_ONCE and not elements.is_contiguous():
        for i, inner in enumerate(elements):
            yield from _parts(inner, steps[1:], first + i * steps[0])
        return
    shape, flat = tuple(elements.shape), elements.reshape(-1)
    side_by_side = all(
        n == 1 or step == below
        for n, step, below in zip(shape, steps, row_major(shape), strict=True)
    )
    for begin in range(0, len(flat), _AT_ONCE):
        part = flat[begin : begin + _AT_ONCE]
        if side_by_side:
            yield _sums_of_run(part, first + begin)
        else:
            numbers = torch.arange(begin, begin + len(part), device=part.device)
            indices = torch.unravel_index(numbers, shape)
            yield _sums_at(part, first + sum(i * s for i, s in zip(indices, steps, strict=True)))


def _sums_of_run(elements: torch.Tensor, first: int) -> torch.Tensor:
    """The sums of elements that are side by side in the tensor, from number `first` on."""
    words, count = _words(elements)
    block, begin = divmod(first * count, BLOCK)
    blocks = -(-(begin + len(words)) // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.int64, device=words.device)
    padded[begin : begin + len(words)] = words
    numbers = torch.arange(block, block + blocks, device=words.device)
    return torch.stack(
        [
            ((padded.view(-1, BLOCK) * within).sum(1) * _factor(numbers, lane)).sum()
            for lane, within in enumerate(_tables(words.device))
        ]
    )


def _sums_at(elements: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The sums of elements with these numbers."""
    words, count = _words(elements)
    numbers = (numbers[:, None] * count + torch.arange(count, device=words.device)).reshape(-1)
    return torch.stack(
        [
            (words * within[numbers % BLOCK] * _factor(numbers // BLOCK, lane)).sum()
            for lane, within in enumerate(_tables(words.device))
        ]
    )


def _words(elements: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The words of elements, as int64, and how many an element has."""
    nbytes = min(elements.element_size(), WORD_BYTES)
    # a single element may have any stride, and words of larger ones need it to be 1
    elements = elements.contiguous().as_strided(elements.shape, (1,))
    words = elements.view(_INTEGERS[nbytes]).to(torch.int64)
    return words & ((1 << 8 * nbytes) - 1), elements.element_size() // nbytes


def _factor(blocks: torch.Tensor, lane: int) -> torch.Tensor:
    """The factor of the keys of each block: an odd output of SplitMix64, in signed integers, which wrap alike."""
    x = blocks * LANES + lane + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31) | 1


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Unsigned integers that are held as signed ones, shifted to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(lane: int) -> int:
    return lane - MODULUS if lane >> 63 else lane


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.stack(tables()).astype(np.int64)).to(device)
