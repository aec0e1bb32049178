"""Exports from and to object stores hold the bytes of those on a disk; what is unfinished there is continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.sources.suite import DATA
from ucformat.errors import Conflict, NotFinished
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket

SOURCE = DATA / "dcp" / "fsdp2-uneven" / "ckpt"
MEGATRON = DATA / "megatron" / "pp2-bf16-tied" / "sharded"
KINDS: dict[str, tuple[Path, str, dict[str, Any]]] = {
    "safetensors": (SOURCE, "", {"max_shard_bytes": 2000}),
    "dcp": (SOURCE, "", {}),
    "torch": (SOURCE, "/out.pt", {"nested": True}),
    "npz": (SOURCE, "/out.npz", {"raw": True}),
    "npy": (SOURCE, "", {"raw": True}),
    "orbax": (SOURCE, "", {}),
    "deepspeed": (SOURCE, "", {"world": 2, "stage": 2}),
    "deepspeed-universal": (SOURCE, "", {"stage": 2}),
    "megatron": (MEGATRON, "", {}),
}


def files_of(place: str) -> dict[str, bytes]:
    store = open_store(place)
    return {info.key: store.read(info.key) for info in store.list()}


@pytest.fixture(scope="module")
def sources(bucket: Bucket) -> dict[Path, str]:
    """Copies of the sources in the bucket."""
    found = {}
    for folder in (SOURCE, MEGATRON):
        found[folder] = bucket.place()
        local, remote = LocalStore(folder), open_store(found[folder])
        for info in local.list():
            remote.put_if_absent(info.key, local.read(info.key))
    return found


@pytest.mark.front("safetensors", "dcp", "deepspeed")
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_on_a_disk(
    kind: str, tmp_path: Path, bucket: Bucket, sources: dict[Path, str]
) -> None:
    source, name, options = KINDS[kind]
    ucformat.export(source, f"{tmp_path}/out{name}", kind, **options)
    there = bucket.place()
    done = ucformat.export(sources[source], there + name, kind, **options)
    assert done.url == there + name
    wanted, found = files_of(str(tmp_path / "out")), files_of(there)
    assert found.keys() == wanted.keys()
    differ = [key for key in wanted if found[key] != wanted[key]]
    assert not differ
    with pytest.raises(Conflict):
        ucformat.export(sources[source], there + name, kind, **options)
    assert files_of(there) == found


def test_parts_and_overwriting(bucket: Bucket, sources: dict[Path, str]) -> None:
    place, options = bucket.place(), KINDS["safetensors"][2]
    for index in (1, 0):
        with pytest.raises(NotFinished):
            ucformat.export(sources[SOURCE], place, "safetensors", on=f"part:{index}/2", **options)
    assert "model.safetensors.index.json" not in files_of(place)
    ucformat.export(sources[SOURCE], place, "safetensors", on="commit", **options)
    whole = files_of(place)
    assert "model.safetensors.index.json" in whole
    ucformat.export(sources[SOURCE], place, "safetensors", overwrite=True)
    assert "model.safetensors" in files_of(place)
    assert not set(whole) & set(files_of(place))
