"""Hyper-parameters in flattened optimizer state dicts, where each parameter has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ucformat.torch
from ucformat.errors import StateMismatch

if TYPE_CHECKING:
    from pathlib import Path

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def training() -> tuple[torch.nn.Module, torch.optim.SGD, Any]:
    """Two groups that are alike until the scheduler has stepped."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight]}, {"params": [model.bias]}], lr=0.3, momentum=0.9
    )
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda i: 1 / (1 + i), lambda _: 1]),
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer, scheduler = training()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    ucformat.torch.save({"model": weights, "optimizer": states}, tmp_path / "saved")
    return tmp_path / "saved"


def test_parameters_whose_groups_were_alike_get_each_its_own(saved: Path) -> None:
    model, optimizer, _ = training()
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"]
    weights, states = get_state_dict(model, optimizer, options=FLAT)
    ucformat.torch.load({"model": weights, "optimizer": states}, saved, strict=True)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states, options=FLAT
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.15, 0.3]


def test_parameters_of_one_live_group_cannot(saved: Path) -> None:
    model, *_ = training()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with pytest.raises(
        StateMismatch, match="group 0 of optimizer: its parameters were in groups with different"
    ):
        ucformat.torch.load({"model": model, "optimizer": optimizer}, saved)
    assert optimizer.param_groups[0]["lr"] == 0.3
