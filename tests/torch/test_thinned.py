"""Checkpoints of a training of which only some states are left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from ucformat.errors import StateMismatch
from ucformat.torch import Manager, load, load_into, save

if TYPE_CHECKING:
    from pathlib import Path


def training(seed: int) -> dict[str, Any]:
    """A model and an optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def fresh() -> dict[str, Any]:
    """A training before its first step."""
    model = torch.nn.Linear(6, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, b.state_dict()[n]) for n, x in a.state_dict().items())


@pytest.mark.parametrize("form", ["zarr", "packed", "safetensors"])
@pytest.mark.parametrize("drop", ["exp_avg*", ["exp_avg*", "step"]])
def test_its_weights_are_loaded_and_its_optimizer_is_refused(
    form: Any, drop: Any, tmp_path: Path
) -> None:
    saved = training(1)
    save(saved, tmp_path / "it", form=form, step=3)
    ucformat.thin(tmp_path / "it", drop)
    new = fresh()
    assert load({"model": new["model"]}, tmp_path / "it")
    assert equal(new["model"], saved["model"])
    other = torch.nn.Linear(6, 4)
    load_into(other, tmp_path / "it")
    assert equal(other, saved["model"])
    untouched = fresh()
    before = {n: t.clone() for n, t in untouched["model"].state_dict().items()}
    told = (
        r"tensors \(exp_avg\) in the checkpoint were dropped by thin on .*; "
        "pass the model without its optimizer to load the weights"
    )
    for state in (untouched, training(2)):
        with pytest.raises(StateMismatch, match=told):
            load(state, tmp_path / "it")
    assert all(torch.equal(t, before[n]) for n, t in untouched["model"].state_dict().items())
    for strict in ("weights", ["model"]):
        some = fresh()
        report = load(some, tmp_path / "it", strict=strict)
        assert equal(some["model"], saved["model"])
        assert any("(exp_avg)" in line for line in report.tolerated.others)
    assert not load(fresh(), tmp_path / "it", strict=False)


def test_what_was_never_there_is_not_called_dropped(tmp_path: Path) -> None:
    save({"model": training(1)["model"]}, tmp_path / "it")
    with pytest.raises(StateMismatch, match="missing") as caught:
        load(training(2), tmp_path / "it")
    assert "dropped" not in caught.value.message


@pytest.mark.parametrize("with_catalog", [False, True])
def test_a_manager_thins_what_it_keeps_for_its_weights(
    with_catalog: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db") if with_catalog else "none")
    keep: Any = [{"last": 2}, {"every": 20, "states": ["weight"]}]
    truth = {}
    with Manager(tmp_path / "run", keep=keep, run="r", signals=()) as manager:
        for step in range(10, 80, 10):
            truth[step] = training(step)
            manager.save(step, truth[step])
    left = {
        int(place.name[5:]): ucformat.open(place)
        for place in sorted((tmp_path / "run").glob("step-*"))
    }
    assert {step: bool(ck.dropped) for step, ck in left.items()} == {
        20: True,
        40: True,
        60: False,
        70: False,
    }
    for step, ck in left.items():
        assert ucformat.verify(ck)
        model = fresh()["model"]
        load({"model": model}, ck)
        assert equal(model, truth[step]["model"])
    state = fresh()
    with Manager(tmp_path / "run", keep=keep, run="r", signals=()) as manager:
        assert manager.restore_latest(state) is not None
        assert equal(state["model"], truth[70]["model"])
        manager.save(80, truth[10])
    assert {
        s: bool(ucformat.open(tmp_path / "run" / f"step-{s:08}").dropped) for s in (60, 80)
    } == {
        60: True,
        80: False,
    }
