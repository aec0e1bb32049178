"""What is opened by reference is what was meant, and a path that exists wins."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.conftest import foreign, universal
from tests.packed import write_packed
from ucformat.catalog.catalog import Catalog
from ucformat.errors import IntegrityError, NotACheckpoint, NotFound, UcformatError, UsageError
from ucformat.format.structure import manifest_bytes
from ucformat.jobs.register import register
from ucformat.schema.tensors import TensorTable
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Catalog() as opened:
        yield opened


@pytest.fixture
def ck(catalog: Catalog, tmp_path: Path) -> Checkpoint:
    made = universal(tmp_path / "run7" / "1", 1)
    catalog.record(made.manifest, made.url)
    return made


def test_all_that_the_catalog_knows(catalog: Catalog, ck: Checkpoint) -> None:
    catalog.alias("best", ck.id)
    for ref in (
        "run7@1",
        "run7@latest",
        "run7@best",
        "alias:best",
        ck.id,
        ck.id[:4],
        ck.url,
        Path(ck.url),
    ):
        assert ucformat.open(ref).id == ck.id
    assert ucformat.open(LocalStore(ck.url)).id == ck.id
    assert ucformat.open(f"file://{ck.url}").id == ck.id


def test_what_engines_wrote(catalog: Catalog, tmp_path: Path) -> None:
    foreign(tmp_path / "ds")
    [entry] = register([str(tmp_path / "ds")], catalog).entries
    assert ucformat.open("ds@5").home == entry.url
    assert ucformat.open(entry.id).kind == "deepspeed"


@pytest.mark.parametrize("name", ["run7@1", "alias:best", "beef", "run7@latest"])
def test_a_path_that_exists_wins(catalog: Catalog, ck: Checkpoint, name: str) -> None:
    catalog.alias("best", ck.id)
    here = universal(Path(name).absolute(), 2)
    assert ucformat.open(name).id == here.id != ck.id
    assert ucformat.open(Path(name)).id == here.id


def test_what_is_a_place_is_never_looked_up(
    catalog: Catalog, ck: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ucformat.settings.load_settings", lambda **_: pytest.fail("the catalog was asked")
    )
    for place in (
        "/nowhere/run7@1",
        "./run7@1",
        "../x",
        "memory://run7@1",
        "abc",
        "BEEF",
        "some.folder",
        "@",
        "run@",
    ):
        with pytest.raises(NotFound):
            ucformat.open(place)


def test_what_the_catalog_does_not_know(catalog: Catalog, ck: Checkpoint) -> None:
    for ref in (
        "run7@2",
        "run8@1",
        "alias:none",
        "feedbeef",
        "run7@best",
        "x" * 5000 + "@1",
        "a\0b@1",
    ):
        with pytest.raises(NotFound) as caught:
            ucformat.open(ref)
        assert caught.value.hint
    with pytest.raises(UsageError):
        ucformat.open("alias:")


def test_without_a_catalog(
    catalog: Catalog, ck: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", "none")
    with pytest.raises(NotFound, match="no catalog to look it up in"):
        ucformat.open("run7@1")
    assert ucformat.open(ck.url).id == ck.id


def test_what_is_deleted_or_gone(catalog: Catalog, ck: Checkpoint) -> None:
    catalog.delete("run7@1")
    with pytest.raises(NotFound, match="is deleted") as caught:
        ucformat.open("run7@1")
    assert "ucp restore run7@1" in str(caught.value.hint)
    catalog.restore("run7@1")
    catalog.forget(catalog.places(ck.url))
    with pytest.raises(NotFound, match="is purged"):
        ucformat.open(ck.id)


def test_another_place_is_tried_where_one_fails(
    catalog: Catalog, ck: Checkpoint, tmp_path: Path
) -> None:
    for copy in ("copy", "another copy"):
        shutil.copytree(ck.url, tmp_path / copy)
        register([str(tmp_path / copy)], catalog)
    shutil.rmtree(ck.url)
    (tmp_path / "copy" / "manifest.json").write_text("{")
    assert ucformat.open("run7@1").url == str(tmp_path / "another copy")
    shutil.rmtree(tmp_path / "another copy")
    with pytest.raises(NotFound, match="does not exist"):  # what the first place says
        ucformat.open("run7@1")
    (tmp_path / "run7" / "1").mkdir()
    (tmp_path / "run7" / "1" / "x").write_text("")
    with pytest.raises(NotACheckpoint):
        ucformat.open("run7@1")
    shutil.copytree(tmp_path / "copy", ck.url, dirs_exist_ok=True)
    with pytest.raises(IntegrityError):
        ucformat.open("run7@1")


@pytest.mark.parametrize("change", [{"step": 9}, {"tensors": "0" * 32}])
def test_a_manifest_that_was_changed_is_seen(
    catalog: Catalog, ck: Checkpoint, change: dict[str, Any]
) -> None:
    """Of the same id, under a digest that is right."""
    if "tensors" in change:  # the weights are those of another
        first, *rest = ck.manifest.tensors
        change = {"tensors": TensorTable.of([replace(first, fingerprint=change["tensors"]), *rest])}
    changed = ck.manifest.model_copy(update=change)
    Path(ck.url, "manifest.json").write_bytes(manifest_bytes(changed))
    for ref in ("run7@1", ck.id):
        with pytest.raises(IntegrityError, match="is not the one that the catalog recorded"):
            ucformat.open(ref)
    assert ucformat.open(ck.url).id == ck.id
    assert any(
        "is not the one that the catalog recorded" in p.reason
        for p in ucformat.verify(ck.url).problems
    )


def test_arrays_that_were_made_in_place_are_what_was_recorded(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {("w", "weight"): random_array((4, 2), "float32")}
    ck = write_packed(
        LocalStore(tmp_path / "packed"),
        arrays,
        lineage=(),
        aliases={},
        groups=(),
        run="run8",
        step=4,
    )
    register([ck.url], catalog)
    assert ucformat.open("run8@4").id == ck.id
    with monkeypatch.context() as somebody_without_a_catalog:
        somebody_without_a_catalog.setenv("UCP_CATALOG", "none")
        ucformat.materialize(ck.url)
    assert ucformat.open("run8@4").manifest.sidecar is None
    assert ucformat.verify("run8@4")


def test_what_lies_there_by_now_is_not_taken_for_it(
    catalog: Catalog, ck: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ck.url, tmp_path / "copy")
    with monkeypatch.context() as somebody_without_a_catalog:
        somebody_without_a_catalog.setenv("UCP_CATALOG", "none")
        new = universal(ck.url, 2, overwrite=True)
    with pytest.raises(
        NotFound, match=f"there is another checkpoint at .* by now, {new.id}"
    ) as caught:
        ucformat.open("run7@1")
    assert f"ucp register {ck.url}" in str(caught.value.hint)
    register([str(tmp_path / "copy")], catalog)
    assert ucformat.open("run7@1").id == ck.id


def test_convert_and_verify_take_references(
    catalog: Catalog, ck: Checkpoint, tmp_path: Path
) -> None:
    made = ucformat.convert("run7@1", tmp_path / "run8" / "1")
    assert np.array_equal(made["w"][...], ck["w"][...], equal_nan=True)
    assert ucformat.verify("run7@1").url == ck.url
    with pytest.raises(NotFound):
        ucformat.convert("run7@9", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_catalog_that_is_away_is_said(
    catalog: Catalog, ck: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCP_CATALOG", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(UcformatError, match="the catalog postgresql"):
        ucformat.open("run7@1")


def test_opening_writes_nothing(
    catalog: Catalog, ck: Checkpoint, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "not" / "there.db"))
    with pytest.raises(NotFound):
        ucformat.open("run7@1")
    assert not (tmp_path / "not").exists()
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    before = catalog.events()
    assert ucformat.open("run7@1").id == ck.id
    assert catalog.events() == before
