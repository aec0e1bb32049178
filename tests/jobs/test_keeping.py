"""What a catalog keeps is recorded beside the files, and protects them from everybody; its document is only told."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.conftest import universal
from tests.packed import write_packed
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, PermissionDenied
from ucformat.format.commit import begin
from ucformat.jobs import removal
from ucformat.jobs.dependents import dependents_at, ignore_dependents
from ucformat.jobs.documents import protections_of
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register, reindex
from ucformat.schema import CATALOG_DOCUMENT, NEEDED_BY, TOMBSTONE
from ucformat.schema.documents import TombstoneDoc
from ucformat.settings import using
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.entries import Entry

NOW = timedelta(0)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog(str(tmp_path / "theirs.db")) as opened:
        yield opened


@pytest.fixture
def entry(catalog: Catalog, tmp_path: Path) -> Entry:
    """A packed checkpoint in our catalog, whose files a virtual one may need."""
    arrays = {("w", "weight"): random_array((4, 3), "float32", 7)}
    write_packed(LocalStore(tmp_path / "tree" / "run7"), arrays)
    register([str(tmp_path / "tree" / "run7")], catalog)
    return catalog.find()[0]


def kept(entry: Entry) -> tuple[str, ...]:
    with using(catalog="none"):
        return protections_of(str(entry.url), entry.id)


def test_it_lasts_as_long_as_the_annotation(catalog: Catalog, entry: Entry) -> None:
    hold = catalog.hold(entry.id, "paper")
    assert kept(entry) == ("held: paper",)
    catalog.tag(entry.id, "good")
    assert kept(entry) == ("tag good", "held: paper")
    catalog.release(entry.id, hold)
    catalog.untag(entry.id, "good", reason="a slip")
    assert kept(entry) == ()
    catalog.note(entry.id, "keeps nothing")
    catalog.hold(entry.id, "soon over", until=timedelta(microseconds=1))
    assert kept(entry) == ()


def test_the_document_alone_protects_nothing(catalog: Catalog, entry: Entry) -> None:
    catalog.tag(entry.id, "good")
    store = open_store(str(entry.url))
    assert ignore_dependents(store.url, [catalog.database.identity], command="test")
    assert store.info(CATALOG_DOCUMENT).size
    assert kept(entry) == ()


def test_the_record_alone_protects(catalog: Catalog, other: Catalog, entry: Entry) -> None:
    """Another catalog deletes nothing, whether it has read the document or not, and neither does a save."""
    catalog.tag(entry.id, "good", permanent=True)
    Path(str(entry.url), CATALOG_DOCUMENT).unlink()
    register([str(entry.url)], other)
    with pytest.raises(PermissionDenied, match=f"needed by {catalog.database.identity}"):
        other.delete(entry.id)
    with using(catalog="none"), pytest.raises(Conflict, match="tag good"):
        begin(open_store(str(entry.url)), {"what": "another"}, overwrite=True)


def test_a_lost_catalog_is_followed_by_the_one_that_trusts_its_documents(
    catalog: Catalog, other: Catalog, entry: Entry
) -> None:
    catalog.tag(entry.id, "good")
    reindex(str(Path(str(entry.url)).parent), other)
    assert dependents_at(open_store(str(entry.url)), entry.id) == (other.database.identity,)
    assert kept(entry) == ("tag good",)
    other.untag(entry.id, "good", reason="the owner's word")
    assert kept(entry) == ()
    other.delete(entry.id, grace=NOW)
    assert collect(other, apply=True).purged == (entry.id,)


def test_a_catalog_that_does_not_trust_them_releases_nothing_for_others(
    catalog: Catalog, other: Catalog, entry: Entry
) -> None:
    catalog.hold(entry.id, "paper")
    other.record(universal(str(Path(str(entry.url)).parent / "x"), 3).manifest, "/data/x")
    reindex(str(Path(str(entry.url)).parent), other)
    other.release(entry.id)
    assert kept(entry) == ("held: paper",)
    with pytest.raises(PermissionDenied, match="needed by"):
        other.delete(entry.id)


def test_a_copy_is_kept_too(catalog: Catalog, entry: Entry, tmp_path: Path) -> None:
    catalog.tag(entry.id, "good")
    copied = ucformat.copy(str(entry.url), tmp_path / "copy")
    with using(catalog="none"):
        assert protections_of(copied.url, entry.id) == ("tag good",)


def test_what_replaced_it_is_not_kept(catalog: Catalog, entry: Entry) -> None:
    catalog.tag(entry.id, "good")
    assert dependents_at(open_store(str(entry.url)), "another") == ()


def test_whoever_comes_while_it_is_removed_is_warned_or_stops_it(
    catalog: Catalog, entry: Entry, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(entry.url))
    manifest = ucformat.open(store.url).manifest
    stone = TombstoneDoc(id=entry.id, attempt=manifest.attempt, created=manifest.created)
    store.put_if_absent(TOMBSTONE, stone.model_dump_json().encode())
    catalog.hold(entry.id, "paper")
    assert "is being removed" in caplog.text
    assert removal.remove(store, entry.id) == (catalog.database.identity,)
    ucformat.verify(store.url).raise_if_damaged()


def test_records_go_with_the_checkpoint(catalog: Catalog, entry: Entry) -> None:
    catalog.untag(entry.id, *_tagged(catalog, entry), reason="a slip")
    catalog.delete(entry.id, grace=NOW)
    assert list(open_store(str(entry.url)).list(NEEDED_BY))
    assert collect(catalog, apply=True).purged == (entry.id,)
    assert not [*open_store(str(entry.url)).list()]


def _tagged(catalog: Catalog, entry: Entry) -> tuple[str, ...]:
    catalog.tag(entry.id, "good")
    return ("good",)


def test_what_was_not_written_is_before_gc_looks(
    catalog: Catalog, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was killed after it took the tag off, and before it recorded that beside the files."""
    catalog.tag(entry.id, "good")
    with monkeypatch.context() as killed:
        killed.setattr("ucformat.catalog.catalog.on_change", [])
        catalog.untag(entry.id, "good", reason="a slip")
        catalog.delete(entry.id, grace=NOW)
    assert kept(entry) == ("tag good",)
    assert collect(catalog, apply=True).purged == (entry.id,)


def test_gc_removes_what_was_written_after_the_checkpoint_was_gone(
    catalog: Catalog, entry: Entry
) -> None:
    catalog.hold(entry.id, "paper")
    for info in [*open_store(str(entry.url)).list()]:
        if not info.key.startswith((CATALOG_DOCUMENT, NEEDED_BY)):
            open_store(str(entry.url)).delete(info.key)
    done = collect(catalog, [str(entry.url)], apply=True, grace=NOW)
    assert [left.attempt for left in done.leftovers] == [None]
    assert not [*open_store(str(entry.url)).list()]
