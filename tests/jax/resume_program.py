"""A small MLP with Adam that continues in PyTorch, and from there in JAX again, by the examples of the guide."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch

import ucformat
import ucformat.jax
from tests.jax.compare import bits, check_same

_GUIDE = Path(__file__).parents[2] / "docs/guides/jax.md"
_X = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
_Y = np.random.default_rng(2).normal(size=(32, 4)).astype(np.float32)
_OPTIMIZER = optax.adam(1e-2)
#: States of PyTorch's Adam, by those of optax's.
_STATES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
#: As close as two programs come that add in different orders.
_CLOSE = 2e-6


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0))
    params = {
        f"layers_{n}": {"kernel": jax.random.normal(key, shape) / 4, "bias": jnp.zeros(shape[1])}
        for n, (key, shape) in enumerate(zip(keys, ((8, 16), (16, 4)), strict=True))
    }
    return {"params": params, "opt_state": _OPTIMIZER.init(params), "rng": jax.random.key(5)}


def _loss(params: Any) -> Any:
    first, second = params["layers_0"], params["layers_1"]
    hidden = jnp.tanh(_X @ first["kernel"] + first["bias"])
    return jnp.mean((hidden @ second["kernel"] + second["bias"] - _Y) ** 2)


@jax.jit
def step(params: Any, opt_state: Any) -> Any:
    loss, gradients = jax.value_and_grad(_loss)(params)
    updates, opt_state = _OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_0, self.layers_1 = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers_1(torch.tanh(self.layers_0(x)))
        return out


def torch_step(model: Mlp, optimizer: torch.optim.Optimizer) -> float:
    loss = ((model(torch.from_numpy(_X)) - torch.from_numpy(_Y)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def check_equal(params: Any, opt_state: Any, model: Mlp, optimizer: torch.optim.Optimizer) -> None:
    """Every tensor of both programs has the same bits."""
    adam = opt_state[0]
    for layer in ("layers_0", "layers_1"):
        for name, of_torch in (("kernel", "weight"), ("bias", "bias")):
            parameter = getattr(getattr(model, layer), of_torch)
            pairs = [(params, parameter.detach())]
            pairs += [(getattr(adam, s), optimizer.state[parameter][t]) for s, t in _STATES.items()]
            for tree, tensor in pairs:
                array = np.asarray(tree[layer][name])
                transposed = array.T if name == "kernel" else array
                assert bits(transposed) == tensor.contiguous().numpy().tobytes(), (layer, name)
            assert optimizer.state[parameter]["step"].item() == int(adam.count), (layer, name)


def guide(folder: str) -> None:
    """Run the examples in order; after each the programs agree."""
    os.chdir(folder)
    save, again, load, to_torch, to_jax = re.findall(
        r"```python\n(.*?)```", _GUIDE.read_text(), re.DOTALL
    )
    began = init()
    params, opt_state = began["params"], began["opt_state"]
    for _ in range(3):
        params, opt_state, _ = step(params, opt_state)
    names: dict[str, Any] = {"params": params, "opt_state": opt_state, "init": init}
    for code in (save, again):
        exec(compile(code, "jax.md", "exec"), names)  # noqa: S102
    before = names["state"]
    exec(compile(load, "jax.md", "exec"), names)  # noqa: S102
    check_same(before | {"rng": jax.random.key(0)}, names["state"], sharding=False)
    kernel = names["state"]["params"]["layers_0"]["kernel"]
    assert len(kernel.sharding.device_set) == 4
    assert names["saved"].id != ucformat.open("run7/step-3-again").id

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path("orbax/3").resolve(), {"params": params, "opt_state": opt_state})
    check_names(params, opt_state)
    model = names["model"] = Mlp()
    exec(compile(to_torch, "jax.md", "exec"), names)  # noqa: S102
    optimizer, report = names["optimizer"], names["report"]
    assert report, report.problems
    assert [line for line in report.tolerated.missing if "hyper-parameters" not in line] == []
    check_equal(params, opt_state, model, optimizer)
    params, opt_state, loss = step(params, opt_state)
    assert abs(torch_step(model, optimizer) - float(loss)) <= _CLOSE * float(loss)

    exec(compile(to_jax, "jax.md", "exec"), names)  # noqa: S102
    loaded = names["loaded"]
    assert loaded, loaded.left
    params, opt_state = loaded.state["params"], loaded.state["opt_state"]
    assert type(opt_state[0]) is optax.ScaleByAdamState
    check_equal(params, opt_state, model, optimizer)
    _, _, loss = step(params, opt_state)
    assert abs(torch_step(model, optimizer) - float(loss)) <= _CLOSE * float(loss)
    exports(before)


def check_names(params: Any, opt_state: Any) -> None:
    """What `ucformat.jax` saves has the names that Orbax's has, and each fits the target of the other."""
    orbax, own = ucformat.open("orbax/3"), ucformat.open("run7/step-3")
    keys = {key for key in own.tensors if key.name != "rng"}
    assert keys == orbax.tensors.keys()
    assert all(own.metadata.paths[key] == orbax.metadata.paths[key] for key in keys)
    tree = {"params": params, "opt_state": opt_state}
    for ck in (orbax, own):
        loaded = ucformat.jax.load(tree, ck)
        check_same(tree, loaded.state)
        assert loaded, loaded.left
        with_rename = ucformat.jax.load(tree, ck, rename={"nothing": "else"})  # not by paths
        check_same(tree, with_rename.state)


def exports(state: Any) -> None:
    """What was saved is exported to Orbax, which restores all of it."""
    ucformat.export("run7/step-3", "exported", "orbax")
    arguments = ocp.args.PyTreeRestore(
        item=state, restore_args=ocp.checkpoint_utils.construct_restore_args(state)
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(Path("exported").resolve(), args=arguments)
    check_same(state, restored, sharding=False)
