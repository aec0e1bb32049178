"""The sidecar of extents: round trip, and nothing believed that does not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

import ucformat
from tests.fakes import ODD, FakeSource, same
from ucformat.errors import IntegrityError, MissingData, Refused
from ucformat.format.commit import begin, commit, new_id
from ucformat.format.digest import bytes_digest
from ucformat.format.sidecar import decode, encode
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import Block, Extent
from ucformat.schema.manifest import Manifest, SidecarDoc, TensorDoc
from ucformat.storage.memory import MemoryStore

N = st.integers(0, 2**40)


@st.composite
def extents(draw: st.DrawFn) -> list[list[Extent]]:
    tensors = []
    for ndim in draw(st.lists(st.integers(0, 4), max_size=4)):
        dims = st.lists(N, min_size=ndim, max_size=ndim).map(tuple)
        tensors.append(
            [
                Extent(
                    Box(draw(dims), draw(dims)),
                    draw(st.sampled_from(["a", "b/c"])),
                    draw(N),
                    draw(dims),
                    draw(st.none() | st.builds(Block, N, N, st.none() | st.integers(0, 2**32 - 1))),
                )
                for _ in range(draw(st.integers(0, 3)))
            ]
        )
    return tensors


@given(extents(), st.data())
def test_what_is_encoded_is_decoded(tensors: list[list[Extent]], data: st.DataObject) -> None:
    ndims = [len(t[0].box.shape) if t else 0 for t in tensors]
    assert decode(encode(tensors), ndims, "sidecar") == [tuple(t) for t in tensors]


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(IntegrityError):
        decode(noise, [1], "sidecar")


def columns(**changed: object) -> dict[str, np.ndarray]:
    base = {
        k: [0]
        for k in ("tensor", "file", "offset", "block_offset", "block_nbytes", "crc32c", "start", "shape", "strides")
    }
    return {k: np.asarray(v, "<i8") for k, v in {**base, **changed}.items()}


@pytest.mark.parametrize(
    "changed",
    [{"tensor": [7]}, {"tensor": [-1]}, {"file": [3]}, {"offset": [-4]}, {"shape": [1, 2]}, {"offset": [1, 2]}],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, list[int]]) -> None:
    data = save(columns(**changed), {"format": "ucformat-extents", "version": "1", "files": json.dumps(["f"])})
    with pytest.raises(IntegrityError):
        decode(data, [1], "sidecar")


@pytest.mark.parametrize("file", ["/etc/passwd", "s3://other/file", "file:///etc/passwd", 7])
def test_files_outside_the_checkpoint_are_refused(file: object) -> None:
    data = save(columns(), {"format": "ucformat-extents", "version": "1", "files": json.dumps([file])})
    with pytest.raises(Refused, match="outside its checkpoint"):
        decode(data, [1], "sidecar")


def packed(name: str, ranks: int = 3) -> MemoryStore:
    """A committed checkpoint whose tensors are extents in files of its own: the packed form."""
    store = MemoryStore(name)
    attempt = begin(store, {"test": name}, overwrite=False)
    source = FakeSource.write(store, ODD, ranks)
    infos = source.facts.roster.tensors
    data = encode([source.extents(i.key) for i in infos])
    path = f"data/{attempt.id}/extents.safetensors"
    with store.create(path) as out:
        out.write(data)
    tensors = [TensorDoc(name=i.name, state=i.state, dtype=i.dtype, shape=i.shape, nbytes=i.nbytes) for i in infos]
    manifest = Manifest(
        id=new_id(),
        attempt=attempt.id,
        created="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        tensors=tuple(tensors),
        sidecar=SidecarDoc(path=path, nbytes=len(data), digest=bytes_digest(data)),
    )
    commit(store, attempt, manifest)
    return store


def test_a_packed_checkpoint_opens_reads_verifies_and_becomes_arrays() -> None:
    ck = ucformat.open(packed("packed"))
    for key, a in ODD.items():
        assert same(ck[key][...], a), key
    assert same(ck["embed.weight"][3:9, 4:], ODD["embed.weight", "weight"][3:9, 4:])
    report = ucformat.verify(ck)
    assert report
    assert report.bytes_unverified > 0
    arrays = ucformat.convert(ck, MemoryStore("packed-arrays"))
    for key, a in ODD.items():
        assert same(arrays[key][...], a), key


def test_a_changed_sidecar_is_found() -> None:
    store = packed("packed-damaged")
    key = next(i.key for i in store.list("data"))
    data = bytearray(store.read(key))
    data[-5] ^= 1
    with store.create(key) as out:
        out.write(bytes(data))
    with pytest.raises(IntegrityError, match="is not what was committed"):
        ucformat.open(store)["table"][...]
    assert not ucformat.verify(store)


def test_an_extent_past_the_end_of_its_file_is_an_error() -> None:
    store = packed("packed-short")
    with store.create("rank1.bin") as out:
        out.write(store.read("rank1.bin", 0, 1000))
    with pytest.raises(MissingData, match=r"rank1\.bin"):
        ucformat.open(store)["table"][...]
    report = ucformat.verify(store)
    assert {p.file for p in report.problems} == {"rank1.bin"}
