"""Checks whether a checkpoint can be resumed under a layout: the tensors of each rule, and those that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.checkpoint import Checkpoint
from ucformat.errors import LayoutError
from ucformat.geometry.layout import Layout
from ucformat.geometry.tensor import TensorList
from ucformat.references import open_reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from ucformat.geometry.bound import BoundLayout
    from ucformat.geometry.tensor import TensorInfo

__all__ = ["Fit", "Misfit", "RuleUse", "fits"]

_MAX_RANKS = 64  # planned ranks, about evenly spaced, with the first and the last


@dataclass(frozen=True, slots=True)
class RuleUse:
    """A rule or a step of the view, as errors name it, and the names of the tensors that it matches."""

    rule: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor that the layout cannot place: in which states, by which rules, and why."""

    name: str
    states: tuple[str, ...]
    rules: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        apart = [rule for rule in self.rules if rule not in self.reason]
        rules = f" by {' and '.join(apart)}" if apart else ""
        return f"{self.name} ({', '.join(self.states)}){rules}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of applying a layout to a checkpoint; true if every tensor fits.

    `memory` is the least and the most that a rank holds, in bytes; None where it does not fit.
    """

    url: str
    ranks: int
    tensors: int
    rules: tuple[RuleUse, ...]
    misfits: tuple[Misfit, ...]
    memory: tuple[int, int] | None

    def __bool__(self) -> bool:
        return not self.misfits

    @property
    def unused(self) -> tuple[str, ...]:
        """Rules and steps that match no tensor."""
        return tuple(r.rule for r in self.rules if not r.names)


def fits(
    place: str | PathLike[str] | Checkpoint,
    layout: Layout | str | PathLike[str],
    *,
    options: Mapping[str, Any] | None = None,
) -> Fit:
    """Whether a checkpoint can be resumed under a layout; reads no tensor.

    Args:
        place: a checkpoint, or the place of one.
        layout: the layout, or the path of its file; where it has a view, the tensors are those that
            it makes.
        options: facts that the files of a foreign checkpoint lack, as in `open`.

    Raises:
        LayoutError: the layout is invalid, or its view cannot be made of this checkpoint.
    """
    ck = place if isinstance(place, Checkpoint) else open_reference(place, options=options)
    layout = layout if isinstance(layout, Layout) else Layout.load(layout)
    steps: tuple[RuleUse, ...] = ()
    if layout.view:
        ck = ck.view(layout)
        steps = tuple(RuleUse(t.step, t.took) for t in ck.steps)
    named: dict[str, list[TensorInfo]] = {}
    tensor_list = ck.metadata.tensor_list.placed().renamed(layout.rename)
    for info in tensor_list.tensors:
        named.setdefault(info.name, []).append(info)
    uses: dict[str, list[str]] = {
        str(rule): [] for section in layout.sections.values() for rule in section
    }
    misfits: list[Misfit] = []
    for name, infos in named.items():
        rules = layout.rules_for(name, {i.state for i in infos})
        for rule in rules:
            uses[str(rule)].append(name)
        misfits += _misfits(layout, name, infos, tensor_list.groups, tuple(map(str, rules)))
    memory = None
    if not misfits:
        try:
            memory = _memory(layout.bind(tensor_list))
        except LayoutError as error:
            misfits.append(
                Misfit(
                    "all tensors together",
                    tuple(sorted({k.state for k in ck.tensors})),
                    (),
                    error.message,
                )
            )
    used = tuple(RuleUse(rule, tuple(names)) for rule, names in uses.items())
    return Fit(ck.home, layout.mesh.size, len(named), (*steps, *used), tuple(misfits), memory)


def _misfits(
    layout: Layout,
    name: str,
    infos: list[TensorInfo],
    groups: Mapping[str, int],
    rules: tuple[str, ...],
) -> list[Misfit]:
    """The misfits of one tensor by itself, with the states of the same reason together."""
    reasons: dict[str, list[str]] = {}
    for info in infos:
        try:
            bound = layout.bind(TensorList((info,), groups))
            for rank in (0, bound.ranks - 1):
                for key in bound.keys(rank):
                    bound.local(key, rank)
        except LayoutError as error:
            reason = error.message.removeprefix(f"{name} ({info.state}): ").replace(
                f"{name} ({info.state})", "it"
            )
            reasons.setdefault(reason, []).append(info.state)
    return [Misfit(name, tuple(states), rules, reason) for reason, states in reasons.items()]


def _memory(bound: BoundLayout) -> tuple[int, int]:
    """The least and the most bytes that a rank holds."""
    infos = {i.key: i for i in bound.tensor_list.tensors}
    step = max(1, -(-bound.ranks // _MAX_RANKS))
    nbytes = []
    for rank in {*range(0, bound.ranks, step), bound.ranks - 1}:
        locals_ = ((infos[key].itemsize, bound.local(key, rank)) for key in bound.keys(rank))
        nbytes.append(sum(unit * local.size for unit, local in locals_ if local is not None))
    return min(nbytes), max(nbytes)
