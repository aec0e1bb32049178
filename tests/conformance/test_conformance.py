"""Both readers, the package and `reader.py`, make of each checkpoint of the corpus what it says; of golden ones too."""

from __future__ import annotations

import base64
import filecmp
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from crc32c import crc32c

import ucformat
from tests.conformance import make, reader
from tests.golden.test_golden import GOLDEN
from tests.tables import with_entries
from ucformat.errors import (
    IntegrityError,
    NotACheckpoint,
    UnsafeError,
    UnsupportedError,
    UpgradeNeeded,
)
from ucformat.format.arrays import folder_names
from ucformat.format.chunking import Grid, Tiling
from ucformat.format.digest import own_digest, with_own_digest
from ucformat.schema import ITEMSIZE
from ucformat.schema.tensors import CODECS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint

CASES = Path(__file__).parent / "cases"
NAMES = sorted(p.stem for p in CASES.glob("*.json") if p.stem != "vectors")
VECTORS = json.loads((CASES / "vectors.json").read_text())

OURS = {
    NotACheckpoint: "absent",
    UpgradeNeeded: "upgrade",
    IntegrityError: "damaged",
    UnsafeError: "refused",
}
THEIRS = {
    reader.Absent: "absent",
    reader.Upgrade: "upgrade",
    reader.Damaged: "damaged",
    reader.Refused: "refused",
}


def assembled(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of the corpus in a folder of its own, as README.md says, and what a reader must make of it."""
    want = json.loads((CASES / f"{name}.json").read_text())
    place = folder / name
    place.mkdir()
    for layer in (want.get("base"), name):
        if layer is not None and (CASES / layer).is_dir():
            shutil.copytree(CASES / layer, place, dirs_exist_ok=True)
    for path in want.get("removed", ()):
        (place / path).unlink()
    if (draft := place / "manifest.json.in").exists():
        body = draft.read_bytes().replace(b"@PLACE@", str(place).encode()).rstrip()[:-1].rstrip()
        digest = hashlib.sha256(body).hexdigest().encode()
        (place / "manifest.json").write_bytes(body + b',\n "digest": "sha256:' + digest + b'"\n}')
        draft.unlink()
        for path in (place / "sources").rglob("*.bin"):
            os.utime(path, (want["modified"], want["modified"]))
    return place / want.get("at", ""), want


def listed(t: dict[str, Any], elements: Callable[[], bytes]) -> dict[str, Any]:
    """What a reader says of a tensor: the digest of its elements, or that it needs a later reader."""
    about = {"name": t["name"], "state": t["state"], "dtype": t["dtype"], "shape": [*t["shape"]]}
    if t.get("step") is not None:
        about["step"] = t["step"]
    try:
        return {**about, "sha256": hashlib.sha256(elements()).hexdigest()}
    except (UnsupportedError, reader.Upgrade):
        if t["dtype"] in ITEMSIZE and t.get("codec") in (None, *CODECS):
            raise
        return {**about, "error": "upgrade"}


def _elements(ck: Checkpoint, name: str, state: str) -> bytes:
    return np.asarray(ck[name, state][...]).tobytes()


def by_ucformat(place: Path, roots: list[str], stage: str) -> dict[str, Any]:
    ck = ucformat.open(place, roots=roots, lossy=True, older=True)
    read = {
        "tensors": [
            listed(t, partial(_elements, ck, t["name"], t["state"]))
            for t in map(asdict, ck.manifest.tensors)
        ],
        "aliases": dict(ck.aliases),
        "objects": ck.objects,
        "per_rank": {name: list(values) for name, values in ck.per_rank.items()},
        "assets": {name: hashlib.sha256(data).hexdigest() for name, data in ck.assets.items()},
    }
    known = all(t.codec in (None, *CODECS) for t in ck.manifest.tensors)
    if stage == "verify" and known:  # nobody can verify another
        ucformat.verify(ck).raise_if_damaged()
    return read


def by_the_second(place: Path, roots: list[str], _stage: str) -> dict[str, Any]:
    ck = reader.Checkpoint(place, roots)
    return {
        "tensors": [listed(t, partial(ck.elements, n)) for n, t in enumerate(ck.tensors)],
        "aliases": ck.aliases,
        "objects": ck.objects(),
        "per_rank": ck.per_rank(),
        "assets": {name: hashlib.sha256(data).hexdigest() for name, data in ck.assets().items()},
    }


_UNSEEN = ("zarr-json", "compressed-document", "packed-gap", "safetensors-header")

both = pytest.mark.parametrize(
    ("read", "classes"), [(by_ucformat, OURS), (by_the_second, THEIRS)], ids=["ucformat", "reader"]
)


@both
@pytest.mark.parametrize("name", NAMES)
def test_what_a_reader_makes_of_it(
    name: str,
    read: Callable[..., dict[str, Any]],
    classes: dict[type[Exception], str],
    tmp_path: Path,
) -> None:
    place, want = assembled(name, tmp_path)
    roots = [str(place / r) for r in want.get("roots", ())]
    if "error" not in want:
        assert read(place, roots, "verify") == {
            k: want[k] for k in ("tensors", "aliases", "objects", "per_rank", "assets")
        }
        return
    if want["found"] == "verify" and read is by_the_second and name in _UNSEEN:
        pytest.skip("it looks at no zarr.json, and not at what is outside of extents")
    with pytest.raises(tuple(classes)) as failure:
        read(place, roots, want["found"])
    assert {error for kind, error in classes.items() if isinstance(failure.value, kind)} == {
        want["error"]
    }


@pytest.mark.parametrize("place", GOLDEN, ids=lambda p: p.name)
def test_golden_checkpoints(place: Path) -> None:
    want = json.loads(place.with_suffix(".json").read_text())
    found = by_the_second(place, [], "read")
    assert found["tensors"] == [
        {k: t[k] for k in ("name", "state", "dtype", "shape", "sha256")} for t in want["tensors"]
    ]
    assert (found["objects"], found["aliases"]) == (
        want["facts"]["objects"],
        want["facts"]["aliases"],
    )
    assert found["assets"] == want["assets"]


def test_the_corpus_is_what_the_script_makes(tmp_path: Path) -> None:
    make.main(tmp_path)
    paths = [
        {str(p.relative_to(at)) for p in at.rglob("*") if p.is_file()} for at in (tmp_path, CASES)
    ]
    assert paths[0] == paths[1]
    assert filecmp.cmpfiles(tmp_path, CASES, sorted(paths[0]), shallow=False)[1:] == ([], [])
    assert sum(p.stat().st_size for p in CASES.rglob("*") if p.is_file()) < 1_300_000


def test_the_second_reader_is_no_part_of_the_package() -> None:
    text = Path(reader.__file__).read_text()
    assert len(text.splitlines()) < 1_200
    assert not re.search(r"^\s*(from|import) (ucformat|tests)", text, re.MULTILINE)


def test_grids() -> None:
    for vector in VECTORS["grids"]:
        shape, size = tuple(vector["shape"]), ITEMSIZE[vector["dtype"]]
        grid = Grid.of(shape, size, vector["target"], vector["limit"])
        assert [list(grid.chunk), list(grid.shard)] == [vector["chunk"], vector["shard"]], vector
        if "tile" in vector:
            assert list(Tiling.of(shape, size).tile) == vector["tile"], vector


def test_folder_names() -> None:
    for vector in VECTORS["folders"]:
        assert list(folder_names(vector["names"]).values()) == vector["folders"]


@pytest.mark.parametrize(
    "vector", VECTORS["tensors"], ids=lambda v: f"{v['dtype']}-{v['shape']}-{v['chunk']}"
)
def test_digests_and_shards(vector: dict[str, Any], tmp_path: Path) -> None:
    """The second reader reads the files of each, and finds the digest."""
    (tmp_path / "data" / "t").mkdir(parents=True)
    for path, data in vector["files"].items():
        (tmp_path / "data" / "t" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "t" / path).write_bytes(base64.b64decode(data))
    elements = base64.b64decode(vector["elements"])
    tensor = {k: vector[k] for k in ("dtype", "shape", "chunk", "shard", "digest")}
    head = {
        "format": "ucformat",
        "version": 1,
        "id": "x",
        "attempt": make.ATTEMPT,
        "created": make.CREATED,
    }
    document = with_entries(head, [{**tensor, "name": "t", "state": "weight", "path": "data/t"}])
    (tmp_path / "manifest.json").write_bytes(with_own_digest(json.dumps(document).encode()))
    for read in (by_ucformat, by_the_second):
        found = read(tmp_path, [], "read")["tensors"]
        assert found[0]["sha256"] == hashlib.sha256(elements).hexdigest()


def test_documents_and_checksums() -> None:
    vector = VECTORS["document"]
    assert own_digest(vector["with_digest"].encode()) == vector["digest"]
    assert (
        vector["digest"]
        == "sha256:" + hashlib.sha256(vector["with_digest"].encode()[:-88]).hexdigest()
    )
    for check in VECTORS["checksums"]:
        assert crc32c(bytes.fromhex(check["bytes"])) == check["crc32c"]
