"""What the ranks of the tests save: as veRL's `FSDPCheckpointManager` does, each its own state dicts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor


def model_of(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny Llama of odd sizes, with a buffer that is saved, and a norm of equal values."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        hidden_size=10, intermediate_size=7, num_hidden_layers=2, num_attention_heads=5,
        num_key_value_heads=1, vocab_size=11, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.model.norm.register_buffer("scale", torch.tensor(3.0))
    model.model.norm.register_buffer("table", torch.arange(3.0))
    return model


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(input_ids=torch.arange(4)[None] + step).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(
    _: Path, place: str, ddp: int = 1, *, tied: bool = True, fsdp1: bool = False
) -> dict[str, Any]:
    """Train and save; returns every tensor whole, as the training has it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = model_of(tied=tied)
    mesh = (
        init_device_mesh("cpu", (ddp, world // ddp), mesh_dim_names=("ddp", "fsdp"))
        if ddp > 1
        else init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    )
    if fsdp1:
        model = FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trained(model, optimizer)
    scheduler.step()
    end = f"world_size_{world}_rank_{rank}.pt"
    folder = Path(place)
    torch.save(model.state_dict(), folder / f"model_{end}")
    torch.save(optimizer.state_dict(), folder / f"optim_{end}")
    torch.manual_seed(rank)
    rng = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": rng}
    torch.save(extra, folder / f"extra_state_{end}")
    if rank == 0:
        (folder / "huggingface").mkdir(exist_ok=True)
        inner = model.module if fsdp1 else model
        inner.config.save_pretrained(folder / "huggingface")
        config = {"FSDP_version": 1 if fsdp1 else 2, "world_size": world}
        (folder / "fsdp_config.json").write_text(json.dumps(config, indent=4))
    truth = {f"weight/{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    names = {} if fsdp1 else {p: n for n, p in model.named_parameters()}
    for parameter, name in names.items():
        truth |= {f"{s}/{name}": whole(v) for s, v in optimizer.state[parameter].items()}
    dist.barrier()
    return truth if rank == 0 else {}


def whole(tensor: torch.Tensor) -> Any:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy()
