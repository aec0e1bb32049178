"""One engine of `bench.engines`, on each of its ranks: `engines_program.py JOB`.

JOB is JSON of the form `{"model", "engine", "options", "folder", "save", "loads": {source: {"place", "view",
"rename", "strict"}}}`. The engine trains two steps, saves to `save` if that is given, and trains two
more; then it loads each source, saves what it then has to `folder/SOURCE`, and trains two steps.
`folder/told.json` has the losses, and what reports and certificates lack.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist

import ucformat
from bench.engines_model import (
    Block,
    Embedding,
    Head,
    batch_of,
    layers_of,
    loss_of,
    model_of,
    optimizer_of,
)
from bench.engines_shared import AFTER, BEFORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch import Certificate

#: What only DeepSpeed has, the scale of losses, which is 1 here, and Megatron-Core, a mark of groups of experts.
OF_ENGINES = ["optimizer.loss_scaler.*", "optimizer.param_groups.*.is_expert_parallel"]


class Training(Protocol):
    """A model and its optimizer under one engine."""

    def step(self, number: int) -> float:
        """Make a step, and return the loss of the whole batch."""

    def save(self, place: str) -> None:
        """Save both."""

    def load(self, ck: Checkpoint, **options: Any) -> list[str]:
        """Load both, and return what is not as it was saved."""


class Plain:
    """One process, or FSDP2 over `dp` ranks with `tp` of tensor parallelism."""

    def __init__(self, model: str, *, dp: int = 0, tp: int = 1) -> None:
        self.net: Any = model_of(model)
        self.rank, self.ranks = 0, 1
        if dp:
            self._shard(dp, tp)
        self.optimizer = optimizer_of(self.net)

    def _shard(self, dp: int, tp: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        layers, columns, rows, embedding, head = layers_of(self.net)
        if tp > 1:
            layer = {name: ColwiseParallel() for name in columns}
            for block in layers:
                parallelize_module(block, mesh["tp"], layer | {rows: RowwiseParallel()})
            ends = {
                embedding: RowwiseParallel(input_layouts=Replicate()),
                head: ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(self.net, mesh["tp"], ends)

        def placed(parameter: torch.Tensor) -> Shard | None:
            """With tensor parallelism stacks of experts are cut within each, otherwise between them."""
            return Shard(1) if tp > 1 and parameter.dim() > 2 else None

        for block in layers:
            fully_shard(block, mesh=mesh["dp"], shard_placement_fn=placed)
        fully_shard(self.net, mesh=mesh["dp"])
        self.rank, self.ranks = mesh["dp"].get_local_rank(), dp

    def step(self, number: int) -> float:
        """See Training."""
        tokens = batch_of(number).chunk(self.ranks)[self.rank]
        loss = loss_of(self.net(tokens), tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean(loss)

    def save(self, place: str) -> None:
        """See Training."""
        from ucformat.torch import save

        save({"model": self.net, "optimizer": self.optimizer}, place)

    def load(self, ck: Checkpoint, **options: Any) -> list[str]:
        """See Training."""
        from ucformat.torch import certify, load

        state = {"model": self.net, "optimizer": self.optimizer}
        report = load(state, ck, **options, leave=OF_ENGINES)
        return said(report, certify(state, ck, rename=options["rename"], leave=OF_ENGINES))


class DeepSpeed:
    """ZeRO of some stage, also in a pipeline of `pp` stages, or with experts over `ep` ranks by AutoEP."""

    def __init__(self, model: str, *, zero: int = 1, pp: int = 0, tp: int = 1, ep: int = 0) -> None:
        import deepspeed

        self.pp = pp
        self.net: Any = model_of(model)
        replicas = dist.get_world_size() // max(pp, 1) // tp
        if pp:
            self.net = pipeline(pp, tp, replicas)
        config = {
            "train_micro_batch_size_per_gpu": len(batch_of(0)) // replicas,
            "steps_per_print": 10**6,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": zero,
                "stage3_param_persistence_threshold": 0,
                "memory_efficient_linear": False,
            },
        }
        optimizer = optimizer_of(self.net)
        training: dict[str, Any] = {"optimizer": optimizer}
        if ep:
            config["expert_parallel"] = {
                "enabled": True,
                "autoep_size": ep,
                "preset_model": "mixtral",
                "use_grouped_mm": False,
            }
            # made by DeepSpeed, after AutoEP has replaced parameters
            same = {name: optimizer.defaults[name] for name in ("lr", "weight_decay")}
            config["optimizer"] = {"type": "AdamW", "params": {**same, "torch_adam": True}}
            groups = [group["params"] for group in optimizer.param_groups]
            named = [{"name": str(n), "params": params} for n, params in enumerate(groups)]
            training = {"model_parameters": named}
        # DeepSpeed 0.19.8 would move what records routers' logits, as it was before Transformers 5.23
        recorders = "transformers.utils.output_capturing._CAN_RECORD_REGISTRY"
        with patch(recorders, None) if ep else nullcontext():
            made = deepspeed.initialize(model=self.net, config=config, **training)
        self.engine = made[0]

    def step(self, number: int) -> float:
        """See Training."""
        group = self.engine.data_parallel_group
        tokens = batch_of(number).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        if self.pp:
            return float(self.engine.train_batch(iter([(tokens, tokens)])))
        loss = loss_of(self.engine(tokens), tokens)
        self.engine.backward(loss)
        self.engine.step()
        return mean(loss)

    def save(self, place: str) -> None:
        """See Training."""
        import ucformat.torch.deepspeed as ucd

        ucd.save(self.engine, place)

    def load(self, ck: Checkpoint, **options: Any) -> list[str]:
        """See Training."""
        import ucformat.torch.deepspeed as ucd

        report = ucd.load(self.engine, ck, **options, leave=OF_ENGINES)
        return said(report, ucd.certify(self.engine, ck, rename=options["rename"]))


class Megatron:
    """Megatron-Core or Megatron-FSDP; `options` are those of `tests/data/megatron/make.py`."""

    def __init__(self, _: str, **options: Any) -> None:
        from tests.engines.megatron.live.fsdp import FsdpTraining
        from tests.engines.megatron.live.train import Training as CoreTraining

        live = FsdpTraining if "fsdp" in options else CoreTraining
        self.live = live({"layers": 2, "swiglu": True, "vocab": 32, **options})

    def step(self, number: int) -> float:
        """See Training."""
        self.live.step_number = number
        loss: float = self.live.step()
        return loss

    def save(self, place: str) -> None:
        """See Training."""
        import ucformat.torch.megatron as ucm

        ucm.save({**self.live.model(), "optimizer": self.live.optimizer}, place)

    def load(self, ck: Checkpoint, **options: Any) -> list[str]:
        """See Training."""
        import ucformat.torch.megatron as ucm

        state = {**self.live.model(), "optimizer": self.live.optimizer}
        report = ucm.load(state, ck, **options, leave=OF_ENGINES)
        for name, chunk in zip(self.live.model(), self.live.chunks, strict=True):
            if name in report.state:  # a chunk of Megatron-FSDP is loaded itself
                chunk.module.load_state_dict(report.state[name])
        return said(report, ucm.certify(state, ck, rename=options["rename"], leave=OF_ENGINES))


def pipeline(stages: int, lanes: int, replicas: int) -> Any:
    """The dense model as a pipeline, each of whose layers is cut over `lanes` ranks by AutoTP's layers."""
    from deepspeed.module_inject import layers as autotp
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layers: list[torch.nn.Module] = [Embedding(), Block(), Block(), Head()]
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=lanes, num_dp=replicas)
    if lanes > 1:
        set_autotp_mode(training=True)
        groups = {tuple(r): dist.new_group(r) for r in topology.get_axis_comm_lists("model")}
        group = next(g for ranks, g in groups.items() if dist.get_rank() in ranks)
        kinds = {
            "word_embeddings": autotp.VocabParallelEmbedding,
            "linear_qkv": autotp.LinearLayer,
            "linear_proj": autotp.LinearAllreduce,
            "linear_fc1": autotp.GateUpPack_LinearLayer,
            "linear_fc2": autotp.LinearAllreduce,
            "output_layer": partial(autotp.LinearLayer, gather_output=True),
        }
        for module in [m for layer in layers for m in layer.modules()]:
            for name, child in [*module.named_children()]:
                if name in kinds:
                    setattr(module, name, kinds[name](child, group, name=name))
    return PipelineModule(layers, topology=topology, loss_fn=loss_of)


def mean(loss: torch.Tensor) -> float:
    """The mean over all ranks, of which as many have each part of a batch."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    ranks: int = dist.get_world_size()
    return float(total) / ranks


def said(report: Any, certificate: Certificate) -> list[str]:
    """What a report or a certificate lacks, but for hyper-parameters: some engines save none."""
    lines = [*report.left, *report.problems.lines(unexpected=True)]
    faults = (
        *certificate.different,
        *certificate.missing,
        *certificate.unexpected,
        *certificate.uninitialised,
    )
    return [line for line in (*lines, *map(str, faults)) if "hyper-parameters of" not in line]


KINDS: dict[str, Callable[..., Training]] = {
    "plain": Plain,
    "deepspeed": DeepSpeed,
    "megatron": Megatron,
}


def main(job: dict[str, Any]) -> None:
    """Do a job."""
    kind = job["engine"]
    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif kind != "megatron":  # which does it itself
        dist.init_process_group("gloo")
    training = KINDS[kind](job["model"], **job["options"])
    told: dict[str, Any] = {"losses": {}, "problems": {}}
    if job["save"]:
        for step in range(BEFORE):
            training.step(step)
        training.save(job["save"])
        told["losses"][""] = [training.step(BEFORE + step) for step in range(AFTER)]
    for source, load in job["loads"].items():
        ck = ucformat.open(load["place"], view=load["view"])
        told["problems"][source] = training.load(ck, rename=load["rename"], strict=load["strict"])
        training.save(f"{job['folder']}/{source}")
        told["losses"][source] = [training.step(BEFORE + step) for step in range(AFTER)]
    if dist.get_rank() == 0:
        Path(job["folder"], "told.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
