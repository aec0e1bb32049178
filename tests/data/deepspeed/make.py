"""Make the checkpoints of this folder: tiny models, trained for three steps by DeepSpeed on CPU, with the truth beside.

    torchrun --nproc-per-node WORLD make.py NAME      # in an environment with deepspeed, transformers and safetensors

NAME is one of `SPECS`, which also gives WORLD. Written are NAME/ckpt, as `save_checkpoint` leaves it but for the
conversion scripts that it copies there, NAME/truth.safetensors (`<state>/<name>` -> the whole tensor) and
NAME/truth.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

#: Name -> processes, tensor-parallel ranks, pipeline stages, ZeRO stage, dtype, and what else is special.
SPECS: dict[str, dict[str, Any]] = {
    "tp2-dp2-z1": {"world": 4, "tp": 2, "zero": 1, "vocab": 31, "heads": 3, "kv": 3, "groups": 2},
    "tp2-z2-tied": {"world": 2, "tp": 2, "zero": 2, "dtype": "bf16", "tied": True},
    "tp2-dp2-z3": {"world": 4, "tp": 2, "zero": 3, "dtype": "bf16", "vocab": 31, "groups": 2},
    "tp2-z0": {"world": 2, "tp": 2, "zero": 0, "vocab": 31},
    "pp2-dp2-z1": {"world": 4, "pp": 2, "zero": 1, "dtype": "bf16", "tied": True, "groups": 2, "buffers": True},
    "pp2-z0": {"world": 2, "pp": 2, "zero": 0, "tied": True},
    "pp2-z1-bf16opt": {"world": 2, "pp": 2, "zero": 1, "dtype": "bf16", "bf16_optimizer": True, "freeze": "1.down"},
}
HIDDEN, INNER, SEQ = 12, 15, 6


class Embed(torch.nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN) / 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight)


class Block(torch.nn.Module):
    def __init__(self, *, buffers: bool) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(HIDDEN), torch.nn.Linear(HIDDEN, INNER)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)
        if buffers:
            self.register_buffer("scale", torch.arange(HIDDEN) / HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Head(torch.nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def as_head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss_of(out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def model_of(spec: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(5)
    vocab = spec.get("vocab", 22)
    if spec.get("pp", 1) > 1:
        ends = (
            [TiedLayerSpec("embed", Embed, vocab), TiedLayerSpec("embed", Embed, vocab, forward_fn=as_head)]
            if spec.get("tied")
            else [LayerSpec(Embed, vocab), LayerSpec(Head, vocab)]
        )
        blocks = [LayerSpec(Block, buffers=spec.get("buffers", False)) for _ in range(2)]
        layers = [ends[0], *blocks, LayerSpec(torch.nn.LayerNorm, HIDDEN), ends[1]]
        return PipelineModule(layers, num_stages=spec["pp"], loss_fn=loss_of, partition_method="uniform")
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = spec.get("heads", 4)
    config = LlamaConfig(
        hidden_size=4 * heads, intermediate_size=INNER - 1, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=spec.get("kv", 2), vocab_size=vocab, max_position_embeddings=16, use_cache=False,
        tie_word_embeddings=spec.get("tied", False))  # fmt: skip
    return LlamaForCausalLM(config).float()


def config_of(spec: dict[str, Any]) -> dict[str, Any]:
    adam = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01, "torch_adam": True}
    out: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": spec["zero"], "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": adam},
    }
    if spec.get("dtype") == "bf16":
        out["bf16"] = {"enabled": True}
    if spec.get("bf16_optimizer"):
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    if spec.get("tp", 1) > 1:
        out["tensor_parallel"] = {"autotp_size": spec["tp"]}
    return out


def held(spec: dict[str, Any], engine: Any, opt: Any) -> dict[str, dict[str, torch.Tensor]]:
    """State -> name -> what this rank has of it, ZeRO's parts gathered."""
    if hasattr(opt, "_hp_optimizer_states_linked"):  # by itself DeepSpeed links the first group's states alone
        opt._hp_optimizer_states_linked = False
        opt._lazy_init_hp_params_optimizer_state()
    out: dict[str, dict[str, torch.Tensor]] = {"weight": {}}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=spec["zero"] == 3):
            out["weight"][name] = p.detach().clone()
        if not p.requires_grad:
            continue
        for state in ("exp_avg", "exp_avg_sq"):
            inner = getattr(opt, "optimizer", opt)
            value = safe_get_full_optimizer_state(p, state) if spec["zero"] else inner.state[p][state]
            out.setdefault(state, {})[name] = value.detach().clone().reshape(out["weight"][name].shape)
        if spec["zero"]:
            master = safe_get_full_fp32_param(p).detach().clone()
            out.setdefault("master", {})[name] = master.reshape(out["weight"][name].shape)
    out["weight"].update((n, b.detach().clone()) for n, b in engine.module.named_buffers() if "inv_freq" not in n)
    return out


def joined(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    cut = [d for d, n in enumerate(shape) if parts[0].shape[d] != n]
    whole = torch.cat(parts, cut[0]) if cut else parts[0]
    assert whole.shape == shape and (cut or all(torch.equal(p, whole) for p in parts))  # noqa: PT018
    return whole


def write_truth(
    folder: Path, everyone: list[Any], shapes: dict[str, torch.Size], spec: dict[str, Any], tied: dict[str, str]
) -> None:
    tp, pp = spec.get("tp", 1), spec.get("pp", 1)
    whole: dict[str, torch.Tensor] = {}
    for stage in [everyone[:tp]] if pp == 1 else [[e] for e in everyone]:
        for state, tensors in stage[0].items():
            for n, t in tensors.items():
                whole.setdefault(f"{state}/{n}", joined([s[state][n] for s in stage], shapes.get(n, t.shape)))
    save_file({key: t.contiguous().clone() for key, t in whole.items()}, folder / "truth.safetensors")
    facts = {"version": deepspeed.__version__, "torch": torch.__version__, "tied": tied, "spec": spec}
    (folder / "truth.json").write_text(json.dumps(facts, indent=1))
    for script in (folder / "ckpt").glob("*.py"):
        script.unlink()


def main() -> None:
    name = sys.argv[1]
    spec = SPECS[name]
    folder = Path(__file__).parent / name
    deepspeed.init_distributed("gloo")
    rank, tp, pp = dist.get_rank(), spec.get("tp", 1), spec.get("pp", 1)
    model = model_of(spec)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if spec.get("tied") and pp == 1 else {}
    for n, p in model.named_parameters():
        p.requires_grad_(not spec.get("freeze") or spec["freeze"] not in n)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    cut = [[p for n, p in named if (p.dim() > 1) == big] for big in (True, False)]
    groups = [{"params": g, "weight_decay": 0.01 * (1 - i)} for i, g in enumerate(cut) if g]
    if spec.get("groups", 1) == 1:
        groups = [{"params": [p for _, p in named]}]
    engine, opt, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config_of(spec))
    replica = engine.grid.get_data_parallel_rank() if pp > 1 else rank // tp
    generator = torch.Generator().manual_seed(replica)

    def batch() -> torch.Tensor:
        return torch.randint(0, spec.get("vocab", 22), (2, SEQ), generator=generator)

    def pairs() -> Any:
        while True:
            tokens = batch()
            yield tokens, tokens

    data = pairs()
    for _ in range(3):
        if pp > 1:
            engine.train_batch(data)
        else:
            tokens = batch()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    engine.save_checkpoint(str(folder / "ckpt"), client_state={"iteration": 3, "rank": rank})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held(spec, engine, opt))
    if rank == 0:
        write_truth(folder, everyone, shapes, spec, tied)
    dist.barrier()
    dist.destroy_process_group()


main()
