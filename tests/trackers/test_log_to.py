"""`log_to` of saves: a tracker gets a reference after the commit, and never harms a save."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensorboardX import SummaryWriter

import ucformat
from tests.torch.ranks import Ranks
from tests.trackers.log_to_program import Kept
from tests.trackers.running import last_line_of
from ucformat.errors import UnsupportedError, UsageError
from ucformat.torch import Manager, async_save, save

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"w": torch.ones(4)}
RANKS = Ranks("tests.trackers.log_to_program")


@pytest.fixture(autouse=True)
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))


def test_a_tracker_of_ones_own(tmp_path: Path) -> None:
    tracker = Kept()
    saved = save(STATE, tmp_path / "a", log_to=tracker, run="run7", step=3, certify=True)
    [reference] = tracker.references
    assert (reference.id, reference.url, reference.step) == (saved.id, str(tmp_path / "a"), 3)
    assert (reference.run, reference.name, reference.certified) == ("run7", "run7@3", True)
    assert len(reference.manifest_sha256 or "") == 64
    save(STATE, tmp_path / "b", log_to=tracker)
    assert tracker.references[1].certified is None
    assert ucformat.log_reference(tmp_path / "a", tracker) == "run7@3"


def test_saves_of_a_manager_in_the_background(tmp_path: Path) -> None:
    tracker = Kept()
    with Manager(tmp_path / "run7", asynchronous=True, log_to=tracker) as manager:
        for step in (1, 2, 3):
            manager.save(step, STATE)
    assert sorted(r.step or 0 for r in tracker.references) == [1, 2, 3]


def test_a_tracker_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def log_checkpoint(self, reference: ucformat.Reference) -> None:
            raise RuntimeError(f"no answer from https://me:hunter22@host/{reference.step}")

    with caplog.at_level(logging.WARNING, "ucformat"):
        saved = save(STATE, tmp_path / "a", log_to=Failing(), step=1)
        async_save(STATE, tmp_path / "b", log_to=Failing(), step=2).wait()
    assert ucformat.open(saved.url).id == saved.id
    assert ucformat.open(tmp_path / "b").manifest.step == 2
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 2
    assert all(
        "is committed, but no reference to it was logged: RuntimeError" in w for w in warnings
    )
    assert "hunter22" not in str(warnings)


def test_a_thread_that_cannot_be_started_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucformat.torch.saving import handles

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    tracker = Kept()
    async_save(STATE, tmp_path / "a").wait()  # whose writer has threads, too
    monkeypatch.setattr(handles, "Thread", NoThread)
    with caplog.at_level(logging.WARNING, "ucformat"):
        saved = async_save(STATE, tmp_path / "b", log_to=tracker).wait()
    assert ucformat.open(saved.url).id == saved.id
    assert "no reference to" in caplog.text
    assert tracker.references == []


def test_the_run_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ucformat.jobs import logged

    bound: list[Any] = []
    real = logged.bind

    def bind(tracker: Any) -> Any:
        bound.append(tracker)
        return real(tracker)

    monkeypatch.setattr(logged, "bind", bind)
    tracker = Kept()
    save(STATE, tmp_path / "a", log_to=tracker)
    async_save(STATE, tmp_path / "b", log_to=tracker).wait()
    assert bound == [tracker, tracker]


def test_a_save_that_fails_is_not_logged(tmp_path: Path) -> None:
    tracker = Kept()
    save(STATE, tmp_path / "a")
    with pytest.raises(ucformat.errors.Conflict):
        save(STATE, tmp_path / "a", log_to=tracker)
    with pytest.raises(ucformat.errors.Conflict):
        async_save(STATE, tmp_path / "a", log_to=tracker).wait()
    assert tracker.references == []


def test_a_tracker_that_does_not_answer_delays_only_those_who_wait(tmp_path: Path) -> None:
    answer, asked = threading.Event(), threading.Event()

    class Slow(Kept):
        def log_checkpoint(self, reference: ucformat.Reference) -> None:
            asked.set()
            answer.wait()
            super().log_checkpoint(reference)

    tracker = Slow()
    handle = async_save(STATE, tmp_path / "a", log_to=tracker)
    assert asked.wait(60)
    assert handle.committed
    assert handle.wait(0.01).url == str(tmp_path / "a")
    async_save(STATE, tmp_path / "b").wait()
    answer.set()
    handle.wait()
    assert len(tracker.references) == 1


def test_a_tracker_that_does_not_answer_delays_no_save_of_a_manager(tmp_path: Path) -> None:
    answer = threading.Event()

    class Slow(Kept):
        def log_checkpoint(self, reference: ucformat.Reference) -> None:
            answer.wait(60)
            super().log_checkpoint(reference)

    tracker = Slow()
    with Manager(tmp_path / "run7", asynchronous=True, log_to=tracker) as manager:
        manager.save(1, STATE)
        while manager.last is None:
            time.sleep(0.01)
        manager.save(2, STATE)
        assert tracker.references == []
        answer.set()
    assert 2 in [r.step for r in tracker.references]


def test_what_is_no_tracker_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for log_to, kind, message in (
        ("neptune", UsageError, "'neptune' is no tracker"),
        (object(), UsageError, "is no tracker"),
        ("mlflow", UnsupportedError, "mlflow is not installed"),
    ):
        for call in (save, async_save):
            with pytest.raises(kind, match=message):
                call(STATE, tmp_path / "a", log_to=log_to)
    assert not (tmp_path / "a").exists()
    with pytest.raises(UsageError, match="Publisher does not take log_to"):
        ucformat.torch.Publisher(tmp_path / "channel", log_to=Kept())


def test_only_the_first_rank_logs(tmp_path: Path) -> None:
    first, second = RANKS.run("saves", 2, tmp_path / "ranks")
    assert [r.split()[0] for r in first] == ["1", "2"]
    assert second == []


def test_all_ranks_learn_that_the_first_has_no_tracker(tmp_path: Path) -> None:
    errors = RANKS.run("refused", 2, tmp_path / "ranks")
    assert all("'neptune' is no tracker" in error for error in errors)
    assert not (tmp_path / "ranks" / "c").exists()


def test_tensorboard_there_and_back(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        saved = save(STATE, tmp_path / "a", log_to=writer, run="run7", step=3)
        writer.add_scalar("loss", 0.5, 3)
        writer.add_text("notes", "{not a reference", 3)
    with ucformat.Catalog() as catalog:
        imported = ucformat.import_runs("tensorboard", str(tmp_path / "logs"), catalog)
        assert [c.id for c in imported.checkpoints] == [saved.id]
        assert catalog.get("run7@3").metrics == {"loss": 0.5}


SAVES = """
import sys, json, torch, ucformat
from ucformat.torch import save, async_save
state = {{"w": torch.ones(4)}}
try: save(state, "none", log_to={0!r}); raise SystemExit("no run is active")
except ucformat.errors.UsageError: pass
{1}
    ids = [save(state, "a", log_to={0!r}, run="run7", step=1).id]
    run.log({{"loss": 0.5}}, step=1) if {0!r} == "wandb" else mlflow.log_metric("loss", 0.5, step=1)
    ids.append(async_save(state, "b", log_to={0!r}, run="run7", step=2).wait().id)
print(json.dumps(ids))
"""


def test_mlflow_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    begin = """
import mlflow
mlflow.set_tracking_uri("sqlite:///m.db")
mlflow.set_experiment("e")
with mlflow.start_run(run_name="x"):"""
    ids = json.loads(last_line_of(tmp_path, "-c", SAVES.format("mlflow", begin)))
    command = """
import sys
from ucformat.cli.main import main
sys.argv = ["ucp", "import", "mlflow", "sqlite:///m.db", "--json"]
main()
"""
    imported = json.loads(last_line_of(tmp_path, "-c", command))
    assert [c["id"] for c in imported["checkpoints"]] == ids
    assert imported["checkpoints"][1]["earlier"] == {"loss": 1}


def test_a_name_that_wandb_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Artifact:
        def __init__(self, name: str, **_: Any) -> None:
            names.append(name)

        def new_file(self, name: str) -> Any:
            return (tmp_path / name).open("w")

        def add_reference(self, *_: Any, **__: Any) -> None: ...

    package = types.SimpleNamespace(
        Artifact=Artifact, run=types.SimpleNamespace(log_artifact=lambda _: None)
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    save(STATE, tmp_path / "a", log_to="wandb", run="Größe_7.b", step=3)
    assert names == ["Gr--e_7.b-3"]


def test_wandb_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs W&B: pip install wandb")
    begin = "import wandb\nwith wandb.init(mode='offline', dir='.', name='x') as run:"
    ids = json.loads(
        last_line_of(tmp_path, "-c", SAVES.format("wandb", begin), WANDB_SILENT="true")
    )
    with ucformat.Catalog() as catalog:
        imported = ucformat.import_runs("wandb", str(tmp_path / "wandb"), catalog)
        assert [c.id for c in imported.checkpoints] == ids
        assert catalog.get("run7@1").metrics == {"loss": 0.5}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # of Lightning, about its loaders
@pytest.mark.parametrize("form", ["io", "strategy", "background"])
def test_lightning(tmp_path: Path, form: str) -> None:
    import lightning

    from ucformat.torch.integrations.lightning import UniversalCheckpointIO, UniversalDDPStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.named_parameters(), lr=0.1)

    tracker = Kept()
    own: dict[str, Any] = {"plugins": [UniversalCheckpointIO(log_to=tracker)]}
    if form != "io":
        own = {"strategy": UniversalDDPStrategy(background=form == "background", log_to=tracker)}
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **own,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(4, 2)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.strategy.teardown()
    assert [(r.url, r.step) for r in tracker.references] == [(str(tmp_path / "a.ckpt"), 4)]
