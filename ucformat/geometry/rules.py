"""Rules: which tensors a list of placements is for, and what several sections of rules say of one tensor."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ucformat.errors import LayoutError
from ucformat.geometry.patterns import Pattern, compile_regex, is_regex
from ucformat.geometry.placement import (
    Flat,
    Owner,
    Partial,
    Placement,
    Replicate,
    Shard,
    Stage,
    axes_of,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.geometry.mesh import Mesh

__all__ = ["Holder", "Placed", "Rule", "compile_match", "place"]


def compile_match(match: str) -> Pattern:
    """A glob, in which `*` and `?` match dots too, or a `/regex/`; both match the whole name.

    LayoutError where it is no regex, or may take for ever.
    """
    if is_regex(match):
        return compile_regex(match)
    first, *rest = ("".join("." if c == "?" else re.escape(c) for c in part) for part in match.split("*"))
    # What lies between two stars is best found as early as may be, for good: so nothing is tried twice.
    inner = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    return Pattern(re.compile(first + inner + (f".*{rest[-1]}" if rest else ""), re.DOTALL))


@dataclass(frozen=True)
class Rule:
    """The tensors that `match` (and whose state matches `states`, if any are given) are placed so on `mesh`.

    `match` and `states` are globs or `/regex/`es. `mesh` may be left out where the first is meant.
    """

    match: str | tuple[str, ...]
    place: tuple[Placement, ...] = (Replicate(),)
    states: tuple[str, ...] = ()
    mesh: str | None = None
    label: str = field(default="", compare=False)  # as errors name it: "rules[3]"
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
            raise LayoutError(f"{self} matches nothing", hint='a rule for everything says match: "*"')
        if any(isinstance(p, Stage) and p.starts for p in self.place) and not all(p.groups for p in self._names):
            raise LayoutError(
                f"{self} gives the first layers of stages, but its match captures no layer number",
                hint=r"write it as a regex with a capture: /model\.layers\.(\d+)\..*/",
            )

    def find(self, name: str) -> re.Match[str] | None:
        """The match of a tensor's name, whatever its state."""
        return next(filter(None, (p.fullmatch(name) for p in self._names)), None)

    def has_state(self, state: str) -> bool:
        """Whether the rule is for tensors of this state."""
        return not self._states or any(p.fullmatch(state) for p in self._states)

    def check(self, mesh: Mesh) -> None:
        """LayoutError where the rule does not fit a mesh, whatever the tensors."""
        for p in self.place:
            unknown = [axis for axis in axes_of(p) if axis not in mesh.axes]
            if unknown:
                raise LayoutError(f"{self} names the axis {unknown[0]!r}, which the mesh {mesh} has not")
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
            hint="give one for each stage, or a whole multiple of that for interleaved virtual stages",
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
    """What the sections of a layout say together of one tensor."""

    mesh: Mesh
    shards: tuple[Shard, ...]
    holders: tuple[Holder, ...]
    flat: Flat | None
    partial: Partial | None
    rules: tuple[Rule, ...]

    def holds(self, coordinate: Mapping[str, int]) -> bool:
        """Whether stages and owners leave the tensor to this coordinate."""
        return all(self.mesh.index(h.axes, coordinate) == h.index for h in self.holders)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which coordinates differ in the local tensor that they hold, before any flat cut."""
        named = {a for s in self.shards for a in axes_of(s)} | {a for h in self.holders for a in h.axes}
        return tuple(a for a in self.mesh.axes if a in named)


def place(mesh: Mesh, found: list[tuple[Rule, re.Match[str]]]) -> Placed:
    """Compose the rules that matched one tensor, in order; LayoutError where they contradict each other."""
    used: dict[str, Rule] = {}
    shards: list[Shard] = []
    holders: list[Holder] = []
    flat: Flat | None = None
    partial: Partial | None = None
    for rule, match in found:
        rule.check(mesh)
        for p in rule.place:
            for axis in axes_of(p):
                if axis in used:
                    raise LayoutError(f"{rule} uses the axis {axis!r} a second time, after {used[axis]}")
                used[axis] = rule
            if flat is not None and isinstance(p, Shard | Flat | Partial):
                raise LayoutError(f"{rule} places a flat buffer: after flat only replicate, stage and owner may follow")
            match p:
                case Shard():
                    shards.append(p)
                case Flat():
                    flat = p
                case Stage():
                    holders.append(Holder(axes_of(p), _stage(p, mesh.degree(axes_of(p)), rule, match)))
                case Owner():
                    holders.append(Holder(axes_of(p) or tuple(mesh.axes), p.index))
                case Partial():
                    partial = p
                case Replicate():
                    pass
    return Placed(mesh, tuple(shards), tuple(holders), flat, partial, tuple(rule for rule, _ in found))


def _stage(stage: Stage, degree: int, rule: Rule, match: re.Match[str]) -> int:
    if stage.starts is None:
        return (stage.index or 0) % degree
    layer = match["layer"] if "layer" in match.re.groupindex else match[1]
    try:
        chunk = bisect_right(stage.starts, int(layer)) - 1
    except (TypeError, ValueError):
        raise LayoutError(f"{rule} captures {layer!r} of {match[0]}, which is no layer number") from None
    if chunk < 0:
        raise LayoutError(f"{rule}: layer {layer} of {match[0]} comes before the first stage, {stage.starts[0]}")
    return chunk % degree
