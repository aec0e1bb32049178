"""Sets of files that are one checkpoint together: numbered shards, and an index that says which tensor is in which."""

from __future__ import annotations

import re
import reprlib
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, MissingData
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["check_index", "check_shards", "complete", "numbered"]

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<total>\d{5,})(?P<suffix>\.\w+)")
_SHOWN = 5


def numbered(name: str) -> tuple[str, int, int] | None:
    """Of `model-00002-of-00003.bin`: what all shards have in common, its number, and how many there are."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    return f"{match['stem']}-*-of-{match['total']}{match['suffix']}", int(match["number"]), int(match["total"])


def complete(names: Iterable[str]) -> list[str]:
    """The shards of one set in order; MissingData where one of them is not there."""
    by_number, example, total = {}, "", 0
    for name in names:
        if found := numbered(name):
            by_number[found[1]], example, total = name, name, found[2]
    missing = [n for n in range(1, min(total, len(by_number) + _SHOWN) + 1) if n not in by_number]
    if missing or len(by_number) != total:
        match = _NUMBERED.fullmatch(example)
        first = missing[0] if missing else 0
        name = f"{match['stem']}-{first:05d}-of-{match['total']}{match['suffix']}" if match and missing else example
        what = "is missing" if missing else "does not belong to them"
        raise MissingData(
            f"{name} {what}: {len(by_number)} of {total} shards are there",
            hint="copy all shards; each holds other tensors",
        )
    return [by_number[n] for n in sorted(by_number)]


def check_index(weight_map: Mapping[str, str], index: str, present: Collection[str], below: str = "") -> list[str]:
    """The shards that an index names, as keys, all there."""
    shards = []
    for shard in dict.fromkeys(weight_map.values()):
        key = check_key(f"{below}{shard}")
        if key not in present:
            names = [n for n, s in weight_map.items() if s == shard]
            raise MissingData(
                f"{key} is missing: {index} says that it holds {_some(names)}",
                hint="copy all shards that the index names; each holds other tensors",
            )
        shards.append(key)
    return sorted(shards)


def check_shards(weight_map: Mapping[str, str], index: str, shards: Mapping[str, Collection[str]]) -> None:
    """IntegrityError where an index and its shards (with the names in each) do not say the same."""
    listed: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        listed.setdefault(shard, set()).add(name)
    for shard, names in shards.items():
        wanted = listed.get(shard.rpartition("/")[2], set()) | listed.get(shard, set())
        if lost := sorted(wanted - set(names)):
            raise MissingData(
                f"{shard} lacks {_some(lost)}, which {index} says it holds",
                hint="files of different saves are mixed in one folder, or the index is another model's",
            )
        if further := sorted(set(names) - wanted):
            elsewhere = f", which should be in {weight_map[further[0]]}" if further[0] in weight_map else ""
            raise IntegrityError(
                f"{shard} holds {_some(further)}{elsewhere}, and {index} does not say so",
                hint="files of different saves are mixed in one folder, or the index is another model's",
            )


def _some(names: list[str]) -> Any:
    shown = ", ".join(reprlib.repr(n) for n in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
