"""Arrays whose chunks are compressed: saved, read in parts, verified, copied, and refused where they are damaged."""

from __future__ import annotations

import itertools
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xarray
import zarr

import ucformat
import ucformat.torch as uct
from tests.fakes import FakeSource, random_array, same
from ucformat.checkpoint import Checkpoint
from ucformat.errors import IntegrityError, MissingData, UnsupportedError, UsageError
from ucformat.format.arrays import lay_out
from ucformat.format.chunking import Grid
from ucformat.format.encoding import compress
from ucformat.format.shard import index_of, write_shard
from ucformat.geometry.box import Box
from ucformat.geometry.tensor import TensorInfo
from ucformat.jobs import shards
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.format.arrays import StoredArray
    from ucformat.storage.base import Store

GRIDS: dict[str, Any] = {"chunk_bytes": 512, "shard_bytes": 2048}


def values() -> dict[tuple[str, str], Any]:
    """Values that shrink, and some that do not."""
    whole = np.arange(37 * 53, dtype="f4").reshape(37, 53)
    return {
        ("a", "weight"): whole,
        ("b", "weight"): random_array((70, 30), "bfloat16", 3),
        ("scale", "weight"): np.array(2.5, "f4"),
        ("none", "weight"): np.zeros((0, 4), "f4"),
        ("a", "exp_avg"): whole * 0,
    }


def source() -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore("encoded-source"), values()))


def check(ck: Checkpoint) -> None:
    assert ck.manifest.requires == ("codecs",)
    assert {kind.codec for kind in ck.manifest.tensors.kinds} == {"blosc"}
    for (name, state), a in values().items():
        assert same(ck[name, state][...], a)
    a = values()["a", "weight"]
    assert same(ck["a"][5:21, 3:50], a[5:21, 3:50])
    assert same(ck["a"][::7, 40], a[::7, 40])
    report = ucformat.verify(ck)
    assert report.problems == ()
    assert not report.bytes_unverified


def test_a_conversion_and_copies_of_it(tmp_path: Path) -> None:
    plain = ucformat.convert(source(), tmp_path / "plain", **GRIDS)
    ck = ucformat.convert(source(), tmp_path / "ck", codec="blosc", **GRIDS)
    check(ck)
    assert [t.digest for t in ck.manifest.tensors] == [t.digest for t in plain.manifest.tensors]
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / name / "data").rglob("c/**/*") if f.is_file())
        for name in ("plain", "ck")
    ]
    assert sizes[1] < 0.8 * sizes[0]
    copied = ucformat.copy(ck, tmp_path / "copy")
    check(ucformat.open(tmp_path / "copy"))
    assert copied.id == ck.id
    ucformat.copy(ck, tmp_path / "decoded", codec="none")
    decoded = ucformat.open(tmp_path / "decoded")
    assert decoded.manifest.requires == ()
    assert decoded.manifest.tensors.digest == plain.manifest.tensors.digest
    assert not ucformat.verify(decoded).problems
    ucformat.copy(plain, tmp_path / "encoded", codec="blosc")
    check(ucformat.open(tmp_path / "encoded"))
    mean = ucformat.average([plain, ck], tmp_path / "mean", take="b", codec="blosc")
    assert same(mean["a"][...], plain["a"][...])
    assert {kind.codec for kind in mean.manifest.tensors.kinds} == {"blosc"}


def test_only_what_is_needed_is_read_and_each_chunk_is_decoded_into_place(tmp_path: Path) -> None:
    ucformat.convert(source(), tmp_path, codec="blosc", **GRIDS)
    store = RecordingStore(LocalStore(tmp_path))
    ck = ucformat.open(store)
    tensor, whole = ck["a"], values()["a", "weight"]
    shard = tensor.plan(Box((0, 0), (1, 1)))
    stored = sum(f.stat().st_size for f in tmp_path.rglob("c/**/*") if f.is_file())
    assert 0 < shard.bytes_read < ck["a"].plan().bytes_read < stored
    store.clear()
    out = np.empty_like(whole)
    tensor.read(out)
    assert same(out, whole)
    indexes = Grid.of(whole.shape, 4, 512, 2048).index_nbytes
    read = [r for r in store.reads if "/c/" in r.file]
    assert sum(r.nbytes for r in read if r.nbytes != indexes) == tensor.plan().bytes_read


@pytest.mark.parametrize("form", ["zarr", "safetensors"])
def test_a_save(form: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(400, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    state = {"model": model, "optim": optimizer}
    saved = uct.save(state, tmp_path / "ck", form=form, codec="blosc")
    ck = ucformat.open(saved.url)
    codecs = {kind.state: kind.codec for kind in ck.manifest.tensors.kinds}
    assert codecs.pop("weight") == (None if form == "safetensors" else "blosc")
    assert set(codecs.values()) == {"blosc"}
    assert not ucformat.verify(ck).problems
    loaded = torch.nn.Linear(400, 300)
    fresh = torch.optim.AdamW(loaded.parameters())
    uct.load({"model": loaded, "optim": fresh}, saved.url)
    assert all(map(torch.equal, model.parameters(), loaded.parameters()))
    first = [s["exp_avg"] for s in optimizer.state.values()]
    assert all(map(torch.equal, first, (s["exp_avg"] for s in fresh.state.values())))


def test_programs_of_others_read_it(tmp_path: Path) -> None:
    ck = ucformat.convert(source(), tmp_path, codec="blosc", **GRIDS)
    array = zarr.open_array(ck.zarr_store(), path="weight/a", mode="r")
    assert same(np.asarray(array[3:9]), values()["a", "weight"][3:9])
    opened = xarray.open_zarr(ck.zarr_store(), group="weight", consolidated=False)
    assert same(opened["b"].to_numpy(), values()["b", "weight"])
    direct = zarr.open_array(str(ck.zarr_url) + "/weight/a", mode="r")
    assert same(np.asarray(direct[...]), values()["a", "weight"])


def test_an_interrupted_conversion_keeps_intact_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, written = source(), list[str]()
    limit = 9

    def interrupted(store: Store, key: str, *rest: Any) -> bytes:
        if isinstance(store, LocalStore):
            if len(written) == limit:
                raise KeyboardInterrupt
            written.append(key)
        return write_shard(store, key, *rest)

    monkeypatch.setattr(shards, "write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ucformat.convert(foreign, tmp_path, codec="blosc", workers=1, **GRIDS)
    first = list(written)
    damaged = next(f for f in tmp_path.rglob("c/*/*") if f.is_file())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    written.clear()
    limit = -1
    check(ucformat.convert(foreign, tmp_path, codec="blosc", workers=1, **GRIDS))
    again = set(first) & set(written)
    assert again == {str(damaged.relative_to(tmp_path))}


def with_index(chunks: list[bytes], index: bytes) -> bytes:
    return b"".join(chunks) + index


def chunk_of(data: bytes, itemsize: int = 4) -> bytes:
    stored = compress(data, itemsize)
    return stored + checksum(stored).to_bytes(4, "little")


def damages(array: StoredArray, file: bytes) -> dict[str, bytes]:
    """Files in the place of a shard whose checksums are all right, and that no reader may believe."""
    grid = array.grid
    count = math.prod(grid.tiles((0, 0), "").grid)
    end = len(file) - grid.index_nbytes
    entries = np.frombuffer(file[end:-4], "<u8").reshape(-1, 2)
    sizes = entries[entries[:, 1] < 2**63, 1].astype(int).tolist()
    assert len(sizes) == count > 1
    begins = [0, *itertools.accumulate(sizes)]
    chunks = [file[a:b] for a, b in itertools.pairwise(begins)]

    def indexed(change: Any) -> bytes:
        changed = entries.copy()
        change(changed)
        data = changed.tobytes()
        return file[:end] + data + struct.pack("<I", checksum(data))

    def other_first(chunk: bytes) -> bytes:
        return with_index([chunk, *chunks[1:]], index_of(grid, (0, 0), [len(chunk), *sizes[1:]]))

    nbytes = grid.chunk_nbytes
    header = bytearray(chunks[0][:-4])
    header[4:8] = (1 << 30).to_bytes(4, "little")  # what it says that it decodes to
    return {
        "overlap": indexed(lambda e: e.__setitem__((1, 0), 0)),
        "swapped": indexed(lambda e: e.__setitem__(slice(0, 2), e[1::-1].copy())),
        "absent": indexed(lambda e: e.__setitem__(0, 2**64 - 1)),
        "far": indexed(lambda e: e.__setitem__((0, 0), 2**62)),
        "long": indexed(lambda e: e.__setitem__((0, 1), 2**62)),
        "empty": indexed(lambda e: e.__setitem__((0, 1), 0)),
        "gap": with_index([chunks[0], b"\0", *chunks[1:]], file[end:]),
        "short": file[8:],
        "cut": file[: len(file) // 2],
        "larger": other_first(chunk_of(bytes(nbytes + 4))),
        "smaller": other_first(chunk_of(bytes(nbytes - 4))),
        "itemsize": other_first(chunk_of(bytes(nbytes), 2)),
        "plain": other_first(bytes(nbytes) + checksum(bytes(nbytes)).to_bytes(4, "little")),
        "bomb": other_first(bytes(header) + checksum(bytes(header)).to_bytes(4, "little")),
        "flipped": bytes([file[0], file[1] ^ 1]) + file[2:],
    }


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    ck = ucformat.convert(source(), tmp_path, codec="blosc", **GRIDS)
    info = TensorInfo("a", "weight", "float32", (37, 53))
    (array,) = lay_out([info], "", 512, 2048)
    file = tmp_path / str(ck.manifest.tensors.folder(0)) / "c/0/0"
    intact = file.read_bytes()
    for what, data in damages(array, intact).items():
        file.write_bytes(data)
        with pytest.raises(IntegrityError):
            ucformat.open(tmp_path)["a"].read()
        problems = ucformat.verify(tmp_path).problems
        assert [p.name for p in problems] == ["a"], what
        assert problems[0].file.endswith("c/0/0")
        with pytest.raises(IntegrityError):
            ucformat.copy(tmp_path, f"{tmp_path}-copy")
    file.write_bytes(intact)
    check(ucformat.open(tmp_path))
    file.unlink()
    assert [p.kind for p in ucformat.verify(tmp_path).problems] == ["missing"]
    with pytest.raises(MissingData):
        ucformat.open(tmp_path)["a"].read()


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    large = TensorInfo("large", "weight", "float32", (1 << 30,))
    with pytest.raises(UnsupportedError, match=r"large \(weight\) would have chunks of"):
        lay_out([large], "", 1 << 31, codec="blosc")
    with pytest.raises(UsageError, match="codec='zip' is not supported"):
        ucformat.convert(source(), tmp_path, codec="zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="codec='zip' is not supported"):
        uct.save({"a": 1}, tmp_path, codec="zip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="virtual"):
        ucformat.convert(source(), tmp_path, codec="blosc", virtual=True)
    ucformat.torch.save({"w": torch.ones(3)}, tmp_path / "packed", form="packed")
    with pytest.raises(UnsupportedError, match="packed files"):
        ucformat.copy(tmp_path / "packed", tmp_path / "copy", codec="blosc")
