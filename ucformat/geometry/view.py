"""Views: a target tensor composed of boxes of source tensors, with permuted axes.

A view turns the names and shapes of one family (Megatron's fused, stacked QKV) into another's (one
q, k and v for each layer) without copying a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucformat.errors import CoverageError, LayoutError
from ucformat.geometry.box import Box, bounding_box
from ucformat.geometry.coverage import prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ucformat.geometry.tensor import Extent, Key, TensorInfo


@dataclass(frozen=True, slots=True)
class BoxPair:
    """A box of a target tensor that equals a box of a source tensor.

    Target dim `i` runs along source dim `axes[i]`; None is a target dim of size 1 that corresponds
    to no source dim. Source dims that `axes` does not name have size 1 in `box`.
    """

    target: Box
    box: Box
    axes: tuple[int | None, ...]

    @classmethod
    def aligned(cls, target: Box, box: Box) -> BoxPair:
        """The part of two boxes of the same shape, with their dims in the same order."""
        return cls(target, box, tuple(range(len(box.shape))))


@dataclass(frozen=True, slots=True)
class View:
    """A target tensor and the parts that tile it, each with its source."""

    info: TensorInfo
    parts: tuple[tuple[Key, BoxPair], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        for source, part in self.parts:
            self._check(source, part)
        targets = [p.target for _, p in self.parts if p.target.size]
        # replicas are fine for `prove`, but one source would shadow the other
        if len(set(targets)) < len(targets):
            twice = next(t for t in targets if targets.count(t) > 1)
            raise CoverageError(f"the view of {self.info.key} takes {twice} from two sources")
        prove(
            self.info,
            ((f"part {i} from {source}", p.target) for i, (source, p) in enumerate(self.parts)),
        )

    def _check(self, source: Key, part: BoxPair) -> None:
        where = f"the view of {self.info.key} takes {part.target} from {part.box} of {source}"
        named = [a for a in part.axes if a is not None]
        if len(part.axes) != len(part.target.shape) or len(set(named)) < len(named):
            raise LayoutError(
                f"{where}, but its axes {part.axes} are not distinct source dims, one for each dim"
            )
        if not all(0 <= a < len(part.box.shape) for a in named):
            raise LayoutError(
                f"{where}, but its axes {part.axes} name a dim that the source does not have"
            )
        if tuple(1 if a is None else part.box.shape[a] for a in part.axes) != part.target.shape:
            raise LayoutError(f"{where}, which has another shape by the axes {part.axes}")
        if any(n != 1 for a, n in enumerate(part.box.shape) if a not in named):
            raise LayoutError(f"{where}, but its axes {part.axes} omit a dim longer than 1")

    def check(self, sources: Callable[[Key], TensorInfo]) -> None:
        """Check the parts against their sources."""
        for source, part in self.parts:
            info = sources(source)
            if info.dtype != self.info.dtype:
                raise LayoutError(
                    f"the view of {self.info.key} is {self.info.dtype}, but its source "
                    f"{info.key} is {info.dtype}",
                    hint="cast after reading, not in a view",
                )
            if len(info.shape) != len(part.box.shape) or not Box.whole(info.shape).contains(
                part.box
            ):
                raise LayoutError(
                    f"the view of {self.info.key} takes {part.box} of {info.key}, which has the "
                    f"shape {info.shape}"
                )

    def extents(
        self, source_extents: Callable[[Key, Box], Iterable[Extent]], within: Box | None = None
    ) -> Iterator[Extent]:
        """The extents of the target: those of the sources, clipped to the parts, with permuted strides.

        Each source is queried once, for the bounding box of all that is taken from it.
        """
        source_parts = [(source, part, _source_box(part, within)) for source, part in self.parts]
        source_boxes: dict[Key, list[Box]] = {}
        for source, _, box in source_parts:
            if box is not None:
                source_boxes.setdefault(source, []).append(box)
        around = {source: bounding_box(boxes) for source, boxes in source_boxes.items()}
        stored = {
            source: list(source_extents(source, box))
            for source, box in around.items()
            if box is not None
        }
        for source, part, box in source_parts:
            for extent in stored.get(source, ()) if box is not None else ():
                clip = extent.box.intersect(part.box)
                if clip is not None:
                    yield _mapped(part, extent, clip, self.info.itemsize)


def _source_box(part: BoxPair, within: Box | None) -> Box | None:
    """The box of the source that a part takes for a box of the target; None if it takes nothing."""
    if within is None:
        return part.box
    clip = part.target.intersect(within)
    if clip is None:
        return None
    start, shape = list(part.box.start), list(part.box.shape)
    for d, a in enumerate(part.axes):
        if a is not None:
            start[a] += clip.start[d] - part.target.start[d]
            shape[a] = clip.shape[d]
    return Box(tuple(start), tuple(shape))


def _mapped(part: BoxPair, extent: Extent, clip: Box, itemsize: int) -> Extent:
    skipped = zip(clip.start, extent.box.start, extent.strides, strict=True)
    strides: list[int] = []
    dense = itemsize  # a dim without a source dim has one element: any stride is right, so use the contiguous one
    for a in reversed(part.axes):
        strides.append(dense if a is None else extent.strides[a])
        dense = strides[-1] * (1 if a is None else clip.shape[a])
    box = Box(
        tuple(t if a is None else t + clip.start[a] - part.box.start[a]
              for t, a in zip(part.target.start, part.axes, strict=True)),
        tuple(1 if a is None else clip.shape[a] for a in part.axes),
    )  # fmt: skip
    return replace(
        extent,
        box=box,
        offset=extent.offset + sum((c - e) * s for c, e, s in skipped),
        strides=tuple(reversed(strides)),
        block=extent.block_of(clip.shape),
    )
