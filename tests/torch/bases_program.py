"""What ranks do in `test_bases.py`: save a model of which most stays as it is, on a base, and load it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.torch.faults_program import error_of, sharded
from ucformat.storage.local import LocalStore
from ucformat.torch import PerRank, async_save, load, save

if TYPE_CHECKING:
    from pathlib import Path


def state_of(step: int) -> dict[str, Any]:
    """A frozen base with adapters: cut, replicated, of one rank, held as boxes that nothing describes, and tied."""
    rank = dist.get_rank()

    def values(shape: tuple[int, ...], seed: float) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).reshape(shape) + seed

    stage = {f"stage.{rank}": values((7, 3), 40 + rank)}
    frozen = {
        "cut": sharded(values((61, 20), 1), 0),
        "columns": sharded(values((5, 30), 2), 1),
        "whole": values((9, 9), 3),
        "copied": sharded(values((4, 4), 4), None),
        "empty": torch.zeros(0, 3),
        **stage,
    }
    lora = {
        "lora.a": sharded(values((30, 8), 100 * step), 0),
        "lora.b": values((8, 5), 100 * step),
        f"lora.stage.{rank}": values((2,), 100 * step + rank),
    }
    return {"model": {**frozen, **lora}, "step": step, "mine": PerRank(rank + step)}


def saved(folder: Path, form: str, *, asynchronous: bool) -> list[tuple[int, int]]:
    """Three saves, each on the one before; the bytes of each that this rank wrote, and that it refers to."""
    seen = []
    for step in range(1, 4):
        base = {} if step == 1 else {"base": True if step == 2 else folder / str(step - 1)}
        arguments: Any = {"form": form, "certify": step == 3, "step": step, **base}
        if asynchronous:
            done = async_save(state_of(step), folder / str(step), **arguments).wait()
        else:
            done = save(state_of(step), folder / str(step), **arguments)
        seen.append((done.nbytes, done.referenced))
        dist.barrier()
    return seen


def loaded(folder: Path, step: int) -> bool:
    state, expected = state_of(0), state_of(step)
    for tensor in state["model"].values():
        tensor.zero_()
    report = load(state, folder / str(step), verify="always", certify=True)
    assert state["step"] == step
    for name, tensor in state["model"].items():
        a, b = (
            t.to_local() if hasattr(t, "to_local") else t for t in (tensor, expected["model"][name])
        )
        assert torch.equal(a, b), name
    return bool(report)


def disagreeing(folder: Path) -> str:
    """Replicas that differ are found although the base has what one rank holds."""
    save({"model": {"whole": torch.ones(5)}}, folder / "1")
    with error_of() as seen:
        save({"model": {"whole": torch.ones(5) + dist.get_rank()}}, folder / "2", base=True)
    return str(seen["message"])


def killed(folder: Path, form: str) -> None:
    """Rank 0 is killed when it is about to commit the second save."""
    save(state_of(1), folder / "1", form=form)  # type: ignore[arg-type]

    put = LocalStore.put_if_absent

    def maybe(self: LocalStore, key: str, data: bytes) -> str:
        if key == "manifest.json":
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, key, data)

    with mock.patch.object(LocalStore, "put_if_absent", maybe), error_of():
        save(state_of(2), folder / "2", form=form, base=True, timeout=20)  # type: ignore[arg-type]


class Adapted(nn.Module):
    """A frozen layer, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64)
        self.adapter = nn.Linear(64, 4, bias=False)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.frozen(x))


def trained(folder: Path, form: str) -> tuple[int, int]:
    """A model under FSDP2 whose adapter is trained; bytes of the second save, and of what did not change."""
    torch.manual_seed(0)
    model = fully_shard(Adapted())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    done = None
    for step in (1, 2):
        optimizer.zero_grad()
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        done = save(state, folder / str(step), form=form, base="latest", step=step)  # type: ignore[arg-type]
        dist.barrier()
    again = fully_shard(Adapted())
    other = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad])
    load({"model": again, "optimizer": other}, folder / "2")
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    assert done is not None
    return done.nbytes, done.referenced
