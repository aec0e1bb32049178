"""Train a tiny model with DeepSpeed under several configurations; save each, with the truth beside it.

Run by torchrun in the virtual environment that has DeepSpeed: `make_deepspeed.py SPECS OUT`. SPECS
is a JSON list of specs (`Spec` below); OUT/<name>/ckpt is what `save_checkpoint` wrote,
OUT/<name>/truth.safetensors holds `<state>/<name>` for each whole tensor of the live engine, and
OUT/<name>/truth.json the rest.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime import engine as ds_engine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[3]))  # for `tests`

from tests.torch.leaving import leave

SCALARS = ("step",)
STATES = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer"),
    "adafactor": ("row_var", "col_var", "variance"),
    "counted": ("speed",),
}


@dataclass
class Spec:
    """One configuration. `freeze` is a part of parameter names; `zero_options` go into `zero_optimization`.

    With `load`, the engine does not train `steps` steps, but loads the checkpoint in that folder,
    with the arguments `load_options`, or as DeepSpeed's universal format, and saves none; `refused`
    says that it must load nothing, and `bare` that it has no optimizer states then. `after` steps
    follow, whose losses are recorded. With `fsdp`, PyTorch trains, and OUT/<name>/ckpt is DCP's.
    """

    name: str
    zero: int = 1
    dtype: str = "fp32"
    optimizer: str = "adamw"
    groups: int = 2
    tied: bool = False
    freeze: str = ""
    bf16_optimizer: bool = False
    fused: bool = False
    zero_options: dict | None = None
    client: str = ""
    named_groups: bool = False
    steps: int = 3
    scalars: bool = True
    empty: bool = True
    load: str = ""
    load_options: dict | None = None
    universal: bool = False
    refused: bool = False
    bare: bool = False
    after: int = 0
    fsdp: bool = False


class Counted(torch.optim.Optimizer):
    """Momentum whose `step` is a plain number, as that of DeepSpeed's CPU Adam is."""

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("speed", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.data.add_(state["speed"], alpha=-group["lr"])


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int, gain: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.mix = torch.nn.Parameter(torch.randn(3, 2, width) / 3)
        self.gain = torch.nn.Parameter(torch.full(gain, 0.7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.gain + x * self.mix.sum((0, 1))
        if self.training:
            self.seen += x.shape[0]
            self.mean.mul_(0.9).add_(y.detach().mean((0, 1)).to(self.mean.dtype), alpha=0.1)
        return x + y


class Net(torch.nn.Module):
    def __init__(self, spec: Spec, vocab: int = 23, width: int = 10, inner: int = 17) -> None:
        super().__init__()
        gain = () if spec.scalars and spec.zero < 3 else (1,)  # ZeRO-3 fails on 0-d parameters
        self.embed = torch.nn.Embedding(vocab, width)
        self.blocks = torch.nn.ModuleList(Block(width, inner, gain) for _ in range(2))
        self.idle = torch.nn.Module()  # never called: ZeRO-3 fails to fetch an empty parameter
        if spec.empty:
            self.idle.nothing = torch.nn.Parameter(torch.empty(0, 4))
        self.register_buffer("mask", torch.arange(7) % 2 == 0)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.head = torch.nn.Linear(width, vocab, bias=False)
        if spec.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].float()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
        )


def split(spec: Spec, model: torch.nn.Module) -> list[dict]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    cut = [[(n, p) for n, p in named if p.dim() >= 2], [(n, p) for n, p in named if p.dim() < 2]]
    groups = [named] if spec.groups == 1 else cut
    return [{"params": group, "weight_decay": 0.01 / (i + 1)} for i, group in enumerate(groups)]


def optimizer(spec: Spec, groups: list[dict]) -> torch.optim.Optimizer:
    if not spec.named_groups:
        groups = [{**g, "params": [p for _, p in g["params"]]} for g in groups]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    if spec.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=1e-3, momentum=0.8)
    if spec.optimizer == "counted":
        return Counted(groups, {"lr": 1e-3})
    if spec.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=1e-3)
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def config(spec: Spec) -> dict:
    zero = {
        "stage": spec.zero,
        "stage3_param_persistence_threshold": 0,
        **(spec.zero_options or {}),
    }
    out = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0
        if spec.zero
        else 0.0,  # clipping fails on 0-d parameters without ZeRO
        "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    }
    if spec.dtype == "bf16":
        out["bf16"] = {"enabled": True}
    if spec.dtype == "fp16":
        out["fp16"] = {"enabled": True, "initial_scale_power": 6}
    if spec.bf16_optimizer:
        out["data_types"] = {"grad_accum_dtype": "fp32"}
    if spec.universal:
        out["checkpoint"] = {"load_universal": True}
    return out


def link_states(opt: Any) -> None:
    """Link every group's states to its parameters; DeepSpeed 0.19.8 by itself links those of the first."""
    if hasattr(opt, "_hp_optimizer_states_linked"):
        opt._hp_optimizer_states_linked = False
        opt._lazy_init_hp_params_optimizer_state()


def truth_zero0(spec: Spec, opt: Any, model: torch.nn.Module) -> dict:
    """Masters and states of a ZeRO-0 engine: plain, one fp32 tensor for each parameter, or one flat for each group."""
    out: dict = {}
    inner = getattr(opt, "optimizer", opt)
    names = {id(p): n for n, p in model.named_parameters()}
    for index, group in enumerate(inner.param_groups):
        low = opt.fp16_groups[index] if hasattr(opt, "fp16_groups") else group["params"]
        flat = hasattr(opt, "fp32_groups_flat")
        start = 0
        for i, p in enumerate(low):
            name = names[id(p)]
            high = group["params"][0 if flat else i]
            piece = slice(start, start + p.numel())
            start += p.numel()
            if hasattr(opt, "fp16_groups"):
                out.setdefault("master", {})[name] = (
                    high.detach()[piece].view(p.shape) if flat else high.detach()
                )
            for state, value in inner.state.get(high, {}).items():
                if torch.is_tensor(value):
                    cut = value[piece].view(p.shape) if flat and value.dim() else value
                    out.setdefault(state, {})[name] = cut
    return out


def gathered(piece: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, one after another."""
    parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, piece.detach().contiguous())
    return torch.cat(parts)


def truth_round_robin(spec: Spec, opt: Any) -> dict:
    """Masters and states under `round_robin_gradients`, for which DeepSpeed's own getters mix the parameters up."""
    out: dict = {}
    for index, group in enumerate(opt.round_robin_bit16_groups):
        piece = opt.single_partition_of_fp32_groups[index]
        held = {
            "master": piece,
            **{k: v for k, v in opt.optimizer.state[piece].items() if torch.is_tensor(v)},
        }
        flat = {k: gathered(v) if v.dim() else v for k, v in held.items()}
        for p, start in zip(group, opt.round_robin_bit16_offsets[index], strict=True):
            for state, value in flat.items():
                cut = value[start : start + p.numel()].view(p.shape) if value.dim() else value
                out.setdefault(state, {})[opt.param_names[p]] = cut
    return out


def truth(spec: Spec, engine: Any, opt: Any) -> dict:
    model = engine.module
    out: dict = {"weight": {}}
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=spec.zero == 3):
            out["weight"][name] = p.detach().clone()
    out["weight"].update(
        {n: b for n, b in model.state_dict().items() if n in dict(model.named_buffers())}
    )
    if spec.bare:
        return out
    if spec.zero == 0:
        return out | truth_zero0(spec, opt, model)
    if (spec.zero_options or {}).get("round_robin_gradients"):
        return out | truth_round_robin(spec, opt)
    link_states(opt)
    steps = {
        k: v
        for values in opt.optimizer.state.values()
        for k, v in values.items()
        if k in SCALARS and torch.is_tensor(v)
    }
    for name, p in model.named_parameters():
        numel = p.ds_numel if spec.zero == 3 else p.numel()
        if not p.requires_grad or not numel:
            continue
        shape = out["weight"][name].shape
        found = {"master": safe_get_full_fp32_param(p)}
        found |= {
            s: safe_get_full_optimizer_state(p, s)
            for s in STATES[spec.optimizer]
            if s not in ("row_var", "col_var")
        }
        for state, value in found.items():
            out.setdefault(state, {})[name] = value.detach().reshape(shape)
        for state, value in steps.items():
            out.setdefault(state, {})[name] = value
    return out


def client_state(spec: Spec, rank: int) -> dict:
    state = {"iteration": spec.steps, "note": "kept", "nan": float("nan"), 5: {"of": (1, 2)}}
    if spec.client == "tensors":
        generator = torch.Generator().manual_seed(rank if spec.zero == 3 else 0)
        state["rng"] = torch.arange(64, dtype=torch.uint8) + (rank if spec.zero == 3 else 0)
        state["ema"] = {
            "decay": 0.9,
            "big.weight": torch.randn(200, 300, generator=torch.Generator().manual_seed(7)),
        }
        state["own"] = torch.randn(150, 300, generator=generator)
    return state


def built(spec: Spec) -> Net:
    model = Net(spec)
    for name, p in model.named_parameters():
        if spec.freeze and spec.freeze in name:
            p.requires_grad_(False)
    return model


def make(spec: Spec, out: Path) -> None:
    torch.manual_seed(1234)
    rank = dist.get_rank()
    model = built(spec)
    tied = {"head.weight": "embed.weight"} if spec.tied else {}
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    groups = split(spec, model)
    names = [[n for n, _ in g["params"]] for g in groups]
    real_fused = ds_engine.FusedAdam
    if spec.fused:  # the class that a GPU run gets from DeepSpeed's own fused Adam
        ds_engine.FusedAdam = torch.optim.AdamW
    engine, opt, _, _ = deepspeed.initialize(
        model=model, config=config(spec), optimizer=optimizer(spec, groups)
    )
    ds_engine.FusedAdam = real_fused
    generator = torch.Generator().manual_seed(99 + rank)

    def step() -> float:
        loss = engine(torch.randint(0, 23, (2, 6), generator=generator))
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    if not spec.load:
        for _ in range(spec.steps):
            step()
        client: dict | None = client_state(spec, rank)
    else:
        for _ in range(spec.steps):  # the same data afterwards
            torch.randint(0, 23, (2, 6), generator=generator)
        client = loaded(spec, engine)
        if client is None:
            done(spec, engine, out)
            return
    hyper = [
        {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in opt.param_groups
    ]
    folder = out / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    if not spec.load:
        engine.save_checkpoint(str(folder / "ckpt"), client_state=client)
    found = truth(spec, engine, opt)
    if spec.load and rank == 0 and spec.zero and not spec.universal and not spec.load_options:
        found["fp32"] = get_fp32_state_dict_from_zero_checkpoint(spec.load)
    found = {
        state: {name: t.detach().clone() for name, t in held.items()}
        for state, held in found.items()
    }
    for name, master in found.get(
        "master", {}
    ).items():  # what the step does, and so proves the names
        weight = found["weight"][name]
        # NaN counts as equal: Adafactor takes its mean over ZeRO-3's uninitialised padding too
        same = torch.isclose(
            master.to(weight.dtype).reshape(weight.shape), weight, rtol=0, atol=0, equal_nan=True
        )
        assert same.all(), f"{name}: master is not its weight"
    counters = {k: getattr(engine, k) for k in ("global_steps", "global_samples", "skipped_steps")}
    losses = [step() for _ in range(spec.after)]
    if rank == 0:
        flat = {
            f"{s}/{n}": t.detach().clone().contiguous()
            for s, ts in found.items()
            for n, t in ts.items()
        }
        save_file(flat, folder / "truth.safetensors")
        facts = {"tied": tied, "frozen": frozen, "groups": names, "hyper": hyper, "class": type(opt).__name__,
                 "world": dist.get_world_size(), "version": deepspeed.__version__, "losses": losses,
                 "counters": counters, "client": {str(k): repr(v) for k, v in (client or {}).items()}}  # fmt: skip
        (folder / "truth.json").write_text(json.dumps(facts, default=str))
    done(spec, engine, out)


def loaded(spec: Spec, engine: Any) -> dict | None:
    """Load the checkpoint; returns the client state, or None where it must not be loaded."""
    try:
        place, client = engine.load_checkpoint(spec.load, **(spec.load_options or {}))
    except (OSError, ValueError, AssertionError):
        place, client = None, None
    missing = [None] * dist.get_world_size()
    dist.all_gather_object(missing, place is None)
    assert any(missing) is spec.refused, f"{spec.load}: {missing}"
    return None if spec.refused else client


def done(spec: Spec, engine: Any, out: Path) -> None:
    folder = out / spec.name
    dist.barrier()
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "truth.json").exists():
            (folder / "truth.json").write_text("{}")
        (folder / "done").touch()


def make_fsdp(spec: Spec, out: Path) -> None:
    torch.manual_seed(1234)
    rank, folder = dist.get_rank(), out / spec.name
    model = Net(spec)
    groups = split(spec, model)
    names = [[n for n, _ in g["params"]] for g in groups]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded = dict(model.named_parameters())
    opt = optimizer(
        spec, [{**g, "params": [(n, sharded[n]) for n, _ in g["params"]]} for g in groups]
    )
    generator = torch.Generator().manual_seed(99 + rank)
    for _ in range(spec.steps):
        model(torch.randint(0, 23, (2, 6), generator=generator)).backward()
        opt.step()
        opt.zero_grad()
    for buffer in model.buffers():  # of which DCP saves that of any rank
        dist.broadcast(buffer, 0)
    weights, states = get_state_dict(model, opt)
    if spec.tied:
        del weights["head.weight"]
    state = {
        "model": weights,
        "optim": states,
        "train": {"step": spec.steps, "rng": torch.arange(16, dtype=torch.uint8)},
    }
    dcp.save(state, checkpoint_id=str(folder / "ckpt"))
    found = {"weight": weights}
    for name, held in states["state"].items():
        for key, value in held.items():
            found.setdefault(key, {})[name] = value
    flat = {f"{s}/{n}": t for s, ts in found.items() for n, t in ts.items()}
    flat = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in flat.items()}
    if rank == 0:
        save_file({n: t.clone() for n, t in flat.items()}, folder / "truth.safetensors")
        (folder / "truth.json").write_text(
            json.dumps({"groups": names, "tied": {"head.weight": "embed.weight"}})
        )
        (folder / "done").touch()
    dist.barrier()


def main() -> None:
    specs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # gloo does as well, and is not compiled first
    )
    deepspeed.init_distributed("gloo")
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow on CPU, not impossible
    # all ranks start from one seed; the broadcast at the start refuses 0-d parameters
    ds_engine.DeepSpeedEngine._broadcast_model = lambda _: None
    for spec in (Spec(**s) for s in specs):
        (make_fsdp if spec.fsdp else make)(spec, out)
    leave()


main()
