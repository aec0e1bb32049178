"""Small files whose documents name the same bytes again and again: reading all of it would take far more than its size.

Each is refused before its tensors are read; what programs do with names of shared bytes is read,
each byte once.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import ucformat
from tests.fakes import manifest_file
from tests.sources.torch_files import dictionary, save, storage, tensor
from ucformat.cli.main import ucp
from ucformat.engines.orbax import ocdbt
from ucformat.engines.orbax.ocdbt import read_ocdbt
from ucformat.errors import IntegrityError, UnsafeError
from ucformat.format.extents import extent_problems
from ucformat.format.sidecar import NO_BLOCK, Columns, Sidecar
from ucformat.reading.repeats import are_repeated, repeated_bytes
from ucformat.schema import MANIFEST
from ucformat.schema.limits import FREE_READS, MOST_READS
from ucformat.schema.manifest import SidecarDoc, SourceFileDoc
from ucformat.schema.tensors import TensorDoc, TensorTable
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Any = None
    ) -> None:
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
    each = {
        f"w{i}": tensor(((MIB >> 2) - i,), (1,), 0, storage("0", MIB >> 2)) for i in range(count)
    }
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
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
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
    (folder / "w" / "c" / "0").write_bytes(
        bytes(MIB) + index + checksum(memoryview(index)).to_bytes(4, "little")
    )


def universal(
    folder: Path, change: Callable[[dict[str, Any]], None], *, virtual: bool = False
) -> None:
    """A universal checkpoint of two files of a MiB, whose manifest somebody changed who knows the format."""
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    save_file({"w": np.ones(MIB >> 2, np.float32)}, source / "model.safetensors")
    (source / "tokenizer.model").write_bytes(bytes(MIB))
    ucformat.convert(source, folder, virtual=virtual, unprotected=virtual)
    document = json.loads((folder / MANIFEST).read_text())
    change(document)
    (folder / MANIFEST).write_bytes(manifest_file(document))


def assets_of_one_file(folder: Path, count: int) -> None:
    def change(document: dict[str, Any]) -> None:
        one = document["assets"]["tokenizer.model"]
        document["assets"] |= {f"{n}.model": one for n in range(count - 1)}

    universal(folder, change)


def arrays_in_one_folder(folder: Path, count: int) -> None:
    def change(document: dict[str, Any]) -> None:
        table = document["tensors"]
        path = f"{table['kinds'][0]['path']}/w"
        table["names"] = [f"w{n}" for n in range(count)]
        table["name"], table["kind"], table["digest"] = (
            list(range(count)),
            [0] * count,
            table["digest"] * count,
        )
        table["fingerprint"] *= count
        table["path"] = {str(n): path for n in range(count)}

    universal(folder, change)


def states_in_one_folder(folder: Path, count: int) -> None:
    def change(document: dict[str, Any]) -> None:
        table = document["tensors"]
        table["kinds"] = [{**table["kinds"][0], "state": f"s{n}"} for n in range(count)]
        table["name"], table["kind"], table["digest"] = (
            [0] * count,
            list(range(count)),
            table["digest"] * count,
        )
        table["fingerprint"] *= count

    universal(folder, change)


def roots_of_one_file(folder: Path, count: int) -> None:
    """Its root under all the names that it has, of a file that is compared with a digest."""

    def change(document: dict[str, Any]) -> None:
        (root,), (source,) = document["sidecar"]["roots"], document["sidecar"]["sources"]
        source["digest"] = (
            "sha256:" + hashlib.sha256((Path(root) / "model.safetensors").read_bytes()).hexdigest()
        )
        spelled = (
            root,
            f"{root}/",
            f"file://{root}",
            f"file://localhost{root}/.",
            f"{root}/x/..",
            f"/.{root}",
        )
        document["sidecar"]["roots"] = [spelled[n % len(spelled)] for n in range(count)]
        named = [{**source, "path": f"roots/{n}/model.safetensors"} for n in range(count)]
        document["sidecar"]["sources"] = named

    universal(folder, change, virtual=True)


OF_MANIFESTS = [assets_of_one_file, arrays_in_one_folder, states_in_one_folder, roots_of_one_file]


@pytest.mark.parametrize("make", OF_MANIFESTS)
def test_manifests_that_name_a_file_again_and_again(
    make: Callable[[Path, int], None], tmp_path: Path, counting: Callable[[Path], Counting]
) -> None:
    """Every command refuses them before it reads the file; a few names of one file are not refused."""
    folder = tmp_path / "src"
    make(folder, OFTEN)
    store = counting(folder)
    for use in (ucformat.open, problems_of, lambda place: ucformat.copy(place, tmp_path / "to")):
        store.nbytes = 0
        with pytest.raises(IntegrityError, match="so often that it is far more than it has"):
            use(store)
        assert store.nbytes < MIB
    for line in (
        ["show", folder],
        ["verify", folder],
        ["get", folder, "w", "-o", tmp_path / "out.npy"],
        ["convert", folder, tmp_path / "out"],
        ["copy", folder, tmp_path / "out"],
        ["export", "safetensors", folder, tmp_path / "out"],
    ):
        done = CliRunner().invoke(ucp, list(map(str, line)))
        assert done.exit_code
        assert "far more than it has" in done.output
        assert "Traceback" not in done.output
    make(tmp_path / "few", MOST_READS)
    assert ucformat.open(tmp_path / "few").tensors


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
        with pytest.raises(
            (IntegrityError, UnsafeError), match=r"far more than it has|far larger than the file"
        ):
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


def problems_of(ck: Any) -> None:
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
        first = next(
            (e["indirect_value"] for e in found.get("entries", ()) if e["key"] == b"000"), None
        )
        return {
            **found,
            "entries": [e | {"indirect_value": first} for e in found.get("entries", ())],
        }

    monkeypatch.setattr(
        ocdbt, "_dump", lambda *args: at_one_place(*args) if args[2] == "node" else dump(*args)
    )
    with pytest.raises(IntegrityError, match="far more than it has"):
        read_ocdbt(store, "", sizes)


@pytest.mark.parametrize(
    ("file", "strides", "spread"),
    [
        ("roots/0/m.bin", 1, False),
        ("roots/0/m.bin", 0, False),
        ("roots/0/m.bin", 1, True),
    ],
)
def test_extents_without_checksums(file: str, strides: int, *, spread: bool) -> None:
    for count, refused in ((MOST_READS, False), (OFTEN, True)):
        zeros, each = np.zeros(count, np.int64), np.full(count, MIB)
        columns = Columns(
            tensor=np.arange(count), file=zeros, offset=zeros, block_offset=zeros + NO_BLOCK, block_nbytes=zeros,
            crc32c=zeros, start=zeros, shape=each, strides=zeros + strides,
        )  # fmt: skip
        files: tuple[str, ...] = (file,)
        roots: tuple[str, ...] = ("file:///a",)
        if spread:  # the same file below roots of its folder and those above
            columns = replace(columns, file=np.arange(count))
            roots = tuple("file:///a" + "/b" * (n % 9) for n in range(count))
            files = tuple(f"roots/{n}/{'b/' * (8 - n % 9)}m.bin" for n in range(count))
        sources = tuple(
            SourceFileDoc(path=f, nbytes=MIB, modified=None, etag=None, digest=None) for f in files
        )
        doc = SidecarDoc(
            path="data/x", nbytes=1, digest="sha256:" + "0" * 64, roots=roots, sources=sources
        )
        table = TensorTable.of(TensorDoc(f"t{n}", "weight", "uint8", (MIB,)) for n in range(count))
        found = list(
            extent_problems(doc, table, Sidecar(columns, files, np.ones(count, np.int64), None))
        )
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
