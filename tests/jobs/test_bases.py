"""Checkpoints that are based on others: what equals the base is read there, and the base stays."""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from tests.packed import write_packed
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    Conflict,
    Inconsistent,
    IntegrityError,
    MissingData,
    PermissionDenied,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ucformat.format.structure import manifest_bytes, read_manifest
from ucformat.jobs.compare import compare
from ucformat.jobs.dependents import dependents_at
from ucformat.jobs.fingerprints import compute_fingerprints, with_fingerprints
from ucformat.jobs.gc import collect
from ucformat.schema.limits import MAX_CHAIN
from ucformat.schema.manifest import BaseDoc
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from tests.s3 import Bucket
    from ucformat.catalog.catalog import Catalog

    Arrays = dict[tuple[str, str], NDArray[Any]]


def model(*changed: str, seed: int = 0) -> Arrays:
    """The tensors of a model, of which some have another content with each seed."""
    return {
        (name, state): random_array(shape, dtype, seed if name in changed else 0)
        for name, state, shape, dtype in (
            ("frozen", "weight", (40, 30), "float32"),
            ("lora", "weight", (3, 5), "float32"),
            ("lora", "exp_avg", (3, 5), "float64"),
            ("count", "weight", (), "int64"),
            ("none", "weight", (0, 4), "int8"),
        )
    }


def source(arrays: Mapping[tuple[str, str], NDArray[Any]]) -> Checkpoint:
    store = MemoryStore(f"source-{os.urandom(8).hex()}")
    return Checkpoint(FakeSource.write(store, dict(arrays)))


def put(place: object, arrays: Arrays, base: object = None, **more: Any) -> Checkpoint:
    return ucformat.convert(source(arrays), str(place), chunk_bytes=64, base=base, **more)  # type: ignore[arg-type]


def is_read(ck: Checkpoint | str, arrays: Arrays) -> bool:
    again = ucformat.open(ck if isinstance(ck, str) else ck.url)
    assert set(again.tensors) == set(arrays)
    return all(again[key].read().tobytes() == arrays[key].tobytes() for key in arrays)


def own_files(ck: Checkpoint) -> set[str]:
    """The names of the tensors of which a checkpoint has files."""
    data = f"data/{ck.manifest.attempt}/"
    return {
        info.key.split("/")[3]
        for info in open_store(ck.url).list()
        if info.key.startswith(data) and re.search("/c(/|$)", info.key)
    }


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return bucket.place(f"bases/{tmp_path.name}")
    return str(tmp_path / "tree") if request.param == "local" else f"memory://{tmp_path.name}/tree"


# --- reading


@pytest.mark.front("local", "memory")
def test_what_equals_the_base_is_read_there(root: str, tmp_path: Path) -> None:
    first, second, third = model(), model("lora", seed=1), model("lora", "count", seed=2)
    third["lora", "exp_avg"] = second["lora", "exp_avg"]
    a = put(f"{root}/run/1", first)
    b = put(f"{root}/run/2", second, a)
    c = put(f"{root}/run/3", third, b.url)
    assert own_files(b) == {"lora"}
    assert own_files(c) == {"lora", "count"}
    # flat: what the base has from its own base is read where it is stored
    assert [(base.id, base.url) for base in c.manifest.bases] == [(a.id, "../1"), (b.id, "../2")]
    assert list(c.tensors) == list(third)
    for ck, arrays in ((a, first), (b, second), (c, third)):
        assert is_read(ck, arrays)
        assert ucformat.verify(ck.url)
    assert ucformat.verify(c.url).bases == {"../1": 2, "../2": 1}
    assert all(t.equal for t in compare(c, source(third)))
    # everything reads it as any other
    assert is_read(ucformat.convert(c, f"{root}/whole"), third)
    assert is_read(ucformat.materialize(c, f"{root}/arrays"), third)
    ucformat.export(c, tmp_path / "out", "safetensors", states="weight")
    exported = ucformat.open(tmp_path / "out")
    assert exported["frozen"].read().tobytes() == third["frozen", "weight"].tobytes()
    virtual = ucformat.convert(c, f"{root}/virtual", virtual=True)
    assert is_read(virtual, third)
    assert (
        c.view([{"keep": "frozen"}])["frozen"].read().tobytes()
        == third["frozen", "weight"].tobytes()
    )


def packed_with_fingerprints(place: Path, arrays: Arrays) -> Checkpoint:
    ck = write_packed(open_store(place), arrays)
    sums = compute_fingerprints(ck, list(ck.tensors.values()), lambda _: None)
    rewrite(ck, tensors=with_fingerprints(ck.manifest.tensors, sums))
    return ucformat.open(place)


def test_packed_and_virtual_bases(tmp_path: Path) -> None:
    arrays = model()
    packed = packed_with_fingerprints(tmp_path / "run" / "packed", arrays)
    virtual = ucformat.convert(packed, tmp_path / "run" / "virtual", virtual=True)
    for base in (packed, virtual):
        ck = put(tmp_path / "run" / f"on-{base.id}", model("lora", seed=1), base)
        assert own_files(ck) == {"lora"}
        assert is_read(ck, model("lora", seed=1))
        assert ucformat.verify(ck)


def test_fingerprints_that_are_missing_are_computed(tmp_path: Path) -> None:
    base = put(tmp_path / "1", model())
    old = put(tmp_path / "2", model("lora", seed=1))
    bare = old.manifest.tensors.model_copy(update={"fingerprint": []})
    rewrite(old, tensors=bare)
    with pytest.raises(UnsupportedError, match="has no fingerprints"):
        put(tmp_path / "3", model(), old.url)
    ck = ucformat.convert(old.url, tmp_path / "3", base=base)
    assert own_files(ck) == {"lora"}
    assert is_read(ck, model("lora", seed=1))


def test_weights_in_files_are_always_written(tmp_path: Path) -> None:
    base = put(tmp_path / "1", model())
    ck = put(tmp_path / "2", model(), base, weights="safetensors")
    assert ck.hf_url is not None
    assert [d.name for d in ck.manifest.tensors if d.is_referenced] == ["lora"]  # the exp_avg
    assert is_read(ck, model())
    assert ucformat.verify(ck)


# --- what needs the base keeps it


@pytest.mark.front("local", "memory")
def test_a_base_is_not_removed_while_it_is_needed(root: str, catalog: Catalog) -> None:
    a = put(f"{root}/run/1", model())
    b = put(f"{root}/run/2", model("lora", seed=1), a)
    catalog.record(a.manifest, a.url)
    with pytest.raises(PermissionDenied, match=f"needed by {b.id}"):
        catalog.delete(a.id)
    with pytest.raises(Conflict, match=f"needed by {b.id}"):
        put(a.url, model(seed=5), overwrite=True)
    # in another form it is still the same
    in_place = ucformat.materialize(b)
    assert not in_place.manifest.bases
    assert dependents_at(open_store(a.url), a.id) == ()
    assert is_read(b, model("lora", seed=1))
    catalog.delete(a.id, grace=timedelta(0))
    assert collect(catalog, apply=True).purged == (a.id,)
    assert is_read(b, model("lora", seed=1))


def test_a_base_where_nothing_can_be_written_is_taken_through_a_virtual_one(tmp_path: Path) -> None:
    shared = put(tmp_path / "shared", model())
    (tmp_path / "shared" / "needed-by").write_text("in the way")
    with pytest.raises(PermissionDenied, match=r"cannot record that(.|\n)*--virtual --unprotected"):
        put(tmp_path / "run/2", model("lora", seed=1), shared)
    own = ucformat.convert(shared, tmp_path / "run/1", virtual=True, unprotected=True)
    ck = put(tmp_path / "run/2", model("lora", seed=1), own)
    assert [base.id for base in ck.manifest.bases] == [own.id]
    assert not ucformat.verify(ck).problems
    assert dependents_at(open_store(own.url), own.id) == (ck.id,)


def test_a_base_may_be_materialized_in_place(tmp_path: Path) -> None:
    base = packed_with_fingerprints(tmp_path / "1", model())
    ck = put(tmp_path / "2", model("lora", seed=1), base)
    with pytest.raises(UsageError, match="cannot be based on the checkpoint that it replaces"):
        put(tmp_path / "1", model(), base, overwrite=True)
    assert all(kind.path for kind in ucformat.materialize(base).manifest.tensors.kinds)
    assert is_read(ck, model("lora", seed=1))
    assert ucformat.verify(ck.url)


def test_a_moved_folder_stays_whole(tmp_path: Path) -> None:
    a = put(tmp_path / "run" / "1", model())
    put(tmp_path / "run" / "2", model("lora", seed=1), a)
    (tmp_path / "run").rename(tmp_path / "moved")
    ck = ucformat.open(tmp_path / "moved" / "2")
    assert is_read(ck, model("lora", seed=1))
    report = ucformat.verify(ck)
    assert report
    assert not report.unprotected
    (tmp_path / "latest").symlink_to(tmp_path / "moved" / "2")
    assert is_read(str(tmp_path / "latest"), model("lora", seed=1))
    # the record is found again although it was made elsewhere
    ucformat.materialize(ck)
    assert dependents_at(open_store(tmp_path / "moved" / "1"), "") == ()


def test_copies(tmp_path: Path) -> None:
    a = put(tmp_path / "run" / "1", model())
    b = put(tmp_path / "run" / "2", model("lora", seed=1), a)
    arrays = model("lora", "count", seed=2)
    c = put(tmp_path / "run" / "3", arrays, b)
    with pytest.raises(UnsupportedError, match=f"based on the checkpoint {a.id}"):
        ucformat.copy(c, tmp_path / "backup" / "3")
    assert not (tmp_path / "backup").exists()
    cost = ucformat.estimate("copy", c, tmp_path / "backup" / "3", with_bases=True)
    assert cost.files > ucformat.estimate("copy", c, tmp_path / "run" / "4").files
    assert ucformat.copy(c, tmp_path / "backup" / "3", with_bases=True).id == c.id
    written = [file for file in (tmp_path / "backup").rglob("*") if file.is_file()]
    assert cost.bytes_written <= sum(file.stat().st_size for file in written)
    with pytest.raises(UnsupportedError, match="it is not there"):
        ucformat.estimate("copy", c, tmp_path / "else" / "3")
    shutil.rmtree(tmp_path / "run" / "1")
    assert is_read(str(tmp_path / "backup" / "3"), arrays)
    assert set(dependents_at(open_store(tmp_path / "backup" / "1"), "")) == {c.id}


def test_copies_beside_each_other_share_the_base(tmp_path: Path, catalog: Catalog) -> None:
    a = put(tmp_path / "1", model())
    b = put(tmp_path / "2", model("lora", seed=1), a)
    ucformat.copy(b, tmp_path / "again")
    for place in (tmp_path / "2", tmp_path / "again"):
        assert dependents_at(open_store(a.url), a.id) == (b.id,)
        assert not ucformat.verify(place).unprotected
        ucformat.materialize(place)
    assert dependents_at(open_store(a.url), a.id) == ()


def test_a_copy_is_not_put_where_it_would_read_its_base(tmp_path: Path) -> None:
    a = put(tmp_path / "run" / "1", model())
    b = put(tmp_path / "run" / "2", model("lora", seed=1), a)
    c = put(tmp_path / "run" / "3", model("lora", "count", seed=2), b)
    c = put(tmp_path / "run" / "4", model("lora", "count", seed=2), c)
    for place in ("1", "3"):
        with pytest.raises(UsageError, match="the copy would read the checkpoint"):
            ucformat.copy(c, tmp_path / "backup" / place, with_bases=True)
    put(tmp_path / "backup" / "1", model())
    with pytest.raises(Conflict, match="is the place of another checkpoint"):
        ucformat.copy(c, tmp_path / "backup" / "4", with_bases=True)
    assert [place.name for place in (tmp_path / "backup").iterdir()] == ["1"]


def test_thinning_leaves_what_is_stored_in_a_base_there(root: str, catalog: Catalog) -> None:
    a = put(f"{root}/run/1", model())
    arrays = model("lora", seed=1)
    b = put(f"{root}/run/2", arrays, a)
    left = ucformat.thin(b.url, "exp_avg")
    del arrays["lora", "exp_avg"]
    assert is_read(left, arrays)
    assert ucformat.verify(left.url)
    assert own_files(left) == {"lora"}
    assert dependents_at(open_store(a.url), a.id) == (left.id,)
    catalog.record(a.manifest, a.url)
    with pytest.raises(PermissionDenied, match=f"needed by {left.id}"):
        catalog.delete(a.id)


# --- what is not read


def rewrite(ck: Checkpoint, **changes: Any) -> Checkpoint:
    """Write the manifest of a checkpoint with other members."""
    manifest = read_manifest(open_store(ck.url))[0].model_copy(update=changes)
    (Path(ck.url) / "manifest.json").write_bytes(manifest_bytes(manifest))
    return ck


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Checkpoint, Checkpoint]:
    a = put(tmp_path / "run" / "1", model())
    return a, put(tmp_path / "run" / "2", model("lora", seed=1), a)


def moved_base(ck: Checkpoint, url: str) -> Checkpoint:
    return rewrite(ck, bases=(BaseDoc(id=ck.manifest.bases[0].id, url=url),))


def test_nothing_is_read_of_a_base_before_a_tensor_needs_it(
    pair: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    a, b = pair
    (tmp_path / "run" / "1").rename(tmp_path / "away")
    ck = ucformat.open(b.url)
    assert ck["lora"].read().tobytes() == model("lora", seed=1)["lora", "weight"].tobytes()
    with pytest.raises(MissingData, match=f"based on the checkpoint {a.id} at .*/run/1"):
        ck["frozen"].read()
    problems = ucformat.verify(b.url).problems
    assert {(p.file, p.name) for p in problems} == {
        (a.url, "frozen"),
        (a.url, "count"),
        (a.url, "none"),
    }
    (tmp_path / "away").rename(tmp_path / "run" / "1")
    assert is_read(ck, model("lora", seed=1))


def test_a_base_elsewhere_must_be_allowed(
    pair: tuple[Checkpoint, Checkpoint], tmp_path: Path
) -> None:
    _, b = pair
    (tmp_path / "run" / "1").rename(tmp_path / "elsewhere")
    moved_base(b, str(tmp_path / "elsewhere"))
    with pytest.raises(UnsafeError, match="reading files there is not allowed"):
        ucformat.open(b.url)["frozen"].read()
    with pytest.raises(UnsafeError, match="reading files there is not allowed"):
        ucformat.verify(b.url)  # which does not say that it is damaged
    assert ucformat.open(b.url, roots=tmp_path)["frozen"].read().size
    # a link leads elsewhere, too
    moved_base(b, "../1")
    (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="reading files there is not allowed"):
        ucformat.open(b.url)["frozen"].read()
    assert ucformat.open(b.url, roots=tmp_path)["frozen"].read().size


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "s3://bucket/x", "/etc"])
def test_no_other_place_is_asked_before_it_is_allowed(
    pair: tuple[Checkpoint, Checkpoint], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = pair
    moved_base(b, url)
    monkeypatch.setattr("ucformat.format.bases.open_store", pytest.fail)
    with pytest.raises(UnsafeError, match="reading files there is not allowed"):
        ucformat.open(b.url)["frozen"].read()


def test_places_that_no_base_has(pair: tuple[Checkpoint, Checkpoint]) -> None:
    _, b = pair
    for url in (
        *("", ".", "..", "../", "../.", "../..", "../../1", "../1/..", "1", "./1", "../1/../1"),
        *("/a/../b", "http://h/a/../b", "http://h/%2e%2e/b", "http:", "../%2e%2e", "../a\\b"),
        *("../a?b", "../a#b", "../.ucf-x", "../a\0b", "/a\0b", "~/1", "file:///etc", "../%2Fetc"),
        *(
            "../%2e%2E",
            "../%00",
            "../a%3f",
            "../a%62",
            "../%C3%A9",
            "../%E9%",
            "../a\nb",
            "../%2Eucf-",
        ),
    ):
        moved_base(b, url)
        with pytest.raises(Inconsistent, match="neither absolute nor beside"):
            ucformat.open(b.url)


def test_names_of_bases_beside(tmp_path: Path) -> None:
    """Whatever a folder may be called, the folder around it may be moved."""
    spelled = {
        "a#b?c%20 d": "a%23b%3Fc%2520 d",
        "line\nbreak": "line%0Abreak",
        "back\\slash": "back%5Cslash",
        "%2e%2e": "%252e%252e",
        "%": "%25",
        **{name: name for name in ("..a", "...", "-rf", " ", "~", "a:b", "é☃", "e\u0301")},
    }
    for number, (name, escaped) in enumerate(spelled.items()):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        a = put(folder / name, model())
        b = put(folder / f"on {name}", model("lora", seed=1), base=a)
        assert [base.url for base in b.manifest.bases] == [f"../{escaped}"]
        moved = folder.rename(tmp_path / f"moved-{number}")
        assert is_read(str(moved / f"on {name}"), model("lora", seed=1))
        (needed_by,) = (moved / name / "needed-by").iterdir()
        assert json.loads(needed_by.read_text())["url"] == f"../on {escaped}"


def test_a_base_that_is_another_one(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    a, b = pair
    rewrite(a, id="0" * 32)
    with pytest.raises(IntegrityError, match=f"{a.id} at .*/run/1, where there is another"):
        ucformat.open(b.url)["frozen"].read()
    table = a.manifest.tensors
    others = ["0" * 32 if p else p for p in table.fingerprint]
    for changed, why in ((others, "another fingerprint"), ([], "where it has none")):
        rewrite(a, id=a.id, tensors=table.model_copy(update={"fingerprint": changed}))
        with pytest.raises(IntegrityError, match=f"has frozen .* from its base {a.id}.*{why}"):
            ucformat.open(b.url)["frozen"].read()
    put(tmp_path / "other", {("x", "weight"): random_array((2,), "int8", 0)})
    rewrite(ucformat.open(tmp_path / "other"), id=a.id)
    moved_base(b, "../../other".replace("../../", str(tmp_path) + "/"))
    with pytest.raises(IntegrityError, match="which has no such tensor"):
        ucformat.open(b.url, roots=tmp_path)["frozen"].read()


def test_long_chains_and_loops(pair: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    a, b = pair
    # each with the next one as its base, and the last one with `a`
    chain = [f"c{n}" for n in range(MAX_CHAIN + 1)]
    ids = [f"{n:032x}" for n in range(len(chain))]
    bases = [*zip(ids, chain, strict=True), (a.id, "1")][1:]
    for name, id_, (base, beside) in zip(chain, ids, bases, strict=True):
        folder = tmp_path / "run" / name
        shutil.copytree(b.url, folder)
        docs = (BaseDoc(id=base, url=f"../{beside}"),)
        rewrite(Checkpoint(ucformat.open(folder).source), id=id_, bases=docs)
    with pytest.raises(IntegrityError, match=f"{MAX_CHAIN} checkpoints are based on it"):
        ucformat.open(tmp_path / "run" / "c0")["frozen"].read()
    deepest = ucformat.open(tmp_path / "run" / "c1")
    assert deepest["frozen"].read().tobytes() == model()["frozen", "weight"].tobytes()

    kinds = [k.model_copy(update={"base": 0}) for k in b.manifest.tensors.kinds if k.is_referenced]
    assert kinds
    table = b.manifest.tensors
    rewrite(
        a,
        tensors=table,
        bases=(BaseDoc(id=b.id, url="../2"),),
        requires=b.manifest.requires,
    )
    opened = ucformat.open(b.url)
    for _ in range(2):  # the second try must not take the loop for one that was checked
        with pytest.raises(IntegrityError, match="which is based on it"):
            opened["frozen"].read()
    problems = ucformat.verify(b.url).problems
    assert {(p.file, p.kind) for p in problems} == {(a.url, "base")}
    with pytest.raises(IntegrityError, match="which is based on it"):
        ucformat.copy(b.url, tmp_path / "copies" / "2", with_bases=True)


def test_own_files_are_not_those_of_a_base(pair: tuple[Checkpoint, Checkpoint]) -> None:
    _, b = pair
    manifest = json.loads((Path(b.url) / "manifest.json").read_bytes())
    path = manifest["objects"]["path"]
    assert path
    doc = b.manifest.objects
    assert doc is not None
    rewrite(b, objects=doc.model_copy(update={"path": f"bases/0/{path}"}))
    with pytest.raises(Inconsistent, match="the name of a file of a base"):
        ucformat.open(b.url)


def test_a_foreign_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--virtual --checksums"):
        put(tmp_path / "1", model(), source(model()))
    base = put(tmp_path / "base", model())
    with pytest.raises(UsageError, match="through a view"):
        put(tmp_path / "1", model(), base.view([{"drop": "count"}]))
    with pytest.raises(UsageError, match="virtual"):
        ucformat.convert(base, tmp_path / "1", virtual=True, base=base)
    elsewhere = put(tmp_path / "run" / "2", model("lora", seed=1), base)
    assert elsewhere.manifest.bases[0].url == base.url
    assert is_read(elsewhere, model("lora", seed=1))  # its writer is allowed to
