"""The ranks of a job open a checkpoint together: one of them reads its documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.torch.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTS = {"manifest.json", "extents.safetensors", "objects.json", "zarr.json", ".metadata", "*"}


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.together_program")


def test_one_rank_reads_the_documents(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run("documents", 3, tmp_path)
    for form in ("zarr", "packed"):
        made, equal, epoch, own = first[form]
        expected = ["manifest.json", "objects.json"] + ["extents.safetensors"] * (form == "packed")
        assert {m for m in made if m in DOCUMENTS} == set(expected)
        assert (equal, epoch, own) == (True, 3, 0)
        for rank, other in enumerate(others, 1):
            made, equal, epoch, own = other[form]
            assert not DOCUMENTS & set(made)
            assert (equal, epoch, own) == (True, 3, rank)


def test_one_rank_reads_those_of_foreign_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    first, *others = ranks.run("foreign", 3, tmp_path)
    assert ".metadata" in first["dcp"][0]
    for found in (first, *others):
        assert found["dcp"][1]
        assert found["model.safetensors"][1]
    for other in others:
        assert not DOCUMENTS & set(other["dcp"][0])
        # before its data is read its version is, which on a disk is that of the host
        assert set(other["model.safetensors"][0]) == {"model.safetensors"}
        assert len(other["model.safetensors"][0]) < len(first["model.safetensors"][0])


def test_what_ranks_name(ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run("references", 3, tmp_path)):
        assert found["reference"] == 2
        assert found["own"] == found["some open"] == 1 + rank % 2
        assert found["relative"] == 1
        for name in ("a path, no reference", "nowhere", "one of them nowhere"):
            assert found[name].get("kind") == "NotFound", name
        assert "rank 1: " in found["one of them nowhere"]["message"]


def test_a_checkpoint_that_is_replaced_is_noticed_on_all_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks.run("rewritten", 3, tmp_path):
        assert found["kind"] in ("Conflict", "MissingData")
