"""Lightning, trained, saved and resumed: `lightning_program.py FOLDER`, under torchrun."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ucformat
from tests.torch.integrations.compare import differences, held
from tests.torch.leaving import leave
from ucformat.engines.lightning.live import (
    UniversalCheckpointIO,
    UniversalDDPStrategy,
    UniversalModelParallelStrategy,
)
from ucformat.errors import StateMismatch, UcformatError
from ucformat.torch import Window, save

EPOCHS = 4


class Module(pl.LightningModule):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(5)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(16, 3),
        )
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, UniversalModelParallelStrategy) and not hasattr(
            self, "cut"
        ):
            mesh = self.device_mesh
            if mesh["tensor_parallel"].size() > 1:
                plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
                parallelize_module(self.net, mesh["tensor_parallel"], plan)
            if mesh["data_parallel"].size() > 1:
                fully_shard(self.net, mesh=mesh["data_parallel"])
            self.cut = True

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / 2)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [(n, p)], "lr": 0.01 * (1 + i)}
            for i, (n, p) in enumerate(self.named_parameters())
        ]
        optimizer = torch.optim.AdamW(groups, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Plain(Module):
    """The module where there is no trainer."""

    def configure_model(self) -> None:
        pass


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(i)
        return torch.randn(6, generator=g), torch.randint(3, (), generator=g)


ENCODE = {"exp_avg*": "int8-blockwise"}


def fit(folder: Path, strategy: Any, ckpt: Path | None = None, rows: int = 4, **more: Any) -> Any:
    module = more.pop("module", None) or Module()
    torch.manual_seed(11 + dist.get_rank())
    saving = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1, monitor="loss")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **more,
    )
    trainer.fit(
        module, torch.utils.data.DataLoader(Rows(), batch_size=rows, shuffle=True), ckpt_path=ckpt
    )
    return trainer, module


def all_of(trainer: Any, module: Module) -> dict[str, Any]:
    rest = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    callback = trainer.checkpoint_callback.state_dict()
    best = {k: callback[k] for k in ("best_model_score", "kth_best_model_path")}
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return held(module, trainer.optimizers[0]) | rest | {"scheduler": schedule} | best


def round_trip(folder: Path, make: Any, **more: Any) -> dict[str, Any]:
    trainer, module = fit(folder, make(), **dict(more))
    expected = all_of(trainer, module)
    saved = sorted(p.name for p in folder.iterdir())
    again, second = fit(folder, make(), folder / "epoch=1.ckpt", **dict(more))
    again.strategy.remove_checkpoint(folder / "epoch=0.ckpt")
    dist.barrier()
    best = trainer.checkpoint_callback.best_model_path
    stock = Plain.load_from_checkpoint(best, dropout=0.0)
    saved_there = ucformat.open(best)
    return {
        "differences": differences(all_of(again, second), expected),
        "removed": not (folder / "epoch=0.ckpt").exists(),
        "losses": [second.losses, module.losses[len(module.losses) // 2 :]],
        "saved": saved,
        "stock": [
            all((t.numpy() == saved_there[n][...]).all() for n, t in stock.state_dict().items()),
            stock.hparams.dropout,
            Plain.load_from_checkpoint(
                Path(best), map_location="cpu", weights_only=True
            ).hparams.dropout,
        ],
        "cut": [isinstance(p, DTensor) for p in module.parameters()],
        "bases": [base.url for base in ucformat.open(folder / "epoch=1.ckpt").manifest.bases],
        "run": saved_there.manifest.run,
    }


def across(folder: Path) -> dict[str, Any]:
    """What each saved at the end of the same training without dropout, and each going on from another's."""
    makers: dict[str, Any] = {
        "io": lambda: DDPStrategy(checkpoint_io=UniversalCheckpointIO()),
        "ddp": UniversalDDPStrategy,
        "fsdp": lambda: UniversalModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1
        ),
        "tp": lambda: UniversalModelParallelStrategy(
            data_parallel_size=1, tensor_parallel_size=2, certify=True
        ),
    }
    out: dict[str, Any] = {}
    trainer, module = fit(folder / "io", makers["io"](), module=Module(0.0))
    expected, losses = all_of(trainer, module), module.losses
    trainer.strategy.remove_checkpoint(folder / "io" / "epoch=0.ckpt")
    del (
        expected["kth_best_model_path"],
        expected["best_model_score"],
    )  # Lightning forgets them in another folder
    for source, target in (
        ("io", "ddp"),
        ("io", "fsdp"),
        ("io", "tp"),
        ("fsdp", "tp"),
        ("fsdp", "ddp"),
    ):
        place = folder / f"{source}-{target}"
        first = folder / ("io/epoch=1.ckpt" if source == "io" else "io-fsdp/epoch=2.ckpt")
        rows = 8 if target == "tp" else 4  # of the batch of each data-parallel rank
        trainer, module = fit(place, makers[target](), first, rows=rows, module=Module(0.0))
        found = all_of(trainer, module)
        del found["kth_best_model_path"], found["best_model_score"]
        out[f"{source}-{target}"] = {
            "differences": differences(found, expected),
            "losses": [module.losses, losses[-len(module.losses) :]],
            "step": trainer.global_step,
        }
    ck = ucformat.open(folder / "io" / "epoch=3.ckpt")
    out["removed"] = not (folder / "io" / "epoch=0.ckpt").exists()
    out["names"] = sorted(f"{k.state}/{k.name}" for k in ck.tensors)
    out["groups"] = [list(g.params) for g in ck.manifest.groups]
    out["step"] = ck.metadata.step
    out["told"] = [ck.manifest.config, sorted(ck.manifest.metrics)]
    try:
        fit(
            folder / "refused",
            makers["io"](),
            folder / "io-ddp" / "epoch=3.ckpt",
            module=Module(0.0),
        )
    except Exception as error:  # noqa: BLE001
        out["numbers"] = f"{type(error).__name__}: {error}"
    try:
        optimizer = torch.optim.AdamW(module.parameters())
        held = {
            "state_dict": module.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "global_step": 0,
        }
        UniversalCheckpointIO().save_checkpoint(held, folder / "unnamed")
    except Exception as error:  # noqa: BLE001
        out["unnamed"] = f"{type(error).__name__}: {error}"
    return out


def one_rank(folder: Path) -> dict[str, Any]:
    """What a CheckpointIO saves on a base, and the arguments that are refused."""
    held = {"state_dict": Plain().state_dict(), "global_step": 1}
    place = folder / str(dist.get_rank())
    io = UniversalCheckpointIO("packed", base=True, patch=True)
    io.save_checkpoint(held, place / "a")
    held["state_dict"]["net.0.weight"][3] += 1
    io.save_checkpoint(held, place / "b")
    loaded = io.load_checkpoint(place / "b")["state_dict"]
    module = Plain()
    optimizer = torch.optim.AdamW(module.named_parameters())
    module.net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    exact = optimizer.state[module.net[0].weight]["exp_avg"]
    held = {**held, "optimizer_states": [optimizer.state_dict()]}
    UniversalCheckpointIO(encode=ENCODE).save_checkpoint(held, place / "lossy")
    taken = UniversalCheckpointIO(lossy=True).load_checkpoint(place / "lossy")
    refused = []
    for make, wrong in (
        (UniversalCheckpointIO, {"increments": 1}),
        (UniversalCheckpointIO, {"timeout": 3.0}),
        (UniversalDDPStrategy, {"increments": 1}),
        (UniversalDDPStrategy, {"group": 1}),
        (UniversalDDPStrategy, {"patch": True}),
        (UniversalModelParallelStrategy, {"basis": True}),
        (UniversalCheckpointIO().load_checkpoint, {"path": place / "lossy"}),
    ):
        try:
            make(**wrong)
        except (TypeError, ValueError, UcformatError) as error:
            refused.append(f"{type(error).__name__}: {error}".replace(str(place), ""))
    return {
        "bases": [base.url for base in ucformat.open(place / "b").manifest.bases],
        "equal": all(torch.equal(loaded[n], t) for n, t in held["state_dict"].items()),
        "loss": (taken["optimizer_states"][0]["state"][0]["exp_avg"] - exact).abs().max().item(),
        "refused": refused,
    }


def with_loss(folder: Path) -> dict[str, Any]:
    """A training that goes on from moments that were saved with loss."""
    fit(folder, UniversalDDPStrategy(encode=ENCODE))
    saved = folder / "epoch=2.ckpt"
    trainer, _ = fit(folder / "again", UniversalDDPStrategy(lossy=True), saved)
    states = sorted({key.state for key in ucformat.open(saved).lossy})
    return {"states": states, "step": trainer.global_step}


def of_a_partial_save(folder: Path) -> list[Any]:
    """A strategy loads older tensors only if that is asked for: Lightning gets no report that names them."""
    module = Plain()
    optimizer = torch.optim.AdamW(module.parameters())
    window = Window(steps=2, groups=(("net.0.*",), ("net.3.*",)))
    for step in (1, 2):
        module.net(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        state = {"model": module, "optimizer_0": optimizer}
        save(state, folder / str(step), step=step, partial=window)
    told: list[Any] = []
    for options in ({}, {"strict_step": False}):
        strategy = UniversalDDPStrategy(**options)
        strategy._lightning_module, strategy.optimizers = module, [optimizer]
        try:
            told.append(strategy.load_checkpoint(folder / "2"))
        except StateMismatch as error:
            told.append(error.message)
    return told


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {
        "ddp": round_trip(folder / "ddp", UniversalDDPStrategy),
        "background": round_trip(
            folder / "background",
            lambda: UniversalDDPStrategy(
                background=True, form="packed", certify=True, base="latest", patch=True, run="lit"
            ),
        ),
        "fsdp": round_trip(
            folder / "fsdp",
            lambda: UniversalModelParallelStrategy(
                data_parallel_size=2, tensor_parallel_size=1, certify=True
            ),
        ),
        "across": across(folder / "across"),
        "one rank": one_rank(folder / "one"),
        "lossy": with_loss(folder / "lossy"),
        "partial": of_a_partial_save(folder / "partial"),
    }
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found, default=str))
    leave()


if __name__ == "__main__":
    main()
