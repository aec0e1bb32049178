"""Restores an Orbax checkpoint with Orbax, in all ways that it has, on virtual devices; run by its interpreter.

Writes every leaf of the tree to OUT, and fails unless all ways restore the same bits.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
devices = len(jax.devices())
MESH = Mesh(np.array(jax.devices()), ("x",))


def flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    keys = [
        json.dumps([getattr(k, "key", getattr(k, "idx", None)) for k in path]) for path, _ in leaves
    ]
    return {key: leaf for key, (_, leaf) in zip(keys, leaves, strict=True)}


def bits(leaf: Any) -> tuple[str, Any, str]:
    if leaf is None or isinstance(leaf, str | bool | int | float):
        return type(leaf).__name__, None, repr(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (
            str(leaf.dtype),
            list(leaf.shape),
            np.asarray(jax.random.key_data(leaf)).tobytes().hex(),
        )
    return str(leaf.dtype), list(leaf.shape), np.asarray(leaf).tobytes().hex()


def sharded(leaf: Any) -> Any:
    """What to restore a leaf as: an array that is cut along its first dim that the devices divide."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    cut = next((d for d, n in enumerate(leaf.shape) if n and n % devices == 0), None)
    spec = [None] * leaf.ndim if cut is None else [*[None] * cut, "x"]
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(MESH, PartitionSpec(*spec))
    )


def by_target(target: Any) -> Any:
    """The arguments that restore a tree as JAX arrays with shardings."""
    return ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
    )


plain = ocp.StandardCheckpointer().restore(folder)
target = jax.tree.map(sharded, plain)
checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
arrays = checkpointer.restore(folder, args=by_target(target))
assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(arrays) if hasattr(a, "shape"))
step = out.with_name("steps") / "7"
shutil.copytree(folder, step / "default")
with ocp.CheckpointManager(step.parent) as manager:
    assert manager.latest_step() == 7
    managed = manager.restore(7, args=by_target(target))
found = {key: bits(leaf) for key, leaf in flat(plain).items()}
typed = {}
for other in (arrays, managed):
    restored = {key: bits(leaf) for key, leaf in flat(other).items()}
    typed = {key: leaf for key, leaf in restored.items() if leaf[0].startswith("key<")}
    assert {key: leaf for key, leaf in restored.items() if key not in typed} == {
        key: leaf for key, leaf in found.items() if key not in typed
    }
if not typed:  # random keys are restored as such only if JAX arrays are
    rest = ocp.PyTreeCheckpointer().restore(folder)
    assert {key: bits(leaf) for key, leaf in flat(rest).items()} == found
out.write_text(json.dumps({"leaves": found, "typed": typed}))
