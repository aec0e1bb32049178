"""What is refused, what does not fit, and what is kept besides tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.live.compare import differences, facts, held

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.engine

Chosen = "Callable[[], Path]"


@pytest.mark.front("mp_world_size-*", "optimizer.offloaded_states-*")
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("has_moe_layers", "AutoEP"),
        ("mp_world_size", "tensor parallelism"),
        ("zenflow", "ZenFlow"),
        ("optimizer.swap_optimizer", "NVMe"),
        ("optimizer.offloaded_states", "reload_states"),
    ],
)
def test_engines_with_state_that_cannot_be_kept_are_refused(
    chosen: Callable[[], Path], what: str, says: str
) -> None:
    found = facts(chosen() / "refusals")
    for message in (found[what], found[f"load {what}"]):
        assert message.startswith("UnsupportedError: rank 0: ")
        assert says in message
        assert "hint: " in message


def test_gradients_that_wait_are_not_lost_silently(chosen: Callable[[], Path]) -> None:
    found = facts(chosen() / "refusals")
    assert "the gradients of 1 micro-batches" in found["half a step"]
    assert found["committed"] == "False"
    assert found["no engine"].startswith("UsageError: rank 0: a Net is not a DeepSpeed engine")


def test_an_increment_is_loaded_bit_for_bit(chosen: Callable[[], Path]) -> None:
    found = facts(chosen() / "increments")
    assert found == {"good": True, "bases": [["../first"], ["../first"]], "referenced": True}


def test_arguments_that_an_engine_determines_are_refused(chosen: Callable[[], Path]) -> None:
    found = facts(chosen() / "refusals")
    for name in ("names", "group"):
        assert found[name].startswith(
            f"UsageError: ucformat.torch.deepspeed.save does not take {name}"
        )


def test_the_client_state_comes_back(chosen: Callable[[], Path]) -> None:
    folder = chosen() / "client"
    found = facts(folder)
    assert found["client"] == {"epoch": 3, "of": [1, 2.5], "7": {"$odd": None}}
    assert found["ranks"] == {"own": [[0], [1]]}
    assert "'client_state' has a different value on rank 1" in found["unlike"]
    ck = ucformat.open(str(folder / "zarr"))
    assert ck.manifest.config["zero_optimization"]["stage"] == 3
    assert ck.objects["client_state"]["ema"] == {"a": {"$ref": "client_state.ema.a"}}
    assert ck["client_state.ema.a"].shape == (20000,)


def test_all_that_does_not_fit_is_told_and_nothing_changed(chosen: Callable[[], Path]) -> None:
    found = facts(chosen() / "mismatches")
    assert "missing: more (weight)" in found["missing"]
    assert "missing: layers.0.other (weight)" in found["missing"]
    assert "all optimizer states" in found["weights alone"]
    assert "optimizer=False" in found["weights alone"]
    assert found["losses"] == found["expected"]


def test_weights_alone_are_loaded_when_asked_for(chosen: Callable[[], Path]) -> None:
    found = facts(chosen() / "mismatches")
    assert found["weights"]
    assert found["report"] == [True, [], []]


def test_what_the_engine_has_no_place_for_is_told_unless_it_may_be_left(
    chosen: Callable[[], Path],
) -> None:
    found = facts(chosen() / "mismatches")
    assert found["left"] == [[False, ["spare (weight)"]], [True, []], [True, []]]


@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_certificate_names_what_one_rank_has_spoilt(
    chosen: Callable[[], Path], zero: str
) -> None:
    rows = facts(chosen() / "certificates")[zero]
    positive, equal = rows["good"]
    assert positive
    assert equal > 30
    assert rows["master"] == [[rows["name"], "master", [1]]]
    assert rows["moment"] == [[rows["name"], "exp_avg", [1]]]
    assert rows["module"] == [["layers.0.up.weight", "weight", [1]]]
    assert not rows["weights"]


class TestUnequalSteps:
    """Plain torch counts the steps of each parameter, a flat group has one count."""

    @pytest.mark.parametrize("zero", [1, 3])
    def test_unequal_counts_do_not_fit_a_flat_group(
        self, chosen: Callable[[], Path], zero: int
    ) -> None:
        found = facts(chosen() / "unequal")[f"late {zero}"]
        assert found.startswith("StateMismatch")
        assert "step is " in found
        assert "ZeRO 0" in found

    def test_they_fit_where_each_has_its_own(self, chosen: Callable[[], Path]) -> None:
        assert facts(chosen() / "unequal")["late 0"] == ""

    @pytest.mark.parametrize("zero", [0, 1, 3])
    def test_what_was_never_stepped_on_is_as_before_a_first_step(
        self, chosen: Callable[[], Path], zero: int
    ) -> None:
        folder = chosen() / "unequal"
        saved, loaded = held(folder / "never"), held(folder / f"zero{zero}" / "own")
        wanted: dict[tuple[str, str], Any] = {}
        if zero:
            wanted = {("norm.bias", s): np.zeros(10, np.float32) for s in ("exp_avg", "exp_avg_sq")}
            wanted["norm.bias", "step"] = np.array(3, np.float32)
        assert not differences(loaded, saved | wanted)


def test_names_are_mapped_on_the_way(chosen: Callable[[], Path]) -> None:
    folder = chosen() / "renamed"
    saved, swapped = held(folder / "saved"), held(folder / "swapped")
    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    mapped = {(other.get(n[:8], n[:8]) + n[8:], s): array for (n, s), array in saved.items()}
    assert not differences(swapped, mapped)
    assert differences(swapped, saved)
    assert "missing: embed.weight (weight)" in facts(folder)["none"]


def test_the_guide_runs_as_printed(chosen: Callable[[], Path]) -> None:
    folder = chosen() / "guide"
    whole, resumed = held(folder / "whole" / "4"), held(folder / "resumed" / "4")
    assert whole.keys() == resumed.keys()
    for key, array in whole.items():
        np.testing.assert_allclose(resumed[key], array, rtol=1e-4, atol=1e-6, err_msg=str(key))
    ck = ucformat.open(str(folder / "resumed" / "4"))
    assert (ck.manifest.step, ck.manifest.run, ck.objects["client_state"]) == (
        4,
        "run7",
        {"epoch": 0},
    )
    assert not (folder / "resumed" / "2").exists()
