"""A disk that is not mounted, or a place that cannot be listed to its end, is no place whose checkpoints are gone."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import ucformat
from tests.jobs.conftest import foreign, universal
from ucformat.catalog.retention import load_policy
from ucformat.errors import NotFound, PermissionDenied, UcformatError
from ucformat.jobs.gc import collect
from ucformat.jobs.register import register, reindex
from ucformat.storage.fsspec_store import FsspecStore
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Info

NOW = timedelta(0)


@pytest.fixture
def disks(catalog: Catalog, tmp_path: Path) -> tuple[Path, Path]:
    """Two disks: a base and another checkpoint on one, what lies in the base's files on the other."""
    base, virtual = tmp_path / "base", tmp_path / "virtual"
    for step in (1, 2):
        universal(base / "run7" / str(step), step)
    ucformat.convert(foreign(base / "ds"), base / "run7" / "3")
    ucformat.convert(foreign(base / "raw", content=7), virtual / "v" / "5", virtual=True)
    register([str(base), str(virtual)], catalog, recursive=True)
    return base, virtual


def unmount(place: Path, how: str) -> Path:
    """What is left of a mounted disk: nothing, an empty folder, or one with a file that says so."""
    away = place.with_name(f"{place.name} unplugged")
    place.rename(away)
    if how != "absent":
        place.mkdir()
    if how == "not empty":
        (place / "NOT MOUNTED").write_text("plug it in")
    return away


def mount(away: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    away.rename(place)


def facts(catalog: Catalog) -> list[tuple[str, str, tuple[str, ...]]]:
    return sorted((e.id, e.state, e.urls) for e in catalog.find(deleted=True))


HOW = ["absent", "empty", "not empty"]


@pytest.mark.parametrize("how", HOW)
def test_nothing_is_forgotten_unasked(catalog: Catalog, disks: tuple[Path, Path], how: str) -> None:
    base, virtual = disks
    before, events = facts(catalog), catalog.events()
    needs = [e.id for e in catalog.find("kind = 'deepspeed'") if str(base / "raw") in str(e.url)]
    away = unmount(virtual, how)
    if how == "not empty":
        found = reindex(str(virtual), catalog)
        assert (found.entries, found.missing, found.forgotten) == (
            (),
            (str(virtual / "v" / "5"),),
            (),
        )
    else:
        with pytest.raises(
            NotFound, match="the catalog knows 1 checkpoint there: is its disk not mounted"
        ):
            reindex(str(virtual), catalog)
    with pytest.raises(NotFound, match="no checkpoint below"):
        register([str(base), str(virtual)], catalog, recursive=True)
    assert (facts(catalog), catalog.events()) == (before, events)
    [reason] = [r for w in _protected(catalog) for r in w[1] if w[0] in needs]
    assert reason.startswith("needed by")
    mount(away, virtual)
    assert reindex(str(virtual), catalog).missing == ()


def _protected(catalog: Catalog) -> list[tuple[str, tuple[str, ...]]]:
    from ucformat.catalog.retention import protections, retention_rows
    from ucformat.catalog.stamp import now

    with catalog.database.reading() as c:
        return [(r.id, protections(r, now())) for r in retention_rows(c, now())]


@pytest.mark.parametrize("how", HOW)
def test_asked_for_it_is_forgotten(catalog: Catalog, disks: tuple[Path, Path], how: str) -> None:
    _, virtual = disks
    unmount(virtual, how)
    found = reindex(str(virtual), catalog, forget=True)
    assert found.missing == found.forgotten == (str(virtual / "v" / "5"),)
    assert all(not reasons for _, reasons in _protected(catalog))


def test_a_place_of_which_nothing_is_known(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist: is its disk"):
        reindex(str(tmp_path / "typo"), catalog)
    (tmp_path / "new").mkdir()
    assert reindex(str(tmp_path / "new"), catalog).entries == ()
    assert collect(catalog, [str(tmp_path / "new")]).failures == ()
    assert "does not exist" in collect(catalog, [str(tmp_path / "typo")]).failures[0]


@pytest.mark.parametrize("how", ["absent", "empty"])
def test_gc_takes_nothing_for_purged_that_it_cannot_see(
    catalog: Catalog, disks: tuple[Path, Path], tmp_path: Path, how: str
) -> None:
    base, _ = disks
    shutil.copytree(base / "run7" / "1", tmp_path / "copy" / "1")
    register([str(tmp_path / "copy" / "1")], catalog)
    policy = load_policy({"version": 1, "keep": {"where": "step >= 3"}})
    catalog.retain(policy, apply=catalog.retain(policy).id)
    gone = {e.id for e in catalog.find("state = 'deleted'")}
    assert len(gone) == 2
    _expire(catalog)
    away = unmount(base, how)
    done = collect(catalog, [str(base)], apply=True, grace=NOW)
    assert done.purged == ()
    assert sum("is its disk not mounted?" in f for f in done.failures) == 3  # and the place itself
    assert {e.id for e in catalog.find("state = 'deleted'")} == gone
    assert (
        tmp_path / "copy" / "1" / "manifest.json"
    ).exists()  # what lies beside the other copy was not read
    mount(away, base)
    assert set(collect(catalog, apply=True, grace=NOW).purged) == gone


def _expire(catalog: Catalog) -> None:
    import sqlalchemy as sa

    from ucformat.catalog.models import CheckpointRow

    with catalog.database.writing() as c:
        c.execute(
            sa.update(CheckpointRow)
            .where(CheckpointRow.state == "deleted")
            .values(purge_after=CheckpointRow.created)
        )


def test_a_purge_that_was_begun_waits_for_its_disk(
    catalog: Catalog, disks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _ = disks
    catalog.delete("run7@1")
    _expire(catalog)
    with monkeypatch.context() as patch:
        patch.setattr("ucformat.jobs.gc.remove", _fail)
        assert collect(catalog, apply=True, grace=NOW).failures
    away = unmount(base, "absent")
    done = collect(catalog, apply=True, grace=NOW)
    assert (done.purged, len(done.failures)) == ((), 1)
    mount(away, base)
    assert len(collect(catalog, apply=True, grace=NOW).purged) == 1
    assert not (base / "run7" / "1").exists()


def _fail(*_: Any) -> None:
    raise UcformatError("the connection was lost")


class Partly(WrappedStore):
    """Lists a few files, then loses the connection."""

    def list(self, prefix: str = "") -> Iterator[Info]:
        for number, info in enumerate(self.inner.list(prefix)):
            if number == 3:
                raise UcformatError("the connection was lost")
            yield info


@pytest.mark.parametrize("forget", [False, True])
def test_a_place_that_lists_only_partly_is_an_error(
    catalog: Catalog, disks: tuple[Path, Path], forget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _ = disks
    before = facts(catalog)
    shutil.rmtree(base / "run7" / "1")
    monkeypatch.setattr(
        "ucformat.jobs.register.open_store", lambda place: Partly(LocalStore(place))
    )
    with pytest.raises(UcformatError, match="connection was lost"):
        reindex(str(base), catalog, forget=forget)
    with pytest.raises(UcformatError, match="connection was lost"):
        register([str(base)], catalog, recursive=True)
    assert facts(catalog) == before


@pytest.mark.parametrize("forget", [False, True])
def test_a_folder_that_may_not_be_looked_into_is_an_error(
    catalog: Catalog, disks: tuple[Path, Path], forget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without the right to search: its names are listed, and nothing is told of any."""
    base, _ = disks
    before = facts(catalog)
    real = os.scandir

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self._entry = entry.name, entry

        def is_dir(self, *, follow_symlinks: bool = True) -> bool:
            return self._entry.is_dir(follow_symlinks=follow_symlinks)

        def is_symlink(self) -> bool:
            return self._entry.is_symlink()

        def stat(self) -> os.stat_result:
            if "/run7/1" in self._entry.path:
                raise PermissionError(13, "Permission denied")
            return self._entry.stat()

    class Scan:
        def __init__(self, path: Any) -> None:
            self._scan = real(path)

        def __enter__(self) -> Iterator[Entry]:
            return (Entry(e) for e in self._scan)

        def __exit__(self, *_: object) -> None:
            self._scan.close()

    monkeypatch.setattr("ucformat.storage.local_files.os.scandir", Scan)
    with pytest.raises(PermissionDenied, match="Permission denied"):
        reindex(str(base), catalog, forget=forget)
    monkeypatch.undo()
    assert facts(catalog) == before


@pytest.mark.parametrize("forget", [False, True])
def test_what_a_search_does_not_come_across_is_asked_for(
    catalog: Catalog, tmp_path: Path, forget: bool
) -> None:
    one = universal(tmp_path / "elsewhere" / "1", 1).id
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "elsewhere")
    register([str(tmp_path / "data" / "link" / "1")], catalog)
    universal(tmp_path / "data" / "run7" / "2", 2)
    universal(tmp_path / "data" / "run7" / "2" / "inside" / "3", 3)
    register([str(tmp_path / "data" / "run7" / "2" / "inside" / "3")], catalog)
    found = reindex(str(tmp_path / "data"), catalog, forget=forget)
    assert (sorted(e.step or 0 for e in found.entries), found.missing) == ([1, 2, 3], ())
    (tmp_path / "elsewhere").rename(tmp_path / "unplugged")
    found = reindex(str(tmp_path / "data"), catalog, forget=forget)
    assert found.missing == (str(tmp_path / "data" / "link" / "1"),)
    assert catalog.get(one).state == ("purged" if forget else "committed")


def test_one_recorded_meanwhile_is_not_forgotten(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    universal(tmp_path / "run7" / "1", 1)
    register([str(tmp_path / "run7" / "1")], catalog)
    shutil.rmtree(tmp_path / "run7" / "1")
    real = catalog.forget

    def late(places: Any) -> list[str]:
        universal(tmp_path / "run7" / "1", 1)
        universal(tmp_path / "run7" / "2", 2)
        register([str(tmp_path / "run7" / n) for n in "12"], catalog)
        return real(places)

    monkeypatch.setattr(catalog, "forget", late)
    assert reindex(str(tmp_path), catalog, forget=True).forgotten == ()
    assert catalog.count() == 2


class Broken(LocalFileSystem):
    """Cannot list one of its folders."""

    protocol = "broken"
    cachable = False

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        if path.endswith("/2"):
            raise PermissionError(13, "Permission denied", path)
        return super().ls(path, detail=detail, **options)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_folder_that_a_remote_file_system_fails_to_list_is_an_error(
    tmp_path: Path, wrapped: bool
) -> None:
    for name in ("1/a", "2/b", "3/c/d"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    place = DirFileSystem(str(tmp_path), Broken()) if wrapped else Broken()
    root = "" if wrapped else str(tmp_path)
    whole = FsspecStore(str(tmp_path), fsspec.filesystem("file"))
    assert [i.key for i in whole.list()] == ["1/a", "2/b", "3/c/d"]
    with pytest.raises(PermissionDenied, match="Permission denied"):
        list(FsspecStore(root or "/", place).list())
