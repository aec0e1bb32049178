"""Configuration and metrics of engines' checkpoints: found the moment that they are registered or converted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from ucformat.sources.configuration import TrainingInfo

if TYPE_CHECKING:
    from tests.cli.conftest import Run

DATA = Path(__file__).parents[1] / "data"
SENTENCE = "config.zero_optimization.stage = 1 and config.optimizer.params.lr < 3e-2"

FOUND = [
    ("deepspeed/tp2-dp2-z1", SENTENCE),
    ("deepspeed/universal-z1", SENTENCE),
    (
        "megatron/tp2-tied/classic",
        "config.hidden_size = 8 and config.params_dtype = 'float32' and config.lr < 0.1",
    ),
    (
        "megatron/tp2-tied/sharded",
        "config.hidden_size = 8 and config.params_dtype = 'float32' and config.lr < 0.1",
    ),
    (
        "huggingface/trainer",
        "config.learning_rate = 0.01 and config.lr_scheduler_type = 'linear' and metric.loss > 3",
    ),
    (
        "huggingface/trainer",
        "config.model_type = 'llama' and config.vocab_size > 1 and metric.epoch = 0.1875",
    ),
    ("huggingface/trainer_adapter", "config.peft_type = 'LORA' and config.max_steps = 3"),
    (
        "huggingface/trainer_zero2",
        "config.zero_optimization.stage = 2 and config.training_args.fp16 = false",
    ),
    (
        "huggingface/trainer_zero2",
        "config.fp16.enabled = false and config.learning_rate = 0.01 and metric.loss > 3",
    ),
]


@pytest.fixture(autouse=True)
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))


def _sample(name: str, copy: Path | None = None) -> str:
    """Where a sample lies; what is said of it is written beside it, into a copy."""
    at = DATA / name
    at = at / "ckpt" if (at / "ckpt").exists() else at
    return str(at if copy is None else shutil.copytree(at, copy / "run" / "src"))


@pytest.mark.parametrize(("name", "where"), FOUND)
def test_a_registered_checkpoint_is_found_by_its_configuration(
    run: Run, name: str, where: str
) -> None:
    entry = run("register", "-q", _sample(name)).stdout
    assert run("ls", "-q", where).stdout == entry != ""
    assert run("ls", "-q", f"not ({where})").stdout == ""


def test_a_converted_one_is_too(run: Run, tmp_path: Path) -> None:
    entry = run("convert", "-q", _sample("huggingface/trainer_zero2"), tmp_path / "dst").stdout
    assert run("ls", "-q", "config.zero_optimization.stage = 2 and metric.loss > 3").stdout == entry
    manifest = json.loads((tmp_path / "dst" / "manifest.json").read_text())
    assert manifest["config"]["steps_per_print"] == "inf"
    assert manifest["config"]["training_args"] == {
        "bf16": False,
        "fp16": False,
    }  # DeepSpeed's are mappings


def test_what_somebody_says_wins_and_hides_nothing(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(
        "optimizer: lion\nseed: 7\nhub_token: hf_0123456789abcdefgh\nstart: 2026-01-02\nnone: .nan\n"
    )
    said = ["--config", file, "--metric", "val_loss=2.5", "--metric", "mmlu=nan"]
    where = "config.optimizer = 'lion' and config.source.optimizer.type = 'AdamW'"
    where = f"{where} and config.seed = 7 and config.none = 'nan'"
    source = _sample("deepspeed/tp2-dp2-z1", tmp_path)
    first = run("register", "-q", source, *said).stdout
    assert run("ls", "-q", f"{where} and metric.val_loss = 2.5").stdout == first
    converted = run("convert", "-q", source, tmp_path / "a", *said).stdout
    virtual = run("register", "-q", source, tmp_path / "b", "--virtual", *said).stdout
    assert set(run("ls", "-q", where).stdout.split()) == {
        first.strip(),
        converted.strip(),
        virtual.strip(),
    }
    for place in ("a", "b"):
        ck = ucformat.open(tmp_path / place)
        assert ck.manifest.metrics["val_loss"] == 2.5
        assert ck.manifest.config["hub_token"] == "(redacted)"  # noqa: S105
        assert ck.manifest.config["start"] == "2026-01-02"


def test_what_is_known_already_gets_what_is_said_now(run: Run, tmp_path: Path) -> None:
    source = _sample("deepspeed/tp2-dp2-z1", tmp_path)
    entry = run("register", "-q", source).stdout
    file = tmp_path / "more.json"
    file.write_text('{"seed": 8}')
    run("register", source, "--config", file, "--metric", "val_loss=1")
    assert (
        run(
            "ls",
            "-q",
            "config.seed = 8 and config.zero_optimization.stage = 1 and metric.val_loss = 1",
        ).stdout
        == entry
    )
    run("register", source)  # the files say no more than they did, and take nothing back
    assert run("ls", "-q", "config.seed = 8").stdout == entry


def test_one_that_was_registered_without_gets_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _sample("huggingface/trainer")
    with monkeypatch.context() as before:
        before.setattr(
            "ucformat.sources.configuration.read_training_info",
            lambda *_: TrainingInfo(),
        )
        entry = run("register", "-q", source).stdout
    assert json.loads(run("ls", "--json").stdout)["checkpoints"][0]["config"] == {}
    run("register", source)
    assert run("ls", "-q", "config.learning_rate = 0.01 and metric.loss > 3").stdout == entry


def test_what_cannot_be_a_configuration_is_an_error(
    run: Run, committed: Path, tmp_path: Path
) -> None:
    committed = shutil.copytree(committed, tmp_path / "copy")
    file = tmp_path / "more.yaml"
    file.write_text("- 1\n")
    assert "is not a mapping" in run("register", committed, "--config", file, code=2).stderr
    file.write_text("a: 1\n")
    assert (
        "its manifest has the configuration"
        in run("register", committed, "--config", file, code=2).stderr
    )
    assert (
        "there is no configuration"
        in run("convert", committed, tmp_path / "x", "--config", tmp_path / "no", code=3).stderr
    )
    assert "NAME=VALUE" in run("register", committed, "--metric", "loss", code=2).stderr
    assert (
        run("register", "-q", committed, "--metric", "loss=1.5").stdout.strip()
        == ucformat.open(committed).id
    )
    assert run("ls", "-q", "metric.loss = 1.5").stdout.strip() == ucformat.open(committed).id
