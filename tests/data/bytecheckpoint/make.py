"""Make the checkpoints in this folder: `python make.py [NAME …]` with ByteCheckpoint 0.0.2 and PyTorch 2.13, on CPU.

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

#: World size, framework, what part of names is frozen.
SPECS = {
    "ddp": (2, "ddp", ""),
    "fsdp": (2, "fsdp", ""),
    "fsdp2": (3, "fsdp2", "up"),
    "ddp-unclear": (2, "ddp", "b.0"),
}


def main(name: str) -> None:
    import bytecheckpoint as bcp
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def whole(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            out = torch.empty(value.size(), dtype=value.dtype)
            value.gather(0, out if dist.get_rank() == 0 else None)
            return out
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()

    _, framework, freeze = SPECS[name]
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(9, 7))
    model.add_module(
        "b", torch.nn.Sequential(*(torch.nn.Linear(7, 7, bias=i > 0) for i in range(2)))
    )
    model.add_module("down", torch.nn.Linear(7, 9, bias=False))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not freeze or freeze not in parameter_name)
    if framework == "ddp":
        model = DistributedDataParallel(model)
    elif framework == "fsdp":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    split = [[p for _, p in named if p.dim() > 1], [p for _, p in named if p.dim() < 2]]
    groups = split if framework != "fsdp" else [[p for _, p in named]]
    optimizer = torch.optim.AdamW([{"params": g} for g in groups], lr=1e-3, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 9)).square().mean().backward()
        optimizer.step()
    folder, rank = Path(__file__).parent / name, dist.get_rank()
    state = {"model": model, "optimizer": optimizer, "extra_state": {"iteration": 2, "rank": rank}}
    bcp.save(str(folder / "ckpt"), state, framework=framework, fast_saving=False, global_steps=2)
    weights, states = get_state_dict(model, optimizer)
    tensors = {f"weight/{n}": whole(t) for n, t in weights.items()}
    for parameter_name, found in states["state"].items():
        tensors |= {f"{s}/{parameter_name}": whole(t) for s, t in found.items()}
    if rank == 0:
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "truth.safetensors")
        truth = {
            "groups": [g["params"] for g in states["param_groups"]],
            "step": 2,
            "version": bcp.__version__,
        }
        (folder / "truth.json").write_text(json.dumps(truth, indent=1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # ByteCheckpoint spawns a process that imports this file again
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        for one in sys.argv[1:] or SPECS:
            shutil.rmtree(Path(__file__).parent / one, ignore_errors=True)
            command = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(SPECS[one][0]),
                __file__,
                one,
            ]
            env = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            subprocess.run([sys.executable, "-m", *command], check=True, env=env)
