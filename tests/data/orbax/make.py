"""Makes the checkpoints beside it with Orbax, on four virtual CPU devices, and the truth of each.

pip install orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8
python tests/data/orbax/make.py
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HERE = Path(__file__).parent
DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tp"))


def put(value: Any, *spec: str | None) -> jax.Array:
    return jax.device_put(value, NamedSharding(MESH, PartitionSpec(*spec)))


def parameters() -> dict[str, Any]:
    """Large and small ones: values of up to 1 KiB lie inside the nodes of OCDBT's tree."""
    keys = iter(jax.random.split(jax.random.key(7), 8))
    return {
        "embed": put(jax.random.normal(next(keys), (74, 30)).astype(jnp.bfloat16), "fsdp", "tp"),
        "layers": [
            {
                "w": put(jax.random.normal(next(keys), (30, 22)), "fsdp", "tp"),
                "ln": put(jnp.ones(30)),
            }
            for _ in range(2)
        ],
        "head": put(jax.random.normal(next(keys), (30, 41)), "fsdp", None),
        "zero": put(jnp.zeros((8, 6)), "fsdp"),
    }


def trained() -> dict[str, Any]:
    params = parameters()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = optimizer.init(params)
    for seed in range(3):
        key = jax.random.key(seed)
        grads = jax.tree.map(lambda p, k=key: jax.random.normal(k, p.shape).astype(p.dtype), params)
        grads["zero"] = jnp.zeros_like(params["zero"])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {
        "params": params,
        "opt_state": state,
        "step": 3,
        "lr": 1e-3,
        "name": "odd sizes",
        "rng": jax.random.key(11),
        "order": np.arange(5),
        "nothing": None,
        "empty": {},
    }


def truth(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """`<state>/<name>`; the count of the optimizer and the random key, which are integers of 32 bits, are left out."""
    out = {"weight/order": tree["order"]}
    adam = tree["opt_state"][1][0]
    for state, part in (("weight", tree["params"]), ("mu", adam.mu), ("nu", adam.nu)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
            keys = [str(getattr(k, "key", getattr(k, "idx", ""))) for k in path]
            out[f"{state}/{'.'.join(['params', *keys])}"] = np.asarray(leaf)
    return out


def split(tensors: dict[str, np.ndarray]) -> list[tuple[tuple[str, str, str], np.ndarray]]:
    return [(key.partition("/"), array) for key, array in tensors.items()]


def write(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(a).tobytes() for a in tensors.values())
    (folder / "truth.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    facts = {
        "engine": "orbax",
        "version": ocp.__version__,
        "jax": jax.__version__,
        "optax": optax.__version__,
        "step": 3,
    }
    (folder / "truth.json").write_text(json.dumps(facts, indent=1))


VARIANTS: dict[str, dict[str, Any]] = {
    "ocdbt_zarr2": {},
    "ocdbt_zarr3": {"use_zarr3": True},
    "zarr2_files": {"use_ocdbt": False},
    "zarr3_files": {"use_ocdbt": False, "use_zarr3": True},
    "ocdbt_raw": {"use_compression": False},
    "zarr2_raw": {"use_ocdbt": False, "use_compression": False},
}


def main() -> None:
    tree = trained()
    for name, options in VARIANTS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder / "ckpt", tree)
        write(folder, truth(tree))
    folder = HERE / "manager"
    shutil.rmtree(folder, ignore_errors=True)
    items = {
        "state": ocp.args.PyTreeSave(tree),
        "loader": ocp.args.JsonSave({"epoch": 2, "seen": [1, 2]}),
        "noise": ocp.args.JaxRandomKeySave(jax.random.key(5)),
        "mean": ocp.args.ArraySave(jnp.arange(7.0)),
    }
    options = ocp.CheckpointManagerOptions(step_prefix="step")
    with ocp.CheckpointManager(folder / "ckpt", options=options) as manager:
        manager.save(40, args=ocp.args.Composite(**items))
    tensors = {f"{state}/state.{name}": array for (state, _, name), array in split(truth(tree))}
    write(folder, {**tensors, "weight/mean": np.arange(7, dtype=np.float32)})
    for done in HERE.rglob(
        "commit_success.txt"
    ):  # they name the folder, which is nobody's business
        done.write_text(done.read_text().replace(f"{HERE}/", ""))


main()
