"""`verify` of DeepSpeed checkpoints in place: the CRC-32 of every record that has one."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
import zlib
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.engines import engine
from tests.fakes import Arrays, random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import ChecksumError, IntegrityError, UcformatError
from ucformat.jobs import verify as job
from ucformat.sources.pickle.file import TorchZip
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.engines import Made
    from ucformat.storage.base import Checksums, Store

ARRAYS: Arrays = {
    (name, state): random_array(shape, "float32", 10 * i + j)
    for i, (name, shape) in enumerate({"embed": (50, 31), "up": (7, 9), "bias": (3,)}.items())
    for j, state in enumerate(FLAT)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_zero3(tmp_path / "ckpt", ARRAYS, ranks=2)


class Lengths(WrappedStore):
    """Notes how long the buffers are that it fills."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.lengths: list[int] = []

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        self.lengths += [len(b) for b in buffers]
        super().read_into(key, offset, buffers, crcs)


def optimizer_file(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"global_step*/*zero_pp_rank_{rank}_*optim_states.pt"))


def flip(path: Path, record: str, byte: int = 0) -> None:
    """Flip a bit of a record's data."""
    store = LocalStore(path.parent)
    found = next(r for r in TorchZip(store, path.name).records() if r.name == record)
    data = bytearray(path.read_bytes())
    data[found.locate() + byte] ^= 4
    path.write_bytes(data)


def forget(path: Path) -> None:
    """Set every CRC-32 of a zip file's directory to 0, as torch leaves them where it is told to compute none."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\1\2")
    while at >= 0:
        data[at + 16 : at + 20] = bytes(4)
        at = data.find(b"PK\1\2", at + 46)
    path.write_bytes(data)


def test_every_byte_of_every_record_is_counted(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = ucformat.verify(folder, progress=lambda done, total: seen.append((done, total)))
    total = sum(i.file_size for p in folder.rglob("*.pt") for i in zipfile.ZipFile(p).infolist())
    assert report
    assert (report.bytes_verified, report.bytes_unverified) == (total, 0)
    assert seen[-1] == (total, total)


def test_every_record_is_read_once_and_in_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_BLOCK", 1000)
    store = Lengths(LocalStore(folder))
    assert ucformat.verify(store)
    assert max(store.lengths) == 1000
    assert sum(store.lengths) == ucformat.verify(folder).bytes_verified
    flip(optimizer_file(folder, 1), "archive/data/0", 2500)  # not in the first block
    assert not ucformat.verify(store)


@pytest.mark.parametrize(("storage", "state"), [("0", "master"), ("2", "exp_avg_sq")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_is_found_and_what_it_hits_is_named(
    folder: Path, rank: int, storage: str, state: str
) -> None:
    path = optimizer_file(folder, rank)
    flip(path, f"archive/data/{storage}", 100)
    (problem,) = ucformat.verify(folder).problems
    assert problem.file == f"global_step5/{path.name}"
    assert f"CRC-32 of its record archive/data/{storage} differs" in problem.reason
    assert problem.reason.endswith(f"it holds embed ({state}), up ({state}), bias ({state})")
    with pytest.raises(ChecksumError, match=path.name):
        ucformat.verify(folder).raise_if_damaged()


def test_the_tensor_is_named_where_it_is_one(folder: Path) -> None:
    shutil.rmtree(folder)
    write_zero3(folder, {k: a for k, a in ARRAYS.items() if k[0] == "up"}, ranks=2)
    flip(optimizer_file(folder, 1), "archive/data/1")
    (problem,) = ucformat.verify(folder).problems
    assert (problem.name, problem.state) == ("up", "exp_avg")


def test_many_tensors_are_counted(folder: Path) -> None:
    shutil.rmtree(folder)
    arrays = {(f"w{i}", s): random_array((4,), "float32", i) for i in range(9) for s in FLAT}
    write_zero3(folder, arrays, ranks=2)
    flip(optimizer_file(folder, 0), "archive/data/0")
    (problem,) = ucformat.verify(folder).problems
    assert problem.reason.endswith("w3 (master), w4 (master) and 4 more")


def test_a_record_that_holds_no_tensor_is_verified_too(folder: Path) -> None:
    flip(optimizer_file(folder, 0), "archive/byteorder")
    with pytest.raises(IntegrityError, match="byteorder"):  # it is read when opening
        ucformat.verify(folder)


def test_records_without_a_checksum_are_unverified(folder: Path) -> None:
    path = optimizer_file(folder, 1)
    forget(path)
    flip(path, "archive/data/0")
    report = ucformat.verify(folder)
    assert report
    records = zipfile.ZipFile(path).infolist()
    assert report.bytes_unverified == sum(i.file_size for i in records) > 0
    assert report.bytes_verified > 0


def test_a_record_whose_header_is_gone_is_a_problem(folder: Path) -> None:
    path = next(folder.glob("global_step5/*rank_1_*model_states.pt"))
    data = bytearray(path.read_bytes())
    data[data.index(b"archive/data/0") - 30] = (
        0  # where its local header begins; nothing else reads it
    )
    path.write_bytes(data)
    (problem,) = ucformat.verify(folder).problems
    assert problem.file == f"global_step5/{path.name}"
    assert "archive/data/0" in problem.reason
    assert "no header" in problem.reason


@pytest.mark.engine
@pytest.mark.parametrize(("world", "name"), [(2, "z1"), (3, "z3-hpz"), (3, "z0-fp16")])
def test_a_flipped_bit_in_any_record_of_a_real_checkpoint_is_found(
    chosen: Callable[[int, str], Made], tmp_path: Path, world: int, name: str
) -> None:
    folder = shutil.copytree(chosen(world, name).checkpoint, tmp_path / "copy")
    report = ucformat.verify(folder)
    assert report
    assert report.bytes_unverified == 0
    assert (
        report.bytes_verified
        > sum(i.nbytes for i in ucformat.open(folder).tensors.values()) / world
    )
    path = max((folder / "global_step3").glob("*.pt"))
    whole = path.read_bytes()
    records = [r for r in TorchZip(LocalStore(path.parent), path.name).records() if r.nbytes]
    found = {"on opening": 0, "by its checksum": 0}
    for record in records:
        flip(path, record.name, record.nbytes // 2)
        try:
            report = ucformat.verify(folder)
        except (
            UcformatError
        ) as error:  # opening reads it: pickle, byte order, `step`; ZeRO 0: samples of each weight
            found["on opening"] += path.name in error.message
        else:
            (problem,) = (p for p in report.problems if p.file.endswith(path.name))
            found["by its checksum"] += f"{record.name} differs" in problem.reason
            assert all(
                path.name in p.reason for p in report.problems if p is not problem
            )  # of metadata in the record
        path.write_bytes(whole)
    assert sum(found.values()) == len(records)
    assert min(found.values()) > 1


@pytest.mark.engine
def test_how_torch_says_that_it_computed_no_checksum(tmp_path: Path) -> None:
    script = """
import sys, torch
from torch.serialization import set_crc32_options
for computed in (True, False):
    set_crc32_options(computed)
    torch.save({"a": torch.arange(10), "empty": torch.empty(0)}, f"{sys.argv[1]}/{computed}.pt")
"""
    subprocess.run(
        [str(engine("deepspeed")), "-c", script, str(tmp_path)],
        check=True,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    store = LocalStore(tmp_path)
    with_crc, without = (
        list(TorchZip(store, f"{computed}.pt").records()) for computed in (True, False)
    )
    assert [r.name.split("/", 1)[1] for r in with_crc] == [r.name.split("/", 1)[1] for r in without]
    for r in with_crc:
        assert r.crc32 == zlib.crc32(store.read(r.file, r.locate(), r.nbytes))
    assert {r.crc32 for r in without if r.nbytes} == {None}
    assert sum(r.nbytes for r in without) > 80
