"""A tiny Llama in plain PyTorch with the names, the arithmetic and the optimizer of Megatron-Core's GPT."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from bench.engines_shared import GROUPS, HEADS, HIDDEN, LAYERS, VOCAB, WIDTH

ROWS, LENGTH = 4, 6  # of a batch
_HEAD = HIDDEN // HEADS
_TOKENS = 19  # that occur


def batch_of(step: int) -> torch.Tensor:
    """The batch of a step, the same under every layout."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, _TOKENS, (ROWS, LENGTH), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of guessing the next token; the first one follows the last."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), torch.roll(tokens, -1, 1).flatten()
    )


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() == 1]  # a group in Megatron-Core, too
    groups = [{"params": group} for group in (matrices, vectors) if group]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.01)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    frequencies = 1 / 10_000 ** (torch.arange(0, _HEAD, 2).float() / _HEAD)
    angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
    angles = torch.cat((angles, angles), -1)[None, :, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Attention(nn.Module):
    """Attention of grouped queries; the rows of `linear_qkv` are those of one group after another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.linear_qkv = nn.Linear(HIDDEN, (HEADS + 2 * GROUPS) * _HEAD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[row, place, hidden]`."""
        shared = HEADS // GROUPS
        qkv = self.linear_qkv(x).unflatten(-1, (-1, shared + 2, _HEAD))
        q, k, v = (part.flatten(2, 3) for part in qkv.split([shared, 1, 1], 3))
        q, k = _rotated(q), _rotated(k)
        k, v = (part.repeat_interleave(shared, 2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A projection that is gated by GELU, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, 2 * WIDTH, bias=False)
        self.linear_fc2 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[row, place, hidden]`."""
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(functional.gelu(gate) * up)


class Block(nn.Module):
    """A layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.self_attention = Attention()
        self.pre_mlp_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.mlp = Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[row, place, hidden]`."""
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Embedding(nn.Module):
    """The first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of `[row, place]`."""
        return self.word_embeddings(tokens)


class Head(nn.Module):
    """The last layer of a pipeline: the final norm and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.final_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[row, place, hidden]`."""
        return self.output_layer(self.final_layernorm(x))


class Decoder(nn.Module):
    """All layers between the embedding and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.final_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[row, place, hidden]`."""
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class Gpt(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.decoder = Decoder()
        self.output_layer = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of `[row, place]`."""
        return self.output_layer(self.decoder(self.embedding(tokens)))
