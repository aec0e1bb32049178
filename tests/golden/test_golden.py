"""Every version of the format that was ever released is read, bit for bit, by the code of today."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

import ucformat
from tests.fakes import same
from tests.golden import make
from ucformat.errors import UcformatError
from ucformat.format.chunking import Grid
from ucformat.schema.manifest import FORMAT_VERSION
from ucformat.storage.memory import MemoryStore

HERE = Path(__file__).parent
GOLDEN = sorted(p.with_suffix("") for p in HERE.glob("v*/*.json"))

golden = pytest.mark.parametrize("place", GOLDEN, ids=lambda p: f"{p.parent.name}-{p.name}")


def expected(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.with_suffix(".json").read_text())
    return found


def arrays(place: Path) -> dict[tuple[str, str], Any]:
    """The values, made anew from their seeds, and proved to be those of the day on which the checkpoint was made."""
    out = {}
    for t in expected(place)["tensors"]:
        a = make.values(t["dtype"], tuple(t["shape"]), t["seed"], t.get("period"))
        assert hashlib.sha256(a.tobytes()).hexdigest() == t["sha256"]
        out[t["name"], t["state"]] = a
    return out


def test_every_version_of_the_format_has_its_own() -> None:
    assert {p.parent.name for p in GOLDEN} == {f"v{n}" for n in range(1, FORMAT_VERSION + 1)}
    assert {p.name for p in GOLDEN if p.parent.name == "v1"} == {
        "arrays",
        "default-sizes",
        "packed",
        "packed-tiles",
        "safetensors",
    }
    for place in GOLDEN:
        assert json.loads((place / "manifest.json").read_text())["version"] == int(
            place.parent.name[1:]
        )
        most = 10_000_000 if place.name == "default-sizes" else 200_000
        assert sum(p.stat().st_size for p in place.rglob("*") if p.is_file()) < most


@golden
def test_every_tensor_is_read_bit_for_bit(place: Path) -> None:
    ck, truth = ucformat.open(place), arrays(place)
    assert {(k.name, k.state) for k in ck.tensors} == set(truth)
    for key, a in truth.items():
        assert same(ck[key][...], a), key
        for part in (..., -1, slice(1, None, 2), (..., slice(1, 3)))[
            : 1 + 3 * (a.ndim > 0 and a.size > 0)
        ]:
            assert same(np.asarray(ck[key][part]), np.asarray(a[part])), (key, part)


@golden
def test_what_it_says_of_itself_is_read(place: Path) -> None:
    ck, want = ucformat.open(place), expected(place)
    facts = want["facts"]
    assert dict(ck.aliases) == facts["aliases"]
    assert [dict(g) for g in ck.metadata.groups] == facts["groups"]
    assert (ck.metadata.step, ck.metadata.layout, ck.metadata.engine) == (
        facts["step"],
        facts["layout"],
        facts["engine"],
    )
    assert ck.objects == facts["objects"]
    assert {n: hashlib.sha256(data).hexdigest() for n, data in ck.assets.items()} == want["assets"]
    for alias, name in facts["aliases"].items():
        assert same(ck[alias][...], arrays(place)[name, "weight"])
    digests = {(d.name, d.state): d.digest for d in ck.manifest.tensors}
    assert digests == {(t["name"], t["state"]): t["digest"] for t in want["tensors"]}


@golden
def test_it_verifies_and_converts(place: Path) -> None:
    report = ucformat.verify(place)
    report.raise_if_damaged()
    assert report.bytes_verified > 0
    again = ucformat.convert(
        place, MemoryStore(f"golden-{place.parent.name}-{place.name}"), overwrite=True
    )
    for key, a in arrays(place).items():
        assert same(again[key][...], a), key


@golden
def test_other_readers_read_its_arrays(place: Path) -> None:
    ucformat.register_zarr_dtypes()
    ck, truth = ucformat.open(place), arrays(place)
    docs = [d for d in ck.manifest.tensors if d.path is not None]
    assert bool(docs) == (place.name in ("arrays", "default-sizes", "safetensors"))
    group: Any = zarr.open_group(ck.zarr_url, mode="r") if docs else None
    for doc in docs:
        a = truth[doc.name, doc.state]
        array = group[str(doc.path).removeprefix(f"data/{ck.manifest.attempt}/")]
        assert same(np.asarray(array[...]), a), doc.name
        assert array.attrs["ucformat"] == {"name": doc.name, "state": doc.state}
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{ck.url}/{doc.path}"}}
        assert same(np.asarray(tensorstore.open(spec).result().read().result()), a), doc.name


@golden
def test_a_flipped_bit_in_any_of_its_files_is_found(place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place, tmp_path / "copy")
    read = [p for p in copy.rglob("*") if p.is_file() and p.parent.name != "attempts"]
    assert len(read) > 2
    for path in read:
        whole = path.read_bytes()
        data = bytearray(whole)
        at = (
            7 if path.suffix == ".bin" else len(data) // 3
        )  # the first tensor of a packed file has a checksum
        data[at] ^= 16
        path.write_bytes(data)
        try:
            found = {p.file for p in ucformat.verify(copy).problems}
        except UcformatError as error:
            found = {error.message}
        assert any(str(path.relative_to(copy)) in f for f in found), path
        path.write_bytes(whole)


@pytest.mark.parametrize("form", ["arrays", "default-sizes"])
def test_the_writer_of_today_makes_the_same_grids_digests_and_shards(form: str) -> None:
    """What is promised: equal tensors have equal chunks and digests, whoever writes them, and whenever."""
    place = HERE / f"v{FORMAT_VERSION}" / form
    old, new = ucformat.open(place), make.FORMS[form](MemoryStore(f"golden-today-{form}"))
    assert len(old.manifest.tensors) == len(new.manifest.tensors)
    for one, other in zip(old.manifest.tensors, new.manifest.tensors, strict=True):
        mine, theirs = (f"data/{ck.manifest.attempt}/" for ck in (new, old))
        assert other.fingerprint == ucformat.open(place)[one.name, one.state].fingerprint
        path = str(other.path).replace(mine, theirs)
        assert replace(other, path=path, fingerprint=one.fingerprint) == one
    for info in old.store.list("data"):
        assert new.store.read(
            info.key.replace(old.manifest.attempt, new.manifest.attempt)
        ) == old.store.read(info.key)


#: (shape, bytes of an element) -> chunk, shard: of the default sizes, for tensors too large to be
#: kept here.
GRIDS = {
    ((128256, 4096), 2): ((2004, 256), (16032, 4096)),
    ((4096, 14336), 2): ((256, 896), (4096, 14336)),
    ((16384, 53248), 4): ((64, 3328), (576, 53248)),
    ((1024, 4096), 4): ((64, 256), (1024, 4096)),
    ((256, 7168, 2048), 2): ((8, 448, 128), (8, 3584, 2048)),
    ((8, 1024, 1024), 4): ((1, 128, 128), (8, 1024, 1024)),
    ((256, 256, 8, 8), 4): ((16, 16, 8, 8), (256, 256, 8, 8)),
    ((5, 2048, 2048), 4): ((1, 128, 128), (5, 2048, 2048)),
    ((151936, 896), 2): ((1187, 224), (51041, 896)),
    ((50257, 1600), 4): ((1733, 100), (17330, 1600)),
    ((700000001,), 4): ((262075,), (33545600,)),
    ((16384,), 4): ((16384,), (16384,)),
    ((1_000_000, 16), 4): ((15625, 16), (1_000_000, 16)),
    ((3, 100000000), 1): ((1, 781250), (1, 100000000)),
}


def test_the_default_grids_of_large_tensors() -> None:
    found = {(shape, itemsize): Grid.of(shape, itemsize) for shape, itemsize in GRIDS}
    assert {key: (grid.chunk, grid.shard) for key, grid in found.items()} == GRIDS


def test_the_writer_of_today_makes_the_same_packed_form() -> None:
    place = HERE / f"v{FORMAT_VERSION}" / "packed"
    old, new = ucformat.open(place), make.make_packed(MemoryStore("golden-packed-today"))
    assert new.manifest.attempt == old.manifest.attempt
    files = [info.key for info in old.store.list("data")]
    assert [info.key for info in new.store.list("data")] == files
    for name in files:
        if name.endswith(".bin"):
            assert new.store.read(name) == old.store.read(name)
    for key in old.tensors:
        assert list(new.source.extents(key)) == list(
            old.source.extents(key)
        )  # other versions of zlib pack otherwise


@pytest.mark.parametrize("form", make.FORMS)
def test_the_script_overwrites_nothing(form: str) -> None:
    with pytest.raises(FileExistsError):
        make.main(form)
