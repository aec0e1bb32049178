"""Which tensor and which state each array of a JAX tree is.

Names are paths joined by dots. Optax keeps what it knows of the parameters in trees of their shape: `opt_state.0.mu` is
such a mirror of `params` beside it, so `opt_state.0.mu.layers.0.w` is the state `mu` of `params.layers.0.w`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ucformat.geometry.tensor import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["tensor_keys"]

Path = tuple[str, ...]
Shapes = dict[Path, tuple[int, ...]]

_PARAMS = "params"
#: What optax calls its trees of moments. These may leave out parameters (frozen, or another optimizer's), and hold
#: tensors of other shapes (factored).
_MOMENTS = frozenset(
    ["mu", "nu", "nu_max", "trace", "v", "v_row", "v_col", "sum_of_squares", "e_g", "e_x", "acc_grads", "ema", "z"]
)


def tensor_keys(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, Key]:
    """The tensor that each array is, by its path.

    A tree beside `params` mirrors it where it has the same paths and shapes; one of optax's moments, where it has some
    of the paths. Its name is the state. What would give two arrays one tensor is not done: like all others, they are
    weights of their own name.
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
    return {path: states[path] if path in states and times[states[path]] == 1 else key for path, key in plain.items()}


def _nodes(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, Shapes]:
    """The inner nodes, the outer ones first, and what is below each, as seen from it."""
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
