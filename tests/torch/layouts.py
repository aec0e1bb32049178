"""The ways in which the model is laid over ranks: FSDP2, HSDP, tensor and pipeline parallelism, DDP."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.torch.models import Net, canonical

if TYPE_CHECKING:
    from tests.torch.models import ModelSpec

__all__ = ["Laid", "LayoutSpec", "cross_entropy", "lay", "names_of"]

MICRO = 2  # micro batches of a pipeline


@dataclass(frozen=True)
class LayoutSpec:
    """Degrees of parallelism; what is left of the world is data parallel.

    `data` says how that is done: `fsdp2`, `ddp`, or `copies`, whose gradients are averaged by hand
    (a pipeline stage of several micro batches breaks an assertion inside DDP, torch 2.13).
    `replicas` > 1 makes HSDP of FSDP2.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    data: str = "fsdp2"


@dataclass
class Laid:
    """One rank's part of the model, and its place: it takes rows `dp_rank` of `dp_size` of every batch."""

    model: nn.Module
    net: Net
    dp_rank: int
    dp_size: int
    schedule: Any = None
    tied_stages: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None

    def average(self) -> None:
        """Add up gradients that nobody else adds up: of copies, and of a tied weight that two stages hold."""
        if self.copies is not None:
            for p in self.net.parameters():
                if p.grad is not None:
                    dist.all_reduce(_local_part(p.grad.div_(self.dp_size)), group=self.copies)
        if self.tied_stages is not None and self.net.embed is not None:
            dist.all_reduce(_local_part(self.net.embed.weight.grad), group=self.tied_stages)


@cache
def mesh_of(*axes: tuple[str, int]) -> DeviceMesh:
    """The mesh of these axes; the same for all trainings of a process, so that process groups do not pile up."""
    return init_device_mesh(
        "cpu", tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes)
    )


def lay(net: Net, spec: ModelSpec, layout: LayoutSpec) -> Laid:
    """Cut the model for this rank. Collective: all ranks bring the same whole model."""
    world = dist.get_world_size()
    dp = world // (layout.pp * layout.tp)
    axes = [("pp", layout.pp), ("dp", dp), ("tp", layout.tp)]
    mesh = mesh_of(*[(name, n) for name, n in axes if n > 1 or name == "dp"])
    at = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
    stage = at.get("pp", 0)
    if layout.pp > 1:
        net.keep_stage(spec, stage, layout.pp)
    if layout.tp > 1:
        cut_tensors(net, spec, mesh["tp"])
    if spec.recompute:
        for name, block in net.layers.items():
            net.layers[name] = checkpoint_wrapper(block)
    model: nn.Module = net
    if layout.data == "ddp":
        model = DistributedDataParallel(net, process_group=mesh["dp"].get_group())
    elif layout.data == "fsdp2":
        cut = mesh["dp"]
        if layout.replicas > 1:
            cut = mesh_of(("replicate", layout.replicas), ("shard", dp // layout.replicas))
        for block in net.layers.values():
            fully_shard(block, mesh=cut)
        fully_shard(net, mesh=cut)
    laid = Laid(model, net, at["dp"], dp)
    if layout.pp > 1:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # half a second

        group = mesh["pp"].get_group()
        part = PipelineStage(model, stage, layout.pp, torch.device("cpu"), group=group)
        laid.schedule = Schedule1F1B(part, MICRO, loss_fn=cross_entropy)
        laid.tied_stages = group if spec.tied else None
    if layout.data == "copies" and dp > 1:
        laid.copies = mesh["dp"].get_group()
    return laid


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of predicting each next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def cut_tensors(net: Net, spec: ModelSpec, mesh: DeviceMesh) -> None:
    """Tensor parallelism of blocks, embedding and output, cut unevenly where sizes do not divide.

    Attention is cut by heads, and left whole where these do not divide. Norms and `gain` stay plain
    tensors, save the last norm, whose parameters become replicated DTensors.
    """
    plan: dict[str, Any] = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(),
    }
    if spec.heads % mesh.size() == 0:
        plan |= {
            "q": ColwiseParallel(),
            "k": ColwiseParallel(),
            "v": ColwiseParallel(),
            "o": RowwiseParallel(),
        }
    for block in net.blocks():
        parallelize_module(block, mesh, plan)
    ends: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, {k: v for k, v in ends.items() if getattr(net, k) is not None})
    net.tie(spec)
    if net.norm is not None:
        distribute_module(net.norm, mesh, None, partial(_replicated), _local)


def _replicated(
    _: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh
) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


def _local(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    local: torch.Tensor = output.to_local()
    return local


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def names_of(model: nn.Module) -> dict[int, str]:
    """Canonical names by the parameters' `id`; of tied ones the first."""
    return {id(p): canonical(name) for name, p in model.named_parameters()}
