"""The leaves of a tree of a JAX program: their paths, and the tensor or value that each of them is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ucformat.errors import UsageError, first_names
from ucformat.geometry.tensor import TensorInfo
from ucformat.reading.dtypes import dtype_name
from ucformat.reading.readable import IntKey
from ucformat.reading.trees import tensor_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.geometry.tensor import Key
    from ucformat.reading.readable import StatePath

#: Values that are no arrays.
PLAIN = (bool, int, float, complex, str)
_EMPTY = {dict: "Dict", list: "List", tuple: "Tuple"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a tree: what is there, and its path."""

    path: StatePath
    value: Any

    @property
    def name(self) -> str:
        """The path as text, joined by dots."""
        return ".".join(map(str, self.path))

    @property
    def is_array(self) -> bool:
        """Whether it is an array, or describes one."""
        return isinstance(self.value, jax.Array | jax.ShapeDtypeStruct | np.ndarray)

    @property
    def is_random_key(self) -> bool:
        """Whether it is an array of JAX's typed random keys."""
        return self.is_array and bool(jax.dtypes.issubdtype(self.value.dtype, jax.dtypes.prng_key))

    @property
    def empty(self) -> str:
        """The kind of part of a tree that has no leaves; empty for a leaf."""
        if self.value is None:
            return "None"
        kind = next((k for k in _EMPTY if isinstance(self.value, k)), None)
        if kind is None:
            return ""
        return "NamedTuple" if hasattr(self.value, "_fields") else _EMPTY[kind]


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of a tree, and empty parts as leaves, in order; and the structure that puts them together.

    Raises:
        UsageError: a leaf is of a type that is not saved, or two leaves have the same name.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    leaves = [Leaf(tuple(map(_part, path)), value) for path, value in with_paths]
    for leaf in leaves:
        _check(leaf)
    twice = [name for name, n in Counter(leaf.name for leaf in leaves).items() if n > 1]
    if twice:
        raise UsageError(
            f"two leaves of the tree are called {first_names(twice, 3)}",
            hint="names are paths joined by dots: rename keys that have dots in them",
        )
    return leaves, structure


def _is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def _part(key: Any) -> str | int:
    """A part of a path: text, the position in a list, or an integer key."""
    if isinstance(key, jax.tree_util.SequenceKey):
        return int(key.idx)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return str(key.name)
    inner = key.key if hasattr(key, "key") else key  # of a dictionary, or the number of a child
    if isinstance(key, jax.tree_util.DictKey) and type(inner) is int:
        return IntKey(inner)
    return inner if type(inner) is int else str(inner)


def _check(leaf: Leaf) -> None:
    value, label = leaf.value, leaf.name or "the tree itself"
    if isinstance(value, jax.core.Tracer):
        raise UsageError(
            f"{label} is being traced, and has no values", hint="call this outside of jit"
        )
    if leaf.empty or isinstance(value, (*PLAIN, np.generic)):
        return
    if not leaf.is_array:
        raise UsageError(
            f"{label} is a {type(value).__name__}, which is not saved",
            hint="leaves are arrays, numbers, text and None: leave others out of the tree",
        )
    if not leaf.path:
        raise UsageError(
            "the tree is a single array, which has no name", hint='give it one: {"x": array}'
        )
    if not leaf.is_random_key and value.dtype == jax.dtypes.float0:
        raise UsageError(
            f"{label} is of dtype float0, which has no values", hint="leave it out of the tree"
        )


class RandomKeys(NamedTuple):
    """The implementation of typed random keys, and the shape of their data."""

    impl: str
    shape: tuple[int, ...]


def random_keys_of(leaf: Leaf) -> RandomKeys:
    """Return what random keys are, which may only be described."""
    impls: list[str] = []

    def data(keys: Any) -> Any:
        impls.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    shape = jax.eval_shape(data, jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype)).shape
    return RandomKeys(impls[0], tuple(shape))


def data_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape that an array has in a checkpoint; of random keys that of their data."""
    return random_keys_of(leaf).shape if leaf.is_random_key else tuple(leaf.value.shape)


def infos_of(leaves: Sequence[Leaf]) -> list[TensorInfo]:
    """Return the tensor that each of some arrays is, by the paths of all of them.

    Raises:
        UsageError: a dtype is not stored, or two arrays would be the same tensor.
    """
    shapes = {tuple(map(str, leaf.path)): data_shape(leaf) for leaf in leaves}
    keys: dict[tuple[str, ...], Key] = tensor_keys(shapes)
    infos = []
    for leaf in leaves:
        path = tuple(map(str, leaf.path))
        try:
            dtype = "uint32" if leaf.is_random_key else dtype_name(leaf.value.dtype)
        except UsageError as error:
            raise UsageError(f"{leaf.name}: {error.message}", hint=error.hint) from None
        infos.append(TensorInfo(*keys[path], dtype, shapes[path]))
    twice = [str(key) for key, n in Counter(info.key for info in infos).items() if n > 1]
    if twice:
        raise UsageError(
            f"two arrays of the tree would be named {first_names(twice, 3)}",
            hint="names are paths joined by dots: rename keys that have dots in them",
        )
    return infos
