"""What all ranks together hold, taken from the live model and optimizer, and from no checkpoint library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.torch.models import canonical, persistent_buffers

__all__ = ["Held", "hold", "plain", "whole_on_first"]


@dataclass
class Held:
    """Whole tensors as `<state>/<name>`, optimizer groups by name, and further facts as plain JSON."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().contiguous()


def hold(model: torch.nn.Module, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Held:
    """What this rank holds, made whole over the ranks that share its tensors. Tied parameters are there once."""
    held = Held()
    aliases: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = names[id(p)]
        if canonical(name) != first:
            aliases[canonical(name)] = first
        else:
            held.tensors[f"weight/{first}"] = whole(p)
    held.tensors |= {f"weight/{name}": whole(b) for name, b in persistent_buffers(model)}
    values: dict[str, Any] = {}
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"]]
        held.groups.append(
            {"params": members, "options": plain({k: v for k, v in group.items() if k != "params"})}
        )
        for p in group["params"]:
            for state, value in optimizer.state[p].items():
                if isinstance(value, torch.Tensor):
                    held.tensors[f"{state}/{names[id(p)]}"] = whole(value)
                else:
                    values[f"{state}/{names[id(p)]}"] = plain(value)
    frozen = sorted(names[id(p)] for p in model.parameters() if not p.requires_grad)
    held.facts = {"aliases": aliases, "values": values, "frozen": frozen}
    return held


def whole_on_first(held: Held, values: dict[str, Any]) -> Held:
    """What all ranks hold, on rank 0; ranks that hold the same tensor must agree to the bit. Collective.

    Optimizer groups of pipeline stages are joined in the order of the ranks; `values` must be equal
    on all ranks.
    """
    mine = {key: _digest(t) for key, t in held.tensors.items()}
    digests = _all_gathered(mine)
    owner = {key: rank for rank in reversed(range(len(digests))) for key in digests[rank]}
    for rank, found in enumerate(digests):
        for key, digest in found.items():
            assert digest == digests[owner[key]][key], (
                f"ranks {owner[key]} and {rank} hold unlike copies of {key}"
            )
    sent = {key: t for key, t in held.tensors.items() if owner[key] == dist.get_rank()}
    parts = _all_gathered(sent if dist.get_rank() else {})
    others = _all_gathered({"groups": held.groups, "facts": held.facts, "values": plain(values)})
    assert all(o["values"] == others[0]["values"] for o in others), "ranks hold unlike values"
    out = Held({**sent} if dist.get_rank() == 0 else {})
    for part in parts:
        out.tensors |= part
    out.facts = {"aliases": {}, "values": {}, "frozen": []}
    groups: list[dict[str, Any]] = [{"params": [], "options": g["options"]} for g in held.groups]
    for other in others:
        for group, more in zip(groups, other["groups"], strict=True):
            assert group["options"] == more["options"], "ranks have unlike optimizer groups"
            group["params"] += [n for n in more["params"] if n not in group["params"]]
        out.facts["aliases"] |= other["facts"]["aliases"]
        out.facts["values"] |= other["facts"]["values"]
        out.facts["frozen"] = sorted({*out.facts["frozen"], *other["facts"]["frozen"]})
    out.groups = groups
    out.facts |= {"groups": groups, **others[0]["values"]}
    return out


def plain(value: Any) -> Any:
    """JSON that keeps tuples apart from lists, and integers from floats, for the comparison."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [plain(v) for v in value]}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype)}
    return value


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def _all_gathered(value: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, value)
    return found
