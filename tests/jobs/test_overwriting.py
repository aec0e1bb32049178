"""What may not be deleted may not be overwritten either, by whatever command."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.conftest import universal
from tests.packed import write_packed
from ucformat.errors import Conflict, UcformatError
from ucformat.format.commit import begin, commit
from ucformat.format.structure import read_manifest
from ucformat.jobs.register import register
from ucformat.storage.local import LocalStore
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint


def _save(dst: str) -> object:
    torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    saving = importlib.import_module("ucformat.torch.saving.save")
    return saving.save({"w": torch.ones(2)}, dst, overwrite=True)


def _depend(catalog: Catalog, ck: str) -> None:
    url = str(catalog.get(ck).url)
    register([ucformat.convert(url, f"{url}-virtual", virtual=True).url], catalog)


WAYS: dict[str, Callable[[Checkpoint, str], object]] = {
    "convert": lambda src, dst: ucformat.convert(src, dst, overwrite=True),
    "register --virtual": lambda src, dst: ucformat.convert(src, dst, virtual=True, overwrite=True),
    "copy": lambda src, dst: ucformat.copy(src, dst, overwrite=True),
    "materialize": lambda src, dst: ucformat.materialize(src, dst, overwrite=True),
    "save": lambda _, dst: _save(dst),
}
PROTECTIONS: dict[str, Callable[[Catalog, str], object]] = {
    "tag good": lambda catalog, ck: catalog.tag(ck, "good"),
    "alias best": lambda catalog, ck: catalog.alias("best", ck),
    "held: paper": lambda catalog, ck: catalog.hold(ck, "paper"),
    "needed by": _depend,
}


@pytest.fixture
def used(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """The catalog that the settings name."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "ours.db"))
    return catalog


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    arrays = {("w", "weight"): random_array((4, 3), "float32", 7)}
    write_packed(LocalStore(tmp_path / "source"), arrays)
    return ucformat.open(str(tmp_path / "source"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("why", PROTECTIONS)
def test_what_is_protected_is_not_overwritten(
    used: Catalog, source: Checkpoint, tmp_path: Path, why: str, way: str
) -> None:
    dst = str(tmp_path / "run7" / "1")
    old = universal(dst, 1)
    WAYS[way](source, str(tmp_path / "elsewhere"))  # where nothing lies, nobody is asked
    PROTECTIONS[why](used, old.id)
    with pytest.raises(Conflict, match=why):
        WAYS[way](source, dst)
    ucformat.verify(dst).raise_if_damaged()
    assert read_manifest(open_store(dst))[0].id == old.id
    assert not [
        k.key for k in open_store(dst).list("attempts") if old.manifest.attempt not in k.key
    ]


@pytest.mark.parametrize("way", WAYS)
def test_what_nothing_protects_is_overwritten(
    used: Catalog, source: Checkpoint, tmp_path: Path, way: str
) -> None:
    dst = str(tmp_path / "run7" / "1")
    old = universal(dst, 1)
    used.note(old.id, "protects nothing")
    used.release(old.id, used.hold(old.id, "over"))
    used.tag(old.id, "good")
    used.untag(old.id, "good", reason="a slip")
    WAYS[way](source, dst)
    assert read_manifest(open_store(dst))[0].id != old.id


def test_without_a_catalog_the_record_beside_it_protects(
    catalog: Catalog, source: Checkpoint, tmp_path: Path
) -> None:
    old = universal(str(tmp_path / "1"), 1)
    catalog.record(old.manifest, old.url)
    catalog.tag(old.id, "good")
    with pytest.raises(Conflict, match="tag good"):
        ucformat.convert(source, old.url, overwrite=True)


def test_files_that_others_need_stay_at_a_place_that_the_catalog_does_not_know(
    source: Checkpoint, used: Catalog, tmp_path: Path
) -> None:
    virtual = ucformat.convert(source, tmp_path / "virtual", virtual=True)
    assert [e.url for e in used.find()] == [virtual.url]
    acts: tuple[Callable[[], object], ...] = (
        lambda: universal(source.url, 2, overwrite=True),
        lambda: ucformat.materialize(source),  # in place: it keeps its id, and its packed files go
    )
    for act in acts:
        with pytest.raises(Conflict, match=f"needed by {virtual.id}"):
            act()
    ucformat.verify(virtual).raise_if_damaged()


def test_in_place_a_checkpoint_keeps_its_names(used: Catalog, source: Checkpoint) -> None:
    register([source.url], used)
    used.tag(source.id, "good")
    assert ucformat.materialize(source).id == source.id


def test_one_that_gets_a_name_while_it_is_overwritten_stays(used: Catalog, tmp_path: Path) -> None:
    old = universal(str(tmp_path / "1"), 1)
    store = open_store(old.url)
    attempt = begin(store, {"any": "plan"}, overwrite=True)
    used.tag(old.id, "good")
    with pytest.raises(Conflict, match="tag good"):
        commit(store, attempt, old.manifest.model_copy(update={"id": "new", "attempt": attempt.id}))
    assert read_manifest(store)[0] == old.manifest


def test_a_catalog_that_cannot_be_asked_protects_all(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = universal(str(tmp_path / "1"), 1)
    (tmp_path / "broken.db").write_text("no database")
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "broken.db"))
    with pytest.raises(Conflict, match="the catalog is unavailable") as caught:
        ucformat.convert(source, old.url, overwrite=True)
    assert isinstance(caught.value, UcformatError)


def test_the_same_is_asked_of_deleting(used: Catalog, tmp_path: Path) -> None:
    """One answer to both questions, so that nothing can be removed in one way and not in the other."""
    for number, (why, protect) in enumerate(PROTECTIONS.items()):
        old = universal(str(tmp_path / "x" / str(number)), number)
        protect(used, old.id)
        with pytest.raises(UcformatError, match=why) as refused:
            used.delete(old.id)
        with pytest.raises(UcformatError, match=why) as kept:
            universal(old.url, 9, overwrite=True)
        reasons: list[Any] = [e.value.message.split(": ", 1)[1] for e in (refused, kept)]
        assert reasons[0] == reasons[1]
