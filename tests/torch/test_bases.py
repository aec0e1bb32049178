"""Saves on a base: what equals it is not written, whoever holds it, and the base stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import ucformat
from tests.torch.ranks import KILLED, Ranks
from ucformat.errors import UnsupportedError, UsageError
from ucformat.jobs import increments
from ucformat.jobs.dependents import dependents_at
from ucformat.jobs.removal import discard
from ucformat.storage.url import open_store
from ucformat.torch import save

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket

PROGRAM = Ranks("tests.torch.bases_program")
#: Bytes of the tensors that stay as they are, of two ranks.
FROZEN = 8 * (61 * 20 + 5 * 30 + 9 * 9 + 4 * 4 + 2 * 7 * 3)
LORA = 8 * (30 * 8 + 8 * 5 + 2 * 2)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async"])
@pytest.mark.parametrize("form", ["zarr", "packed", "safetensors"])
@pytest.mark.front("zarr-save", "packed-async", "safetensors-save")
def test_what_stays_is_not_written_again(form: str, asynchronous: bool, tmp_path: Path) -> None:
    seen = PROGRAM.run("saved", 2, tmp_path, form=form, asynchronous=asynchronous)
    referenced = 0 if form == "safetensors" else FROZEN
    assert [of_save[1] for of_save in seen[0]] == [0, referenced, referenced]
    if referenced:
        assert [sum(rank[n][0] for rank in seen) for n in (1, 2)] == [LORA, LORA]
    one, two, three = (ucformat.open(tmp_path / str(step)) for step in (1, 2, 3))
    if referenced:
        # flat: the third refers to the first, although it was saved on the second
        assert (
            [b.id for b in two.manifest.bases] == [b.id for b in three.manifest.bases] == [one.id]
        )
    assert all(two.manifest.tensors.fingerprint)
    for ck in (one, two, three):
        assert ucformat.verify(ck)
    again = PROGRAM.run("loaded", 2, tmp_path, step=3)
    assert all(again)
    whole = ucformat.materialize(three, tmp_path / "whole")
    for key in three.tensors:
        assert np.array_equal(whole[key].read(), three[key].read())


def test_two_ranks_train_an_adapter(tmp_path: Path) -> None:
    for form in ("zarr", "packed"):
        seen = PROGRAM.run("trained", 2, tmp_path / form, form=form)
        assert {referenced for _, referenced in seen} == {4 * (64 * 64 + 64)}
        # the adapter, its moments, and the count of steps
        assert sum(nbytes for nbytes, _ in seen) == 4 * (3 * 4 * 64 + 1)


def test_replicas_are_compared_all_the_same(tmp_path: Path) -> None:
    assert all("different value on rank 1" in m for m in PROGRAM.run("disagreeing", 2, tmp_path))


@pytest.mark.parametrize("form", ["zarr", "packed"])
@pytest.mark.front("packed")
def test_a_killed_save_leaves_the_base_whole(form: str, tmp_path: Path) -> None:
    assert PROGRAM.run("killed", 2, tmp_path, form=form)[0] == KILLED
    assert not (tmp_path / "2" / "manifest.json").exists()
    assert ucformat.verify(tmp_path / "1")
    (needed,) = dependents_at(open_store(tmp_path / "1"), "")
    assert needed
    seen = PROGRAM.run("saved", 2, tmp_path / "again", form=form, asynchronous=False)
    assert seen[0][1][1] == FROZEN


def test_a_base_that_is_needed_is_not_discarded(tmp_path: Path) -> None:
    tensors = {"frozen": torch.ones(100), "lora": torch.zeros(3)}
    for step in (1, 2, 3):
        tensors["lora"] += step
        save({"model": tensors}, tmp_path / str(step), base=True, step=step)
    assert not discard(str(tmp_path / "1"))  # has what the others did not write
    assert discard(str(tmp_path / "2"))
    assert ucformat.verify(tmp_path / "3")
    assert discard(str(tmp_path / "3"))
    assert discard(str(tmp_path / "1"))


def test_objects_beside_each_other(bucket: Bucket) -> None:
    root = bucket.place("bases/run")
    tensors = {"frozen": torch.arange(1000.0), "lora": torch.zeros(3)}
    save({"model": tensors}, f"{root}/1")
    tensors["lora"] += 1
    done = save({"model": tensors}, f"{root}/2", base="latest")
    assert done.referenced == 4000
    ck = ucformat.open(f"{root}/2")
    assert ck.manifest.bases[0].url == "../1"
    assert torch.equal(ck["frozen"].torch(), tensors["frozen"])
    assert ucformat.verify(ck)


def test_bases_that_are_refused(tmp_path: Path) -> None:
    tensors = {"model": {"w": torch.ones(3)}}
    save(tensors, tmp_path / "1", base=True)  # there is none yet
    assert not ucformat.open(tmp_path / "1").manifest.bases
    with pytest.raises(UsageError, match="cannot be based on the checkpoint that it replaces"):
        save(tensors, tmp_path / "1", base=tmp_path / "1", overwrite=True)
    save(tensors, tmp_path / "1", base=True, overwrite=True)  # itself is not beside it
    torch.save(tensors, tmp_path / "w.pt")
    with pytest.raises(UnsupportedError, match="--virtual --checksums"):
        save(tensors, tmp_path / "2", base=tmp_path / "w.pt")
    assert not (tmp_path / "2").exists()


def test_the_newest_is_no_base_if_no_more_can_be_based_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(increments, "MAX_CHAIN", 2)
    weights = torch.zeros(40_000)
    for step in range(4):
        weights[step] = 1
        save({"w": weights}, tmp_path / str(step), step=step, base=True, patch=True)
    bases = [ucformat.open(tmp_path / str(step)).manifest.bases for step in range(4)]
    assert [[base.url for base in docs] for docs in bases] == [[], ["../0"], ["../1"], []]
    with pytest.raises(UsageError, match="2 checkpoints are patches of each other"):
        save({"w": weights + 1}, tmp_path / "5", base=tmp_path / "2", patch=True)
