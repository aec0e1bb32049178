"""One checkpoint's fault is that checkpoint's report: the others are registered, judged and purged."""

from __future__ import annotations

import errno
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import manifest_file
from tests.jobs.conftest import foreign, universal
from tests.jobs.test_gc import age, attempt
from tests.storage.faulty import FaultyStore
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import PermissionDenied, UcformatError, UnsupportedError
from ucformat.jobs import gc, opening
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register, reindex
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, TOMBSTONE
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from tests.jobs.conftest import Recorded
    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Store

NOW = timedelta(0)
FIRST, LAST = (
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-12:00",
)  # which no clock in UTC shows
TIMES = pytest.mark.parametrize(
    "time", [FIRST, LAST, "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"]
)


def poison(place: Path, checkpoint: str, time: str, what: str) -> None:
    who: dict[str, Any] = {"who": "x", "reason": "x"}
    said: dict[str, dict[str, Any]] = {
        "deleted": {"deleted": time, "purge_after": time},
        "purge_after": {"deleted": "2020-01-01T00:00:00Z", "purge_after": time},
        "aliases": {"aliases": [{"name": "a", "version": 1, "moved": time}]},
        "tags": {"tags": [{"name": "a", "created": time, **who}]},
        "holds": {"holds": [{"until": time, "created": time, **who}]},
        "metrics": {"metrics": {"m": {"value": 1, "measured": time}}},
    }
    doc = {"id": checkpoint, "catalog": "x", "revision": 50, **said[what]}
    (place / CATALOG_DOCUMENT).write_text(json.dumps(doc))


@pytest.mark.front("*-9999-12-31T23:59:59-12:00", "metrics-0001-01-01T00:00:00+14:00")
@TIMES
@pytest.mark.parametrize("what", ["deleted", "purge_after", "aliases", "tags", "holds", "metrics"])
def test_a_document_with_a_time_beyond_all_bounds(
    catalog: Catalog, recorded: Recorded, time: str, what: str
) -> None:
    bad, good = recorded(1), recorded(2)
    for entry in (bad, good):
        catalog.delete(entry.id, grace=NOW)
    poison(Path(str(bad.url)), bad.id, time, what)
    done = collect(catalog, [str(Path(str(bad.url)).parent)], apply=True, grace=NOW)
    assert good.id in done.purged
    assert all(f.startswith(bad.id) for f in done.failures)
    new = universal(str(good.url), 3)
    for trust in (False, True):
        found = register(
            [str(Path(str(bad.url)).parent)],
            catalog,
            recursive=True,
            rescan=True,
            trust_documents=trust,
        )
        assert new.id in {e.id for e in found.entries}
        assert collect(catalog, apply=True).failures in ((), done.failures)


@pytest.mark.front("*-0001-01-01T00:00:00+14:00", "*-9999-12-31T23:59:59-12:00")
@TIMES
@pytest.mark.parametrize("file", ["manifest", "tombstone", "attempt", "touched"])
def test_a_file_with_a_time_beyond_all_bounds(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, time: str, file: str
) -> None:
    good = recorded(1, tmp_path / "tree" / "good")
    bad = universal(tmp_path / "tree" / "bad", 2)
    manifest = tmp_path / "tree" / "bad" / "manifest.json"
    if file == "manifest":
        manifest.write_bytes(manifest_file(json.loads(manifest.read_text()) | {"created": time}))
    elif file == "tombstone":
        doc = {
            "format": "ucformat-tombstone",
            "version": 1,
            "id": bad.id,
            "attempt": "x",
            "created": time,
        }
        (tmp_path / "tree" / "bad" / "tombstone.json").write_text(json.dumps(doc))
    elif file == "attempt":
        name = attempt(tmp_path / "tree" / "bad", 30)
        record = tmp_path / "tree" / "bad" / "attempts" / f"{name}.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"started": time}))
    else:
        tag = foreign(tmp_path / "tree" / "engine")
        for path in tag.iterdir():
            os.utime(path, (1 << 38, 1 << 38))  # of the year 10,680
    new = universal(tmp_path / "tree" / "new", 3)
    found = register([str(tmp_path / "tree")], catalog, recursive=True)
    assert {good.id, new.id} <= {e.id for e in found.entries}
    catalog.delete(good.id, grace=NOW)
    done = collect(catalog, [str(tmp_path / "tree")], apply=True, grace=NOW)
    assert done.purged == (good.id,)
    assert new.id in {e.id for e in reindex(str(tmp_path / "tree"), catalog).entries}


def test_what_nobody_thought_of_is_told_with_its_place(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = recorded(1), recorded(2)
    catalog.delete(bad.id, good.id, grace=NOW)
    real = open_store

    def failing(place: str) -> Store:
        if str(place) == bad.url:
            raise RecursionError("in a file there")
        return real(place)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "open_store", failing)
        found = register([str(Path(str(bad.url)).parent)], catalog, recursive=True, rescan=True)
        assert [e.id for e in found.entries] == [good.id] or found.failures
    with monkeypatch.context() as patch:
        patch.setattr(gc, "open_store", failing)
        done = collect(catalog, apply=True)
    assert done.purged == (good.id,)
    [failure] = done.failures
    assert f"{bad.url} makes ucformat fail: RecursionError: in a file there" in failure


def test_one_that_cannot_be_opened_for_an_unknown_reason_is_a_failure(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = recorded(1), recorded(2)
    real = open_checkpoint

    def failing(place: str, **options: Any) -> Any:
        if str(place) == bad.url:
            raise RecursionError("in a file there")
        return real(place, **options)

    monkeypatch.setattr(opening, "open_checkpoint", failing)
    found = register([str(Path(str(bad.url)).parent)], catalog, recursive=True, rescan=True)
    assert ([e.id for e in found.entries], [f.url for f in found.failures]) == (
        [good.id],
        [bad.url],
    )
    with pytest.raises(UcformatError, match="RecursionError"):
        register([str(bad.url)], catalog)


# --- a full disk


class Full(WrappedStore):
    """A disk without room: what is deleted makes some, and a small file needs a whole block."""

    blocks = 0

    def _need(self) -> None:
        if Full.blocks < 1:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise UcformatError(f"cannot write: {full.strerror}") from full
        Full.blocks -= 1

    def put_if_absent(self, key: str, data: bytes) -> str:
        self._need()
        return super().put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        self._need()
        return super().replace(key, data, version)

    def delete(self, key: str) -> None:
        Full.blocks += 1
        super().delete(key)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_gc_frees_space_on_a_full_disk(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    entries = [recorded(n) for n in (1, 2)]
    stays = recorded(3)
    catalog.delete(*(e.id for e in entries), grace=NOW)
    monkeypatch.setattr(gc, "open_store", lambda place: Full(open_store(place)))
    Full.blocks = blocks
    done = collect(catalog, apply=True)
    assert (len(done.purged), done.failures) == (2, ())
    assert [Path(str(e.url)).exists() for e in (*entries, stays)] == [False, False, True]
    ucformat.verify(str(stays.url)).raise_if_damaged()


class Replaced(Full):
    """A full disk on which another program replaces the manifest when there turns out to be no room."""

    def put_if_absent(self, key: str, data: bytes) -> str:
        try:
            return super().put_if_absent(key, data)
        finally:
            if key == TOMBSTONE:
                content, version = self.inner.read_versioned(MANIFEST)
                document = {**json.loads(content), "id": "0" * 32}
                self.inner.replace(MANIFEST, manifest_file(document), version)


def test_on_a_full_disk_a_manifest_that_was_replaced_meanwhile_stays(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded(1)
    catalog.delete(entry.id, grace=NOW)
    monkeypatch.setattr(gc, "open_store", lambda place: Replaced(open_store(place)))
    Full.blocks = 0
    done = collect(catalog, apply=True)
    assert (done.purged, len(done.failures)) == ((), 1)
    assert open_checkpoint(str(entry.url)).id == "0" * 32


def test_killed_at_any_instant_on_a_full_disk_nothing_is_half_there(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 0
    while True:
        step += 1
        entry = recorded(step)
        root, name = (
            str(Path(str(entry.url)).parent),
            open_checkpoint(str(entry.url)).manifest.attempt,
        )
        catalog.delete(entry.id, grace=NOW)
        Full.blocks = 0
        made: list[FaultyStore] = []

        def dying(place: str, at: int = step, into: list[FaultyStore] = made) -> Store:
            into.append(FaultyStore(Full(open_store(place)), fail_write=at, dead=True))
            return into[-1]

        with monkeypatch.context() as patch:
            patch.setattr(gc, "open_store", dying)
            collect(catalog, apply=True)
        if not any(f.failed for f in made):
            break
        if (Path(str(entry.url)) / "manifest.json").exists():
            ucformat.verify(str(entry.url)).raise_if_damaged()
        assert entry.id in collect(catalog, apply=True).purged
        if (
            Path(str(entry.url)) / "attempts" / f"{name}.json"
        ).exists():  # files, and no word of what they were
            age(Path(str(entry.url)), name, 1000)
            collect(catalog, [root], apply=True)
        assert {i.key for i in open_store(str(entry.url)).list()} <= {CATALOG_DOCUMENT}, step
    assert step > 6


# --- a store on which nothing can be replaced


class WriteOnce(WrappedStore):
    """Files are made and deleted, and not replaced."""

    error: type[UcformatError] = PermissionDenied

    def replace(self, key: str, data: bytes, version: str) -> str:
        raise self.error(f"{key} cannot be replaced")


@pytest.mark.parametrize("error", [PermissionDenied, UnsupportedError])
def test_gc_where_nothing_can_be_replaced(
    catalog: Catalog,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    error: type[UcformatError],
) -> None:
    gone, stays = recorded(1), recorded(2)
    catalog.delete(gone.id, grace=NOW)
    monkeypatch.setattr(WriteOnce, "error", error)
    monkeypatch.setattr(gc, "open_store", lambda place: WriteOnce(open_store(place)))
    done = collect(catalog, apply=True)
    assert (done.purged, done.failures) == ((gone.id,), ())
    assert [Path(str(e.url)).exists() for e in (gone, stays)] == [False, True]
