"""Offline runs of a real W&B."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ucformat
from tests.catalog.manifests import manifest
from tests.trackers.conftest import metric, of_run
from ucformat.errors import IntegrityError, NotFound, UnsupportedError, UsageError

PROGRAM = Path(__file__).with_name("wandb_program.py")
REFERRED = manifest(1).id  # run7@200


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `wandb` of some runs."""
    pytest.importorskip("wandb", reason="needs W&B: pip install wandb")
    folder = tmp_path_factory.mktemp("wandb")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), REFERRED],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "WANDB_SILENT": "true"},
    )
    assert done.returncode == 0, done.stderr
    return folder / "wandb"


def test_the_history_and_the_configuration(runs: Path, catalog: ucformat.Catalog) -> None:
    imported = ucformat.import_runs("wandb", str(runs), catalog, runs={"run7": None})
    loss = metric(catalog, "loss")
    assert (loss[100], loss[200]) == (0.01, 0.005)
    assert math.isnan(loss[300])
    assert metric(catalog, "up")[300] == math.inf
    assert metric(catalog, "nested.a") == {100: 100.0, 200: 200.0, 300: 200.0}
    assert metric(catalog, "long")[300] == 1.0
    config = of_run(catalog)[100].config["wandb"]
    assert config == {
        "run_id": "one",
        "run_name": "run7",
        "params": {"lr": 1e-3, "model": {"layers": 4}, "late": 2, "api_key": "(redacted)"},
    }
    assert imported.left_out == {"texts, media and other values that are no numbers": 7}
    assert ucformat.import_runs("wandb", str(runs), catalog, runs={"one": None}).changed == 0


def test_the_step_of_the_training_is_not_the_count_of_rows(
    runs: Path, catalog: ucformat.Catalog
) -> None:
    with pytest.raises(
        UsageError, match="100 as train/global_step in its row of step 0"
    ) as failure:
        ucformat.import_runs("wandb", str(runs), catalog, runs={"run8": None})
    assert "--step-key train/global_step" in str(failure.value.hint)
    imported = ucformat.import_runs(
        "wandb", str(runs), catalog, runs={"run8": None}, step_key="train/global_step"
    )
    assert metric(catalog, "train/loss", "run8") == {s: s / 7 for s in (100, 200, 300)}
    # what was resumed had another configuration
    assert of_run(catalog, "run8")[100].config["wandb"]["params"] == {"first": 200}
    assert imported.left_out == {"parameters that a run which continues it has changed": 1}


def test_references_that_were_logged(runs: Path, catalog: ucformat.Catalog) -> None:
    imported = ucformat.import_runs("wandb", str(runs), catalog, runs={"three": None})
    assert [c.id for c in imported.checkpoints] == [REFERRED]
    assert metric(catalog, "score") == {100: None, 200: 0.5, 300: None}


def test_what_is_cut_off_damaged_or_absent(
    runs: Path, tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    [file] = runs.glob("*/run-one.wandb")
    shutil.copytree(file.parent, tmp_path / "wandb" / file.parent.name)
    copy = tmp_path / "wandb" / file.parent.name / file.name
    data = file.read_bytes()

    def import_() -> ucformat.ImportedRuns:
        return ucformat.import_runs("wandb", str(tmp_path), catalog, dry_run=True)

    for cut in (len(data) - 3, len(data) // 2, 40_000):
        copy.write_bytes(data[:cut])
        assert import_().left_out["unfinished records at the ends of logs"] == 1
    for at in (0, 6, 9, 20, 40_000):
        broken = bytearray(data)
        broken[at] ^= 1
        copy.write_bytes(broken)
        with pytest.raises(IntegrityError, match=r"run-one\.wandb is damaged at byte"):
            import_()
    with pytest.raises(NotFound, match="no runs of W&B"):
        ucformat.import_runs("wandb", str(tmp_path / "none"), catalog)


def test_a_server_is_refused(catalog: ucformat.Catalog) -> None:
    with pytest.raises(UnsupportedError, match=r"not read from its server") as failure:
        ucformat.import_runs("wandb", "https://me:hunter22@api.wandb.ai/p", catalog)
    assert "hunter22" not in str(failure.value)
