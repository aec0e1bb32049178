"""PyTorch DCP checkpoints of every layout, as torch wrote them, against the live tensors."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.sources.suite import DATA, SourceSuite, kept
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.pytorch.dcp_shards import _offsets
from ucformat.engines.pytorch.source import Dcp
from ucformat.errors import IntegrityError, MissingData
from ucformat.sources.safetensors import SHARDING_INFO, Header
from ucformat.storage.local import LocalStore
from ucformat.testing.reading import Counting
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

#: Whatever of the training state is no model and no optimizer.
_EXTRA = {
    "hsdp-flat": "train.generator",
    "lightning": "average",
    "titan": "train_state.step",
    "wrapped-bf16": "app.train.generator",
}
_NAMES = (
    *(
        "fsdp2-uneven",
        "fsdp1-frozen",
        "hsdp-flat",
        "tp-strided",
        "wrapped-bf16",
        "sgd-hf",
        "stages",
        "numbered",
    ),
    *("titan", "lightning"),
)


def sample_of(name: str) -> Sample:
    made = kept("dcp", name)
    truth = made.truth
    if name == "fsdp2-uneven":
        assert (
            truth["weight", "head.weight"] == truth["weight", "embed.weight"]
        )  # tied: DCP stores it twice
    return Sample(
        folder=made.folder,
        place="ckpt",
        kind="lightning" if name == "lightning" else "dcp",
        truth=truth,
        groups=made.facts["groups"],
        step=made.facts["step"],
        extra=frozenset({("weight", _EXTRA.get(name, "train.generator"))}),
    )


class TestDcp(SourceSuite):
    outranked = frozenset({"dcp", "torch_save"})  # by Lightning, and its `meta.pt`
    most_requests = 400  # all items of a world of one are in one file

    def damageable(self, copy: Sample) -> list[Path]:
        """Of one checkpoint all files, of the others the metadata and one rank's, for all are read alike."""
        files = super().damageable(copy)
        return files if len(files) == 7 else files[:2]  # fsdp2-uneven: three ranks, two threads

    @pytest.fixture(params=_NAMES)
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return sample_of(request.param)


class TestSafetensorsShards(SourceSuite):
    """What `HuggingFaceStorageWriter(save_distributed=True)` wrote: weights alone."""

    outranked = frozenset({"safetensors"})

    @pytest.fixture(params=["hf", "hf-joined/sharded", "hf-joined"])
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        made = kept("dcp", "sgd-hf")
        truth = {k: v for k, v in made.truth.items() if k[0] == "weight"}
        kind = "safetensors" if request.param == "hf-joined" else "dcp"
        return Sample(folder=made.folder, place=request.param, kind=kind, truth=truth)


@pytest.mark.parametrize("offset", [-1, 1 << 62, 1.0, True, "0", None])
def test_offsets_of_pieces_that_cannot_be(offset: object) -> None:
    def read(offset: object) -> Any:
        return _offsets(
            Header(
                "x", {}, {}, {SHARDING_INFO: json.dumps({"w": {"saved_offsets": [0, offset]}})}, {}
            )
        )

    assert read((1 << 62) - 1) == {"w": (0, (1 << 62) - 1)}
    with pytest.raises(IntegrityError, match="has impossible offsets"):
        read(offset)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "dcp" / "fsdp2-uneven" / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("cut", [None, 100])
def test_a_rank_s_file_that_is_missing_or_short_is_named_with_the_tensor(
    copy: Path, cut: int | None
) -> None:
    file = copy / "__2_0.distcp"
    data = file.read_bytes()
    file.unlink()
    if cut is not None:
        file.write_bytes(data[:cut])
    ck = open_checkpoint(copy)
    with pytest.raises(
        MissingData, match=r"__2_0\.distcp.*(embed|up|down|norm|head)\S* \(weight\)"
    ):
        read_whole(ck)


def test_hyper_parameters_objects_and_layout() -> None:
    ck = sample_of("fsdp2-uneven").open()
    assert [g["weight_decay"] for g in ck.metadata.groups] == [0.01, 0.02]
    assert ck.metadata.groups[0]["betas"] == {"$tuple": [0.9, 0.999]}
    assert dict(ck.objects) == {"train": {"step": 2, "note": ["a", {"b": 1.5}]}}
    assert ck.metadata.engine["name"] == "torch.distributed.checkpoint"
    flat = sample_of("hsdp-flat").open()
    assert [g["weight_decay"] for g in flat.metadata.groups] == [0.01, 0.02]


def test_lightning_keeps_the_rest_beside_the_tensors(tmp_path: Path) -> None:
    shutil.copytree(sample_of("lightning").path, tmp_path / "ckpt")
    ck = open_checkpoint(tmp_path / "ckpt")
    assert ck.objects["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] == 2
    assert ck.objects["lr_schedulers"][0]["last_epoch"] == 2
    assert ck.objects["average"] == {"$ref": "average"}
    assert ck["average"].read().tolist() == list(range(20_000))
    assert ck.manifest.config == {"lr": 0.01, "note": "hello"}
    assert ck.metadata.engine == {
        "name": "lightning",
        "version": "2.6.6",
        "format": "torch.distributed.checkpoint",
    }
    torch.save(
        {"loader": SourceSuite}, tmp_path / "ckpt" / "meta.pt"
    )  # a class that is not opened without trust
    assert open_checkpoint(tmp_path / "ckpt").objects["meta.pt"].keys() == {"$opaque"}


def test_a_save_is_known_by_what_its_writer_called_it(tmp_path: Path) -> None:
    place = DATA / "dcp" / "fsdp2-uneven" / "ckpt"
    shutil.copytree(place, tmp_path / "copy")
    store = Counting(LocalStore(tmp_path / "copy"))
    ck = Checkpoint(Dcp().open(store))
    store.requests.clear()
    assert ck.id == open_checkpoint(place).id
    assert not store.requests  # not the archives of all items
    assert ck.id != open_checkpoint(DATA / "dcp" / "titan" / "ckpt").id


def test_each_record_has_a_checksum_and_is_named_after_its_tensor() -> None:
    source = Dcp().open(LocalStore(sample_of("numbered").path))
    records = list(source.records())
    data = [r for r in records if "/data/0 of" in r.name]
    assert {r.name.rpartition(" of ")[2].partition("[")[0] for r in data} >= {
        "model.embed.weight",
        "model.head.weight",
    }
    assert all(r.crc32 is not None for r in data)


def test_files_of_ranks_without_metadata(copy: Path) -> None:
    (copy / ".metadata").unlink()
    torch.save({"model": {"w": torch.ones(2, 2)}}, copy / "meta.pt")  # which is not the checkpoint
    with pytest.raises(MissingData, match=r"has files of ranks, and no \.metadata"):
        open_checkpoint(copy)
