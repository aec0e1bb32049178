"""Parameters as boxes of what is stored: unstacked, joined of halves, and without the padding of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ucformat.errors import IntegrityError
from ucformat.geometry.box import Box
from ucformat.geometry.local import parts_of
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.geometry.view import Part, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.geometry.local import Region
    from ucformat.geometry.tensor import Extent
    from ucformat.sources.contents import Contents, Locate
    from ucformat.sources.megatron.arguments import Arguments
    from ucformat.sources.megatron.stored import StoredKey
    from ucformat.storage.base import Store

__all__ = ["Held", "Opened", "Slab", "add_held", "joined", "unstacked"]


@dataclass(frozen=True, slots=True)
class Held:
    """A whole tensor in one state, and how to find the extents of a box of it (in its own coordinates)."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    boxes: Callable[[], Iterator[Box]]  # the boxes that ranks stored
    extents: Callable[[Box], Iterator[Extent]]


@dataclass(frozen=True, slots=True)
class Slab:
    """One parameter in a stored tensor, at an index of its leading dims."""

    stored: StoredKey
    index: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        return self.stored.shape[len(self.index) :]

    def boxes(self) -> Iterator[Box]:
        """The boxes of it that ranks stored."""
        n = len(self.index)
        whole = Box((*self.index, *[0] * len(self.shape)), (*[1] * n, *self.shape))
        for box in self.stored.boxes():
            if clip := box.intersect(whole):
                yield Box(clip.start[n:], clip.shape[n:])

    def extents(self, box: Box) -> Iterator[Extent]:
        """The extents of a box of it, as boxes of that box."""
        n = len(self.index)
        inside = Box((*self.index, *box.start), (*[1] * n, *box.shape))
        info = TensorInfo(*self.stored.key, self.stored.dtype, box.shape)
        axes = tuple(range(n, n + len(box.shape)))
        view = View(info, (Part(Box.whole(box.shape), info.key, inside, axes),))
        return view.extents(lambda _, box: self.stored.extents(box))


class Opened(Protocol):
    """What must be known of an opened checkpoint to find the parameters in the flat buckets of its optimizer."""

    store: Store
    args: Arguments
    contents: Contents
    weights: dict[str, list[Slab]]


def unstacked(key: Key, slabs: Sequence[Slab]) -> Held:
    """The parameter that these slabs are, one after another along the first dim."""
    first = slabs[0]
    if len(slabs) == 1:
        return Held(key, first.stored.dtype, first.shape, first.boxes, first.extents)
    if len({(s.shape[1:], s.stored.dtype) for s in slabs}) > 1 or not first.shape:
        raise IntegrityError(f"{key}: its two halves have the shapes {[list(s.shape) for s in slabs]}")
    rows = sum(s.shape[0] for s in slabs)
    whole = Box.whole((rows, *first.shape[1:]))
    starts = [sum(s.shape[0] for s in slabs[:i]) for i in range(len(slabs))]

    def moved(box: Box, by: int) -> Box:
        return box.shift((by, *[0] * (len(box.shape) - 1)))

    def boxes() -> Iterator[Box]:
        for slab, at in zip(slabs, starts, strict=True):
            yield from (moved(b, at) for b in slab.boxes())

    def extents(box: Box) -> Iterator[Extent]:
        for slab, at in zip(slabs, starts, strict=True):
            clip = box.intersect(moved(Box.whole(slab.shape), at))
            if clip is not None:
                shift = tuple(a - b for a, b in zip(clip.start, box.start, strict=True))
                for e in slab.extents(moved(clip, -at)):
                    yield replace(e, box=e.box.shift(shift))

    return Held(key, first.stored.dtype, whole.shape, boxes, extents)


def add_held(contents: Contents, held: Held, rows: int) -> None:
    """Add a tensor; the rows from this one on are padding, and kept apart."""
    if not held.shape or rows >= held.shape[0]:
        contents.add(*held.key, held.dtype, held.shape, partial(_part, held, Box.whole(held.shape)))
        return
    rest = held.shape[1:]
    zeros = (0,) * len(rest)
    kept, spare = Box((0, *zeros), (rows, *rest)), Box((rows, *zeros), (held.shape[0] - rows, *rest))
    name, state = held.key
    contents.add(name, state, held.dtype, kept.shape, partial(_part, held, kept))
    contents.add(name, f"{state}.padding", held.dtype, spare.shape, partial(_part, held, spare))


def _part(held: Held, of: Box, within: Box | None) -> Iterator[Extent]:
    """The extents of a box of a tensor, as boxes of that box: those of what lies in `within`, which counts from it."""
    if within is None:
        return held.extents(of)
    return (replace(e, box=e.box.shift(within.start)) for e in held.extents(within.shift(of.start)))


def joined(
    key: Key,
    dtype: str,
    shape: tuple[int, ...],
    parts: Sequence[tuple[Locate, Sequence[Region]]],
) -> Held:
    """The tensor that ranks hold parts of: each its local extents, and the regions of the whole tensor in them."""
    seen: dict[Box, int] = {}
    views: list[Part] = []
    for i, (_, regions) in enumerate(parts):
        mine = [r for r in regions if seen.setdefault(r.box, i) == i]
        views += parts_of(mine, Key(str(i), ""))
    view = View(TensorInfo(*key, dtype, shape), tuple(views))

    def extents(box: Box) -> Iterator[Extent]:
        shift = tuple(-a for a in box.start)
        info = TensorInfo(*key, dtype, box.shape)
        inner = []
        for part in view.parts:
            clip = part.target.intersect(box)
            if clip is not None:
                move = tuple(a - b for a, b in zip(clip.start, part.target.start, strict=True))
                inner.append(
                    Part(clip.shift(shift), part.source, Box(part.box.shift(move).start, clip.shape), part.axes)
                )
        return View(info, tuple(inner)).extents(lambda source, near: parts[int(source.name)][0](near))

    return Held(key, dtype, shape, lambda: (p.target for p in view.parts), extents)
