"""The models of `bench.engines` in plain PyTorch, with the arithmetic and the optimizer of Megatron-Core's GPT.

The dense one, a tiny Llama, has its names, too; the one of experts is Hugging Face's Mixtral.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bench.engines_shared import (
    CHOSEN,
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    WIDTH,
)

ROWS, LENGTH = 4, 6  # of a batch
_HEAD = HIDDEN // HEADS
_TOKENS = 19  # that occur


def batch_of(step: int) -> torch.Tensor:
    """The batch of a step, the same under every layout."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, _TOKENS, (ROWS, LENGTH), generator=generator)


def model_of(name: str) -> nn.Module:
    """A model, the same in each process."""
    torch.manual_seed(0)
    return mixtral() if name == "moe" else Gpt()


def layers_of(net: Any) -> tuple[Any, list[str], str, str, str]:
    """The layers of a model, and the modules that tensor parallelism cuts.

    In each layer by columns, and by rows; the embedding, and the head.
    """
    if isinstance(net, Gpt):
        columns, rows = ["self_attention.linear_qkv"], "self_attention.linear_proj"
        return net.decoder.layers, columns, rows, "embedding.word_embeddings", "output_layer"
    columns = [f"self_attn.{x}_proj" for x in "qkv"]
    return net.model.layers, columns, "self_attn.o_proj", "model.embed_tokens", "lm_head"


def mixtral() -> nn.Module:
    """A tiny Mixtral of Hugging Face, with the arithmetic of Megatron-Core's GPT with experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=4 * LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.3,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config)


def loss_of(out: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of guessing the next token; the first one follows the last."""
    logits = out if isinstance(out, torch.Tensor) else out.logits
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
