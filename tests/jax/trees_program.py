"""Trees of one process with four devices, without PyTorch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import ucformat
import ucformat.jax
from tests.jax.compare import check_same, described
from ucformat.errors import StateMismatch, UsageError
from ucformat.jax.loading import _has_arrays_of
from ucformat.reading.dtypes import numpy_dtype
from ucformat.schema import ITEMSIZE

MESH = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
#: Those of JAX, in 32-bit mode, that are stored under the same name.
DTYPES = [
    name
    for name in ITEMSIZE
    if _has_arrays_of(name) and jax.dtypes.canonicalize_dtype(numpy_dtype(name)).name == name
]


def over(*spec: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*spec))


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape).astype(dtype)


class Pair(NamedTuple):
    first: Any
    second: Any


@partial(
    jax.tree_util.register_dataclass, data_fields=["params", "opt_state"], meta_fields=["name"]
)
@dataclass
class TrainState:
    params: Any
    opt_state: Any
    name: str = "mlp"


def everything() -> dict[str, Any]:
    params = {
        "l0": {"kernel": jax.device_put(numbers(8, 4), over("x", "y")), "bias": jnp.ones(4)},
        "l1": {"kernel": jax.device_put(numbers(4, 4, dtype=jnp.bfloat16), over(None, ("y", "x")))},
        "blocks": [jax.device_put(numbers(4, 2, 3), over("y")), jax.device_put(numbers(6), over())],
        "numbered": {0: jnp.zeros(2), 10: jnp.ones(1)},
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    keys = jax.random.split(jax.random.key(3), 4)
    return {
        "train": TrainState(params, optimizer.init(params)),
        "rng": {
            "one": jax.device_put(jax.random.key(7), over()),
            "many": jax.device_put(keys, over("x")),
            "rbg": jax.random.key(1, impl="rbg"),
            "raw": jax.random.PRNGKey(2),
        },
        "dtypes": {name: jnp.asarray(numbers(5, dtype=numpy_dtype(name))) for name in DTYPES},
        "int4": jnp.array([-8, -1, 0, 7], jnp.int4),
        "pair": Pair(jnp.int32(3), (jnp.zeros((0, 3)), [])),
        "numpy": {"big": numbers(3).astype(">f4"), "wide": numbers(3, dtype=np.float64).T},
        "scalars": {"step": 3, "lr": 0.5, "name": "run", "on": True, "z": 1j, "g": np.float32(2.5)},
        "none": None,
        "empty": {},
    }


def comes_back(folder: str) -> None:
    """Whatever is saved comes back, in each form, and nothing of it needs PyTorch."""
    state = everything()
    native = state | {"numpy": state["numpy"] | {"big": numbers(3)}}
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2", "bool", "complex64"} < {
        *DTYPES
    }
    for form in ("zarr", "packed"):
        place = f"{folder}/{form}"
        saved = ucformat.jax.save(state, place, step=3, form=form, run="r", metrics={"loss": 1.0})
        loaded = ucformat.jax.load(described(native), place)
        check_same(native, loaded.state)
        assert (bool(loaded), loaded.left, loaded.step, loaded.id) == (True, (), 3, saved.id), form
        assert loaded.lineage.kind == "resume"
    ck = ucformat.open(place)
    assert ck.states("train.params.l0.kernel") == ["weight", "mu", "nu"]
    assert ck.metadata.engine == {"name": "jax", "version": jax.__version__}
    by_hand = jax.tree.map(lambda leaf: leaf, native)  # arrays are targets, too
    check_same(native, ucformat.jax.load(by_hand, ck, strict=True).state)
    assert "torch.nn" not in sys.modules
    changes_devices(state, place)
    waits(folder)
    Path(folder, "dtypes.json").write_text(json.dumps(DTYPES))


def changes_devices(state: Any, place: str) -> None:
    """What four devices saved is loaded by one, by another mesh, as NumPy's, and as a part (google/orbax#648)."""
    one = SingleDeviceSharding(jax.devices()[3])
    line = NamedSharding(Mesh(np.array(jax.devices())[::-1], ("z",)), PartitionSpec("z"))
    kernel = state["train"].params["l0"]["kernel"]
    for sharding in (one, line, over("y", "x"), over(None, "y"), over(("x", "y"))):
        target = {
            "train": {
                "params": {
                    "l0": {"kernel": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)}
                }
            }
        }
        loaded = ucformat.jax.load(target, place)
        array = loaded.state["train"]["params"]["l0"]["kernel"]
        assert (array.sharding, array.tolist()) == (sharding, kernel.tolist()), sharding
        assert "train.params.l0.bias (weight)" in loaded.left
        assert not loaded
        assert not any("rng" in name or "scalars" in name for name in loaded.left), loaded.left
        assert ucformat.jax.load(target, place, leave=["train.*"]), "the rest is left on purpose"
    target["train"]["params"]["l0"]["kernel"] = np.empty((8, 4), np.float32)
    array = ucformat.jax.load(target, place).state["train"]["params"]["l0"]["kernel"]
    assert type(array) is np.ndarray
    assert (array == np.asarray(kernel)).all()
    loaded = ucformat.jax.load_arrays(
        place,
        lambda info: (
            None
            if info.state == "nu" or info.name.startswith("numpy")
            else line
            if info.shape == (8, 4)
            else over()
        ),
    )
    assert loaded.state["mu"].keys() == {
        f"train.params.{n}"
        for n in (
            "l0.kernel",
            "l0.bias",
            "l1.kernel",
            "blocks.0",
            "blocks.1",
            "numbered.0",
            "numbered.10",
        )
    }
    assert "nu" not in loaded.state
    array = loaded.state["weight"]["train.params.l0.kernel"]
    assert (array.sharding, array.tolist()) == (line, kernel.tolist())


def waits(folder: str) -> None:
    """A save in the background has the values of the call, whatever happens to the arrays."""
    state = {"a": jax.device_put(numbers(512, 512), over("x")), "n": numbers(4)}
    target = described(state)
    handle = ucformat.jax.async_save(state, f"{folder}/async")
    jax.jit(lambda x: x * 2, donate_argnums=0)(state["a"])
    state["a"].delete()
    state["n"][:] = -1
    again = ucformat.jax.async_save(state | {"a": jnp.ones(3)}, f"{folder}/async-2")
    assert handle.done, "the second waits for the first"
    assert handle.wait().url == f"{folder}/async"
    assert again.wait().id == ucformat.open(f"{folder}/async-2").id
    loaded = ucformat.jax.load(target, f"{folder}/async")
    assert loaded.state["a"].tolist() == numbers(512, 512).tolist()
    assert loaded.state["n"].tolist() == [0, 1, 2, 3]
    ucformat.jax.async_save({"a": jnp.ones(3)}, f"{folder}/async")
    with pytest.raises(ucformat.errors.Conflict):
        ucformat.jax.async_save({"a": jnp.ones(3)}, f"{folder}/async-3")
    ucformat.jax.async_save({"a": jnp.ones(3)}, f"{folder}/async-3").wait()


def is_refused(folder: str) -> None:
    """What cannot be saved or loaded as it is, is an error that names it, before anything is written or read."""
    gone = jnp.ones(3)
    gone.delete()
    place = f"{folder}/none"
    x, unknown = jnp.ones(3), dict[str, Any](nonsense=1)
    refused: list[tuple[str, Any]] = [
        ("params.w has been deleted: its memory was donated", {"params": {"w": gone}}),
        ("f is a function, which is not saved", {"f": numbers}),
        ("b is a bytes", {"b": b"x"}),
        ("a single array, which has no name", x),
        ("called a.b", {"a.b": x, "a": {"b": x}}),
        ("w only describes an array", {"w": jax.ShapeDtypeStruct((3,), np.float32)}),
        ("w: ucformat cannot store the dtype 'object'", {"w": np.array([object()])}),
        ("zero is of dtype float0", {"zero": np.zeros(3, jax.dtypes.float0)}),
        ("the value jax at the root", {"jax": 3, "w": x}),
    ]
    for message, state in refused:
        for save in (ucformat.jax.save, ucformat.jax.async_save):
            with pytest.raises(UsageError, match=message):
                save(state, place)
    with pytest.raises(UsageError, match="w is being traced"):
        jax.jit(lambda w: ucformat.jax.save({"w": w}, place))(x)
    with pytest.raises(UsageError, match=r"ucformat\.jax\.save does not take names"):
        ucformat.jax.save({"w": x}, place, names={})
    with pytest.raises(TypeError, match="nonsense"):
        ucformat.jax.save({"w": x}, place, **unknown)
    assert not Path(place).exists()
    loads_are_refused(folder)


def loads_are_refused(folder: str) -> None:
    place, whole = f"{folder}/some", over()
    state = {
        "w": jax.device_put(numbers(4, 6), over("x")),
        "count": jnp.int32((1 << 24) + 1),
        "wide": np.ones(3),
        "long": np.ones(3, np.int64),
        "key": jax.random.key(0),
        "step": 3,
        "f6": np.ones(3, ml_dtypes.float6_e2m3fn),
    }
    ucformat.jax.save(state, place)

    def array(*shape: int, dtype: Any = np.float32, sharding: Any = whole) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rbg = jax.eval_shape(lambda: jax.random.key(0, impl="rbg")).dtype
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (StateMismatch, r"missing: v \(weight\)", {"v": array(3)}),
        (StateMismatch, r"different shape: w \(weight\) is \[6, 4\]", {"w": array(6, 4)}),
        # one restore makes 16777216.0 of it
        (
            StateMismatch,
            r"count \(weight\) is float32, in the checkpoint int32",
            {"count": array()},
        ),
        (
            UsageError,
            "wide is float64, which JAX would narrow to float32",
            {"wide": array(3, dtype="f8")},
        ),
        (
            UsageError,
            "long is int64, which JAX would narrow to int32",
            {"long": array(3, dtype="i8")},
        ),
        (
            UsageError,
            "f6 is float6_e2m3fn, of which JAX has no arrays",
            {"f6": array(3, dtype=ml_dtypes.float6_e2m3fn)},
        ),
        (
            UsageError,
            "w has no sharding, and there are 4 devices",
            {"w": array(4, 6, sharding=None)},
        ),
        (UsageError, "w cannot be sharded so", {"w": array(4, 6, sharding=over(None, ("x", "y")))}),
        (
            StateMismatch,
            "was saved as random keys of threefry2x32",
            {"key": array(2, dtype=np.uint32)},
        ),
        (StateMismatch, r"different shape: key", {"key": array(dtype=rbg)}),
        (StateMismatch, "the value step is a float, in the checkpoint a int", {"step": 3.0}),
        (StateMismatch, "missing: the value other", {"other": 3}),
        (StateMismatch, "the value w is a int, in the checkpoint an array", {"w": 3}),
        (StateMismatch, r"missing: step \(weight\)", {"step": array()}),
    ]
    for error, message, target in refused:
        with pytest.raises(error, match=message):
            ucformat.jax.load(target, place)
    with pytest.raises(UsageError, match="of which JAX has no arrays"):
        ucformat.jax.load_arrays(place, whole)
    with pytest.raises(UsageError, match=r'wide .* narrow(.|\n)*"jax_enable_x64", True'):
        ucformat.jax.load_arrays(place, lambda info: whole if info.name == "wide" else None)
    flat = {"a": {"w": np.ones(2, np.float32), "v": np.ones(2, np.float32)}}
    ucformat.jax.save(flat, f"{folder}/flat")
    with pytest.raises(StateMismatch, match=r"unexpected: a\.w \(weight\)"):
        ucformat.jax.load({"a": {"v": array(2)}}, f"{folder}/flat", strict=True)
    # the same by a view, and in 64-bit mode
    narrow = ucformat.open(place).view([{"cast": "wide", "dtype": "float32"}])
    assert ucformat.jax.load({"wide": array(3)}, narrow).state["wide"].tolist() == [1, 1, 1]
    with jax.enable_x64(True):
        loaded = ucformat.jax.load(
            {"wide": array(3, dtype="f8"), "long": array(3, dtype="i8")}, place
        )
        assert [a.dtype.name for a in jax.tree.leaves(loaded.state)] == ["int64", "float64"]
    for rename in ("params.{}".format, {"(.*)": r"params.\1"}):
        loaded = ucformat.jax.load({"params": {"w": array(4, 6)}}, place, rename=rename)
        assert loaded.state["params"]["w"].tolist() == numbers(4, 6).tolist()
        key_data = {"params": {"key": array(2, dtype=np.uint32)}}
        with pytest.raises(StateMismatch, match="was saved as random keys of threefry2x32"):
            ucformat.jax.load(key_data, place, rename=rename)
