"""A small mixture of experts, whose training gives the same bits under every expert-parallel degree."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH = 8


class _Shared(torch.autograd.Function):
    """What ranks compute together from here on: gradients of all of them are added up."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return added_up(grad)


class _Added(torch.autograd.Function):
    """What ranks have computed of different tokens, put together."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return added_up(x)

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def added_up(x: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, of which all but one have zeros: exact, but for the sign of zeros, which is lost."""
    both = x.detach().float().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(both)
    return both.to(x.dtype) + 0.0


class Expert(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.up, self.down = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=made) / 4) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.tanh(x @ self.up) @ self.down
        return out


class Mixture(nn.Module):
    """A layer: a router that all ranks have, and the experts of this rank by their numbers in the whole model."""

    def __init__(self, seed: int, experts: int, own: Iterable[int], dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.router = nn.Parameter(torch.randn(WIDTH, experts, generator=made).to(dtype))
        self.experts = nn.ModuleDict({str(n): Expert(1000 * seed + n).to(dtype) for n in own})
        self.tokens = Counter[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(x @ self.router, -1)
        chosen = weights.argmax(-1)
        self.tokens.update(chosen.tolist())
        shared, out = _Shared.apply(x), torch.zeros_like(x)
        for name, expert in self.experts.items():
            rows = (chosen == int(name)).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, expert(shared[rows]))
        gate = weights.gather(-1, chosen[:, None])
        result: torch.Tensor = x + gate * _Added.apply(out)
        return result


class Model(nn.Module):
    """Layers of experts; `rank` of `degree` ranks has an equal part of each."""

    def __init__(
        self,
        experts: int,
        *,
        layers: int = 2,
        rank: int = 0,
        degree: int = 1,
        seed: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        each = experts // degree
        own = range(rank * each, (rank + 1) * each)
        self.layers = nn.ModuleList(
            Mixture(seed + layer, experts, own, dtype) for layer in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @property
    def tokens(self) -> dict[str, list[int]]:
        """How many tokens each expert was given."""
        return {
            f"layers.{n}.experts": [layer.tokens[e] for e in range(layer.router.shape[1])]
            for n, layer in enumerate(self.layers)
        }


def batch(step: int, tokens: int = 64) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


def train(model: Model, optimizer: torch.optim.Optimizer, step: int, tokens: int = 64) -> None:
    optimizer.zero_grad()
    model(batch(step, tokens)).square().mean().backward()
    optimizer.step()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], str]:
    """A digest of each tensor that this rank has, by name and state."""
    names = {p: name for name, p in model.named_parameters()}
    out = {(name, "weight"): _digest(p) for p, name in names.items()}
    for p, states in optimizer.state.items():
        out |= {(names[p], state): _digest(t) for state, t in states.items()}
    return out


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]
