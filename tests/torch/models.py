"""A tiny language model that holds what training states hold: every kind of parameter and buffer, in odd sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Block", "ModelSpec", "Net", "build_net", "canonical", "persistent_buffers"]

#: What wrappers put into names as parts of their own: DDP, recomputation of activations.
_WRAPPERS = ("module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and options. `freeze` holds parts of parameter names; `recompute` wraps every block, as is usual."""

    vocab: int = 1003
    hidden: int = 90
    heads: int = 4
    head_dim: int = 18
    inner: int = 131
    layers: int = 2
    tied: bool = False
    freeze: tuple[str, ...] = ()
    bf16: bool = False
    recompute: bool = False
    seed: int = 0


class Block(nn.Module):
    """Attention and a two-layer perceptron.

    `gain` has one element (FSDP2 refuses 0-d parameters), so all ranks but one hold an empty shard
    of it. Of the buffers, `seen` and `drift` are saved, `scratch` is not. They follow the number of
    steps, never the data, so they are equal on all ranks; and `drift` is part of the arithmetic, so
    losing it changes the loss.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        wide = spec.heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(spec.hidden), nn.RMSNorm(spec.hidden)
        self.q, self.k = (
            nn.Linear(spec.hidden, wide, bias=False),
            nn.Linear(spec.hidden, wide, bias=False),
        )
        self.v, self.o = nn.Linear(spec.hidden, wide), nn.Linear(wide, spec.hidden)
        self.up, self.down = nn.Linear(spec.hidden, spec.inner), nn.Linear(spec.inner, spec.hidden)
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("drift", torch.zeros(spec.hidden))
        self.register_buffer("scratch", torch.zeros(spec.hidden), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2)) * self.gain
        return x + self.down(F.gelu(self.up(self.norm2(x) + self.drift)))

    def tick(self) -> None:
        """Count a step of training."""
        self.seen += 1
        step = torch.arange(len(self.drift)).add(self.seen).sin()
        self.drift.mul_(0.9).add_(step.to(self.drift.dtype), alpha=0.1)
        self.scratch.fill_(float("nan"))


class Net(nn.Module):
    """Embedding, blocks, norm and output. A pipeline stage holds a part of it, under the same names.

    A tied last stage has no `head` but `embed`, a copy of the first stage's, as is usual in
    pipelines.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleDict({str(i): Block(spec) for i in range(spec.layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(spec.hidden)
        self.head: nn.Linear | None = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self.first, self.last = True, True
        self.tie(spec)

    def tie(self, spec: ModelSpec) -> None:
        """Let the output use the embedding's weight (once more, where each of them was cut by itself)."""
        if spec.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            assert self.embed is not None
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        if not self.last:
            return x
        assert self.norm is not None
        x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        else:
            assert self.embed is not None
            x = F.linear(x, self.embed.weight)
        return x.float()

    def keep_stage(self, spec: ModelSpec, stage: int, stages: int) -> None:
        """Drop what other pipeline stages hold; the last stage takes the layers that do not divide."""
        self.first, self.last = stage == 0, stage == stages - 1
        each = spec.layers // stages
        mine = range(stage * each, spec.layers if self.last else (stage + 1) * each)
        for i in set(range(spec.layers)) - set(mine):
            del self.layers[str(i)]
        if not self.first and not (self.last and spec.tied):
            self.embed = None
        if not self.last:
            self.norm = None
        if not self.last or (spec.tied and not self.first):
            self.head = None

    def tick(self) -> None:
        """Count a step of training."""
        for layer in self.layers.values():
            layer.tick()

    def blocks(self) -> list[Block]:
        return list(self.layers.values())


def build_net(spec: ModelSpec) -> Net:
    """The whole model, the same on every rank."""
    torch.manual_seed(spec.seed)
    net = Net(spec)
    for name, p in net.named_parameters():
        p.requires_grad_(not any(part in name for part in spec.freeze))
    return net.bfloat16() if spec.bf16 else net


def canonical(name: str) -> str:
    """The name of a parameter or buffer without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical name and buffer of those that are saved."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield canonical(f"{path}.{name}"), buffer
