"""Foreign checkpoints in an object store open where they lie, by few requests, and are what they are on disk."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import random_array
from tests.sources.suite import DATA
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import open_checkpoint
from ucformat.storage.concurrency import map_io
from ucformat.storage.objects import ObjectStore
from ucformat.storage.wrappers import WrappedStore
from ucformat.testing.sources import read_whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.s3 import Bucket
    from ucformat.storage.base import Checksums, Info, Store

#: A checkpoint of each kind, and the most requests that opening it may take.
SAMPLES = {
    "bytecheckpoint/fsdp2/ckpt": 20,
    "dcp/fsdp2-uneven/ckpt": 10,
    "dcp/sgd-hf/ckpt": 20,
    "deepspeed/ep2-dp4-z1/ckpt": 50,
    "deepspeed/pp2-dp2-z1/ckpt": 40,
    "deepspeed/tp2-dp2-z3/ckpt": 40,
    "deepspeed/universal-z2/ckpt": 150,  # a file for each state of each parameter
    "huggingface/trainer_fsdp/ckpt": 40,
    "megatron/tp2-tied/classic": 20,
    "megatron/tp2-dp2-full/sharded": 20,
    "orbax/ocdbt_raw/ckpt": 20,
    "orbax/zarr3_files/ckpt": 60,
}


class Asked(WrappedStore):
    """Counts the requests that reading makes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = self.nbytes = 0

    def _count(self, nbytes: int = 0) -> None:
        self.requests += 1
        self.nbytes += nbytes

    def info(self, key: str) -> Info:
        self._count()
        return super().info(key)

    def list(self, prefix: str = "") -> Any:
        self._count()
        return super().list(prefix)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(key, offset, nbytes)
        self._count(len(data))
        return data

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        self._count(sum(b.nbytes for b in buffers))
        super().read_into(key, offset, buffers, crcs)


def uploaded(folder: Path, bucket: Bucket) -> Asked:
    """The files of a folder in a place of their own."""
    store = Asked(ObjectStore(bucket.place(uuid.uuid4().hex + "/a run"), _options(bucket)))

    def put(file: Path) -> None:
        with store.create(file.relative_to(folder).as_posix()) as out:
            out.write(file.read_bytes())

    map_io(put, [f for f in folder.rglob("*") if f.is_file()])
    return store


def _options(bucket: Bucket) -> Any:
    from ucformat.storage.clouds import Options

    return Options(endpoint=bucket.endpoint)


@pytest.mark.parametrize("sample", SAMPLES)
def test_it_is_what_it_is_on_disk(sample: str, bucket: Bucket) -> None:
    local, store = ucformat.open(DATA / sample), uploaded(DATA / sample, bucket)
    ck = open_checkpoint(store)
    assert store.requests <= SAMPLES[sample]
    assert (ck.kind, ck.aliases, ck.metadata.groups, ck.metadata.step) == (
        *(local.kind, local.aliases),
        *(local.metadata.groups, local.metadata.step),
    )
    assert ck.objects == local.objects
    assert read_whole(ck) == read_whole(local)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.startswith("orbax")])
def test_a_row_takes_a_handful_of_requests(sample: str, bucket: Bucket) -> None:
    store = uploaded(DATA / sample, bucket)
    ck = open_checkpoint(store)
    wide = [k for k, i in ck.tensors.items() if len(i.shape) == 2 and i.shape[0] > 2]
    name, state = max(wide, key=lambda k: ck.tensors[k].nbytes)
    store.requests = store.nbytes = 0
    row = ck[name, state][1]
    assert store.requests <= (
        20 if sample.startswith("deepspeed/tp2") else 10
    )  # ranks' copies are compared once
    assert row.tobytes() == ucformat.open(DATA / sample)[name, state][1].tobytes()


def test_the_row_of_a_large_one_reads_no_more(tmp_path: Path, bucket: Bucket) -> None:
    """Of ZeRO 3 by 32 ranks: one file, its directory and pickle, and the row."""
    arrays = {("w", s): random_array((256, 2000), "float32", i) for i, s in enumerate(FLAT)}
    store = uploaded(write_zero3(tmp_path / "src", arrays, 32), bucket)
    ck = open_checkpoint(store)
    assert store.nbytes < 1 << 20
    store.requests = store.nbytes = 0
    row = ck["w", "exp_avg"][100]
    assert np.array_equal(row.view(np.uint32), arrays["w", "exp_avg"][100].view(np.uint32))
    assert store.requests <= 6  # its size, its end, its pickle, its step, and the row
    assert store.nbytes <= row.nbytes + (130 << 10)
