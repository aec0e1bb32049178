"""torchtitan's own trainer goes on from what its configuration of our manager has saved, on other ranks too.

`make .engines/torchtitan/.installed` installs it; `UCFORMAT_TORCHTITAN_PYTHON` names another
interpreter that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import ucformat
from tests.patience import PATIENCE

pytestmark = [pytest.mark.matrix, pytest.mark.engine]
_ROOT = Path(__file__).parents[3]
_SEQUENCE = 32  # tokens, as the program has it


def _python() -> Path:
    told = os.environ.get("UCFORMAT_TORCHTITAN_PYTHON")
    python = Path(told) if told else _ROOT / ".engines" / "torchtitan" / "bin" / "python"
    if not python.exists():
        pytest.skip(
            "torchtitan is not installed: run `make .engines/torchtitan/.installed` (300 MB)"
        )
    return python


def trained(
    ranks: int, folder: Path, steps: int, /, kill: str = "", **options: Any
) -> dict[str, Any]:
    """What the trainer tells of a training; nothing if it is killed (`tests/torch/killed.py`)."""
    command = [
        str(_python()),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    script = [str(Path(__file__).parent / "train_torchtitan.py"), str(folder), str(steps)]
    if kill:
        script = ["-m", "tests.torch.killed", *kill.split(), *script]
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder.parent / "cache"),
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        [*command, *script, *(f"{key}={json.dumps(value)}" for key, value in options.items())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if kill:
        assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-6000:]
        return {}
    assert done.returncode == 0, done.stderr[-6000:]
    told: dict[str, Any] = json.loads((folder / "watched.json").read_text())
    return told


def write_inputs(folder: Path) -> None:
    """A tokenizer of numbers, and texts of two kinds in turn, so that ranks with even batches see the same together."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {str(n): n + 3 for n in range(2000)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = WhitespaceSplit()
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": True,
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    texts = [" ".join(str((kind + 1) * n) for n in range(1, _SEQUENCE)) for kind in range(2)]
    (folder / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in texts * 60]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines))


def test_the_trainer_goes_on(tmp_path: Path) -> None:
    """Two ranks train; two go on from the middle bit for bit, in another form; one and three with the same state."""
    write_inputs(tmp_path)
    whole = trained(2, tmp_path / "run", 4)
    saved, last = whole["states"]["2"], whole["states"]["4"]
    assert len(saved) > 100
    assert any("wq" in name for name in saved)  # split by a hook of the model
    assert any(name.startswith("exp_avg_sq/") and "wqkv" in name for name in saved)
    place = tmp_path / "run" / "checkpoint" / "step-00000002"
    assert ucformat.open(place).metadata.step == 2

    loaded: dict[str, Any] = {"initial_load_path": str(place), "initial_load_model_only": False}
    again = trained(
        2,
        tmp_path / "again",
        4,
        **loaded,
        form="packed",
        async_mode="async",
        run="titan",
        interval=1,
        increments={"patch": True},
        save_options={"config": {"lr": 1}},
        folder="ck",
    )
    assert again["states"]["2"] == saved
    assert again["states"]["4"] == last
    assert again["losses"] == {step: whole["losses"][step] for step in ("3", "4")}
    assert again["tokens"] == whole["tokens"]
    assert ucformat.open(tmp_path / "again" / "ck" / "step-00000004").manifest.run == "titan"
    manifest = ucformat.open(tmp_path / "again" / "ck" / "step-00000004").manifest
    assert [base.url for base in manifest.bases] == ["../step-00000003"]
    assert manifest.config == {"lr": 1}

    (tmp_path / "ranks-3" / "checkpoint").mkdir(parents=True)
    shutil.copytree(
        place, tmp_path / "ranks-3" / "checkpoint" / place.name
    )  # a run's own checkpoint needs no path
    for ranks, where in ((1, loaded), (3, {"interval": 1, "keep_latest_k": 2})):
        other = trained(
            ranks, tmp_path / f"ranks-{ranks}", 4, **where, exclude_from_loading=["dataloader"]
        )
        assert other["states"]["2"] == saved
        assert other["losses"] == pytest.approx(
            {step: whole["losses"][step] for step in ("3", "4")}, rel=1e-3
        )
    other = trained(
        2,
        tmp_path / "tensor",
        4,
        **loaded,
        cut={"tensor": 2},
        exclude_from_loading=["dataloader"],
    )
    assert other["states"]["2"] == saved
    kept = sorted(path.name for path in (tmp_path / "ranks-3" / "checkpoint").iterdir())
    assert kept == ["step-00000003", "step-00000004"]
    assert whole["losses"]["4"] < whole["losses"]["1"]
    assert whole["refused"] == ["checkpoint.last_save_in_hf", "checkpoint.export_dtype"]
    assert whole["off"] == [False, False]


def test_the_trainer_is_killed_and_goes_on_on_other_ranks(tmp_path: Path) -> None:
    """On one rank, on two and on three, in one folder; the data loader goes on where it was."""
    write_inputs(tmp_path)
    whole = trained(1, tmp_path / "whole", 6)
    run = tmp_path / "run"
    trained(1, run, 6, kill="before 2", merge=True)
    places = [run / "checkpoint" / f"step-0000000{step}" for step in (2, 4, 6)]
    assert [(place / "manifest.json").exists() for place in places] == [True, False, False]
    trained(2, run, 6, kill="after 1", merge=True)
    assert ucformat.open(places[1]).manifest.layout["world"] == 2
    last = trained(3, run, 6, merge=True)
    assert ucformat.open(places[2]).manifest.layout["world"] == 3
    assert last["losses"] == pytest.approx(
        {step: whole["losses"][step] for step in ("5", "6")}, rel=1e-3
    )
    assert [edge.kind for edge in ucformat.open(places[2]).manifest.lineage] == ["reshard"]
