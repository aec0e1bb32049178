"""Trainings with Megatron-FSDP go on under other layouts and Megatron-Core's own data parallelism, and the reverse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.engines.megatron.live.running import differences, trained
from tests.torch.running import fork

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.engine

GATED = {"layers": 2, "swiglu": True, "bf16": True, "vocab": 32}
FULL = {"fsdp": "optim_grads_params", "optimizer": "fsdp_dtensor"}
FLAT = {"optimizer": "dp_reshardable"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"world": 2, **GATED, **FULL},
    "dp4": {"world": 4, **GATED, **FULL},
    "tp2": {"world": 2, "tp": 2, **GATED, **FULL},
    "tp2-dp2": {"world": 4, "tp": 2, **GATED, **FULL},
    "pp2": {"world": 2, "pp": 2, **GATED, **FULL},
    "one": {"world": 1, **GATED, **FULL},
    "zero1": {"world": 2, **GATED, **FULL, "fsdp": "optim"},
    "zero2": {"world": 2, **GATED, **FULL, "fsdp": "optim_grads"},
    "whole": {"world": 2, **GATED, **FULL, "fsdp": "no_shard"},
    "hybrid": {"world": 4, **GATED, **FULL, "outer": 2},
    "hybrid-sharded": {"world": 4, **GATED, **FULL, "outer": 2, "outer_sharding": "optim"},
    "fp32": {"world": 2, **GATED, **FULL, "bf16": False},
    "ep2": {"world": 2, "ep": 2, "experts": 4, **GATED, **FULL},
    "ep2-dp2": {"world": 4, "ep": 2, "experts": 4, **GATED, **FULL},
    "padded": {"world": 2, "tp": 2, **GATED, **FULL, "vocab": 19},
    "tied": {"world": 2, **GATED, **FULL, "tied": True},
    "ddp-tp2": {"world": 2, "tp": 2, **GATED, **FLAT},
    "ddp-pp2": {"world": 2, "pp": 2, **GATED, **FLAT},
    "ddp-ep2": {"world": 2, "ep": 2, "experts": 4, **GATED, **FLAT},
    "ddp-padded": {"world": 2, "tp": 2, **GATED, **FLAT, "vocab": 19},
}
#: States that the engines do not have alike: of AdamW the step, and the copy of 16-bit weights.
STATES = ("step", "master")


class Saved:
    """A training that was saved by us and by the engine itself after two steps, and its losses from then on."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.ours, self.own = folder / "ck", folder / "own" / "iter_0000002"
        actions: list[dict[str, Any]] = [
            {"train": 2},
            {"save": str(self.ours)},
            {"own": str(self.own)},
            {"train": 2},
        ]
        self.losses = trained(folder, LAYOUTS[layout], *actions)["losses"][2:]

    def goes_on(
        self, folder: Path, layout: str, *, load: str = "load", of: str = "ours", rel: float = 1e-3
    ) -> Path:
        """Load it under another layout, save what is held there, and train."""
        again = folder / "ck"
        actions: list[dict[str, Any]] = [
            {load: str(getattr(self, of))},
            {"save": str(again)},
            {"train": 2},
        ]
        told = trained(folder, LAYOUTS[layout], *actions)
        assert (told["complete"], told["problems"], told["left"]) == (True, [], [])
        assert told["losses"] == pytest.approx(self.losses, rel=rel)
        return again


LLAMA = [{"preset": "megatron-to-llama", "with": {"heads": 4, "groups": 2}}]


def converted(fsdp: Path, ddp: Path, view: Sequence[dict[str, Any]] = ()) -> list[str]:
    """What differs between checkpoints of both engines: the weights of the first are the fp32 copies of the other."""
    a, b = (ucformat.open(str(place)).view(list(view)) for place in (fsdp, ddp))
    out = []
    for key in sorted(a.tensors.keys() | b.tensors.keys()):
        if key.state.startswith(STATES):
            continue
        name, state = key
        master = state.replace("weight", "master")
        other = b[name, master] if (name, master) in b.tensors else b[name, state]
        x, y = a[name, state][...], other[...]
        if (x.dtype, x.shape, x.tobytes()) != (y.dtype, y.shape, y.tobytes()):
            out.append(f"{key} differs")
        if master != state:
            rounded = x.astype(b[name, state][...].dtype)
            out += [] if np.array_equal(rounded, b[name, state][...]) else [f"{key} is not rounded"]
    return out


def test_a_training_goes_on_under_other_layouts_and_engines(tmp_path: Path) -> None:
    """From the engine's own folder, and from ours, into Megatron-FSDP and out; to and from Hugging Face's names."""
    first = Saved(tmp_path / "dp2", "dp2")
    assert differences(first.ours, first.own, states=("step",)) == []
    again = first.goes_on(tmp_path / "tp2", "tp2")
    assert differences(first.ours, again) == []
    ddp, later = tmp_path / "ddp" / "ck", tmp_path / "ddp" / "later"
    told = trained(
        tmp_path / "ddp",
        LAYOUTS["ddp-tp2"],
        {"cast": str(first.own)},
        {"save": str(ddp)},
        {"train": 2},
        {"save": str(later)},
        {"train": 2},
    )
    assert (told["complete"], told["problems"], told["left"]) == (True, [], [])
    assert told["losses"][:2] == pytest.approx(first.losses, rel=1e-3)
    assert converted(first.own, ddp) == []
    assert converted(first.own, ddp, LLAMA) == []
    ucformat.export(ucformat.open(str(first.own)).view(LLAMA), tmp_path / "hf", "safetensors")
    losses = told["losses"][2:]
    place, weights = tmp_path / "to" / "ck", tmp_path / "to" / "weights"
    told = trained(
        tmp_path / "to",
        LAYOUTS["dp2"],
        {"load": str(later)},
        {"save": str(place)},
        {"train": 2},
        {"llama": str(tmp_path / "hf")},
        {"save": str(weights)},
    )
    assert (told["complete"], told["problems"], told["left"]) == (True, [], [])
    assert told["losses"] == pytest.approx(losses, rel=1e-3)
    assert converted(place, later) == []
    a, b = ucformat.open(str(weights)), ucformat.open(str(first.own))
    assert all(
        a[n, s][...].tobytes() == b[n, s][...].tobytes() for n, s in a.tensors if s == "weight"
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("saved", "others", "ddp"),
    [
        ("tp2-dp2", ["dp4", "one", "zero2"], "ddp-tp2"),
        ("dp4", ["tp2-dp2"], None),
        ("zero1", ["dp2"], None),
        ("zero2", ["dp2"], None),
        ("hybrid", ["dp2"], None),
        ("hybrid-sharded", ["dp4", "hybrid"], None),
        ("fp32", [], None),
        ("ep2", ["ep2-dp2"], "ddp-ep2"),
        ("ep2-dp2", ["ep2"], "ddp-ep2"),
        ("padded", [], "ddp-padded"),
        ("tied", [], None),
    ],
)
def test_layouts(saved: str, others: list[str], ddp: str | None, tmp_path: Path) -> None:
    """Every sharding strategy, with tensor and expert parallelism, and empty shards; both directions."""
    first = Saved(tmp_path / saved, saved)
    assert differences(first.ours, first.own, states=("step",)) == []
    for other in (saved, *others):
        assert differences(first.ours, first.goes_on(tmp_path / f"to-{other}", other)) == []
    if ddp is not None:
        ours = first.goes_on(tmp_path / "ddp", ddp, load="cast", of="own")
        assert converted(first.own, ours) == []
        assert differences(first.ours, first.goes_on(tmp_path / "back", saved)) == []


@pytest.mark.matrix
def test_a_model_that_is_not_sharded(tmp_path: Path) -> None:
    """Of which 0.16.1 itself cannot save gated projections."""
    one, again = tmp_path / "one", tmp_path / "again" / "ck"
    actions: list[dict[str, Any]] = [{"train": 2}, {"save": str(one)}, {"train": 2}]
    losses = trained(tmp_path, LAYOUTS["whole"], *actions)["losses"][2:]
    actions = [{"load": str(one)}, {"save": str(again)}, {"train": 2}]
    told = trained(tmp_path / "again", LAYOUTS["dp2"], *actions)
    assert (told["complete"], told["problems"], told["left"]) == (True, [], [])
    assert told["losses"] == pytest.approx(losses, rel=1e-3)
    assert differences(one, again) == []


@pytest.mark.matrix
def test_stages(tmp_path: Path) -> None:
    """Layers are numbered through all stages, which the engine's own files do not do, and which are refused."""
    first = Saved(tmp_path / "pp2", "pp2")
    ddp = first.goes_on(tmp_path / "ddp", "ddp-pp2", load="cast")
    assert converted(first.ours, ddp) == []
    assert differences(first.ours, first.goes_on(tmp_path / "one", "one")) == []
    with pytest.raises(ucformat.errors.MissingData, match="has 1 layers of a model of 2"):
        ucformat.open(str(first.own))


def test_rows_that_are_padded(tmp_path: Path) -> None:
    """The second Megatron-FSDP's tensors are where they say, not where placements do, on any number of ranks."""
    told = [_of_padded_rows(tmp_path, ranks) for ranks in (3, 2)]
    assert [0, 7] in [shape for of_rank in told[0] for shape in of_rank["shapes"].values()]
    for of_rank in (one for of_run in told for one in of_run):
        assert of_rank["refused"][0] == "UnsupportedError"
        assert "sharded by Megatron-FSDP" in of_rank["refused"][1]
        assert of_rank["written"] == []
    assert all(of_rank["complete"] for of_rank in told[1])
    assert differences(tmp_path / "ck", tmp_path / "again") == []
    assert told[1][0]["losses"] == pytest.approx(told[0][0]["losses"], rel=1e-2)


def _of_padded_rows(folder: Path, ranks: int) -> Any:
    script = ["-m", "tests.engines.megatron.live.padded_rows", str(folder)]
    fork(ranks, script, folder / f"log{ranks}", ("tests.engines.megatron.live.beside",))
    return json.loads((folder / "told.json").read_text())
