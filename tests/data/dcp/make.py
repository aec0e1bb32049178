"""Make the checkpoints in this folder: `python make.py [NAME …]` with PyTorch 2.13, on CPU over gloo.

Each is a tiny model, trained for a few steps under one layout and saved by torch.distributed.checkpoint, with every
tensor of the live run, whole, beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SPECS: dict[str, dict[str, Any]] = {
    "fsdp2-uneven": {"world": 3, "tied": True, "threads": 2, "blocks": 2},
    "fsdp1-frozen": {"world": 2, "layout": "fsdp1", "freeze": "up", "groups": 1, "blocks": 2},
    "hsdp-flat": {"world": 4, "layout": "hsdp", "flat": True},
    "tp-strided": {"world": 4, "layout": "tp", "single": False, "inner": 18},
    "wrapped-bf16": {
        "world": 2,
        "wrap": "app",
        "dtype": torch.bfloat16,
        "asynchronous": True,
        "blocks": 2,
    },
    "sgd-hf": {"world": 2, "optimizer": "sgd", "hf": True},
    "stages": {"world": 4, "layout": "stages", "flat": True, "groups": 1, "optimizer": "sgd"},
    "numbered": {"world": 1, "layout": "none", "numbered": True},
    "titan": {"world": 2, "flat": True, "titan": True},
}


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, spec: dict[str, Any], stage: int | None = None) -> None:
        super().__init__()
        vocab, width, inner = 23, 10, spec.get("inner", 17)
        first, last = stage in (None, 0), stage in (None, 1)
        self.embed = torch.nn.Embedding(vocab, width) if first else None
        numbers = range(spec.get("blocks", 1)) if stage is None else [stage]
        self.blocks = torch.nn.ModuleDict({str(i): Block(width, inner) for i in numbers})
        self.head = torch.nn.Linear(width, vocab, bias=False) if last else None
        self.register_buffer("seen", torch.zeros(3)) if first else None
        if spec.get("tied"):
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def shard(net: Net, spec: dict[str, Any]) -> torch.nn.Module:
    world, layout = dist.get_world_size(), spec.get("layout", "fsdp2")
    if layout == "none":
        return net
    if layout == "fsdp1":
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=cpu
        )
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in net.blocks.values():
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        rows, columns = (
            RowwiseParallel(input_layouts=Replicate()),
            ColwiseParallel(output_layouts=Replicate()),
        )
        parallelize_module(net, mesh["tp"], {"embed": rows, "head": columns})
        mesh = mesh["dp"]
    elif layout in ("hsdp", "stages"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        mesh = mesh if layout == "hsdp" else mesh["inner"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for block in net.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(net: torch.nn.Module, spec: dict[str, Any]) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    groups = [[p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() < 2]]
    if spec.get("groups") == 1 or spec.get("layout") == "fsdp1":
        groups = [[p for _, p in named]]
    kinds = [{"params": g, "weight_decay": 0.01 * (i + 1)} for i, g in enumerate(groups)]
    if spec.get("optimizer") == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            kinds, lr=0.01, momentum=0.9, foreach=False
        )
    else:
        optimizer = torch.optim.AdamW(kinds, lr=1e-3, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        first = getattr(net, "embed", None) is not None
        like = spec.get("dtype", torch.float32)
        x = torch.randint(0, 23, (2, 5)) if first else torch.randn(2, 5, 10, dtype=like)
        loss = net(x).float().square().mean()
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        optimizer.step()
    return optimizer


def whole(value: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype)
        value.gather(0, out if dist.get_rank() == 0 else None)
        return out
    return value.detach().clone()


def save(
    spec: dict[str, Any], net: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, Any]:
    weights, states = get_state_dict(
        net,
        optimizer,
        options=StateDictOptions(flatten_optimizer_state_dict=bool(spec.get("flat"))),
    )
    if spec.get("numbered"):
        states = optimizer.state_dict()
    extra = {"step": 2, "note": ["a", {"b": 1.5}], "generator": torch.get_rng_state()[:40]}
    state: dict[str, Any] = {"model": weights, "optim": states, "train": extra}
    if spec.get("titan"):
        train_state = {"step": torch.tensor(2, dtype=torch.int32)}
        state = {
            **weights,
            "optimizer": states,
            "train_state": train_state,
            "lr_scheduler": {"last_epoch": 2},
        }
    state = {spec["wrap"]: state} if "wrap" in spec else state
    writer = dcp.FileSystemWriter(
        folder / "ckpt",
        single_file_per_rank=spec.get("single", True),
        thread_count=spec.get("threads", 1),
    )
    if spec.get("asynchronous"):
        dcp.async_save(
            state, storage_writer=writer, process_group=dist.new_group(backend="gloo")
        ).result()
    else:
        dcp.save(state, storage_writer=writer)
    if spec.get("hf"):
        for name, joined in (("hf", False), ("hf-joined", True)):
            hf = dcp.HuggingFaceStorageWriter(
                str(folder / name), save_distributed=True, enable_consolidation=joined
            )
            dcp.save(weights, storage_writer=hf)
    return weights


def main(name: str) -> None:
    os.chdir(Path(__file__).parent)
    spec, folder = SPECS[name], Path(name)  # relative, for DCP writes the path into its metadata
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    stage = dist.get_rank() // 2 if spec.get("layout") == "stages" else None
    net = Net(spec, stage).to(spec.get("dtype", torch.float32))
    for parameter_name, parameter in net.named_parameters():
        parameter.requires_grad_("freeze" not in spec or spec["freeze"] not in parameter_name)
    net = shard(net, spec)
    optimizer = train(net, spec)
    weights = save(spec, net, optimizer, folder)
    held = {f"weight/{n}": whole(t) for n, t in weights.items()}
    named = get_state_dict(net, optimizer)[1]
    for parameter_name, found in named["state"].items():
        held |= {f"{s}/{parameter_name}": whole(t) for s, t in found.items()}
    groups = [list(g["params"]) for g in named["param_groups"]]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (held, groups))
    if dist.get_rank() == 0:
        tensors = {k: t.contiguous() for one, _ in reversed(everyone) for k, t in one.items()}
        save_file({k: t.clone() for k, t in tensors.items()}, folder / "truth.safetensors")
        if stage is not None:  # DCP lists the last rank's entries first
            groups = [list(dict.fromkeys(n for _, one in reversed(everyone) for n in one[0]))]
        truth = {"groups": groups, "step": 2, "torch": torch.__version__}
        (folder / "truth.json").write_text(json.dumps(truth, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        for one in sys.argv[1:] or SPECS:
            shutil.rmtree(Path(__file__).parent / one, ignore_errors=True)
            command = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(SPECS[one]["world"]),
            ]
            env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, "-m", *command, __file__, one], check=True, env=env)
