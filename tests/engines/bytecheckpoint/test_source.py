"""ByteCheckpoint's checkpoints of each framework, as it wrote them, against the live tensors."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.sources.suite import SourceSuite, kept
from ucformat.checkpoint import open_checkpoint
from ucformat.engines.bytecheckpoint.folder import LATEST
from ucformat.engines.bytecheckpoint.source import ByteCheckpoint
from ucformat.errors import UsageError
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("ddp", "fsdp", "fsdp2")


def sample_of(name: str, place: str = "ckpt") -> Sample:
    made = kept("bytecheckpoint", name)
    return Sample(
        folder=made.folder,
        place=place,
        kind="bytecheckpoint",
        truth=made.truth,
        groups=made.facts["groups"],
        step=made.facts["step"],
    )


class TestByteCheckpoint(SourceSuite):
    outranked = frozenset({"megatron"})
    cyclic = True

    @pytest.fixture(params=_NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return sample_of(request.param)


@pytest.mark.parametrize("part", ["", "/model"])
def test_a_step_and_a_model_open_by_themselves(part: str) -> None:
    sample = sample_of("fsdp2", f"ckpt/global_step_2{part}")
    ck = sample.open()
    assert ck.metadata.step == 2
    assert {k.name for k in ck.tensors if k.state == "weight"} == {
        n for s, n in sample.truth if s == "weight"
    }
    assert bool(ck.metadata.groups) == (not part)


def test_without_its_latest_step_a_folder_of_one_opens(tmp_path: Path) -> None:
    sample = sample_of("fsdp2")
    shutil.copytree(sample.path, tmp_path / "ckpt")
    (tmp_path / "ckpt" / LATEST).unlink()
    ck = open_checkpoint(tmp_path / "ckpt")
    assert (ck.kind, ck.metadata.step) == ("bytecheckpoint", 2)
    shutil.copytree(tmp_path / "ckpt/global_step_2", tmp_path / "ckpt/global_step_10")
    with pytest.raises(UsageError, match=f"has the steps 2, 10 and no {LATEST}"):
        open_checkpoint(tmp_path / "ckpt")


def test_every_rank_s_extra_state_is_kept() -> None:
    objects = sample_of("fsdp2").open().objects
    assert objects["extra_state"]["iteration"] == 2
    assert {r: v["extra_state"]["rank"] for r, v in objects["rank"].items()} == {"1": 1, "2": 2}


def test_numbered_states_that_nothing_names_ask_for_the_names() -> None:
    sample = sample_of("ddp-unclear")
    with pytest.raises(UsageError, match=r"numbered .*\n.*'groups'"):
        open_checkpoint(sample.path)
    source = ByteCheckpoint(groups=sample.groups).open(LocalStore(sample.path))
    assert [list(g["params"]) for g in source.metadata.groups] == sample.groups
