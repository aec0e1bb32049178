"""One engine of `bench.engines`, on each of its ranks: `engines_program.py JOB`.

JOB is JSON of the form `{"engine", "options", "folder", "save", "loads": {source: {"place", "view",
"rename", "strict"}}}`. The engine trains two steps, saves to `save` if that is given, and trains two
more; then it loads each source, saves what it then has to `folder/SOURCE`, and trains two steps.
`folder/told.json` has the losses, and what reports and certificates lack.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

import ucformat
from bench.engines_model import (
    Block,
    Embedding,
    Gpt,
    Head,
    batch_of,
    loss_of,
    optimizer_of,
)
from bench.engines_shared import AFTER, BEFORE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch import Certificate

#: What only DeepSpeed has: the scale of losses, which is 1 here.
OF_DEEPSPEED = ["optimizer.loss_scaler.*"]


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

    def __init__(self, *, dp: int = 0, tp: int = 1) -> None:
        torch.manual_seed(0)
        self.net: Any = Gpt()
        self.rank, self.ranks = 0, 1
        if dp:
            self._shard(dp, tp)
        self.optimizer = optimizer_of(self.net)

    def _shard(self, dp: int, tp: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        if tp > 1:
            layer = {
                "self_attention.linear_qkv": ColwiseParallel(),
                "self_attention.linear_proj": RowwiseParallel(),
            }
            for block in self.net.decoder.layers:
                parallelize_module(block, mesh["tp"], layer)
            ends = {
                "embedding.word_embeddings": RowwiseParallel(input_layouts=Replicate()),
                "output_layer": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(self.net, mesh["tp"], ends)
        for block in self.net.decoder.layers:
            fully_shard(block, mesh=mesh["dp"])
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
        report = load(state, ck, **options, leave=OF_DEEPSPEED)
        return said(report, certify(state, ck, rename=options["rename"], leave=OF_DEEPSPEED))


class DeepSpeed:
    """ZeRO of some stage, or a pipeline of `pp` stages."""

    def __init__(self, *, zero: int = 1, pp: int = 0) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        torch.manual_seed(0)
        self.pp = pp
        self.net: Any = Gpt()
        if pp:
            layers = [Embedding(), Block(), Block(), Head()]
            self.net = PipelineModule(layers, num_stages=pp, loss_fn=loss_of)
        replicas = dist.get_world_size() // max(pp, 1)
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
        self.engine, *_ = deepspeed.initialize(model=self.net, optimizer=optimizer, config=config)

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

        report = ucd.load(self.engine, ck, **options)
        return said(report, ucd.certify(self.engine, ck, rename=options["rename"]))


class Megatron:
    """Megatron-Core or Megatron-FSDP; `options` are those of `tests/data/megatron/make.py`."""

    def __init__(self, **options: Any) -> None:
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
        report = ucm.load(state, ck, **options, leave=OF_DEEPSPEED)
        for name, chunk in zip(self.live.model(), self.live.chunks, strict=True):
            if name in report.state:  # a chunk of Megatron-FSDP is loaded itself
                chunk.module.load_state_dict(report.state[name])
        return said(report, ucm.certify(state, ck, rename=options["rename"], leave=OF_DEEPSPEED))


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

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
    elif kind != "megatron":  # which does it itself
        dist.init_process_group("gloo")
    training = KINDS[kind](**job["options"])
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
