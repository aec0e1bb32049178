"""Make the checkpoints in this folder: `python make.py [NAME …]` with torch_checkpointing 0.1.1 and PyTorch 2.13.

Each is a tiny model, trained for two steps, with every tensor of the live run, whole, beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

#: World size; the degree of tensor parallelism; the items with a resharder; where items are stored.
SPECS: dict[str, dict[str, Any]] = {
    "fsdp2": {"world": 3, "resharded": ["model", "optimizer"]},
    "fsdp2-tp": {"world": 4, "tp": 2, "resharded": ["model", "optimizer"], "transform": True},
    "without-metadata": {"world": 2, "resharded": []},
    "safetensors": {"world": 2, "resharded": ["model", "optimizer"], "safetensors": True},
    "boxes": {"world": 2, "resharded": ["model"], "boxes": True},
}


def managers() -> Any:
    """The library, with metadata gathered by Gloo: it does so by CUDA."""
    import torch.distributed as dist
    from torch_checkpointing import metadata_manager

    def gather(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        gathered: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, data, group=process_group)
        return dict(enumerate(gathered))

    metadata_manager.DefaultMetadataManager._all_gather_pickled_data = gather
    from torch_checkpointing import checkpoint_manager

    return checkpoint_manager


def boxes_of(rank: int) -> Any:
    """A resharder that says of `w` that each rank has two boxes of it in its local tensor."""
    from torch_checkpointing.default_metadata import DefaultShardingMetadata
    from torch_checkpointing.default_resharder import DefaultResharder

    class Boxes(DefaultResharder):
        def extract_sharding_metadata(self, item_key: str, item_value: Any) -> Any:
            out = super().extract_sharding_metadata(item_key, item_value)
            out["w",] = DefaultShardingMetadata(
                global_shape=(8, 3),
                global_offsets=((2 * rank, 0), (4 + 2 * rank, 0)),
                local_offsets=((0, 0), (2, 0)),
                local_sizes=((2, 3), (2, 3)),
                dtype="torch.float32",
            )
            return out

    return Boxes()


def main(name: str) -> None:
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch_checkpointing.checkpoint_layout import (
        JsonSerialization,
        LayoutInfo,
        RawSerialization,
        SafetensorsSerialization,
    )
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.state_transformations import optimizer_transform_pre
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    library, spec = managers(), SPECS[name]
    dist.init_process_group("gloo")
    rank, world, tp = dist.get_rank(), dist.get_world_size(), spec.get("tp", 1)
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(10, 14))
    model.add_module("down", torch.nn.Linear(14, 7, bias=False))
    model.register_buffer("scale", torch.arange(3.0))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    named = dict(model.named_parameters())
    groups = [[p for p in named.values() if p.dim() > 1], [named["up.bias"]]]
    optimizer = torch.optim.AdamW([{"params": g} for g in groups], lr=1e-3, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 10)).square().mean().backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    truth = {f"weight/{n}": t for n, t in weights.items()}
    for parameter, of_parameter in states["state"].items():
        truth |= {f"{s}/{parameter}": t for s, t in of_parameter.items()}
    tensors = {
        k: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().contiguous()
        for k, t in truth.items()
    }
    saved: dict[str, Any] = {
        "model": dict(weights),
        "optimizer": states,
        "step": 2,
        "loader": {"position": 7 + rank, "seed": 5},
    }
    if spec.get("transform"):  # as the library names the states of a plain `state_dict()`
        plain = optimizer.state_dict()
        by_group = [g["params"] for g in states["param_groups"]]
        for group, names in zip(plain["param_groups"], by_group, strict=True):
            group["param_names"] = names
        saved["optimizer"] = optimizer_transform_pre(plain)
    layouts = {}
    if spec.get("safetensors"):
        saved["config"], saved["note"] = {"lr": 1e-3, "layers": [1, 2]}, b"raw bytes"
        place = "weights/model-{rank}.safetensors"
        layouts["model"] = LayoutInfo(place, SafetensorsSerialization({"made": "here"}))
        layouts["config"] = LayoutInfo("config_{rank}.json", JsonSerialization())
        layouts["note"] = LayoutInfo("note_{rank}.bin", RawSerialization())
    if spec.get("boxes"):
        whole = torch.arange(24.0).reshape(8, 3)
        saved = {"model": {"w": whole.view(2, 2, 2, 3)[:, rank].reshape(4, 3), "b": torch.ones(2)}}
        tensors = {"weight/w": whole, "weight/b": torch.ones(2)}
    resharder = boxes_of(rank) if spec.get("boxes") else DefaultResharder()
    items = {
        key: ItemSpec(
            layout=layouts.get(key), resharder=resharder if key in spec["resharded"] else None
        )
        for key in saved
    }
    config = library.CheckpointManager.Config(
        items=items,
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )
    manager = library.CheckpointManager(config)
    folder = Path(__file__).parent / name
    manager.save(str(folder / "ckpt"), saved)
    manager.close()
    if rank == 0:
        save_file(tensors, folder / "truth.safetensors")
        facts = {
            "groups": None if spec.get("boxes") else [g["params"] for g in states["param_groups"]],
            "step": saved.get("step"),
        }
        (folder / "truth.json").write_text(json.dumps(facts, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        for chosen in sys.argv[1:] or SPECS:
            folder = Path(__file__).parent / chosen
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            nproc = f"--nproc-per-node={SPECS[chosen]['world']}"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", nproc]
            subprocess.run([*command, __file__, chosen], check=True)
