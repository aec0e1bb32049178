"""Train tiny models with experts (`deepspeed.moe`), and save them, or load exports; run by torchrun with DeepSpeed.

`moe_deepspeed.py SPECS OUT`: SPECS is a JSON list of specs as in `tests/data/deepspeed/make.py`,
with a `name`; with `load`, the folder of a checkpoint, the engine loads it instead of training;
`max_group` is the largest group of experts in elements, for which DeepSpeed has no setting.
OUT/<name> has `ckpt`, if it was trained, `truth.safetensors` and `truth.json` with the losses of
two further steps.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

sys.path.insert(0, str(Path(__file__).parents[3]))  # for `tests`
sys.path.insert(0, str(Path(__file__).parents[2] / "data" / "deepspeed"))

from tests.torch.leaving import leave

make = importlib.import_module("make")

_GROUPS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
           "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS")  # fmt: skip
STEPS, AFTER, VOCAB = 3, 2, 22


def run(spec: dict[str, Any], out: Path) -> None:
    for name in _GROUPS:  # which outlive an engine, and are kept by `ep_size` alone
        getattr(groups, name).clear()
    split_params_into_different_moe_groups_for_optimizer.__defaults__ = (
        spec.get("max_group", 178956971),
    )
    rank, folder = dist.get_rank(), out / spec["name"]
    folder.mkdir(parents=True, exist_ok=True)
    model = make.model_of(spec)
    if "load" in spec:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.add_(1)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    engine, opt = make.engine_of(spec, model)
    generator = torch.Generator().manual_seed(rank)

    def batch() -> torch.Tensor:
        return torch.randint(0, VOCAB, (2, make.SEQ), generator=generator)

    def step() -> float:
        tokens = batch()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        return float(total.item())

    if "load" in spec:
        _ = [batch() for _ in range(STEPS)]  # the same data afterwards
        place, client = engine.load_checkpoint(spec["load"])
        assert place is not None
        assert client["iteration"] == STEPS
    else:
        _ = [step() for _ in range(STEPS)]
        engine.save_checkpoint(str(folder / "ckpt"), client_state={"iteration": STEPS})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, make.globally(spec, make.held(spec, engine, opt)))
    hyper = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    losses = [step() for _ in range(AFTER)]
    if rank == 0:
        make.write_truth(folder, everyone, shapes, spec, {})
        (folder / "truth.json").write_text(
            json.dumps({"losses": losses, "hyper": hyper}, default=str)
        )
        (folder / "done").touch()
    dist.barrier()


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo does as well, and is not compiled first
    )
    deepspeed.init_distributed("gloo")
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        run({**spec, "world": dist.get_world_size()}, Path(sys.argv[2]))
    leave()


main()
