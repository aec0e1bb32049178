"""What of a checkpoint's values is its configuration, as plain JSON and without secrets, and what are metrics."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ucformat
from ucformat.sources.configuration import REDACTED, merge_configs, plain_config, read_training_info

if TYPE_CHECKING:
    from collections.abc import Mapping


def _saved(tmp_path: Path, **more: Any) -> ucformat.Checkpoint:
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, **more}, file)
    return ucformat.open(file)


def test_lightning_s_hyper_parameters_and_what_it_watches(tmp_path: Path) -> None:
    callbacks = {"ModelCheckpoint{'monitor': 'val_loss'}": {
        "monitor": "val_loss", "current_score": torch.tensor(1.5), "best_model_score": torch.tensor(float("nan")),
    }}  # fmt: skip
    hyper = {"lr": 1e-3, "width": 8, "_private": 1}
    more = {
        "hyper_parameters": hyper,
        "datamodule_hyper_parameters": {"lr": 5, "batch": 4},
        "callbacks": callbacks,
    }
    ck = _saved(tmp_path, **{"pytorch-lightning_version": "2.6", "global_step": 3, **more})
    assert ck.manifest.config == {**hyper, "batch": 4, "datamodule_hyper_parameters": {"lr": 5}}
    assert ck.manifest.metrics["val_loss"] == 1.5
    assert math.isnan(ck.manifest.metrics["best_metric"])


def test_values_that_are_no_json_become_plain(tmp_path: Path) -> None:
    args = Namespace(
        dtype=torch.bfloat16, where=Path("/data"), seed=torch.tensor(3), scale=float("inf"),
        inner=Namespace(a=(1, 2), _b=1), seen={1, 2},
        blob=b"x", big=torch.ones(9), n={3: "c"},
    )  # fmt: skip
    found = _saved(tmp_path, args=args, best_val_loss=0.25, epoch=4).manifest
    assert json.loads(json.dumps(found.config, allow_nan=False)) == {
        "dtype": "bfloat16", "where": "/data", "seed": 3, "scale": "inf",
        "inner": {"a": [1, 2]}, "seen": [1, 2], "n": {"3": "c"},
    }  # fmt: skip
    for given in (["x"], {"$tuple": ["x"]}):
        assert plain_config(
            {"f": {"$class": "torch.relu"}, "e": {"$class": "a.Enum", "$args": given}}
        ) == {
            "f": "torch.relu",
            "e": "x",
        }
    assert found.metrics == {"best_val_loss": 0.25}


SECRETS = {
    "hub_token": "abc", "hf_token": "abc", "push_to_hub_token": "abc", "hubToken": "abc", "token": "abc",
    "wandb_api_key": "k",
    "WANDB_API_KEY": "k", "apiKey": "k", "aws_secret_access_key": "k", "password": "p", "access_tokens": ["a"],
    "free": "hf_abcdefghijklmnopqrst", "credentials": {"user": "u"},
}  # fmt: skip
HARMLESS = {
    "pad_token": "<pad>", "eos_token": "</s>", "additional_special_tokens": ["<a>"], "max_tokens": 5, "token": None,
    "suppress_tokens": [1, 2], "num_key_value_heads": 2, "hub_token": None, "use_auth_token": False, "author": "me",
    "image_token": "<image>", "eos_token_id": 2, "key": "k", "keyboard": "qwerty", "tokenizer": "bpe", "authority": 1,
}  # fmt: skip


def test_secrets_are_never_taken(tmp_path: Path) -> None:
    assert plain_config(SECRETS) == dict.fromkeys(SECRETS, REDACTED)
    assert plain_config(HARMLESS) == HARMLESS
    assert plain_config({"a": [{"b": "https://me:pw@host/x"}]}) == {
        "a": [{"b": f"https://{REDACTED}@host/x"}]
    }
    ck = _saved(tmp_path, args=Namespace(wandb=Namespace(api_key="12345"), lr=1))
    ucformat.convert(ck, tmp_path / "dst")
    assert json.loads((tmp_path / "dst" / "manifest.json").read_text())["config"] == {
        "wandb": {"api_key": REDACTED},
        "lr": 1,
    }


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([], {}),
        ([("ds_config", {"a": 1}), ("args", {"a": 1, "b": 2})], {"a": 1, "b": 2}),
        ([("ds_config", {"a": 1}), ("args", {"a": 2})], {"a": 1, "args": {"a": 2}}),
        ([("x", {"a": 1, "y": 0}), ("y", {"a": 2})], {"a": 1, "y": 0, "y~2": {"a": 2}}),
        ([("x", {"a": None}), ("y", {"a": 1})], {"a": None, "y": {"a": 1}}),
    ],
)
def test_kinds_stand_side_by_side_and_hide_nothing(
    kinds: list[tuple[str, dict[str, Any]]], found: dict[str, Any]
) -> None:
    assert merge_configs(kinds) == found


def test_deepspeed_s_comes_before_megatron_s_arguments() -> None:
    state = {"bf16": True, "lr": 1e-4, "wandb_exp_name": "run7"}
    args = {"$class": "argparse.Namespace", "$state": state}
    found = read_training_info(
        {"ds_config": {"bf16": {"enabled": True}}, "client_state": {"args": args}}, {}
    )
    assert found.config["bf16"] == {"enabled": True}
    assert found.config["args"] == {"bf16": True}
    assert (found.config["lr"], found.run) == (1e-4, "run7")


def test_trainer_s_last_values_are_metrics_and_its_run_is_the_run() -> None:
    history = [
        {"loss": 3.0, "step": 1, "epoch": 0.1},
        {"loss": 2.0, "step": 2, "epoch": 0.2},
        {"eval_loss": 1.0, "step": 2},
    ]
    state = {"log_history": history, "best_metric": 0.5}
    found = read_training_info(
        {
            "trainer_state": state,
            "training_args": {"$state": {"run_name": "r1", "output_dir": "out"}, "$class": "x"},
        },
        {},
    )
    assert found.metrics == {"loss": 2.0, "epoch": 0.2, "eval_loss": 1.0, "best_metric": 0.5}
    assert found.run == "r1"
    assert (
        read_training_info(
            {"training_args": {"$state": {"run_name": "out", "output_dir": "out"}, "$class": "x"}},
            {},
        ).run
        is None
    )


def test_metrics_are_numbers_that_a_float_can_be() -> None:
    metrics = {
        "large": 2**1023,
        "no float": 2**1024,
        "nan": {"$float": "nan"},
        "below": {"$float": "-inf"},
    }
    found = read_training_info(
        {"orbax": {"metrics": {**metrics, "flag": True, "text": "1", "none": None}}}, {}
    )
    assert repr(found.metrics) == repr(
        {"large": 2.0**1023, "nan": float("nan"), "below": float("-inf")}
    )


def test_orbax_s_metadata_and_metrics() -> None:
    objects: Mapping[str, Any] = {"orbax": {
        "metrics": {"accuracy": 0.5}, "custom_metadata": {"lr": 1}, "trees": {"state": {"width": 4}},
        "items": {"config": {"layers": 2}, "metrics": {"loss": 0.25}},
    }}  # fmt: skip
    found = read_training_info(objects, {})
    assert found.config == {"lr": 1, "width": 4, "layers": 2}
    assert found.metrics == {"accuracy": 0.5, "loss": 0.25}


def test_a_model_s_files_and_its_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(
        {"w": np.ones(2, np.float32)},
        tmp_path / "model.safetensors",
        {"format": "pt", "lr": "1e-4"},
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama", "use_cache": true}')
    (tmp_path / "generation_config.json").write_text('{"use_cache": false}')
    found = ucformat.open(tmp_path).manifest.config
    assert found == {
        "lr": "1e-4",
        "model_type": "llama",
        "use_cache": True,
        "generation_config": {"use_cache": False},
    }
    (tmp_path / "config.json").write_text("no")
    assert ucformat.open(tmp_path).manifest.config == {"lr": "1e-4", "use_cache": False}
    assert "config.json is not valid JSON" in caplog.text


@pytest.mark.parametrize(
    "text",
    ['{"a": {"$tensor": 5}}', '{"a": {"$dict": 1}, "$class": {}}', '{"$float": "x"}', "[1]", "nan"],
)
def test_what_a_file_makes_up_is_no_crash(tmp_path: Path, text: str) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    found = ucformat.open(tmp_path).manifest.config
    assert found == (json.loads(text) if text.startswith("{") else {})


def test_a_value_that_cannot_be_told_does_not_hide_the_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"a": ' * 300 + "1" + "}" * 300)
    ck = ucformat.open(tmp_path)
    assert (ck.manifest.config, len(ck.manifest.tensors)) == ({}, 1)
    assert "its configuration cannot be read" in caplog.text
