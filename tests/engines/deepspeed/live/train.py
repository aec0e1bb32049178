"""Train a tiny model under DeepSpeed or FSDP2, save it, load it into other engines, and go on.

Run by torchrun in the virtual environment that has DeepSpeed: `train.py TASKS OUT`. TASKS is a JSON
list of tasks (`Task` below). OUT/<name>/zarr and packed are what ucformat saved, OUT/<name>/own
what the engine itself did (of FSDP2 the whole tensors, own.safetensors), OUT/<name>/facts.json the
rest. Every rank sees its part of the same global batches, whatever their number.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # for `tests`

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as ds_engine
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812

import ucformat.torch
import ucformat.torch.deepspeed as ucd
from tests.torch.layouts import mesh_of
from tests.torch.leaving import leave
from tests.torch.models import ModelSpec, Net, build_net
from tests.torch.truth import hold
from ucformat.errors import UcformatError
from ucformat.torch.comm.group import group_of
from ucformat.torch.saving.plan import SavePlanner

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH = 12, 5
FORMS: tuple[Any, ...] = ("zarr", "packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Task:
    """One engine. `zero` None is FSDP2, in bf16 with fp32 weights.

    `load` is a folder below OUT, of which `what` (zarr, packed or own) is read.
    """

    name: str
    zero: int | None = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    groups: int = 2
    tied: bool = False
    freeze: list[str] = field(default_factory=list)
    fused: bool = False
    bf16_optimizer: bool = False
    options: dict = field(default_factory=dict)  # of zero_optimization
    accumulate: int = 1
    warmup: bool = False  # DeepSpeed's own scheduler instead of torch's
    empty: bool = True  # a parameter without elements
    load: str = ""
    what: str = "zarr"
    cast: bool = False
    scheduler: bool = True
    steps: int = 3
    edge: str = ""  # a function of edges.py, which does all that is to be done


class Counted(torch.optim.Optimizer):
    """Momentum whose `step` is a plain number, as that of DeepSpeed's CPU Adam is."""

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(
                        p.grad, alpha=1 / state["step"]
                    )
                    p.data.add_(state["speed"], alpha=-group["lr"])


def model_of(task: Task) -> Net:
    spec = ModelSpec(
        vocab=53,
        hidden=10,
        heads=2,
        head_dim=3,
        inner=17,
        tied=task.tied,
        freeze=tuple(task.freeze),
        seed=bool(task.load),
    )
    net = build_net(spec)
    for block in (
        net.blocks()
    ):  # DeepSpeed leaves buffers in their own dtype, and this one is added to activations
        block.drift = block.drift.to(DTYPES[task.dtype])
    if task.empty:
        net.idle = torch.nn.Module()
        net.idle.nothing = torch.nn.Parameter(torch.empty(0, 4))
    return net


def optimizer_of(task: Task, net: torch.nn.Module) -> torch.optim.Optimizer:
    """What is loaded must come from the checkpoint, so an engine that loads begins with other hyper-parameters."""
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    cut = [[(n, p) for n, p in named if p.dim() >= 2], [(n, p) for n, p in named if p.dim() < 2]]
    wrong = 0.5 if task.load else 1.0
    groups: list[dict[str, Any]] = [
        {"params": g, "weight_decay": wrong * 0.1 / (i + 1), "lr": wrong * 1e-2 / (i + 1)}
        for i, g in enumerate([named] if task.groups == 1 else cut)
    ]
    if (
        task.zero != 0 or task.dtype != "fp32"
    ):  # there DeepSpeed's own files would not tell the names
        groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
    if task.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=0.9)
    if task.optimizer == "counted":
        return Counted(groups, {})
    return torch.optim.AdamW(groups, betas=(0.8 if task.load else 0.9, 0.95))


def slower(step: int) -> float:
    """The factor of the learning rate."""
    return 1 / (1 + 0.3 * step)


def config(task: Task) -> dict:
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size() // task.accumulate,
        "gradient_accumulation_steps": task.accumulate,
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": task.zero,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,  # it would replace torch's own in this process, for all that come after
            **task.options,
        },
    }
    if task.warmup:
        out["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20},
        }
    if task.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if task.dtype == "fp16":
        out["fp16"] = {
            "enabled": True,
            "initial_scale_power": 4 if task.load else 6,
            "loss_scale_window": 2,
        }
    if task.bf16_optimizer:
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    return out


def tokens_of(step: int) -> torch.Tensor:
    """The batch of a step."""
    return torch.randint(0, 53, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(net: Any, step: int, part: int, parts: int) -> torch.Tensor:
    """The loss on this rank's part of the batch of a step."""
    tokens = tokens_of(step).chunk(parts)[part]
    logits = net(tokens)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class ZeRO:
    """A DeepSpeed engine."""

    def __init__(self, task: Task) -> None:
        self.task, self.net = task, model_of(task)
        real = ds_engine.FusedAdam
        if task.fused:  # the class that a GPU run gets from DeepSpeed's own fused Adam
            ds_engine.FusedAdam = torch.optim.AdamW
        optimizer = optimizer_of(task, self.net)
        scheduler = None if task.warmup else torch.optim.lr_scheduler.LambdaLR(optimizer, slower)
        self.engine, *_ = deepspeed.initialize(
            model=self.net, config=config(task), optimizer=optimizer, lr_scheduler=scheduler
        )
        ds_engine.FusedAdam = real

    def step(self, number: int) -> float:
        total = 0.0
        for i in range(self.task.accumulate):
            parts = dist.get_world_size() * self.task.accumulate
            loss = loss_of(self.engine, number, dist.get_rank() * self.task.accumulate + i, parts)
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach()) / self.task.accumulate
        self.net.tick()
        return total

    def save(self, folder: Path) -> None:
        for form in FORMS:
            ucd.save(self.engine, str(folder / form), form=form)

    def save_own(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder / "own"))

    def load(self, url: str, **options: Any) -> Any:
        options = {"cast": self.task.cast, "scheduler": self.task.scheduler, **options}
        return ucd.load(self.engine, url, **options)

    def facts(self) -> dict:
        scaler = getattr(
            self.engine.optimizer,
            "loss_scaler",
            getattr(self.engine.optimizer, "loss_scale_config", None),
        )
        return {
            "counters": [
                self.engine.global_steps,
                self.engine.global_samples,
                self.engine.skipped_steps,
            ],
            "micro": self.engine.micro_steps,
            "scale": [
                getattr(scaler, k, None) for k in ("cur_scale", "cur_iter", "last_overflow_iter")
            ],
            "lr": [g["lr"] for g in self.engine.optimizer.param_groups],
        }

    def close(self) -> None:
        self.engine.destroy()


class FSDP2:
    """Plain PyTorch."""

    def __init__(self, task: Task) -> None:
        self.task, self.net = task, model_of(task)
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = {"mp_policy": half} if task.dtype == "bf16" else {}
        mesh = mesh_of(("dp", dist.get_world_size()))
        for block in self.net.blocks():
            fully_shard(block, mesh=mesh, **policy)
        fully_shard(self.net, mesh=mesh, **policy)
        self.net.tie(ModelSpec(tied=task.tied))
        self.optimizer = optimizer_of(task, self.net)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, slower)

    def step(self, number: int) -> float:
        loss = loss_of(self.net, number, dist.get_rank(), dist.get_world_size())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.net.tick()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def save(self, folder: Path) -> None:
        for form in FORMS:
            ucformat.torch.save(self.state(), str(folder / form), step=self.task.steps, form=form)

    def save_own(self, folder: Path) -> None:
        names = {id(p): n for n, p in self.net.named_parameters()}
        tensors = hold(self.net, self.optimizer, names).tensors
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / "own.safetensors")

    def load(self, url: str, *, certify: bool) -> None:
        # what DeepSpeed's optimizers keep besides tensors
        own = ("clip_grad", "ds_version", "overflow", "partition_count", "zero_stage")
        scaler = ("loss_scaler", "cur_*", "dynamic_loss_scale")
        leave = [f"optimizer.{name}" for name in (*own, *scaler)]
        ucformat.torch.load(self.state(), url, cast=self.task.cast, certify=certify, leave=leave)

    def facts(self) -> dict:
        return {"lr": [g["lr"] for g in self.optimizer.param_groups]}

    def close(self) -> None:
        pass


def losses(trainer: Any, first: int) -> list[float]:
    """The losses of three steps, over all ranks."""
    found = torch.tensor([trainer.step(first + i) for i in range(3)], dtype=torch.float64)
    dist.all_reduce(found)
    return [float(x) / dist.get_world_size() for x in found]


def said(act: Callable[[], Any]) -> str:
    """The class of an error and what it says; nothing where there is none."""
    try:
        act()
    except UcformatError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make(task: Task, out: Path) -> None:
    folder = out / task.name
    trainer: Any = FSDP2(task) if task.zero is None else ZeRO(task)
    facts: dict[str, Any] = {}
    first = 0
    if task.load:
        trainer.load(str(out / task.load / task.what), certify=True)
        first = 3
        facts["loaded"] = trainer.facts()
        trainer.save_own(folder)
    else:
        for step in range(task.steps):
            trainer.step(step)
        trainer.save(folder)
        facts["listed"] = (
            group_of().links.kept[SavePlanner].listed != ()
        )  # boxes, because some rank could not describe what it holds
        facts["saved"] = trainer.facts()
        trainer.save_own(folder)
        first = task.steps
    facts["losses"] = losses(trainer, first)
    facts["end"] = trainer.facts()
    if dist.get_rank() == 0:
        (folder / "facts.json").write_text(json.dumps(facts, default=str))
    trainer.close()


def main() -> None:
    tasks, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo does as well, and is not compiled first
    )
    deepspeed.init_distributed("gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow on CPU, not impossible
    for spec in tasks:
        task = Task(**spec)
        if task.edge:
            from tests.engines.deepspeed.live import edges

            getattr(edges, task.edge)(out / task.name)
        else:
            make(task, out)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
