"""Runs of a real MLflow: in SQLite, behind its server, and in a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.manifests import manifest
from tests.patience import PATIENCE
from tests.trackers.conftest import metric, of_run
from tests.trackers.running import last_line_of
from ucformat.errors import NotFound, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Ids = dict[str, str]

NEEDS_MLFLOW = "needs MLflow: pip install mlflow-skinny"
PROGRAM = Path(__file__).with_name("mlflow_program.py")
REFERRED = manifest(1).id  # run7@200


def write(uri: str, folder: Path, **variables: str) -> Ids:
    ids: Ids = json.loads(last_line_of(folder, str(PROGRAM), uri, REFERRED, **variables))
    return ids


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ids]:
    """The file of a store of MLflow in SQLite, and the ids of runs in it."""
    pytest.importorskip("mlflow", reason=NEEDS_MLFLOW)
    folder = tmp_path_factory.mktemp("mlflow")
    ids = write(f"sqlite:///{folder / 'mlflow.db'}", folder)
    return folder / "mlflow.db", ids


def command(*words: object, code: int = 0, **variables: str) -> dict[str, Any]:
    """What `ucp import mlflow` prints as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "ucformat.cli", "import", "mlflow", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    assert done.returncode == code, done.stderr
    out = done.stderr if code else done.stdout
    data: dict[str, Any] = json.loads(out.splitlines()[-1])
    return data


def check(imported: dict[str, Any], ids: Ids, catalog: ucformat.Catalog) -> None:
    """Check what was imported of the experiment `exp`."""
    loss = metric(catalog, "loss")
    assert [c["name"] for c in imported["checkpoints"]] == [
        f"{run}@{step}" for run in ("run7", "run8") for step in (100, 200, 300)
    ]
    assert (loss[100], loss[300]) == (2.0, math.inf)
    assert math.isnan(loss[200])
    assert metric(catalog, "low") == {100: None, 200: None, 300: -math.inf}
    assert metric(catalog, "accuracy") == {100: 0.5, 200: 0.5, 300: 0.5}
    assert metric(catalog, "tied")[100] == 3.0
    assert metric(catalog, "system/cpu")[100] is None
    assert metric(catalog, "loss", "run8") == {100: 8.0, 200: 8.0, 300: 8.0}
    config = of_run(catalog)[100].config["mlflow"]
    assert config["run_id"] == ids["run7"]
    assert config["params"] == {
        "lr": 0.0003,
        "bf16": True,
        "steps": 300,
        "long": "y" * 5000,
        "hub_token": "(redacted)",
        "version": "007",
    }
    assert "mlflow" not in of_run(catalog, "run8")[100].config  # no parameters were logged
    assert imported["left_out"] == {"deleted runs": 1, "metrics of the system": 1}
    earlier = [c["earlier"] for c in imported["checkpoints"]][:3]
    assert earlier[0] == {"accuracy": 50}
    assert earlier[1] == {"accuracy": 50, "tied": 100}


def test_a_database(store: tuple[Path, Ids], catalog: ucformat.Catalog) -> None:
    file, ids = store
    before = file.read_bytes()
    url = f"sqlite:///{file}"
    check(command(url, "--experiment", "exp"), ids, catalog)
    assert file.read_bytes() == before
    events = catalog.events(limit=1000)
    again = command(url, "--experiment", "exp")
    assert all(c["metrics"] == {} and c["params"] == 0 for c in again["checkpoints"])
    assert catalog.events(limit=1000) == events
    # two runs of one name, of which neither is that of the catalog
    second = command(url, "--experiment", "second", "--dry-run")
    assert len(second["unmatched"]) == 2
    assert second["left_out"]["references to checkpoints that the catalog does not have"] == 1
    catalog.record(manifest(50, "twice", 100), "/nowhere/twice/100")
    error = command(url, "--experiment", "second", code=2)["error"]
    assert "MLflow has 2 runs 'twice'" in error["message"]
    assert ids["twice"] in error["hint"]
    command(url, "--run", ids["twice"])
    assert metric(catalog, "loss", "twice") == {100: 1.0}


@pytest.mark.filterwarnings("ignore")  # of MLflow about the libraries below it
def test_only_histories_that_are_wanted_are_asked_for(
    store: tuple[Path, Ids], catalog: ucformat.Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    asked, history = list[str](), MlflowClient.get_metric_history

    def noted(self: Any, run_id: str, key: str) -> Any:
        asked.append(key)
        return history(self, run_id, key)

    monkeypatch.setattr(MlflowClient, "get_metric_history", noted)
    url = f"sqlite:///{store[0]}"
    for pattern, names in (("acc*", {"accuracy"}), ("lo[sw]*", {"loss", "low"})):
        asked.clear()
        imported = ucformat.import_runs(
            "mlflow", url, catalog, experiments=["exp"], metrics=[pattern], rewound="keep"
        )
        assert {*asked} == names
        assert {name for c in imported.checkpoints for name in c.metrics} <= names
    with pytest.raises(NotFound, match="no metric 'nothing'") as error:
        ucformat.import_runs("mlflow", url, catalog, experiments=["exp"], metrics=["nothing"])
    assert "tied" in str(error.value.hint)


@pytest.mark.parametrize(
    "change",
    [
        # as MLflow 2.20 has it, as far as the client looks
        "drop table assessments; update alembic_version set version_num = 'cbc13b556ace'",
        "delete from experiments where experiment_id = 0",
    ],
)
def test_a_database_is_never_changed(
    store: tuple[Path, Ids], tmp_path: Path, catalog: ucformat.Catalog, change: str
) -> None:
    file = tmp_path / "a b?#%.db"
    shutil.copy(store[0], file)
    with closing(sqlite3.connect(file)) as database:
        database.executescript(change)
    before = file.read_bytes()
    error = command(f"sqlite:///{file}", "--dry-run", code=6)["error"]
    assert "is only read here" in error["message"]
    assert f"mlflow db upgrade sqlite:///{file}" in error["hint"]
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("catalog")] == [file.name]


def test_references_that_were_logged(store: tuple[Path, Ids], catalog: ucformat.Catalog) -> None:
    file, ids = store
    url = f"sqlite:///{file}"
    imported = command(url, "--run", "referring")
    assert [c["id"] for c in imported["checkpoints"]] == [REFERRED]
    assert metric(catalog, "score") == {100: None, 200: 0.25, 300: None}
    # another run has the checkpoint by its name
    error = command(url, "--run", "run7", "--run", "referring", code=2)["error"]
    assert f"belongs to two runs of MLflow: referring ({ids['referring']})" in error["message"]


def test_what_is_no_store(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    (tmp_path / "other.db").write_bytes(b"")
    for url in (
        tmp_path,
        tmp_path / "absent",
        f"sqlite:///{tmp_path}/absent.db",
        f"sqlite:///{tmp_path}/other.db",
    ):
        with pytest.raises(NotFound, match="of MLflow"):
            ucformat.import_runs("mlflow", str(url), catalog)
    there = {p.name for p in tmp_path.iterdir() if not p.name.startswith("catalog.db")}
    assert there == {"other.db"}
    with pytest.raises(UnsupportedError) as failure:
        ucformat.import_runs("mlflow", "postgresql://me:hunter22@host/db", catalog)
    assert "hunter22" not in str(failure.value)
    assert "mlflow server" in str(failure.value.hint)


@pytest.mark.matrix
def test_a_folder(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    pytest.importorskip("mlflow", reason=NEEDS_MLFLOW)
    folder = tmp_path / "mlruns"
    allowed: dict[str, Any] = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    ids = write(folder.as_uri(), tmp_path, **allowed)
    assert "MLFLOW_ALLOW_FILE_STORE" in command(folder, code=1)["error"]["message"]
    check(command(folder, "--experiment", "exp", **allowed), ids, catalog)
    assert (
        "no experiment 'third'"
        in command(folder, "--experiment", "third", code=3, **allowed)["error"]["message"]
    )


@pytest.fixture
def server(store: tuple[Path, Ids], tmp_path: Path) -> Iterator[str]:
    """The url of a server of MLflow with the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--backend-store-uri", f"sqlite:///{store[0]}", "--host", "127.0.0.1"]
    log = (tmp_path / "server.log").open("w")
    with (
        log,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlflow",
                "server",
                *words,
                "--port",
                str(port),
                "--workers",
                "1",
            ],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            start_new_session=True,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 60 * PATIENCE
            while time.monotonic() < deadline and process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.2)
            else:
                pytest.fail((tmp_path / "server.log").read_text())
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 15)


@pytest.mark.matrix
def test_a_server(store: tuple[Path, Ids], server: str, catalog: ucformat.Catalog) -> None:
    check(command(server, "--experiment", "exp"), store[1], catalog)


def test_a_server_that_does_not_answer(catalog: ucformat.Catalog) -> None:
    pytest.importorskip("mlflow", reason=NEEDS_MLFLOW)
    error = command("http://me:hunter22@127.0.0.1:9", code=1, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")[
        "error"
    ]
    assert error["message"].startswith("MLflow: ")
    assert "hunter22" not in str(error)
