"""Trees of arrays, compared bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def described(tree: Any) -> Any:
    """The tree with a description in the place of each array of JAX."""
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else leaf
        ),
        tree,
    )


def bits(array: Any) -> bytes:
    if isinstance(array, jax.Array) and jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def check_same(tree: Any, other: Any, *, sharding: bool = True) -> None:
    """Trees of the same types that have the same bits, and the same shardings."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(tree),
        jax.tree_util.tree_leaves_with_path(other),
        strict=True,
    )
    for (path, a), (_, b) in pairs:
        label = jax.tree_util.keystr(path)
        if not hasattr(a, "dtype") or isinstance(a, np.generic):
            assert (type(a), a) == (type(b), b), label
            continue
        assert isinstance(b, jax.Array) == isinstance(a, jax.Array), label
        assert (a.dtype, a.shape) == (b.dtype, b.shape), label
        assert bits(a) == bits(b), label
        if sharding and isinstance(a, jax.Array):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), label
