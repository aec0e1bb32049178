"""JAX in `bench.engines`: the model of `bench.engines_model` as a function, on the devices of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ucformat
import ucformat.jax
from bench.engines_shared import AFTER, BEFORE, GROUPS, HEADS, HIDDEN, LAYERS, VOCAB, WIDTH

_HEAD = HIDDEN // HEADS
_OPTIMIZER = optax.adamw(1e-2, weight_decay=0.01)


def _rotated(x: Any) -> Any:
    frequencies = 1 / 10_000 ** (jnp.arange(0, _HEAD, 2, dtype=jnp.float32) / _HEAD)
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), frequencies)
    angles = jnp.concatenate((angles, angles), -1)[None, :, None]
    first, second = jnp.split(x, 2, -1)
    return x * jnp.cos(angles) + jnp.concatenate((-second, first), -1) * jnp.sin(angles)


def _norm(layer: Any, x: Any) -> Any:
    return layer["weight"] * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def _linear(layer: Any, x: Any) -> Any:
    return x @ layer["weight"].T


def _attention(layer: Any, x: Any) -> Any:
    rows, length, _ = x.shape
    shared = HEADS // GROUPS
    qkv = _linear(layer["linear_qkv"], x).reshape(rows, length, GROUPS, shared + 2, _HEAD)
    q = _rotated(qkv[:, :, :, :shared].reshape(rows, length, HEADS, _HEAD))
    k = jnp.repeat(_rotated(qkv[:, :, :, shared]), shared, 2)
    v = jnp.repeat(qkv[:, :, :, shared + 1], shared, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(_HEAD))
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return _linear(layer["linear_proj"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def _loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"]["word_embeddings"]["weight"][tokens]
    for number in range(LAYERS):
        layer = params["decoder"]["layers"][str(number)]
        x = x + _attention(layer["self_attention"], _norm(layer["input_layernorm"], x))
        gate, up = jnp.split(
            _linear(layer["mlp"]["linear_fc1"], _norm(layer["pre_mlp_layernorm"], x)), 2, -1
        )
        x = x + _linear(layer["mlp"]["linear_fc2"], jax.nn.gelu(gate, approximate=False) * up)
    logits = _linear(params["output_layer"], _norm(params["decoder"]["final_layernorm"], x))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))
    return losses.mean()


@jax.jit
def _step(params: Any, opt_state: Any, tokens: Any) -> Any:
    loss, gradients = jax.value_and_grad(_loss)(params, tokens)
    updates, opt_state = _OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def _initial() -> dict[str, Any]:
    generator = np.random.default_rng(0)

    def matrix(*shape: int) -> dict[str, Any]:
        return {"weight": jnp.asarray(generator.normal(0, 0.3, shape), jnp.float32)}

    def norm() -> dict[str, Any]:
        return {"weight": jnp.ones(HIDDEN)}

    def layer() -> dict[str, Any]:
        attention = {
            "linear_proj": matrix(HIDDEN, HIDDEN),
            "linear_qkv": matrix((HEADS + 2 * GROUPS) * _HEAD, HIDDEN),
        }
        mlp = {"linear_fc1": matrix(2 * WIDTH, HIDDEN), "linear_fc2": matrix(HIDDEN, WIDTH)}
        return {
            "input_layernorm": norm(),
            "self_attention": attention,
            "pre_mlp_layernorm": norm(),
            "mlp": mlp,
        }

    return {
        "embedding": {"word_embeddings": matrix(VOCAB, HIDDEN)},
        "decoder": {
            "layers": {str(number): layer() for number in range(LAYERS)},
            "final_layernorm": norm(),
        },
        "output_layer": matrix(VOCAB, HIDDEN),
    }


def _sharded(tree: Any) -> Any:
    """A tree with rows over all devices, where they can be cut evenly."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def placed(leaf: Any) -> Any:
        even = leaf.ndim > 1 and leaf.shape[0] % len(jax.devices()) == 0
        spec = PartitionSpec("data") if even else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree)


def run(text: str) -> None:
    """Do a job, as `bench.engines_program` does."""
    job = json.loads(text)
    params = _sharded(_initial())
    opt_state = _sharded(_OPTIMIZER.init(params))
    told: dict[str, Any] = {"losses": {}, "problems": {}}

    def trained(first: int, steps: int) -> list[float]:
        nonlocal params, opt_state
        losses = []
        for tokens in job["batches"][first : first + steps]:
            params, opt_state, loss = _step(params, opt_state, jnp.asarray(tokens))
            losses.append(float(loss))
        return losses

    if job["save"]:
        trained(0, BEFORE)
        ucformat.jax.save({"params": params, "opt_state": opt_state}, job["save"])
        told["losses"][""] = trained(BEFORE, AFTER)
    for source, load in job["loads"].items():
        ck = ucformat.open(load["place"], view=load["view"])
        adam = opt_state[0]
        target = {
            "params": params,
            "opt_state": [{"mu": adam.mu, "nu": adam.nu, "count": adam.count}],
        }
        if steps := {group["step"] for group in ck.metadata.groups if "step" in group}:
            del target["opt_state"][0]["count"]
        loaded = ucformat.jax.load(target, ck)
        # optax has no place for copies of weights that are in full precision themselves
        told["problems"][source] = [line for line in loaded.left if "(master)" not in line]
        params, moments = loaded.state["params"], loaded.state["opt_state"][0]
        count = jnp.full_like(adam.count, *steps) if steps else moments["count"]
        opt_state = (adam._replace(mu=moments["mu"], nu=moments["nu"], count=count), *opt_state[1:])
        state = {"params": params, "opt_state": opt_state}
        ucformat.jax.save(state, f"{job['folder']}/{source}")
        told["losses"][source] = trained(BEFORE, AFTER)
    Path(job["folder"], "told.json").write_text(json.dumps(told))
