"""Trainings with Megatron-Core go on under other layouts, with everything that they held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.engines.megatron.live.running import differences, trained

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

GATED = {"layers": 2, "swiglu": True, "bf16": True, "vocab": 32}
FLAT, FULL = {"optimizer": "dp_reshardable"}, {"optimizer": "fully_reshardable"}
#: Experts whose router counts how often it has chosen each, and corrects its choice.
BIASED = {"experts": 4, "router_bias": True, **GATED}
#: As `tests/data/megatron/make.py` describes them. Only the distributed optimizer has a format.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"world": 2, "tp": 2, **GATED, **FLAT},
    "pp2": {"world": 2, "pp": 2, **GATED, **FULL},
    "tp2-pp2": {"world": 4, "tp": 2, "pp": 2, **GATED, **FLAT},
    "dp4": {"world": 4, **GATED, **FLAT},
    "tp2-dp2": {"world": 4, "tp": 2, **GATED, **FULL},
    "tp2-plain": {"world": 2, "tp": 2, **GATED},
    "one": {"world": 1, **GATED},
    "fused-dp2": {"world": 2, **GATED, **FLAT, "fused": True},
    "fused-tp2": {"world": 2, "tp": 2, **GATED, "fused": True},
    "vpp2": {"world": 2, "pp": 2, "vpp": 2, **GATED, "layers": 4, **FLAT, "buckets": 300},
    "fp32": {"world": 2, "layers": 4, "swiglu": True, "vocab": 32, **FLAT},
    "fp32-plain": {"world": 2, "pp": 2, "layers": 4, "swiglu": True, "vocab": 32},
    "ep2": {"world": 4, "ep": 2, "experts": 4, **GATED, **FLAT},
    "experts-pp2": {"world": 2, "pp": 2, "experts": 4, **GATED, **FULL},
    "experts-one": {"world": 1, "experts": 4, **GATED},
    "ep2-etp2": {"world": 4, "tp": 2, "ep": 2, "etp": 2, **BIASED, **FLAT},
    "biased-ep4": {"world": 4, "ep": 4, **BIASED, **FULL},
    "biased-pp2": {"world": 4, "tp": 2, "pp": 2, "ep": 2, **BIASED, **FLAT},
    "biased-one": {"world": 1, **BIASED},
    "padded": {"world": 2, "tp": 2, **GATED, **FLAT, "vocab": 19},
    "padded-one": {"world": 1, **GATED, **FLAT, "vocab": 19},
    # without training steps, for which context parallelism needs Transformer Engine
    "cp2": {"world": 2, "cp": 2, "layers": 1, "bf16": True, "vocab": 32, **FLAT},
    "cp2-tp2": {"world": 4, "cp": 2, "tp": 2, "layers": 1, "bf16": True, "vocab": 32, **FULL},
    "muon-dp2": {"world": 2, **GATED, "muon": "layer-wise"},
    "muon-tp2": {"world": 2, "tp": 2, **GATED, "muon": "layer-wise"},
    "muon-tp2-dp2": {"world": 4, "tp": 2, **GATED, "muon": "layer-wise"},
    "muon-pp2": {"world": 2, "pp": 2, **GATED, "muon": "plain"},
    "muon-one": {"world": 1, **GATED, "muon": "plain"},
    "tied-tp2": {"world": 2, "tp": 2, "layers": 2, "bf16": True, "tied": True, "vocab": 32, **FLAT},
    "tied-pp2": {"world": 2, "pp": 2, "layers": 2, "bf16": True, "tied": True, "vocab": 32, **FULL},
}
#: States that only an optimizer that is not distributed has as tensors.
STEP = ("step",)


def _step(layout: str) -> str:
    """How a layout makes steps: along losses, or along random gradients."""
    return "gradients" if "cp" in LAYOUTS[layout] else "train"


class Saved:
    """A training that was saved by us and by Megatron-Core itself after two steps, and its losses from then on."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.ours, self.own = folder / "ck", folder / "own"
        step = _step(layout)
        actions: list[dict[str, Any]] = [
            {step: 2},
            {"save": str(self.ours)},
            {"own": str(self.own)},
            {step: 2},
        ]
        self.losses = trained(folder, LAYOUTS[layout], *actions)["losses"][2:]

    def goes_on(self, folder: Path, layout: str, *, rel: float) -> None:
        """Load it under another layout, save what is held there, and train."""
        own, again = folder / "own", folder / "ck"
        actions: list[dict[str, Any]] = [
            {"load": str(self.ours)},
            {"own": str(own)},
            {"save": str(again)},
            {_step(layout): 2},
        ]
        told = trained(folder, LAYOUTS[layout], *actions)
        assert (told["complete"], told["problems"], told["left"]) == (True, [], [])
        assert differences(self.ours, own, states=(*STEP, "master")) == []
        assert differences(self.ours, again, states=(*STEP, "master")) == []
        assert differences(own, again) == []
        assert told["losses"] == pytest.approx(self.losses, rel=rel)


@pytest.fixture(scope="module")
def tp2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("tp2"), "tp2")


def test_it_is_what_megatron_saves_itself(tp2: Saved) -> None:
    """By the same names, with the same groups; and so views and exports of it are the same."""
    assert differences(tp2.ours, tp2.own) == []
    ours, own = ucformat.open(str(tp2.ours)), ucformat.open(str(tp2.own))
    assert ours.metadata.step == own.metadata.step == 2
    assert {k: ours.metadata.layout[k] for k in ("tp", "pp", "ep")} == {"tp": 2, "pp": 1, "ep": 1}
    groups = [
        [(sorted(g["params"]), g["lr"], g["wd_mult"], g["step"]) for g in ck.metadata.groups]
        for ck in (ours, own)
    ]
    assert groups[0] == groups[1]
    assert ours.objects["args"]["vocab_size"] == own.objects["args"]["vocab_size"] == 32
    view = [{"preset": "megatron-to-llama", "with": {"heads": 4, "groups": 2}}]
    llama, expected = ours.view(view), own.view(view)
    assert llama.tensors.keys() == expected.tensors.keys()
    assert all(llama[k][...].tobytes() == expected[k][...].tobytes() for k in llama.tensors)


def test_a_training_goes_on_under_another_layout(tp2: Saved, tmp_path: Path) -> None:
    tp2.goes_on(tmp_path, "pp2", rel=1e-3)


def test_strategies_of_megatrons_own_functions(tp2: Saved, tmp_path: Path) -> None:
    """They save flat buckets by name, and load them under another layout, which Megatron cannot."""
    place, again = tmp_path / "ck", tmp_path / "again"
    trained(
        tmp_path / "save", LAYOUTS["tp2"], {"load": str(tp2.ours)}, {"strategy_save": str(place)}
    )
    assert differences(tp2.ours, place) == []
    ck = ucformat.open(str(place))
    assert (ck.metadata.step, ck.objects["args"]["vocab_size"]) == (2, 32)
    actions: list[dict[str, Any]] = [
        {"strategy_load": str(place)},
        {"save": str(again)},
        {"train": 2},
    ]
    told = trained(tmp_path / "load", LAYOUTS["pp2"], *actions)
    assert differences(place, again) == []
    assert told["losses"] == pytest.approx(tp2.losses, rel=1e-3)


def test_an_optimizer_that_counts_steps_in_its_groups(tmp_path: Path) -> None:
    """As Transformer Engine's does, from its first step on: also before it, a load sets the step."""
    Saved(tmp_path / "a", "fused-dp2").goes_on(tmp_path / "b", "fused-tp2", rel=1e-3)
    Saved(tmp_path / "c", "fused-tp2").goes_on(tmp_path / "d", "fused-dp2", rel=1e-3)


def test_optimizers_that_count_steps_elsewhere(tp2: Saved, tmp_path: Path) -> None:
    """PyTorch's Adam counts them for each parameter, Transformer Engine's in its groups."""
    tp2.goes_on(tmp_path / "a", "fused-dp2", rel=1e-3)
    Saved(tmp_path / "b", "fused-tp2").goes_on(tmp_path / "c", "pp2", rel=1e-3)


def test_layer_wise_muon(tmp_path: Path) -> None:
    """Each rank has the states of some parameters, which Megatron itself loads on as many ranks only."""
    first = Saved(tmp_path / "muon", "muon-dp2")
    assert differences(first.ours, first.own) == []
    ck = ucformat.open(str(first.ours))
    assert set(ck.states("decoder.layers.0.mlp.linear_fc2.weight")) == {
        *("weight", "master", "momentum_buffer")
    }
    assert "exp_avg" in ck.states("embedding.word_embeddings.weight")
    first.goes_on(tmp_path / "whole", "muon-one", rel=1e-3)


@pytest.mark.matrix
def test_tensors_are_described(tmp_path: Path) -> None:
    """But for halves that are cut, in which a rank has two boxes; flat buckets, too."""
    told = trained(tmp_path, LAYOUTS["tp2-dp2"], {"train": 1}, {"list": 1})
    states = ("exp_avg", "exp_avg_sq", "master", "weight")
    gated = "decoder.layers.{}.mlp.linear_fc1.weight ({})"
    assert told["listed"] == sorted(gated.format(i, state) for i in range(2) for state in states)


@pytest.mark.matrix
def test_a_group_with_parameters_of_two_dtypes(tmp_path: Path) -> None:
    """Megatron-Core 0.16.1 takes their states for each other's, or does not name them."""
    place = tmp_path / "ck"
    mixed = {**LAYOUTS["one"], "fp32": "pre_mlp_layernorm"}
    trained(tmp_path, {**mixed, **FLAT}, {"gradients": 2}, {"save": str(place)})
    ck = ucformat.open(str(place))
    for key in ck.tensors:
        if key.state == "master":
            weight = ck[key.name, "weight"][...]
            assert ck[key][...].astype(weight.dtype).tobytes() == weight.tobytes(), key
    with pytest.raises(AssertionError, match="16-bit and fp32 parameters that is not distributed"):
        trained(tmp_path / "plain", mixed, {"save": str(tmp_path / "plain" / "ck")})


@pytest.mark.matrix
def test_a_vocabulary_that_is_padded_otherwise(tmp_path: Path) -> None:
    """Rows that both have are loaded, and the report says that they are others."""
    first, again = Saved(tmp_path / "padded", "padded"), tmp_path / "again"
    told = trained(tmp_path, LAYOUTS["padded-one"], {"load": str(first.ours)}, {"save": str(again)})
    assert told["complete"] is False
    assert len(told["problems"]) == 2
    assert all("is padded by 5 rows, in the checkpoint by 13" in line for line in told["problems"])
    a, b = ucformat.open(str(first.ours)), ucformat.open(str(again))
    assert a.tensors.keys() - b.tensors.keys() == set()
    for key in a.tensors:
        x, y = a[key][...], b[key][...]
        assert x[: len(y)].tobytes() == y.tobytes()
        assert key.state.endswith(".padding") or x.shape == y.shape


@pytest.mark.matrix
def test_experts_that_their_module_turns_are_refused_with_an_optimizer(tmp_path: Path) -> None:
    """Whose states, unlike the weights, Megatron itself saves in another order, too (Megatron-LM 909)."""
    grouped = {"world": 2, "ep": 2, "experts": 4, "grouped": True, **GATED}
    optimizers: list[dict[str, Any]] = [{}, FLAT]
    for number, optimizer in enumerate(optimizers):
        place = tmp_path / f"ck{number}"
        with pytest.raises(AssertionError, match="the legacy GroupedMLP turns each expert"):
            trained(tmp_path, {**grouped, **optimizer}, {"gradients": 1}, {"save": str(place)})
        assert not place.exists()


@pytest.mark.matrix
def test_experts_that_are_cut_and_what_their_router_has_counted(tmp_path: Path) -> None:
    """Each part of each expert once (Megatron-LM 1836, KempnerForge 202), and the same bias on all ranks."""
    first = Saved(tmp_path / "saved", "ep2-etp2")
    assert differences(first.ours, first.own) == []
    ck = ucformat.open(str(first.ours))
    for layer in range(2):
        mlp = f"decoder.layers.{layer}.mlp"
        for name in ("linear_fc1", "linear_fc2"):
            experts = [f"{mlp}.experts.local_experts.{n}.{name}.weight" for n in range(4)]
            assert len({ck[name, "weight"][...].tobytes() for name in experts}) == 4
        assert ck[f"{mlp}.router.expert_bias", "weight"][...].any()
    for other in ("ep2-etp2", "biased-ep4", "biased-pp2", "biased-one"):
        first.goes_on(tmp_path / other, other, rel=1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("saved", "others"),
    [
        ("tp2-pp2", ["dp4", "tp2-dp2", "tp2-plain", "one"]),
        ("tp2-plain", ["tp2-pp2"]),
        ("cp2", ["cp2-tp2"]),
        ("vpp2", []),
        ("fp32", ["fp32-plain"]),
        ("fp32-plain", ["fp32"]),
        ("ep2", ["experts-pp2", "experts-one"]),
        ("experts-pp2", ["ep2"]),
        ("muon-tp2-dp2", ["muon-pp2", "muon-dp2"]),
        ("muon-pp2", ["muon-tp2"]),
        ("tied-tp2", ["tied-pp2"]),
        ("tied-pp2", ["tied-tp2"]),
    ],
)
def test_layouts(saved: str, others: list[str], tmp_path: Path) -> None:
    """Tensor, pipeline, data and expert parallelism, with and without the distributed optimizer."""
    first = Saved(tmp_path / saved, saved)
    assert differences(first.ours, first.own) == []
    for other in (saved, *others):
        first.goes_on(tmp_path / f"to-{other}", other, rel=1e-3)
