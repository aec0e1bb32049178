"""One name is one tensor: a save refuses ranks that publish different ones, unless `names=` tells them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.torch.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

RANKS = Ranks("tests.torch.identity_program")


@pytest.mark.front("zarr-plain-2", "packed-fsdp2-4")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "fsdp2"])
@pytest.mark.parametrize("form", ["zarr", "packed", "safetensors"])
def test_stages_that_number_their_layers_from_zero(
    tmp_path: Path, form: str, kind: str, size: int
) -> None:
    results = RANKS.run("stages", size, tmp_path, kind=kind, form=form)
    for refused, names, certified, different, unexpected in results:
        assert "layers.0.weight (" in refused
        first, second = range(size // 2), range(size // 2, size)
        assert any(
            f"has a different value on rank {b} than on rank {a}" in refused
            for a in first
            for b in second
        )
        assert "names= gives each its name in the whole model" in refused
        assert names == [f"layers.{n}.weight" for n in range(4)]
        assert certified
        assert different == ["layers.0.weight", "layers.1.weight"]
        assert unexpected == ["layers.2.weight", "layers.3.weight"]


@pytest.mark.front("packed")
@pytest.mark.parametrize("form", ["zarr", "packed", "safetensors"])
def test_one_element_of_a_large_replica(tmp_path: Path, form: str) -> None:
    for refused in RANKS.run("one_element", 2, tmp_path, form=form):
        assert "w (weight) has a different value on rank 1 than on rank 0" in refused


@pytest.mark.matrix
def test_meshes_that_cut_a_tensor_otherwise(tmp_path: Path) -> None:
    for refused in RANKS.run("another_mesh", 4, tmp_path):
        assert "w (weight) has a different value on rank" in refused
