"""Fingerprints of tensors in memory, on any device, which are those of the same tensors in a checkpoint."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ucformat.errors import UsageError
from ucformat.geometry.box import Box, offset_of, row_major
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
from ucformat.storage.concurrency import grouped
from ucformat.torch.state.elements import blocks_of, dense_elements, elements_of, host_memory
from ucformat.torch.state.local import coordinate_of, local_of
from ucformat.torch.state.sharded import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.geometry.fingerprint import Sums
    from ucformat.geometry.tensor import Piece, TensorInfo
    from ucformat.torch.state.local import LocalShard

__all__ = ["fingerprint", "piece_in", "pieces_fingerprints"]

_AT_ONCE = 1 << 22  # elements whose products are in the memory of a device at once
_LARGE = 1 << 16  # elements of a piece that is worth a thread
_SMALL_BYTES = 64 << 10  # of a piece that is copied to the host rather than computed on a device
_COPIED_BYTES = 32 << 20  # that are copied to the host at once
_SHORT_ROW = BLOCK // 2  # words of rows that are not worth being padded to blocks
_LONG_PERIOD = 8  # of the places in a block at which rows begin: not worth a call for each
_KEPT_FACTORS = 1 << 20  # blocks whose factors are kept on a device, in 16 MiB
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
    own = pieces_fingerprints((shard, piece) for piece in shard.pieces)
    if not is_dtensor(tensor):
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


def pieces_fingerprints(
    pieces: Iterable[tuple[LocalShard, Piece]], threads: int | None = None
) -> list[Sums]:
    """The parts of pieces in the fingerprints of their tensors, computed where these are.

    From devices nothing is copied but the sums, all at once, and small pieces, many at once.

    Args:
        threads: how many compute on the host (None: one for each core).
    """
    pieces = list(pieces)
    devices = {shard.tensor.device for shard, _ in pieces}
    begun = {d: _DeviceSums(d, pieces) for d in devices if d.type != "cpu"}
    with ThreadPoolExecutor(threads or default_workers()) as pool:
        sums = [
            NO_ELEMENTS
            if shard.tensor.device in begun
            else pool.submit(_host_sums, shard, piece)
            if piece.box.size >= _LARGE
            else _host_sums(shard, piece)
            for shard, piece in pieces
        ]
        out = [part.result() if isinstance(part, Future) else part for part in sums]
    for on_device in begun.values():
        for number, part in on_device.sums():
            out[number] = total((out[number], part))
    return out


def _host_sums(shard: LocalShard, piece: Piece) -> Sums:
    elements = elements_of(piece, host_memory(shard.tensor), shard.info.itemsize)
    return fingerprint_of(elements, shard.info.shape, piece.box)


class _DeviceSums:
    """The sums of pieces on a device, which computes while others do."""

    def __init__(self, device: torch.device, pieces: Sequence[tuple[LocalShard, Piece]]) -> None:
        self._numbers: list[int] = []
        self._parts: list[torch.Tensor] = []
        self._copied: list[_Copied] = []
        for number, (shard, piece) in enumerate(pieces):
            if shard.tensor.device != device:
                continue
            elements = piece_in(_integers(shard.tensor).contiguous(), piece)
            if elements.nbytes > _SMALL_BYTES and _computes_exactly(device):
                parts = sums_on_device(elements, shard.info.shape, piece.box)
                self._parts += parts
                self._numbers += [number] * len(parts)
            else:
                self._copied += [
                    _Copied(number, shard.info, box, _within(elements, piece.box, box))
                    for box in blocks_of(piece.box, shard.info.itemsize)
                ]

    def sums(self) -> Iterator[tuple[int, Sums]]:
        """The sums of parts of pieces, by the numbers of these."""
        if self._parts:
            rows = torch.stack(self._parts).tolist()
            for number, (low, high) in zip(self._numbers, rows, strict=True):
                yield number, (low % MODULUS, high % MODULUS)
        for group in grouped(self._copied, lambda part: part.elements.nbytes, _COPIED_BYTES):
            flat = (part.elements.contiguous().reshape(-1).view(torch.uint8) for part in group)
            memory, at = torch.cat(list(flat)).cpu().numpy(), 0
            for number, info, box, elements in group:
                own, at = memory[at:], at + elements.nbytes
                own_elements = dense_elements(box.shape, own, info.itemsize)
                yield number, fingerprint_of(own_elements, info.shape, box)


class _Copied(NamedTuple):
    """A box of a piece that is copied to the host, and its elements on a device."""

    number: int
    info: TensorInfo
    box: Box
    elements: torch.Tensor


def _within(elements: torch.Tensor, whole: Box, box: Box) -> torch.Tensor:
    at = zip(box.start, whole.start, box.shape, strict=True)
    return elements[tuple(slice(a - b, a - b + n) for a, b, n in at)]


@lru_cache(maxsize=64)
def _computes_exactly(device: torch.device) -> bool:
    """Whether a device has the operations that are needed, and its integers wrap as those of the host do."""
    words = np.concatenate(tables()).astype(np.uint32).view(np.int32)
    try:
        for width in (BLOCK, BLOCK + 3):  # rows that begin with a block, and at any place in one
            shape, box = (9, 7, width), Box((3, 2, 0), (2, 1, BLOCK))
            sample = torch.from_numpy(words.reshape(box.shape)).to(device)
            parts = torch.stack(sums_on_device(sample, shape, box)).tolist()
            if total(parts) != fingerprint_of(words.reshape(box.shape), shape, box):
                return False
    except RuntimeError:
        return False
    return True


def piece_in(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the elements of a piece as a view of the tensor that it is in.

    Args:
        tensor: perhaps a view itself; contiguous on any device but the host.
    """
    at = tensor.storage_offset() + piece.offset
    return tensor.as_strided(piece.box.shape, piece.strides, at)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, if it has no larger elements than words: PyTorch cannot copy those of some dtypes."""
    return (
        tensor.view(_INTEGERS[tensor.element_size()])
        if tensor.element_size() <= WORD_BYTES
        else tensor
    )


def sums_on_device(elements: torch.Tensor, shape: tuple[int, ...], box: Box) -> list[torch.Tensor]:
    """As `fingerprint_of`, by operations of PyTorch on the device of elements, in bounded memory.

    Returns:
        the sums of parts: the lanes of each, as signed integers.
    """
    steps = row_major(shape)
    return list(_parts(elements, steps, offset_of(box.start, steps)))


def _parts(elements: torch.Tensor, steps: tuple[int, ...], first: int) -> Iterator[torch.Tensor]:
    """The sums of parts of elements.

    Args:
        steps: how far apart the numbers of neighbours in each dim are.
        first: the number of the first element.
    """
    shape = tuple(elements.shape)
    if elements.numel() > _AT_ONCE:
        number = max(1, _AT_ONCE * shape[0] // elements.numel())
        for begin in range(0, shape[0], number):
            part, start = elements[begin : begin + number], first + begin * steps[0]
            if number == 1 and len(shape) > 1:
                yield from _parts(part[0], steps[1:], start)
            else:
                yield from _parts(part, steps, start)
        return
    run, outer = 1, len(shape)  # elements side by side, and the number of dims of such rows
    while outer and (shape[outer - 1] == 1 or steps[outer - 1] == run):
        outer -= 1
        run *= shape[outer]
    if not outer:
        yield _sums_of_rows(elements.reshape(1, -1), first)
        return
    count = max(1, elements.element_size() // WORD_BYTES)
    # after so many of a dim, rows begin at the same place in a block again
    period, *others = (
        1 if n == 1 else BLOCK // gcd(step * count, BLOCK)
        for n, step in zip(shape[:outer], steps, strict=False)
    )
    if run * count < _SHORT_ROW or period > _LONG_PERIOD or max(others, default=1) > 1:
        yield _sums_at(elements.reshape(-1), first + _numbers(shape, steps, elements.device))
        return
    for begin in range(min(period, shape[0])):
        rows = elements[begin::period]
        numbers = _numbers(
            rows.shape[:outer], (steps[0] * period, *steps[1:outer]), elements.device
        )
        blocks = numbers * count // BLOCK
        yield _sums_of_rows(rows.reshape(-1, run), first + begin * steps[0], blocks)


def _numbers(shape: Sequence[int], steps: Sequence[int], device: torch.device) -> torch.Tensor:
    """The numbers of all indices of a shape, in its row-major order."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for n, step in zip(shape, steps, strict=True):
        numbers = (numbers[:, None] + torch.arange(n, device=device) * step).view(-1)
    return numbers


def _sums_of_rows(
    elements: torch.Tensor, first: int, row_blocks: torch.Tensor | None = None
) -> torch.Tensor:
    """The sums of rows of elements that are side by side in the tensor.

    Args:
        first: the number of the first element.
        row_blocks: how many blocks further than the first row each of them begins (None: there is
            one row).
    """
    words, count = _words(elements)
    block, begin = divmod(first * count, BLOCK)
    blocks = -(-(begin + words.shape[1]) // BLOCK)
    if blocks * BLOCK != words.shape[1]:
        padded = words.new_zeros(len(words), blocks * BLOCK)
        padded[:, begin : begin + words.shape[1]] = words
        words = padded
    signed, bias = _signed_words(words.view(-1, blocks, BLOCK))
    sums = (signed * _tables(words.device)[:, None, None]).sum(-1)
    sums += _bias_sums(words.device, bias)[:, None, None]
    if row_blocks is None and block + blocks <= _KEPT_FACTORS:
        kept = _kept_factors(words.device, 1 << (block + blocks - 1).bit_length())
        return (sums[:, 0] * kept[:, block : block + blocks]).sum(1)
    numbers = torch.arange(block, block + blocks, device=words.device)[None]
    numbers = numbers if row_blocks is None else row_blocks[:, None] + numbers
    return (sums * _factors(numbers)).sum((1, 2))


def _sums_at(elements: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The sums of elements with these numbers."""
    words, count = _words(elements[:, None])
    numbers = numbers[:, None] * count + torch.arange(count, device=words.device)
    signed, bias = _signed_words(words)
    keys = _tables(words.device)[:, numbers % BLOCK] * _factors(numbers // BLOCK)
    return (signed * keys).sum((1, 2)) + keys.sum((1, 2)) * bias


def _words(elements: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The words of rows of elements as signed integers, or bytes, and how many an element has."""
    nbytes = min(elements.element_size(), WORD_BYTES)
    # a single element may have any stride, and words of larger ones need it to be 1
    dense = elements.contiguous().as_strided(elements.shape, (elements.shape[1], 1))
    return dense.view(_INTEGERS[nbytes]), elements.element_size() // nbytes


def _signed_words(words: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Words less a bias, which is returned, too: so they need not be converted to wider ones first."""
    if words.dtype == torch.uint8:
        return words, 0
    bias = 1 << 8 * words.element_size() - 1
    return words ^ -bias, bias


def _factors(blocks: torch.Tensor) -> torch.Tensor:
    """The factors of the keys of blocks for each lane: odd outputs of SplitMix64; signed integers wrap alike."""
    lanes = torch.arange(LANES, device=blocks.device).view(-1, *(1,) * blocks.ndim)
    x = blocks * LANES + lanes + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31) | 1


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Unsigned integers that are held as signed ones, shifted to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(lane: int) -> int:
    return lane - MODULUS if lane >> 63 else lane


# What is kept on devices is copied there, and not computed there: any stream may use it at once.


@lru_cache(maxsize=16)
def _tables(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.stack(tables()).astype(np.int64)).to(device)


@lru_cache(maxsize=64)
def _bias_sums(device: torch.device, bias: int) -> torch.Tensor:
    """The sums of a block of words that are the bias."""
    return (_tables(torch.device("cpu")).sum(1) * bias).to(device)


@lru_cache(maxsize=64)
def _kept_factors(device: torch.device, blocks: int) -> torch.Tensor:
    """The factors of the first blocks of a tensor."""
    return _factors(torch.arange(blocks)).to(device)
