"""JAX in `bench.engines`: the models of `bench.engines_model` as functions, on the devices of one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ucformat
import ucformat.jax
from bench.engines_shared import (
    AFTER,
    BEFORE,
    CHOSEN,
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    WIDTH,
)

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


def _attended(q: Any, k: Any, v: Any) -> Any:
    """Of `[row, place, head, element]`: each group of queries has a key and a value."""
    rows, length = q.shape[:2]
    q, k = _rotated(q), _rotated(k)
    k, v = (jnp.repeat(part, HEADS // GROUPS, 2) for part in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(_HEAD))
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, HIDDEN)


def _loss_of(logits: Any, tokens: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))
    return losses.mean()


def _dense_loss(params: Any, tokens: Any) -> Any:
    x = params["embedding"]["word_embeddings"]["weight"][tokens]
    for number in range(LAYERS):
        layer = params["decoder"]["layers"][str(number)]
        attention = layer["self_attention"]
        qkv = _linear(attention["linear_qkv"], _norm(layer["input_layernorm"], x))
        qkv = qkv.reshape(*x.shape[:2], GROUPS, HEADS // GROUPS + 2, _HEAD)
        q = qkv[:, :, :, :-2].reshape(*x.shape[:2], HEADS, _HEAD)
        x = x + _linear(attention["linear_proj"], _attended(q, qkv[:, :, :, -2], qkv[:, :, :, -1]))
        gate, up = jnp.split(
            _linear(layer["mlp"]["linear_fc1"], _norm(layer["pre_mlp_layernorm"], x)), 2, -1
        )
        x = x + _linear(layer["mlp"]["linear_fc2"], jax.nn.gelu(gate, approximate=False) * up)
    logits = _linear(params["output_layer"], _norm(params["decoder"]["final_layernorm"], x))
    return _loss_of(logits, tokens)


def _mixture(layer: Any, x: Any) -> Any:
    """All experts of each token, weighted by the gate: those that are not chosen by zero."""
    best, chosen = jax.lax.top_k(jax.nn.softmax(_linear(layer["gate"], x)), CHOSEN)
    weights = best / best.sum(-1, keepdims=True)
    weights = (jax.nn.one_hot(chosen, EXPERTS) * weights[..., None]).sum(-2)
    experts = layer["experts"]
    gate, up = (jnp.einsum("blh,ehw->blew", x, experts[name]) for name in ("wi_0", "wi_1"))
    return jnp.einsum("blew,ewh,ble->blh", jax.nn.silu(gate) * up, experts["wo"], weights)


def _mixtral_loss(params: Any, tokens: Any) -> Any:
    model = params["model"]
    x = model["embed_tokens"]["weight"][tokens]
    for number in range(LAYERS):
        layer = model["layers"][str(number)]
        attention, y = layer["self_attn"], _norm(layer["input_layernorm"], x)
        q, k, v = (
            _linear(attention[f"{part}_proj"], y).reshape(*x.shape[:2], -1, _HEAD) for part in "qkv"
        )
        x = x + _linear(attention["o_proj"], _attended(q, k, v))
        x = x + _mixture(layer["mlp"], _norm(layer["post_attention_layernorm"], x))
    return _loss_of(_linear(params["lm_head"], _norm(model["norm"], x)), tokens)


@partial(jax.jit, static_argnums=0)
def _step(loss_of: Any, params: Any, opt_state: Any, tokens: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
    updates, opt_state = _OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class _Initial:
    """The weights with which a training begins."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def array(self, *shape: int) -> Any:
        return jnp.asarray(self.generator.normal(0, 0.3, shape), jnp.float32)

    def matrix(self, *shape: int) -> dict[str, Any]:
        return {"weight": self.array(*shape)}

    @staticmethod
    def norm() -> dict[str, Any]:
        return {"weight": jnp.ones(HIDDEN)}

    def dense_layer(self) -> dict[str, Any]:
        attention = {
            "linear_proj": self.matrix(HIDDEN, HIDDEN),
            "linear_qkv": self.matrix((HEADS + 2 * GROUPS) * _HEAD, HIDDEN),
        }
        mlp = {
            "linear_fc1": self.matrix(2 * WIDTH, HIDDEN),
            "linear_fc2": self.matrix(HIDDEN, WIDTH),
        }
        return {
            "input_layernorm": self.norm(),
            "self_attention": attention,
            "pre_mlp_layernorm": self.norm(),
            "mlp": mlp,
        }

    def dense(self) -> dict[str, Any]:
        return {
            "embedding": {"word_embeddings": self.matrix(VOCAB, HIDDEN)},
            "decoder": {
                "layers": {str(number): self.dense_layer() for number in range(LAYERS)},
                "final_layernorm": self.norm(),
            },
            "output_layer": self.matrix(VOCAB, HIDDEN),
        }

    def mixtral_layer(self) -> dict[str, Any]:
        heads = {"q": HEADS, "k": GROUPS, "v": GROUPS}
        attention = {f"{part}_proj": self.matrix(n * _HEAD, HIDDEN) for part, n in heads.items()}
        experts = {
            **{name: self.array(EXPERTS, HIDDEN, WIDTH) for name in ("wi_0", "wi_1")},
            "wo": self.array(EXPERTS, WIDTH, HIDDEN),
        }
        return {
            "input_layernorm": self.norm(),
            "self_attn": {**attention, "o_proj": self.matrix(HIDDEN, HIDDEN)},
            "post_attention_layernorm": self.norm(),
            "mlp": {"gate": self.matrix(EXPERTS, HIDDEN), "experts": experts},
        }

    def mixtral(self) -> dict[str, Any]:
        return {
            "model": {
                "embed_tokens": self.matrix(VOCAB, HIDDEN),
                "layers": {str(number): self.mixtral_layer() for number in range(LAYERS)},
                "norm": self.norm(),
            },
            "lm_head": self.matrix(VOCAB, HIDDEN),
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
    is_dense = job["model"] == "dense"
    params = _sharded(_Initial().dense() if is_dense else _Initial().mixtral())
    opt_state = _sharded(_OPTIMIZER.init(params))
    told: dict[str, Any] = {"losses": {}, "problems": {}}

    def trained(first: int, steps: int) -> list[float]:
        nonlocal params, opt_state
        losses = []
        for tokens in job["batches"][first : first + steps]:
            params, opt_state, loss = _step(
                _dense_loss if is_dense else _mixtral_loss, params, opt_state, jnp.asarray(tokens)
            )
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
