"""Lightning saves by ucformat, from all ranks or from one, and goes on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch.running import fork

PROGRAM = Path(__file__).parent / "live_program.py"
MODULES = ("lightning.pytorch", "lightning.pytorch.strategies")


def test_lightning(tmp_path: Path) -> None:
    """One program, for imports take long; what it found is the same on both ranks."""
    fork(2, [str(PROGRAM), str(tmp_path)], tmp_path / "log.txt", MODULES)
    found, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert found == second
    for kind in ("ddp", "background", "fsdp"):
        a_training_goes_on_bit_for_bit(found, kind)
    for pair in ("io-ddp", "io-fsdp", "fsdp-ddp", "io-tp", "fsdp-tp"):
        a_training_goes_on_under_another_strategy(found, pair)
    what_one_rank_saves_is_universal(found)
    one_rank_saves_on_a_base(found)
    what_cannot_be_is_refused(found)
    states_with_loss_are_loaded_if_that_is_asked_for(found)
    older_tensors_are_loaded_only_if_that_is_asked_for(found)


def a_training_goes_on_bit_for_bit(found: dict[str, Any], kind: str) -> None:
    result = found[kind]
    assert result["differences"] == []
    now, expected = result["losses"]
    assert now == expected
    assert len(now) == 6
    assert result["saved"] == [f"epoch={n}.ckpt" for n in range(4)]
    based = kind == "background"
    assert result["removed"] is not based  # the others need it
    assert result["bases"] == ["../epoch=0.ckpt"] * based
    assert result["run"] == ("lit" if based else None)
    assert result["stock"] == [True, 0.0, 0.2]
    assert result["cut"] == [kind == "fsdp"] * 4


def a_training_goes_on_under_another_strategy(found: dict[str, Any], pair: str) -> None:
    result = found["across"][pair]
    now, expected = result["losses"]
    assert result["step"] == 12
    if pair.endswith("tp"):  # adds up in another order
        assert now == pytest.approx(expected, rel=1e-5)
    else:
        assert now == expected
        assert result["differences"] == []


def what_one_rank_saves_is_universal(found: dict[str, Any]) -> None:
    result = found["across"]
    names = ("net.0.bias", "net.0.weight", "net.3.bias", "net.3.weight")
    assert result["names"] == [
        f"{s}/{n}" for s in ("exp_avg", "exp_avg_sq", "step", "weight") for n in names
    ]
    assert result["groups"] == [["net.0.weight"], ["net.0.bias"], ["net.3.weight"], ["net.3.bias"]]
    assert result["step"] == 12
    assert result["told"] == [{"dropout": 0.0}, ["loss"]]
    assert result["removed"]


def what_cannot_be_is_refused(found: dict[str, Any]) -> None:
    assert found["across"]["numbers"].startswith("UnsupportedError: ")
    assert "UniversalDDPStrategy" in found["across"]["numbers"]
    assert found["across"]["unnamed"].startswith(
        "UnsupportedError: optimizer 0 does not know the names of its parameters"
    )
    said = (
        "TypeError: UniversalCheckpointIO() got an unexpected keyword argument 'increments'",
        "UsageError: UniversalCheckpointIO does not take timeout",
        "UsageError: UniversalDDPStrategy does not take increments",
        "UsageError: UniversalDDPStrategy does not take group",
        "UsageError: patch=True needs a base",
        "TypeError: ",
        "UnsupportedError: ",
    )
    for refusal, start in zip(found["one rank"]["refused"], said, strict=True):
        assert refusal.startswith(start)
    assert "'basis'" in found["one rank"]["refused"][-2]
    assert "lossy=True" in found["one rank"]["refused"][-1]


def one_rank_saves_on_a_base(found: dict[str, Any]) -> None:
    assert found["one rank"]["bases"] == ["../a"]
    assert found["one rank"]["equal"]


def states_with_loss_are_loaded_if_that_is_asked_for(found: dict[str, Any]) -> None:
    assert found["lossy"] == {"states": ["exp_avg", "exp_avg_sq"], "step": 12}
    assert 0 < found["one rank"]["loss"] < 0.01


def older_tensors_are_loaded_only_if_that_is_asked_for(found: dict[str, Any]) -> None:
    refused, loaded = found["partial"]
    assert "are older, by 1 to 1 steps" in refused
    assert loaded == {"state_dict": {}}
