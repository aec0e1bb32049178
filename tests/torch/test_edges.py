"""What a checkpoint says it came from, after a load: the training goes on, under another layout, or begins anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.jobs.conftest import foreign
from ucformat.engines.torchtitan.live import CheckpointManager
from ucformat.torch import Manager, Rng, load, save
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.save import save_local
from ucformat.torch.state.local import local_state

if TYPE_CHECKING:
    from pathlib import Path


def training(*, momentum: float = 0.9) -> dict[str, Any]:
    """A model and its optimizer after one step."""
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def edges(place: Path) -> list[tuple[str, str, str | None]]:
    return [(e.kind, e.url, e.id) for e in ucformat.open(place).manifest.lineage]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_training_goes_on(tmp_path: Path, momentum: float) -> None:
    first = save(training(momentum=momentum), tmp_path / "a")
    again = training(momentum=momentum)
    report = load(again, tmp_path / "a")
    assert report.layout == {"world": 1}
    save(again, tmp_path / "b", lineage=[report.lineage])
    assert edges(tmp_path / "b") == [("resume", str(tmp_path / "a"), first.id)]
    assert ucformat.open(tmp_path / "b").manifest.lineage[0].engine["name"] == "torch"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"zero": 1, "dp": 1}])
def test_under_another_layout(tmp_path: Path, layout: dict[str, int]) -> None:
    save_local(
        replace(local_state(training()), layout=layout),
        SaveOptions(str(tmp_path / "run" / "step-00000003")),
    )
    with Manager(tmp_path / "run", signals=()) as manager:
        state = training()
        assert manager.restore_latest(state) is not None
        manager.save(4, state)
        manager.save(5, state)
    for n in (4, 5):  # each says what the launch began with
        assert edges(tmp_path / "run" / f"step-0000000{n}")[0][:2] == (
            "reshard",
            str(tmp_path / "run" / "step-00000003"),
        )


def test_from_the_files_of_an_engine(tmp_path: Path) -> None:
    place = foreign(tmp_path / "ds")
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros(4, 6)) for n in "ab"})
    weights = load({"model": model}, place)
    assert weights.lineage.kind == "finetune"
    states = {n: {"exp_avg": torch.zeros(4, 6)} for n in "ab"}
    moments = load(
        {"model": dict(model), "optimizer": {"state": states, "param_groups": []}},
        place,
        strict=False,
    )
    assert moments.lineage.kind == "reshard"  # from ZeRO 3 of two ranks
    assert (moments.lineage.url, moments.lineage.id) == (str(place), ucformat.open(place).id)


@pytest.mark.parametrize("strict", ["report", False])
def test_weights_alone_begin_a_training_anew(tmp_path: Path, strict: Any) -> None:
    whole = training()
    saved = save(whole if strict else {"model": whole["model"]}, tmp_path / "a")
    state = training()
    with Manager(tmp_path / "run", signals=()) as manager:
        wanted = {"model": state["model"]} if strict else state
        report = manager.load(wanted, tmp_path / "a", strict=strict)
        assert bool(report.missing) == (not strict)
        assert torch.equal(state["model"].weight, whole["model"].weight)
        manager.save(1, state)
    assert edges(tmp_path / "run" / "step-00000001") == [
        ("finetune", str(tmp_path / "a"), saved.id)
    ]


def test_a_run_without_an_optimizer_goes_on(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    for step in (1, 2):
        with Manager(tmp_path, signals=()) as manager:
            manager.restore_latest(state)
            manager.save(step, state)
    assert [e[0] for e in edges(tmp_path / "step-00000002")] == ["resume"]


def test_a_part_of_the_state_that_is_left_out_is_no_resumption(tmp_path: Path) -> None:
    with Manager(tmp_path, signals=()) as manager:
        manager.save(1, training())
    state = training()
    with Manager(tmp_path, signals=()) as manager:
        manager.restore_latest({"model": state["model"]})
        manager.save(2, state)
    assert [e[0] for e in edges(tmp_path / "step-00000002")] == ["finetune"]


@pytest.mark.parametrize(("alone", "kind"), [(True, "finetune"), (False, "resume")])
def test_torchtitan_begins_with_another_run(tmp_path: Path, alone: bool, kind: str) -> None:
    save({**training(), "rng": Rng()}, tmp_path / "a")
    state = training()
    about: dict[str, Any] = {
        "initial_load_path": str(tmp_path / "a"),
        "initial_load_model_only": alone,
        "interval": 1,
    }
    made = CheckpointManager(
        tmp_path / "run",
        model_parts=state["model"],
        optimizers=state["optimizer"],
        keep_latest_k=0,
        **about,
    )
    assert made.load()
    made.save(1)
    made.close()
    again = CheckpointManager(
        tmp_path / "run",
        model_parts=state["model"],
        optimizers=state["optimizer"],
        keep_latest_k=0,
        **about,
    )
    assert again.load(1)
    again.save(2)
    again.close()
    assert edges(tmp_path / "run" / "step-00000001")[0][:2] == (kind, str(tmp_path / "a"))
    assert edges(tmp_path / "run" / "step-00000002")[0][:2] == (
        "resume",
        str(tmp_path / "run" / "step-00000001"),
    )
