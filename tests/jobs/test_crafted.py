"""Records, tombstones and manifests that somebody made to have others' files removed take nothing from anybody."""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import manifest_file
from tests.jobs.conftest import universal
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import UcformatError, UnsafeError
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register
from ucformat.schema import CATALOG_DOCUMENT
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from tests.jobs.conftest import Recorded
    from ucformat.catalog.catalog import Catalog

NOW = timedelta(0)
LONG_AGO = "2020-01-01T00:00:00Z"
NAME = "0123456789abcdef0123"


@pytest.fixture(params=["local", "s3", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that all may write to."""
    if request.param == "s3":
        return str(request.getfixturevalue("bucket").place())
    return (
        f"memory://{tmp_path.name}-shared"
        if request.param == "memory"
        else str(tmp_path / "shared")
    )


def put(place: str, files: dict[str, bytes]) -> None:
    store = open_store(place)
    for key, data in files.items():
        with store.create(key) as out:
            out.write(data)
    store.flush()


def record(attempt: str, **more: Any) -> bytes:
    doc = {
        "format": "ucformat-attempt",
        "version": 1,
        "attempt": attempt,
        "plan": "sha256:" + "0" * 64,
    }
    return json.dumps(doc | {"owner": "x:1", "started": LONG_AGO} | more).encode()


def tombstone(attempt: str, checkpoint: str = "x", **more: Any) -> bytes:
    doc = {
        "format": "ucformat-tombstone",
        "version": 1,
        "id": checkpoint,
        "attempt": attempt,
        "created": LONG_AGO,
    }
    return json.dumps(doc | more).encode()


def content(place: str) -> dict[str, bytes]:
    store = open_store(place)
    return {i.key: store.read(i.key) for i in store.list()}


def spared(catalog: Catalog, root: str, crafted: dict[str, bytes]) -> None:
    """Whatever is crafted, no file of others goes, at any grace."""
    before = content(root)
    put(root, crafted)
    for apply in (False, True, True):
        collect(catalog, [root], apply=apply, grace=NOW)
    after = content(root)
    assert {k: v for k, v in before.items() if after.get(k) != v} == {}


# --- who may write to a folder above


@pytest.mark.front("local-*", "memory-train")
@pytest.mark.parametrize(
    "name", ["train", "0123456789ABCDEF0123", "0123456789abcdef0123.", "é" * 20, NAME + "0"]
)
def test_folders_that_are_called_otherwise_than_attempts_stay(
    catalog: Catalog, root: str, name: str
) -> None:
    put(root, {f"{kind}/{name}/x": b"mine" for kind in ("data", "objects", "assets")})
    spared(catalog, root, {f"attempts/{name}.json": record(name)})
    spared(catalog, root, {"tombstone.json": tombstone(name)})


def test_a_tombstone_removes_no_files_that_it_names(catalog: Catalog, root: str) -> None:
    held = universal(f"{root}/run/1")
    data = next(k for k in content(held.url) if k.startswith("data/"))
    files = ["run/1/manifest.json", f"run/1/{data}", "README.md"]
    put(root, {"README.md": b"mine"})
    spared(catalog, root, {"tombstone.json": tombstone(NAME, files=files)})
    ucformat.verify(held.url).raise_if_damaged()


@pytest.mark.front("local-*", "memory-..")
@pytest.mark.parametrize("way", ["..", "../data", "a/../../b", "/etc", "data/x", "."])
def test_names_that_are_ways(catalog: Catalog, root: str, way: str) -> None:
    universal(f"{root}/run/1")
    put(root, {"data/data/x/y": b"mine", "data/x/y": b"mine"})
    spared(catalog, root, {"tombstone.json": tombstone(way), f"attempts/{NAME}.json": record(way)})


@pytest.mark.front("local-*", "memory-*-manifest.json", "s3-record-manifest.json")
@pytest.mark.parametrize(
    "mark", ["manifest.json", "attempts/{}.json", CATALOG_DOCUMENT, "tombstone.json"]
)
@pytest.mark.parametrize("crafted", ["record", "tombstone"])
def test_what_holds_another_checkpoint_stays(
    catalog: Catalog, root: str, crafted: str, mark: str
) -> None:
    """In the folder that an attempt would have lies a place of somebody else."""
    nested = universal(f"{root}/objects/{NAME}/run/1")
    found = content(nested.url)
    said = {"format": "ucformat-catalog", "version": 1, "id": nested.id}
    document = {
        CATALOG_DOCUMENT: json.dumps(said).encode(),
        "tombstone.json": tombstone(nested.manifest.attempt),
    }
    key = mark.format(nested.manifest.attempt)
    for other in found:
        if other in ("manifest.json", f"attempts/{nested.manifest.attempt}.json") and other != key:
            open_store(nested.url).delete(other)
    put(nested.url, {k: v for k, v in document.items() if k == key})
    put(root, {f"data/{NAME}/w/c/0": b"mine"})
    made = (
        {f"attempts/{NAME}.json": record(NAME)}
        if crafted == "record"
        else {"tombstone.json": tombstone(NAME)}
    )
    spared(catalog, root, made)


def test_a_deleted_checkpoint_that_holds_another_one_stays_whole(
    catalog: Catalog, root: str
) -> None:
    outer = universal(f"{root}/outer", 1)
    entry = catalog.record(outer.manifest, outer.url)
    nested = universal(f"{outer.url}/data/{outer.manifest.attempt}/more/run/2", 2)
    catalog.delete(entry.id, grace=NOW)
    before = content(root)
    done = collect(catalog, apply=True)
    assert done.purged == ()
    assert "it contains another checkpoint" in done.failures[0]
    assert {k: v for k, v in content(root).items() if k in before} == before
    ucformat.verify(nested.url).raise_if_damaged()
    ucformat.verify(outer.url).raise_if_damaged()


def test_an_asset_that_is_called_as_a_manifest_is_none(catalog: Catalog, root: str) -> None:
    put(
        root,
        {
            f"assets/{NAME}/manifest.json": b'{"model": 1}',
            f"assets/{NAME}/b/manifest.json": b"\xff",
        },
    )
    put(root, {f"attempts/{NAME}.json": record(NAME)})
    assert [left.attempt for left in collect(catalog, [root], apply=True, grace=NOW).leftovers] == [
        NAME
    ]
    assert content(root) == {}


# --- who may write below a checkpoint


def test_what_a_manifest_names_beyond_its_own_folders_stays(catalog: Catalog, root: str) -> None:
    """Somebody's checkpoint is registered and deleted, and its manifest says that others' files are assets of it."""
    held = universal(f"{root}/run/1", 1)
    made = universal(root, 2)
    data = next(k for k in content(held.url) if k.startswith("data/"))
    doc = json.loads(open_store(root).read("manifest.json"))
    doc["assets"] = {
        str(n): {"path": f"run/1/{key}", "nbytes": 1, "digest": "sha256:" + "0" * 64}
        for n, key in enumerate(("manifest.json", data))
    }
    put(root, {"manifest.json": manifest_file(doc)})
    register([root], catalog)
    catalog.delete(made.id, grace=NOW)
    assert collect(catalog, apply=True).purged == (made.id,)
    ucformat.verify(held.url).raise_if_damaged()
    assert {k.partition("/")[0] for k in content(root)} == {"run"}


@pytest.mark.front("local-*")
@pytest.mark.parametrize("attempt", ["", "x", "a/b", "../../run", NAME.upper()])
def test_a_manifest_whose_attempt_is_none_is_refused(
    catalog: Catalog, root: str, attempt: str
) -> None:
    made = universal(f"{root}/x", 2)
    catalog.record(made.manifest, made.url)
    doc = json.loads(open_store(made.url).read("manifest.json"))
    put(made.url, {"manifest.json": manifest_file(doc | {"attempt": attempt})})
    catalog.delete(made.id, grace=NOW)
    before = {k: v for k, v in content(root).items() if not k.endswith(CATALOG_DOCUMENT)}
    done = collect(catalog, apply=True)
    assert (done.purged, len(done.failures)) == ((), 1)
    assert {k: v for k, v in content(root).items() if not k.endswith(CATALOG_DOCUMENT)} == before


def test_a_record_or_tombstone_among_the_files_of_a_checkpoint_is_a_file(
    catalog: Catalog, root: str
) -> None:
    """Its author chose the names of assets."""
    made = universal(f"{root}/x", 2)
    put(f"{made.url}/assets/{made.manifest.attempt}", {f"data/{NAME}/w": b"asset"})
    inside = f"x/assets/{made.manifest.attempt}"
    spared(
        catalog,
        root,
        {
            f"{inside}/attempts/{NAME}.json": record(NAME),
            f"{inside}/tombstone.json": tombstone(NAME),
        },
    )
    doc = json.loads(open_store(made.url).read("manifest.json"))
    asset = {"path": f"deep/data/{NAME}/w", "nbytes": 5, "digest": "sha256:" + "0" * 64}
    named = {
        "manifest.json": manifest_file(doc | {"assets": {"w": asset}}),
        f"deep/data/{NAME}/w": b"asset",
    }
    put(made.url, named)
    spared(
        catalog,
        root,
        {f"x/deep/attempts/{NAME}.json": record(NAME), "x/deep/tombstone.json": tombstone(NAME)},
    )


def test_a_record_of_the_folders_in_which_a_checkpoint_lies(catalog: Catalog, root: str) -> None:
    """Its writer is not ours, and put its files below another name than that of its attempt."""
    made = universal(f"{root}/x", 2)
    doc = json.loads(open_store(made.url).read("manifest.json"))
    put(made.url, {"manifest.json": manifest_file(doc | {"attempt": NAME})})
    before = content(root)
    crafted = {f"attempts/{made.manifest.attempt}.json": record(made.manifest.attempt)}
    put(made.url, crafted)
    done = collect(catalog, [root], apply=True, grace=NOW)
    assert "the committed checkpoint" in done.failures[0]
    assert content(root).keys() == before.keys()
    ucformat.verify(made.url).raise_if_damaged()


def test_a_tombstone_of_an_attempt_that_is_being_written_waits(catalog: Catalog, root: str) -> None:
    put(root, {f"attempts/{NAME}.json": record(NAME), f"data/{NAME}/w/c/0": b"being written"})
    put(root, {"tombstone.json": tombstone(NAME)})
    before = content(root)
    assert collect(catalog, [root], apply=True).leftovers == ()
    assert content(root) == before


def test_what_a_catalog_knows_of_another_checkpoint_stays(catalog: Catalog, root: str) -> None:
    said = json.dumps({"format": "ucformat-catalog", "version": 1, "id": "somebody's"}).encode()
    put(root, {CATALOG_DOCUMENT: said})
    spared(catalog, root, {"tombstone.json": tombstone(NAME)})


# --- folders and links


def test_folders_that_hold_nothing_stay(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    """A repository of git is broken without some of its empty folders."""
    entry = recorded()
    place = Path(str(entry.url))
    shared = tmp_path / "shared"
    empty = [
        place / ".git/refs/tags",
        place / "notes",
        shared / ".git/refs/tags",
        shared / "run/data",
    ]
    for folder in empty:
        folder.mkdir(parents=True)
    put(str(shared), {f"attempts/{NAME}.json": record(NAME), f"data/{NAME}/w/c/0": b"left"})
    put(str(shared / ".git/refs/heads"), {f"attempts/{NAME}.json": record(NAME)})
    catalog.delete(entry.id, grace=NOW)
    done = collect(catalog, [str(shared)], apply=True, grace=NOW)
    assert (done.purged, done.failures, len(done.leftovers)) == ((entry.id,), (), 2)
    assert all(folder.is_dir() for folder in (*empty, shared / ".git/refs/heads"))
    assert sorted(p.name for p in place.iterdir()) == [".git", "notes"]
    assert sorted(p.name for p in shared.iterdir()) == [".git", "run"]


def test_a_place_that_is_another_ones_by_now_keeps_its_folders(
    catalog: Catalog, recorded: Recorded
) -> None:
    entry, _ = recorded(1), recorded(2)
    catalog.delete(entry.id, grace=NOW)
    place = Path(str(entry.url))
    shutil.rmtree(place)
    (place / ".git/refs/tags").mkdir(parents=True)
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert (place / ".git/refs/tags").is_dir()


@pytest.mark.parametrize("link", ["data", "data/" + NAME, "objects", "attempts"])
def test_what_a_link_leads_to_stays(catalog: Catalog, tmp_path: Path, link: str) -> None:
    """Inside the very folder that is looked at, where a link does not leave the root."""
    held = universal(tmp_path / "shared/run/1", 1)
    attempt = held.manifest.attempt
    name = NAME if link.endswith(NAME) else attempt
    target = tmp_path / "shared/run/1" / link.replace(NAME, attempt)
    (tmp_path / "shared" / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "shared" / link).symlink_to(
        os.path.relpath(target, (tmp_path / "shared" / link).parent)
    )
    before = content(held.url)
    crafted = tmp_path / "shared" / ("" if link == "attempts" else "attempts") / f"{name}.json"
    crafted.parent.mkdir(exist_ok=True)
    if link != "attempts":
        crafted.write_bytes(record(name))
        os.utime(crafted, (0, 0))
    (tmp_path / "shared/tombstone.json").write_bytes(tombstone(name))
    collect(catalog, [str(tmp_path / "shared")], apply=True, grace=NOW)
    assert content(held.url) == before
    ucformat.verify(held.url).raise_if_damaged()


def test_a_copy_of_a_checkpoint_whose_attempt_has_no_name_is_refused(tmp_path: Path) -> None:
    """Its name would be that of folders at the destination."""
    made = universal(tmp_path / "x")
    file = tmp_path / "x" / "manifest.json"
    file.write_bytes(manifest_file(json.loads(file.read_text()) | {"attempt": ""}))
    with pytest.raises(UnsafeError, match="is not the name of an attempt"):
        ucformat.copy(made.url, tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_writer_that_fails_removes_what_it_wrote_and_no_more(tmp_path: Path) -> None:
    store = MemoryStore(f"{tmp_path.name}-fails")
    put(store.url, {"data/mine/x": b"mine", "objects/x": b"mine"})
    one, two = universal(store.url, 1), universal(store.url, 2, overwrite=True)
    assert {k.split("/")[1] for k in content(store.url) if k.startswith("data/")} == {
        "mine",
        two.manifest.attempt,
    }
    assert one.manifest.attempt != two.manifest.attempt
    with pytest.raises(UcformatError):
        universal(store.url, 3)
    assert open_checkpoint(store.url).id == two.id


def test_a_tombstone_from_long_ago_is_ended(catalog: Catalog, root: str) -> None:
    """What is provably of the attempt does go."""
    put(root, {f"{kind}/{NAME}/x": b"left" for kind in ("data", "objects", "assets")})
    put(
        root,
        {
            f"attempts/{NAME}.json": record(NAME),
            "tombstone.json": tombstone(NAME),
            "data/notes.txt": b"mine",
        },
    )
    assert [left.attempt for left in collect(catalog, [root], grace=NOW).leftovers] == [NAME]
    done = collect(catalog, [root], apply=True, grace=NOW)
    assert done.failures == ()
    assert content(root) == {"data/notes.txt": b"mine"}
