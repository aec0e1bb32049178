"""What the catalog knows is written beside the checkpoint after every change, and nothing of others is lost."""

from __future__ import annotations

import json
import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs.conftest import document, foreign, universal
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.document import compose, stale
from ucformat.catalog.refs import parse_ref, resolve
from ucformat.catalog.stamp import GRACE
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import Conflict, IntegrityError, PermissionDenied, UnsupportedError
from ucformat.format.attempts import mark_replacing
from ucformat.format.commit import abandon, begin
from ucformat.jobs import documents
from ucformat.jobs.documents import find_document, read_document, write_documents
from ucformat.jobs.register import register
from ucformat.schema import CATALOG_DOCUMENT
from ucformat.schema.documents import CatalogDoc, NoteDoc
from ucformat.settings import using
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.catalog.conftest import Clock
    from tests.jobs.conftest import Recorded
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store


def composed(catalog: Catalog, ref: str, url: str | None = None) -> CatalogDoc:
    with catalog.database.reading() as c:
        return compose(c, resolve(c, parse_ref(ref)), url)


def due(catalog: Catalog) -> int:
    with catalog.database.reading() as c:
        return len(stale(c, None))


def stores(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Store], Store]) -> None:
    """Have documents written through stores of this kind."""
    monkeypatch.setattr(documents, "open_store", lambda place: wrap(open_store(place)))


# --- after every change


@pytest.mark.parametrize("memory", [False, True])
def test_every_change_is_written(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, memory: bool
) -> None:
    places = [
        f"memory://{tmp_path.name}{n}" if memory else tmp_path / "run7" / str(n) for n in (1, 2)
    ]
    one, two = (recorded(n, place, run="run7 ") for n, place in enumerate(places, 1))
    assert read_document(open_store(str(one.url))) is None
    number = 0

    def hold() -> None:
        nonlocal number
        number = catalog.hold(one.id, "paper", until=timedelta(days=1))

    changes: list[Callable[[], object]] = [
        lambda: catalog.tag(one.id, "good", "better"),
        hold,
        lambda: catalog.metric(one.id, {"a": 0.1 + 0.2, "nan": float("nan"), "inf": float("-inf")}),
        lambda: catalog.note(one.id, "looks\ngood 🦔"),
        lambda: catalog.alias("best", one.id),
        lambda: catalog.link(one.id, "s3://else/where", "finetune"),
        lambda: catalog.record(universal_manifest(one.url), str(one.url), run="another"),
        lambda: catalog.release(one.id, number),
    ]
    revision = 0
    for change in changes:
        change()
        found = document(one.url)
        assert found == composed(catalog, one.id), change
        assert found.revision > revision
        assert due(catalog) == 0
        revision = found.revision
    assert (found.id, found.run, [t.name for t in found.tags], found.holds) == (
        one.id,
        "another",
        ["better", "good"],
        (),
    )
    catalog.delete(two.id)
    assert document(two.url).deleted is not None
    assert document(two.url).purge_after == catalog.get(two.id).purge_after
    catalog.restore(two.id)
    assert document(two.url).deleted is None


def universal_manifest(place: Any) -> Manifest:
    return open_checkpoint(place).manifest


def test_both_documents_are_written_when_an_alias_moves(
    catalog: Catalog, recorded: Recorded
) -> None:
    one, two = recorded(1), recorded(2)
    catalog.alias("best", one.id)
    assert [(a.name, a.version) for a in document(one.url).aliases] == [("best", 1)]
    catalog.alias("best", two.id)
    assert document(one.url).aliases == ()
    assert [(a.name, a.version) for a in document(two.url).aliases] == [("best", 2)]
    catalog.unalias("best")
    assert document(two.url).aliases == ()


def test_what_changes_nothing_writes_nothing(catalog: Catalog, recorded: Recorded) -> None:
    entry = recorded()
    catalog.tag(entry.id, "good")
    before = (Path(str(entry.url)) / CATALOG_DOCUMENT).stat()
    catalog.tag(entry.id, "good")
    catalog.metric(entry.id, {})
    catalog.release(entry.id)
    catalog.verified(entry.id, url=str(entry.url), ok=True, bytes_verified=1, bytes_unverified=0)
    recorded(2)
    assert write_documents(catalog) == 0
    assert (Path(str(entry.url)) / CATALOG_DOCUMENT).stat() == before


def test_one_that_an_engine_wrote_has_one_in_its_tag_folder(
    catalog: Catalog, tmp_path: Path
) -> None:
    tag = foreign(tmp_path / "run7")
    [entry] = register([str(tmp_path / "run7")], catalog).entries
    catalog.note(entry.id, "x")
    assert document(tag).id == entry.id
    assert [e.id for e in register([str(tag)], catalog).entries] == [
        entry.id
    ]  # which does not change what it is


def test_in_all_places_where_it_lies(catalog: Catalog, recorded: Recorded, tmp_path: Path) -> None:
    entry = recorded()
    catalog.tag(entry.id, "good")
    shutil.copytree(str(entry.url), tmp_path / "copy")
    (tmp_path / "copy" / CATALOG_DOCUMENT).unlink()
    register([str(tmp_path / "copy")], catalog)
    assert document(tmp_path / "copy") == document(entry.url)
    catalog.note(entry.id, "both")
    assert document(tmp_path / "copy") == document(entry.url) == composed(catalog, entry.id)


# --- what cannot be written


class ReadOnly(WrappedStore):
    def put_if_absent(self, key: str, data: bytes) -> str:
        raise PermissionDenied(f"cannot create {key}: Read-only file system")

    def replace(self, key: str, data: bytes, version: str) -> str:
        raise PermissionDenied(f"cannot write {key}: Read-only file system")

    def create(self, key: str, unit: int = 1) -> Any:
        raise PermissionDenied(f"cannot write {key}: Read-only file system")


def test_a_folder_that_cannot_be_written_is_a_warning_and_due_again(
    catalog: Catalog,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = recorded()
    with monkeypatch.context() as patch:
        stores(patch, ReadOnly)
        for tag in ("one", "two"):
            caplog.clear()
            catalog.tag(entry.id, tag)
            [record] = caplog.records
            assert (record.name, record.levelno) == ("ucformat", logging.WARNING)
            assert (
                f"document beside {entry.url} could not be updated: cannot create"
                in record.getMessage()
            )
        assert catalog.get(entry.id).tags == ("one", "two")
        assert due(catalog) == 1
    caplog.clear()
    catalog.note(recorded(2).id, "a change of another")
    assert caplog.records == []
    assert due(catalog) == 0
    assert [t.name for t in document(entry.url).tags] == ["one", "two"]


def test_one_place_of_several_that_cannot_be_written_stays_due(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded()
    shutil.copytree(str(entry.url), tmp_path / "a copy")
    register([str(tmp_path / "a copy")], catalog)
    for away in (entry.url, str(tmp_path / "a copy")):
        with monkeypatch.context() as patch:
            stores(patch, lambda s, away=away: ReadOnly(s) if s.url == away else s)  # type: ignore[misc]
            catalog.note(entry.id, "x")
            assert due(catalog) == 1
        assert write_documents(catalog) == 1
        assert due(catalog) == 0
        assert document(entry.url) == document(tmp_path / "a copy") == composed(catalog, entry.id)


def test_many_that_cannot_be_written_do_not_keep_one_from_being(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recorded(0)
    others = [recorded(n) for n in range(1, 5)]
    monkeypatch.setattr(write_documents, "__defaults__", (3,))
    stores(monkeypatch, lambda s: s if s.url == first.url else ReadOnly(s))
    for entry in others:
        catalog.note(entry.id, "x")
    catalog.note(first.id, "x")
    assert [n.text for n in document(first.url).notes] == ["x"]
    assert due(catalog) == 4


def test_nothing_is_made_again_for_one_that_is_gone(
    catalog: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    entry, _ = recorded(1), recorded(2)
    shutil.rmtree(str(entry.url))
    catalog.metric(entry.id, {"a": 1})
    assert (caplog.records, due(catalog)) == ([], 0)
    catalog.tag(entry.id, "good")  # whoever wants to keep it is told
    assert "the checkpoint is gone from there" in caplog.text
    assert due(catalog) == 1
    assert not Path(str(entry.url)).exists()


def test_what_is_said_while_a_disk_is_not_mounted_is_written_when_it_is(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = recorded(1), recorded(2)
    (tmp_path / "run7").rename(tmp_path / "unplugged")
    catalog.tag(one.id, "good")
    (tmp_path / "run7").mkdir()
    catalog.tag(two.id, "good")
    assert "is its disk not mounted?" in caplog.text
    assert due(catalog) == 2
    (tmp_path / "run7").rmdir()
    (tmp_path / "unplugged").rename(tmp_path / "run7")
    write_documents(catalog)
    assert [document(e.url).tags[0].name for e in (one, two)] == ["good", "good"]
    assert due(catalog) == 0


ODD = {
    "nothing": b"",
    "no JSON": b"{",
    "binary": b"\xff\x00\xfe",
    "a list": b"[]",
    "another's": b'{"format": "wandb", "id": "x"}',
    "of a newer version": b'{"format": "ucformat-catalog", "version": 2, "id": "x", "catalog": "c", "revision": 1}',
    "a revision beyond any bound": json.dumps(
        {"id": "x", "catalog": "c", "revision": 1 << 31}
    ).encode(),
    "a time without a zone": json.dumps(
        {
            "id": "x",
            "catalog": "c",
            "revision": 1,
            "tags": [{"name": "a", "created": "2026-01-01T00:00:00", "who": "x"}],
        }
    ).encode(),
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_one_that_is_none_of_ours_is_left_alone(
    catalog: Catalog, recorded: Recorded, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    entry = recorded()
    file = Path(str(entry.url)) / CATALOG_DOCUMENT
    file.write_bytes(data)
    catalog.tag(entry.id, "good")
    assert [r.name for r in caplog.records] == ["ucformat"]
    assert "left alone" in caplog.records[0].getMessage()
    assert file.read_bytes() == data
    assert due(catalog) == 1
    with pytest.raises(IntegrityError, match=CATALOG_DOCUMENT):
        read_document(LocalStore(str(entry.url)))
    caplog.clear()
    assert find_document(LocalStore(str(entry.url))) is None
    assert len(caplog.records) == 1
    assert [e.tags for e in register([str(entry.url)], catalog).entries] == [("good",)]
    assert file.read_bytes() == data


def test_the_document_of_an_overwritten_checkpoint_makes_way(
    catalog: Catalog, recorded: Recorded
) -> None:
    old = recorded()
    for word in "abcdef":
        catalog.note(old.id, word)
    new = catalog.record(universal(str(old.url), 2, overwrite=True).manifest, str(old.url))
    assert document(new.url).id == old.id
    catalog.note(new.id, "new")
    assert document(new.url) == composed(catalog, new.id)
    assert (document(new.url).id, document(new.url).tags) == (new.id, ())


def test_the_document_of_one_that_the_catalog_does_not_know_stays(
    catalog: Catalog, other: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    old = recorded()
    new = universal(str(old.url), 2, overwrite=True)
    other.record(new.manifest, new.url)
    other.tag(new.id, "released")
    catalog.note(old.id, "the catalog believes that it is still there")
    assert "there is another checkpoint there" in caplog.text
    assert (document(new.url).id, [t.name for t in document(new.url).tags]) == (
        new.id,
        ["released"],
    )


# --- others write, too


class Meddler(WrappedStore):
    """Between a read and a write of the document, somebody else does something."""

    def __init__(self, inner: Store, act: Callable[[], object], times: int) -> None:
        super().__init__(inner)
        self.act, self.times = act, times

    def _meddle(self) -> None:
        if self.times:
            self.times -= 1
            self.act()

    def put_if_absent(self, key: str, data: bytes) -> str:
        self._meddle()
        return super().put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        self._meddle()
        return super().replace(key, data, version)


@pytest.mark.parametrize("there", [False, True])
def test_two_catalogs_that_write_at_once_lose_nothing(
    catalog: Catalog,
    other: Catalog,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    there: bool,
) -> None:
    entry = recorded()
    other.record(universal_manifest(entry.url), str(entry.url))
    if there:
        catalog.note(entry.id, "before")
    real = open_store
    meddling = [Meddler(LocalStore(str(entry.url)), lambda: other.tag(entry.id, "theirs"), 1)]
    monkeypatch.setattr(documents, "open_store", lambda p: meddling.pop() if meddling else real(p))
    catalog.tag(entry.id, "ours")
    assert {t.name for t in document(entry.url).tags} == {"ours", "theirs"}
    assert set(catalog.get(entry.id).tags) == {"ours", "theirs"}
    assert due(catalog) == 0
    other.note(entry.id, "later")
    assert set(other.get(entry.id).tags) == {"ours", "theirs"}
    assert {n.text for n in document(entry.url).notes} == {"later", *(["before"] * there)}


def test_what_is_found_in_one_place_comes_to_the_others(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded()
    shutil.copytree(str(entry.url), tmp_path / "z copy")
    register([str(tmp_path / "z copy")], catalog)
    other.record(universal_manifest(entry.url), str(tmp_path / "z copy"))
    other.tag(entry.id, "theirs")
    catalog.tag(entry.id, "ours")
    assert {t.name for t in document(tmp_path / "z copy").tags} == {"ours", "theirs"}
    write_documents(catalog)
    assert document(entry.url) == document(tmp_path / "z copy") == composed(catalog, entry.id)
    assert due(catalog) == 0


def test_two_processes_of_one_catalog_lose_nothing(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded()
    catalog.note(entry.id, "before")
    real = open_store
    meddling = [Meddler(LocalStore(str(entry.url)), lambda: catalog.tag(entry.id, "second"), 1)]
    monkeypatch.setattr(documents, "open_store", lambda p: meddling.pop() if meddling else real(p))
    catalog.tag(entry.id, "first")
    assert document(entry.url) == composed(catalog, entry.id)
    assert [t.name for t in document(entry.url).tags] == ["first", "second"]
    assert due(catalog) == 0


def test_one_who_never_gets_to_write_says_so(
    catalog: Catalog,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = recorded()
    catalog.note(entry.id, "before")
    file = Path(str(entry.url)) / CATALOG_DOCUMENT

    def rewrite() -> None:
        file.write_bytes(file.read_bytes() + b"\n")

    stores(monkeypatch, lambda s: Meddler(s, rewrite, 100))
    catalog.tag(entry.id, "x")
    assert "kept changing" in caplog.text
    assert due(catalog) == 1


def test_on_object_stores_the_last_one_wins(
    catalog: Catalog,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """fsspec cannot replace conditionally there."""

    class ObjectStore(WrappedStore):
        def replace(self, key: str, data: bytes, version: str) -> str:
            raise UnsupportedError("cannot replace a file only if it is unchanged")

    entry = recorded()
    stores(monkeypatch, ObjectStore)
    for word in "abc":
        catalog.tag(entry.id, word)
        assert document(entry.url) == composed(catalog, entry.id)
    theirs = said(
        catalog, entry.id, notes=(NoteDoc(text="theirs", created=datetime.now(UTC), who="they"),)
    )
    left = [theirs]

    class Overwritten(ObjectStore):
        def flush(self) -> None:
            if left:
                (Path(self.url) / CATALOG_DOCUMENT).write_text(left.pop().model_dump_json())

    stores(monkeypatch, Overwritten)
    catalog.tag(entry.id, "d")
    assert document(entry.url) == composed(catalog, entry.id)
    assert [n.text for n in catalog.get(entry.id).notes] == ["theirs"]
    assert caplog.records == []


def test_anything_else_that_goes_wrong_is_no_warning(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError

    entry = recorded()
    stores(monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        catalog.tag(entry.id, "x")
    assert catalog.get(entry.id).tags == ("x",)


# --- what another catalog says


def said(catalog: Catalog, ref: str, **changed: Any) -> CatalogDoc:
    """The document as another catalog leaves it that has read ours."""
    doc = composed(catalog, ref)
    return doc.model_copy(update={"catalog": "another", "revision": doc.revision + 1, **changed})


def test_what_is_absorbed_is_there_once(
    catalog: Catalog, other: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    catalog.tag(entry.id, "good")
    catalog.hold(entry.id, "paper", until=timedelta(days=30))
    number = catalog.hold(entry.id, "to be released")
    catalog.note(entry.id, "note")
    catalog.metric(entry.id, {"a": 1, "nan": float("nan")})
    catalog.alias("best", entry.id)
    catalog.link(entry.id, "/p", "resume")
    doc = document(entry.url)
    catalog.release(entry.id, number)
    before, events = catalog.get(entry.id), catalog.events()
    for again in (doc, doc.model_copy(update={"catalog": "another", "revision": 99})):
        assert repr(catalog.import_document(entry.id, again, str(entry.url))) == repr(before)
    assert catalog.events() == events
    other.record(universal_manifest(entry.url), str(entry.url))
    for _ in range(2):
        found = other.import_document(entry.id, doc, str(entry.url))
    assert [h.reason for h in found.holds] == ["paper", "to be released"]
    assert (found.tags, found.aliases, found.urls) == (before.tags, before.aliases, before.urls)
    assert [n.text for n in found.notes] == ["note"]
    assert [e.action for e in other.events()] == ["import", "record"]
    assert [(m.version, m.target) for m in other.alias_history("best")] == [(1, entry.id)]


def test_a_document_of_another_checkpoint_is_not_taken(
    catalog: Catalog, recorded: Recorded
) -> None:
    one, two = recorded(1), recorded(2)
    catalog.tag(one.id, "good")
    assert catalog.import_document(two.id, said(catalog, one.id), str(two.url)).tags == ()


@pytest.mark.parametrize("in_order", [True, False])
def test_of_two_who_claim_an_alias_the_later_move_is_right(
    catalog: Catalog, other: Catalog, recorded: Recorded, in_order: bool
) -> None:
    one, two = recorded(1), recorded(2)
    catalog.alias("best", one.id)
    first = document(one.url)
    catalog.alias("best", two.id)
    second = document(two.url)
    for entry in (one, two):
        other.record(universal_manifest(entry.url), str(entry.url))
    for doc in (first, second) if in_order else (second, first):
        other.import_document(doc.id, doc, str((one if doc is first else two).url), trust=True)
    assert [(a.id, a.version) for a in other.aliases()] == [(two.id, 2)]
    (Path(str(one.url)) / CATALOG_DOCUMENT).write_text(first.model_dump_json())
    write_documents(other)
    register(
        [str(one.url)], other
    )  # whose document is an old one, or of a catalog that never heard of the move
    assert [(a.id, a.version) for a in other.aliases()] == [(two.id, 2)]
    other.unalias("best")
    register([str(one.url)], other)
    assert other.aliases() == []


def test_a_metric_that_was_measured_later_wins(
    catalog: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    catalog.metric(entry.id, {"a": 1.0, "b": 1.0})
    doc = said(catalog, entry.id)
    metric = doc.metrics["a"]
    later = {
        "a": metric.model_copy(update={"value": 2.0, "measured": clock.now + timedelta(seconds=1)}),
        "b": metric.model_copy(update={"value": 2.0, "measured": clock.now - timedelta(seconds=1)}),
        "c": metric.model_copy(update={"value": None}),
    }
    theirs = doc.model_copy(update={"metrics": later})
    found = catalog.import_document(
        entry.id, theirs, str(entry.url)
    )  # but not over what was said here
    assert repr(found.metrics) == repr({"a": 1.0, "b": 1.0, "c": float("nan")})
    found = catalog.import_document(entry.id, theirs, str(entry.url), trust=True)
    assert repr(found.metrics) == repr({"a": 2.0, "b": 1.0, "c": float("nan")})
    write_documents(catalog)
    assert document(entry.url).metrics["b"].value == 1.0


def test_what_others_deleted_is_deleted_and_what_they_restored_is_back(
    catalog: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    doc = said(catalog, entry.id, deleted=clock.now, purge_after=clock.now + timedelta(seconds=1))
    clock.wait(days=1)
    assert catalog.import_document(entry.id, doc, str(entry.url)).state == "deleted"
    assert (
        catalog.get(entry.id).purge_after == clock.now + GRACE
    )  # which nobody here has had before
    assert (
        composed(catalog, entry.id, str(entry.url)).purge_after == doc.purge_after
    )  # there, theirs is right
    back = said(catalog, entry.id, deleted=None, purge_after=None)
    assert catalog.import_document(entry.id, back, str(entry.url)).state == "committed"
    assert catalog.get(entry.id).purge_after is None
    stale_copy = doc.model_copy(update={"catalog": "a third"})
    assert catalog.import_document(entry.id, stale_copy, str(entry.url)).state == "committed"


@pytest.mark.parametrize("protect", ["tag", "alias", "hold"])
def test_what_is_protected_here_is_not_deleted_by_others(
    catalog: Catalog, recorded: Recorded, clock: Clock, protect: str
) -> None:
    entry = recorded()
    if protect == "tag":
        catalog.tag(entry.id, "good")
    elif protect == "alias":
        catalog.alias("best", entry.id)
    else:
        catalog.hold(entry.id, "paper")
    found = catalog.import_document(
        entry.id, said(catalog, entry.id, deleted=clock.now, purge_after=clock.now), str(entry.url)
    )
    assert found.state == "committed"
    assert due(catalog) == 1
    write_documents(catalog)
    assert document(entry.url).deleted is None


def test_what_was_restored_here_since_is_not_deleted_again(
    catalog: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    catalog.delete(entry.id)
    doc = said(catalog, entry.id)
    clock.wait(hours=1)
    catalog.restore(entry.id)
    assert (
        catalog.import_document(
            entry.id, doc.model_copy(update={"revision": 99}), str(entry.url)
        ).state
        == "committed"
    )


def test_the_run_that_others_gave_is_taken_unless_ours_is_not_written_yet(
    catalog: Catalog, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = recorded()
    assert (
        catalog.import_document(entry.id, said(catalog, entry.id, run="theirs"), str(entry.url)).run
        == "theirs"
    )
    stores(monkeypatch, ReadOnly)
    catalog.record(universal_manifest(entry.url), str(entry.url), run="ours")
    assert (
        catalog.import_document(entry.id, said(catalog, entry.id, run="theirs"), str(entry.url)).run
        == "ours"
    )


def test_an_absorbed_document_with_any_text(
    catalog: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    doc = CatalogDoc.model_validate_json(
        json.dumps(
            {
                "id": entry.id,
                "catalog": "c",
                "revision": 1 << 30,
                "run": "a\0b",
                "aliases": [
                    {"name": "latest", "version": 1 << 30, "moved": "2026-01-01T00:00:00Z"}
                ],
                "tags": [{"name": "\0", "created": "2026-01-01T00:00:00+05:00", "who": ""}] * 2,
                "holds": [{"reason": "", "created": "2026-01-01T00:00:00Z", "who": "x" * 5000}],
                "metrics": {"m\0": {"value": "Infinity", "measured": "2026-01-01T00:00:00Z"}},
                "notes": [{"text": "\0" * 3, "created": "2026-01-01T00:00:00Z", "who": "x"}] * 2,
                "lineage": [{"kind": "merge", "url": "\0", "id": "\0"}],
                "more": 1,
            }
        )
    )
    found = catalog.import_document(entry.id, doc, str(entry.url))
    assert (found.run, found.tags, found.metrics) == (
        "a\ufffdb",
        ("\ufffd",),
        {"m\ufffd": float("inf")},
    )
    assert len(found.notes) == 1
    assert repr(catalog.import_document(entry.id, doc, str(entry.url))) == repr(found)
    catalog.tag(entry.id, "more")
    assert document(entry.url) == composed(catalog, entry.id)
    catalog.alias("latest one", entry.id)
    assert document(entry.url) == composed(catalog, entry.id)


# --- tags that are taken off


def test_a_tag_that_was_taken_off_does_not_come_back(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded()
    place = str(entry.url)
    catalog.tag(entry.id, "slip", "good")
    register([place], other)
    shutil.copytree(place, tmp_path / "old" / "copy")  # with the document as it was
    clock.wait(seconds=1)
    catalog.untag(entry.id, "slip", reason="by mistake")
    assert [(u.name, u.reason) for u in document(place).untags] == [("slip", "by mistake")]
    for each in (catalog, other):
        register([place], each)
        register([str(tmp_path / "old" / "copy")], each)
        assert each.get(entry.id).tags == ("good",)
    clock.wait(seconds=1)
    other.tag(entry.id, "slip")  # on purpose this time
    register([place], catalog)
    assert catalog.get(entry.id).tags == ("good", "slip")
    assert document(place).untags == ()


def test_a_lost_catalog_knows_of_removals(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded()
    catalog.tag(entry.id, "slip", "good")
    shutil.copytree(str(entry.url), tmp_path / "a copy")
    clock.wait(seconds=1)
    catalog.untag(entry.id, "slip", reason="by mistake")
    for number, order in enumerate(
        ([entry.url, tmp_path / "a copy"], [tmp_path / "a copy", entry.url])
    ):
        with Catalog(str(tmp_path / f"new{number}.db")) as new:
            for place in order:
                register([str(place)], new, trust_documents=True)
            assert new.get(entry.id).tags == ("good",)


def test_a_permanent_tag_wins_over_a_removal(
    catalog: Catalog, other: Catalog, recorded: Recorded, clock: Clock
) -> None:
    entry = recorded()
    place = Path(str(entry.url)) / CATALOG_DOCUMENT
    catalog.tag(entry.id, "good")
    register([str(entry.url)], other)
    before = place.read_bytes()
    other.tag(entry.id, "good", permanent=True)
    place.write_bytes(before)  # as if the two did not see each other
    clock.wait(seconds=1)
    catalog.untag(entry.id, "good", reason="x")
    register([str(entry.url)], other)
    assert other.get(entry.id).tags == ("good",)
    register([str(entry.url)], catalog)
    assert catalog.get(entry.id).tags == ("good",)
    with pytest.raises(PermissionDenied, match="permanent"):
        catalog.untag(entry.id, "good", reason="x")


def test_whoever_holds_what_was_replaced_elsewhere_is_warned(
    catalog: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    old = recorded()
    with using(catalog="none"):
        universal(str(old.url), 2, overwrite=True)
    (Path(str(old.url)) / CATALOG_DOCUMENT).unlink(missing_ok=True)
    catalog.hold(old.id, "ours")
    assert "there is another checkpoint there" in caplog.text
    assert not (Path(str(old.url)) / CATALOG_DOCUMENT).exists()


@pytest.mark.parametrize("said_before", [False, True])
def test_whoever_holds_what_is_being_replaced_is_warned(
    catalog: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture, said_before: bool
) -> None:
    """The document may be written after who replaces the checkpoint has read it for the last time."""
    entry = recorded()
    store = open_store(str(entry.url))
    attempt = begin(store, {"what": "another"}, overwrite=True)
    if said_before:
        catalog.metric(entry.id, {"a": 1})
    mark_replacing(store, attempt.id)
    catalog.metric(entry.id, {"a": 2})  # which keeps nothing
    assert not caplog.records
    catalog.hold(entry.id, "ours")
    assert "is being replaced" in caplog.text
    abandon(store, attempt.id)
    caplog.clear()
    with catalog.database.reading() as c:
        assert stale(c, None, ())  # so that it is written once more
    catalog.metric(entry.id, {"a": 3})
    assert not caplog.records
    with pytest.raises(Conflict, match="held: ours"):
        begin(store, {"what": "another"}, overwrite=True)


def test_a_document_of_one_that_replaced_another(
    catalog: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own attempt stays marked."""
    new = universal(str(recorded().url), 2, overwrite=True)
    register([new.url], catalog)
    catalog.hold(new.id, "ours")
    assert not caplog.records
    assert document(new.url).holds
