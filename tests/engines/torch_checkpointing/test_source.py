"""torch_checkpointing's checkpoints, as it wrote them, against the live tensors."""

from __future__ import annotations

import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.sources.suite import SourceSuite, kept
from ucformat.checkpoint import open_checkpoint
from ucformat.engines.torch_checkpointing.opened import OpenTorchCheckpointing, RankItems
from ucformat.engines.torch_checkpointing.sharding import read_metadata
from ucformat.errors import IntegrityError, MissingData, UcformatError, UnsupportedError
from ucformat.geometry.distribution import order_of_cuts
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

_NAMES = ("fsdp2", "fsdp2-tp", "without-metadata", "safetensors", "boxes")


def sample_of(name: str) -> Sample:
    made = kept("torch_checkpointing", name)
    return Sample(
        folder=made.folder,
        place="ckpt",
        kind="torch_checkpointing",
        truth=made.truth,
        groups=made.facts["groups"],
        step=made.facts["step"],
    )


class TestTorchCheckpointing(SourceSuite):
    most_read = 2.0  # the files are small
    outranked = frozenset({"torch_save"})

    @pytest.fixture(params=_NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return sample_of(request.param)


def copied(name: str, folder: Path) -> Path:
    shutil.copytree(sample_of(name).path, folder / "ckpt")
    return folder / "ckpt"


def test_values_of_ranks_are_kept() -> None:
    ck = sample_of("fsdp2").open()
    objects = ck.metadata.objects
    assert isinstance(ck.source, OpenTorchCheckpointing)
    assert isinstance(ck.source.items, RankItems)
    kept = {fqn: len(of_ranks) for fqn, of_ranks in ck.source.items._values.items()}
    assert kept.pop("loader.position") == 3
    assert set(kept.values()) == {1}  # what all ranks have alike is kept once
    assert objects["loader"] == {"position": 7, "seed": 5}
    assert objects["rank"] == {
        "1": {"loader": {"position": 8}},
        "2": {"loader": {"position": 9}},
    }


def test_files_of_other_formats_without_a_resharder_are_shown_as_not_read() -> None:
    """The library records the layout of no item without a resharder."""
    ck = sample_of("safetensors").open()
    assert "config" not in ck.metadata.objects
    assert "weights/model-1.safetensors" in ck.metadata.files


def test_a_rank_that_did_not_save_an_item_is_named(tmp_path: Path) -> None:
    place = copied("fsdp2", tmp_path)
    (place / "loader_1.pt").unlink()
    with pytest.raises(MissingData, match=r"loader_1\.pt is missing"):
        open_checkpoint(place)
    ck = open_checkpoint(place, options={"some_ranks": ["loader"]})
    assert ck.metadata.objects["rank"] == {"2": {"loader": {"position": 9}}}


def test_a_later_save_of_the_same_run_lacks_the_metadata_and_opens(tmp_path: Path) -> None:
    """`SyncCheckpointSaver` writes `metadata.pkl` only with the first of a run."""
    for name in ("fsdp2", "fsdp2-tp"):
        place = copied(name, tmp_path / name)
        (place / "metadata.pkl").unlink()
        assert read_whole(open_checkpoint(place)) == sample_of(name).truth


def test_shards_of_safetensors_without_the_metadata_are_refused(tmp_path: Path) -> None:
    place = copied("safetensors", tmp_path)
    (place / "metadata.pkl").unlink()
    with pytest.raises(MissingData, match=r"metadata\.pkl is missing, which says what weights/"):
        open_checkpoint(place)


def saved_by_ranks(place: Path, *values: Any) -> Path:
    """What ranks save of an item `model` without a resharder, and one DTensor's trace to be recognised by."""
    place.mkdir(parents=True)
    for rank, value in enumerate(values):
        torch.save(value, place / f"model_{rank}.pt")
    metadata = {"metadata": {}, "world_size": len(values), "version": "2.0"}
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return place


def test_what_nothing_describes_is_whole_if_it_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    same = saved_by_ranks(tmp_path / "same", *[{"w": torch.ones(3, 2)}] * 2)
    assert open_checkpoint(same)["w", "weight"][...].shape == (3, 2)
    other = saved_by_ranks(tmp_path / "other", {"w": torch.ones(3, 2)}, {"w": torch.zeros(3, 2)})
    with pytest.raises(UnsupportedError, match="differs between ranks, and nothing says how"):
        open_checkpoint(other)["w", "weight"]
    seeds = saved_by_ranks(
        tmp_path / "seeds",
        {"w": torch.ones(3, 2), "rng": torch.arange(4)},
        {"w": torch.ones(3, 2), "rng": torch.arange(5)},
    )
    objects = open_checkpoint(seeds).metadata.objects
    assert objects["model"]["rng"] != objects["rank"]["1"]["model"]["rng"]


def test_replicas_that_differ_are_named(tmp_path: Path) -> None:
    """`DefaultResharder` takes every plain tensor for a replica, also the local part of a tensor parallel layer."""
    place = copied("fsdp2", tmp_path)
    file = place / "model_1.pt"
    with torch.serialization.safe_globals([]):
        state = torch.load(file, weights_only=False)
    state["scale"] = state["scale"] + 1
    torch.save(state, file)
    ck = open_checkpoint(place)
    with pytest.raises(UnsupportedError, match="the metadata says that it is replicated"):
        ck["scale", "weight"]
    assert ("weight", "down.weight") in {(k.state, k.name) for k in ck.tensors}


def changed(place: Path, change: Any) -> Path:
    """A checkpoint whose pickled metadata is changed by a function."""
    metadata = pickle.loads((place / "metadata.pkl").read_bytes())  # noqa: S301 - our own
    change(metadata)
    (place / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return place


def test_metadata_that_cannot_be_is_refused(tmp_path: Path) -> None:
    def groups(metadata: Any) -> Any:
        return metadata["metadata"]["model"]["nested_path_to_metadata"]['["down.weight"]']

    def data(metadata: Any) -> Any:
        return groups(metadata)[0]["sharding_metadata"]["data"]

    cases: dict[str, tuple[Any, type[Exception], str]] = {
        "version": (lambda m: m.update(version="1.0"), UnsupportedError, "has the version '1.0'"),
        "world": (lambda m: m.update(world_size=0), IntegrityError, "world size 0"),
        "kind": (
            lambda m: groups(m)[0]["sharding_metadata"].update(type="mine"),
            UnsupportedError,
            "of a resharder that ucformat does not know",
        ),
        "mesh": (
            lambda m: data(m)["mesh_spec"].update(mesh_data=(0, 0, 1)),
            IntegrityError,
            "with the ranks",
        ),
        "dim": (
            lambda m: data(m).update(placements=[{"type": "Shard", "dim": 5}]),
            IntegrityError,
            "is cut along 5 of 2 dims",
        ),
        "strides": (
            lambda m: data(m).update(
                placements=[{"type": "StridedShard", "dim": 0, "split_factor": 5}]
            ),
            UnsupportedError,
            "in strides that no order of cuts",
        ),
        "partial": (
            lambda m: data(m).update(placements=[{"type": "Partial"}]),
            UnsupportedError,
            "has the placement 'Partial'",
        ),
        "elsewhere": (
            lambda m: m["metadata"]["model"]["rank_to_layout_info"].update(
                {
                    1: {
                        "file_path": "../model_1.pt",
                        "serialization_format": {"type": "TorchSerialization"},
                    }
                }
            ),
            UcformatError,
            "does not stay inside its checkpoint",
        ),
    }
    for name, (change, error, message) in cases.items():
        with pytest.raises(error, match=message):
            open_checkpoint(changed(copied("fsdp2", tmp_path / name), change))


@pytest.mark.parametrize(
    "change", [{"global_shape": [12, 14]}, {"global_shape": [4, 14]}, {"dtype": "torch.int32"}]
)
def test_metadata_of_another_tensor_does_not_fit_the_files(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Neither of a larger one, nor of a smaller one, of which all elements are there."""

    def other(metadata: Any) -> None:
        for group in metadata["metadata"]["model"]["nested_path_to_metadata"]['["down.weight"]']:
            group["sharding_metadata"]["data"] |= change

    ck = open_checkpoint(changed(copied("fsdp2", tmp_path), other))
    with pytest.raises(IntegrityError, match="of different saves"):
        ck["down.weight", "weight"][...]


def test_nothing_that_metadata_pickles_is_run(tmp_path: Path) -> None:
    place = copied("fsdp2", tmp_path)
    ran = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> Any:
            return open, (str(ran), "w")

    (place / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}, "world_size": Runs()}))
    with pytest.raises(Exception, match="metadata"):
        open_checkpoint(place)
    assert not ran.exists()


def test_cuts_are_ordered_as_they_were_made() -> None:
    assert order_of_cuts([(2, 1), (3, 1)]) == [0, 1]  # from left to right
    assert order_of_cuts([(4, 2), (2, 1)]) == [1, 0]  # FSDP2 over tensor parallelism
    assert order_of_cuts([(2, 5), (2, 1)]) is None


def test_scale(tmp_path: Path) -> None:
    """What a description of 4096 ranks costs does not grow with its ranks."""
    ranks = 4096
    entry = {
        "sharding_metadata": {
            "type": "DTensorShardingMetadata",
            "data": {
                "global_shape": [1 << 20, 8],
                "dtype": "torch.float32",
                "stride": [8, 1],
                "mesh_spec": {"mesh_shape": (ranks,), "mesh_data": tuple(range(ranks))},
                "placements": [{"type": "Shard", "dim": 0}],
            },
        },
        "ranks": tuple(range(ranks)),
    }
    paths = {f'["layers.{i}.w"]': [entry] for i in range(50)}
    item = {"nested_path_to_metadata": paths, "rank_to_layout_info": {}}
    metadata = {"metadata": {"model": item}, "world_size": ranks, "version": "2.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    saved = read_metadata(LocalStore(tmp_path))
    shardings = saved.items["model"].shardings.values()
    assert {s.boxes for s in shardings} == {()}
    assert all(s.distribution and not s.distribution.mesh.listed for s in shardings)
