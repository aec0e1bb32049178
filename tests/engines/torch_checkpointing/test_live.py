"""torch_checkpointing's manager and ours in its place: the same state, and the same training after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.engines import engine
from tests.torch.ranks import Ranks
from tests.torch.test_guides import follow, losses

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine
RANKS = Ranks("tests.engines.torch_checkpointing.live_program")


def test_our_manager_saves_what_theirs_does_and_loads_both(tmp_path: Path) -> None:
    told = RANKS.run("saves", 2, tmp_path)
    first = told[0]
    assert all(t["resumed"] == dict.fromkeys(t["resumed"], t["losses"]) for t in told)
    assert first["resumed"].keys() == {"universal", "packed", "first"}
    assert [t["called"] for t in told] == [1, 1]
    ck = ucformat.open(tmp_path / "universal")
    assert (ck.id, ck.manifest.run, ck.metadata.step) == (first["id"], "r", 1)
    assert len(ck.tensors) == 16
    assert not (tmp_path / "second" / "metadata.pkl").exists()  # as the library leaves it
    for name in ("packed", "first", "second"):
        other = ucformat.open(tmp_path / name)
        assert other.tensors == ck.tensors
        for key in ck.tensors:
            assert other[key][...].tobytes() == ck[key][...].tobytes(), (name, key)
    for ranks in (1, 3):
        for resumed in RANKS.run("loads", ranks, tmp_path):
            assert resumed == pytest.approx(first["losses"], rel=1e-5)


def test_older_tensors_are_loaded_only_if_that_is_asked_for(tmp_path: Path) -> None:
    for refused, step in RANKS.run("older", 1, tmp_path):
        assert "are older, by 1 to 1 steps" in refused
        assert step == 2


def test_what_has_no_place_in_a_universal_checkpoint_is_refused(tmp_path: Path) -> None:
    for told in RANKS.run("refused", 2, tmp_path):
        starts = [
            "the option storage_config is not supported",
            "the option subprocess_init_fn is not supported",
            "the option finalize_callback is not supported",
            "the option pre_finalize_callback is not supported",
            "the item model has a layout",
            "the item default has the resharder Mine",
            "load needs the items",
            "load(…, map_location=) is not supported",
            "load(…, metadata_format=) is not supported",
            "",
            "the CheckpointManager is closed",
        ]
        assert [t.startswith(s) for t, s in zip(told, starts, strict=False)] == [True] * len(starts)
        assert "loader" in told[9]
        assert "Missing required checkpoint item" in told[11]
    assert not (tmp_path / "x").exists()


@pytest.mark.matrix
def test_the_guide(tmp_path: Path) -> None:
    (library,) = engine("torch_checkpointing").parents[1].glob("lib/python3*/site-packages")
    (tmp_path / "torch_checkpointing").symlink_to(library / "torch_checkpointing")
    first, second = map(losses, follow("torch_checkpointing.md", tmp_path))
    assert list(first) == list(range(1, 7))
    assert second == pytest.approx({step: first[step] for step in (5, 6)}, rel=1e-4)
    assert ucformat.open(tmp_path / "run" / "step-4").metadata.step == 4
