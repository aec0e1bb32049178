"""Hugging Face's Trainer and Accelerate save by ucformat and go on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.torch.running import fork

PROGRAM = Path(__file__).parent / "live_program.py"
MODULES = ("accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")


def test_hugging_face(tmp_path: Path) -> None:
    """One program, for imports take long; what it found is the same on both ranks."""
    fork(2, [str(PROGRAM), str(tmp_path)], tmp_path / "log.txt", MODULES)
    found, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert found == second
    for kind in ("OnABase", "InBackground"):
        a_trainer_goes_on_bit_for_bit(found, kind)
    a_trainer_keeps_as_many_as_it_is_told(found)
    what_a_trainer_saves_is_universal(found)
    a_trainer_saves_on_bases(found)
    a_trainer_goes_on_from_what_a_callback_saved(found)
    a_trainer_goes_on_from_what_the_trainer_itself_saved(found)
    a_model_cut_by_fsdp2_is_resumed(found)
    older_tensors_are_loaded_only_if_that_is_asked_for(found)
    for kind in ("whole", "fsdp2", "fsdp1"):
        accelerate(found, kind)
    fork(0, [str(PROGRAM), str(tmp_path), "merge"], tmp_path / "merge.txt", MODULES)
    a_stateful_loader_is_merged_on_another_number_of_ranks(
        json.loads((tmp_path / "merged.json").read_text())
    )


def a_trainer_goes_on_bit_for_bit(found: dict[str, Any], kind: str) -> None:
    result = found["trainer"][kind]
    assert result["differences"] == []
    assert result["losses"] == 9
    assert result["best"]
    assert result["epoch"] == [2.25, 2.25]
    assert result["last"] == [10, True]


def a_trainer_keeps_as_many_as_it_is_told(found: dict[str, Any]) -> None:
    assert found["trainer"]["OnABase"]["kept"] == [
        "checkpoint-3",
        "checkpoint-6",
        "checkpoint-9",
    ]
    assert found["trainer"]["InBackground"]["kept"] == ["checkpoint-6", "checkpoint-9"]


def what_a_trainer_saves_is_universal(found: dict[str, Any]) -> None:
    assert found["trainer"]["facts"] == {
        "run": "llama",
        "step": 9,
        "loss": True,
        "aliases": {"lm_head.weight": "model.embed_tokens.weight"},
        "states": ["exp_avg", "exp_avg_sq", "step", "weight"],
        "config": [24, 0.01],
    }


def a_trainer_saves_on_bases(found: dict[str, Any]) -> None:
    assert found["trainer"]["bases"] == [["../checkpoint-3"], ["../checkpoint-6"]]
    *refused, lossy = found["trainer"]["refused"]
    assert "lossy=True" in lossy
    assert found["trainer"]["lossy"] == [["exp_avg", "exp_avg_sq"], 4]
    assert refused == [
        "save() got an unexpected keyword argument 'increments'",
        "save() got an unexpected keyword argument 'basis'",
    ]
    assert found["callback"]["bases"] == ["../step-3"]


def a_trainer_goes_on_from_what_a_callback_saved(found: dict[str, Any]) -> None:
    assert found["callback"]["differences"] == []
    assert "optimizer.pt" not in found["callback"]["plain"]


def a_trainer_goes_on_from_what_the_trainer_itself_saved(found: dict[str, Any]) -> None:
    assert found["stock"]["differences"] == []
    assert "has no state of a Trainer" in found["stock"]["refused"]
    assert found["stock"]["parent"]


def a_model_cut_by_fsdp2_is_resumed(found: dict[str, Any]) -> None:
    assert found["sharded"] == {"differences": [], "cut": True, "losses": 9}


def older_tensors_are_loaded_only_if_that_is_asked_for(found: dict[str, Any]) -> None:
    assert "are older, by 1 to 1 steps" in found["partial"]["refused"]
    assert found["partial"]["step"] == 3


def a_stateful_loader_is_merged_on_another_number_of_ranks(merged: dict[str, Any]) -> None:
    assert "accelerator_state(accelerator, merge_dataloader=" in merged["refused"]
    assert merged["ranks"] == [2, 0, 1]
    assert merged["left"] == 12 - 3


def accelerate(found: dict[str, Any], kind: str) -> None:
    result = found["accelerate"][kind]
    assert result["differences"] == []
    now, expected = result["losses"]
    assert now == expected
    assert result["loaded"] == [4, 8]
    assert result["names"] == ["0.weight", "2.bias", "2.weight"]
    assert result["cut"] is (kind == "fsdp2")
    assert result["bases"] == [f"../accelerate-{kind}-base"]
