"""Finds the stored tensor for each weight of a state: by its path, and by its name only if nothing else is meant."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ucformat.geometry.tensor import Key
from ucformat.reading.state_names import GROUPS, MODEL_KEYS, dotted
from ucformat.torch.loading.match import PARAMETER, Problems, fits, parameter_of
from ucformat.torch.state.subclasses import RECORD

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.readable import StatePath as Path
    from ucformat.torch.loading.values import SavedState
    from ucformat.torch.state.collect import CollectedState


_SHOWN = 4

#: Under these names wrappers keep the module that they wrap: `AveragedModel` and
#: `DistributedDataParallel`, `compile`.
_WRAPPERS = ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module", "module.module")


def find_tensors(collected: CollectedState, recorded: SavedState) -> Problems:
    """Set the key of each tensor of a state to that of the stored tensor which is meant.

    What the user has renamed to the path or the name of a tensor comes first, then what is stored
    under its path. If the checkpoint has anything under the path of the tensor's module, only what
    was saved of that module comes into question, perhaps in a wrapper. Otherwise a weight is found
    by its name without the path of the module, unless the weights of two modules have these names
    and shapes.
    """
    names = recorded.names
    renamed = {new for new, stored in names.items() if recorded.unrenamed.get(new) != stored}
    missed: dict[Path, None] = {}  # the paths of modules
    for path, key in collected.keys.items():
        text = dotted(path)
        if text in renamed and key.state == "weight":
            collected.keys[path] = Key(text, "weight")
        elif (stored := recorded.tensors.get(text)) is not None:
            collected.keys[path] = stored
        elif key.state == "weight" and key.name not in renamed:
            missed[module_of(collected, path)] = None
    if not missed:
        return Problems()
    search = _NameSearch(collected, recorded, renamed)
    others = [line for module in missed for line in search.find(module)]
    for path in search.without:
        collected.drop(path)
    return Problems(missing=tuple(map(str, search.missing)), others=tuple(others))


def module_of(collected: CollectedState, path: Path) -> Path:
    """Return the path of the module, or mapping, that has a tensor, perhaps inside a wrapper."""
    return collected.wrapper_of.get(path, path)[:-1]


def prefixes_of(texts: Iterable[str]) -> set[str]:
    """Return all dotted paths below which something lies."""
    out: set[str] = set()
    for text in texts:
        while (text := text.rpartition(".")[0]) and text not in out:
            out.add(text)
    return out


class _NameSearch:
    def __init__(
        self, collected: CollectedState, recorded: SavedState, renamed: Collection[str]
    ) -> None:
        self.collected, self.recorded = collected, recorded
        self.missing: list[Key] = []
        # the weights that nothing stored is meant for, though it has their names
        self.without: list[Path] = []
        #: The stored weight at each path, which is its name if no path is recorded.
        self.places: dict[str, Key] = dict(recorded.tensors)
        stored_keys = set(recorded.tensors.values())
        for name, stored in recorded.names.items():
            if name not in renamed and not any(
                Key(stored, state) in stored_keys for state in PARAMETER
            ):
                self.places.setdefault(name, Key(name, "weight"))
        self.firsts = prefixes_of(recorded.tensors)
        self.by_last: dict[str, list[str]] = defaultdict(list)
        for text in self.places:
            self.by_last[text.rpartition(".")[2]].append(text)
        # the weights of the state below each path
        self.below: dict[Path, list[Path]] = defaultdict(list)
        for path, key in collected.keys.items():
            if key.state in PARAMETER and dotted(path) not in renamed and key.name not in renamed:
                for i in range(len(path)):
                    self.below[path[:i]].append(path)

    def find(self, module: Path) -> list[str]:
        """Find the weights directly below a path; returns what is ambiguous."""
        keys = self.collected.keys
        weights = [p for p in self.below[module] if module_of(self.collected, p) == module]
        exact = {p: self.places.get(dotted(p)) for p in weights}
        wrapped = next(
            (w for i in range(1, len(module) + 1) if (w := self._wrapped(module[:i], weights))), {}
        )
        if not any(exact.values()) and not any(wrapped.values()) and not self._holds(module):
            keys |= {
                p: Key(dotted(p), "weight") for p in weights if dotted(p) in self.recorded.names
            }
            return self._ambiguous(module, weights)
        whole = all(exact.values()) or not all(wrapped.values()) or not wrapped
        chosen = exact if whole and any(exact.values()) else wrapped
        for path in weights:
            key = chosen.get(path)
            if key is not None:
                keys[path] = key
            elif keys[path].name in self.recorded.names:
                self.missing.append(Key(dotted(path), "weight"))
                self.without.append(path)
        return []

    def _holds(self, module: Path) -> bool:
        """Whether the checkpoint records anything under the first key of a path."""
        return bool(module) and str(module[0]) in self.firsts

    def _wrapped(self, mount: Path, weights: Sequence[Path]) -> dict[Path, Key | None]:
        """The weights as they were saved if what is at a path was wrapped."""
        below_mount = self.below[mount]
        for wrapper in _WRAPPERS:
            head = f"{dotted(mount)}.{wrapper}."
            fitting = {p: self.places.get(head + dotted(p[len(mount) :])) for p in below_mount}
            if all(fitting.values()) or (
                len(below_mount) == len(weights) and any(fitting.values())
            ):
                return {p: fitting[p] for p in weights}
        return {}

    def _ambiguous(self, module: Path, weights: Sequence[Path]) -> list[str]:
        """Check that no other module of the checkpoint has the names and shapes of a module that is found by names."""
        names, keys, tensors = self.recorded.names, self.collected.keys, self.collected.tensors
        if (
            not module
            or module[-1] in MODEL_KEYS
            or not all(keys[p].name in names for p in weights)
        ):
            return []
        shapes = {dotted(p[len(module) :]): tuple(tensors[p].size()) for p in weights}
        stored = {dotted(p[len(module) :]): names[keys[p].name] for p in weights}
        longest = max(shapes, key=len)
        heads = [
            text[: -len(longest)]
            for text in self.by_last[longest.rpartition(".")[2]]
            if text == longest or text.endswith(f".{longest}")
        ]
        fitting = {head: self._stored(head, shapes) for head in heads}
        own_heads = [head for head, fits in fitting.items() if fits == stored]
        others = [
            head
            for head, fits in fitting.items()
            if fits is not None
            and fits != stored
            and not any(own_head and head.startswith(own_head) for own_head in own_heads)
        ]
        if not others:
            return []
        self.without += weights
        places = " and ".join(f"{head}{longest}" for head in (*own_heads, *others)[:_SHOWN])
        return [
            (
                f"{dotted(module)}: the checkpoint has such weights more than once, as {places}: "
                "rename= says which"
            )
        ]

    def _stored(self, head: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str] | None:
        """The stored names of the weights under a path, by their names there; None if these or the shapes differ."""
        out: dict[str, str] = {}
        for name, shape in shapes.items():
            key = self.places.get(head + name)
            stored_name = None if key is None else self.recorded.names.get(key.name, key.name)
            infos = [] if stored_name is None else parameter_of(stored_name, self.recorded.ck)
            if stored_name is None or not infos or infos[0].shape != shape:
                return None
            out[name] = stored_name
        return out


# Finds what a checkpoint has of the entries that a state asks for, and the state has no place for.

#: Among the entries that are asked for: all tensors of a state that is a single mapping of tensors.
_FLAT = ""


def asked_entries(collected: CollectedState, recorded: SavedState) -> tuple[str, ...]:
    """Return the top-level entries of the saved state that are asked for.

    These have the keys of the state; where a tensor was saved under another key, that entry is
    asked for, too.
    """
    out = dict.fromkeys(collected.entries)
    for path, key in collected.keys.items():
        if dotted(path) in recorded.tensors:
            saved: Sequence[Path] = [recorded.paths[dotted(path)]]
        else:
            saved = _paths(recorded.ck, recorded.stored(key))
        out |= {
            _FLAT if len(p) == 1 else str(p[0]): None for p in saved if len(p) > 1 or len(path) > 1
        }
    if all(len(path) == 1 for path in collected.tensors):
        out |= {_FLAT: None}
    return tuple(out)


def is_asked(ck: Checkpoint, key: Key, entries: Sequence[str]) -> bool:
    """Check whether a stored tensor is in one of the entries, or not known to be in another one."""
    paths = _paths(ck, key)
    return not paths or any(
        _is_in(dotted(p), entries) or (len(p) == 1 and _FLAT in entries) for p in paths
    )


def is_inside(ck: Checkpoint, key: Key, entries: Sequence[str]) -> bool:
    """Check whether a stored tensor is known to be in one of the entries."""
    return any(_is_in(dotted(p), entries) for p in _paths(ck, key))


def is_named(ck: Checkpoint, key: Key, label: str, patterns: Sequence[str]) -> bool:
    """Check whether a pattern names a stored tensor: by its name, with or without the state, or by a path."""
    name = label.removesuffix(f" ({key.state})")
    texts = (label, key.name, name, f"{name}.{key.state}", *map(dotted, _paths(ck, key)))
    return any(fits(text, *patterns) for text in texts)


def left_values(
    collected: CollectedState, recorded: SavedState, entries: Sequence[str], leave: Sequence[str]
) -> tuple[str, ...]:
    """Return a line for each plain value that was saved in the entries, and that no pattern names."""
    records = (
        (*path, *names, RECORD)
        for path, (_, contents) in collected.wrappers.items()
        for names in contents.records
    )
    state_paths = {
        dotted(path)
        for path in (
            *collected.leaves,
            *collected.tensors,
            *collected.ranks,
            *collected.group_entries,
            *((*root, GROUPS) for root in collected.groups),
            *records,
        )
    }
    parents = prefixes_of(state_paths)

    def is_left(text: str) -> bool:
        covered = (
            text in state_paths
            or text in parents
            or not prefixes_of([text]).isdisjoint(state_paths)
        )
        return _is_in(text, entries) and not covered and not fits(text, *leave)

    unused = (t.partition(f".{RECORD}")[0] for t in map(dotted, recorded.value_paths) if is_left(t))
    values = dict.fromkeys(f"the object {text}" for text in unused)
    return (*values, *(f"the per-rank value {t}" for t in recorded.ck.per_rank if is_left(t)))


_VALUE = re.compile(r"the (?:object|per-rank value) (.*)", re.DOTALL)

#: What `left_values` returned for some ranks, and the entries that these ask for (None: all).
LeftValues = tuple[Sequence[str], Sequence[str] | None]


def left_by_all(a: LeftValues, b: LeftValues) -> tuple[str, ...]:
    """Return the lines of what some ranks ask for, and no rank that asks for it has."""

    def has(line: str, left: Collection[str], entries: Sequence[str] | None) -> bool:
        value = _VALUE.fullmatch(line)
        # a hyper-parameter that a group of some rank lacks is left whatever other ranks have
        asks = entries is None or (value is not None and _is_in(value[1], entries))
        return asks and line not in left

    ranks = [(frozenset(left), entries) for left, entries in (a, b)]
    lines = dict.fromkeys((*a[0], *b[0]))
    return tuple(line for line in lines if not any(has(line, *of_rank) for of_rank in ranks))


def _is_in(text: str, entries: Sequence[str]) -> bool:
    return any(text == entry or text.startswith(f"{entry}.") for entry in entries if entry != _FLAT)


def _paths(ck: Checkpoint, key: Key) -> Sequence[Path]:
    return ck.metadata.paths.get(key, ())
