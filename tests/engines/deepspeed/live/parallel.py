"""Train tiny models in every kind of parallelism of DeepSpeed, save them, load them into other engines, and go on.

Run by torchrun in the virtual environment that has DeepSpeed: `parallel.py TASKS OUT`, as
`train.py`. Every rank sees its part of the same global batches, whatever the layout.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # for `tests`
sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "deepspeed"))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups as ds_groups
from safetensors.torch import save_file

import ucformat
import ucformat.torch
import ucformat.torch.deepspeed as ucd
from tests.engines.deepspeed.live.train import losses, said
from tests.torch.leaving import leave
from tests.torch.truth import hold
from ucformat.engines.deepspeed.live_engine import inspect_engine, optimizer_tensors
from ucformat.torch.comm.group import group_of
from ucformat.torch.saving.plan import SavePlanner

if TYPE_CHECKING:
    from collections.abc import Callable

make = importlib.import_module("make")

BATCH, VOCAB = 12, 22
FORMS: tuple[Any, ...] = ("zarr", "packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KEPT = {name: copy.copy(value) for name, value in vars(ds_groups).items()
         if name.startswith("_") and (value is None or isinstance(value, dict))}  # fmt: skip


@dataclass
class Task:
    """One engine. `zero` None is plain PyTorch in one process.

    `pp` 0 is the pipeline's layers as a plain module. `load` is a folder below OUT, of which `what`
    (zarr, packed or own) is read.
    """

    name: str
    model: str = "layers"
    zero: int | None = 1
    pp: int = 0
    tp: int = 1
    even: bool = True  # what AutoTP cuts
    ep: int = 1
    layers: int = 1  # of experts
    cut: bool = True  # whether tensor parallelism cuts experts too
    data_first: bool = False  # use_data_before_expert_parallelism
    dtype: str = "fp32"
    tied: bool = False
    buffers: bool = False
    groups: int = 1
    freeze: str = ""
    bf16_optimizer: bool = False
    accumulate: int = 1
    load: str = ""
    what: str = "zarr"
    rename: dict[str, str] | None = None
    edge: str = ""  # a function below, which does all that is to be done


class Layers(torch.nn.Module):
    """The layers of the pipeline, under the names that they have there."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.tied = task.tied
        if task.tied:
            self.tied_modules = torch.nn.ModuleDict({"embed": make.Embed(VOCAB)})
        else:
            self.add_module("0", make.Embed(VOCAB))
        for number in ("1", "2"):
            self.add_module(number, make.Block(buffers=task.buffers))
        self.add_module("3", torch.nn.LayerNorm(make.HIDDEN))
        if not task.tied:
            self.add_module("4", make.Head(VOCAB))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        layer: Any = self.get_submodule
        x = layer("tied_modules.embed" if self.tied else "0")(tokens)
        for number in ("1", "2", "3"):
            x = layer(number)(x)
        return make.as_head(layer("tied_modules.embed"), x) if self.tied else layer("4")(x)


class Gated(torch.nn.Module):
    """Linear layers of which AutoTP cuts the first of each pair by rows, and the second by columns."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(make.HIDDEN)
        self.gate_up = torch.nn.Linear(make.HIDDEN, 2 * inner)
        self.down = torch.nn.Linear(inner, make.HIDDEN)
        self.up = torch.nn.Linear(make.HIDDEN, inner)
        self.out = torch.nn.Linear(inner, make.HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        x = x + self.down(torch.relu(gate) * up)
        return x + self.out(torch.relu(self.up(x)))


class Tensor(torch.nn.Module):
    """A model for AutoTP; two ranks can cut its inner width evenly, if it is `even`."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, make.HIDDEN)
        self.block = Gated(16 if task.even else 15)
        self.lm_head = torch.nn.Linear(make.HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.block(self.embed(tokens)))


def _specs() -> list[dict[str, Any]]:
    """How AutoTP cuts that model."""
    cut: list[dict[str, Any]] = [
        {"patterns": [rf".*{name}\.weight$"], "partition_type": kind}
        for name, kind in (("block.up", "column"), ("down", "row"), ("out", "row"))
    ]
    fused = {"patterns": [r".*gate_up\.weight$"], "partition_type": "column"}
    head = {"patterns": [r".*lm_head\.weight$"], "partition_type": "column"}
    return [
        *cut,
        {**fused, "shape": [2, -1], "partition_dim": 0},
        {**head, "gather_output": True},
    ]


class Cut(make.Block):  # type: ignore[name-defined]
    """A block of AutoTP's layers, as a pipeline can have them, although AutoTP itself cannot make them there."""

    def __init__(self, group: Any, *, buffers: bool) -> None:
        super().__init__(buffers=buffers)
        for name, kind in (("up", LinearLayer), ("down", LinearAllreduce)):
            setattr(self, name, kind(getattr(self, name), group, name=name))


def pipeline_of(task: Task) -> PipelineModule:
    ends = [LayerSpec(make.Embed, VOCAB), LayerSpec(make.Head, VOCAB)]
    if task.tied:
        ends = [
            TiedLayerSpec("embed", make.Embed, VOCAB),
            TiedLayerSpec("embed", make.Embed, VOCAB, forward_fn=make.as_head),
        ]
    stages: dict[str, Any] = {"num_stages": task.pp}
    blocks = [LayerSpec(make.Block, buffers=task.buffers) for _ in range(2)]
    if task.tp > 1:
        replicas = dist.get_world_size() // task.pp // task.tp
        topology = PipeModelDataParallelTopology(num_pp=task.pp, num_mp=task.tp, num_dp=replicas)
        stages = {"topology": topology}
        set_autotp_mode(training=True)
        lanes = {tuple(r): dist.new_group(r) for r in topology.get_axis_comm_lists("model")}
        own = next(group for ranks, group in lanes.items() if dist.get_rank() in ranks)
        blocks = [LayerSpec(Cut, own, buffers=task.buffers) for _ in range(2)]
    if task.model == "routed":
        blocks = [LayerSpec(make.Routed, task.ep), blocks[0], LayerSpec(make.Routed, task.ep)]
    layers = [ends[0], *blocks, LayerSpec(torch.nn.LayerNorm, make.HIDDEN), ends[1]]
    return PipelineModule(layers, loss_fn=make.loss_of, partition_method="uniform", **stages)


def model_of(task: Task) -> torch.nn.Module:
    torch.manual_seed(7 if task.load else 5)
    net: torch.nn.Module
    if task.model == "experts":
        net = make.Experts(VOCAB, task.ep, task.layers, cut=task.tp > 1 and task.cut)
    elif task.model == "stacked":
        net = make.Mixtures(VOCAB, task.layers)
    elif task.model == "tensor":
        net = Tensor(task)
    else:
        net = pipeline_of(task) if task.pp else Layers(task)
    for tensor in (*net.parameters(), *net.buffers()) if task.load else ():
        tensor.data.add_(1)
    for name, p in net.named_parameters():
        p.requires_grad_(not task.freeze or task.freeze not in name)
    return net


def groups_of(task: Task, net: torch.nn.Module) -> list[dict[str, Any]]:
    """What is loaded must come from the checkpoint, so an engine that loads begins with other hyper-parameters."""
    trained = [p for p in net.parameters() if p.requires_grad]
    cut = [[p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]]
    wrong = 0.5 if task.load else 1.0
    groups: list[dict[str, Any]] = [
        {"params": g, "weight_decay": wrong * 0.1 / (i + 1), "lr": wrong * 1e-2 / (i + 1)}
        for i, g in enumerate([trained] if task.groups == 1 else cut)
        if g
    ]
    if task.model in ("experts", "routed", "stacked"):
        named = [{"name": f"group {i}", **group} for i, group in enumerate(groups)]
        # AutoEP's stacks are made, and found, later
        split = split_params_into_different_moe_groups_for_optimizer
        groups = named if task.model == "stacked" else split(named)
    return groups


def betas_of(task: Task) -> tuple[float, float]:
    return (0.8 if task.load else 0.9, 0.95)


def slower(step: int) -> float:
    """The factor of the learning rate."""
    return 1 / (1 + 0.3 * step)


def config(task: Task, replicas: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH // replicas // task.accumulate,
        "gradient_accumulation_steps": task.accumulate,
        "steps_per_print": 10**6,
        "gradient_clipping": 0.0,  # 1 by default, unlike in plain PyTorch
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # made by DeepSpeed, after AutoTP has replaced parameters
        "optimizer": {"type": "AdamW", "params": {"betas": betas_of(task), "torch_adam": True}},
        "zero_optimization": {
            "stage": task.zero,
            "stage3_param_persistence_threshold": 0,
            "memory_efficient_linear": False,
        },
    }
    if task.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if task.data_first:
        out["use_data_before_expert_parallelism"] = True
    if task.model == "stacked":
        out["expert_parallel"] = make.auto_of(task.ep)
    if task.tp > 1 and not task.pp:
        own = make.cuts_of(cut=task.cut) if task.model == "experts" else _specs()
        specs = {"use_default_specs": False, "layer_specs": own}
        out["tensor_parallel"] = {"autotp_size": task.tp, "partition_config": specs}
    if task.bf16_optimizer:
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    return out


def tokens_of(step: int) -> torch.Tensor:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (BATCH, make.SEQ), generator=generator)


def loss_of(task: Task, net: Any, tokens: torch.Tensor) -> torch.Tensor:
    own = task.model in ("experts", "stacked")
    loss: torch.Tensor = (
        net(input_ids=tokens, labels=tokens).loss if own else make.loss_of(net(tokens), tokens)
    )
    return loss


class Engine:
    """A DeepSpeed engine."""

    def __init__(self, task: Task, net: torch.nn.Module | None = None) -> None:
        vars(ds_groups).update({name: copy.copy(value) for name, value in _KEPT.items()})
        ds_groups.mpu = ds_groups.mesh_device = None
        ds_groups.expert_tensor_parallel_world_size = 1
        self.task, self.net = task, net or model_of(task)
        self.engine, *_ = deepspeed.initialize(
            model=self.net,
            config=config(task, dist.get_world_size() // max(task.pp, 1) // task.tp),
            model_parameters=groups_of(task, self.net),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, slower),
        )

    def step(self, number: int) -> float:
        replicas = dist.get_world_size(self.engine.data_parallel_group)
        replica = dist.get_rank(self.engine.data_parallel_group)
        parts = tokens_of(number).chunk(replicas * self.task.accumulate)
        parts = parts[replica * self.task.accumulate :][: self.task.accumulate]
        if self.task.pp:
            return float(self.engine.train_batch(iter([(part, part) for part in parts])))
        total = 0.0
        for part in parts:
            loss = loss_of(self.task, self.engine, part)
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach()) / self.task.accumulate
        return total

    def save(self, folder: Path) -> None:
        for form in FORMS:
            ucd.save(self.engine, str(folder / form), form=form, client_state={"iteration": 3})

    def save_own(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder / "own"), client_state={"iteration": 3})

    def load(self, url: str) -> Any:
        return ucd.load(self.engine, url, rename=self.task.rename, certify=True)

    def facts(self) -> dict[str, Any]:
        counters = ("global_steps", "global_samples", "skipped_steps")
        return {
            "counters": [getattr(self.engine, name) for name in counters],
            "lr": [g["lr"] for g in self.engine.optimizer.param_groups],
        }

    def close(self) -> None:
        self.engine.destroy()


class Alone:
    """Plain PyTorch in one process."""

    def __init__(self, task: Task) -> None:
        self.task, self.net = task, model_of(task)
        self.optimizer = torch.optim.AdamW(groups_of(task, self.net), betas=betas_of(task))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, slower)

    def step(self, number: int) -> float:
        tokens = tokens_of(number)
        loss = loss_of(self.task, self.net, tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}

    def save(self, folder: Path) -> None:
        for form in FORMS:
            ucformat.torch.save(self.state(), str(folder / form), step=3, form=form)

    def save_own(self, folder: Path) -> None:
        names = {id(p): n for n, p in self.net.named_parameters()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(hold(self.net, self.optimizer, names).tensors, folder / "own.safetensors")

    def load(self, url: str) -> Any:
        return ucformat.torch.load(self.state(), url, rename=self.task.rename, certify=True)

    def facts(self) -> dict[str, Any]:
        return {"lr": [g["lr"] for g in self.optimizer.param_groups]}

    def close(self) -> None:
        pass


def run(task: Task, out: Path) -> None:
    folder = out / task.name
    trainer: Any = Alone(task) if task.zero is None else Engine(task)
    facts: dict[str, Any] = {}
    if task.load:
        report = trainer.load(str(out / task.load / task.what))
        facts["loaded"] = trainer.facts()
        facts["report"] = [bool(report), bool(report.certificate), report.lineage.kind]
        if task.zero is not None:
            plain = task.load in ("pipe-none", "grids-none")
            assert report.client_state == ({} if plain else {"iteration": 3})
    else:
        for step in range(3):
            trainer.step(step)
        trainer.save(folder)
        listed = group_of().links.kept[SavePlanner].listed
        facts["listed"] = sorted({tensor.info.name for tensor in listed})
        facts["saved"] = trainer.facts()
    if task.load:
        trainer.save(folder / "again")
    trainer.save_own(folder)
    facts["losses"] = losses(trainer, 3)
    if dist.get_rank() == 0:
        (folder / "facts.json").write_text(json.dumps(facts, default=str))
    trainer.close()


class Counting(make.Block):  # type: ignore[name-defined]
    """A block that keeps a value which is neither parameter nor buffer."""

    value: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Shifted(make.Embed):  # type: ignore[name-defined]
    """An embedding with a parameter that only its last use trains."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.shift = torch.nn.Parameter(torch.zeros(vocab))


def pipe(task: Task, layers: list[Any]) -> Engine:
    """An engine of these layers on as many stages as there are ranks."""
    stages = dist.get_world_size()
    net = PipelineModule(
        layers, num_stages=stages, loss_fn=make.loss_of, partition_method="uniform"
    )
    return Engine(task, net)


def extras(_: Task, out: Path) -> dict[str, Any]:
    """Extra states and buffers of all stages come back; a stage has its own alone."""
    task = Task("", pp=2)
    layers = [LayerSpec(make.Embed, VOCAB), *(LayerSpec(Counting, buffers=True) for _ in range(2))]
    layers.append(LayerSpec(make.Head, VOCAB))
    first = pipe(task, layers)
    for name, part in first.net.named_modules():
        if isinstance(part, Counting):
            part.value = {"of": name}
            part.scale += int(name)
    first.step(0)
    ucd.save(first.engine, str(out / "saved"))
    first.close()
    second = pipe(task, layers)
    report = ucd.load(second.engine, str(out / "saved"), strict=True, certify=True)
    found = [
        part.value == {"of": name} and float(part.scale[0]) == int(name)
        for name, part in second.net.named_modules()
        if isinstance(part, Counting)
    ]
    second.close()
    return {"good": all(found) and bool(report), "here": len(found)}


def untied(_: Task, out: Path) -> dict[str, Any]:
    """What DeepSpeed does not keep equal of a tied module is not saved as if it were."""

    def shifted(embed: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ embed.weight.t() + embed.shift

    task = Task("", pp=2, zero=0)
    layers = [
        TiedLayerSpec("embed", Shifted, VOCAB),
        LayerSpec(make.Block, buffers=False),
        TiedLayerSpec("embed", Shifted, VOCAB, forward_fn=shifted),
    ]
    trainer = pipe(task, layers)
    trainer.step(0)
    told = said(lambda: ucd.save(trainer.engine, str(out / "no")))
    ucd.save(trainer.engine, str(out / "first"), replicas="first")
    trainer.close()
    return {"told": told, "committed": (out / "no").exists()}


def refused(task: Task, out: Path) -> str:
    """What a load says that is refused."""
    trainer = Engine(task)
    told = said(lambda: trainer.load(str(out.parent / task.load / task.what)))
    trainer.close()
    return told


def unclear(_: Task, out: Path) -> dict[str, Any]:
    """A layer that does not say how it has cut a parameter, or that scales it, is refused."""
    trainer = Engine(Task("", model="tensor", tp=2))
    weight = trainer.net.get_parameter("block.up.weight")
    known = copy.deepcopy(getattr(weight, DS_AUTOTP_UC_META))
    scaled = copy.deepcopy(known)
    scaled["conversion"]["affine_map"]["ranks"][1]["pieces"][0]["scale"] = 2.0
    found = {"good": said(lambda: ucd.save(trainer.engine, str(out / "good")))}
    for name, described in (
        ("silent", {"conversion": {}}),
        ("reason", {"conversion": {"unsupported_reason": "its heads are interleaved"}}),
        ("scaled", scaled),
    ):
        setattr(weight, DS_AUTOTP_UC_META, described)
        found[name] = said(lambda: ucd.save(trainer.engine, str(out / "no")))
        found[f"load {name}"] = said(lambda: ucd.load(trainer.engine, str(out / "good")))
    setattr(weight, DS_AUTOTP_UC_META, known)
    trainer.close()
    for zero in (0, 1):
        trainer = Engine(Task("", model="tensor", tp=2, zero=zero))
        held = optimizer_tensors(inspect_engine(trainer.engine))
        entry = next(entry for entry in held if "block.norm.bias" in entry.parts)
        at = entry.parts["block.norm.bias"][2]
        entry.tensor.data.view(-1)[at] += dist.get_rank()
        found[f"unlike {zero}"] = said(partial(ucd.save, trainer.engine, str(out / "no")))
        trainer.close()
    return {**found, "committed": (out / "no").exists()}


def halves(_: Task, out: Path) -> dict[str, Any]:
    """Experts that AutoTP cuts although each tensor-parallel rank has other ones are refused."""
    real = make.cuts_of
    vars(make)["cuts_of"] = lambda **_: real(cut=True)
    trainer = Engine(Task("", model="experts", tp=2, ep=2, cut=False))
    vars(make)["cuts_of"] = real
    told = said(lambda: ucd.save(trainer.engine, str(out / "no")))
    trainer.save_own(out)
    opened = said(lambda: ucformat.open(str(out / "own")))
    trainer.close()
    return {"told": told, "opened": opened, "committed": (out / "no").exists()}


def lanes(_: Task, out: Path) -> dict[str, Any]:
    """Layers of a program's own, as Megatron's, are refused in a pipeline: they do not say how they are cut."""
    trainer = Engine(Task("", pp=2, tp=2))
    ucd.save(trainer.engine, str(out / "good"))
    for name, weight in trainer.net.named_parameters():
        if name.endswith(".up.weight"):
            delattr(weight, DS_AUTOTP_UC_META)
    told = said(lambda: ucd.save(trainer.engine, str(out / "no")))
    loaded = said(lambda: ucd.load(trainer.engine, str(out / "good")))
    trainer.close()
    return {"told": told, "loaded": loaded, "committed": (out / "no").exists()}


EDGES: dict[str, Callable[[Task, Path], Any]] = {
    "extras": extras,
    "untied": untied,
    "refused": refused,
    "unclear": unclear,
    "halves": halves,
    "lanes": lanes,
}


def main() -> None:
    make.gather_flat()
    tasks, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo does as well, and is not compiled first
    )
    deepspeed.init_distributed("gloo")
    for spec in tasks:
        task = Task(**spec)
        if task.edge:
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, EDGES[task.edge](task, out / task.name))
            if dist.get_rank() == 0:
                (out / task.name).mkdir(exist_ok=True)
                (out / task.name / "facts.json").write_text(json.dumps({"ranks": found}))
        else:
            run(task, out)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
