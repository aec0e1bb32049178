"""What ranks do with torch_checkpointing's manager, and with ours in its place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engines import engine
from tests.modules import module_of

sys.path.append(
    str(
        engine("torch_checkpointing").parents[1]
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
)

from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from ucformat.errors import StateMismatch, UcformatError
from ucformat.torch import PerRank, Window
from ucformat.torch.integrations.torch_checkpointing import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable


def library() -> Any:
    """The library's own manager, whose metadata is gathered by Gloo."""
    maker = Path(__file__).parents[2] / "data" / "torch_checkpointing" / "make.py"
    return module_of(maker).managers().CheckpointManager


class Training:
    """A model of two layers, sharded over all ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.Linear(14, 7))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.count = 0

    def step(self) -> float:
        generator = torch.Generator().manual_seed(self.count)
        self.count += 1
        loss = self.model(torch.randn(6, 10, generator=generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def items(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        loader = {"position": 7 + dist.get_rank()}
        return {"model": weights, "optimizer": states, "step": self.count, "loader": loader}

    def put(self, items: Any) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=items["model"],
            optim_state_dict=items["optimizer"],
        )
        self.count = items["step"]


def specs() -> dict[str, Any]:
    return {k: ItemSpec(resharder=DefaultResharder()) for k in ("model", "optimizer")}


def per_rank(items: dict[str, Any]) -> dict[str, Any]:
    return {**items, "loader": PerRank(items["loader"])}


def saves(folder: Path) -> dict[str, Any]:
    """Both managers save the same; ours loads either, and training goes on."""
    training = Training(1)
    training.step()
    stock = library()(
        library().Config(
            items=specs(),
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    for name in ("first", "second"):
        stock.save(str(folder / name), training.items())
    stock.close()
    ours = CheckpointManager(
        CheckpointManager.Config(
            items=specs(), save=SyncCheckpointSaverConfig(), saving={"form": "packed"}
        )
    )
    assert ours.save(str(folder / "packed"), per_rank(training.items())) is None
    ours.close()
    manager = CheckpointManager.Config(items=specs(), saving={"run": "r"}).build()
    with manager.lock():
        future = manager.save(str(folder / "universal"), per_rank(training.items()))
    assert future is not None
    losses = [training.step(), training.step()]
    called: list[Any] = []
    future.add_done_callback(called.append)
    saved = future.result(60)
    told: dict[str, Any] = {"losses": losses, "resumed": {}, "id": saved.id, "called": len(called)}
    for name in ("universal", "packed", "first"):
        other = Training(2)
        other.step()
        other.optimizer.zero_grad()
        into = other.items()
        into = (
            per_rank(into) if name != "first" else {k: v for k, v in into.items() if k != "loader"}
        )
        into.get("loader", PerRank({})).value["position"] = -1
        loaded = manager.load(str(folder / name), into=into)
        assert name == "first" or loaded["loader"] == {"position": 7 + dist.get_rank()}
        other.put(loaded)
        told["resumed"][name] = [other.step(), other.step()]
    manager.close()
    return told


def loads(folder: Path) -> list[float]:
    """Another number of ranks goes on."""
    training = Training(3)
    training.step()
    into = {k: v for k, v in training.items().items() if k != "loader"}
    with CheckpointManager.Config(default=ItemSpec()).build().lock():
        manager = CheckpointManager(CheckpointManager.Config())
        training.put(manager.load(str(folder / "universal"), into=into))
    return [training.step(), training.step()]


def refused(folder: Path) -> list[str]:
    """What is refused, before anything is written."""

    class Mine(DefaultResharder):
        pass

    layout = LayoutInfo("model.pt", TorchSerialization())
    config = CheckpointManager.Config
    attempts: list[Callable[[], Any]] = [
        lambda: CheckpointManager(config(storage_config=LocalFileSystemStorageConfig())),
        lambda: CheckpointManager(config(subprocess_init_fn=print)),
        lambda: CheckpointManager(config(finalize_callback=print)),
        lambda: CheckpointManager(config(pre_finalize_callback=print)),
        lambda: CheckpointManager(config(items={"model": ItemSpec(layout=layout)})),
        lambda: CheckpointManager(config(default=ItemSpec(resharder=Mine()))),
        lambda: CheckpointManager().load(str(folder)),
        lambda: CheckpointManager().load(str(folder), into={"a": 1}, map_location="cpu"),
        lambda: CheckpointManager().load(str(folder), into={"a": 1}, metadata_format=int),
        lambda: CheckpointManager(config(save=SyncCheckpointSaverConfig())).save(
            str(folder / "x"), {"loader": dist.get_rank()}
        ),
    ]
    told = []
    for attempt in attempts:
        try:
            attempt()
        except UcformatError as error:
            told.append(error.message)
    closed = CheckpointManager(config(save=AsyncCheckpointSaverConfig()))
    closed.close()
    try:
        closed.save(str(folder / "x"), {})
    except UcformatError as error:
        told.append(error.message)
    try:
        CheckpointManager(config(items={"model": ItemSpec()}, default=None)).save(
            str(folder / "x"), {}
        )
    except KeyError as error:
        told.append(str(error))
    return told


def older(folder: Path) -> list[Any]:
    """A manager, whose load returns no report, loads older tensors only if that is asked for."""
    training = Training(1)
    save, window = SyncCheckpointSaverConfig(), Window(steps=2, groups=(("0.*",), ("1.*",)))
    config = CheckpointManager.Config
    manager = config(items=specs(), save=save, saving={"partial": window}).build()
    for step in (1, 2):
        training.step()
        manager.save(str(folder / str(step)), per_rank(training.items()))
    told: list[Any] = []
    for loading in ({}, {"strict_step": False}):
        manager = config(items=specs(), save=save, loading=loading).build()
        try:
            items = manager.load(str(folder / "2"), into=per_rank(training.items()))
            told.append(items["step"])
        except StateMismatch as error:
            told.append(error.message)
    return told
