"""A loop of torchtitan's shape goes on as if nothing had been, also with its model cut in other parts."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ucformat
from tests.torch.running import fork
from ucformat.engines.torchtitan.live import CheckpointManager
from ucformat.engines.torchtitan.storage import RunStorage
from ucformat.errors import StateMismatch, UnsupportedError
from ucformat.torch import Increments, Window

PROGRAM = Path(__file__).parent / "live_program.py"
MODULES = ("torchdata.stateful_dataloader", "ucformat.torch.integrations.torchtitan")


def test_torchtitan(tmp_path: Path) -> None:
    """One program, for imports take long; what it found is the same on both ranks."""
    fork(2, [str(PROGRAM), str(tmp_path)], tmp_path / "log.txt", MODULES)
    found, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert found == second
    for where in ("parts-2", "parts-1", "parts-4", "step-6"):
        a_training_goes_on_bit_for_bit(found, where)
    what_is_loaded(found)
    what_is_saved(found)
    no_state_is_no_state(found)
    what_is_wrong_is_said(found)


def test_an_empty_list_of_schedulers_is_none(tmp_path: Path) -> None:
    """As torchtitan's own tests pass it."""
    model = torch.nn.Linear(2, 3)
    manager = CheckpointManager(
        tmp_path,
        model_parts=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        lr_schedulers=[],
    )
    assert manager.save(1, last_step=True)
    assert "lr_scheduler" not in manager.states
    assert manager.load()
    manager.close()


def test_increments_are_loaded_bit_for_bit(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    objects: Any = {"model_parts": model, "optimizers": torch.optim.SGD(model.parameters())}
    manager = CheckpointManager(tmp_path, **objects, interval=1, increments=Increments(patch=True))
    manager.save(1)
    with torch.no_grad():
        model.weight[7] += 1
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    manager.save(2)
    manager.close()
    first, second = (ucformat.open(tmp_path / f"step-0000000{n}") for n in (1, 2))
    assert [base.id for base in second.manifest.bases] == [first.manifest.id]
    assert sum(w.nbytes for w in second.manifest.writers) < model.weight.nbytes / 4
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    again = CheckpointManager(tmp_path, **objects)
    assert again.load()
    again.close()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in model.state_dict().items())
    with pytest.raises(TypeError, match="unexpected keyword argument 'increment'"):
        CheckpointManager(tmp_path, **objects, increment=Increments())


def test_states_with_loss_are_loaded_if_that_is_asked_for(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    objects: Any = {"model_parts": model, "optimizers": optimizer, "interval": 1}
    model(torch.randn(30)).square().sum().backward()
    optimizer.step()
    encode = {"exp_avg": "int8-blockwise"}
    with closing(CheckpointManager(tmp_path, **objects, encode=encode)) as manager:
        manager.save(1)
        with pytest.raises(UnsupportedError, match="lossy=True"):
            manager.load()
    options: Any = {"load_options": {"lossy": True}}
    with closing(CheckpointManager(tmp_path, **objects, **options)) as manager:
        assert manager.load()
        assert manager.load(1)


def test_older_tensors_are_loaded_only_if_that_is_asked_for(tmp_path: Path) -> None:
    """The loop gets no report that could name them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    objects: Any = {"model_parts": model, "optimizers": optimizer, "interval": 1}
    window = Window(steps=2, groups=(("0.*",), ("1.*",)))
    with closing(CheckpointManager(tmp_path, **objects, partial=window)) as manager:
        for step in (1, 2):
            model(torch.randn(3)).square().sum().backward()
            optimizer.step()
            manager.save(step)
    assert ucformat.open(tmp_path / "step-00000002").older
    initial = {
        "initial_load_path": str(tmp_path / "step-00000002"),
        "initial_load_model_only": False,
    }
    cases: list[tuple[Path, Any, int]] = [
        (tmp_path, {}, -1),
        (tmp_path, {}, 2),
        (tmp_path / "new", initial, -1),
    ]
    for folder, options, step in cases:
        with (
            closing(CheckpointManager(folder, **objects, **options)) as manager,
            pytest.raises(StateMismatch, match="older, by 1 to 1 steps"),
        ):
            manager.load(step)
    asked: Any = {"load_options": {"strict_step": False}}
    with closing(CheckpointManager(tmp_path, **objects, **asked)) as manager:
        assert manager.load()


def a_training_goes_on_bit_for_bit(found: dict[str, Any], where: str) -> None:
    loaded, same_loss, differences = found[where]
    assert loaded
    assert same_loss
    assert differences == []


def what_is_loaded(found: dict[str, Any]) -> None:
    assert found["fresh"] is False
    assert found["newest"] == [True, 8, 1, True]
    assert found["model only"] == [True, 0, 0]
    assert found["excluded"] == [True, 7, 0]


def what_is_saved(found: dict[str, Any]) -> None:
    assert found["kept"] == ["step-00000006", "step-00000007"]
    assert found["states"] == ["exp_avg", "exp_avg_sq", "step", "weight"]
    kinds = ("bias", "weight", "wk.weight", "wq.weight")  # the fused weight has optimizer states
    assert sorted(found["names"]) == [f"layers.{n}.0.{kind}" for n in range(4) for kind in kinds]
    assert found["facts"] == [
        6,
        {"layers": 4},
        ["lr_scheduler", "train_state"],
        ["dataloader", "rng"],
    ]
    assert found["cut"]


def no_state_is_no_state(found: dict[str, Any]) -> None:
    assert found["states before"] == [0, 0]
    assert found["states saved"] == ["weight"]
    assert found["states loaded"] == [0, 0, 0, 0]
    assert found["half"] == ["2", "3"]


def what_is_wrong_is_said(found: dict[str, Any]) -> None:
    unknown, parts, missing = found["errors"]
    assert unknown.startswith("the state has no optimiser")
    assert parts.startswith("the parameters of a AdamW are not those of one of the 1 model parts")
    assert missing == "NotFound"


@pytest.mark.parametrize("root", ["memory://titan{}", "{}"])
def test_what_torchtitan_asks_of_the_storage_of_a_run(tmp_path: Path, root: str) -> None:
    """Questions of `CheckpointStorage`, which its base class has after 0.3.0; nothing is deleted through it."""
    folder, storage = root.format(tmp_path / "run"), RunStorage()
    assert not storage.isdir(folder)
    assert storage.listdir(folder) == []
    model = torch.nn.Linear(2, 3)
    objects: Any = {"model_parts": model, "optimizers": torch.optim.SGD(model.parameters())}
    with closing(CheckpointManager(folder, **objects, interval=1)) as manager:
        manager.save(1)
        manager.save(2)
    assert storage.isdir(folder)
    assert storage.listdir(folder) == ["step-00000001", "step-00000002"]
    assert storage.isdir(f"{folder}/step-00000001")
    assert storage.isfile(f"{folder}/step-00000001/manifest.json")
    assert not storage.isfile(f"{folder}/step-00000001")
    assert not storage.isdir(f"{folder}/step-00000003")
    with pytest.raises(UnsupportedError, match="is not deleted by torchtitan"):
        storage.remove(f"{folder}/step-00000001")
    assert ucformat.open(f"{folder}/step-00000001").metadata.step == 1
