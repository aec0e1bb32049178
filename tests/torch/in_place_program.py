"""Ranks that save in the safetensors form."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ucformat.errors import UcformatError, UsageError
from ucformat.storage import objects
from ucformat.storage.in_place import InPlaceFile, PartsWriter
from ucformat.torch import async_save, load, save

if TYPE_CHECKING:
    from pathlib import Path


def cut(seed: int, sizes: list[int]) -> dict[str, Any]:
    """A state of random shapes and placements, the same on all ranks, and its values."""
    chance = random.Random(seed)
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("a", "b")[: len(sizes)])
    state: dict[str, Any] = {}
    for n in range(10):
        shape = [chance.randrange(1, 40) for _ in range(chance.randrange(4))]
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed + n)).to(
            dtype
        )
        if dtype.is_floating_point:
            values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + n)).to(dtype)
        cuts = [shape and chance.random() < 0.7 for _ in sizes]
        places = [Shard(chance.randrange(len(shape))) if one else Replicate() for one in cuts]
        state[f"t{n}"] = (
            values if chance.random() < 0.2 else distribute_tensor(values, mesh, places)
        )
    return state


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The dtype, the shape and the bytes of each tensor."""
    out = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        data = full.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        out[name] = (str(full.dtype).removeprefix("torch."), tuple(full.shape), data)
    return out


def any_cut(folder: Path, seed: int, sizes: list[int], *, background: bool = False) -> Any:
    """Save a state of `cut`."""
    state = cut(seed, sizes)
    if background:
        async_save(state, folder / "ck", form="safetensors").wait()
    else:
        save(state, folder / "ck", form="safetensors")
    return whole(state)


def train(folder: Path, kind: str) -> Any:
    """A tiny Llama with AdamW, saved after a step, twice, and loaded into another one."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
            tie_word_embeddings=kind == "tied",
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        size = dist.get_world_size()
        if kind == "tp":
            mesh = init_device_mesh("cpu", (size,))
            for layer in model.model.layers:
                plan = {f"mlp.{n}": ColwiseParallel() for n in ("gate_proj", "up_proj")}
                parallelize_module(layer, mesh, {**plan, "mlp.down_proj": RowwiseParallel()})
        elif kind != "ddp":
            mesh = init_device_mesh("cpu", (size,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, optimizer

    model, optimizer = made(0)
    tokens = torch.arange(24).reshape(2, 12)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        if kind == "ddp":
            for p in model.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    for step in range(2):  # the second one finds plans in the cache
        save(
            {"model": model, "optim": optimizer},
            folder / f"step-{step}",
            form="safetensors",
            step=step,
        )
    logits = model(tokens).logits.detach()
    other, moments = made(1)
    load({"model": other, "optim": moments}, folder / "step-1")
    assert torch.equal(other(tokens).logits, logits)
    state = optimizer.state_dict()["state"]
    for n, values in moments.state_dict()["state"].items():
        for name, value in values.items():
            a, b = (
                v.full_tensor() if isinstance(v, DTensor) else v for v in (value, state[n][name])
            )
            assert torch.equal(a, b), (n, name)
    return logits.numpy()


def large(seed: int) -> dict[str, Any]:
    """A state of `cut`, and some parts of rows and of columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = cut(seed, [dist.get_world_size()])
    for dim, name in enumerate(("rows", "columns")):
        values = torch.randn(66, 50_000, generator=torch.Generator().manual_seed(dim))
        state[name] = distribute_tensor(values, mesh, [Shard(dim)])
    return state


def on_store(
    _folder: Path,
    url: str,
    *,
    boto: bool,
    victim: int = -1,
    after: int = 0,
    background: bool = False,
) -> Any:
    """Save on an object store, with boto3 or without; perhaps one rank is killed before a part is written."""
    if not boto:
        objects.boto_client = lambda _: None  # type: ignore[assignment,attr-defined]
    written, before = 0, PartsWriter.write

    def write(self: Any, *args: Any) -> None:
        nonlocal written
        written += 1
        if dist.get_rank() == victim and written == after:
            os.kill(os.getpid(), signal.SIGKILL)
        before(self, *args)

    PartsWriter.write = write  # type: ignore[assignment,method-assign]
    state = large(3)
    try:
        if background:
            async_save(state, url, form="safetensors").wait()
        else:
            save(state, url, form="safetensors", timeout=20)
    except UcformatError as error:
        return f"{type(error).__name__}: {error.message}"
    return whole(state), written


def killed(folder: Path, victim: int, after: int) -> Any:
    """One rank is killed while it writes."""
    state = cut(5, [dist.get_world_size()])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim, name in enumerate(("rows", "columns")):
        state[name] = distribute_tensor(torch.ones(66, 50_000), mesh, [Shard(dim)])
    written = 0
    before = InPlaceFile.write

    def write(self: Any, offset: int, data: Any) -> None:
        nonlocal written
        before(self, offset, data)
        written += 1
        if dist.get_rank() == victim and written == after:
            os.kill(os.getpid(), signal.SIGKILL)

    InPlaceFile.write = write  # type: ignore[method-assign]
    try:
        save(state, folder / "ck", form="safetensors", timeout=20)
    except UcformatError as error:
        return error.message
    return None


def refused(folder: Path) -> Any:
    """Errors are raised on all ranks, and nothing stays."""
    messages = []
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    good = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    for url, state in (
        (str(folder / "a"), {"only": 3}),
        (str(folder / "b"), {"w": torch.ones(3, dtype=torch.complex128)}),
        (str(folder / "c"), {"w": good, "r": torch.ones(4) * dist.get_rank()}),
    ):
        try:
            save(state, url, form="safetensors")
        except UcformatError as error:
            messages.append(str(error))
    try:
        save({"w": good}, folder / "d", form="zip")  # type: ignore[arg-type]
    except UsageError as error:
        messages.append(error.hint or "")
    save({"w": good}, folder / "e", form="safetensors")
    return messages
