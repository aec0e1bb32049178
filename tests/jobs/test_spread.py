from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.megatron_deepspeed import FLAT, gpt, write
from tests.fakes import FakeSource, same
from ucformat.checkpoint import Checkpoint
from ucformat.jobs import compare
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(3)
VALUES = [RNG.standard_normal((6, 5)).astype(np.float32) for _ in range(3)]
MEAN = {"mean": r"/(?P<n>.*)\.(?P<i>\d)/", "into": r"\g<n>"}
APART = max(float(np.abs(a.astype(float) - b).max()) for a in VALUES for b in VALUES)


def averaged(values: list[Any]) -> Checkpoint:
    arrays = {(f"a.{i}", "weight"): a for i, a in enumerate(values)} | {
        ("b", "weight"): np.ones(3, np.float32)
    }
    return Checkpoint(FakeSource.write(MemoryStore("spread"), arrays)).view([MEAN])


def test_a_conversion_records_how_far_the_values_of_a_mean_lie_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "_INPUT_ELEMENTS", 7)
    made = ucformat.convert(averaged(VALUES), MemoryStore("spread-out"))
    assert made.objects["spread"] == {"a": {"weight": {"values": 3, "max_abs_difference": APART}}}
    again = ucformat.convert(made, MemoryStore("spread-again"))
    assert again.objects == made.objects


def test_only_of_what_is_converted(tmp_path: Path) -> None:
    model = gpt(hidden=8, heads=2, kv=2, inner=6, layers=1, vocab=11, seq=5)
    name = "language_model.embedding.position_embeddings.weight"
    model.cuts[name] = "mean"
    model.info["parameter_to_average_patterns"] = [name]
    model.info["tp_replicated_parameter_patterns"].remove(name)
    write(tmp_path / "ckpt", model, tp=2, dp=2)
    made = ucformat.convert(tmp_path / "ckpt", tmp_path / "all")
    found = made.objects["spread"]
    assert found.keys() == {name}
    assert found[name].keys() == {"weight", *FLAT}
    assert made.objects["global_steps"] == 3
    for state in FLAT:
        a = model.arrays[name, state]
        b = a + np.float32(1)
        assert same(made[name, state][...], (a + b) / np.float32(2))
        assert found[name][state] == {
            "values": 2,
            "max_abs_difference": float((b.astype(float) - a).max()),
        }
    some = ucformat.convert(tmp_path / "ckpt", tmp_path / "some", states=["exp_avg"])
    assert some.objects["spread"] == {name: {"exp_avg": found[name]["exp_avg"]}}
    none = ucformat.open(tmp_path / "ckpt").view([{"drop": name}])
    assert "spread" not in ucformat.convert(none, tmp_path / "none").objects


def test_through_further_steps() -> None:
    view = averaged(VALUES).view(
        [
            {"split": "a", "into": ["x", "y"]},
            {"cast": "x", "dtype": "bfloat16"},
            {"rename": "x", "to": "z"},
        ]
    )
    made = ucformat.convert(view, MemoryStore("spread-steps"))
    assert made["z"].dtype == ml_dtypes.bfloat16
    whole = {
        "weight": {"values": 3, "max_abs_difference": APART}
    }  # of the mean of which each is a part
    assert made.objects["spread"] == {"z": whole, "y": whole}


@pytest.mark.parametrize(
    ("values", "apart"),
    [
        ([[1.0, np.inf], [1.5, np.inf]], 0.5),
        ([[1.0, np.inf], [1.5, 0.0]], {"$float": "inf"}),
        ([[1.0, np.nan], [9.0, 0.0]], {"$float": "nan"}),
        ([[], []], 0.0),
    ],
)
def test_values_that_are_not_finite(values: list[list[float]], apart: object) -> None:
    made = ucformat.convert(
        averaged([np.array(v, np.float32) for v in values]), MemoryStore(f"spread-{apart}")
    )
    assert made.objects["spread"]["a"]["weight"]["max_abs_difference"] == apart
