"""The optimizer groups of a whole checkpoint, out of those of its model-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError
from ucformat.sources.contents import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.sources.deepspeed.slices import Slice

__all__ = ["merge_groups"]


def merge_groups(stages: Sequence[Sequence[Slice]]) -> list[Group]:
    """Groups of tensor-parallel ranks must be the same; those of pipeline stages are joined.

    By position, where all stages have equally many, with the same hyper-parameters. Else by hyper-parameters, where
    these belong to one group of the stage alone; what is left stays a group of its own. Nothing is lost by that: each
    parameter keeps its hyper-parameters.
    """
    merged: list[Group] = []
    seen: set[str] = set()
    for slices in stages:
        groups = slices[0].contents.groups
        for of in slices[1:]:
            if [(g.names, g.hyper) for g in of.contents.groups] != [(g.names, g.hyper) for g in groups]:
                raise IntegrityError(
                    f"the optimizer groups of {slices[0].model.key} and {of.model.key} are not the same",
                    hint="files of different saves are mixed in one folder",
                )
        for group, into in zip(groups, _partners(merged, groups), strict=True):
            names = [name for name in group.names if name not in seen]  # a tied module's, in several stages
            seen.update(names)
            if into is None:
                merged.append(Group(names, group.hyper, group.state))
            else:
                into.state = _joined(into, group)
                into.names.extend(names)
    return merged


def _partners(merged: Sequence[Group], groups: Sequence[Group]) -> list[Group | None]:
    """The group that each group of a stage is joined to."""
    if len(merged) == len(groups) and all(_alike(a, b) for a, b in zip(merged, groups, strict=True)):
        return list(merged)
    found: list[Group | None] = []
    for group in groups:
        same = [other for other in merged if _alike(other, group)]
        alone = sum(_alike(other, group) for other in groups) == 1
        found.append(same[0] if alone and len(same) == 1 else None)
    return found


def _alike(one: Group, other: Group) -> bool:
    return one.hyper == other.hyper and one.state.keys() == other.state.keys()


def _joined(one: Group, other: Group) -> dict[str, Any]:
    """Plain state: one value for all, or one for each name where they differ."""
    out: dict[str, Any] = {}
    for key, value in one.state.items():
        theirs = other.state[key]
        if type(value) is type(theirs) and value == theirs and not isinstance(value, dict):
            out[key] = value
        else:
            out[key] = {**_by_name(value, one.names), **_by_name(theirs, other.names)}
    return out


def _by_name(value: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(value, dict) and value.keys() <= set(names):
        return value
    return dict.fromkeys(names, value)
