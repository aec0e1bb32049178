"""Placements: the ways to distribute a tensor over mesh axes; and rules, which assign placements to tensors.

Placements compose in the order in which a rule lists them, each on the local shape that the
previous one left. Each may span several axes: its degree is the product of their sizes, its index
is row-major over the axes as listed. `over` takes the name of one axis, or a tuple of names.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ucformat.errors import LayoutError, UsageError
from ucformat.geometry.box import unravel
from ucformat.geometry.patterns import Pattern, compile_regex, is_regex

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# Meshes: named axes, and the rank at each coordinate.


_MAX_RANKS = 1 << 22  # of a mesh, because each rank is listed


class Mesh:
    """Named axes and their sizes, slowest first; immutable.

    Args:
        ranks: the rank at each coordinate, in row-major order of coordinates (default: 0, 1, 2, …).
    """

    __slots__ = ("_index", "axes", "ranks", "size")

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        self.axes: dict[str, int] = dict(axes)
        for axis, n in self.axes.items():
            if n < 1:
                raise LayoutError(f"mesh axis {axis!r} has the invalid size {n}")
        self.size = math.prod(self.axes.values())
        if self.size > _MAX_RANKS:
            raise LayoutError(
                f"a mesh of {self.size if self.size < 1 << 63 else 'far too many'} ranks is too "
                "large"
            )
        self.ranks: tuple[int, ...] = tuple(range(self.size) if ranks is None else ranks)
        if sorted(self.ranks) != list(range(self.size)):
            raise LayoutError(
                f"mesh {self} needs each of the ranks 0 … {self.size - 1} once, but lists "
                f"{len(self.ranks)} ranks",
                hint="ranks are given in row-major order of coordinates, the last axis fastest",
            )
        self._index = {rank: i for i, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank: its index on each axis."""
        if rank not in self._index:
            raise UsageError(f"rank {rank} is not in the mesh {self} of {self.size} ranks")
        at = unravel(self._index[rank], list(self.axes.values()))
        return dict(zip(self.axes, at, strict=True))

    def coordinates(
        self, axes: Sequence[str], base: Mapping[str, int] | None = None
    ) -> Iterator[dict[str, int]]:
        """Every coordinate that differs from `base` only in these axes, in row-major order."""
        base = dict.fromkeys(self.axes, 0) if base is None else base
        return (self.move(base, axes, i) for i in range(self.degree(axes)))

    def move(self, base: Mapping[str, int], axes: Sequence[str], index: int) -> dict[str, int]:
        """The coordinate at an index along these axes that equals `base` on all others."""
        at = unravel(index, [self.axes[axis] for axis in axes])
        return {**base, **dict(zip(axes, at, strict=True))}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate."""
        return self.ranks[self.index(tuple(self.axes), coordinate)]

    def degree(self, axes: Sequence[str]) -> int:
        """Number of coordinates along these axes together."""
        return math.prod(self.axes[axis] for axis in axes)

    def index(self, axes: Sequence[str], coordinate: Mapping[str, int]) -> int:
        """The index of a coordinate along several axes, row-major over the axes as listed."""
        at = 0
        for axis in axes:
            at = at * self.axes[axis] + coordinate[axis]
        return at

    def __eq__(self, other: object) -> bool:  # the order of axes matters, unlike that of dict keys
        return isinstance(other, Mesh) and (tuple(self.axes.items()), self.ranks) == (
            tuple(other.axes.items()), other.ranks)  # fmt: skip

    def __hash__(self) -> int:
        return hash((tuple(self.axes.items()), self.ranks))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={n}' for axis, n in self.axes.items())})"

    def __str__(self) -> str:
        return "(" + ", ".join(f"{axis}={n}" for axis, n in self.axes.items()) + ")"


Over = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate holds the same values: data parallelism, or norms and biases under tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard along `dim`, which may be negative: by default as `torch.chunk` cuts, the last parts smaller or empty.

    Attributes:
        sizes: the width for each coordinate, in elements of the dim.
        parts: the dim is a concatenation of parts, each sharded by itself (fused QKV, SwiGLU). A
            part is a width, or a tuple of widths, one for each coordinate; widths that do not add
            up to the size of the dim, but divide it, are proportions.
        pad_to: pad the dim to a multiple of this and shard it evenly; the padding is not part of
            the tensor.
        even: an uneven division is an error (default: no).
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
        widths = [
            *(self.sizes or ()),
            *(w for p in self.parts or () for w in ((p,) if isinstance(p, int) else p)),
        ]
        if any(w < 0 for w in widths) or self.parts == () or (self.parts and not any(widths)):
            raise LayoutError(f"shard {self.dim} has invalid widths {self.sizes or self.parts}")

    def check_degree(self, degree: int) -> None:
        """Check that `sizes`, and the widths of each part, have one entry for each coordinate."""
        for widths in (self.sizes, *(self.parts or ())):
            if isinstance(widths, tuple) and len(widths) != degree:
                raise LayoutError(
                    f"shard {self.dim} gives {len(widths)} widths {widths} for {degree} coordinates"
                )


@dataclass(frozen=True, slots=True)
class Flat:
    """The local tensors of a group, flattened row-major, joined in order, padded, and partitioned over the axes.

    `cut="after_join"` (ZeRO-1/2, FSDP1, Megatron's distributed optimizer): each tensor starts at a
    multiple of `tensor_align` elements, the end is padded to a common multiple of `group_pad *
    degree` and `total_align`, and the buffer is cut into equal slices, so a tensor may straddle
    ranks. `cut="before_join"` (ZeRO-3): each tensor is cut into `degree` equal parts of a multiple
    of `tensor_align` elements, and each rank joins its parts.

    `group`: `optimizer` (the tensor list's optimizer groups), `all`, `tensor` (each by itself), or
    a `/regex/` whose first capture is the name of the group. `order`: as in the checkpoint,
    reversed, or DeepSpeed's `round_robin_gradients`. `max_elements`: a buffer is closed once it has
    this many elements (ZeRO-3's `sub_group_size`, counted on one rank, or Megatron's `bucket_size`,
    counted over the whole buffer), and the next tensor starts another.
    """

    over: Over
    group: str = "optimizer"
    order: Literal["checkpoint", "reverse", "round_robin"] = "checkpoint"
    cut: Literal["after_join", "before_join"] = "after_join"
    tensor_align: int = 1
    group_pad: int = 1
    total_align: int = 1
    max_elements: int | None = None

    def __post_init__(self) -> None:
        _normalise(self)
        if not self.over:
            raise LayoutError("flat names no axis to partition over")
        for name in ("tensor_align", "group_pad", "total_align", "max_elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(
                    f"flat {self.group!r} has {name} {value}, which must be at least 1"
                )
        if is_regex(self.group):
            if not compile_regex(self.group).groups:
                raise LayoutError(f"the group {self.group!r} has no capture to name the group by")
        elif self.group not in ("optimizer", "all", "tensor"):
            raise LayoutError(
                f"unknown group {self.group!r}", hint="it is optimizer, all, tensor or a /regex/"
            )


@dataclass(frozen=True, slots=True)
class Stage:
    """Only one pipeline stage holds the tensor: `index`, or the stage whose layers include the tensor's.

    `starts` lists the first layer of each stage; the layer is captured by the group `layer`, or
    else the first group, of the rule's `/regex/`. A list several times as long as the number of
    stages assigns interleaved virtual stages in turn.
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
    """Only the coordinate with this index over the axes (default: over the whole mesh) holds the tensor."""

    index: int = 0
    over: Over = ()

    def __post_init__(self) -> None:
        _normalise(self)


@dataclass(frozen=True, slots=True)
class Partial:
    """Each coordinate holds its own value, which readers reduce; as a target it is the same as Replicate."""

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


def compile_match(match: str) -> Pattern:
    """Compile a pattern that must match a whole name."""
    if is_regex(match):
        return compile_regex(match)
    first, *rest = (
        "".join("." if c == "?" else re.escape(c) for c in part) for part in match.split("*")
    )
    # The text between two stars is matched as early as possible, without backtracking: so nothing
    # is tried twice.
    inner = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    return Pattern(re.compile(first + inner + (f".*{rest[-1]}" if rest else ""), re.DOTALL))


@dataclass(frozen=True)
class Rule:
    """Assigns a placement to the tensors whose name matches `match`.

    Attributes:
        place: the placements, in the order in which they apply (default: replicated).
        states: globs or `/regex/`es of states; empty matches every state.
        mesh: name of the mesh (None: the default mesh).
        label: name of the rule in error messages, such as `rules[3]`.
    """

    match: str | tuple[str, ...]
    place: tuple[Placement, ...] = (Replicate(),)
    states: tuple[str, ...] = ()
    mesh: str | None = None
    label: str = field(default="", compare=False)
    _names: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)
    _states: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        patterns = (self.match,) if isinstance(self.match, str) else tuple(self.match)
        object.__setattr__(self, "match", patterns)
        object.__setattr__(self, "place", tuple(self.place))
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "_names", tuple(map(compile_match, patterns)))
        object.__setattr__(self, "_states", tuple(map(compile_match, self.states)))
        if not patterns:
            raise LayoutError(
                f"{self} matches nothing", hint='to match every tensor, write match: "*"'
            )
        if any(isinstance(p, Stage) and p.starts for p in self.place) and not all(
            p.groups for p in self._names
        ):
            raise LayoutError(
                f"{self} gives the first layers of stages, but its match captures no layer number",
                hint=r"write it as a regex with a capture: /model\.layers\.(\d+)\..*/",
            )

    def find(self, name: str) -> re.Match[str] | None:
        """The match of a tensor's name by the first pattern that matches, whatever its state."""
        return next(filter(None, (p.fullmatch(name) for p in self._names)), None)

    def has_state(self, state: str) -> bool:
        """Whether the rule applies to tensors of a state."""
        return not self._states or any(p.fullmatch(state) for p in self._states)

    def check(self, mesh: Mesh) -> None:
        """Check that the rule fits a mesh, independent of any tensor."""
        for p in self.place:
            unknown = [axis for axis in axes_of(p) if axis not in mesh.axes]
            if unknown:
                raise LayoutError(
                    f"{self} names the axis {unknown[0]!r}, which is not in the mesh {mesh}"
                )
            degree = mesh.degree(axes_of(p) or tuple(mesh.axes))
            try:
                if isinstance(p, Shard):
                    p.check_degree(degree)
                elif isinstance(p, Stage):
                    _check_stage(p, degree)
                elif isinstance(p, Owner):
                    _check_owner(p, degree)
            except LayoutError as e:
                raise LayoutError(f"{self}: {e.message}", hint=e.hint) from e

    def __str__(self) -> str:
        return f"{self.label or 'rule'} (match {', '.join(map(repr, self.match))})"


def _check_owner(owner: Owner, degree: int) -> None:
    if not 0 <= owner.index < degree:
        raise LayoutError(f"owner {owner.index} is out of range for {degree} coordinates")


def _check_stage(stage: Stage, degree: int) -> None:
    if stage.starts is not None and (not stage.starts or len(stage.starts) % degree):
        raise LayoutError(
            f"{len(stage.starts)} first layers are given for {degree} stages",
            hint=(
                "give one for each stage, or a whole multiple of that for interleaved virtual "
                "stages"
            ),
        )
    if stage.index is not None and not -degree <= stage.index < degree:
        raise LayoutError(f"stage {stage.index} is out of range for {degree} stages")


@dataclass(frozen=True)
class Holder:
    """Only the coordinates with this index over these axes hold the tensor."""

    axes: tuple[str, ...]
    index: int


@dataclass(frozen=True)
class Placed:
    """The placement of one tensor that results from all sections of a layout."""

    mesh: Mesh
    shards: tuple[Shard, ...]
    holders: tuple[Holder, ...]
    flat: Flat | None
    partial: Partial | None
    rules: tuple[Rule, ...]

    def holds(self, coordinate: Mapping[str, int]) -> bool:
        """Whether stages and owners assign the tensor to this coordinate."""
        return all(self.mesh.index(h.axes, coordinate) == h.index for h in self.holders)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which the local tensor differs between coordinates, before any flat buffer is partitioned."""
        named = {a for s in self.shards for a in axes_of(s)} | {
            a for h in self.holders for a in h.axes
        }
        return tuple(a for a in self.mesh.axes if a in named)


def place(mesh: Mesh, matches: list[tuple[Rule, re.Match[str]]]) -> Placed:
    """Compose the rules that matched one tensor.

    Args:
        matches: each rule with its match, in the order in which they apply.
    """
    used: dict[str, Rule] = {}
    shards: list[Shard] = []
    holders: list[Holder] = []
    flat: Flat | None = None
    partial: Partial | None = None
    for rule, match in matches:
        rule.check(mesh)
        for p in rule.place:
            for axis in axes_of(p):
                if axis in used:
                    raise LayoutError(
                        f"{rule} uses the axis {axis!r} a second time, after {used[axis]}"
                    )
                used[axis] = rule
            if flat is not None and isinstance(p, Shard | Flat | Partial):
                raise LayoutError(
                    f"{rule} places a flat buffer: after flat only replicate, stage and owner "
                    "may follow"
                )
            match p:
                case Shard():
                    shards.append(p)
                case Flat():
                    flat = p
                case Stage():
                    holders.append(
                        Holder(axes_of(p), _stage(p, mesh.degree(axes_of(p)), rule, match))
                    )
                case Owner():
                    holders.append(Holder(axes_of(p) or tuple(mesh.axes), p.index))
                case Partial():
                    partial = p
                case Replicate():
                    pass
    return Placed(
        mesh, tuple(shards), tuple(holders), flat, partial, tuple(rule for rule, _ in matches)
    )


def _stage(stage: Stage, degree: int, rule: Rule, match: re.Match[str]) -> int:
    if stage.starts is None:
        return (stage.index or 0) % degree
    layer = match["layer"] if "layer" in match.re.groupindex else match[1]
    try:
        chunk = bisect_right(stage.starts, int(layer)) - 1
    except (TypeError, ValueError):
        raise LayoutError(
            f"{rule} captures {layer!r} of {match[0]}, which is not a layer number"
        ) from None
    if chunk < 0:
        raise LayoutError(
            f"{rule}: layer {layer} of {match[0]} comes before the first stage, {stage.starts[0]}"
        )
    return chunk % degree
