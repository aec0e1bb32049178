"""What virtual checkpoints need stays, whichever catalog knows them, or none."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.conftest import foreign, universal
from tests.packed import write_packed
from ucformat.catalog.catalog import Catalog
from ucformat.checkpoint import Checkpoint
from ucformat.errors import Conflict, PermissionDenied, UcformatError, Uncertain, UsageError
from ucformat.format import commit as committing
from ucformat.format.attempts import record_key
from ucformat.format.commit import abandon
from ucformat.format.structure import read_manifest
from ucformat.jobs import convert as converting
from ucformat.jobs import dependents, gc, removal
from ucformat.jobs.dependents import dependents_at, find_homes, ignore_dependents, need
from ucformat.jobs.documents import protections_of
from ucformat.jobs.gc import collect
from ucformat.schema import TOMBSTONE
from ucformat.schema.manifest import AttemptDoc
from ucformat.schema.policy import Policy
from ucformat.settings import using
from ucformat.storage.base import exists
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.s3 import Bucket
    from ucformat.storage.base import Store

NOW = timedelta(0)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Catalog]:
    """The catalog of another team."""
    with Catalog(str(tmp_path / "theirs.db")) as opened:
        yield opened


@pytest.fixture
def parent(tmp_path: Path) -> Checkpoint:
    """A packed checkpoint, which `materialize` makes arrays of."""
    arrays = {
        ("w", "weight"): random_array((5, 7), "float32", 1),
        ("b", "weight"): random_array((3,), "int64", 1),
    }
    return write_packed(open_store(tmp_path / "run" / "1"), arrays)


@pytest.fixture
def ck(parent: Checkpoint, tmp_path: Path) -> Checkpoint:
    """One that needs its files, and that no catalog knows."""
    return ucformat.convert(parent, tmp_path / "v", virtual=True)


def needing(place: str) -> tuple[str, ...]:
    return dependents_at(open_store(place), "")


def is_whole(ck: Checkpoint) -> bool:
    again = ucformat.open(ck.url)
    return all(again[key].read().nbytes for key in again.tensors)


# --- what needs them is honoured


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to put checkpoints: on a disk, in memory, in an object store."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
        return bucket.place(f"needed/{tmp_path.name}")
    return str(tmp_path / "tree") if request.param == "local" else f"memory://{tmp_path.name}/tree"


@pytest.mark.front("local", "memory")
def test_what_another_catalog_knows_is_honoured(
    root: str, catalog: Catalog, other: Catalog
) -> None:
    parent = universal(f"{root}/run/1", 1)
    ck = ucformat.convert(parent, f"{root}/v", virtual=True)
    catalog.record(parent.manifest, parent.url)
    other.record(ck.manifest, ck.url)
    why = f"needed by {ck.id}"
    with pytest.raises(PermissionDenied, match=why):
        catalog.delete(parent.id)
    everything = Policy.model_validate({"version": 1, "keep": {"every": 1000}})
    plan = catalog.retain(everything)
    assert [(k.row.id, k.reasons) for k in plan.keep] == [(parent.id, (why,))]
    assert catalog.retain(everything, apply=plan.id).delete == ()
    with pytest.raises(Conflict, match=why):
        universal(parent.url, 2, overwrite=True)
    other.delete(ck.id, grace=NOW)  # which can be restored until it is purged
    with pytest.raises(PermissionDenied, match=why):
        catalog.delete(parent.id)
    assert collect(other, apply=True).purged == (ck.id,)
    assert needing(parent.url) == ()
    catalog.delete(parent.id, grace=NOW)
    assert collect(catalog, apply=True).purged == (parent.id,)
    assert list(open_store(root).list()) == []


@pytest.mark.front("local", "memory")
def test_what_is_needed_after_it_was_deleted_is_not_purged(root: str, catalog: Catalog) -> None:
    parent = universal(f"{root}/run/1", 1)
    catalog.record(parent.manifest, parent.url)
    catalog.delete(parent.id, grace=NOW)
    ck = ucformat.convert(parent, f"{root}/v", virtual=True)
    for apply in (False, True):
        done = collect(catalog, apply=apply)
        assert [(w.row.id, w.reasons) for w in done.plan.wait] == [
            (parent.id, (f"needed by {ck.id}",))
        ]
        assert done.purged == done.failures == ()
    assert is_whole(ck)


def test_in_place_nothing_is_materialised_that_others_need(
    ck: Checkpoint, parent: Checkpoint
) -> None:
    with pytest.raises(Conflict, match=f"needed by {ck.id}"):
        ucformat.materialize(parent)
    assert is_whole(ck)


def test_without_a_catalog_a_run_keeps_what_is_needed(ck: Checkpoint, parent: Checkpoint) -> None:
    assert protections_of(parent.url, parent.id, known=False) == (f"needed by {ck.id}",)


def test_a_dependent_that_cannot_be_reached_protects(
    ck: Checkpoint, parent: Checkpoint, catalog: Catalog
) -> None:
    shutil.rmtree(ck.url)
    catalog.record(parent.manifest, parent.url)
    with pytest.raises(PermissionDenied, match=f"needed by {ck.id}"):
        catalog.delete(parent.id)


def test_what_is_no_document_of_ours_protects_nothing(parent: Checkpoint) -> None:
    store = open_store(parent.url)
    for name in ("README", "x.json", f"{'a' * 32}.txt", f"{'a' * 32}/x.json", f"{'A' * 32}.json"):
        store.put_if_absent(f"needed-by/{name}", b"{}")
    assert needing(parent.url) == ()
    store.put_if_absent(
        f"needed-by/{'a' * 32}.json", b""
    )  # for its name is an id, and who knows who wrote it
    assert needing(parent.url) == ("a" * 32,)


# --- where it is said


def test_of_a_virtual_one_of_a_virtual_one_beside_the_files(
    ck: Checkpoint, parent: Checkpoint, tmp_path: Path
) -> None:
    again = ucformat.convert(ck, tmp_path / "again", virtual=True)
    assert {*needing(parent.url)} == {ck.id, again.id}
    assert needing(ck.url) == ()


def test_beside_a_foreign_checkpoint_which_stays_what_it_is(
    tmp_path: Path, catalog: Catalog
) -> None:
    tag = foreign(tmp_path / "run")
    before = ucformat.open(tag)
    ck = ucformat.convert(before, tmp_path / "v", virtual=True)
    assert needing(str(before.home)) == (ck.id,)
    after = ucformat.open(tag)
    assert (after.id, after.kind, after.tensors) == (before.id, before.kind, before.tensors)
    assert [i.key for i in after.files()] == [i.key for i in before.files()]
    assert ucformat.verify(after)
    found = ucformat.register([str(tmp_path)], catalog, recursive=True)
    assert found.failures == ()
    assert {e.id for e in found.entries} == {before.id, ck.id}
    assert ucformat.verify(ck)


def test_beside_the_checkpoint_whose_arrays_were_opened_alone(
    tmp_path: Path, catalog: Catalog
) -> None:
    parent = universal(tmp_path / "run" / "1", 1)
    arrays = f"{parent.url}/data/{parent.manifest.attempt}"
    ck = ucformat.convert(arrays, tmp_path / "v", virtual=True)
    assert needing(parent.url) == needing(arrays) == (ck.id,)
    catalog.record(parent.manifest, parent.url)
    with pytest.raises(PermissionDenied, match=f"needed by {ck.id}"):
        catalog.delete(parent.id)
    ucformat.materialize(ck)
    assert needing(parent.url) == needing(arrays) == ()


@pytest.mark.parametrize("place", ["data/x/y", "s3://data/x/y", "/data/x/y", "memory://a/data/x/y"])
def test_folders_that_are_called_data_are_no_checkpoints(place: str, tmp_path: Path) -> None:
    class Named:
        url = place if "://" in place or place[0] == "/" else str(tmp_path / place)

    store: Any = Named()
    if not place.startswith("s3"):
        assert find_homes([(store, "data/z/w"), (store, "v")]) == ((store.url, frozenset()),)


def test_a_copy_of_what_is_needed_is_not(
    ck: Checkpoint, parent: Checkpoint, tmp_path: Path
) -> None:
    copied = ucformat.copy(parent, tmp_path / "copy")
    assert needing(parent.url) == (ck.id,)
    assert needing(copied.url) == ()


@pytest.mark.parametrize("link", [False, True])
def test_where_nothing_can_be_written_it_is_refused(
    parent: Checkpoint, tmp_path: Path, link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if link:
        (Path(parent.url) / "needed-by").symlink_to(tmp_path)
    else:
        (Path(parent.url) / "needed-by").write_text("in the way")
    with pytest.raises(PermissionDenied, match=r"run/1 cannot record that (.|\n)*--unprotected"):
        ucformat.convert(parent, tmp_path / "v", virtual=True)
    assert not exists(open_store(tmp_path / "v"), "manifest.json")
    assert list(open_store(tmp_path / "v").list("attempts")) == []
    assert not caplog.records  # nothing says that it is needed
    ck = ucformat.convert(parent, tmp_path / "v", virtual=True, unprotected=True)
    assert ucformat.verify(ck).unprotected == (parent.url,)


def test_what_is_protected_is_not_reported(
    ck: Checkpoint, parent: Checkpoint, tmp_path: Path
) -> None:
    assert ucformat.verify(ck).unprotected == ucformat.verify(parent).unprotected == ()
    shutil.copytree(ck.url, tmp_path / "moved")  # of which nothing is said
    assert ucformat.verify(tmp_path / "moved").unprotected == (parent.url,)


def test_only_virtual_ones_can_be_unprotected(parent: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only a virtual"):
        ucformat.convert(parent, tmp_path / "v", unprotected=True)


# --- when they are needed no more


def _purged(ck: Checkpoint, catalog: Catalog) -> object:
    catalog.record(ck.manifest, ck.url)
    catalog.delete(ck.id, grace=NOW)
    return collect(catalog, apply=True)


GOING: dict[str, Callable[[Checkpoint, Catalog], object]] = {
    "purged": _purged,
    "materialised": lambda ck, _: ucformat.materialize(ck),
    "replaced": lambda ck, _: universal(ck.url, 2, overwrite=True),
}


@pytest.mark.parametrize("way", GOING)
def test_when_the_dependent_goes_its_document_does(
    ck: Checkpoint, parent: Checkpoint, catalog: Catalog, way: str
) -> None:
    assert needing(parent.url) == (ck.id,)
    GOING[way](ck, catalog)
    assert needing(parent.url) == ()
    assert is_whole(parent)


def test_one_that_takes_the_place_of_another_needs_them_itself(
    ck: Checkpoint, parent: Checkpoint
) -> None:
    again = ucformat.convert(parent, ck.url, virtual=True, checksums=True, overwrite=True)
    assert again.id != ck.id
    assert needing(parent.url) == (again.id,)


def test_where_this_user_has_no_virtual_checkpoints_nothing_is_taken_back(
    ck: Checkpoint,
    parent: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "stranger"))
    universal(ck.url, 2, overwrite=True)
    assert needing(parent.url) == (ck.id,)
    assert "--ignore-dependent" in caplog.text


def test_a_record_elsewhere_takes_nothing_back(
    ck: Checkpoint, parent: Checkpoint, tmp_path: Path
) -> None:
    store = open_store(tmp_path / "stranger")
    record = open_store(ck.url).read(record_key(ck.manifest.attempt))
    assert AttemptDoc.model_validate_json(record).needs == (parent.url,)
    store.put_if_absent(record_key(ck.manifest.attempt), record)
    abandon(store, ck.manifest.attempt)
    assert needing(parent.url) == (ck.id,)


# --- interrupted


def test_killed_before_its_commit_it_protects_until_gc(
    parent: Checkpoint, tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(converting, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            ucformat.convert(parent, tmp_path / "v", virtual=True)
    [made] = needing(parent.url)
    with pytest.raises(Conflict, match=f"needed by {made}"):
        ucformat.materialize(parent)
    ck = ucformat.convert(parent, tmp_path / "v", virtual=True)
    assert (ck.id, needing(parent.url)) == (
        made,
        (made,),
    )  # the same, so that nothing is left of the first try
    with monkeypatch.context() as patch:
        patch.setattr(converting, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            ucformat.convert(parent, tmp_path / "another", virtual=True)
    assert len(needing(parent.url)) == 2
    assert len(collect(catalog, [str(tmp_path / "another")], apply=True, grace=NOW).leftovers) == 1
    assert needing(parent.url) == (made,)


@pytest.mark.parametrize("error", [UcformatError("no"), Conflict("no"), Uncertain("perhaps")])
def test_one_whose_commit_fails_needs_nothing(
    parent: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UcformatError
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(converting, "commit", fail)
    with pytest.raises(type(error)):
        ucformat.convert(parent, tmp_path / "v", virtual=True)
    perhaps = isinstance(error, Uncertain)  # it may stand there
    assert bool(needing(parent.url)) == perhaps
    assert bool(list(open_store(tmp_path / "v").list())) == perhaps


def test_what_another_continues_is_not_given_up(
    parent: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = committing.commit

    def overtaken(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(converting, "commit", real)
        ucformat.convert(parent, tmp_path / "v", virtual=True)
        raise UcformatError("too late")

    monkeypatch.setattr(converting, "commit", overtaken)
    with pytest.raises(UcformatError, match="too late"):
        ucformat.convert(parent, tmp_path / "v", virtual=True)
    ck = ucformat.open(tmp_path / "v")
    assert needing(parent.url) == (ck.id,)
    assert is_whole(ck)


# --- at the same time


@pytest.mark.parametrize("when", ["marked", "asked"])
def test_one_that_comes_while_a_purge_begins(
    parent: Checkpoint, tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before the purge asks, the dependent stops it; after, the dependent is refused."""
    catalog.record(parent.manifest, parent.url)
    catalog.delete(parent.id, grace=NOW)
    real = dependents_at
    came: list[UcformatError | Checkpoint] = []

    def come() -> None:
        monkeypatch.setattr(
            dependents, "_refuse_dying", real_refuse if when == "asked" else lambda *_: None
        )
        try:
            came.append(ucformat.convert(parent, tmp_path / "v", virtual=True))
        except UcformatError as error:
            came.append(error)

    def ask(store: Store, checkpoint: str) -> tuple[str, ...]:
        if when == "marked":
            come()
        found = real(store, checkpoint)
        if when == "asked":
            come()
        return found

    real_refuse = dependents._refuse_dying
    monkeypatch.setattr(removal, "dependents_at", ask)
    done = collect(catalog, apply=True)
    assert done.failures == ()
    if when == "marked":
        [ck] = came
        assert isinstance(ck, Checkpoint)
        assert is_whole(ck)
        assert done.purged == ()
        assert catalog.get(parent.id).state == "deleted"
        assert not exists(open_store(parent.url), TOMBSTONE)
        assert "purge-stopped" in [e.action for e in catalog.events(parent.id)]
    else:
        assert isinstance(came[0], Conflict)
        assert "is being removed" in str(came[0])
        assert done.purged == (parent.id,)
        assert list(open_store(tmp_path / "v").list()) == []


def test_of_two_who_purge_nobody_takes_back_what_the_other_settled(
    parent: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real, asked = open_store(parent.url), dependents_at, []

    def ask(place: Store, checkpoint: str) -> tuple[str, ...]:
        asked.append(1)
        if len(asked) > 1:
            return real(place, checkpoint)
        monkeypatch.setattr(
            removal, "_take_manifest", lambda *_: False
        )  # the other one has settled, and not yet begun
        assert removal.remove(open_store(parent.url), parent.id) == ()
        monkeypatch.undo()
        return ("a" * 32,)  # one that begins to need it now, and then sees the tombstone

    monkeypatch.setattr(removal, "dependents_at", ask)
    assert removal.remove(store, parent.id) == ()
    assert list(store.list()) == []


def test_one_that_comes_while_its_parent_is_being_replaced(
    parent: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = committing._refuse_removed
    came: list[UcformatError] = []

    def come(store: Store, attempt: str) -> None:
        monkeypatch.setattr(committing, "_refuse_removed", real)
        with pytest.raises(Conflict, match="is being replaced") as caught:
            ucformat.convert(ucformat.open(parent.url), tmp_path / "v", virtual=True)
        came.append(caught.value)
        real(store, attempt)

    monkeypatch.setattr(committing, "_refuse_removed", come)
    universal(parent.url, 2, overwrite=True)
    assert came
    assert list(open_store(tmp_path / "v").list()) == []


def test_what_was_replaced_since_it_was_opened_is_not_needed(
    parent: Checkpoint, tmp_path: Path
) -> None:
    opened = ucformat.open(parent.url)
    placed = find_homes([(opened.store, f"data/{opened.manifest.attempt}/rank0.bin")])
    assert placed == ((parent.url, frozenset([opened.manifest.attempt])),)
    ucformat.materialize(parent)
    with pytest.raises(Conflict, match="was replaced or deleted"):
        need(placed, "a" * 32, str(tmp_path / "v"))


def test_of_two_places_the_one_that_is_needed_stays(
    parent: Checkpoint, tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog.record(parent.manifest, parent.url)
    copied = ucformat.copy(parent, tmp_path / "copy")
    catalog.record(parent.manifest, copied.url)
    catalog.delete(parent.id, grace=NOW)
    need([(copied.url, frozenset())], "a" * 32, str(tmp_path / "v"))
    monkeypatch.setattr(dependents, "dependents_of", lambda _: {})  # it comes after this was asked
    assert collect(catalog, apply=True).purged == ()
    assert catalog.get(parent.id).urls == (copied.url,)
    assert not exists(open_store(parent.url), "manifest.json")
    assert read_manifest(open_store(copied.url))[0].id == parent.id
    monkeypatch.undo()
    ignore_dependents(copied.url, ["a" * 32], command="test")
    assert gc.purge(catalog, parent.id)


# --- the owner's word


def test_a_dependent_that_is_gone_is_ignored_by_the_owners_word(
    ck: Checkpoint, parent: Checkpoint, catalog: Catalog
) -> None:
    shutil.rmtree(ck.url)
    for one in (parent, ck):
        catalog.record(one.manifest, one.url)
    with using(catalog=catalog.url):
        assert ignore_dependents(parent.url, ["b" * 32], command="delete") == frozenset()
        with pytest.raises(PermissionDenied, match="needed by"):
            catalog.delete(parent.id)
        assert ignore_dependents(parent.url, [ck.id], command="delete") == {ck.id}
        assert ignore_dependents(parent.url, [ck.id], command="delete") == frozenset()
    catalog.delete(parent.id, grace=NOW)
    [event] = [e for e in catalog.events(parent.id) if e.action == "ignore-dependent"]
    assert event.detail == {
        "dependent": ck.id,
        "url": parent.url,
        "command": "delete",
        "at": ck.url,
    }
    assert collect(catalog, apply=True).purged == (parent.id,)
    assert list(open_store(parent.url).list()) == []


def test_without_a_catalog_it_is_ignored_too(ck: Checkpoint, parent: Checkpoint) -> None:
    with using(catalog="none"):
        assert ignore_dependents(parent.url, [ck.id], command="copy") == {ck.id}
    universal(parent.url, 2, overwrite=True)


def test_what_it_says(ck: Checkpoint, parent: Checkpoint) -> None:
    said = json.loads(open_store(parent.url).read(f"needed-by/{ck.id}.json"))
    assert {k: said[k] for k in ("format", "version", "id", "url")} == {
        "format": "ucformat-needed-by",
        "version": 1,
        "id": ck.id,
        "url": ck.url,
    }
    assert said["who"]
    assert said["created"]
