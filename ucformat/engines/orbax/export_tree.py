"""The tree that is exported to Orbax: its leaves, with their paths.

What came from Orbax has its tree; so has what records the paths of a program's state. Other
checkpoints become `{"params": {name: weight}, "exp_avg": {name: tensor}, …}`, with names that
contain dots, and their values by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucformat.engines.orbax.tree import NAMES, tensor_keys
from ucformat.engines.orbax.zarr_array import ML_DTYPES
from ucformat.geometry.tensor import Key, TensorInfo
from ucformat.reading.dtypes import dtype_name
from ucformat.reading.readable import path_from_json
from ucformat.schema import ZARR_DTYPES
from ucformat.sources.values import from_json, is_special, plain_form

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.reading.readable import StatePath


_ORBAX = "orbax"  # the object with what the source found besides
_EMPTY = {type(None): "None", dict: "Dict", list: "List"}


class Array(NamedTuple):
    """A small array that is no tensor of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf: its path, its type in Orbax's words, and its content: a tensor, an array, a text, or nothing."""

    path: StatePath
    kind: str
    content: TensorInfo | Array | str | None

    @property
    def name(self) -> str:
        """Its name, which is also the name of its array."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """The tree.

    Attributes:
        custom: the user's metadata, with the names and states that tensors had, where their paths
            do not say them.
        random_keys: the implementation of each leaf that is one of JAX's typed random keys.
        left: the values that have no place in it.
    """

    leaves: tuple[Leaf, ...]
    custom: Any
    random_keys: dict[str, str]
    left: tuple[str, ...]


def tree_of(source: Checkpoint, infos: Sequence[TensorInfo]) -> OrbaxTree:
    """The tree of a checkpoint."""
    found = source.objects.get(_ORBAX)
    known: dict[str, Any] = (
        found if source.metadata.engine.get("name") == _ORBAX and isinstance(found, dict) else {}
    )
    kinds = {
        ".".join(map(str, path_from_json(path))): (path, kind)
        for path, kind in known.get("leaves", ())
    }
    values = _Values({info.key: info for info in infos})
    values.left += [f"the item {name}" for name in known.get("items", {})]
    for name, value in source.objects.items():
        if value is not found or not known:
            path, kind = kinds.pop(name, ([name], ""))
            values.add(path_from_json(path), value, kind)
    values.leaves += [Leaf(path_from_json(path), kind, None) for path, kind in kinds.values()]
    keys = {
        name: kind for name, kind in known.get("random_keys", {}).items() if isinstance(kind, str)
    }
    leaves = [
        leaf
        for info in infos
        if info.key not in values.placed
        for leaf in _tensor_leaves(source, info, keys)
    ]
    above = {leaf.path[:end] for leaf in leaves for end in range(len(leaf.path) + 1)}
    leaves += [leaf for leaf in values.leaves if leaf.content is not None or leaf.path not in above]
    custom = next(iter(known.get("trees", {}).values()), None)
    if noted := _noted(leaves):
        custom = {**(custom if isinstance(custom, dict) else {}), NAMES: noted}
    leaves.sort(key=lambda leaf: tuple(map(str, leaf.path)))
    return OrbaxTree(tuple(leaves), custom, keys, tuple(values.left))


def _tensor_leaves(
    source: Checkpoint, info: TensorInfo, random_keys: Mapping[str, str]
) -> Iterator[Leaf]:
    paths = source.metadata.paths.get(info.key, ())
    if not paths:
        names = [
            info.name,
            *(a for a, of in source.aliases.items() if of == info.name and info.state == "weight"),
        ]
        paths = tuple(("params" if info.state == "weight" else info.state, name) for name in names)
    for path in paths:
        leaf = Leaf(path, "np.ndarray", info)  # JAX arrays are restored only with a sharding
        yield Leaf(path, "jax.Array", info) if leaf.name in random_keys else leaf


class _Values:
    """The leaves of values, and the tensors that they refer to; `left` are the values that have no place in a tree."""

    def __init__(self, infos: Mapping[Key, TensorInfo]) -> None:
        self._infos = infos
        self.leaves: list[Leaf] = []
        self.left: list[str] = []
        self.placed: set[Key] = set()

    def add(self, path: StatePath, value: Any, kind: str) -> None:
        """Add the leaves of a value in its JSON form; `kind` is their type, if it is known."""
        value = plain_form(value)
        if isinstance(value, dict) and set(value) == {"$tuple"}:
            value = value["$tuple"]
        if isinstance(value, list) and value:
            for i, item in enumerate(value):
                self.add((*path, i), item, kind)
        elif isinstance(value, dict) and value and not is_special(value):
            for key, item in value.items():
                self.add((*path, *path_from_json([key])), item, kind)
        elif (leaf := self._leaf(path, value, kind)) is not None:
            self.leaves.append(leaf)
        else:
            self.left.append(f"the value {'.'.join(map(str, path))}")

    def _leaf(self, path: StatePath, value: Any, kind: str) -> Leaf | None:
        """The leaf of a number, text, array or tensor, or of nothing; None if the value has no place."""
        if not value and type(value) in _EMPTY:
            return Leaf(path, kind or _EMPTY[type(value)], None)
        if isinstance(value, str):  # whose names Orbax reads as JSON pointers
            return None if set("/~") & set("".join(map(str, path))) else Leaf(path, "string", value)
        if isinstance(value, dict) and set(value) == {"$ref"}:
            info = self._infos.get(Key(value["$ref"], "weight"))
            self.placed |= {info.key} if info else set()
            return Leaf(path, "np.ndarray", info) if info else None
        if isinstance(value, dict) and set(value) <= {"$tensor", "$float"}:
            value = from_json(value)
        if isinstance(value, np.ndarray):
            if dtype_name(value.dtype) not in (*ZARR_DTYPES, *ML_DTYPES):
                return None
            return Leaf(
                path,
                kind or "np.ndarray",
                Array(dtype_name(value.dtype), value.shape, value.tobytes()),
            )
        if type(value) is bool:
            return Leaf(path, "scalar", Array("bool", (), bytes([value])))
        if isinstance(value, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
            number = np.asarray(value, "<f8" if isinstance(value, float) else "<i8")
            return Leaf(path, "scalar", Array(number.dtype.name, (), number.tobytes()))
        return None


def _noted(leaves: Sequence[Leaf]) -> dict[str, list[str]]:
    """The name and state of each tensor whose path says another."""
    arrays = {
        tuple(map(str, leaf.path)): leaf.content
        for leaf in leaves
        if isinstance(leaf.content, TensorInfo | Array) and leaf.kind != "scalar"
    }
    keys = tensor_keys({path: content.shape for path, content in arrays.items()})
    out: dict[str, list[str]] = {}
    seen: set[Key] = set()
    for path, content in arrays.items():
        key = content.key if isinstance(content, TensorInfo) else keys[path]
        if key in seen:  # a tied name has its own path
            key = Key(".".join(path[1:]), key.state)
        seen.add(key)
        if key != keys[path]:
            out[".".join(path)] = list(key)
    return out
