"""Makes the checkpoints of this folder: `make.py KIND...`, see README.md.

Each trains a tiny Llama for three steps on the CPU, keeps the truth in memory right before the save of the third, and
lets the library write its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(os.environ.get("UCFORMAT_DATA", Path(__file__).parent))
STEPS = 3
#: kind -> processes
KINDS = {
    "trainer": 1,
    "trainer_bf16": 2,
    "trainer_adapter": 1,
    "trainer_zero2": 2,
    "trainer_zero3": 2,
    "trainer_fsdp": 2,
    "accelerate": 1,
    "accelerate_two": 1,
    "accelerate_fsdp_full": 2,
}


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(5)
    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "use_cache": False,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **more}))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(31, (9,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def whole(value: torch.Tensor) -> torch.Tensor:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().cpu().clone()


def held(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """`<state>/<name>`: parameters and buffers once each, and the optimizer's tensors."""
    names = {
        id(p): n.replace(".default.", ".") for n, p in model.named_parameters()
    }  # as PEFT's files call them
    out = {
        f"weight/{prefix}{names[id(p)]}": whole(p) for p in model.parameters() if p.requires_grad
    }
    stored = model.state_dict()
    out |= {f"weight/{prefix}{n}": whole(b) for n, b in model.named_buffers() if n in stored}
    for p, states in (optimizer.state if optimizer is not None else {}).items():
        out |= {
            f"{s}/{prefix}{names[id(p)]}": whole(v) for s, v in states.items() if torch.is_tensor(v)
        }
    return out


def facts_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, prefix: str = ""
) -> dict[str, Any]:
    first: dict[int, str] = {}
    tied = {}
    for full, p in model.named_parameters(remove_duplicate=False):
        name = full.replace(".default.", ".")
        if first.setdefault(id(p), prefix + name) != prefix + name:
            tied[prefix + name] = first[id(p)]
    groups = (
        [[first[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        if optimizer is not None
        else []
    )
    return {"tied": tied, "groups": groups, "step": STEPS, "order": list(first.values())}


def write(folder: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "truth.safetensors")
        (folder / "truth.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def deepspeed_held(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = trainer.model_wrapped
    opt = engine.optimizer
    if hasattr(
        opt, "_hp_optimizer_states_linked"
    ):  # by itself DeepSpeed links those of the first group alone
        opt._hp_optimizer_states_linked = False
        opt.link_hp_params() if hasattr(opt, "link_hp_params") else None
    out = {}
    three = engine.zero_optimization_stage() == 3
    for name, p in engine.module.named_parameters():
        out[f"master/{name}"] = safe_get_full_fp32_param(p).detach().cpu().clone()
        for state in ("exp_avg", "exp_avg_sq"):
            out[f"{state}/{name}"] = safe_get_full_optimizer_state(p, state).detach().cpu().clone()
        if not three:
            out[f"weight/{name}"] = whole(p)
    return out, {**facts_of(engine.module, None), "tied": {}}


def with_trainer(kind: str, folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    deepspeed = {"trainer_zero2": 2, "trainer_zero3": 3}.get(kind)
    model = llama(tie_word_embeddings=kind == "trainer", num_hidden_layers=1 if deepspeed else 2)
    if kind == "trainer_bf16":
        model = model.to(torch.bfloat16)
    if kind == "trainer_adapter":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        )
    more: dict[str, Any] = {"use_cpu": True}
    if deepspeed:
        more = {
            "deepspeed": {
                "zero_optimization": {"stage": deepspeed},
                "train_micro_batch_size_per_gpu": "auto",
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            }
        }
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(
        folder
    )  # the arguments are kept with the checkpoint, and this machine's paths are nobody's business
    out = Path("run")
    arguments = TrainingArguments(
        output_dir="run", max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, save_steps=STEPS,
        logging_steps=1, report_to=[], disable_tqdm=True, **more,
    )  # fmt: skip

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEPS:
                if deepspeed:
                    tensors, facts = deepspeed_held(trainer)
                else:
                    inner = trainer.accelerator.unwrap_model(trainer.model)
                    tensors, facts = (
                        held(inner, trainer.optimizer.optimizer),
                        facts_of(inner, trainer.optimizer.optimizer),
                    )
                write(folder, tensors, {**facts, "kind": kind})

    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[Keep()])
    trainer.train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        (out / f"checkpoint-{STEPS}").rename(folder / "ckpt")
        shutil.rmtree(out)


def train(model: torch.nn.Module, optimizer: Any, scheduler: Any, rank: int = 0) -> None:
    for step in range(STEPS):
        batch = [Texts()[step * 4 + rank * 2 + i]["input_ids"] for i in range(2)]
        tokens = torch.stack(batch)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def with_accelerate(kind: str, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    two = kind == "accelerate_two"
    models = [llama(tie_word_embeddings=not two)] + (
        [torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5))] if two else []
    )
    optimizers = [
        torch.optim.AdamW(m.named_parameters() if two else m.parameters(), lr=1e-2) for m in models
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
    models = [accelerator.prepare(m) for m in models]
    optimizers = [accelerator.prepare(o) for o in optimizers]
    schedulers = [accelerator.prepare(s) for s in schedulers]

    class Count:
        def state_dict(self) -> dict[str, Any]:
            return {"seen": 12, "mean": torch.ones(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    accelerator.register_for_checkpointing(Count())
    train(models[0], optimizers[0], schedulers[0])
    if two:
        models[1](torch.randn(4, 7)).sum().backward()
        optimizers[1].step()
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"tied": {}, "groups": [], "order": [], "step": None}
    for i, (m, o) in enumerate(zip(models, optimizers, strict=True)):
        prefix = (f"model_{i}." if i else "model.") if two else ""
        tensors |= held(m, o.optimizer, prefix)
        more = facts_of(m, o.optimizer, prefix)
        facts["tied"] |= more["tied"]
        facts["groups"] += more["groups"]
        facts["order"] += more["order"]
    write(folder, tensors, {**facts, "kind": kind})
    accelerator.save_state(str(folder / "ckpt"))


def with_fsdp(kind: str, folder: Path) -> None:
    """What Trainer and Accelerate write under FSDP2, by Accelerate's own functions: on CPUs they do not set it up."""
    from types import SimpleNamespace

    from accelerate import PartialState
    from accelerate.utils import (
        FullyShardedDataParallelPlugin,
        save_fsdp_model,
        save_fsdp_optimizer,
    )
    from torch.distributed.fsdp import fully_shard

    PartialState(cpu=True)
    rank = dist.get_rank()
    model = llama(tie_word_embeddings=False, num_hidden_layers=1)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, foreach=False
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, scheduler, rank)
    facts = {**facts_of(model, optimizer), "kind": kind}
    write(
        folder, held(model, optimizer), {**facts, "step": STEPS if kind == "trainer_fsdp" else None}
    )
    form = "SHARDED_STATE_DICT" if kind == "trainer_fsdp" else "FULL_STATE_DICT"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=form, cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        num_processes=2, process_index=rank, is_fsdp2=True, wait_for_everyone=dist.barrier
    )
    out = folder / "ckpt"
    out.mkdir(exist_ok=True, parents=True)
    save_fsdp_model(plugin, accelerator, model, str(out))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(out))
    if kind == "trainer_fsdp":
        from transformers import Trainer, TrainingArguments

        os.chdir(folder)
        arguments = TrainingArguments(output_dir="run", use_cpu=True, report_to=[])
        trainer = Trainer(llama(), arguments)
        trainer._save_rng_state(str(out))
        trainer.state.global_step = STEPS
        if rank == 0:
            torch.save(scheduler.state_dict(), out / "scheduler.pt")
            torch.save(arguments, out / "training_args.bin")
            trainer.state.save_to_json(str(out / "trainer_state.json"))
        shutil.rmtree(folder / "run", ignore_errors=True)
    else:
        from accelerate.checkpointing import save_accelerator_state

        save_accelerator_state(str(out), [], [], [scheduler], [], rank, 0)


def main() -> None:
    if os.environ.get("MAKE_KIND"):
        kind = os.environ["MAKE_KIND"]
        folder = HERE / kind
        make = (
            with_fsdp
            if "fsdp" in kind
            else with_accelerate
            if kind.startswith("accelerate")
            else with_trainer
        )
        make(kind, folder)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return
    for kind in sys.argv[1:] or KINDS:
        shutil.rmtree(HERE / kind, ignore_errors=True)
        world = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(KINDS[kind]),
            "--master-port",
            "29713",
        ]
        command = [sys.executable, *(world if KINDS[kind] > 1 or "zero" in kind else []), __file__]
        quiet = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
        }
        quiet |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        subprocess.run(command, env={**os.environ, **quiet, "MAKE_KIND": kind}, check=True)
        for path in (HERE / kind).rglob("zero_to_*.py"):
            path.unlink()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
