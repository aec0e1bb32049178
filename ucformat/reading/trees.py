"""Trees of arrays as JAX programs have them: which tensor each array is, by the path of its leaf.

Names are paths joined by dots. Optax stores its moments in trees of the parameters' structure:
`opt_state.0.mu` mirrors `params` next to it, so `opt_state.0.mu.layers.0.w` is the state `mu` of
`params.layers.0.w`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ucformat.geometry.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The object with what a JAX program's tree has besides tensors and values: `leaves`, the path and
#: the kind of each leaf that is no array, and `random_keys`, the implementation of each typed key.
JAX = "jax"

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]

_PARAMS = "params"
#: Optax's names of trees of moments. These may leave out parameters (frozen, or another
#: optimizer's), and have tensors of other shapes (factored).
_MOMENTS = frozenset(
    [
        "mu", "nu", "nu_max", "trace", "v", "v_row", "v_col", "sum_of_squares", "e_g", "e_x",
        "acc_grads", "ema", "z",
    ]
)  # fmt: skip


def tensor_keys(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, Key]:
    """Decide which tensor each array is.

    A tree next to `params` mirrors it if it has the same paths and shapes; one of optax's moments,
    if it has some of the paths. The name of the tree is the state. If two arrays would be the same
    tensor, neither is treated so: like all other arrays, they are weights with names of their own.
    """
    plain = {path: Key(".".join(path), "weight") for path in shapes}
    nodes = _nodes(shapes)
    roots = [n for n in nodes if n[-1] == _PARAMS and _PARAMS not in n[:-1]]
    states: dict[Path, Key] = {}
    for root in roots:
        for node in nodes:
            beside = node[: len(root) - 1] == root[:-1] and node[: len(root)] != root
            if beside and _mirrors(node[-1], nodes[node], nodes[root]):
                for path in nodes[node]:
                    states.setdefault(node + path, Key(".".join(root + path), node[-1]))
    times = Counter({**plain, **states}.values())
    return {
        path: states[path] if path in states and times[states[path]] == 1 else key
        for path, key in plain.items()
    }


def random_keys_in(objects: Mapping[str, Any]) -> dict[str, str]:
    """The leaves that are typed random keys, with the implementation, as any writer of trees notes them."""
    return {
        name: kind
        for value in objects.values()
        if isinstance(value, Mapping) and isinstance(keys := value.get("random_keys"), Mapping)
        for name, kind in keys.items()
        if isinstance(kind, str)
    }


def _nodes(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, Shapes]:
    """The inner nodes, outer ones first, and the leaves below each by their paths from it."""
    out: dict[Path, Shapes] = {}
    for path, shape in shapes.items():
        for node in _above(path):
            out.setdefault(node, {})[path[len(node) :]] = shape
    return dict(sorted(out.items(), key=lambda item: len(item[0])))


def _above(path: Path) -> Iterator[Path]:
    for n in range(1, len(path)):
        yield path[:n]


def _mirrors(name: str, below: Shapes, params: Shapes) -> bool:
    if name in _MOMENTS:
        return below.keys() <= params.keys()
    return below == params and not name.isdecimal() and name not in ("weight", _PARAMS)
