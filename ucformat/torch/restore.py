"""Puts a checkpoint's objects and optimizer groups back in the places of a training state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import Refused, UsageError
from ucformat.sources.dcp.names import dotted
from ucformat.sources.values import json_key
from ucformat.torch.collect import Leaf
from ucformat.torch.match import Problems
from ucformat.torch.objects import decode, encode, unfit
from ucformat.torch.recorded import ABSENT, is_special
from ucformat.torch.rng import Rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.sources.dcp.names import Path
    from ucformat.torch.collect import Collected, Group
    from ucformat.torch.group import Group as Ranks
    from ucformat.torch.objects import PerRank
    from ucformat.torch.recorded import Recorded

__all__ = ["fit_groups", "fit_objects", "take_values"]


def fit_objects(
    found: Collected, recorded: Recorded, ranks: Ranks, *, trust: bool, cast: bool = False
) -> tuple[Problems, Callable[[], None]]:
    """What of the state's plain values is missing or does not fit, and how to put the rest."""
    others: list[str] = []
    dtypes: list[str] = []
    missing: list[str] = []
    todo: list[tuple[Leaf, Any]] = []
    for path, leaf in found.leaves.items():
        data = with_empty(recorded.value(path), leaf.value)
        if data is ABSENT:
            missing.append(f"the object {dotted(path)}")
            continue
        try:
            value = decode(data, leaf.value, trust=trust)
        except Refused as error:
            others.append(f"the object {dotted(path)}: {error.message}")
            continue
        wrong, dtype = unfit(value, leaf.value, cast=cast)
        others += [f"the object {dotted(path)}: {w}" for w in wrong]
        dtypes += [f"the object {dotted(path)} is {d}" for d in dtype]
        if not wrong and not dtype:
            todo.append((leaf, value))
    problems, put_ranks = _fit_ranks(found, recorded.ck.objects.get("per_rank", {}), ranks, trust=trust)

    def put() -> None:
        for leaf, value in todo:
            leaf.put(value)
        put_ranks()

    return Problems(missing=tuple(missing), dtypes=tuple(dtypes), others=tuple(others)) | problems, put


def _fit_ranks(
    found: Collected, per_rank: Mapping[str, Any], ranks: Ranks, *, trust: bool
) -> tuple[Problems, Callable[[], None]]:
    """The same of what each rank has for itself."""
    others: list[str] = []
    missing: list[str] = []
    todo: list[tuple[Leaf, Any]] = []
    for path, (wanted, leaf) in found.ranks.items():
        saved = per_rank.get(dotted(path))
        if saved is None:
            missing.append(f"what each rank has of {dotted(path)}")
            continue
        try:
            values = [decode(v, leaf.value, trust=trust) for v in saved]
        except Refused as error:
            others.append(f"what each rank has of {dotted(path)}: {error.message}")
            continue
        if len(values) != ranks.size and wanted.merge is None:
            others.append(_no_merge(path, wanted, len(values), ranks.size))
        else:
            mine = values[ranks.rank] if len(values) == ranks.size else _merged(wanted, values, ranks)
            try:
                if isinstance(wanted.value, Rng):
                    wanted.value.check(mine)
            except UsageError as error:
                others.append(f"{dotted(path)}: {error.message}; {error.hint}")
                continue
            todo.append((leaf, mine))

    def put() -> None:
        for leaf, value in todo:
            leaf.put(value)

    return Problems(missing=tuple(missing), others=tuple(others)), put


def _merged(wanted: PerRank, values: list[Any], ranks: Ranks) -> Any:
    assert wanted.merge is not None  # noqa: S101 - asked before
    return wanted.merge(values, ranks.rank, ranks.size)


def _no_merge(path: Path, wanted: PerRank, saved: int, now: int) -> str:
    kind = type(wanted.value).__name__
    return (
        f"{dotted(path)} ({kind}) was saved by {saved} ranks, each its own, and is wanted by {now}: give "
        "PerRank(value, merge=function of all values, the rank and the number of ranks), or leave it out of the state "
        'and read ckpt.objects["per_rank"]'
    )


def take_values(found: Collected, recorded: Recorded) -> None:
    """Take tensors that the checkpoint holds inside a value, as DCP saves tuples, for values that are copied."""
    for path, tensor in list(found.tensors.items()):
        if dotted(path) in recorded.tensors or found.keys[path].name in recorded.names:
            continue
        data = recorded.value(path)
        if type(tensor) is torch.Tensor and isinstance(data, dict) and set(data) == {"$tensor"}:
            found.leaves[path] = Leaf(tensor, tensor.copy_)
            del found.tensors[path]


def with_empty(data: Any, template: Any) -> Any:
    """The JSON form of a value with the empty dictionaries that the template has, of which DCP saves nothing."""
    if _vanishes(template) and data is ABSENT:
        return encode(template)
    if isinstance(template, dict) and isinstance(data, dict) and not is_special(data):
        more = {json_key(k): v for k, v in template.items() if isinstance(k, str | int)}
        new = {k: with_empty(data.get(k, ABSENT), v) for k, v in more.items()}
        return data | {k: v for k, v in new.items() if v is not ABSENT}
    if isinstance(template, list) and isinstance(data, list):
        at = (data[i] if i < len(data) else ABSENT for i in range(max(len(data), len(template))))
        items = (with_empty(d, template[i] if i < len(template) else None) for i, d in enumerate(at))
        return [d for d in items if d is not ABSENT]
    return data


def _vanishes(value: Any) -> bool:
    """Whether DCP finds nothing to save in a value."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(v, dict | list) and _vanishes(v) for v in value)
    return isinstance(value, dict) and all(map(_vanishes, value.values()))


def fit_groups(found: Collected, recorded: Recorded) -> tuple[Problems, Callable[[], None]]:
    """Which stored hyper-parameters each optimizer group gets, by the names of its parameters, and how to put them.

    A group some of whose parameters are not known gets those of the others.
    """
    missing: list[str] = []
    others: list[str] = []
    todo: list[tuple[Group, dict[str, Any]]] = []
    for path, groups in found.groups.items():
        group_of = recorded.find_group(dotted(path), found.prefixes.get(path, ""))
        for number, group in enumerate(groups):
            label = f"group {number} of {dotted(path)}"
            lacking = sorted(p for p in group.params if group_of(p) is None)
            if lacking:
                missing.append(f"{label}: the hyper-parameters of {', '.join(lacking[:3])}")
            for part in group.parts():
                options = [g.options for p in part.params if (g := group_of(p)) is not None]
                if any(o != options[0] for o in options[1:]):
                    others.append(f"{label}: its parameters were in groups with different hyper-parameters")
                elif options:
                    todo.append((part, options[0]))

    def put() -> None:
        for group, options in todo:
            for key, value in options.items():
                if (key in group.options or key == "initial_lr") and key != "param_names":
                    group.options[key] = decode(value, group.options.get(key))

    return Problems(tuple(missing), others=tuple(others)), put
