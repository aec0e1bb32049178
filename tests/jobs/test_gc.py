"""What is purged goes as a whole, and nothing else goes."""

from __future__ import annotations

import json
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.acts import purge
from tests.catalog.manifests import packed_over
from tests.fakes import manifest_file
from tests.jobs.conftest import document, foreign, universal
from tests.storage.faulty import FaultyStore
from ucformat.catalog.stamp import Stamp, make_stamp
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import Conflict, NotACheckpoint, NotFound, PermissionDenied, UcformatError
from ucformat.format.commit import begin
from ucformat.format.structure import manifest_bytes
from ucformat.jobs import gc, removal
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register, reindex
from ucformat.schema import CATALOG_DOCUMENT
from ucformat.schema.documents import TombstoneDoc, is_tombstone
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.jobs.conftest import Recorded
    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.storage.base import Store

NOW = timedelta(0)


def content(place: Path | str | None) -> dict[str, bytes]:
    store = open_store(str(place))
    return {i.key: store.read(i.key) for i in store.list()}


def deleted(catalog: Catalog, *entries: Entry) -> None:
    catalog.delete(*(e.id for e in entries), grace=NOW)


def mine(entry: Entry) -> Path:
    return Path(str(entry.url))


# --- what goes


@pytest.mark.parametrize("memory", [False, True])
def test_a_deleted_checkpoint_is_purged_and_others_stay(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, memory: bool
) -> None:
    root = f"memory://{tmp_path.name}/run" if memory else f"{tmp_path}/run"
    one, two = (recorded(n, f"{root}/{n}") for n in (1, 2))
    for entry in (one, two):
        catalog.metric(entry.id, {"a": 1})
    before = content(two.url)
    deleted(catalog, one)
    shown = collect(catalog)
    assert ([r.id for r in shown.plan.purge], shown.purged, shown.plan.bytes_purged) == (
        [one.id],
        (),
        one.nbytes,
    )
    assert open_checkpoint(str(one.url)).id == one.id
    seen: list[tuple[int, int]] = []
    done = collect(catalog, apply=True, progress=lambda *n: seen.append(n))
    assert (done.purged, done.failures, seen) == ((one.id,), (), [(1, 1)])
    assert content(one.url) == {}
    assert memory or not mine(one).exists()
    assert content(two.url) == before
    found = catalog.get(one.id)
    assert (found.state, found.urls, found.metrics) == ("purged", (), {"a": 1.0})
    assert [e.action for e in catalog.events(one.id)] == [
        "purged",
        "purge",
        "delete",
        "metric",
        "record",
    ]
    with pytest.raises(NotFound):
        ucformat.open(str(one.url))
    again = collect(catalog, apply=True)
    assert (again.plan.purge, again.resumed, again.purged) == ((), (), ())
    assert universal(str(one.url), 3).id != one.id


def test_nothing_goes_before_its_time(catalog: Catalog, recorded: Recorded) -> None:
    entry = recorded()
    catalog.delete(entry.id, grace=timedelta(hours=1))
    done = collect(catalog, apply=True, grace=NOW)
    assert (done.purged, [w.row.id for w in done.plan.wait]) == ((), [entry.id])
    assert catalog.get(entry.id).state == "deleted"
    assert open_checkpoint(str(entry.url)).id == entry.id
    catalog.restore(entry.id)
    assert collect(catalog, apply=True, grace=NOW).plan.wait == ()


def test_from_all_places(catalog: Catalog, recorded: Recorded, tmp_path: Path) -> None:
    entry = recorded()
    memory = f"memory://{tmp_path.name}/copy"
    shutil.copytree(mine(entry), tmp_path / "copy")
    for key, data in content(entry.url).items():
        MemoryStore(f"{tmp_path.name}/copy").put_if_absent(key, data)
    register([str(tmp_path / "copy"), memory], catalog)
    deleted(catalog, entry)
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert [content(p) for p in (entry.url, tmp_path / "copy", memory)] == [{}, {}, {}]


def test_already_gone_is_done(catalog: Catalog, recorded: Recorded) -> None:
    entries = [recorded(n) for n in range(4)]
    deleted(catalog, *entries)
    shutil.rmtree(mine(entries[0]))
    (mine(entries[1]) / "manifest.json").unlink()
    for path in mine(entries[2]).rglob("*"):
        if path.is_file():
            path.unlink()
    done = collect(catalog, apply=True)
    assert (len(done.purged), done.failures) == (4, ())
    assert [mine(e).exists() for e in entries] == [
        False,
        True,
        True,
        False,
    ]  # whoever left folders has his reasons


def test_files_that_are_not_ours_stay(catalog: Catalog, recorded: Recorded) -> None:
    entry = recorded()
    foreign_files = {
        "README.md": b"mine",
        "data/notes.txt": b"mine",
        "data/other-attempt/x": b"mine",
        f"data/{open_checkpoint(str(entry.url)).manifest.attempt}.txt": b"mine",
        "objects/keep/x": b"mine",
        "attempts/not-a-record": b"mine",
    }
    for name, data in foreign_files.items():
        (mine(entry) / name).parent.mkdir(parents=True, exist_ok=True)
        (mine(entry) / name).write_bytes(data)
    deleted(catalog, entry)
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert content(entry.url) == foreign_files


@pytest.mark.parametrize("text", ["{", '{"format": "ucformat-catalog", "version": 2}', "other"])
def test_a_document_that_cannot_be_read_keeps_its_checkpoint(
    catalog: Catalog, recorded: Recorded, other: Catalog, text: str
) -> None:
    """A newer ucformat may have written into it that somebody needs the checkpoint."""
    one, two = recorded(1), recorded(2)
    deleted(catalog, one, two)
    (mine(one) / "ucformat-catalog.json").write_text(text)
    before = content(one.url)
    done = collect(catalog, apply=True)
    assert (done.purged, len(done.failures)) == ((two.id,), 1)
    assert one.id in done.failures[0]
    assert content(one.url) == before
    assert catalog.get(one.id).state == "deleted"


@pytest.mark.parametrize("protect", ["hold", "tag", "alias"])
def test_what_another_catalog_protects_stays(
    catalog: Catalog, other: Catalog, recorded: Recorded, protect: str
) -> None:
    entry = recorded()
    catalog.note(entry.id, "x")
    register([str(entry.url)], other)
    deleted(catalog, entry)
    if protect == "hold":
        other.hold(entry.id, "paper")
    elif protect == "tag":
        other.tag(entry.id, "released")
    else:
        other.alias("best", entry.id)
    [waits] = collect(catalog).plan.wait
    assert waits.reasons == (f"needed by {other.database.identity}",)
    done = collect(catalog, apply=True)
    assert (done.plan.purge, done.purged, done.failures) == ((), (), ())
    assert open_checkpoint(str(entry.url)).id == entry.id
    assert (
        catalog.get(entry.id).state == "committed"
    )  # as it was protected, it was never deleted there


def test_what_another_catalog_restored_stays(
    catalog: Catalog, other: Catalog, recorded: Recorded
) -> None:
    entry = recorded()
    deleted(catalog, entry)
    register([str(entry.url)], other)
    assert other.get(entry.id).state == "deleted"
    other.restore(entry.id)
    done = collect(catalog, apply=True)
    assert done.purged == ()
    assert catalog.get(entry.id).state == "committed"


def test_what_another_one_needs_stays_until_that_is_purged(
    catalog: Catalog, recorded: Recorded
) -> None:
    parent = recorded(1)
    deleted(catalog, parent)
    child = universal(str(mine(parent).parent / "child"), 2)
    manifest = child.manifest.with_sidecar(packed_over(str(parent.url)), ("extents", "virtual"))
    (Path(child.url) / "manifest.json").write_bytes(manifest_bytes(manifest))
    register([child.url], catalog)
    assert collect(catalog, apply=True).purged == ()
    deleted(catalog, catalog.get(child.id))
    assert collect(catalog, apply=True).purged == (child.id,)
    assert collect(catalog, apply=True).purged == (parent.id,)


def test_what_engines_wrote_is_never_purged(catalog: Catalog, tmp_path: Path) -> None:
    foreign(tmp_path / "ds")
    [entry] = register([str(tmp_path / "ds")], catalog).entries
    before = content(entry.url)
    with pytest.raises(PermissionDenied):
        deleted(catalog, entry)
    with catalog.database.writing() as c:
        c.exec_driver_sql(
            "update checkpoint set state = 'deleted', deleted = '2020-01-01', purge_after = '2020-01-01'"
        )
    done = collect(catalog, apply=True)
    assert (done.purged, [w.reasons for w in done.plan.wait]) == (
        (),
        [("not ours: written by deepspeed",)],
    )
    with pytest.raises(AssertionError):  # nor if a plan had it in
        purge(catalog, entry.id)
    assert content(entry.url) == before


# --- others who come meanwhile


def test_another_checkpoint_that_was_committed_there_stays(
    catalog: Catalog, recorded: Recorded
) -> None:
    entry = recorded()
    catalog.note(entry.id, "old")
    deleted(catalog, entry)
    new = universal(str(entry.url), 2, overwrite=True)
    before = content(entry.url)
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert content(entry.url) == before
    ucformat.verify(new.url).raise_if_damaged()


class Wrapped(WrappedStore):
    """Somebody else acts just before the purge does something."""

    def __init__(self, inner: Store, method: str, key: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self.wanted, self.act = (method, key), act

    def _meddle(self, method: str, key: str) -> None:
        if self.wanted == (method, key):
            self.wanted = ("", "")
            self.act()

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self._meddle("look", key)
        return super().read(key, offset, nbytes)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        self._meddle("read", key)
        return super().read_versioned(key)

    def put_if_absent(self, key: str, data: bytes) -> str:
        self._meddle("put", key)
        return super().put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        self._meddle("replace", key)
        return super().replace(key, data, version)

    def delete(self, key: str) -> None:
        self._meddle("delete", key)
        super().delete(key)

    def delete_prefix(self, prefix: str) -> None:
        self._meddle("delete_prefix", prefix)
        super().delete_prefix(prefix)


def meddle(monkeypatch: pytest.MonkeyPatch, *what: Any) -> None:
    monkeypatch.setattr(gc, "open_store", lambda place: Wrapped(open_store(place), *what))


@pytest.mark.parametrize("instant", [("put", "tombstone.json"), ("replace", "manifest.json")])
def test_one_that_is_committed_at_the_very_instant_stays(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, instant: tuple[str, str]
) -> None:
    entry = recorded()
    deleted(catalog, entry)
    made = []
    with monkeypatch.context() as patch:

        def overwrite() -> None:
            with (
                pytest.MonkeyPatch.context() as begun_before
            ):  # it looked for a tombstone before that was put
                begun_before.setattr("ucformat.format.commit.TOMBSTONE", "no-tombstone.json")
                made.append(universal(str(entry.url), 2, overwrite=True))

        meddle(patch, *instant, overwrite)
        done = collect(catalog, apply=True)
    assert done.failures == ()
    assert open_checkpoint(str(entry.url)).id == made[0].id
    ucformat.verify(str(entry.url)).raise_if_damaged()
    assert not (mine(entry) / "tombstone.json").exists()
    universal(str(entry.url), 3, overwrite=True)


def test_nobody_writes_where_a_purge_has_begun(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded()
    deleted(catalog, entry)
    seen: list[bool] = []

    def write() -> None:
        for overwrite in (False, True):
            with pytest.raises(Conflict, match="was deleted"):
                universal(str(entry.url), 2, overwrite=overwrite)
        with pytest.raises((NotACheckpoint, NotFound)):
            ucformat.open(str(entry.url))
        seen.append(True)

    attempt = open_checkpoint(str(entry.url)).manifest.attempt
    for instant in (
        ("delete", "manifest.json"),
        ("delete_prefix", f"data/{attempt}"),
        ("delete", "tombstone.json"),
    ):
        shutil.copytree(mine(entry), mine(entry).parent / "kept")
        with monkeypatch.context() as patch:
            meddle(patch, *instant, write)
            assert collect(catalog, apply=True).purged == (entry.id,), instant
        assert seen.pop()
        assert not mine(entry).exists()
        (mine(entry).parent / "kept").rename(mine(entry))
        register([str(entry.url)], catalog)
        deleted(catalog, entry)


def test_one_who_commits_into_a_grave_stays(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It began before the checkpoint that is purged was committed, and looked for a tombstone before one was put."""
    entry = recorded()
    deleted(catalog, entry)
    with monkeypatch.context() as patch:
        patch.setattr(
            gc, "open_store", lambda p: FaultyStore(open_store(p), fail_write=4, dead=True)
        )
        collect(catalog, apply=True)
    late = universal(tmp_path / "late", 2)
    with monkeypatch.context() as patch:
        meddle(
            patch,
            "look",
            "manifest.json",
            lambda: shutil.copytree(late.url, mine(entry), dirs_exist_ok=True),
        )
        assert collect(catalog, apply=True).purged == (entry.id,)
    assert content(entry.url) == content(late.url)


def test_two_who_purge_at_once_both_end_well(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    instants: tuple[tuple[str, str], ...] = (
        ("read", "manifest.json"),
        ("put", "tombstone.json"),
        ("replace", "manifest.json"),
        ("delete", "manifest.json"),
        ("delete_prefix", "data"),
        ("delete", "tombstone.json"),
    )
    for instant in instants:
        entry = recorded(1, str(catalog.url)[10:] + f".{instant[0]}-{instant[1]}")
        attempt = open_checkpoint(str(entry.url)).manifest.attempt
        deleted(catalog, entry)
        where = (instant[0], f"data/{attempt}") if instant[1] == "data" else instant
        results: list[Any] = []

        def second(into: list[Any] = results) -> None:
            with pytest.MonkeyPatch.context() as real:
                real.setattr(gc, "open_store", open_store)
                into.append(collect(catalog, apply=True))

        with monkeypatch.context() as patch:
            meddle(patch, *where, second)
            results.append(collect(catalog, apply=True))
        assert [r.failures for r in results] == [(), ()], instant
        assert not mine(entry).exists()
        assert catalog.get(entry.id).state == "purged"


def test_the_document_of_another_checkpoint_stays(catalog: Catalog, recorded: Recorded) -> None:
    entry = recorded()
    catalog.note(entry.id, "old")
    new = universal(str(entry.url), 2, overwrite=True)
    register([new.url], catalog)
    deleted(catalog, catalog.get(new.id))
    assert document(new.url).id == new.id
    stale = document(new.url).model_copy(update={"id": entry.id})
    (mine(entry) / "ucformat-catalog.json").write_text(stale.model_dump_json())
    assert collect(catalog, apply=True).purged == (new.id,)
    assert sorted(content(entry.url)) == [
        "ucformat-catalog.json"
    ]  # nobody knows that no such checkpoint lies here


# --- interrupted


def test_stopped_at_each_step_the_next_one_ends_it(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = recorded()
    catalog.note(template.id, "so that there is a document, and a lock beside it")
    catalog.note(template.id, "so that there is a document, and a lock beside it")
    other = recorded(2)
    stays = content(other.url)
    shutil.copytree(mine(template), tmp_path / "kept")
    step, seen = 0, set()
    while True:
        step += 1
        faulty: list[FaultyStore] = []

        def dying(place: str, at: int = step, made: list[FaultyStore] = faulty) -> Store:
            made.append(FaultyStore(open_store(place), fail_write=at, dead=True))
            return made[-1]

        deleted(catalog, template)
        with monkeypatch.context() as patch:
            patch.setattr(gc, "open_store", dying)
            done = collect(catalog, apply=True)
        if not any(f.failed for f in faulty):
            break
        assert len(done.failures) == 1
        try:
            ucformat.verify(str(template.url)).raise_if_damaged()
            seen.add("whole")
        except (NotACheckpoint, NotFound):
            seen.add("going")
            assert catalog.get(template.id).state == "purging"
        assert collect(catalog).resumed == (
            (template.id,) if catalog.get(template.id).state == "purging" else ()
        )
        done = collect(catalog, apply=True)
        assert (done.purged, done.failures) == ((template.id,), ()), step
        assert not mine(template).exists()
        assert content(other.url) == stays
        shutil.copytree(tmp_path / "kept", mine(template))
        register([str(template.url)], catalog)
    assert step > 8
    assert seen == {"whole", "going"}


def test_one_place_that_fails_does_not_keep_the_others(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = recorded(1), recorded(2)
    shutil.copytree(mine(one), tmp_path / "z copy")
    register([str(tmp_path / "z copy")], catalog)
    deleted(catalog, one, two)

    class ReadOnly(WrappedStore):
        def put_if_absent(self, key: str, data: bytes) -> str:
            raise PermissionDenied("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(
            gc, "open_store", lambda p: ReadOnly(open_store(p)) if p == one.url else open_store(p)
        )
        done = collect(catalog, apply=True)
    assert (done.purged, done.failures) == ((two.id,), (f"{one.id}: Read-only file system",))
    assert not (tmp_path / "z copy").exists()
    assert collect(catalog, apply=True).purged == (one.id,)


def test_a_tombstone_that_no_catalog_remembers_is_found_below_its_place(
    catalog: Catalog,
    other: Catalog,
    recorded: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = recorded()
    deleted(catalog, entry)
    root = str(mine(entry).parent)
    with monkeypatch.context() as patch:
        patch.setattr(
            gc, "open_store", lambda p: FaultyStore(open_store(p), fail_write=4, dead=True)
        )
        assert len(collect(catalog, apply=True).failures) == 1
    assert is_tombstone((mine(entry) / "tombstone.json").read_bytes())
    assert collect(catalog, [root], grace=NOW).leftovers == ()  # the catalog itself goes on
    assert collect(other, [root], apply=True).leftovers == ()  # it is too young
    assert (
        collect(other, root, grace=NOW).leftovers
        == collect(other, [root], grace=NOW).leftovers
        != ()
    )
    [left] = collect(other, [root], grace=NOW).leftovers
    assert (left.url, left.nbytes > 0) == (str(entry.url), True)
    assert collect(other, [root], grace=NOW, apply=True).failures == ()
    assert content(mine(entry)) == {}
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert not mine(entry).exists()


def test_a_tombstone_that_somebody_put_meanwhile_is_heeded(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looked for a tombstone before another one put it, and for the manifest after that one was killed."""
    entry = recorded()
    deleted(catalog, entry)
    with monkeypatch.context() as patch:
        patch.setattr(
            gc, "open_store", lambda p: FaultyStore(open_store(p), fail_write=4, dead=True)
        )
        assert len(collect(catalog, apply=True).failures) == 1
    assert is_tombstone((mine(entry) / "manifest.json").read_bytes())
    looked = iter([None])
    read = removal.read_tombstone
    monkeypatch.setattr(removal, "read_tombstone", lambda store: next(looked, read(store)))
    assert removal.remove(LocalStore(mine(entry)), entry.id) == ()
    assert not mine(entry).exists()


def test_a_tombstone_beside_a_manifest_is_only_for_its_catalog(
    catalog: Catalog, recorded: Recorded
) -> None:
    entry = recorded()
    ck = open_checkpoint(str(entry.url))
    tombstone = TombstoneDoc(
        id=entry.id, attempt=ck.manifest.attempt, created=datetime(2020, 1, 1, tzinfo=UTC)
    )
    (mine(entry) / "tombstone.json").write_text(tombstone.model_dump_json())
    done = collect(catalog, [str(mine(entry).parent)], apply=True, grace=NOW)
    assert (done.leftovers, done.failures) == ((), ())
    ucformat.verify(ck).raise_if_damaged()


@pytest.mark.parametrize("file", ["tombstone.json", "manifest.json"])
def test_what_cannot_be_read_is_not_removed(
    catalog: Catalog, recorded: Recorded, file: str
) -> None:
    entry, good = recorded(1), recorded(2)
    deleted(catalog, entry, good)
    (mine(entry) / file).write_text("{}")
    before = content(entry.url)
    done = collect(catalog, [str(mine(entry).parent)], apply=True, grace=NOW)
    assert done.purged == (good.id,)
    assert any(f.startswith(entry.id) for f in done.failures)
    assert content(entry.url) == before


@pytest.mark.parametrize("attempt", ["", "..", "../../victim", "/abs", "a/../../victim"])
def test_names_that_leave_the_checkpoint_are_refused_before_anything_goes(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, attempt: str
) -> None:
    entry = recorded()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "x").write_text("x")
    file = mine(entry) / "manifest.json"
    file.write_bytes(manifest_file(json.loads(file.read_text()) | {"attempt": attempt}))
    deleted(catalog, entry)
    before = content(entry.url)
    done = collect(catalog, apply=True)
    assert (done.purged, len(done.failures)) == ((), 1)
    assert content(entry.url) == before
    tombstone = TombstoneDoc(
        id=entry.id, attempt="0" * 20, created=datetime.now(UTC)
    ).model_dump() | {"attempt": attempt}
    (mine(entry) / "tombstone.json").write_text(json.dumps(tombstone, default=str))
    file.unlink()
    collect(catalog, [str(tmp_path)], apply=True, grace=NOW)
    assert (tmp_path / "victim" / "x").exists()


# --- attempts


def attempt(place: Path | str, days: float = 0) -> str:
    """An attempt that was begun and written to so long ago."""
    store = open_store(str(place))
    begun = begin(store, {"a": str(place), "days": days}, overwrite=True)
    for key in (f"data/{begun.id}/x/c/0", f"objects/{begun.id}/o", f"assets/{begun.id}/a"):
        with store.create(key) as out:
            out.write(b"x" * 10)
    if not isinstance(store, MemoryStore):
        age(Path(store.url), begun.id, days)
    return begun.id


def age(place: Path, name: str, days: float) -> None:
    record = place / "attempts" / f"{name}.json"
    started = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    record.write_text(json.dumps(json.loads(record.read_text()) | {"started": started}))
    written = [
        path for kind in ("data", "objects", "assets") for path in (place / kind / name).rglob("*")
    ]
    for path in (record, *written):
        os.utime(path, (time.time() - days * 86400,) * 2)


def test_interrupted_attempts_are_left_over(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded()
    root = tmp_path / "run7"
    before = content(entry.url)
    age(mine(entry), open_checkpoint(str(entry.url)).manifest.attempt, 30)
    old = {attempt(root / "interrupted", 8), attempt(entry.url or "", 9), attempt(root, 10)}
    young = attempt(root / "interrupted", 6)
    (root / "attempts" / "mine.json").write_text("{}")
    (root / "attempts" / "else").mkdir()
    (root / "x-attempts").mkdir()
    shutil.copy(root / "interrupted" / "attempts" / f"{young}.json", root / "x-attempts")
    found = collect(catalog, [str(root)])
    assert {left.attempt for left in found.leftovers} == old
    assert {left.url for left in found.leftovers} == {
        str(root),
        str(root / "interrupted"),
        entry.url,
    }
    assert {left.nbytes for left in found.leftovers} == {30}
    assert collect(catalog).leftovers == ()
    assert collect(catalog, [str(tmp_path / "nowhere")]).leftovers == ()
    seen: list[tuple[int, int]] = []
    done = collect(catalog, [str(root)], apply=True, progress=lambda *n: seen.append(n))
    assert (done.failures, seen) == ((), [(1, 3), (2, 3), (3, 3)])
    assert {k for k in content(entry.url) if k not in before} == set()
    assert ucformat.verify(str(entry.url))
    assert sorted(content(root / "interrupted")) == [
        f"assets/{young}/a",
        f"attempts/{young}.json",
        f"data/{young}/x/c/0",
        f"objects/{young}/o",
    ]
    assert sorted(content(root / "attempts")) == ["mine.json"]
    assert {left.attempt for left in collect(catalog, [str(root)], grace=NOW).leftovers} == {young}


def test_an_attempt_that_was_taken_up_again_is_not_left_over(
    catalog: Catalog, tmp_path: Path
) -> None:
    name = attempt(tmp_path / "x", 30)
    assert len(collect(catalog, [str(tmp_path)]).leftovers) == 1
    (tmp_path / "x" / "data" / name / "new").write_text("its record is old, but somebody writes")
    assert collect(catalog, [str(tmp_path)], apply=True).leftovers == ()
    assert len(content(tmp_path / "x")) == 5


def test_an_attempt_that_comes_to_life_while_others_are_removed_stays(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    place = tmp_path / "x"
    name = attempt(place, 30)
    entry = recorded()
    deleted(catalog, entry)

    def alive(done: int, _: int) -> None:
        if done == 1:
            (place / "data" / name / "new").write_text("x")

    assert collect(catalog, [str(place)], apply=True, progress=alive).failures == ()
    assert len(content(place)) == 5


def test_an_attempt_is_marked_before_anything_of_it_is_removed(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "x"
    name = attempt(place, 30)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, "abandon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect(catalog, [str(place)], apply=True)
    assert len(content(place)) == 4
    with pytest.raises(Conflict, match="is being removed"):
        attempt(place, 30)
    assert (
        collect(catalog, [str(place)], apply=True).leftovers == ()
    )  # perhaps it is being removed right now
    assert [
        left.attempt for left in collect(catalog, [str(place)], apply=True, grace=NOW).leftovers
    ] == [name]
    assert list(place.iterdir()) == []  # who made the place itself is not known
    assert attempt(place, 30) == name


def test_a_clock_that_is_ahead_does_not_make_an_attempt_old(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place's clock has the last word, and that of this machine may be wrong."""
    name = attempt(tmp_path / "x", 1)
    before = content(tmp_path / "x")
    ahead = make_stamp().now + timedelta(days=30)
    with monkeypatch.context() as patch:
        patch.setattr(gc, "make_stamp", lambda: Stamp("somebody", ahead))
        done = collect(catalog, [str(tmp_path)], apply=True)
    assert ([left.attempt for left in done.leftovers], done.failures) == ([name], ())
    assert content(tmp_path / "x") == before


def test_attempts_at_a_manifest_that_cannot_be_read_stay(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded()
    attempt(entry.url or "", 30)
    attempt(tmp_path / "run7" / "x", 30)
    (mine(entry) / "manifest.json").write_text("{")
    before = content(entry.url)
    done = collect(catalog, [str(tmp_path / "run7")], apply=True)
    assert [f.partition(": ")[0] for f in done.failures] == [entry.url]
    assert content(entry.url) == before
    assert content(tmp_path / "run7" / "x") == {}


def test_attempts_in_memory(catalog: Catalog, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}"
    name = attempt(f"{root}/x")
    assert collect(catalog, [root]).leftovers == ()
    [left] = collect(catalog, [root], grace=NOW, apply=True).leftovers
    assert (left.attempt, left.url) == (name, f"{root}/x")
    assert content(root) == {}


def test_a_place_that_cannot_be_listed_is_an_error(catalog: Catalog) -> None:
    with pytest.raises(UcformatError):
        collect(catalog, ["nosuchscheme://x"])


def test_a_place_is_free_again(catalog: Catalog, recorded: Recorded, tmp_path: Path) -> None:
    entry = recorded()
    deleted(catalog, entry)
    collect(catalog, apply=True)
    new = universal(str(entry.url), 1)
    assert reindex(str(tmp_path / "run7"), catalog).entries[0].id == new.id != entry.id
    assert catalog.get(entry.id).state == "purged"
    assert isinstance(LocalStore(new.url), LocalStore)
    catalog.note(new.id, "x")
    assert document(new.url).id == new.id


# --- a document without its checkpoint


def alone(catalog: Catalog, recorded: Recorded, tmp_path: Path) -> tuple[Path, Path]:
    """A tree, and the document in it of a checkpoint that was removed while it was written."""
    entry = recorded(9, str(tmp_path / "tree" / "alone"))
    catalog.metric(entry.id, {"a": 1})
    (tmp_path / "tree" / "README").write_text("so that it is no disk that is not mounted")
    for path in [*mine(entry).iterdir()]:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CATALOG_DOCUMENT:
            path.unlink()
    doc = mine(entry) / CATALOG_DOCUMENT
    os.utime(doc, times=(doc.stat().st_mtime - 60,) * 2)
    return tmp_path / "tree", doc


def test_a_document_that_lies_alone_goes(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    tree, doc = alone(catalog, recorded, tmp_path)
    assert collect(other, [str(tree)], apply=True).leftovers == ()  # it is too young
    [left] = collect(other, [str(tree)], grace=NOW).leftovers
    assert (left.url, left.attempt, left.nbytes) == (str(doc.parent), None, doc.stat().st_size)
    assert doc.exists()
    done = collect(other, [str(tree)], grace=NOW, apply=True)
    assert (done.leftovers, done.failures) == ((left,), ())
    assert not doc.parent.exists()
    assert tree.exists()


def test_a_document_beside_anything_else_stays(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    tree, doc = alone(catalog, recorded, tmp_path)
    (doc.parent / "weights").mkdir()
    (doc.parent / "weights" / "of somebody").write_text("x")
    assert collect(catalog, [str(tree)], grace=NOW, apply=True).leftovers == ()
    shutil.rmtree(doc.parent / "weights")
    doc.write_text('{"format": "of somebody"}')
    done = collect(catalog, [str(tree)], grace=NOW, apply=True)
    assert (done.leftovers, done.failures) == ((), ())
    assert doc.exists()


@pytest.mark.parametrize("when", ["planned", "looked at"])
def test_a_document_beside_which_somebody_begins_stays(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tree, doc = alone(catalog, recorded, tmp_path)

    class Begun(WrappedStore):
        def put_if_absent(self, key: str, data: bytes) -> str:
            attempt(doc.parent)
            return super().put_if_absent(key, data)

    def looked_at(store: Store) -> None:
        if when == "planned":
            attempt(doc.parent)
        removal.remove_orphaned_document(store if when == "planned" else Begun(store))

    monkeypatch.setattr(gc, "remove_orphaned_document", looked_at)
    done = collect(catalog, [str(tree)], grace=NOW, apply=True)
    assert (len(done.leftovers), done.failures) == (1, ())
    assert doc.exists()
    assert len(content(doc.parent)) == 1 + 4
