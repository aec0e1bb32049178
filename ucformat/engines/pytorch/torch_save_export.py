"""One file of `torch.save`, without code: weights by name, or a nested state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError, first_names
from ucformat.exporters.base import Span, Target, left_out
from ucformat.exporters.pickle import ALLOWED, Global, SavedTensor, Storage
from ucformat.exporters.zip_file import torch_file
from ucformat.geometry.tensor import Key
from ucformat.reading.readable import GroupPlace, IntKey, path_from_json
from ucformat.reading.state_names import GROUPS, dotted
from ucformat.reading.values import from_json, plain_form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.engines.pytorch.export_options import TorchOptions
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.reading.readable import StatePath


def plan_target(source: Checkpoint, infos: Sequence[TensorInfo], options: TorchOptions) -> Target:
    """Plan a file that `torch.load` reads."""
    if options.nested:
        value, left = nested_state(source, infos, Leaves(_tensor, _array, _dtype))
        left = (*left_out(source, infos, values=source.objects, groups=True), *left)
    else:
        tensors = {info.name: _tensor(info) for info in infos}
        tied = {alias: tensors[name] for alias, name in source.aliases.items() if name in tensors}
        value, left = tensors | tied, left_out(source, infos)
    return Target((torch_file(options.name, value, last=True),), left)


def _tensor(info: TensorInfo) -> SavedTensor:
    return SavedTensor(Storage(Span.whole(info)), info.shape)


def _array(array: NDArray[Any]) -> SavedTensor:
    from ucformat.reading.dtypes import dtype_name  # with NumPy, which the options do not need

    storage = Storage(Span(dtype_name(array.dtype), array.size, ()), array.tobytes())
    return SavedTensor(storage, array.shape)


def _dtype(name: str) -> Global:
    dtype = Global("torch", name)
    if dtype not in ALLOWED:
        raise UnsupportedError(f"the dtype {name} is not written to a pickle")
    return dtype


# The nested state of the program that saved a checkpoint, from the paths and places that the
# checkpoint records.
#
# Where it records none, the state is that of `torch.distributed.checkpoint.state_dict`: `{"model":
# {name: weight}, "optim": {"state": {name: {state: tensor}}, "param_groups": […]}}`, and the values
# by their names.

_STATES = "state"
_MODEL, _OPTIM = "model", "optim"
_NOTES = ("unnamed", "orbax")  # objects that sources add
#: Forms of values that cannot be written without code or classes, and what they are.
_FOREIGN = {
    "$class": "an object", "$opaque": "a pickle", "$stream": "a file in memory",
    "$slice": "a slice", "$datetime": "a date or time", "$path": "a path",
}  # fmt: skip
_MAX_NAMED = 10
_MAX_DEPTH = 200  # of values, too


@dataclass(frozen=True, slots=True)
class Leaves:
    """Makes the leaves of a state."""

    tensor: Callable[[TensorInfo], Any]
    array: Callable[[NDArray[Any]], Any]
    dtype: Callable[[str], Any]


class _List(dict[int, Any]):
    """A list by position, until all tensors are in it: positions that paths give allocate nothing."""


class _Tuple(_List):
    """A tuple, until all tensors are in it."""


class _NoPlaceError(Exception):
    """A value cannot be written."""


def nested_state(
    source: Checkpoint, infos: Sequence[TensorInfo], leaves: Leaves
) -> tuple[Any, tuple[str, ...]]:
    """The state, and which values are left out of it."""
    try:
        return _nested_state(source, infos, leaves)
    except (IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"the paths and values that {source.url} records are not those of a state: "
            f"{type(error).__name__}: {error}",
            hint="export without --nested",
        ) from error


def _nested_state(
    source: Checkpoint, infos: Sequence[TensorInfo], leaves: Leaves
) -> tuple[Any, tuple[str, ...]]:
    build = _StateBuilder(source, {info.key: info for info in infos}, leaves)
    build.values()
    recorded = source.metadata.paths
    is_recorded = any(info.key in recorded for info in infos)
    groups = source.metadata.groups
    places: Sequence[GroupPlace | None] = source.metadata.places
    if not places:
        places = [
            None if is_recorded else GroupPlace((_OPTIM,), tuple(g["params"])) for g in groups
        ]
    further: list[tuple[StatePath, Key]] = []  # of tied tensors: last, as modules mostly have them
    for info in infos:
        paths = recorded.get(info.key, ()) if is_recorded else _usual_paths(source, info)
        for number, path in enumerate(paths):
            if number:
                further.append((path, info.key))
            else:
                build.put_tensor(build.numbered(path), info.key)
    for path, key in further:
        build.put_tensor(path, key)
    if lost := [str(info.key) for info in infos if info.key not in build.placed]:
        raise UnsupportedError(
            f"{source.url} records no path in the program's state for "
            f"{first_names(lost, _MAX_NAMED)}",
            hint="export without --nested, or choose the states that have one: --state",
        )
    for group, place in zip(groups, places, strict=True):
        if place is not None:
            build.group(group, place)
        elif not build.has_groups:
            build.left.append(f"the hyper-parameters of {len(group['params']):,} parameters")
    return build.finished(build.root), tuple(build.left)


def _is_numbered(place: GroupPlace) -> bool:
    """Whether an optimizer numbers its parameters."""
    return all(name.isdecimal() for name in place.names)


def _usual_paths(source: Checkpoint, info: TensorInfo) -> list[StatePath]:
    if info.state == "weight":
        aliases = (alias for alias, name in source.aliases.items() if name == info.name)
        return [(_MODEL, name) for name in (info.name, *aliases)]
    return [(_OPTIM, _STATES, info.name, info.state)]


class _StateBuilder:
    """A state, as far as it is built."""

    def __init__(self, source: Checkpoint, infos: Mapping[Key, TensorInfo], leaves: Leaves) -> None:
        self.source, self.infos, self.leaves = source, infos, leaves
        self.root: Any = {}
        self.placed: dict[Key, Any] = {}
        self.left: list[str] = []
        # dictionaries that are lists, of which the values have some items: by `id`
        self.lists: set[int] = set()
        self.has_groups = False  # whether the values contain those of an optimizer

    def tensor(self, key: Key) -> Any:
        """The leaf of a tensor, the same for all its paths."""
        if key not in self.placed:
            self.placed[key] = self.leaves.tensor(self.infos[key])
        return self.placed[key]

    def values(self) -> None:
        """Begin with the values that are not tensors."""
        objects = {k: v for k, v in self.source.objects.items() if k not in _NOTES}
        first = {p[0] for paths in self.source.metadata.paths.values() for p in paths if p}
        if first and all(type(part) is int for part in first):  # the state is a list
            objects, self.root = objects.get("value", []), _List()
        self.root = self.decode(objects, "")

    def decode(self, value: Any, path: str) -> Any:
        """The value of a JSON form."""
        value = plain_form(value)
        if isinstance(value, list):
            return _List((i, self.decode(v, f"{path}[{i}]")) for i, v in enumerate(value))
        if not isinstance(value, dict):
            return value
        form = next(iter(value), "")
        if form in _FOREIGN:
            raise _NoPlaceError(
                f"the value {path} ({value[form] if form == '$class' else _FOREIGN[form]})"
            )
        if len(value) == 1 and form == "$tuple":
            return _Tuple((i, self.decode(v, f"{path}[{i}]")) for i, v in enumerate(value[form]))
        if len(value) == 1 and form == "$ref":
            key = Key(value[form], "weight")
            if key not in self.infos:
                raise _NoPlaceError(f"the value {path}, a tensor that is not exported")
            return self.tensor(key)
        if len(value) == 1 and form == "$tensor":
            return self.leaves.array(from_json(value))
        if len(value) == 1 and form == "$dtype":
            return self.leaves.dtype(value[form])
        if len(value) == 1 and form == "$dict":
            return self.items([(from_json(k), v) for k, v in value[form]], path)
        if len(value) == 1 and form.startswith("$") and not form.startswith(("$$", "$int:")):
            return from_json(value)
        return self.items([(path_from_json([k])[0], v) for k, v in value.items()], path)

    def items(self, items: list[tuple[Any, Any]], path: str) -> dict[Any, Any]:
        """A dictionary, without the items that cannot be written."""
        out = {}
        self.has_groups |= any(key == GROUPS for key, _ in items)
        for key, value in items:
            try:
                out[key] = self.decode(value, f"{path}.{key}" if path else str(key))
            except _NoPlaceError as error:
                self.left.append(str(error))
        return out

    def put(self, path: StatePath, value: Any) -> None:
        """Put a value at its path; lists and dictionaries on the way are made."""
        if len(path) > _MAX_DEPTH:
            raise IntegrityError(
                f"{self.source.url} has a tensor {len(path):,} levels deep in the program's state"
            )
        node: Any = self.root
        for part, after in zip(path, (*path[1:], None), strict=True):
            is_list = isinstance(node, _List)
            if not isinstance(node, dict) or (is_list and type(part) is not int):
                raise UnsupportedError(
                    f"{self.source.url} has a tensor at {dotted(path)}, below another value",
                    hint="export without --nested",
                )
            if type(part) is int:
                self.lists.add(id(node))
            if after is None:
                node[part] = value
            elif part not in node or (is_list and node[part] is None):
                node[part] = _List() if type(after) is int else {}
            node = node[part]

    def put_tensor(self, path: StatePath, key: Key) -> None:
        """Put a tensor at a path where there is nothing yet."""
        if self.at(path, None) is not None:
            raise UnsupportedError(
                f"{self.source.url} has {key} at {dotted(path)}, where another value is",
                hint="export without --nested",
            )
        self.put(path, self.tensor(key))

    def numbered(self, path: StatePath) -> StatePath:
        """The path of a state of a numbered parameter, where DCP made a text of the number."""
        if (
            len(path) < 3
            or path[-3] != _STATES
            or not (isinstance(path[-2], str) and path[-2].isdecimal())
        ):
            return path
        groups = self.at((*path[:-3], GROUPS), [])
        is_numbered = any(
            IntKey(path[-2]) in _items(g.get("params"))
            for g in _items(groups)
            if isinstance(g, dict)
        )
        return (*path[:-2], IntKey(path[-2]), path[-1]) if is_numbered else path

    def group(self, group: Mapping[str, Any], place: GroupPlace) -> None:
        """Put an optimizer group at its place."""
        options = self.items(
            [(k, v) for k, v in group.items() if k not in ("params", _STATES)], GROUPS
        )
        keys = [IntKey(name) if _is_numbered(place) else name for name in place.names]
        if place.flattened:
            for name, option in ((n, o) for n in place.names for o in options):
                self.put((*place.path, f"{GROUPS}.{name}.{option}"), options[option])
        else:
            placed_group = {"params": _List(enumerate(keys)), **options}
            groups = [*_items(self.at((*place.path, GROUPS), [])), placed_group]
            self.put((*place.path, GROUPS), _List(enumerate(groups)))
            self.put((*place.path, _STATES), self.at((*place.path, _STATES), {}))
        stateful = self.at((*place.path, _STATES), {})
        for state, values in group.get(_STATES, {}).items():
            by_name = isinstance(values, dict) and values.keys() <= set(group["params"])
            for key, name in zip(keys, group["params"], strict=True):
                if (name in values) if by_name else (key in stateful or not stateful):
                    value = self.decode(values[name] if by_name else values, f"{name}.{state}")
                    self.put((*place.path, _STATES, key, state), value)

    def at(self, path: StatePath, default: Any) -> Any:
        """The value at a path."""
        node: Any = self.root
        for part in path:
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def finished(self, value: Any, path: str = "") -> Any:
        """The state with plain keys, and its lists and tuples."""
        if isinstance(value, _List) or (isinstance(value, dict) and id(value) in self.lists):
            if value.keys() != set(range(len(value))):
                raise UnsupportedError(
                    f"{self.source.url} does not record all items of the list "
                    f"{path or 'that is the state'}",
                    hint="export without --nested",
                )
            items = [self.finished(value[i], f"{path}[{i}]") for i in range(len(value))]
            return tuple(items) if isinstance(value, _Tuple) else items
        if isinstance(value, dict):
            plain = {int(k) if isinstance(k, IntKey) else k: v for k, v in value.items()}
            below = f"{path}." if path else ""
            return {k: self.finished(v, f"{below}{k}") for k, v in plain.items()}
        return int(value) if isinstance(value, IntKey) else value


def _items(value: Any) -> list[Any]:
    """The items of a list, or of a value that is to be one; none of another value."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
