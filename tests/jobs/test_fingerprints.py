"""Fingerprints of checkpoints: the same in every form, and what `verify` and `compare` make of them."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ucformat
from tests.fakes import FakeSource, manifest_file, random_array
from tests.zero_files import FLAT, write_zero3
from ucformat.checkpoint import Checkpoint
from ucformat.errors import NotFinished, UcformatError
from ucformat.exporters.base import Span, Target, TargetFile
from ucformat.format import arrays as small
from ucformat.geometry.box import Box
from ucformat.geometry.fingerprint import fingerprint_of, text_of
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.jobs import virtual as virtual_module
from ucformat.jobs import weight_files
from ucformat.jobs.compare import compare
from ucformat.jobs.export import planned_job
from ucformat.jobs.export_place import begin_export
from ucformat.jobs.fingerprints import exported_fingerprints
from ucformat.reading.execute import read_fingerprint
from ucformat.schema import ITEMSIZE, MANIFEST
from ucformat.storage import base
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes import Arrays

IN_FILES = [d for d in ITEMSIZE if d in ("float32", "bfloat16", "float8_e5m2", "bool", "int64")]
ARRAYS: Arrays = {
    **{(d, "weight"): random_array((5, 7), d, n) for n, d in enumerate(IN_FILES)},
    ("w", "weight"): random_array((64, 300), "float32", 100),
    ("w", "exp_avg"): random_array((64, 300), "bfloat16", 101),
    ("lone", "weight"): random_array((), "float64", 102),
    ("empty", "weight"): random_array((0, 4), "int8", 103),
    ("long", "weight"): random_array((5001,), "float16", 104),
}


def fingerprint(array: Any) -> str:
    return text_of(fingerprint_of(array, array.shape, Box.whole(array.shape)))


EXPECTED = {key: fingerprint(array) for key, array in ARRAYS.items()}
SIZES: dict[str, Any] = {"chunk_bytes": 2000, "shard_bytes": 10_000}


def source() -> Checkpoint:
    return Checkpoint(FakeSource.write(MemoryStore(uuid.uuid4().hex), ARRAYS))


def recorded(ck: Checkpoint) -> dict[tuple[str, str], str | None]:
    return {(t.name, t.state): t.fingerprint for t in ck.manifest.tensors}


def as_arrays(folder: Path) -> Checkpoint:
    return ucformat.convert(source(), folder, **SIZES)


def as_safetensors(folder: Path) -> Checkpoint:
    return ucformat.convert(source(), folder, weights="safetensors", **SIZES)


def with_small_ones_packed(folder: Path) -> Checkpoint:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MOST_SMALL_ARRAYS", 2)
        patch.setattr(weight_files, "_SMALL_FILE_BYTES", 300)
        return ucformat.convert(source(), folder, **SIZES)


def virtual(folder: Path) -> Checkpoint:
    """Of a universal checkpoint, whose fingerprints it takes."""
    return ucformat.convert(
        as_safetensors(folder / "of"), folder / "v", virtual=True, states="weight"
    )


FORMS = [as_arrays, as_safetensors, with_small_ones_packed, virtual]
forms = pytest.mark.parametrize("make", FORMS, ids=[make.__name__ for make in FORMS])


@forms
def test_every_form_records_them(make: Callable[[Path], Checkpoint], tmp_path: Path) -> None:
    ck = make(tmp_path / "a")
    chosen = {key: text for key, text in EXPECTED.items() if key in ck.tensors}
    assert len(chosen) >= len(EXPECTED) - 1
    assert recorded(ck) == chosen
    assert {key: ck[key].fingerprint for key in chosen} == chosen
    assert ucformat.verify(ck)
    assert recorded(ucformat.open(ucformat.convert(ck, tmp_path / "again").url)) == chosen
    assert all(d.equal and d.by_digest for d in compare(ck, tmp_path / "again"))


def with_fingerprints(place: Path, change: Callable[[list[str | None]], None]) -> None:
    """Change the column of a committed checkpoint, under the right digest."""
    document = json.loads((place / MANIFEST).read_bytes())
    change(document["tensors"]["fingerprint"])
    (place / MANIFEST).write_bytes(manifest_file(document))


@forms
def test_verify_finds_each_that_is_not_the_tensors(
    make: Callable[[Path], Checkpoint], tmp_path: Path
) -> None:
    ck = make(tmp_path / "a")
    for row, key in enumerate(ck.tensors):

        def wrong(column: list[str | None], row: int = row) -> None:
            column[:] = recorded(ck).values()
            column[row] = "1" * 32

        with_fingerprints(Path(ck.url), wrong)
        (problem,) = ucformat.verify(ck.url).problems
        assert ((problem.name, problem.state), "fingerprint" in problem.reason) == (key, True)
    if key[0] == "long" and make is as_arrays:
        with pytest.raises(UcformatError, match="fingerprint"):
            ucformat.copy(ck.url, tmp_path / "copy")


def test_bytes_that_nothing_else_covers_are_verified_by_them(tmp_path: Path) -> None:
    """Safetensors files have no checksums; those of a virtual checkpoint of them have their fingerprints."""
    arrays = {"w": random_array((40, 50), "float32", 1).astype(np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    ck = ucformat.convert(tmp_path / "model.safetensors", tmp_path / "v", virtual=True)
    assert ucformat.verify(ck).bytes_unverified == arrays["w"].nbytes
    with_fingerprint = ucformat.convert(
        tmp_path / "model.safetensors", tmp_path / "with", virtual=True, checksums=True
    )
    document = json.loads((tmp_path / "with" / MANIFEST).read_bytes())
    for file in document["sidecar"]["sources"]:
        file["digest"] = None  # only the fingerprint is left
    (tmp_path / "with" / MANIFEST).write_bytes(manifest_file(document))
    report = ucformat.verify(with_fingerprint.url)
    assert (bool(report), report.bytes_unverified) == (True, 0)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    before = (tmp_path / "model.safetensors").stat()
    (tmp_path / "model.safetensors").write_bytes(content)
    os.utime(tmp_path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    (problem,) = ucformat.verify(with_fingerprint.url).problems
    assert "fingerprint" in problem.reason


def test_a_virtual_one_reads_most_tensors_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of which an element may be cut in two, whose boxes begin at any byte of the files."""
    again: list[int] = []

    def read(source: Any, info: TensorInfo) -> str:
        again.append(info.itemsize)
        return read_fingerprint(source, info)

    monkeypatch.setattr(virtual_module, "read_fingerprint", read)
    monkeypatch.setattr(base, "_PART", 1000)  # bytes that are read at once
    foreign = Checkpoint(FakeSource.write(LocalStore(tmp_path / "src"), ARRAYS))
    seen: list[tuple[int, int]] = []
    ck = ucformat.convert(
        foreign,
        tmp_path / "v",
        virtual=True,
        checksums=True,
        progress=lambda *at: seen.append(at),
    )
    assert recorded(ck) == EXPECTED
    assert seen[-1] == (sum(i.size for i in foreign.files()),) * 2
    assert set(again) <= {2, 4, 8}
    assert 0 < len(again) < len(ARRAYS) // 2
    assert ucformat.verify(ck)
    again.clear()
    matrix = torch.randn(50, 70)
    torch.save({"a": matrix, "b": torch.randn(50, 70).t()}, tmp_path / "x.pt")
    ck = ucformat.convert(tmp_path / "x.pt", tmp_path / "x", virtual=True, checksums=True)
    assert ck["a"].fingerprint == fingerprint(matrix.numpy())
    assert ucformat.verify(ck)
    assert again == [4]  # of `b`


def test_a_checkpoint_without_them_is_read_and_copied_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = as_arrays(tmp_path / "a").url
    with_fingerprints(tmp_path / "a", list.clear)
    ck = ucformat.open(url)
    assert set(recorded(ck).values()) == {None}
    assert {key: ck[key].fingerprint for key in EXPECTED} == EXPECTED  # computed
    with monkeypatch.context() as patch:  # nothing would be compared with them
        patch.setattr("ucformat.format.shard.fingerprint_of", None)
        assert ucformat.verify(ck)
        ucformat.copy(url, tmp_path / "b")
    copied = (tmp_path / "b" / MANIFEST).read_bytes()
    assert copied == (tmp_path / "a" / MANIFEST).read_bytes()
    assert recorded(ucformat.convert(ck, tmp_path / "c")) == EXPECTED


def test_foreign_ones_and_views_are_computed() -> None:
    ck = source()
    assert set(recorded(ck).values()) == {None}
    assert {key: ck[key].fingerprint for key in EXPECTED} == EXPECTED
    renamed = ck.view([{"rename": "w", "to": "x"}])
    assert renamed["x", "weight"].fingerprint == EXPECTED["w", "weight"]


@pytest.mark.parametrize("weights", [None, "safetensors"])
def test_tasks_of_earlier_processes_count(weights: Any, tmp_path: Path) -> None:
    options = {"weights": weights, **SIZES}
    arrays = {("w", s): random_array((64, 300), "float32", n) for n, s in enumerate(FLAT)}
    run = write_zero3(tmp_path / "run", arrays, 3)
    for part in ("part:0/2", "part:1/2"):
        with pytest.raises(NotFinished):
            ucformat.convert(run, tmp_path / "u", on=part, **options)
    ck = ucformat.convert(run, tmp_path / "u", on="commit", **options)
    expected = {key: fingerprint(a) for key, a in arrays.items()}
    assert {key: recorded(ck)[key] for key in arrays} == expected
    assert ucformat.verify(ck)


@pytest.mark.parametrize("how", ["recorded", "computed"])
def test_an_export_has_those_of_what_lies_where_its_tensors_are(how: str, tmp_path: Path) -> None:
    """Whatever their names, and whatever larger tensors they are parts of."""
    arrays = {(n, "weight"): random_array((4, 6), "float32", ord(n)) for n in "abcd"}
    foreign = Checkpoint(FakeSource.write(MemoryStore(uuid.uuid4().hex), arrays))
    ck = foreign if how == "computed" else ucformat.convert(foreign, tmp_path / "u")
    with planned_job(ck, tmp_path / "out", "safetensors") as job:
        begin_export(job, overwrite=False)
        job.finish(None)
    model = tmp_path / "out" / "model.safetensors"
    content = model.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["a"], header["b"] = header["b"], header["a"]
    header["c"]["shape"] = [6, 4]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    model.write_bytes(content[:8] + text + content[end:])
    exported = ucformat.open(tmp_path / "out")
    expected = {key: fingerprint(exported[key].read()) for key in exported.tensors}
    assert expected[Key("a", "weight")] == fingerprint(arrays["b", "weight"])
    assert exported_fingerprints(job, exported) == expected
    larger = TensorInfo("d", "weight", "float32", (4, 7))
    part = Span("float32", 24, ((larger, Piece(Box.whole((4, 6)), 0, (6, 1))),))
    parts = (content[:end], part, Span.whole(TensorInfo("b", "weight", "float32", (4, 6))))
    job.target = Target((TargetFile.of("model.safetensors", *parts),))
    assert exported_fingerprints(job, exported) == expected
