"""What is refused, told and returned; the guide."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.megatron.live.running import differences
from tests.torch.running import fork

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def told(name: str, folder: Path) -> Any:
    script = ["-m", "tests.engines.megatron.live.edges", name, str(folder)]
    fork(1, script, folder / "log", ("tests.engines.megatron.live.beside",))
    return json.loads((folder / "told.json").read_text())


def test_optimizers_that_are_refused(tmp_path: Path) -> None:
    """Before anything is written; a state dict of flat buckets has no names of parameters."""
    found = told("optimizers", tmp_path)
    assert found.pop("written") == []
    expected = {
        "buckets": "is in a flat bucket of the distributed optimizer, without the names",
        "without its model": "that is not in the model's sharded state dict",
        "precision-aware": "the precision-aware optimizer cannot be saved",
        "another shape": "has the state 'exp_avg_max' of another shape",
        "steps": "have the steps [1.0, 2.0]",
        "names=": "does not take names",
    }
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        _, message, hint = found[name]
        assert part in message
        assert hint


def test_older_tensors_are_loaded_only_if_that_is_asked_for(tmp_path: Path) -> None:
    found = told("older", tmp_path)
    assert "are older, by 1 to 1 steps" in found["default"]
    assert found["asked"] == "loaded"


def test_strictness_of_megatrons_own_functions(tmp_path: Path) -> None:
    found = told("strictness", tmp_path)
    tensors = {key: shape for key, shape in found["own"].items() if shape is not None}
    assert len(tensors) > 20
    assert found["listed"] == found["own"]
    assert found["groups"] == [0.01, 0.01]  # of an optimizer that is not passed itself
    assert found["all"] == [[], []]
    assert (found["raise_all"], found["assume_ok_unexpected"]) == (True, True)
    assert found["direct"] == [1, 1]
    assert "FullyParallelLoadStrategyWrapper" in found["part"][1]
    missing, unexpected = found["without"]
    assert unexpected == ["more"]
    assert missing == sorted(k for k in found["own"] if k.startswith("optimizer"))
    assert found["empty"] == tensors  # those of norms too, whose keys are the other specification's
    assert len(found["fused"]) == 4
    assert found["from fused"]


def test_keys_of_single_layers_experts_and_halves(tmp_path: Path) -> None:
    """Listed as they were saved; what is exported has the keys of whole stacks, and says nothing else."""
    found = told("single_keys", tmp_path)
    assert any(key.endswith("experts.experts.1.linear_fc1.weight_w") for key in found["own"])
    assert found["listed"] == found["own"]
    assert found["others"] == [[], []]
    assert found["same"]
    assert "singleton_local_shards" not in found["said"]


def test_before_the_first_step(tmp_path: Path) -> None:
    """Megatron-Core itself cannot save such an optimizer without Apex and Transformer Engine."""
    found = told("before_the_first_step", tmp_path)
    assert (found["complete"], found["same"], found["left"]) == (True, True, 0)
    assert found["again"] == found["losses"]
    assert found["refused"][0] == "StateMismatch"


def test_a_step_that_is_lost_in_groups(tmp_path: Path) -> None:
    found = told("step_of_groups", tmp_path)
    assert not found["certified"]
    assert "the step" in found["lost"]
    assert found["steps"] == found["loaded"] == [1] * len(found["steps"])
    assert found["before"] == [None] * len(found["steps"])


def test_weights_alone(tmp_path: Path) -> None:
    found = told("weights_alone", tmp_path)
    assert (found["complete"], found["same"], found["lineage"]) == (True, True, "finetune")
    assert "the checkpoint contains only weights" in found["refused"][1]
    assert differences(tmp_path / "all", tmp_path / "later") == []


def test_the_padding_of_a_vocabulary(tmp_path: Path) -> None:
    found = told("padding", tmp_path)
    assert found["rows"]["weight"] == found["rows"]["exp_avg"] == found["told"] == [19, 8]
    assert found["rows"]["weight.padding"] == found["rows"]["master.padding"] == [5, 8]
    assert found["unknown"] == [24, 8]


def test_objects(tmp_path: Path) -> None:
    found = told("objects", tmp_path)
    message = found.pop("refused")[1]
    assert "missing: the object rng_state/shard_1.0_2.1" in message
    assert found.pop("scale") == [4.0, 4.0]
    assert found == {"scheduler": True, "iteration": 7, "args": True, "rng": True, "here": 6}


def test_the_guide(tmp_path: Path) -> None:
    found = told("guide", tmp_path)
    assert len(found["whole"]) == 4
    assert found["resumed"] == found["whole"][2:]
