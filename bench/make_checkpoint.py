"""Run by torchrun where DeepSpeed is: one step of a Llama-sized stack under ZeRO-3, saved; about 12 bytes a parameter.

usage: make_checkpoint.py OUT WIDTH INNER LAYERS VOCAB
"""

from __future__ import annotations

import sys

import deepspeed
import torch


class Layer(torch.nn.Module):
    """The matrices of a transformer layer, without its attention."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(width, width, bias=False)
        self.k_proj = torch.nn.Linear(width, width // 2, bias=False)
        self.v_proj = torch.nn.Linear(width, width // 2, bias=False)
        self.o_proj = torch.nn.Linear(width, width, bias=False)
        self.gate_proj = torch.nn.Linear(width, inner, bias=False)
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        kv = torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        x = x + self.o_proj(self.q_proj(x) * kv.sigmoid())
        return x + self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))


class Model(torch.nn.Module):
    """Embedding, layers, head."""

    def __init__(self, width: int, inner: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleList(Layer(width, inner) for _ in range(layers))
        self.lm_head = torch.nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(
            self.lm_head(x).flatten(0, 1).float(), tokens.flatten()
        )


def main() -> None:
    out, *sizes = sys.argv[1:]
    torch.manual_seed(0)
    model = Model(*map(int, sizes))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=list(model.parameters())
    )
    loss = engine(torch.randint(0, int(sizes[-1]), (1, 8)))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(out)
    deepspeed.comm.destroy_process_group()


main()
