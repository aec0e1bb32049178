"""Attempts, manifests and the commit."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import ucformat
from tests.fakes import ODD, FakeSource, manifest_file
from tests.tables import changed_entry, entries
from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    Conflict,
    IntegrityError,
    MissingData,
    NotACheckpoint,
    UnsupportedError,
    UpgradeNeeded,
)
from ucformat.format.attempts import record_key
from ucformat.format.chunking import Grid
from ucformat.format.commit import abandon, begin, commit, new_id, on_commit
from ucformat.format.structure import read_manifest
from ucformat.geometry.tensor import Key
from ucformat.schema import ITEMSIZE
from ucformat.schema.documents import TombstoneDoc
from ucformat.schema.manifest import Manifest, manifest_json_schema
from ucformat.schema.tensors import TensorTable
from ucformat.storage.base import content_version
from ucformat.storage.memory import MemoryStore
from ucformat.storage.wrappers import WrappedStore

ROOT = Path(__file__).parents[2]


def manifest(attempt: str) -> Manifest:
    return Manifest(
        id=new_id(),
        attempt=attempt,
        created="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        tensors=TensorTable.of(()),
    )


def test_the_published_schema_is_that_of_the_code() -> None:
    published = json.loads((ROOT / "docs" / "schemas" / "manifest-v1.json").read_text())
    assert published == manifest_json_schema()


def test_the_same_plan_is_the_same_attempt_and_another_is_another() -> None:
    store = MemoryStore("attempts")
    one = begin(store, {"a": 1}, overwrite=False)
    assert begin(store, {"a": 1}, overwrite=False) == one
    assert begin(store, {"a": 2}, overwrite=False).id != one.id
    record = json.loads(store.read(f"attempts/{one.id}.json"))
    assert record["attempt"] == one.id
    assert record["owner"]


def test_whoever_continues_an_attempt_replaces_its_record() -> None:
    """So that one who judged the old record, and would remove the attempt, finds another."""
    store = MemoryStore("continued")
    one = begin(store, {"a": 1}, overwrite=False)
    key = record_key(one.id)
    old = store.read(key)
    record = json.loads(old)
    store.replace(
        key, json.dumps(record | {"started": "2020-01-01T00:00:00Z"}).encode(), content_version(old)
    )
    begin(store, {"a": 1}, overwrite=False)
    assert json.loads(store.read(key))["started"] >= record["started"]


@pytest.mark.parametrize("gone", [False, True])
def test_an_attempt_that_is_removed_is_neither_continued_nor_committed(gone: bool) -> None:
    store = MemoryStore(f"removed-{gone}")
    one = begin(store, {"a": 1}, overwrite=False)
    key = record_key(one.id)
    record = store.read(key)
    if gone:
        store.delete(key)
    else:
        marked = json.loads(record) | {"removed": "2026-01-01T00:00:00Z"}
        store.replace(key, json.dumps(marked).encode(), content_version(record))
        with pytest.raises(Conflict, match="is being removed"):
            begin(store, {"a": 1}, overwrite=False)
    with store.create(f"data/{one.id}/x") as out:
        out.write(b"x")
    with pytest.raises(Conflict, match="is being removed"):
        commit(store, one, manifest(one.id))
    assert {i.key for i in store.list()} == (set() if gone else {key, f"data/{one.id}/x"})


def test_the_loser_of_a_race_is_told_and_leaves_nothing() -> None:
    store = MemoryStore("loser")
    one, two = (begin(store, {"a": n}, overwrite=False) for n in range(2))
    with store.create(f"data/{two.id}/x") as out:
        out.write(b"x")
    commit(store, one, manifest(one.id))
    with pytest.raises(Conflict, match="committed by another writer"):
        commit(store, two, manifest(two.id))
    assert {i.key for i in store.list()} == {"manifest.json", f"attempts/{one.id}.json"}


def test_whoever_commits_a_plan_second_gets_the_first_ones_checkpoint() -> None:
    store = MemoryStore("twice")
    one = begin(store, {"a": 1}, overwrite=False)
    two = begin(store, {"a": 1}, overwrite=False)
    first = commit(store, one, manifest(one.id))
    assert commit(store, two, manifest(two.id)).id == first.id


def test_overwriting_fails_when_the_checkpoint_was_replaced_meanwhile() -> None:
    store = MemoryStore("replaced")
    commit(store, old := begin(store, {"a": 0}, overwrite=False), manifest(old.id))
    one, two = (begin(store, {"a": n}, overwrite=True) for n in (1, 2))
    commit(store, one, manifest(one.id))
    with pytest.raises(Conflict, match="another writer"):
        commit(store, two, manifest(two.id))
    assert read_manifest(store)[0].attempt == one.id


def tombstone(checkpoint: str, attempt: str) -> bytes:
    return (
        TombstoneDoc(id=checkpoint, attempt=attempt, created=datetime.now(UTC))
        .model_dump_json()
        .encode()
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_nobody_begins_where_a_checkpoint_is_being_removed(
    overwrite: bool, committed: bool
) -> None:
    store = MemoryStore(f"tombstone-{overwrite}-{committed}")
    old = begin(store, {"a": 0}, overwrite=False)
    if committed:
        commit(store, old, manifest(old.id))
    store.put_if_absent("tombstone.json", tombstone("x", old.id))
    before = [i.key for i in store.list()]
    with pytest.raises(Conflict, match="was deleted, but its removal is incomplete") as caught:
        begin(store, {"a": 1}, overwrite=overwrite)
    assert "ucp gc" in str(caught.value.hint)
    assert [i.key for i in store.list()] == before


def test_one_that_begins_while_the_manifest_goes_is_told() -> None:
    """It finds no manifest any more; the tombstone was there before that went."""

    class Removed(WrappedStore):
        def read_versioned(self, key: str) -> tuple[bytes, str]:
            self.inner.put_if_absent("tombstone.json", tombstone("x", "0" * 20))
            self.inner.delete("manifest.json")
            return self.inner.read_versioned(key)

    store = MemoryStore("begun-too-late")
    commit(store, old := begin(store, {"a": 0}, overwrite=False), manifest(old.id))
    with pytest.raises(Conflict, match="was deleted"):
        begin(Removed(store), {"a": 0}, overwrite=False)


def test_a_manifest_that_became_a_tombstone_is_no_checkpoint() -> None:
    store = MemoryStore("became")
    store.put_if_absent("manifest.json", tombstone("x", "0" * 20))
    with pytest.raises(NotACheckpoint, match="is being removed"):
        read_manifest(store)
    with pytest.raises(NotACheckpoint, match="is being removed"):
        ucformat.open("memory://became")


@pytest.mark.parametrize("gone", [False, True])
def test_what_was_to_be_replaced_may_be_deleted_meanwhile(gone: bool) -> None:
    store = MemoryStore(f"deleted-{gone}")
    commit(store, old := begin(store, {"a": 0}, overwrite=False), manifest(old.id))
    new = begin(store, {"a": 1}, overwrite=True)
    with store.create(f"data/{new.id}/x") as out:
        out.write(b"x")
    if gone:
        store.delete("manifest.json")
    else:
        store.replace(
            "manifest.json", tombstone("x", old.id), store.read_versioned("manifest.json")[1]
        )
    with pytest.raises(Conflict, match="deleted in the meantime"):
        commit(store, new, manifest(new.id))
    assert new.id not in " ".join(i.key for i in store.list())


def test_listeners_hear_of_a_commit() -> None:
    store = MemoryStore("heard")
    heard: list[Any] = []
    listener = lambda url, m: heard.append((url, m.id))  # noqa: E731
    on_commit.append(listener)
    try:
        made = commit(store, a := begin(store, {"a": 1}, overwrite=False), manifest(a.id))
    finally:
        on_commit.remove(listener)
    assert heard == [("memory://heard", made.id)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("base"), ODD)), tmp_path / "ck", chunk_bytes=256
    )
    return tmp_path / "ck"


def change(checkpoint: Path, **changed: Any) -> None:
    document = json.loads((checkpoint / "manifest.json").read_text())
    document.update(changed)
    (checkpoint / "manifest.json").write_bytes(manifest_file(document))


def test_a_newer_version_asks_for_an_upgrade(checkpoint: Path) -> None:
    change(checkpoint, version=2, tensors="something else")
    with pytest.raises(UpgradeNeeded, match="format version 2") as caught:
        ucformat.open(checkpoint)
    assert caught.value.exit_code == 7
    with pytest.raises(Conflict, match="cannot read"):
        ucformat.convert(
            Checkpoint(FakeSource.write(MemoryStore("b2"), ODD)), checkpoint, overwrite=True
        )


def test_unknown_keys_are_ignored(checkpoint: Path) -> None:
    change(checkpoint, something_new={"a": 1})
    assert len(ucformat.open(checkpoint)) == 7


def test_a_feature_that_must_be_understood_asks_for_an_upgrade(checkpoint: Path) -> None:
    change(checkpoint, requires=["delta"], tensors="something else")
    with pytest.raises(UpgradeNeeded, match=r"requires \['delta'\]"):
        ucformat.open(checkpoint)


@pytest.mark.parametrize(("chunk_bytes", "shard_bytes"), [(None, None), (16, 64)])
def test_grids_can_be_computed_again_from_what_the_manifest_records(
    chunk_bytes: int | None, shard_bytes: int | None
) -> None:
    source = Checkpoint(FakeSource.write(MemoryStore("b3"), ODD))
    target = MemoryStore(f"b4-{chunk_bytes}")
    made = ucformat.convert(
        source, target, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes
    ).manifest
    assert made.grid is not None
    for doc in made.tensors:
        grid = Grid.of(doc.shape, ITEMSIZE[doc.dtype], made.grid.chunk_bytes, made.grid.shard_bytes)
        assert (grid.chunk, grid.shard) == (doc.chunk, doc.shard)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other", "version": 1}', '{"format": "ucformat"}']
)
def test_a_manifest_that_is_none_is_damage(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        ucformat.open(checkpoint)


def edit_tensor(checkpoint: Path, **changed: Any) -> None:
    document = json.loads((checkpoint / "manifest.json").read_text())
    number = next(n for n, t in enumerate(entries(document)) if t["name"] == "table")
    document = changed_entry(document, number, **changed)
    (checkpoint / "manifest.json").write_bytes(manifest_file(document))


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": [1 << 40, 1 << 20]},
        {"shape": [64]},
        {"chunk": [3, 3]},
        {"chunk": [0, 1]},
        {"shape": [-1, 4]},
        {"path": "/etc/passwd\n"},
        {"digest": "sha256:0"},
        {"digest": "nothing"},
        {"digest": "md5:0", "shape": [-1, 4]},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_before_anything_is_allocated(
    checkpoint: Path, changed: dict[str, Any]
) -> None:
    edit_tensor(checkpoint, **changed)
    with pytest.raises(ucformat.errors.UcformatError) as caught:
        ucformat.open(checkpoint)["table"][...]
    assert caught.value.exit_code in (2, 5, 6)


def test_a_digest_of_a_later_version_is_not_called_damaged(checkpoint: Path) -> None:
    edit_tensor(checkpoint, digest="md5:0")
    with pytest.raises(UpgradeNeeded, match="md5:0"):
        ucformat.open(checkpoint)


def test_lineage_of_an_unknown_kind_is_ignored(checkpoint: Path) -> None:
    change(checkpoint, lineage=[{"kind": "acme.distill", "url": "x", "commits": 7}])
    assert ucformat.open(checkpoint).manifest.known_commits is None
    change(checkpoint, lineage=[{"kind": "acme.distill"}])
    with pytest.raises(IntegrityError, match="damaged"):
        ucformat.open(checkpoint)


def test_an_unknown_dtype_makes_one_tensor_unreadable(checkpoint: Path) -> None:
    before = ucformat.open(checkpoint)
    itemsize = before.tensors[Key("table", "weight")].itemsize
    edit_tensor(checkpoint, dtype="acme.float7", itemsize=itemsize)
    ck = ucformat.open(checkpoint)
    assert len(ck) == len(before) - 1
    with pytest.raises(UnsupportedError, match=r"acme\.float7"):
        ck["table"]
    for key in ck.tensors:
        assert ck[key][...].tobytes() == before[key][...].tobytes()
    with pytest.raises(UnsupportedError, match=r"acme\.float7"):
        ucformat.convert(ck, MemoryStore("unknown-dtype"))
    # only its digest is another, because that is of the dtype, too
    assert [p.name for p in ucformat.verify(ck).problems] == ["table"]
    edit_tensor(checkpoint, dtype="acme.float7", itemsize=3)
    with pytest.raises(IntegrityError, match="itemsize"):
        ucformat.open(checkpoint)
    edit_tensor(checkpoint, dtype="acme.float7", itemsize=None)
    with pytest.raises(IntegrityError, match="has no itemsize"):
        ucformat.open(checkpoint)


def test_the_record_of_a_later_version_is_left_alone() -> None:
    store = MemoryStore("later-record")
    one = begin(store, {"a": 1}, overwrite=False)
    record = json.loads(store.read(record_key(one.id))) | {"version": 2}
    with store.create(record_key(one.id)) as out:
        out.write(json.dumps(record).encode())
    for attempt in (
        lambda: begin(store, {"a": 1}, overwrite=False),
        lambda: abandon(store, one.id),
    ):
        with pytest.raises(UpgradeNeeded, match="version 2"):
            attempt()
    assert json.loads(store.read(record_key(one.id))) == record


def test_paths_that_leave_the_checkpoint_are_refused(checkpoint: Path) -> None:
    edit_tensor(checkpoint, path="data/../../../../etc")
    with pytest.raises(ucformat.errors.UnsafeError, match="does not stay inside"):
        ucformat.open(checkpoint)["table"][...]


def test_a_huge_tensor_over_small_files_is_refused_before_memory_is_taken(checkpoint: Path) -> None:
    n = 1 << 32
    edit_tensor(checkpoint, shape=[n, 64], shard=[n, 64])
    with pytest.raises(IntegrityError):
        ucformat.open(checkpoint)["table"].read()


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    doc = next(t for t in ucformat.open(checkpoint).manifest.tensors if t.name == "table")
    next(p for p in (checkpoint / str(doc.path) / "c").rglob("*") if p.is_file()).unlink()
    with pytest.raises((MissingData, ucformat.errors.NotFound), match="table"):
        ucformat.open(checkpoint)["table"][...]


def test_a_folder_without_a_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(NotACheckpoint, match="no committed checkpoint"):
        ucformat.open(checkpoint)
    with pytest.raises(ucformat.errors.NotFound, match="does not exist"):
        ucformat.open(checkpoint / "nowhere")
