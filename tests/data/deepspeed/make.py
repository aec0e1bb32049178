"""Make the checkpoints of this folder: tiny models, trained for three steps by DeepSpeed on CPU, with the truth beside.

    torchrun --nproc-per-node WORLD make.py NAME      # in an environment with deepspeed, transformers and safetensors

NAME is one of `SPECS`, which also gives WORLD. Written are NAME/ckpt, as `save_checkpoint` leaves it but for the
conversion scripts that it copies there, NAME/truth.safetensors (`<state>/<name>` -> the whole tensor) and
NAME/truth.json. Of those called `universal` NAME/ckpt is what DeepSpeed's own converter made of that.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.ds_to_universal import main as to_universal
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_optimizer_swapper
from deepspeed.utils import groups as parallel
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

#: Name -> processes, tensor-parallel ranks, pipeline stages, ZeRO stage, dtype, and what else is special.
SPECS: dict[str, dict[str, Any]] = {
    "tp2-dp2-z1": {"world": 4, "tp": 2, "zero": 1, "vocab": 31, "heads": 3, "kv": 3, "groups": 2},
    "tp2-z2-tied": {"world": 2, "tp": 2, "zero": 2, "dtype": "bf16", "tied": True},
    "tp2-dp2-z3": {"world": 4, "tp": 2, "zero": 3, "dtype": "bf16", "vocab": 31, "groups": 2},
    "tp2-z0": {"world": 2, "tp": 2, "zero": 0, "vocab": 31},
    "pp2-dp2-z1": {
        "world": 4,
        "pp": 2,
        "zero": 1,
        "dtype": "bf16",
        "tied": True,
        "groups": 2,
        "buffers": True,
    },
    "pp2-z0": {"world": 2, "pp": 2, "zero": 0, "tied": True},
    "pp2-dp2-z0-bf16": {
        "world": 4,
        "pp": 2,
        "zero": 0,
        "dtype": "bf16",
        "tied": True,
        "groups": 2,
        "freeze": "1.down",
        "buffers": True,
    },
    "pp2-z1-bf16opt": {
        "world": 2,
        "pp": 2,
        "zero": 1,
        "dtype": "bf16",
        "bf16_optimizer": True,
        "freeze": "1.down",
    },
    "ep2-dp4-z1": {"world": 4, "ep": 2, "zero": 1, "dtype": "bf16", "groups": 2},
    "ep2-dp4-z2": {
        "world": 4,
        "ep": 2,
        "zero": 2,
        "dtype": "bf16",
        "data_first": True,
        "layers": 2,
    },
    "ep2-z0": {"world": 2, "ep": 2, "zero": 0, "freeze": "deepspeed_experts.0.down"},
    "ep2-dp4-z0-bf16": {"world": 4, "ep": 2, "zero": 0, "dtype": "bf16", "data_first": True},
    "ep1-dp2-z1": {"world": 2, "ep": 1, "zero": 1, "groups": 2},
    "pp2-ep2-dp2-z1": {
        "world": 4,
        "pp": 2,
        "ep": 2,
        "zero": 1,
        "dtype": "bf16",
        "tied": True,
        "groups": 2,
        "buffers": True,
    },
    "pp2-ep2-z0": {"world": 4, "pp": 2, "ep": 2, "zero": 0},
    "tp2-ep2-dp2-z1": {"world": 4, "tp": 2, "ep": 2, "zero": 1, "dtype": "bf16", "groups": 2},
    "tp2-ep2-z0": {"world": 4, "tp": 2, "ep": 2, "zero": 0},
    "tp2-ep2-across-z1": {"world": 4, "tp": 2, "ep": 2, "zero": 1, "across": True, "layers": 2},
    "tp2-ep4-across-z0": {"world": 4, "tp": 2, "ep": 4, "zero": 0, "across": True},
    "autoep2-dp4-z1": {"world": 4, "ep": 2, "auto": True, "zero": 1, "dtype": "bf16", "groups": 2},
    "autoep2-z0-bf16": {"world": 2, "ep": 2, "auto": True, "zero": 0, "dtype": "bf16"},
    "autoep2-dp4-z3": {"world": 4, "ep": 2, "auto": True, "zero": 3, "data_first": True},
    "z3-nvme": {
        "world": 2,
        "zero": 3,
        "dtype": "bf16",
        "groups": 2,
        "freeze": "blocks.0.down",
        "nvme": True,
    },
    "universal-z1": {
        "world": 2,
        "zero": 1,
        "vocab": 31,
        "tied": True,
        "groups": 2,
        "universal": True,
    },
    "universal-z2": {
        "world": 2,
        "zero": 2,
        "dtype": "bf16",
        "freeze": "mlp.down",
        "universal": True,
    },
    "universal-z3": {
        "world": 2,
        "zero": 3,
        "dtype": "bf16",
        "freeze": "q_proj",
        "groups": 2,
        "universal": True,
    },
    "universal-tp2": {
        "world": 2,
        "tp": 2,
        "zero": 1,
        "dtype": "bf16",
        "vocab": 31,
        "universal": True,
    },
    "universal-autoep2": {"world": 2, "ep": 2, "auto": True, "zero": 2, "universal": True},
    "universal-pp2": {"world": 2, "pp": 2, "zero": 1, "dtype": "bf16", "universal": True},
}
HIDDEN, INNER, SEQ = 12, 15, 6
NVME = Path(tempfile.gettempdir()) / "ucformat-nvme"


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


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(HIDDEN, INNER),
            torch.nn.Linear(INNER, HIDDEN, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def moe_of(ep: int, *, residual: bool = False, cut: bool = False) -> MoE:
    """A layer of four experts; `cut`: each rank of tensor parallelism has a part of each."""
    return MoE(HIDDEN, Expert(), num_experts=4, ep_size=ep, k=1, capacity_factor=4.0, min_capacity=8, use_rts=False,
               drop_tokens=cut, use_residual=residual, enable_expert_tensor_parallelism=cut)  # fmt: skip


class Routed(torch.nn.Module):
    """A layer of a pipeline whose tokens each pass one of its experts."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.norm, self.moe = torch.nn.LayerNorm(HIDDEN), moe_of(ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))[0]


class Experts(torch.nn.Module):
    """A model with layers of four experts, and of one more that all tokens pass in the last."""

    def __init__(self, vocab: int, ep: int, layers: int, *, cut: bool = False) -> None:
        super().__init__()
        self.embed, self.block = Embed(vocab), Block(buffers=True)
        self.moe = torch.nn.ModuleList(
            moe_of(ep, residual=i == layers - 1, cut=cut) for i in range(layers)
        )
        self.head = Head(vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x, balance = self.block(self.embed(input_ids)), 0.0
        for layer in self.moe:
            y, aux, _ = layer(x)
            x, balance = x + y, balance + aux
        return Namespace(loss=loss_of(self.head(x), labels) + 0.01 * balance)


class Stack(torch.nn.Module):
    """Four experts in one tensor for each of their matrices, as Transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 2 * INNER, HIDDEN) / 4)
        self.down_proj = torch.nn.Parameter(torch.randn(4, HIDDEN, INNER) / 4)
        self.act_fn = torch.nn.SiLU()


class Mixture(torch.nn.Module):
    """What AutoEP replaces by a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(HIDDEN, 4, bias=False), Stack()


class Mixtures(torch.nn.Module):
    """A model for AutoEP."""

    def __init__(self, vocab: int, layers: int) -> None:
        super().__init__()
        self.config = Namespace(num_local_experts=4, num_experts_per_tok=2, hidden_act="silu")
        self.embed, self.block = Embed(vocab), Block(buffers=True)
        self.moe = torch.nn.ModuleList(Mixture() for _ in range(layers))
        self.head = Head(vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.block(self.embed(input_ids))
        for layer in self.moe:
            x = x + layer(x)
        return Namespace(loss=loss_of(self.head(x), labels))


class Head(torch.nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(vocab, HIDDEN) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Plain(torch.nn.Module):
    """A model of layers of our own, without Transformers."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = Embed(vocab)
        self.blocks = torch.nn.ModuleList(Block(buffers=True) for _ in range(2))
        self.head = Head(vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return Namespace(loss=loss_of(self.head(x), labels))


def as_head(embed: Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def loss_of(out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        out[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def model_of(spec: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(5)
    vocab = spec.get("vocab", 22)
    if spec.get("pp", 1) > 1:
        ends = (
            [
                TiedLayerSpec("embed", Embed, vocab),
                TiedLayerSpec("embed", Embed, vocab, forward_fn=as_head),
            ]
            if spec.get("tied")
            else [LayerSpec(Embed, vocab), LayerSpec(Head, vocab)]
        )
        blocks = [LayerSpec(Block, buffers=spec.get("buffers", False)) for _ in range(2)]
        if "ep" in spec:
            blocks = [LayerSpec(Routed, spec["ep"]), blocks[0], LayerSpec(Routed, spec["ep"])]
        layers = [ends[0], *blocks, LayerSpec(torch.nn.LayerNorm, HIDDEN), ends[1]]
        return PipelineModule(
            layers, num_stages=spec["pp"], loss_fn=loss_of, partition_method="uniform"
        )
    if "auto" in spec:
        return Mixtures(vocab, spec.get("layers", 2))
    if "ep" in spec:
        cut = spec.get("tp", 1) > 1 and not spec.get("across")
        return Experts(vocab, spec["ep"], spec.get("layers", 1), cut=cut)
    if spec.get("nvme"):
        return Plain(vocab)
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
    if spec.get("nvme"):
        away = {"device": "nvme", "nvme_path": str(NVME), "buffer_count": 6}
        out["zero_optimization"] |= {"offload_optimizer": away, "sub_group_size": 200}
        out["aio"] = {"block_size": 64}
    if "auto" in spec:
        out["expert_parallel"] = auto_of(spec["ep"])
    if spec.get("data_first"):
        out["use_data_before_expert_parallelism"] = True
    if spec.get("tp", 1) > 1:
        out["tensor_parallel"] = {"autotp_size": spec["tp"]}
    if spec.get("tp", 1) > 1 and "ep" in spec:
        specs = cuts_of(cut=not spec.get("across"))
        custom = {"use_default_specs": False, "layer_specs": specs}
        out["tensor_parallel"]["partition_config"] = custom
    return out


def cuts_of(*, cut: bool) -> list[dict[str, Any]]:
    """How AutoTP cuts `Experts`; `cut`: each expert, too."""
    where = r"(block|deepspeed_experts\.\d+)" if cut else "block"
    return [
        {"patterns": [rf".*{where}\.{name}\.weight$"], "partition_type": kind}
        for name, kind in (("up", "column"), ("down", "row"))
    ]


def auto_of(ep: int) -> dict[str, Any]:
    """AutoEP for `Mixtures`."""
    names = {"expert_w1": "gate_up_proj", "expert_w2": "down_proj", "expert_w3": None}
    patterns = {
        "moe_layer_pattern": r"moe\.\d+",
        "router_pattern": "gate",
        "expert_pattern": "experts",
    }
    counts = {"num_experts_attr": "num_local_experts", "top_k_attr": "num_experts_per_tok"}
    auto = {"enabled": True, "autoep_size": ep, "use_grouped_mm": False}
    return {**auto, **patterns, **names, **counts}


def held(spec: dict[str, Any], engine: Any, opt: Any) -> dict[str, dict[str, torch.Tensor]]:
    """State -> name -> what this rank has of it, ZeRO's parts gathered."""
    if hasattr(
        opt, "_hp_optimizer_states_linked"
    ):  # by itself DeepSpeed links the first group's states alone
        opt._hp_optimizer_states_linked = False
        opt._lazy_init_hp_params_optimizer_state()
    out: dict[str, dict[str, torch.Tensor]] = {"weight": {}}
    masters = (
        dict(zip(*numbered_masters(opt), strict=True))
        if spec.get("ep") and not spec["zero"]
        else {}
    )
    flat = bool(spec["zero"]) or hasattr(opt, "bf16_groups")
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=spec["zero"] == 3):
            out["weight"][name] = p.detach().clone()
        if not p.requires_grad:
            continue
        for state in ("exp_avg", "exp_avg_sq"):
            inner = getattr(opt, "optimizer", opt)
            key = masters.get(p, p)
            value = safe_get_full_optimizer_state(p, state) if flat else inner.state[key][state]
            out.setdefault(state, {})[name] = (
                value.detach().clone().reshape(out["weight"][name].shape)
            )
        if p in masters:
            out.setdefault("master", {})[name] = masters[p].detach().clone()
        if flat:
            master = safe_get_full_fp32_param(p).detach().clone()
            out.setdefault("master", {})[name] = master.reshape(out["weight"][name].shape)
    kept = engine.module.state_dict().keys()
    out["weight"].update(
        (n, b.detach().clone()) for n, b in engine.module.named_buffers() if n in kept
    )
    return out


def numbered_masters(opt: Any) -> tuple[list[Any], list[Any]]:
    """The weights and, in bf16 under ZeRO 0, their fp32 copies."""
    copies = getattr(opt, "fp32_groups", [])
    weights = getattr(opt, "fp16_groups", []) if copies else []
    return [p for group in weights for p in group], [p for group in copies for p in group]


def globally(spec: dict[str, Any], states: dict[str, dict[str, torch.Tensor]]) -> Any:
    """The same, with experts called by their number among all."""
    ep = spec["ep"]
    rank = parallel._get_expert_parallel_rank(f"ep_size_{ep}")

    def called(name: str) -> str:
        if "auto" in spec:  # whose experts are stacked; see `write_truth`
            return f"{name}@{rank}" if re.search(r"\.experts\.w[123]$", name) else name
        number = r"(deepspeed_experts\.)(\d+)"
        return re.sub(number, lambda m: f"{m[1]}{int(m[2]) + rank * 4 // ep}", name)

    return {state: {called(n): t for n, t in tensors.items()} for state, tensors in states.items()}


def joined(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    cut = [d for d, n in enumerate(shape) if parts[0].shape[d] != n]
    whole = torch.cat(parts, cut[0]) if cut else parts[0]
    assert whole.shape == shape and (cut or all(torch.equal(p, whole) for p in parts))  # noqa: PT018
    return whole


def write_truth(
    folder: Path,
    everyone: list[Any],
    shapes: dict[str, torch.Size],
    spec: dict[str, Any],
    tied: dict[str, str],
) -> None:
    tp = spec.get("tp", 1)
    whole: dict[str, torch.Tensor] = {}
    for stage in [everyone[i : i + tp] for i in range(0, len(everyone), tp)]:
        for state, n in {(s, n) for rank in stage for s, tensors in rank.items() for n in tensors}:
            parts = [rank[state][n] for rank in stage if n in rank[state]]
            any_expert = re.sub(r"(deepspeed_experts\.)\d+", r"\g<1>0", n)
            value = joined(parts, shapes.get(any_expert, parts[0].shape))
            assert torch.equal(whole.setdefault(f"{state}/{n}", value), value), (
                f"{state}/{n} differs"
            )
    for key in sorted(key for key in whole if "@" in key):  # ranks' stacks of experts
        name = key.partition("@")[0]
        part = whole.pop(key)
        whole[name] = torch.cat([whole[name], part]) if name in whole else part
    save_file(
        {key: t.contiguous().clone() for key, t in whole.items()}, folder / "truth.safetensors"
    )
    facts = {
        "version": deepspeed.__version__,
        "torch": torch.__version__,
        "tied": tied,
        "spec": spec,
    }
    (folder / "truth.json").write_text(json.dumps(facts, indent=1))
    for script in (folder / "ckpt").glob("*.py"):
        script.unlink()


def engine_of(spec: dict[str, Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """The engine and its optimizer."""
    for n, p in model.named_parameters():
        p.requires_grad_(not spec.get("freeze") or spec["freeze"] not in n)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    cut = [[p for n, p in named if (p.dim() > 1) == big] for big in (True, False)]
    groups = [
        {"params": g, "weight_decay": 0.01 * (1 - i), "name": f"g{i}"}
        for i, g in enumerate(cut)
        if g
    ]
    if spec.get("groups", 1) == 1:
        groups = [{"params": [p for _, p in named], "name": "all"}]
    for group in groups if "ep" not in spec else []:
        del group["name"]  # which only the splitting of experts' groups needs
    engine, opt, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config_of(spec)
    )
    return engine, opt


class PlainIO:
    """DeepSpeed's asynchronous I/O by ordinary reads and writes; its own is an extension that needs libaio."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done, self.pinned = 0, list[torch.Tensor]()

    def new_cpu_locked_tensor(self, count: int, like: torch.Tensor) -> torch.Tensor:
        self.pinned.append(torch.zeros(count, dtype=like.dtype))
        return self.pinned[-1]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == each.untyped_storage().data_ptr() for each in self.pinned)

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        assert not offset
        Path(path).write_bytes(tensor.numpy().tobytes())
        self.done += 1
        return 0

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> int:
        assert not offset
        data = bytearray(Path(path).read_bytes()[: tensor.nbytes])
        tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype))
        self.done += 1
        return 0

    def wait(self) -> int:
        done, self.done = self.done, 0
        return done


def swap_small() -> None:
    """Let the optimizer be swapped out by `PlainIO`, also tensors of less than a mebibyte, which DeepSpeed keeps."""
    op = Namespace(load=lambda: Namespace(aio_handle=PlainIO))
    partitioned_optimizer_swapper.AsyncIOBuilder = lambda: op
    optimizer_utils.MIN_AIO_BYTES = optimizer_utils.AIO_ALIGNED_BYTES = 64


def gather_flat() -> None:
    """Let MoE layers gather over tensor-parallel ranks by gloo, for which both tensors must be flat or neither."""
    gather = deepspeed.comm.all_gather_into_tensor

    def flat(out: torch.Tensor, part: torch.Tensor, *more: Any, **options: Any) -> Any:
        return gather(out, part.flatten() if out.dim() == 1 else part, *more, **options)

    deepspeed.comm.all_gather_into_tensor = flat


def main() -> None:
    gather_flat()
    swap_small()
    name = sys.argv[1]
    spec = SPECS[name]
    folder = Path(__file__).parent / name
    deepspeed.init_distributed("gloo")
    rank, tp, pp = dist.get_rank(), spec.get("tp", 1), spec.get("pp", 1)
    model = model_of(spec)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if spec.get("tied") and pp == 1 else {}
    engine, opt = engine_of(spec, model)
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
    mine = held(spec, engine, opt)
    dist.all_gather_object(everyone, globally(spec, mine) if "ep" in spec else mine)
    if rank == 0:
        write_truth(folder, everyone, shapes, spec, tied)
        if spec.get("universal"):
            native = (folder / "ckpt").rename(folder / "native")
            to_universal(Namespace(
                input_folder=str(native / "global_step3"), output_folder=str(folder / "ckpt" / "global_step3"),
                num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                inject_missing_state=tp == 1))  # fmt: skip
            shutil.rmtree(native)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
