"""What others write beside a checkpoint takes none from its owner, and moves none of the owner's names."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import manifest_file
from tests.jobs.conftest import document, universal
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.document import MAX_REVISION, compose
from ucformat.catalog.refs import parse_ref, resolve
from ucformat.catalog.stamp import GRACE
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import Conflict, PermissionDenied
from ucformat.jobs.documents import write_documents
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register, reindex
from ucformat.schema import CATALOG_DOCUMENT

if TYPE_CHECKING:
    from tests.catalog.conftest import Clock
    from tests.jobs.conftest import Recorded
    from ucformat.catalog.entries import Entry

LONG_AGO = "2020-01-01T00:00:00Z"
BEYOND_ALL_TIMES = "9998-01-01T00:00:00Z"


def mine(entry: Entry) -> Path:
    return Path(str(entry.url))


def say(place: Path, checkpoint: str, **what: Any) -> None:
    """Write a document as a stranger does: of another catalog, and ahead of all others."""
    doc = {"id": checkpoint, "catalog": "a stranger's", "revision": 1000, **what}
    (place / CATALOG_DOCUMENT).write_text(json.dumps(doc))


def twin(entry: Entry, place: Path, **what: Any) -> Path:
    """A copy of a checkpoint beside which somebody says something."""
    shutil.copytree(mine(entry), place)
    say(place, entry.id, **what)
    return place


DELETED = {"deleted": LONG_AGO, "purge_after": LONG_AGO}


# --- a document speaks for its own place


@pytest.mark.parametrize("folder", ["a", "z"])  # found before the checkpoint, and after it
def test_a_document_elsewhere_deletes_nothing(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock, folder: str
) -> None:
    entry = recorded(1, tmp_path / "tree" / "mine")
    twin(entry, tmp_path / "tree" / folder, **DELETED)
    register([str(tmp_path / "tree")], catalog, recursive=True)
    clock.wait(days=30)
    done = collect(catalog, apply=True, grace=timedelta(0))
    assert (done.plan.purge, done.plan.wait, done.purged) == ((), (), ())
    assert catalog.get(entry.id).state == "committed"
    ucformat.verify(str(entry.url)).raise_if_damaged()


def test_one_that_was_found_first_speaks_for_none_that_is_found_later(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded(1, tmp_path / "mine")
    twin(entry, tmp_path / "theirs", **DELETED)
    register([str(tmp_path / "theirs")], other)
    assert other.get(entry.id).state == "deleted"
    register([str(tmp_path / "mine")], other)
    assert other.get(entry.id).state == "committed"
    clock.wait(days=30)
    assert collect(other, apply=True).purged == ()
    assert mine(entry).exists()


def test_a_copy_that_another_catalog_deletes_leaves_the_original(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded(1, tmp_path / "tree" / "mine")
    catalog.note(entry.id, "x")
    shutil.copytree(mine(entry), tmp_path / "tree" / "copy")
    register([str(tmp_path / "tree" / "copy")], other)
    other.delete(entry.id)
    register([str(tmp_path / "tree")], catalog, recursive=True)
    assert catalog.get(entry.id).state == "committed"
    catalog.note(entry.id, "a change here does not take the deletion back there")
    clock.wait(days=8)
    assert collect(catalog, apply=True).purged == ()
    assert collect(other, apply=True).purged == (entry.id,)
    assert not (tmp_path / "tree" / "copy").exists()
    ucformat.verify(str(entry.url)).raise_if_damaged()


def test_what_is_deleted_everywhere_gets_a_new_grace(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded()
    twin(entry, tmp_path / "copy", **DELETED)
    say(mine(entry), entry.id, **DELETED)
    register([str(tmp_path / "copy")], catalog)
    register([str(entry.url)], catalog)
    found = catalog.get(entry.id)
    assert (found.state, found.purge_after) == ("deleted", clock.now + GRACE)
    clock.wait(days=6)
    assert collect(catalog, apply=True, grace=timedelta(0)).purged == ()
    catalog.restore(entry.id)
    for place in (
        entry.url,
        tmp_path / "copy",
    ):  # what is restored here is not deleted again by the same documents
        register([str(place)], catalog)
    assert catalog.get(entry.id).state == "committed"


def test_documents_that_are_trusted_keep_the_grace_they_tell(
    catalog: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded(1, tmp_path / "tree" / "mine")
    say(mine(entry), entry.id, **DELETED)
    with Catalog(str(tmp_path / "new.db")) as new:
        reindex(str(tmp_path / "tree"), new)
        assert new.get(entry.id).purge_after == datetime.fromisoformat(LONG_AGO)
    register([str(entry.url)], catalog, trust_documents=True)
    assert catalog.get(entry.id).purge_after == datetime.fromisoformat(LONG_AGO)


def test_even_a_trusted_document_speaks_for_its_own_place(
    recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded(1, tmp_path / "tree" / "mine")
    twin(entry, tmp_path / "tree" / "a", **DELETED)
    with Catalog(str(tmp_path / "new.db")) as new:
        reindex(str(tmp_path / "tree"), new)
        assert new.get(entry.id).state == "committed"


# --- who bears an id


@pytest.mark.parametrize("change", ["step", "tensors", "attempt"])
def test_another_checkpoint_under_a_known_id_is_a_conflict(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, change: str
) -> None:
    entry = recorded(1, tmp_path / "tree" / "mine")
    place = tmp_path / "tree" / "a"
    stranger = universal(place, 2)
    manifest = json.loads((place / "manifest.json").read_text())
    known = json.loads((mine(entry) / "manifest.json").read_text())
    if change != "step":
        manifest = {**known, change: manifest[change]}
    (place / "manifest.json").write_bytes(manifest_file(manifest | {"id": entry.id}))
    say(place, entry.id, **DELETED, aliases=[{"name": "best", "version": 9, "moved": LONG_AGO}])
    before = catalog.get(entry.id)
    found = register([str(tmp_path / "tree")], catalog, recursive=True)
    assert [f.url for f in found.failures] == [stranger.url]
    assert entry.id in found.failures[0].message
    assert catalog.get(entry.id) == before
    with pytest.raises(Conflict, match=r"another (checkpoint|form)"):
        register([stranger.url], catalog)
    assert [f.url for f in reindex(str(tmp_path / "tree"), catalog).failures] == [stranger.url]


def test_arrays_that_were_made_in_place_are_the_same_checkpoint(
    catalog: Catalog, tmp_path: Path, recorded: Recorded
) -> None:
    source = universal(tmp_path / "source", 1)
    packed = ucformat.convert(source, tmp_path / "mine", virtual=True)
    catalog.record(packed.manifest, packed.url)
    shutil.copytree(packed.url, tmp_path / "packed copy")
    arrays = ucformat.materialize(packed)
    assert arrays.id == packed.id
    register([arrays.url], catalog)
    shutil.copytree(arrays.url, tmp_path / "array copy")
    for copy in ("packed copy", "array copy"):  # each in a form that the checkpoint has had
        register([str(tmp_path / copy)], catalog)
    assert len(catalog.get(packed.id).urls) == 3


@pytest.mark.parametrize("first", ["packed copy", "mine"])
def test_a_copy_in_a_form_that_this_catalog_never_saw(
    catalog: Catalog, other: Catalog, tmp_path: Path, first: str
) -> None:
    """It may hold anything: so it is a conflict, which says that it is not another checkpoint, and what to do."""
    packed = ucformat.convert(universal(tmp_path / "source", 1), tmp_path / "mine", virtual=True)
    shutil.copytree(packed.url, tmp_path / "packed copy")
    ucformat.materialize(packed)
    then = "mine" if first == "packed copy" else "packed copy"
    register([str(tmp_path / first)], other)
    with pytest.raises(Conflict, match="in another form than") as error:
        register([str(tmp_path / then)], other)
    assert "ucp copy" in str(error.value.hint)
    assert other.get(packed.id).urls == (str(tmp_path / first),)


# --- names


def alias(version: int, name: str = "best") -> dict[str, Any]:
    return {"name": name, "version": version, "moved": BEYOND_ALL_TIMES}


@pytest.mark.parametrize("version", [1, 5, MAX_REVISION, 2**31 - 2])
def test_a_name_that_exists_is_not_moved_by_a_document(
    catalog: Catalog, recorded: Recorded, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = recorded(1), recorded(2)
    catalog.alias("best", one.id)
    say(mine(two), two.id, aliases=[alias(version)])
    found = register([str(two.url)], catalog)
    assert [(a.name, a.id) for a in catalog.aliases()] == [("best", one.id)]
    assert found.entries[0].aliases == ()
    assert "the alias 'best' was not moved to" in caplog.text
    for entry in (two, one, two):  # and the name can be moved, whatever numbers documents say
        catalog.alias("best", entry.id)


def test_a_name_that_documents_give_is_not_moved_by_other_documents(
    catalog: Catalog, recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = recorded(1), recorded(2)
    for entry, version in ((one, 1), (two, 2)):
        say(mine(entry), entry.id, aliases=[alias(version)])
        register([str(entry.url)], catalog)
    assert [(a.name, a.id) for a in catalog.aliases()] == [("best", one.id)]
    assert catalog.get(one.id).from_documents == ("alias best",)
    catalog.alias("best", one.id)  # said here, now
    assert catalog.get(one.id).from_documents == ()
    register([str(two.url)], catalog, trust_documents=True)
    assert [(a.name, a.id) for a in catalog.aliases()] == [("best", two.id)]
    assert catalog.get(two.id).from_documents == ()


def test_a_name_that_points_elsewhere_here_protects_all_the_same(
    catalog: Catalog, recorded: Recorded, clock: Clock
) -> None:
    """Of the other catalog, which says so beside the checkpoint, and goes on saying it after we wrote there."""
    one, two = recorded(1), recorded(2)
    catalog.alias("best", one.id)
    catalog.delete(two.id)
    clock.wait(days=8)
    say(mine(two), two.id, aliases=[alias(1)], deleted=LONG_AGO)
    assert collect(catalog, apply=True).purged == ()
    [waiting] = collect(catalog).plan.wait
    assert waiting.reasons == ("alias best in another catalog",)
    catalog.restore(two.id)
    assert [a.name for a in document(two.url).aliases] == ["best"]
    with pytest.raises(PermissionDenied, match="alias best in another catalog"):
        catalog.delete(two.id)
    say(mine(two), two.id, revision=2000)
    register([str(two.url)], catalog)
    catalog.delete(two.id)


# --- what was said here


def test_a_document_takes_back_nothing_that_was_said_here(
    catalog: Catalog, recorded: Recorded, tmp_path: Path, clock: Clock
) -> None:
    entry = recorded()
    catalog.tag(entry.id, "released")
    catalog.metric(entry.id, {"loss": 1.0})
    untag = {"name": "released", "removed": BEYOND_ALL_TIMES, "who": "x", "reason": "x"}
    worse = {"loss": {"value": 99.0, "measured": BEYOND_ALL_TIMES}}
    say(mine(entry), entry.id, untags=[untag], metrics=worse)
    twin(entry, tmp_path / "copy", untags=[untag], metrics=worse)
    for place in (entry.url, tmp_path / "copy"):
        register([str(place)], catalog)
    found = catalog.get(entry.id)
    assert (found.tags, found.metrics, found.from_documents) == (("released",), {"loss": 1.0}, ())
    say(tmp_path / "copy", entry.id, untags=[untag], metrics=worse)
    register([str(tmp_path / "copy")], catalog, trust_documents=True)
    found = catalog.get(entry.id)
    assert (found.tags, found.metrics) == ((), {"loss": 99.0})


@pytest.mark.parametrize("known", [True, False])
def test_a_tag_beside_one_place_is_not_taken_off_beside_another(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path, known: bool
) -> None:
    """Neither one that is known before, nor one that is heard of later."""
    entry = recorded()
    catalog.tag(entry.id, "released")
    released = {"name": "released", "created": LONG_AGO, "who": "x"}
    untag = {"name": "released", "removed": BEYOND_ALL_TIMES, "who": "x", "reason": "x"}
    place = twin(entry, tmp_path / "copy", tags=[released])
    if known:
        register([str(entry.url)], other)
    register([str(place)], other)
    say(place, entry.id, untags=[untag], revision=2000)
    register([str(place)], other)
    register([str(entry.url)], other)
    assert other.get(entry.id).tags == ("released",)
    write_documents(other)
    assert document(entry.url).untags == ()


def test_what_documents_said_is_marked(
    catalog: Catalog, other: Catalog, recorded: Recorded
) -> None:
    entry = recorded()
    catalog.tag(entry.id, "good")
    catalog.alias("best", entry.id)
    number = catalog.hold(entry.id, "paper")
    catalog.note(entry.id, "n")
    catalog.metric(entry.id, {"loss": 1})
    assert (catalog.get(entry.id).from_documents, number) == ((), 1)
    register([str(entry.url)], other)
    other.hold(entry.id, "ours")
    marked = ("alias best", "hold 1", "metric loss", "note n", "tag good")
    assert other.get(entry.id).from_documents == marked
    other.tag(entry.id, "good")
    other.metric(entry.id, {"loss": 1})
    assert other.get(entry.id).from_documents == ("alias best", "hold 1", "note n")
    assert "hold 1" not in catalog.get(entry.id).from_documents


@pytest.mark.parametrize("revision", [MAX_REVISION, 2**31 - 2])
def test_a_revision_beyond_any_count_leaves_room(
    catalog: Catalog, recorded: Recorded, revision: int
) -> None:
    entry = recorded()
    say(mine(entry), entry.id, revision=revision)
    register([str(entry.url)], catalog)
    for tag in "ab":
        catalog.tag(entry.id, tag)
    assert {t.name for t in document(entry.url).tags} == {"a", "b"}
    with catalog.database.reading() as c:
        serial = resolve(c, parse_ref(entry.id))
        assert compose(c, serial, str(entry.url)) == document(entry.url)
    assert open_checkpoint(str(entry.url)).id == entry.id


# --- what nobody meant when it was deleted


def test_a_place_that_comes_to_light_after_a_deletion_is_spared(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    """Who deletes a copy and then hears of the original does not delete that."""
    entry = recorded(1, tmp_path / "mine")
    catalog.note(entry.id, "x")
    copy = str(tmp_path / "copy")
    shutil.copytree(mine(entry), copy)
    register([copy], other)
    other.delete(entry.id, grace=timedelta(0))
    register([str(entry.url)], other)
    assert other.get(entry.id).state == "deleted"
    assert document(entry.url).deleted is None
    assert collect(other, apply=True).purged == (entry.id,)
    assert not Path(copy).exists()
    found = other.get(entry.id)
    assert (found.state, found.urls, found.deleted) == ("committed", (entry.url,), None)
    assert [e.id for e, _ in other.holding(other.tensors(entry.id)[0].digest or "")] == [entry.id]
    ucformat.verify(str(entry.url)).raise_if_damaged()
    other.delete(entry.id, grace=timedelta(0))  # now it is meant
    assert collect(other, apply=True).purged == (entry.id,)
    assert not mine(entry).exists()


def test_what_is_restored_is_so_in_all_places(
    catalog: Catalog, other: Catalog, recorded: Recorded, tmp_path: Path
) -> None:
    entry = recorded(1, tmp_path / "mine")
    copy = str(tmp_path / "copy")
    shutil.copytree(mine(entry), copy)
    register([copy], other)
    other.delete(entry.id)
    register([str(entry.url)], other)
    other.restore(entry.id)
    other.delete(entry.id, grace=timedelta(0))
    assert collect(other, apply=True).purged == (entry.id,)
    assert [Path(copy).exists(), mine(entry).exists()] == [False, False]
