"""Puts a checkpoint's objects and optimizer groups back in the places of a training state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucformat.errors import Refused, UsageError
from ucformat.sources.dcp.names import dotted
from ucformat.sources.values import json_key
from ucformat.torch.match import Problems
from ucformat.torch.objects import decode
from ucformat.torch.rng import Rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint
    from ucformat.sources.dcp.names import Path
    from ucformat.torch.collect import Collected, Group, Leaf
    from ucformat.torch.group import Group as Ranks
    from ucformat.torch.objects import PerRank

__all__ = ["find_object", "fit_groups", "fit_objects"]

_ABSENT = object()


def fit_objects(found: Collected, ck: Checkpoint, ranks: Ranks, *, trust: bool) -> tuple[Problems, Callable[[], None]]:
    """What of the state's plain values is missing or does not fit, and how to put the rest."""
    others: list[str] = []
    missing: list[str] = []
    todo: list[tuple[Leaf, Any]] = []
    for path, leaf in found.leaves.items():
        data = find_object(ck.objects, path)
        if data is _ABSENT:
            missing.append(f"the object {dotted(path)}")
            continue
        try:
            todo.append((leaf, decode(data, leaf.value, trust=trust)))
        except Refused as error:
            others.append(f"the object {dotted(path)}: {error.message}")
    per_rank = ck.objects.get("per_rank", {})
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


def find_object(objects: Mapping[str, Any], path: Path) -> Any:
    """The JSON form of the value at a path; `_ABSENT` where there is none."""
    data: Any = objects
    for part in path:
        key = json_key(part)
        if not isinstance(data, Mapping) or key not in data:
            return _ABSENT
        data = data[key]
    return data


def fit_groups(found: Collected, ck: Checkpoint, names: Mapping[str, str]) -> tuple[Problems, Callable[[], None]]:
    """Which stored hyper-parameters each optimizer group gets, by the names of its parameters, and how to put them."""
    stored = {name: g for g in ck.manifest.groups for name in g.params}
    missing: list[str] = []
    others: list[str] = []
    todo: list[tuple[Group, dict[str, Any]]] = []
    for path, groups in found.groups.items():
        for number, group in enumerate(groups):
            known = {names.get(p, p) for p in group.params}
            lacking = sorted(known - set(stored))
            label = f"group {number} of {dotted(path)}"
            if lacking:
                missing.append(f"{label}: the hyper-parameters of {', '.join(lacking[:3])}")
                continue
            for part in group.parts():
                options = [stored[names.get(p, p)].options for p in part.params]
                if any(o != options[0] for o in options[1:]):
                    others.append(f"{label}: its parameters were in groups with different hyper-parameters")
                elif options:
                    todo.append((part, options[0]))

    def put() -> None:
        for group, options in todo:
            for key, value in options.items():
                if key in group.options or key == "initial_lr":
                    group.options[key] = decode(value, group.options.get(key))

    return Problems(tuple(missing), others=tuple(others)), put
