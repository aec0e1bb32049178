"""Placements: the seven ways in which a tensor is laid over mesh axes.

They compose in the order in which a rule lists them, each on the local shape that the last one left. Each may span
several axes: its degree is their product, its index row-major over the axes as listed. `over` takes one axis by
name, or a tuple of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ucformat.errors import LayoutError
from ucformat.geometry.patterns import compile_regex, is_regex

__all__ = ["Flat", "Owner", "Partial", "Placement", "Replicate", "Shard", "Stage", "axes_of"]

Over = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate holds the same: data parallelism, norms and biases under tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along `dim`, which may be negative: by default as `torch.chunk` cuts, the last parts smaller or empty.

    `sizes`: the width for each coordinate. `parts`: the dim is a concatenation of parts, each cut by itself, and the
    results concatenated (fused QKV, SwiGLU); a part is a width or a list of widths, one for each coordinate; where
    the widths do not add up to the dim but divide it they are proportions. `pad_to`: the dim is padded to a multiple
    of this and cut evenly; the padding is not part of the tensor. `even`: what does not divide is an error.
    """

    dim: int
    over: Over
    sizes: tuple[int, ...] | None = None
    parts: tuple[int | tuple[int, ...], ...] | None = None
    pad_to: int | None = None
    even: bool = False

    def __post_init__(self) -> None:
        _normalise(self)
        if not self.over:
            raise LayoutError(f"shard {self.dim} names no axis to shard over")
        if (self.sizes, self.parts, self.pad_to).count(None) < 2:
            raise LayoutError(f"shard {self.dim} takes one of sizes, parts and pad_to, not several")
        if self.pad_to is not None and self.pad_to < 1:
            raise LayoutError(f"shard {self.dim} cannot pad to a multiple of {self.pad_to}")
        widths = [*(self.sizes or ()), *(w for p in self.parts or () for w in ((p,) if isinstance(p, int) else p))]
        if any(w < 0 for w in widths) or self.parts == () or (self.parts and not any(widths)):
            raise LayoutError(f"shard {self.dim} has impossible widths {self.sizes or self.parts}")

    def check_degree(self, degree: int) -> None:
        """LayoutError where `sizes`, or a part's widths, are not one for each coordinate."""
        for widths in (self.sizes, *(self.parts or ())):
            if isinstance(widths, tuple) and len(widths) != degree:
                raise LayoutError(f"shard {self.dim} gives {len(widths)} widths {widths} for {degree} coordinates")


@dataclass(frozen=True, slots=True)
class Flat:
    """The local tensors of a group, flattened row-major, joined in order, padded, and cut over the axes.

    `cut="after_join"` (ZeRO-1/2, FSDP1, Megatron's distributed optimizer): each tensor starts at a multiple of
    `tensor_align` elements, the end is padded to a common multiple of `group_pad * degree` and `total_align`, and
    the buffer is cut in equal slices, so a tensor may straddle ranks. `cut="before_join"` (ZeRO-3): each tensor is
    cut in `degree` equal parts of a multiple of `tensor_align` elements, and each rank joins its parts.

    `group`: `optimizer` (the roster's), `all`, `tensor` (each by itself), or a `/regex/` whose first capture names
    it. `order`: as the roster, reversed, or dealt out as DeepSpeed's `round_robin_gradients` does. `max_elements`: a
    buffer is closed once it has this many elements (ZeRO-3's `sub_group_size`, counted on one rank, or Megatron's
    `bucket_size`, counted on the whole buffer), and the next tensor starts another.
    """

    over: Over
    group: str = "optimizer"
    order: Literal["roster", "reverse", "round_robin"] = "roster"
    cut: Literal["after_join", "before_join"] = "after_join"
    tensor_align: int = 1
    group_pad: int = 1
    total_align: int = 1
    max_elements: int | None = None

    def __post_init__(self) -> None:
        _normalise(self)
        if not self.over:
            raise LayoutError("flat names no axis to cut over")
        for name in ("tensor_align", "group_pad", "total_align", "max_elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"flat {self.group!r} has {name} {value}, which must be at least 1")
        if is_regex(self.group):
            if not compile_regex(self.group).groups:
                raise LayoutError(f"the group {self.group!r} has no capture to name the group by")
        elif self.group not in ("optimizer", "all", "tensor"):
            raise LayoutError(f"unknown group {self.group!r}", hint="it is optimizer, all, tensor or a /regex/")


@dataclass(frozen=True, slots=True)
class Stage:
    """Only one pipeline stage holds it: `index`, or the stage whose layers include the tensor's.

    `starts` gives the first layer of each stage; the layer is the capture `layer`, or else the first, of the rule's
    `/regex/`. With several times as many starts as stages, the stages take turns (interleaved virtual stages).
    """

    over: Over
    index: int | None = None
    starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _normalise(self)
        if not self.over:
            raise LayoutError("stage names no axis")
        if (self.index is None) == (self.starts is None):
            raise LayoutError("stage takes either an index or the first layers of all stages")
        if self.starts is not None and list(self.starts) != sorted(self.starts):
            raise LayoutError(f"the first layers of the stages, {list(self.starts)}, do not ascend")


@dataclass(frozen=True, slots=True)
class Owner:
    """Only the coordinate with this index over the axes, by default over the whole mesh, holds it."""

    index: int = 0
    over: Over = ()

    def __post_init__(self) -> None:
        _normalise(self)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each coordinate holds its own value; reduce to read. As a target it is Replicate."""

    reduction: Literal["mean"] = "mean"
    over: Over = ()

    def __post_init__(self) -> None:
        _normalise(self)


Placement = Replicate | Shard | Flat | Stage | Owner | Partial


def axes_of(placement: Placement) -> tuple[str, ...]:
    """The axes that a placement names."""
    return () if isinstance(placement, Replicate) else tuple(placement.over)


def _normalise(placement: Shard | Flat | Stage | Owner | Partial) -> None:
    over = (placement.over,) if isinstance(placement.over, str) else tuple(placement.over)
    object.__setattr__(placement, "over", over)
