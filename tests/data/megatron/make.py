"""Make the checkpoints in this folder: `python make.py [NAME …]` with megatron-core 0.16.1, PyTorch 2.13, on CPU.

Each is a tiny GPT model that takes two optimizer steps along random gradients under one layout. It is saved twice: by
`megatron.core.dist_checkpointing` into `sharded/`, and into `classic/` as Megatron-LM's own files hold it. Beside it
lies every tensor of the live run, whole, under global names.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

HIDDEN, HEADS, GROUPS, WIDTH, VOCAB = 8, 4, 2, 10, 19
SPECS: dict[str, dict[str, Any]] = {
    "tp2-tied": {"world": 2, "tp": 2, "layers": 1, "tied": True},
    "pp2-bf16-tied": {"world": 2, "pp": 2, "tied": True, "bf16": True, "swiglu": True},
    "tp2-pp2-flat": {
        "world": 4,
        "tp": 2,
        "pp": 2,
        "bf16": True,
        "swiglu": True,
        "optimizer": "dp_reshardable",
    },
    "tp2-dp2-full": {
        "world": 4,
        "tp": 2,
        "layers": 1,
        "bf16": True,
        "optimizer": "fully_reshardable",
    },
    "tp2-dp2-flat": {
        "world": 4,
        "tp": 2,
        "layers": 1,
        "bf16": True,
        "swiglu": True,
        "optimizer": "dp_reshardable",
        "frozen": "linear_fc2",
    },
    "ep2-moe": {"world": 2, "ep": 2, "experts": 4, "layers": 1, "swiglu": True},
    "ep2-dp2-flat": {
        "world": 4,
        "ep": 2,
        "experts": 2,
        "swiglu": True,
        "bf16": True,
        "optimizer": "dp_reshardable",
    },
    "vpp2": {
        "world": 2,
        "pp": 2,
        "vpp": 2,
        "layers": 4,
        "swiglu": True,
        "optimizer": "dp_reshardable",
        "buckets": 300,
    },
}


class Nothing:
    """Takes the place of CUDA's streams, events and random-number trackers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Nothing()

    def fork(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {"model-parallel-rng": torch.arange(8, dtype=torch.uint8)}

    def is_initialized(self) -> bool:
        return True


def without_cuda() -> None:
    """Megatron asks for CUDA in many places; here all of them get the CPU."""
    cpu = torch.device("cpu")
    torch._dynamo.config.disable = True  # compiling asks the device for more than there is here
    torch.cuda.current_device = lambda: cpu
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.get_device_properties = lambda *args: argparse.Namespace(
        major=9, minor=0, total_memory=1 << 35
    )
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    for name in ("current_stream", "Stream", "Event"):
        setattr(torch.cuda, name, type(name, (Nothing,), {}))
    for name in ("synchronize", "empty_cache", "set_device", "set_rng_state", "manual_seed"):
        setattr(torch.cuda, name, type(name, (Nothing,), {"__init__": lambda self, *a, **k: None}))
    for name in ("FloatTensor", "IntTensor", "LongTensor", "BFloat16Tensor", "HalfTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda *args: None
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k) if a or k else re.sub(r"^torch\.(cuda\.)?", "torch.cuda.", kind(self))
    )
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        make = getattr(torch, name)

        def on_cpu(*args: Any, make: Any = make, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = cpu
            return make(*args, **kwargs)

        setattr(torch, name, on_cpu)


def norms_of_sequences() -> None:
    """Let PyTorch's norms take the part of a sequence that each tensor-parallel rank has, as Apex's do."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = make(cls, whole, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = made


def arguments(spec: dict[str, Any]) -> argparse.Namespace:
    tp = spec.get("tp", 1)
    return argparse.Namespace(
        num_layers=spec.get("layers", 2),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        ffn_hidden_size=WIDTH,
        kv_channels=HIDDEN // HEADS,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=spec.get("pp", 1),
        virtual_pipeline_model_parallel_size=spec.get("vpp"),
        expert_model_parallel_size=spec.get("ep", 1),
        expert_tensor_parallel_size=spec.get("etp", 1),
        num_experts=spec.get("experts"),
        vocab_size=VOCAB,
        padded_vocab_size=-(-VOCAB // (8 * tp)) * 8 * tp,
        swiglu=spec.get("swiglu", False),
        untie_embeddings_and_output_weights=not spec.get("tied"),
        use_distributed_optimizer=bool(spec.get("optimizer")),
        max_position_embeddings=24,
        normalization="RMSNorm" if spec.get("swiglu") else "LayerNorm",
        params_dtype=torch.bfloat16 if spec.get("bf16") else torch.float32,
        transformer_impl="local",
        lr=1e-2,
    )


def data_parallel(spec: dict[str, Any], config: Any, model: Any) -> Any:
    """The model as Megatron's own data parallelism wraps it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=bool(spec.get("optimizer")),
        bucket_size=spec.get("buckets"),
        overlap_grad_reduce=bool(spec.get("buckets")),
    )
    chunk = DistributedDataParallel(config, ddp, model, disable_bucketing=False)
    chunk.broadcast_params()
    return chunk


def built(spec: dict[str, Any], wrap: Any = data_parallel) -> Run:
    """The model and the optimizer under one layout."""
    without_cuda()
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron") and hasattr(
            module, "get_cuda_rng_tracker"
        ):
            module.get_cuda_rng_tracker = lambda *args, **kwargs: Nothing()
    norms_of_sequences()
    args = arguments(spec)
    dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        context_parallel_size=spec.get("cp", 1),
        num_distributed_optimizer_instances=spec.get("outer", 1),
    )
    torch.manual_seed(7 + 100 * ps.get_pipeline_model_parallel_rank())
    moe = (
        {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": 2,
            "moe_grouped_gemm": spec.get("grouped", False),
        }
        if args.num_experts
        else {}
    )
    if spec.get("router_bias"):
        moe |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=WIDTH,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        sequence_parallel=bool(args.num_experts and args.tensor_model_parallel_size > 1),
        use_cpu_initialization=True,
        pipeline_dtype=args.params_dtype,
        bf16=spec.get("bf16", False),
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if spec.get("silu") else torch.nn.functional.gelu,
        add_bias_linear=not args.swiglu,
        normalization=args.normalization,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **moe,
    )
    if spec.get("grouped"):  # a kernel for CUDA, which saves and loads do not need
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.grouped_gemm = True
    layers = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=spec.get("grouped", False),
        normalization="RMSNorm" if args.swiglu else None,
    )
    chunks = []
    for stage in range(args.virtual_pipeline_model_parallel_size or 1):
        vp = stage if args.virtual_pipeline_model_parallel_size else None
        model = GPTModel(
            config,
            layers,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
            share_embeddings_and_output_weights=bool(spec.get("tied")),
            position_embedding_type="rope" if args.swiglu else "learned_absolute",
            vp_stage=vp,
        )
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("frozen" not in spec or spec["frozen"] not in parameter_name)
        wrapped = Float16Module(config, model) if spec.get("bf16") else model
        for parameter_name, parameter in model.named_parameters():
            if "fp32" in spec and spec["fp32"] in parameter_name:
                parameter.data = parameter.data.float()
        chunks.append(wrap(spec, config, wrapped))
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.01,
        bf16=spec.get("bf16", False),
        params_dtype=args.params_dtype,
        use_distributed_optimizer=bool(spec.get("optimizer")),
        clip_grad=0.0,
    )
    if "muon" in spec:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer

        layer_wise = spec["muon"] == "layer-wise"
        muon = get_megatron_muon_optimizer(
            config, chunks, layer_wise_distributed_optimizer=layer_wise
        )
        return Run(args, chunks, muon)
    return Run(args, chunks, get_megatron_optimizer(config, chunks))


def main(name: str) -> None:
    import megatron.core as mc

    spec, folder = SPECS[name], Path(__file__).parent / name
    run = built(spec)
    for step in range(2):
        run.step(step)
    shutil.rmtree(folder, ignore_errors=True) if dist.get_rank() == 0 else None
    dist.barrier()
    run.save_sharded(folder / "sharded" / "iter_0000002", spec)
    run.save_classic(folder / "classic" / "iter_0000002", spec)
    run.save_truth(folder, mc.__version__)
    dist.barrier()
    dist.destroy_process_group()


class Run:
    """The model chunks of one rank, and how they are saved."""

    def __init__(self, args: argparse.Namespace, chunks: list[Any], optimizer: Any) -> None:
        from megatron.core import parallel_state as ps

        self.args, self.chunks, self.optimizer = args, chunks, optimizer
        self.optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self.tp, self.pp = (
            ps.get_tensor_model_parallel_rank(),
            ps.get_pipeline_model_parallel_rank(),
        )
        self.ep, self.dp = ps.get_expert_model_parallel_rank(), ps.get_data_parallel_rank()
        self.expert_dp = ps.get_expert_data_parallel_rank()
        self.models = [c.module.module if hasattr(c.module, "module") else c.module for c in chunks]

    def parameters(self) -> Any:
        """Global name and parameter."""
        held = (self.args.num_experts or 0) // self.args.expert_model_parallel_size
        for model in self.models:
            numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
            for local, p in model.named_parameters():
                name = re.sub(
                    r"(layers\.)(\d+)", lambda m, n=numbers: m[1] + str(n[int(m[2])]), local
                )
                yield (
                    re.sub(
                        r"(local_experts\.)(\d+)",
                        lambda m: m[1] + str(int(m[2]) + self.ep * held),
                        name,
                    ),
                    p,
                )

    def step(self, number: int) -> None:
        """Gradients that depend on the name alone (and where a parameter is cut, on the rank)."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for name, p in self.parameters():
            if p.requires_grad:
                tied = (
                    name
                    if name != "output_layer.weight" or not self.tied
                    else "embedding.word_embeddings.weight"
                )
                rank = self.tp if getattr(p, "tensor_model_parallel", False) else 0
                g = torch.Generator().manual_seed(zlib.crc32(f"{tied} {rank} {number}".encode()))
                p.main_grad.copy_(torch.randn(p.shape, generator=g))
        for chunk in self.chunks:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                group.start_grad_sync()
                group.finish_grad_sync()
        self.optimizer.step()

    @property
    def tied(self) -> bool:
        return not self.args.untie_embeddings_and_output_weights

    def common(self) -> dict[str, Any]:
        scheduler = {"max_lr": self.args.lr, "num_steps": 2, "lr_decay_style": "cosine"}
        return {
            "args": self.args,
            "checkpoint_version": 3.0,
            "iteration": 2,
            "opt_param_scheduler": scheduler,
        }

    def rng(self) -> list[dict[str, Any]]:
        return [
            {
                "torch_rng_state": torch.get_rng_state()[:16],
                "random_rng_state": (3, (self.tp, self.pp), None),
            }
        ]

    def save_sharded(self, folder: Path, spec: dict[str, Any]) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        metadata = {"distrib_optim_sharding_type": spec["optimizer"]} if "optimizer" in spec else {}
        metadata["chained_optim_avoid_prefix"] = True
        model = [c.module.sharded_state_dict(metadata=dict(metadata)) for c in self.chunks]
        model = (
            {"model": model[0]}
            if len(model) == 1
            else {f"model{i}": m for i, m in enumerate(model)}
        )
        shape = (self.args.pipeline_model_parallel_size, self.args.tensor_model_parallel_size)
        rng = ShardedObject("rng_state", self.rng(), shape, (self.pp, self.tp), replica_id=self.dp)
        state = {**self.common(), **model, "rng_state": rng}
        state["optimizer"] = self.optimizer.sharded_state_dict(model, metadata=dict(metadata))
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
        if dist.get_rank() == 0:
            (folder.parent / "latest_checkpointed_iteration.txt").write_text("2")

    def save_classic(self, folder: Path, spec: dict[str, Any]) -> None:
        name = f"mp_rank_{self.tp:02d}" + (
            f"_{self.pp:03d}" if self.args.pipeline_model_parallel_size > 1 else ""
        )
        name += f"_{self.ep:03d}" if self.args.expert_model_parallel_size > 1 else ""
        (folder / name).mkdir(parents=True, exist_ok=True)
        if "optimizer" in spec:
            self.optimizer.save_parameter_state(str(folder / name / "distrib_optim.pt"))
        if self.dp == 0 or self.expert_dp == 0:
            model = [c.module.state_dict_for_save_checkpoint() for c in self.chunks]
            model = (
                {"model": model[0]}
                if len(model) == 1
                else {f"model{i}": m for i, m in enumerate(model)}
            )
            state = {
                **self.common(),
                **model,
                "rng_state": self.rng(),
                "optimizer": self.optimizer.state_dict(),
            }
            torch.save(state, folder / name / "model_optim_rng.pt")
        if dist.get_rank() == 0:
            (folder.parent / "latest_checkpointed_iteration.txt").write_text("2")

    def states(self, p: torch.nn.Parameter) -> Any:
        """(state, where it begins in the flattened parameter, tensor) of all that this rank has of one."""
        yield "weight", 0, p
        for o in self.optimizers:
            if hasattr(o, "model_param_gbuf_map"):
                if p in o.model_param_gbuf_map and p in o.model_param_group_index_map:
                    start = o._get_model_param_range_map(p)["param"].start
                    for state, t in o._get_main_param_and_optimizer_states(p).items():
                        yield "master" if state == "param" else state, start, t
                continue
            main = getattr(p, "main_param", None)
            for state, t in o.optimizer.state.get(p if main is None else main, {}).items():
                yield state, 0, t
            if main is not None and o is self.optimizers[0]:
                yield "master", 0, main

    def save_truth(self, folder: Path, version: str) -> None:
        mine = []
        for name, p in self.parameters():
            cut = (
                p.partition_dim
                if self.args.tensor_model_parallel_size > 1
                and getattr(p, "tensor_model_parallel", False)
                else None
            )
            gated = self.args.swiglu and name.endswith("linear_fc1.weight")
            for state, start, t in self.states(p):
                if torch.is_tensor(t):
                    data = t.detach().flatten().clone()
                    mine.append(
                        (name, state, p.shape, cut, gated, self.tp, start, data, t.shape == ())
                    )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        if dist.get_rank() == 0:
            write_truth(self.args, [piece for one in everyone for piece in one], folder, version)


def write_truth(args: argparse.Namespace, pieces: list[Any], folder: Path, version: str) -> None:
    from safetensors.torch import save_file

    locals_: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    how = {}
    for name, state, shape, cut, gated, tp, start, data, scalar in pieces:
        key = (state, name)
        size = 1 if scalar else shape.numel()
        into = locals_.setdefault(key, {}).setdefault(
            tp, torch.full((size,), float("nan"), dtype=data.dtype)
        )
        into[start : start + len(data)] = data
        how[key] = (() if scalar else shape, None if scalar else cut, gated)
    out = {}
    for (state, name), by_rank in locals_.items():
        shape, cut, gated = how[state, name]
        parts = [by_rank[t].view(shape) for t in sorted(by_rank)]
        if cut is None:
            whole = parts[0]
        elif gated:
            halves = [p.chunk(2) for p in parts]
            whole = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        else:
            whole = torch.cat(parts, cut)
        if not args.untie_embeddings_and_output_weights and name == "output_layer.weight":
            continue
        if name in ("embedding.word_embeddings.weight", "output_layer.weight") and whole.dim():
            out[f"{state}.padding/{name}"] = whole[args.vocab_size :].clone()
            whole = whole[: args.vocab_size].clone()
        out[f"{state}/{name}"] = whole.contiguous().clone()
    save_file(out, folder / "truth.safetensors")
    facts = {"step": 2, "megatron-core": version, "torch": torch.__version__}
    (folder / "truth.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    else:
        for one in sys.argv[1:] or SPECS:
            command = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(SPECS[one]["world"]),
            ]
            env = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            }
            subprocess.run([sys.executable, "-m", *command, __file__, one], check=True, env=env)
