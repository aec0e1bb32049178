"""Where the tensors, groups and values of a checkpoint lay in the state of the program that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucformat.reading.readable import IntKey, json_key
from ucformat.sources.dcp.names import GROUPS, dotted
from ucformat.sources.values import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key
    from ucformat.reading.readable import Place
    from ucformat.schema.manifest import GroupDoc
    from ucformat.sources.dcp.names import Path

__all__ = ["ABSENT", "Recorded", "find_object", "is_special", "value_at"]

ABSENT = object()


class Recorded:
    """What a checkpoint says of its program's state, where it says it; `tensors` go by their paths, joined by dots.

    What `names`, those of `stored_names`, call otherwise than the checkpoint does is left out.
    """

    def __init__(self, ck: Checkpoint, names: Mapping[str, str]) -> None:
        self.ck, self.names = ck, names
        self.tensors: dict[str, Key] = {}
        self.paths: dict[str, Path] = {}
        for key, paths in ck.facts.paths.items():
            if names.get(key.name) == key.name:
                self.paths |= (mine := {dotted(p): p for p in paths})
                self.tensors |= dict.fromkeys(mine, key)

    @property
    def optimizers(self) -> dict[str, list[tuple[GroupDoc, Place]]]:
        """The groups of each optimizer by its path, joined by dots."""
        groups = self.ck.manifest.groups
        out: dict[str, list[tuple[GroupDoc, Place]]] = {}
        for group, place in zip(groups, self.ck.facts.places or (None,) * len(groups), strict=True):
            if place is not None:
                out.setdefault(dotted(place.path), []).append((group, place))
        return out

    def find_group(self, root: str, prefix: str = "") -> Callable[[str], GroupDoc | None]:
        """Finds the stored group of a parameter, as the optimizer at `root` calls it, or with `prefix` the state."""
        mine = {
            name: group
            for group, place in self.optimizers.get(root, ())
            for name, param in zip(place.names, group.params, strict=True)
            if self.names.get(param, param) == param
        }
        stored = {p: g for g in self.ck.manifest.groups for p in g.params}
        return lambda name: mine.get(name) or stored.get(self.names.get(prefix + name, prefix + name))

    def value(self, path: Path) -> Any:
        """The JSON form of the value at a path, or at one that is equal when it is joined by dots; else `ABSENT`."""
        found = find_object(self.ck.objects, path)
        return found if found is not ABSENT else self._of_groups(dotted(path))

    def _of_groups(self, text: str) -> Any:
        """The groups of an optimizer, or what is in them, as they stood in the state."""
        for root, groups in self.optimizers.items():
            below = text.removeprefix(f"{root}.") if root else text
            if not below.startswith(GROUPS) or (root and below == text):
                continue
            as_saved: dict[str, Any] = {}
            for group, place in groups:
                options = {k: v for k, v in group.options.items() if k != "state"}
                if place.flattened:
                    as_saved |= {f"{GROUPS}.{n}.{o}": v for n in place.names for o, v in options.items()}
                else:
                    as_saved.setdefault(GROUPS, []).append({"params": list(place.names), **options})
            if (found := value_at(as_saved, below)) is not ABSENT:
                return found
        return ABSENT

    def holds_tensors(self, text: str) -> bool:
        """Whether tensors were saved out of the value at a dotted path."""
        return any(name.startswith(f"{text}.") for name in self.tensors)

    def entries(self) -> Iterator[Path]:
        """The paths of all that DCP would have made an entry of."""
        yield from self.paths.values()
        for groups in self.optimizers.values():
            for number, (group, place) in enumerate(groups):
                if place.flattened:
                    yield from ((*place.path, f"{GROUPS}.{n}.{o}") for n in place.names for o in group.options)
                    continue
                yield (*place.path, GROUPS, number, "params")
                for path in _leaves({k: v for k, v in group.options.items() if k != "state"}, (), set()):
                    yield (*place.path, GROUPS, number, *path)
        lists = {dotted(p[:i]) for p in self.paths.values() for i, part in enumerate(p) if type(part) is int}
        own = {"per_rank"} if self.ck.kind == "ucformat" else set()
        yield from _leaves({k: v for k, v in self.ck.objects.items() if k not in own}, (), lists)


def find_object(objects: Mapping[str, Any], path: Path) -> Any:
    """The JSON form of the value at a path, or at one that is equal when it is joined by dots; else `ABSENT`."""
    data: Any = objects
    for part in path:
        key = json_key(part)
        if not isinstance(data, Mapping) or key not in data:
            return value_at(objects, dotted(path))
        data = data[key]
    return data


def value_at(node: Any, text: str) -> Any:
    """The JSON form of the value at a dotted path, whose parts may hold dots themselves; else `ABSENT`."""
    at = -1
    while at < len(text):
        at = text.find(".", at + 1)
        at = len(text) if at < 0 else at
        inner = _item(node, text[:at])
        if inner is not ABSENT:
            found = inner if at == len(text) else value_at(inner, text[at + 1 :])
            if found is not ABSENT:
                return found
    return ABSENT


def _item(node: Any, part: str) -> Any:
    if isinstance(node, Mapping) and set(node) == {"$tuple"}:
        node = node["$tuple"]
    if isinstance(node, list):
        return node[int(part)] if part.isdecimal() and int(part) < len(node) else ABSENT
    if not isinstance(node, Mapping):
        return ABSENT
    if set(node) == {"$dict"}:
        return next((value for key, value in node["$dict"] if str(from_json(key)) == part), ABSENT)
    if is_special(node):
        return ABSENT
    keys = (json_key(part), f"$int:{part}")
    return next((node[k] for k in keys if k in node), ABSENT)


def is_special(node: Mapping[str, Any]) -> bool:
    """Whether this stands for something that is no dictionary."""
    return any(k.startswith("$") and not k.startswith(("$$", "$int:")) for k in node)


def _leaves(node: Any, path: Path, lists: set[str]) -> Iterator[Path]:
    """The paths of plain values, where DCP cuts a state: lists are cut where they hold dictionaries.

    `lists` are those of which tensors were taken out.
    """
    if isinstance(node, Mapping) and set(node) == {"$dict"}:
        for key, inner in node["$dict"]:
            yield from _leaves(inner, (*path, str(from_json(key))), lists)
    elif isinstance(node, Mapping) and not is_special(node):
        for key, inner in node.items():
            number = key.removeprefix("$int:")
            in_list = number != key and dotted(path) in lists
            part = int(number) if in_list else str(IntKey(number)) if number != key else key.removeprefix("$")
            yield from _leaves(inner, (*path, part), lists)
    elif isinstance(node, list) and _is_cut(node):
        for i, inner in enumerate(node):
            yield from _leaves(inner, (*path, i), lists)
    else:
        yield path


def _is_cut(node: Sequence[Any]) -> bool:
    return any((isinstance(v, dict) and not is_special(v)) or (isinstance(v, list) and _is_cut(v)) for v in node)
