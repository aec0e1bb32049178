"""What a training holds, whole, and what differs between two of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["differences", "held"]


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all parameters, buffers, optimizer states and hyper-parameters. Collective where tensors are cut."""
    out = {
        f"weight/{name}": whole(t)
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    for g, group in enumerate(optimizer.param_groups):
        out[f"group/{g}"] = {k: v for k, v in group.items() if k != "params"}
        for i, p in enumerate(group["params"]):
            out |= {f"{state}/{g}/{i}": whole(v) for state, v in optimizer.state[p].items()}
    return out


def whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The keys under which two holdings are not equal, bit for bit."""
    out = [f"only one has {key}" for key in found.keys() ^ expected.keys()]
    for key in found.keys() & expected.keys():
        a, b = found[key], expected[key]
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        if not same:
            out.append(key)
    return sorted(out)
