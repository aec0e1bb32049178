"""Several JAX processes that save and load together, without PyTorch."""

from __future__ import annotations

import os
import signal
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ucformat
import ucformat.jax
from tests.jax.compare import described
from ucformat.errors import StateMismatch, UcformatError, UsageError
from ucformat.jax.shards import distribution_of, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (16, 8, 8)
SPECS: list[tuple[Any, ...]] = [
    *((), ("x",), (None, "y"), ("x", "y"), ("y", "x"), (None, None, "x")),
    *((("x", "y"),), (("y", "x"), None), (None, ("x", "y"), None)),
]


def numbers(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def meshes() -> Iterator[tuple[str, Mesh]]:
    """All devices, in several orders: processes have blocks of some of these, and of others stripes."""
    devices = np.array(jax.devices())
    count = len(devices)
    for columns in sorted(n for n in {1, 2, count} if count % n == 0):
        grid = devices.reshape(count // columns, columns)
        yield f"rows{columns}", Mesh(grid, ("x", "y"))
        yield f"columns{columns}", Mesh(grid.T, ("x", "y"))
    if count > 1:
        striped = devices.reshape(jax.process_count(), -1).T.reshape(-1, 2)
        yield "striped", Mesh(striped, ("x", "y"))


def made(array: Any, sharding: Any) -> Any:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def arrays() -> dict[str, Any]:
    """An array of each sharding, whose first value is the number that its name begins with."""
    out: dict[str, Any] = {}
    for (name, mesh), spec in product(meshes(), SPECS):
        values = numbers(*SHAPE) + len(out)
        out[f"{len(out):03} {name} {spec}"] = made(
            values, NamedSharding(mesh, PartitionSpec(*spec))
        )
    return out


def total(number: int) -> int:
    """The sum over all processes."""
    return int(multihost_utils.process_allgather(np.array(number)).sum())


def check_values(tree: dict[str, Any]) -> None:
    """Each device has its part of what `arrays` made."""
    for name, array in tree.items():
        values = numbers(*SHAPE) + int(name[:3])
        for shard in array.addressable_shards:
            assert (np.asarray(shard.data) == values[shard.index]).all(), name


def save_and_load(folder: str, form: Any) -> None:
    """Every sharding, each part written once."""
    state = {
        "sharded": arrays(),
        "own": jnp.arange(5),  # on each process its own, and the same
        "numpy": numbers(3, 5),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(0), 16),
            out_shardings=NamedSharding(next(meshes())[1], PartitionSpec("x")),
        )(),
        "step": 7,
    }
    place = f"{folder}/{form}"
    saved = ucformat.jax.save(state, place, form=form)
    ck = ucformat.open(place)
    if form == "packed":
        assert total(saved.nbytes) == sum(info.nbytes for info in ck.tensors.values())
        assert saved.nbytes < 0.6 * total(saved.nbytes), "both processes write"
    loaded = ucformat.jax.load(described(state), place)
    assert loaded, loaded.left
    assert loaded.lineage.kind == "finetune"
    check_values(loaded.state["sharded"])
    same = jax.jit(lambda a, b: (jax.random.key_data(a) == jax.random.key_data(b)).all())
    assert bool(same(state["keys"], loaded.state["keys"]))
    assert loaded.state["own"].tolist() == [0, 1, 2, 3, 4]


def describes_what_it_holds(place: str) -> None:
    """The description of a sharding is that of the boxes, wherever a process has a block of the mesh, and is saved."""
    described_ones: list[str] = []
    for name, array in arrays().items():
        distribution = distribution_of(array.sharding)
        boxes = tuple(piece.box for piece in parts_of(array).pieces)
        if distribution is None:
            assert "striped" in name, name
            continue
        at = distribution.mesh.coordinate(jax.process_index())
        assert at is not None
        if distribution.boxes(SHAPE, at) == boxes:
            described_ones.append(f"sharded.{name}")
        else:  # an axis inside of a process cuts before one between processes
            assert "('y', 'x')" in name or "('x', 'y')" in name, name
            assert len(boxes) > 1, name
    assert len(described_ones) > 40
    universal = ucformat.open(place).universal
    assert universal is not None
    tensors, stored = universal.metadata.tensor_list.tensors, universal.sidecar().described
    assert stored is not None
    assert {tensors[row.tensor].name for row in stored.rows} >= {*described_ones}


def reads_its_own_bytes(folder: str) -> None:
    """A process reads what its devices hold, of a checkpoint of any kind."""
    place, size = f"{folder}/large", (1 << 20)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    state = {"w": made(numbers(1024, size // 1024), rows)}
    ucformat.jax.save(state, place)
    loaded = ucformat.jax.load(described(state), place)
    share = 4 * size / jax.process_count()
    assert share <= loaded.nbytes <= 1.05 * share
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))
    loaded = ucformat.jax.load_arrays(place, columns)
    array = loaded.state["weight"]["w"]
    for shard in array.addressable_shards:
        assert (np.asarray(shard.data) == numbers(1024, size // 1024)[shard.index]).all()


def fails_together(folder: str) -> None:
    """What one process cannot do is an error of all, and nothing is committed."""
    own, place = jax.process_index(), f"{folder}/never"
    with pytest.raises(UsageError, match=r"w \(weight\) has a different value"):
        ucformat.jax.save({"w": np.full(3, own)}, place)
    with pytest.raises(UsageError, match="b is a bytes"):
        ucformat.jax.save({"w": np.ones(3), "b": b"" if own == 1 else "text"}, place)
    with pytest.raises(UcformatError, match="step"):
        ucformat.jax.save({"w": np.ones(3), "step": own}, place)
    with pytest.raises(UsageError, match="b is a bytes"):
        ucformat.jax.async_save({"w": np.ones(3), "b": b"" if own == 1 else "text"}, place)
    handle = ucformat.jax.async_save({"w": np.full(3, own)}, place)
    with pytest.raises(UsageError, match=r"w \(weight\) has a different value"):
        handle.wait()
    assert not Path(place, "manifest.json").exists()
    ucformat.jax.async_save({"w": np.ones(3)}, place).wait()
    target = {"w": np.ones(3 + (own == 1))}
    with pytest.raises(StateMismatch, match="different shape: w"):
        ucformat.jax.load(target, place)
    assert ucformat.jax.load({"w": np.ones(3)}, place).state["w"].tolist() == [1, 1, 1]


def first_tier(folder: str) -> None:
    for form in ("zarr", "packed"):
        save_and_load(folder, form)
    describes_what_it_holds(f"{folder}/packed")
    reads_its_own_bytes(folder)
    fails_together(folder)
    assert "torch.nn" not in sys.modules


def loads(place: str) -> None:
    """What other processes saved."""
    loaded = ucformat.jax.load({"sharded": described(arrays_under(place))}, place)
    check_values(loaded.state["sharded"])


def arrays_under(place: str) -> dict[str, Any]:
    """Targets for the arrays of a checkpoint of other processes, each under another sharding."""
    names = [n.removeprefix("sharded.") for n in ucformat.open(place) if n.startswith("sharded.")]
    shardings = [
        NamedSharding(mesh, PartitionSpec(*spec)) for (_, mesh), spec in product(meshes(), SPECS)
    ]
    return {
        name: made(np.zeros(SHAPE, np.float32), shardings[(5 * n) % len(shardings)])
        for n, name in enumerate(sorted(names))
    }


def one_dies(folder: str) -> None:
    """A process that dies leaves no checkpoint, and the others learn which one it was."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state = {"w": made(numbers(1024, 1024), NamedSharding(mesh, PartitionSpec("x")))}
    ucformat.jax.save({"n": 1}, f"{folder}/before", timeout=60)  # the same connections
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(UcformatError, match="rank 1 died"):
        ucformat.jax.save(state, f"{folder}/after", timeout=60)
    assert not Path(folder, "after", "manifest.json").exists()
    os._exit(0)  # JAX would wait for the other one
