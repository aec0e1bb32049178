"""What ranks do in `test_together.py`: they open a checkpoint together, and tell what each of them has requested."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ucformat
from tests.torch.faults_program import error_of, sharded
from ucformat.catalog.catalog import Catalog
from ucformat.storage.local import LocalStore
from ucformat.torch import PerRank, load, save
from ucformat.torch.comm.group import group_of
from ucformat.torch.loading.share import open_together


class Requests:
    """Lists the files of which this rank reads something with `read`, asks `info`, or which it lists."""

    def __init__(self) -> None:
        self.plain: Any = LocalStore.read, LocalStore.info, LocalStore.list
        self.made: list[str] = []

    def __enter__(self) -> list[str]:
        made, (read, info, files) = self.made, self.plain

        def counted(call: Any) -> Any:
            def request(self: LocalStore, key: str = "", *args: Any) -> Any:
                made.append(key.rpartition("/")[2] if key else "*")
                return call(self, key, *args)

            return request

        LocalStore.read, LocalStore.info, LocalStore.list = map(counted, (read, info, files))  # type: ignore[method-assign]
        return self.made

    def __exit__(self, *_: object) -> None:
        LocalStore.read, LocalStore.info, LocalStore.list = self.plain  # type: ignore[method-assign]


def state() -> dict[str, Any]:
    rows = torch.arange(48.0).reshape(12, 4)
    return {
        "model": {"w": sharded(rows, 0)},
        "epoch": 3,
        "own": PerRank(torch.tensor(dist.get_rank())),
    }


def empty() -> dict[str, Any]:
    return {
        "model": {"w": sharded(torch.zeros(12, 4), 0)},
        "epoch": 0,
        "own": PerRank(torch.tensor(-1)),
    }


def documents(folder: Path) -> dict[str, Any]:
    """The requests of a load from each form, and whether it has filled the state."""
    out = {}
    for form in ("zarr", "packed"):
        save(state(), folder / form, form=form)
        wanted = empty()
        with Requests() as made:
            load(wanted, folder / form)
        equal = torch.equal(wanted["model"]["w"].full_tensor(), torch.arange(48.0).reshape(12, 4))
        out[form] = made, equal, wanted["epoch"], int(wanted["own"].value)
    return out


def foreign(folder: Path) -> dict[str, Any]:
    """The same of checkpoints that others wrote."""
    whole = torch.arange(48.0).reshape(12, 4)
    dcp.save({"w": sharded(whole, 0)}, checkpoint_id=folder / "dcp")
    if not dist.get_rank():
        save_file({"w": whole}, folder / "model.safetensors")
    dist.barrier()
    out = {}
    for place in ("dcp", "model.safetensors"):
        wanted = {"w": sharded(torch.zeros(12, 4), 0)}
        with Requests() as made:
            load(wanted, folder / place)
        out[place] = made, torch.equal(wanted["w"].full_tensor(), whole)
    return out


def references(folder: Path) -> dict[str, Any]:
    """Where ranks are when they open a reference, a place each, an open checkpoint, and one that is not there."""
    os.environ["UCP_CATALOG"] = f"sqlite:///{folder}/catalog.db"
    ranks = group_of()
    save(state(), folder / "a", step=1, run="r")
    save(state(), folder / "b", step=2, run="r")
    if not dist.get_rank():
        for name in ("a", "b"):
            with Catalog() as catalog:
                ucformat.register(folder / name, catalog)
    dist.barrier()
    own = folder / ("a", "b")[dist.get_rank() % 2]
    os.chdir(folder)
    nowhere = {
        "a path, no reference": Path("r@latest"),
        "nowhere": folder / "nowhere",
        "one of them nowhere": folder / "nowhere" if dist.get_rank() == 1 else own,
    }
    return {
        "reference": open_together("r@latest", ranks).metadata.step,
        "own": open_together(own, ranks).metadata.step,
        "some open": open_together(
            ucformat.open(own) if dist.get_rank() else own, ranks
        ).metadata.step,
        "relative": open_together(Path("a"), ranks).metadata.step,
    } | {name: failing(place) for name, place in nowhere.items()}


def failing(place: Path) -> dict[str, Any]:
    with error_of() as seen:
        open_together(place, group_of())
    return seen


def rewritten(folder: Path) -> Any:
    """The error of a load whose checkpoint is replaced when it is open; rank 0 alone has read its manifest."""
    save(state(), folder / "old")
    ck = open_together(folder / "old", group_of())
    save(state(), folder / "old", overwrite=True)
    with error_of() as seen:
        load(empty(), ck)
    return seen
