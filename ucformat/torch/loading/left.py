"""Finds what a checkpoint has of the entries that a state asks for, and the state has no place for."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ucformat.sources.dcp.names import dotted
from ucformat.torch.loading.find import prefixes_of
from ucformat.torch.state.subclasses import RECORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key
    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.loading.values import SavedState
    from ucformat.torch.state.collect import CollectedState

#: Among the entries that are asked for: all tensors of a state that is a single mapping of tensors.
_FLAT = ""


def asked_entries(found: CollectedState, recorded: SavedState) -> tuple[str, ...]:
    """Return the top-level entries of the saved state that are asked for.

    These have the keys of the state; where a tensor was saved under another key, that entry is asked for, too.
    """
    out = dict.fromkeys(found.entries)
    for path, key in found.keys.items():
        if dotted(path) in recorded.tensors:
            saved: Sequence[Path] = [recorded.paths[dotted(path)]]
        else:
            saved = _paths(recorded.ck, key._replace(name=recorded.names.get(key.name, key.name)))
        out |= {_FLAT if len(p) == 1 else str(p[0]): None for p in saved if len(p) > 1 or len(path) > 1}
    if all(len(path) == 1 for path in found.tensors):
        out |= {_FLAT: None}
    return tuple(out)


def is_asked(ck: Checkpoint, key: Key, entries: Sequence[str]) -> bool:
    """Check whether a stored tensor is in one of the entries, or not known to be in another one."""
    paths = _paths(ck, key)
    return not paths or any(_is_in(dotted(p), entries) or (len(p) == 1 and _FLAT in entries) for p in paths)


def is_inside(ck: Checkpoint, key: Key, entries: Sequence[str]) -> bool:
    """Check whether a stored tensor is known to be in one of the entries."""
    return any(_is_in(dotted(p), entries) for p in _paths(ck, key))


def is_named(ck: Checkpoint, key: Key, label: str, patterns: Sequence[str]) -> bool:
    """Check whether a pattern names a stored tensor: by its name, with or without the state, or by a path."""
    name = label.removesuffix(f" ({key.state})")
    texts = (label, key.name, name, f"{name}.{key.state}", *map(dotted, _paths(ck, key)))
    return any(fits(text, pattern) for text in texts for pattern in patterns)


def fits(text: str, pattern: str) -> bool:
    """Check whether a name or path is that of a pattern, lies below it, or matches it as a glob."""
    return text == pattern or text.startswith(pattern.rstrip(".") + ".") or fnmatchcase(text, pattern)


def left_values(
    found: CollectedState, recorded: SavedState, entries: Sequence[str], leave: Sequence[str]
) -> tuple[str, ...]:
    """Return a line for each plain value that was saved in the entries, and that no pattern names."""
    records = ((*path, *names, RECORD) for path, (_, taken) in found.wrappers.items() for names in taken.records)
    wanted = {dotted(path) for path in (*found.leaves, *found.tensors, *found.ranks, *found.group_entries, *records)}
    parents = prefixes_of(wanted)

    def is_left(text: str) -> bool:
        covered = text in wanted or text in parents or not prefixes_of([text]).isdisjoint(wanted)
        return _is_in(text, entries) and not covered and not any(fits(text, pattern) for pattern in leave)

    left = (t.partition(f".{RECORD}")[0] for t in map(dotted, recorded.value_paths) if is_left(t))
    values = dict.fromkeys(f"the object {text}" for text in left)
    return (*values, *(f"the per-rank value {t}" for t in recorded.ck.per_rank if is_left(t)))


def _is_in(text: str, entries: Sequence[str]) -> bool:
    return any(text == entry or text.startswith(f"{entry}.") for entry in entries if entry != _FLAT)


def _paths(ck: Checkpoint, key: Key) -> Sequence[Path]:
    return ck.metadata.paths.get(key, ())
