"""The experts (`deepspeed.moe`) that this rank of a DeepSpeed engine has, and their names in the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ucformat.engines.deepspeed.experts import Experts, expert_of
from ucformat.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class _Layer:
    """The experts of one layer on this rank: those of one of `degree` expert-parallel ranks.

    `is_first` says whether the rank is the first of those that have the same experts.
    """

    degree: int
    rank: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """The experts of all layers on this rank, by the prefix of their names."""

    experts: Experts
    layers: Mapping[str, _Layer]

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def degrees(self) -> int | list[int]:
        """The numbers of expert-parallel ranks, in the form of manifests."""
        sizes = sorted({n for layer in self.layers.values() if (n := layer.degree) > 1} or {1})
        return sizes[0] if len(sizes) == 1 else sizes

    def layer_of(self, name: str) -> _Layer | None:
        """The layer of which a tensor is an expert's; None for others."""
        expert = expert_of(name)
        return None if expert is None else self.layers.get(expert[0])

    def whole_name(self, name: str) -> str:
        """The name in the whole model of what this rank calls so."""
        layer = self.layer_of(name)
        return name if layer is None else self.experts.global_name(name, layer.degree, layer.rank)


def local_experts(engine: Any) -> LocalExperts:
    """Return the experts that this rank of an engine has.

    Raises:
        UnsupportedError: an expert is not in a layer of `deepspeed.moe`, so its number in the whole
            model is not known.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import is_moe_param

    counts: dict[str, int] = {}
    layers: dict[str, _Layer] = {}
    for path, part in engine.module.named_modules():
        if isinstance(part, MoE):
            prefix = f"{path}.".lstrip(".") + "deepspeed_moe.experts.deepspeed_experts."
            counts[prefix] = part.num_experts
            among = engine.expert_parallel_group[part.expert_group_name]
            replicas = engine.expert_data_parallel_group[part.expert_group_name]
            is_first = dist.get_rank(replicas) == 0
            layers[prefix] = _Layer(dist.get_world_size(among), dist.get_rank(among), is_first)
    experts = LocalExperts(Experts(int(engine.seq_dp_world_size), counts=counts), layers)
    named = engine.module.named_parameters()
    unknown = [n for n, p in named if is_moe_param(p) and experts.layer_of(n) is None]
    if unknown or (engine.has_moe_layers and not experts):
        raise UnsupportedError(
            "a DeepSpeed engine with experts outside of deepspeed.moe.layer.MoE, such as those of "
            f"AutoEP, cannot be saved or loaded yet{': ' * bool(unknown)}{', '.join(unknown[:3])}",
            hint="use engine.save_checkpoint, or deepspeed.moe.layer.MoE",
        )
    return experts
