"""The experts (`deepspeed.moe`, AutoEP) of this rank of a DeepSpeed engine, and their names in the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.engines.deepspeed.autoep import TENSORS, check_order
from ucformat.engines.deepspeed.experts import Experts, expert_of
from ucformat.engines.deepspeed.live_parts import CutParameter
from ucformat.errors import UnsupportedError
from ucformat.geometry.box import Box
from ucformat.geometry.distribution import RankMesh
from ucformat.geometry.view import BoxPair

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.torch.state.local import LocalShard


@dataclass(frozen=True, slots=True)
class _Layer:
    """The experts of one layer on this rank.

    `among` are the expert-parallel ranks that have all experts together, `replicas` the ranks that
    have the same as this one.
    """

    among: Sequence[int]
    replicas: Sequence[int]

    @property
    def degree(self) -> int:
        """The number of expert-parallel ranks."""
        return len(self.among)

    @property
    def rank(self) -> int:
        """This rank among the expert-parallel ranks."""
        return self.among.index(dist.get_rank())

    @property
    def is_first(self) -> bool:
        """Whether the rank is the first of those that have the same experts."""
        return bool(self.replicas[0] == dist.get_rank())


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The experts of all layers on this rank, by the prefix of their names; of AutoEP by the names of stacks."""

    experts: Experts
    layers: Mapping[str, _Layer]
    stacks: Mapping[str, CutParameter] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def degrees(self) -> int | list[int]:
        """The numbers of expert-parallel ranks, in the form of manifests."""
        sizes = sorted({n for layer in self.layers.values() if (n := layer.degree) > 1} or {1})
        return sizes[0] if len(sizes) == 1 else sizes

    def layer_of(self, name: str) -> _Layer | None:
        """The layer of which a tensor is an expert's, or a stack of experts; None for others."""
        expert = expert_of(name)
        return self.layers.get(name if expert is None else expert[0])

    def whole_name(self, name: str) -> str:
        """The name in the whole model of what this rank calls so."""
        layer = self.layer_of(name)
        return name if layer is None else self.experts.global_name(name, layer.degree, layer.rank)

    def whole(self, local: LocalShard) -> LocalShard:
        """The part of a whole stack, of that of this rank's part of it; other tensors as they are."""
        stack = self.stacks.get(local.info.name)
        if stack is None or not local.info.shape:
            return local
        layer = self.layers[local.info.name]
        return stack.whole(local, RankMesh.crossing(dist.get_rank(), layer.replicas, layer.among))


def local_experts(engine: Any) -> LocalExperts:
    """Return the experts that this rank of an engine has.

    Raises:
        UnsupportedError: an expert is in no layer of `deepspeed.moe` or AutoEP, so its number in the
            whole model is not known, or ranks of AutoEP have them in another order.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import is_moe_param

    counts: dict[str, int] = {}
    layers: dict[str, _Layer] = {}
    stacks: dict[str, CutParameter] = {}
    stacked = _stacked_class()
    for path, part in engine.module.named_modules():
        prefix = f"{path}.".lstrip(".")
        if isinstance(part, MoE):
            prefix += "deepspeed_moe.experts.deepspeed_experts."
            counts[prefix] = part.num_experts
            layers[prefix] = _layer(engine, part.expert_group_name)
        elif stacked is not None and isinstance(part, stacked):
            layer = _layer(engine, part.ep_group_name)
            check_order(part.expert_placement_descriptor, part.num_experts, layer.degree, path)
            for tensor in TENSORS:
                name = f"{prefix}experts.{tensor}"
                parameter = getattr(part.experts, tensor)
                local = tuple(getattr(parameter, "ds_shape", parameter.shape))
                stacks[name] = _stack(local, part.num_experts, layer)
                layers[name] = layer
    experts = LocalExperts(Experts(int(engine.seq_dp_world_size), counts=counts), layers, stacks)
    named = engine.module.named_parameters()
    unknown = [n for n, p in named if is_moe_param(p) and experts.layer_of(n) is None]
    if unknown or (engine.has_moe_layers and not experts):
        raise UnsupportedError(
            "a DeepSpeed engine with experts outside of deepspeed.moe.layer.MoE and AutoEP's layers "
            f"cannot be saved or loaded yet{': ' * bool(unknown)}{', '.join(unknown[:3])}",
            hint="use engine.save_checkpoint, or deepspeed.moe.layer.MoE",
        )
    return experts


def _stacked_class() -> Any:
    """The class of AutoEP's layers; None where DeepSpeed is older than it."""
    try:
        from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    except ImportError:
        return None
    return AutoEPMoELayer


def _layer(engine: Any, group: str) -> _Layer:
    groups = (engine.expert_parallel_group[group], engine.expert_data_parallel_group[group])
    return _Layer(*map(dist.get_process_group_ranks, groups))


def _stack(local: tuple[int, ...], experts: int, layer: _Layer) -> CutParameter:
    """This rank's part of a stack."""
    rows, *rest = local
    mine = Box((layer.rank * rows, *[0] * len(rest)), local)
    regions = (BoxPair.aligned(mine, Box.whole(local)),)
    return CutParameter((experts, *rest), local, regions, 0)
