"""The offsets of parameters in the flat buffers of Megatron's distributed optimizer, and their proof.

The buffers of one rank's model hold its parameters in the reverse order of the module, each aligned to 64 elements; a
buffer is split into buckets between parameters. The files do not name them. They are placed by that rule, which must
fill every bucket exactly; and as the fp32 copy in the buffer rounds to the weight itself, the first and last elements
of each parameter prove its slot when it is read (or at once, if some parameters are frozen or the module may have
several orders).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box
from ucformat.geometry.flat_buffer import align_up, flat_boxes, flat_extents, flat_range
from ucformat.schema import ITEMSIZE
from ucformat.sources.pickle.stand_ins import why_refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.geometry.tensor import Extent
    from ucformat.storage.base import Store

_ALIGN = (64, 1)  # elements; older versions did not align
_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """A flat tensor in files; `locate` gives the extents of a range of it, as boxes of one dim."""

    size: int
    dtype: str
    locate: Callable[[int, int], Iterable[Extent]]


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of one rank's model: its local shape, and the extents of its weight in local coordinates."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    weight: Callable[[], Iterable[Extent]]

    @property
    def size(self) -> int:
        """Number of elements."""
        return Box.whole(self.shape).size


class BufferSlot(NamedTuple):
    """The slot of a parameter: the number of its bucket, and its offset in it, in elements."""

    param: Param
    bucket: int
    start: int


def place(
    params: Sequence[Param],
    sizes: Sequence[int],
    *,
    edges: Sequence[frozenset[int]] | None = None,
    proved: Callable[[BufferSlot], bool] | None = None,
    joined: bool = False,
) -> list[BufferSlot] | None:
    """The slots of parameters (in the order of the module) in buckets of these sizes; None if they do not fit.

    Args:
        edges: offsets in each bucket at which parameters begin or end, in elements, if they are known.
        proved: whether the values in a slot are the parameter's. Without it all parameters must fit.
    """
    for align in _ALIGN:
        slots = _place_params(params, sizes, align, edges, proved, joined)
        if slots is not None:
            return slots
    return None


def _place_params(
    params: Sequence[Param],
    sizes: Sequence[int],
    align: int,
    edges: Sequence[frozenset[int]] | None,
    proved: Callable[[BufferSlot], bool] | None,
    joined: bool,  # noqa: FBT001
) -> list[BufferSlot] | None:
    slots: list[BufferSlot] = []
    bucket = base = at = 0  # `base`: the start of the bucket
    for param in reversed(params):
        if at == sizes[bucket] and at and bucket + 1 < len(sizes):
            bucket, at = bucket + 1, 0
        aligned = base + align_up(at - base, align)
        starts = dict.fromkeys([aligned, *([at] if joined and proved else [])])
        for start in starts:
            slot, end = BufferSlot(param, bucket, start), start + param.size
            if end > sizes[bucket] or (edges and not {start, end} <= edges[bucket]):
                continue
            if proved is None or proved(slot):
                slots.append(slot)
                base, at = base if start == aligned else start, end
                break
        else:
            if proved is None:
                return None
    return slots if bucket == len(sizes) - 1 and at == sizes[bucket] and slots else None


def unproved(params: Iterable[Param], master: FlatTensor) -> str | None:
    """Why nothing proves which states are where in a flat buffer: its fp32 copy or a weight cannot be read; or None."""
    dtype = next((d for d in (master.dtype, *(p.dtype for p in params)) if d not in ITEMSIZE), None)
    return (
        None if dtype is None else f"is where only its weight and its fp32 copy could prove: one {why_refused(dtype)}"
    )


def same_values(store: Store, param: Param, master: FlatTensor, start: int) -> bool:
    """Whether the first and last 64 elements of a parameter are those at this offset of the fp32 copy, rounded."""
    import ml_dtypes
    import numpy as np

    from ucformat.reading.read import read_extents

    if param.dtype not in ("float32", "bfloat16", "float16") or master.dtype != "float32":
        return False
    weight = list(param.weight())
    low = np.dtype(getattr(ml_dtypes, param.dtype, param.dtype))
    n = min(param.size, _SAMPLE)
    for begin in dict.fromkeys((0, param.size - n)):
        one = read_extents(
            store, lambda _: weight, flat_boxes(param.shape, begin, begin + n), low.itemsize, "a parameter"
        )
        other = read_extents(
            store, partial(_located, master, start + begin), [Box((0,), (n,))], ITEMSIZE["float32"], "a flat buffer"
        )
        with np.errstate(all="ignore"):
            if np.frombuffer(other, "<f4").astype(low).tobytes() != one:
                return False
    return True


def _located(flat: FlatTensor, start: int, box: Box) -> Iterable[Extent]:
    """The extents of `box`, which begins at element `start` of a flat buffer."""
    return flat.locate(start, start + box.size)


def in_local(flat: FlatTensor, start: int, shape: tuple[int, ...], within: Box | None) -> Iterator[Extent]:
    """The extents of a tensor stored in a flat buffer, as boxes of the tensor.

    Args:
        within: the box of the tensor that is read; None: all of it.
    """
    first, last = flat_range(shape, within)
    unit = ITEMSIZE[flat.dtype]
    for extent in flat.locate(start + first, start + last):
        begin, (count,) = first + extent.box.start[0], extent.box.shape
        if count > 1 and extent.strides != (unit,):
            raise IntegrityError(f"{extent.file} holds a flat buffer that is not contiguous")
        yield from flat_extents(shape, begin, begin + count, unit, extent.file, extent.offset)
