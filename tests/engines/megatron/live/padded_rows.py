"""Save and load what the second Megatron-FSDP holds (`megatron_fsdp.experimental`), on CPU: `padded_rows.py FOLDER`.

Its buffers pad rows to a common multiple, so that a rank may have several rows of one parameter and
none of the next. Each call makes a model, loads what another number of ranks has saved, if it is
there, and saves.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import tests.engines.megatron.live.beside  # noqa: F401
import ucformat.torch
from tests.engines.megatron.live.edges import refused
from tests.engines.megatron.load_megatron import maker
from tests.torch.leaving import leave


class Chunk:
    """A box of a tensor, in DCP's terms."""

    def __init__(self, start: int, local: torch.Tensor) -> None:
        self.offsets = (start, *(0 for _ in local.shape[1:]))
        self.sizes = tuple(local.shape)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose rows have coprime sizes, and AdamW."""
    from megatron_fsdp.experimental.fully_shard import fully_shard
    from megatron_fsdp.experimental.optimizer import fully_shard_optimizer
    from megatron_fsdp.experimental.placement import Flat, Placements
    from torch.distributed.device_mesh import init_device_mesh

    maker().without_cuda()
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(dist.get_world_size())
    layers = [torch.nn.Linear(a, b) for a, b in ((6, 5), (5, 7), (7, 3))]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    dist.barrier()
    for layer in model:
        placements = Placements(
            dp_axes=("dp",), parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()]
        )
        fully_shard(layer, mesh, placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step; the loss."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
    loss = model(x).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def prepared(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dicts, in which local tensors say where they are, as the engine's own function does after 0.6.1."""
    starts = {}
    for name, module in model.named_modules():
        for group in getattr(module, "parameter_groups", ()):
            buffer = group.main_weight
            for number, key in enumerate(group.parameter_names):
                shape = buffer.layout.tensor_shapes[number]
                before = buffer.offset - buffer.layout.tensor_to_offset[number]
                row = shape[1:].numel()
                starts[f"{name}.{key}"] = min(max(before, 0), shape.numel()) // row
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    tensors = [*state["model"].items()]
    for name, of_name in state["optimizer"]["state"].items():
        tensors += ((name, t) for t in of_name.values() if hasattr(t, "_local_tensor"))
    for name, tensor in tensors:
        local = tensor._local_tensor
        chunk = Chunk(starts[name], local)
        local.__create_chunk_list__ = [chunk].copy
    return state


def main(folder: Path) -> dict[str, Any]:
    model, optimizer = training()
    saved = folder / "ck"
    told: dict[str, Any] = {
        "shapes": {k: list(p._local_tensor.shape) for k, p in model.named_parameters()}
    }
    told["refused"] = refused(
        lambda: ucformat.torch.save({"model": model, "optimizer": optimizer}, folder / "plain")
    )
    told["written"] = sorted(p.name for p in folder.glob("plain*"))
    if not saved.exists():
        for number in range(2):
            step(model, optimizer, number)
        ucformat.torch.save(prepared(model, optimizer), saved)
    else:
        step(model, optimizer, 9)  # makes the states
        state = prepared(model, optimizer)
        told["complete"] = bool(ucformat.torch.load(state, saved, certify=True))
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        for layer in model:
            for group in layer.parameter_groups:
                group.sync_model_weight_from_main_weight()
        ucformat.torch.save(prepared(model, optimizer), folder / "again")
    told["losses"] = [step(model, optimizer, number) for number in (2, 3)]
    return told


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = main(Path(sys.argv[1]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "told.json").write_text(json.dumps(everyone))
    leave()
