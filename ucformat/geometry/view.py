"""Views: a target tensor made of boxes of source tensors, axes permuted.

So the names and shapes of one family (Megatron's fused, stacked QKV) become another's (one q, k and v for each layer)
without a byte being copied first.
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

__all__ = ["Part", "View"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the target that is a box of a source.

    Target dim `i` runs along source dim `axes[i]`; None is a target dim of size 1 that no source dim makes. Source
    dims that are not named have size 1 in `box`.
    """

    target: Box
    source: Key
    box: Box
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A target tensor and the parts that tile it; LayoutError or CoverageError where they do not."""

    info: TensorInfo
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        for part in self.parts:
            self._check(part)
        targets = [p.target for p in self.parts if p.target.size]
        if len(set(targets)) < len(targets):  # replicas to `prove`, but here one source would shadow the other
            twice = next(t for t in targets if targets.count(t) > 1)
            raise CoverageError(f"the view of {self.info.key} takes {twice} from two sources")
        prove(self.info, ((f"part {i} from {p.source}", p.target) for i, p in enumerate(self.parts)))

    def _check(self, part: Part) -> None:
        where = f"the view of {self.info.key} takes {part.target} from {part.box} of {part.source}"
        named = [a for a in part.axes if a is not None]
        if len(part.axes) != len(part.target.shape) or len(set(named)) < len(named):
            raise LayoutError(f"{where}, but its axes {part.axes} are not one for each dim, each at most once")
        if not all(0 <= a < len(part.box.shape) for a in named):
            raise LayoutError(f"{where}, but its axes {part.axes} name a dim that the source has not")
        if tuple(1 if a is None else part.box.shape[a] for a in part.axes) != part.target.shape:
            raise LayoutError(f"{where}, which by the axes {part.axes} has another shape")
        if any(n != 1 for a, n in enumerate(part.box.shape) if a not in named):
            raise LayoutError(f"{where}, but its axes {part.axes} leave out a dim longer than 1")

    def check(self, sources: Callable[[Key], TensorInfo]) -> None:
        """LayoutError where a source is of another dtype, or does not have the box that a part takes."""
        for part in self.parts:
            info = sources(part.source)
            if info.dtype != self.info.dtype:
                raise LayoutError(
                    f"the view of {self.info.key} is {self.info.dtype}, but its source {info.key} is {info.dtype}",
                    hint="cast after reading, not in a view",
                )
            if len(info.shape) != len(part.box.shape) or not Box.whole(info.shape).contains(part.box):
                raise LayoutError(
                    f"the view of {self.info.key} takes {part.box} of {info.key}, which has the shape {info.shape}"
                )

    def extents(
        self, source_extents: Callable[[Key, Box], Iterable[Extent]], within: Box | None = None
    ) -> Iterator[Extent]:
        """The target's extents: those of the sources, clipped to the parts, with their strides permuted.

        A source is asked once, for those that meet the box around all that is taken of it; of the target, what meets
        `within` (None: all of it) is needed. An extent that is clipped nowhere keeps its checksum block.
        """
        near = [(part, _source_box(part, within)) for part in self.parts]
        taken: dict[Key, list[Box]] = {}
        for part, box in near:
            if box is not None:
                taken.setdefault(part.source, []).append(box)
        around = {source: bounding_box(boxes) for source, boxes in taken.items()}
        known = {source: list(source_extents(source, box)) for source, box in around.items() if box is not None}
        for part, box in near:
            for extent in known.get(part.source, ()) if box is not None else ():
                clip = extent.box.intersect(part.box)
                if clip is not None:
                    yield _mapped(part, extent, clip, self.info.itemsize)


def _source_box(part: Part, within: Box | None) -> Box | None:
    """The box of the source that a box of the target takes of a part; None where it takes nothing."""
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


def _mapped(part: Part, extent: Extent, clip: Box, itemsize: int) -> Extent:
    skipped = zip(clip.start, extent.box.start, extent.strides, strict=True)
    strides: list[int] = []
    dense = itemsize  # a dim that no source dim makes has one element: any stride serves, so it is as if contiguous
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
        block=extent.block if clip == extent.box else None,
    )
