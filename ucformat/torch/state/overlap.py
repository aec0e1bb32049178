"""Finds tensors that share memory, without touching it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.torch.state.local import LocalShard

_MAX_WORK = 1 << 16  # of NumPy's exact test; what takes longer is taken for shared


class Shared(NamedTuple):
    """The numbers of two targets that share memory, and whether they are the same view of it."""

    one: int
    other: int
    same: bool


class _Region(NamedTuple):
    """A box of a target in memory: addresses and strides in bytes."""

    device: str
    low: int
    high: int
    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    target: int


def sharing(targets: Sequence[LocalShard]) -> Iterator[Shared]:
    """Yield pairs of targets that share memory; each target that is one with an earlier view only with that one."""
    first: dict[tuple[object, ...], _Region] = {}
    for number, target in enumerate(targets):
        for region in _regions(number, target):
            one = first.setdefault(region[:-1], region)
            if one.target != number:
                yield Shared(one.target, number, same=True)
    reaching: list[_Region] = []
    for region in sorted(first.values()):
        reaching = [r for r in reaching if r.device == region.device and r.high > region.low]
        for other in reaching:
            if other.target != region.target and _meet(other, region):
                yield Shared(min(other.target, region.target), max(other.target, region.target), same=False)
        reaching.append(region)


def _regions(number: int, target: LocalShard) -> Iterator[_Region]:
    tensor, itemsize = target.tensor, target.tensor.element_size()
    if tensor.is_meta or not tensor.numel() or not target.pieces:
        return
    boxes = [(p.offset, p.box.shape, p.strides) for p in target.pieces]
    if tensor.device.type != "cpu":  # whose pieces do not follow its strides
        boxes = [(0, tuple(tensor.shape), tensor.stride())]
    for offset, shape, strides in boxes:
        dims = [(n, s * itemsize) for n, s in zip(shape, strides, strict=True) if n != 1]
        at = tensor.data_ptr() + offset * itemsize
        span = sum((n - 1) * s for n, s in dims)
        sizes, steps = tuple(n for n, _ in dims), tuple(s for _, s in dims)
        yield _Region(
            str(tensor.device), at, at + span + itemsize, at, sizes, steps, itemsize, str(tensor.dtype), number
        )


def _meet(a: _Region, b: _Region) -> bool:
    shares: Any = np.shares_memory  # whose stub allows no limit
    try:
        return bool(shares(_array(a), _array(b), max_work=_MAX_WORK))
    except np.exceptions.TooHardError:
        return True


def _array(region: _Region) -> np.ndarray:
    """An array in the place of a region, which is never read."""

    class Interface:
        __array_interface__: dict[str, Any] = {  # noqa: RUF012 - read once
            "version": 3,
            "data": (region.at, True),
            "shape": region.shape,
            "strides": region.strides,
            "typestr": f"|V{region.itemsize}",
        }

    return np.asarray(Interface())
