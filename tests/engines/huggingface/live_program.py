"""Hugging Face's Trainer and Accelerate, trained, saved and resumed: `hf_program.py FOLDER`, under torchrun.

Each part trains on without a break, resumes from what was saved on the way with new objects, and
compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.distributed import DistributedConfig

import ucformat
import ucformat.torch as ucf
from tests.torch.integrations.compare import differences, held
from tests.torch.leaving import leave
from ucformat.engines.huggingface.accelerate import accelerator_state
from ucformat.engines.huggingface.live import SaveCallback, UniversalTrainer
from ucformat.errors import StateMismatch, UcformatError, UnsupportedError
from ucformat.torch import Window

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    attention_dropout=0.1,
    tie_word_embeddings=True,
)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(97, (11,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Path, cls: Any = UniversalTrainer, model: Any = None, **more: Any) -> Any:
    callbacks = more.pop("callbacks", [])
    set_seed(7)
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 9,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "restore_callback_states_from_checkpoint": True,
        "run_name": "llama",
        **more,
    }
    return cls(
        LlamaForCausalLM(CONFIG) if model is None else model,
        TrainingArguments(**arguments),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=callbacks,
    )


def losses(of: UniversalTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in of.state.log_history if "loss" in entry}


def all_of(of: UniversalTrainer) -> dict[str, Any]:
    state = {
        "scheduler": of.lr_scheduler.state_dict(),
        "step": of.state.global_step,
        "losses": losses(of),
    }
    return held(of.model, of.optimizer.optimizer) | state


class OnABase(UniversalTrainer):
    save_options: Mapping[str, Any] = MappingProxyType({"base": True, "patch": True})


class SavesWithLoss(UniversalTrainer):
    save_options: Mapping[str, Any] = MappingProxyType({"encode": {"exp_avg*": "int8-blockwise"}})


class LoadsWithLoss(SavesWithLoss):
    load_options: Mapping[str, Any] = MappingProxyType({"lossy": True})


class SavesInParts(UniversalTrainer):
    window = Window(steps=2, groups=(("model.layers.0.*",), ("model.norm.*",)))
    save_options: Mapping[str, Any] = MappingProxyType({"partial": window})


class InBackground(UniversalTrainer):
    save_in_background = True
    save_options: Mapping[str, Any] = MappingProxyType({"form": "packed", "certify": True})


def the_trainer(folder: Path) -> dict[str, Any]:
    """9 steps, and the last 5 again: steps 3 and 6 are saved, an epoch has 4."""
    out: dict[str, Any] = {}
    for cls, options in ((OnABase, {}), (InBackground, {"save_total_limit": 2})):
        name = cls.__name__
        patience = EarlyStoppingCallback(early_stopping_patience=5)
        more = {
            "eval_strategy": "steps",
            "eval_steps": 3,
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
        }
        whole = trainer(folder / name, cls, callbacks=[patience], **more, **options)
        whole.train()
        expected = all_of(whole)
        kept = sorted(p.name for p in (folder / name).iterdir())
        again = trainer(folder / name, cls, callbacks=[EarlyStoppingCallback(5)], **more, **options)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoint-6"))
        out[name] = {
            "differences": differences(all_of(again), expected),
            "kept": kept,
            "losses": len(expected["losses"]),
            "best": whole.state.best_model_checkpoint == again.state.best_model_checkpoint,
            "epoch": [whole.state.epoch, again.state.epoch],
        }
        last = trainer(folder / name, cls, max_steps=10, **options)
        last.train(resume_from_checkpoint=True)
        out[name]["last"] = [
            last.state.global_step,
            expected["losses"].items() <= losses(last).items(),
        ]
    ck = ucformat.open(folder / "OnABase" / "checkpoint-9")
    resumed = ucformat.open(folder / "OnABase" / "checkpoint-6")
    out["bases"] = [[base.url for base in c.manifest.bases] for c in (resumed, ck)]
    lossy = folder / "lossy"
    trainer(lossy, SavesWithLoss, max_steps=3).train()
    again = trainer(lossy, LoadsWithLoss, max_steps=4)
    again.train(resume_from_checkpoint=True)
    states = {key.state for key in ucformat.open(lossy / "checkpoint-3").lossy}
    out["lossy"] = [sorted(states), again.state.global_step]
    wrong = trainer(folder / "wrong")
    wrong.save_options = {"increments": 1}
    exact = trainer(lossy, SavesWithLoss)
    out["refused"] = []
    for act in (
        wrong.train,
        lambda: SaveCallback("x", basis=True),
        lambda: exact.train(resume_from_checkpoint=str(lossy / "checkpoint-3")),
    ):
        try:
            act()
        except (TypeError, UcformatError) as error:
            out["refused"].append(str(error))
    out["facts"] = {
        "run": ck.manifest.run,
        "step": ck.manifest.step,
        "loss": ck.manifest.metrics["loss"] == expected["losses"][9],
        "aliases": dict(ck.aliases),
        "states": sorted({k.state for k in ck.tensors}),
        "config": [ck.manifest.config["hidden_size"], ck.manifest.config["learning_rate"]],
    }
    return out


def a_partial_save(folder: Path) -> dict[str, Any]:
    """A Trainer resumes from older tensors only if that is asked for: `train` returns no report that names them."""
    trainer(folder, SavesInParts, max_steps=2, save_steps=1).train()
    again = trainer(folder, SavesInParts, max_steps=3, save_steps=1)
    try:
        again.train(resume_from_checkpoint=True)
        refused = ""
    except StateMismatch as error:
        refused = error.message
    asked = trainer(folder, max_steps=3)
    asked.load_options = {"strict_step": False}
    asked.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return {"refused": refused, "step": asked.state.global_step}


def the_sharded_trainer(folder: Path) -> dict[str, Any]:
    """A model that Transformers cuts by FSDP2 when it loads it; the Trainer itself cannot resume such a one."""

    def make() -> Any:
        cut = DistributedConfig(fsdp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(
            folder / "model", distributed_config=cut, dtype=torch.float32
        )
        return trainer(folder, model=model, save_only_model=True)

    if dist.get_rank() == 0:
        plain = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": False})
        LlamaForCausalLM(plain).save_pretrained(folder / "model")
    dist.barrier()
    whole = make()
    whole.train()
    again = make()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    cut = [isinstance(p, DTensor) for p in whole.model.parameters()]
    return {
        "differences": differences(all_of(again), all_of(whole)),
        "cut": all(cut),
        "losses": len(losses(again)),
    }


def the_callback(folder: Path) -> dict[str, Any]:
    """A checkpoint that a callback saved besides the Trainer's own; a UniversalTrainer goes on from it."""
    saving = SaveCallback(str(folder / "universal"), background=True, base="latest", patch=True)
    whole = trainer(folder / "plain", Trainer, callbacks=[saving], save_only_model=True)
    whole.train()
    expected = all_of(whole)
    again = trainer(folder / "again")
    again.train(resume_from_checkpoint=str(folder / "universal" / "step-6"))
    return {
        "differences": differences(all_of(again), expected),
        "bases": [b.url for b in ucformat.open(folder / "universal" / "step-6").manifest.bases],
        "plain": sorted(p.name for p in (folder / "plain" / "checkpoint-6").iterdir()),
    }


def what_the_trainer_saved(folder: Path) -> dict[str, Any]:
    """A folder of the Trainer itself, from which a UniversalTrainer goes on; and a checkpoint that is no Trainer's."""
    whole = trainer(folder / "stock", Trainer, max_steps=6)
    whole.train()
    again = trainer(folder / "again", max_steps=6)
    again.train(resume_from_checkpoint=str(folder / "stock" / "checkpoint-3"))
    ucf.save({"model": whole.model}, folder / "weights")
    try:
        trainer(folder / "again").train(resume_from_checkpoint=str(folder / "weights"))
        refused = ""
    except UnsupportedError as error:
        refused = str(error)
    parents = [
        edge.url for edge in ucformat.open(folder / "again" / "checkpoint-6").manifest.lineage
    ]
    return {
        "differences": differences(all_of(again), all_of(whole)),
        "refused": refused,
        "parent": parents == [str(folder / "stock" / "checkpoint-3")],
    }


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def accelerated(kind: str) -> tuple[Accelerator, Any, Any, Any, Counter, Any]:
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(97, 15), torch.nn.Dropout(0.2), torch.nn.Linear(15, 97)
    )
    if (
        kind != "whole"
    ):  # Accelerate shards on accelerators alone; a model that is sharded already it leaves as it is
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        if kind == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    own = torch.Generator().manual_seed(
        5
    )  # else a loader that goes on draws a number that dropout would have had
    loader = StatefulDataLoader(Texts(), batch_size=2, shuffle=True, generator=own)
    counter = Counter()
    model = (
        accelerator.prepare_model(model, evaluation_mode=True)
        if kind != "whole"
        else accelerator.prepare(model)
    )
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, counter, loader


def accelerate_part(folder: Path, kind: str) -> dict[str, Any]:
    def run(objects: Any, source: Any, batches: int) -> list[float]:
        accelerator, model, optimizer, scheduler, counter, _ = objects
        found = []
        for _ in range(batches):
            tokens = next(source)["input_ids"]
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(
                    model(tokens).flatten(0, 1), tokens.flatten()
                )
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            counter.seen += len(tokens)
            found.append(loss.item())
        return found

    url = str(folder / f"accelerate-{kind}")
    first = accelerated(kind)
    source = iter(first[5])
    run(first, source, 2)
    state = accelerator_state(first[0])
    state["loader"] = first[5]
    ucf.save(state, f"{url}-base")
    run(first, source, 2)
    ucf.save(state, url, base=f"{url}-base", patch=True)
    expected = run(first, source, 4)
    second = accelerated(kind)
    report = ucf.load({**accelerator_state(second[0]), "loader": second[5]}, url, strict=True)
    loaded = [second[0].step, second[4].seen]
    found = run(second, iter(second[5]), 4)
    a = held(first[1], first[2].optimizer) | {"scheduler": first[3].state_dict()}
    b = held(second[1], second[2].optimizer) | {"scheduler": second[3].state_dict()}
    return {
        "differences": differences(b, a),
        "losses": [found, expected],
        "loaded": loaded,
        "names": sorted(ucformat.open(url).names()),
        "cut": any(isinstance(p, DTensor) for p in first[1].parameters()),
        "missing": list(report.missing),
        "bases": [base.url for base in ucformat.open(url).manifest.bases],
    }


def stateful(folder: Path) -> dict[str, Any]:
    """A stateful data loader of Accelerate, saved by two ranks, is loaded by one that merges their states."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Texts(), batch_size=2))
    ranks: list[Any] = []

    def merge(values: list[Any], rank: int, ranks_now: int) -> Any:
        ranks[:] = [len(values), rank, ranks_now]
        return values[0]

    if accelerator.num_processes == 2:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        ucf.save(accelerator_state(accelerator), folder / "stateful")
        return {}
    try:
        ucf.load(accelerator_state(accelerator), folder / "stateful")
        refused = ""
    except StateMismatch as error:
        refused = str(error)
    ucf.load(accelerator_state(accelerator, merge), folder / "stateful")
    return {"refused": refused, "ranks": ranks, "left": len([*loader])}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        (folder / "merged.json").write_text(json.dumps(stateful(folder)))
        return
    Accelerator(cpu=True)  # makes the process group
    found = {
        "trainer": the_trainer(folder / "trainer"),
        "callback": the_callback(folder / "callback"),
        "stock": what_the_trainer_saved(folder / "stock"),
        "sharded": the_sharded_trainer(folder / "sharded"),
        "accelerate": {k: accelerate_part(folder, k) for k in ("whole", "fsdp2", "fsdp1")},
        "stateful": stateful(folder),
        "partial": a_partial_save(folder / "partial"),
    }
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found, default=str))
    leave()


if __name__ == "__main__":
    main()
