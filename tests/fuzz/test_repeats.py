"""Small files whose documents name the same bytes again and again: reading all of it would take far more than its size.

Each is refused before its tensors are read; what programs do with names of shared bytes is read, each byte once.
"""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import ucformat
from tests.sources.torch_files import dictionary, save, storage, tensor
from ucformat.cli.main import ucp
from ucformat.errors import IntegrityError, UnsafeError
from ucformat.format.extents import extent_problems
from ucformat.format.sidecar import NO_BLOCK, Columns, Sidecar
from ucformat.reading.repeats import are_repeated, repeated_bytes
from ucformat.schema.limits import FREE_READS, MOST_READS
from ucformat.schema.manifest import SidecarDoc, SourceFileDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.sources.orbax import ocdbt
from ucformat.sources.orbax.ocdbt import read_ocdbt
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20
OFTEN = 200  # names of a MiB: more than 16, and 64 MiB besides


class Counting(MemoryStore):
    """Counts the bytes that are read."""

    nbytes = 0

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        data = super().read(key, offset, nbytes)
        self.nbytes += len(data)
        return data

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Any = None) -> None:
        self.nbytes += sum(b.nbytes for b in buffers)
        super().read_into(key, offset, buffers, crcs)


@pytest.fixture
def counting(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Counting]]:
    """Copies a folder into a store that counts."""
    store = Counting(f"repeats-{request.node.name}")

    def copied(folder: Path) -> Counting:
        for path in folder.rglob("*"):
            if path.is_file():
                with store.create(path.relative_to(folder).as_posix()) as out:
                    out.write(path.read_bytes())
        return store

    yield copied
    for info in list(store.list()):
        store.delete(info.key)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def views_in_torch_save(folder: Path, count: int) -> None:
    """Windows of one storage."""
    each = {f"w{i}": tensor(((MIB >> 2) - i,), (1,), 0, storage("0", MIB >> 2)) for i in range(count)}
    save(folder / "m.pt", dictionary(**each), {"0": bytes(MIB)})


def items_of_dcp(folder: Path, count: int) -> None:
    """Entries at the same place, as those of tied tensors are."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w0": torch.ones(MIB >> 2)}, checkpoint_id=folder, no_dist=True)
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())  # noqa: S301 - DCP has just written it
    ((index, place),) = found.storage_data.items()
    for n in range(1, count):
        found.state_dict_metadata[f"w{n}"] = found.state_dict_metadata["w0"]
        found.planner_data[f"w{n}"] = (f"w{n}",)
        found.storage_data[type(index)(f"w{n}", index.offset, index.index)] = place
    path.write_bytes(pickle.dumps(found))


def chunks_of_a_shard(folder: Path, count: int) -> None:
    """The index of a Zarr shard that puts each chunk at its beginning."""
    inner = {
        "chunk_shape": [MIB >> 2],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [count * (MIB >> 2)],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [count * (MIB >> 2)]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    (folder / "w" / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
    (folder / "w" / "zarr.json").write_text(json.dumps(document))
    index = np.array([(0, MIB)] * count, "<u8").tobytes()
    (folder / "w" / "c" / "0").write_bytes(bytes(MIB) + index + checksum(memoryview(index)).to_bytes(4, "little"))


MAKERS = [views_in_torch_save, items_of_dcp, chunks_of_a_shard]


@pytest.mark.parametrize("make", MAKERS)
def test_what_names_a_byte_again_and_again_is_refused_before_it_is_read(
    make: Callable[[Path, int], None], tmp_path: Path, counting: Callable[[Path], Counting]
) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    make(folder, OFTEN)
    store = counting(folder)
    for use in (read_all, problems_of, lambda ck: ucformat.convert(ck, tmp_path / "out")):
        store.nbytes = 0
        with pytest.raises((IntegrityError, UnsafeError), match=r"far more than it has|far larger than the file"):
            use(ucformat.open(store))
        assert store.nbytes < 3 * size_of(folder)
    name = "w" if make is chunks_of_a_shard else "w0"
    for line in (
        ["verify", folder],
        ["get", folder, name, "-o", tmp_path / "out.npy"],
        ["convert", folder, tmp_path / "out"],
    ):
        done = CliRunner().invoke(ucp, list(map(str, line)))
        assert done.exit_code
        assert "far more" in done.output or "far larger" in done.output
        assert "Traceback" not in done.output


def problems_of(ck: ucformat.Checkpoint) -> None:
    for problem in ucformat.verify(ck).problems:
        raise IntegrityError(problem.reason)


def read_all(ck: ucformat.Checkpoint) -> None:
    for each in ck.values():
        each.read()


@pytest.mark.parametrize("make", [views_in_torch_save, items_of_dcp])
def test_what_programs_share_is_read_and_verified_once(
    make: Callable[[Path, int], None], tmp_path: Path, counting: Callable[[Path], Counting]
) -> None:
    make(tmp_path, 12)
    store = counting(tmp_path)
    ck = ucformat.open(store)
    assert len(ck) == 12
    assert {each.read().nbytes // MIB for each in ck.values()} <= {0, 1}
    store.nbytes = 0
    assert not ucformat.verify(ucformat.open(store)).problems
    assert store.nbytes < 3 * size_of(tmp_path)


def test_values_of_ocdbt_at_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ts = pytest.importorskip("tensorstore")
    kvs = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/"}).result()
    for n in range(OFTEN):
        kvs.write(f"{n:03}", bytes(128 if n else MIB)).result()
    store = LocalStore(tmp_path)
    sizes = {info.key: info.size for info in store.list()}
    assert len(read_ocdbt(store, "", sizes)) == OFTEN
    dump = ocdbt._dump

    def at_one_place(*args: Any) -> dict[str, Any]:
        found = dump(*args)
        first = next((e["indirect_value"] for e in found.get("entries", ()) if e["key"] == b"000"), None)
        return {**found, "entries": [e | {"indirect_value": first} for e in found.get("entries", ())]}

    monkeypatch.setattr(ocdbt, "_dump", lambda *args: at_one_place(*args) if args[2] == "node" else dump(*args))
    with pytest.raises(IntegrityError, match="far more than it has"):
        read_ocdbt(store, "", sizes)


@pytest.mark.parametrize(("file", "strides"), [("roots/0/m.bin", 1), ("data/x/rank0.bin", 1), ("roots/0/m.bin", 0)])
def test_extents_without_checksums(file: str, strides: int) -> None:
    for count, refused in ((MOST_READS, False), (OFTEN, True)):
        zeros, each = np.zeros(count, np.int64), np.full(count, MIB)
        columns = Columns(
            tensor=np.arange(count), file=zeros, offset=zeros, block_offset=zeros + NO_BLOCK, block_nbytes=zeros,
            crc32c=zeros, start=zeros, shape=each, strides=zeros + strides,
        )  # fmt: skip
        source = SourceFileDoc(path="roots/0/m.bin", nbytes=MIB, modified=None, etag=None, digest=None)
        doc = SidecarDoc(path="data/x", nbytes=1, digest="sha256:" + "0" * 64, roots=("file:///a",), sources=(source,))
        table = TensorTable.of(TensorDoc(f"t{n}", "weight", "uint8", (MIB,)) for n in range(count))
        found = list(extent_problems(doc, table, Sidecar(columns, (file,), np.ones(count, np.int64), None)))
        assert bool(found) == refused
        assert all("far more than it has" in problem.reason for problem in found)


def test_repeated_bytes_are_those_beyond_the_limit() -> None:
    begins = np.array([*range(20), 100], np.int64)
    stops = np.array([50] * 20 + [1 << 62], np.int64)
    counted = np.zeros(60, np.int64)
    for begin, stop in zip(begins[:20], stops[:20], strict=True):
        counted[begin:stop] += 1
    assert repeated_bytes(begins, stops) == np.maximum(counted - MOST_READS, 0).sum()
    whole, end = np.zeros(MOST_READS + 1, np.int64), np.full(MOST_READS + 1, FREE_READS)
    assert not are_repeated(whole, end)
    assert are_repeated(whole, end + 1)
