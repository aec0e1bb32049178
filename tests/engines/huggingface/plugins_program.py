"""Accelerate's plugins of FSDP, and Trainer with DeepSpeed: `plugins_program.py FOLDER PART…`, under torchrun.

Accelerate wraps models by its FSDP plugins on accelerators alone, so `on_a_device` tells it that
the CPU is one; everything else is its own. Each part trains on without a break, and again from what
was saved on the way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if "deepspeed" in sys.argv[2:]:  # before the others, which look for it when they are imported
    import tests.engines.beside  # noqa: F401

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import ucformat
import ucformat.torch as ucf
from tests.torch.leaving import leave
from ucformat.engines.huggingface.accelerate import accelerator_state
from ucformat.engines.huggingface.live import UniversalTrainer

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG = LlamaConfig(
    vocab_size=98,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_dropout=0.1,
)
LAYER = "LlamaDecoderLayer"


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(98, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def on_a_device() -> None:
    """Make Accelerate take the CPU for a device that it shards on."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["device"] = torch.device("cpu")


def prepared(version: int, **options: Any) -> tuple[Any, Any, Any, Any]:
    """What `prepare` of an Accelerator with such a plugin returns."""
    AcceleratorState._reset_state(reset_partial_state=True)
    on_a_device()
    set_seed(3)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        cpu_ram_efficient_loading=False,
        **options,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.device = torch.device("cpu")
    # the activation checkpointing of FSDP2 draws other numbers for dropout than that of FSDP1
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "attention_dropout": 0.0}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if version == 1:  # the parameters of the optimizer are those of the wrapped model
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    return accelerator, model, optimizer, scheduler


def train(objects: tuple[Any, Any, Any, Any], first: int, last: int) -> list[float]:
    accelerator, model, optimizer, scheduler = objects
    found = []
    for step in range(first, last):
        tokens = torch.randint(98, (4, 12), generator=torch.Generator().manual_seed(step))
        mine = tokens[dist.get_rank() :: dist.get_world_size()]
        loss = model(input_ids=mine, labels=mine).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(accelerator.reduce(loss.detach(), "mean").item())
    return found


PLUGINS: dict[str, dict[str, Any]] = {
    "fsdp1": {"version": 1, "use_orig_params": False},
    "fsdp1 orig": {"version": 1, "use_orig_params": True, "activation_checkpointing": True},
    "fsdp2": {"version": 2, "activation_checkpointing": True},
}


def accelerate_part(folder: Path) -> dict[str, Any]:
    """Each plugin's training goes on from its own checkpoint, and from that of the first one."""
    out: dict[str, Any] = {}
    for name, options in PLUGINS.items():
        url = folder / name
        objects = prepared(**options)
        train(objects, 0, 2)
        ucf.save(accelerator_state(objects[0]), url)
        expected = train(objects, 2, 4)
        again = prepared(**options)
        report = ucf.load(accelerator_state(again[0]), url, strict=True, certify=True)
        same = train(again, 2, 4) == expected
        other = prepared(**options)
        first = folder / next(iter(PLUGINS))
        crossed = ucf.load(accelerator_state(other[0]), first, strict=True, certify=True)
        ck = ucformat.open(url)
        out[name] = {
            "kind": str(objects[0].distributed_type.value),
            "same": [same, bool(report), bool(crossed)],
            "losses": train(other, 2, 4),
            "names": sorted(ck.names()),
            "states": sorted({key.state for key in ck.tensors}),
        }
    return out


class Certified(UniversalTrainer):
    save_options: Mapping[str, Any] = MappingProxyType({"certify": True})


def trainer(folder: Path, cls: Any = Certified, **options: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    set_seed(7)
    arguments: Any = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return cls(LlamaForCausalLM(CONFIG), TrainingArguments(**arguments), train_dataset=Texts())


def losses(of: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in of.state.log_history if "loss" in entry}


def round_trip(folder: Path, **options: Any) -> dict[str, Any]:
    whole = trainer(folder / "run", **options)
    whole.train()
    again = trainer(folder / "again", **options)
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    ck = ucformat.open(folder / "run" / "checkpoint-4")
    return {
        "same": losses(again) == losses(whole),
        "count": len(losses(again)),
        "rates": [t.lr_scheduler.get_last_lr() for t in (whole, again)],
        "names": sorted(ck.names()),
        "assets": sorted(ck.assets),
        "step": ck.metadata.step,
    }


AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
ENGINES: dict[str, dict[str, Any]] = {
    "zero 2": {"deepspeed": {"zero_optimization": {"stage": 2}}},
    "zero 3": {
        "deepspeed": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "bf16": True,
    },
}
TENSOR_PARALLEL = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}


def deepspeed_part(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, options in ENGINES.items():
        config = {**AUTO, **options["deepspeed"]}
        out[name] = round_trip(folder / name, **{**options, "deepspeed": config})
    # last, for DeepSpeed takes all later engines of a process for tensor-parallel ones
    out["autotp"] = round_trip(folder / "autotp", deepspeed={**AUTO, **TENSOR_PARALLEL})
    return out


PARTS = {"accelerate": accelerate_part, "deepspeed": deepspeed_part}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found = {part: PARTS[part](folder / part) for part in sys.argv[2:]}
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found, default=str))
    leave()


if __name__ == "__main__":
    main()
