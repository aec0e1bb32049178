"""Pickled DTensors: what their meshes and placements say, in each version of PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.geometry.distribution import Cut
from ucformat.reading.stand_ins import Inert, LocalPart, StoredTensor
from ucformat.sources.pickle.allowed import PARTS
from ucformat.sources.pickle.dtensors import distribution_of_part, mesh_of
from ucformat.sources.pickle.file import TorchFile
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

LAYOUT = Inert("_MeshLayout", state={"shape": (2, 4), "stride": (4, 1)})


def stored(*shape: int) -> StoredTensor:
    return StoredTensor("1", "int32", shape, (1,) * len(shape), 0, math.prod(shape))


def mesh(**state: Any) -> Inert:
    return Inert("DeviceMesh", state=state)


@pytest.mark.parametrize("sizes", [(8,), (1, 8), (2, 1, 4), (2, 2, 2)])
def test_meshes_that_pytorch_pickles(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Axes of size 1 have no stride there."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(8).flip(0).view(sizes)
    torch.save(DeviceMesh("cpu", ranks, _init_backend=False, _rank=5), tmp_path / "mesh.pt")
    pickled = TorchFile(LocalStore(tmp_path), "mesh.pt", allow=(PARTS,)).value
    assert mesh_of(pickled) == (sizes, tuple(reversed(range(8))))


def test_some_axes_of_a_larger_mesh_are_those_of_the_rank_that_saved_it() -> None:
    axes = tuple(Inert("_FlatLayout", state={"shape": (2,), "stride": (s,)}) for s in (4, 1))
    layout = Inert("_MeshLayout", state={"axes": axes})
    root = tuple(range(10, 18))
    assert mesh_of(mesh(_layout=layout, _flatten_rank_map=root, _rank=13)) == (
        (2, 2),
        (12, 13, 16, 17),
    )
    for outside in (None, 5):
        assert mesh_of(mesh(_layout=layout, _flatten_rank_map=root, _rank=outside)) is None


def test_meshes_of_earlier_versions_of_pytorch() -> None:
    """A mesh had the tensor of its ranks, then a layout of shapes, then one of axes."""
    ranks = tuple(range(8))
    assert mesh_of(mesh(mesh=stored(2, 4), _flatten_mesh_list=ranks)) == ((2, 4), ranks)
    assert mesh_of(mesh(_layout=LAYOUT, _flatten_mesh_list=ranks)) == ((2, 4), ranks)
    for shape, stride, sizes in (
        (8, 1, (8,)),
        ((2, 4), (4, 1), (2, 4)),
        (((2, 2), 2), ((4, 2), 1), (4, 2)),
    ):
        layout = Inert("_MeshLayout", state={"shape": shape, "stride": stride})
        assert mesh_of(mesh(_layout=layout, _flatten_rank_map=ranks)) == (sizes, ranks)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"mesh": stored(2, 4)},
        {"mesh": stored(2, 4), "_flatten_mesh_list": tuple(range(7))},
        {"_layout": LAYOUT},
        {"_layout": LAYOUT, "_flatten_rank_map": ("0",) * 8},
        {"_layout": Inert("_MeshLayout", state={"shape": None}), "_flatten_rank_map": (0,)},
        {"_layout": Inert("_MeshLayout", state={"axes": (None,)}), "_flatten_rank_map": (0,)},
        {
            "_layout": Inert("_MeshLayout", state={"shape": 1 << 40, "stride": 1}),
            "_flatten_rank_map": (0, 1),
            "_rank": 0,
        },
    ],
)
def test_meshes_that_cannot_be_read(state: dict[str, Any]) -> None:
    """None of them takes long, whatever sizes it has."""
    assert mesh_of(mesh(**state)) is None
    assert mesh_of(None) is None


def test_placements() -> None:
    whole = mesh(_layout=LAYOUT, _flatten_rank_map=tuple(range(8)))

    def cuts(*placements: Any) -> tuple[Cut, ...] | None:
        spec = Inert("DTensorSpec", state={"mesh": whole, "placements": placements})
        part = LocalPart(stored(1, 16), whole=False, shape=(8, 16), spec=spec)
        distribution = distribution_of_part("w", part)
        return None if distribution is None else distribution.cuts

    replicate = Inert("torch.Replicate")
    shard = Inert("torch.Shard", state={"dim": 0})
    strided = Inert("torch._StridedShard", state={"dim": 0, "split_factor": 4})
    assert cuts(replicate, shard) == (Cut(0, 1),)
    assert cuts(shard, shard) == (Cut(0, 0), Cut(0, 1))
    assert cuts(strided, shard) == (Cut(0, 1), Cut(0, 0))  # FSDP2 over tensor parallelism
    for placements, error, message in (
        ((replicate, Inert("torch.Partial")), UnsupportedError, "the placement 'Partial'"),
        ((replicate, 7), UnsupportedError, "the placement '7'"),
        ((shard,), IntegrityError, "1 placements"),
        ((shard, Inert("torch.Shard", state={"dim": 2})), IntegrityError, "along 2 of 2 dims"),
    ):
        with pytest.raises(error, match=message):
            cuts(*placements)
    assert distribution_of_part("w", LocalPart(stored(8), whole=False, shape=(8,))) is None
