"""What the ranks of the tests save: as AutoModel's `Checkpointer` does, by PyTorch DCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(_: Path, place: str, form: str = "safetensors") -> dict[str, Any]:
    """Train and save; returns every tensor whole, as the training has it."""
    torch.manual_seed(5)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    if form == "adapter":
        import peft

        lora = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
        model = peft.get_peft_model(model, lora)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _step in range(2):
        model(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    folder = Path(place)
    truth: dict[str, Any] = {}
    states = {"optim": get_optimizer_state_dict(model, optimizer, options=_FLAT)}
    prefix = "base_model.model." if form == "adapter" else ""
    if form == "adapter":
        # AutoModel's own layers have the names of the model, without those of PEFT's adapters
        states["optim"] = {_own(k): v for k, v in states["optim"].items()}
        weights = {_saved(n): whole(p) for n, p in model.named_parameters() if p.requires_grad}
        if dist.get_rank() == 0:
            (folder / "model").mkdir()
            tensors = {n: torch.from_numpy(a.copy()) for n, a in weights.items()}
            save_file(tensors, folder / "model" / "adapter_model.safetensors")
            (folder / "model" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    else:
        state = get_model_state_dict(model)
        weights = {name: whole(tensor) for name, tensor in state.items()}
        writer = (
            dcp.HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
            if form == "safetensors"
            else dcp.FileSystemWriter(folder / "model")
        )
        dcp.save(state, storage_writer=writer)
    truth |= {f"weight/{name}": array for name, array in weights.items()}
    dcp.save({**states, "sched": scheduler.state_dict()}, checkpoint_id=folder / "optim")
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            truth[f"{key}/{_saved(name) if prefix else name}"] = whole(value)
    if dist.get_rank() == 0:
        torch.save({"step": 2, "epoch": 0}, folder / "step_scheduler.pt")
        (folder / "losses.json").write_text(json.dumps({"train_loss": 0.5}))
        (folder / "config.yaml").write_text("model: {}\n")
    dist.barrier()
    return truth


def _own(key: str) -> str:
    """A key of the optimizer's state dict under AutoModel's own names of the layers."""
    return (
        key.replace(".base_model.model.", ".")
        .replace(".lora_magnitude_vector.default.weight", ".lora_magnitude")
        .replace(".default.weight", ".weight")
    )


def _saved(name: str) -> str:
    """The name in an adapter."""
    return name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(
        ".default.weight", ".weight"
    )


def whole(tensor: torch.Tensor) -> Any:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy()
