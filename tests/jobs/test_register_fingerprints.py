"""`register(…, fingerprint=True)`: foreign checkpoints are found and compared by the contents of their tensors."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from tests.jobs.conftest import foreign, universal
from tests.jobs.test_fingerprints import fingerprint, with_fingerprints
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import ChecksumError, Conflict, UcformatError, UsageError
from ucformat.jobs import fingerprints as module
from ucformat.jobs import listing
from ucformat.jobs.opening import search_tree, unchanged
from ucformat.jobs.register import register
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.catalog.catalog import Catalog


def recorded(catalog: Catalog, ref: str) -> dict[tuple[str, str], str | None]:
    return {(t.name, t.state): t.digest for t in catalog.tensors(ref)}


def expected(place: Path | str) -> dict[tuple[str, str], str]:
    ck = ucformat.open(place)
    return {key: f"fingerprint:{fingerprint(ck[key].read())}" for key in ck.tensors}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places whose tensors are read for fingerprints, in order."""
    places: list[str] = []
    compute = module.compute_fingerprints

    def watching(ck: Any, *arguments: Any) -> Any:
        places.append(ck.home)
        return compute(ck, *arguments)

    monkeypatch.setattr(module, "compute_fingerprints", watching)
    return places


def test_contents_are_found_and_compared_in_every_form(
    catalog: Catalog, tmp_path: Path, computed: list[str]
) -> None:
    tag = foreign(tmp_path / "run")
    save_file({"a": np.arange(9.0)}, tmp_path / "model.safetensors")
    places = [tag, tmp_path / "model.safetensors"]
    (ds, model) = register(places, catalog).ids
    assert {*recorded(catalog, ds).values(), *recorded(catalog, model).values()} == {None}
    seen: list[tuple[int, int]] = []
    again = register(places, catalog, fingerprint=True, progress=lambda *at: seen.append(at))
    assert (again.ids, computed) == ((ds, model), [str(place) for place in places])
    assert recorded(catalog, ds) == expected(tag)
    assert recorded(catalog, model) == expected(places[1])
    assert seen[-1] == (sum(e.nbytes for e in again.entries),) * 2
    ck = ucformat.convert(tag, tmp_path / "universal")
    register(ck.url, catalog, fingerprint=True)
    (digest,) = {recorded(catalog, i)["a", "exp_avg"] for i in (ds, ck.id)}
    assert {e.id for e in catalog.find(f"tensor.digest = '{digest}'")} == {ds, ck.id}
    shutil.rmtree(tag)  # nothing of it is read
    difference = catalog.diff(ds, ck.id).tensors
    assert (difference.equal, difference.same) == (True, len(ck.tensors))
    assert len(computed) == 2


def test_a_tree_goes_on_where_it_was_interrupted(
    catalog: Catalog, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_FINE", -3600.0)  # as if no file had been changed just now
    monkeypatch.setattr(listing, "_COARSE", -3600.0)
    tags = [foreign(tmp_path / run, content=n) for n, run in enumerate("abc")]
    universal(tmp_path / "u", 1)

    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        register(tmp_path, catalog, recursive=True, fingerprint=True, progress=interrupt)
    assert computed == [str(tag) for tag in tags[:2]]
    assert set(map(str, tags)) <= set(unchanged(catalog, search_tree(LocalStore(tmp_path))))
    kept = [None not in recorded(catalog, e.id).values() for e in catalog.find(sort="recorded")]
    assert sorted(kept) == [False, False, True, True]  # the universal one has its own
    for _ in range(2):
        done = register(tmp_path, catalog, recursive=True, fingerprint=True)
        assert done.failures == ()
    assert computed[2:] == [str(tag) for tag in tags[1:]]
    for tag in tags:
        assert recorded(catalog, ucformat.open(tag).id) == expected(tag)
    for copy in ("d", "e"):
        shutil.copytree(foreign(tmp_path / "f", content=7), tmp_path / copy, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "f")
    assert not register(tmp_path, catalog, recursive=True, fingerprint=True).failures
    assert len(computed) == 5  # copies are read once
    register(tmp_path, catalog, recursive=True, rescan=True)  # which takes nothing away
    assert recorded(catalog, ucformat.open(tags[0]).id) == expected(tags[0])


def test_of_damaged_files_nothing_is_recorded(catalog: Catalog, tmp_path: Path) -> None:
    tags = [foreign(tmp_path / run, content=n) for n, run in enumerate("ab")]
    file = min(tags[0].glob("*optim_states.pt"))
    before = bytearray(file.read_bytes())
    bits = ucformat.open(tags[0])["a", "exp_avg"].read().tobytes()[:8]
    before[before.index(bits)] ^= 1
    file.write_bytes(before)
    with pytest.raises(ChecksumError, match="CRC-32") as caught:
        register(tags[0], catalog, fingerprint=True)
    assert "no-verify" not in str(caught.value.hint)
    done = register(tmp_path, catalog, recursive=True, fingerprint=True)
    assert [f.url for f in done.failures] == [str(tags[0])]
    assert set(recorded(catalog, ucformat.open(tags[0]).id).values()) == {None}
    assert recorded(catalog, ucformat.open(tags[1]).id) == expected(tags[1])


def test_what_is_replaced_meanwhile_is_refused(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = foreign(tmp_path / "run")

    def later(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(tmp_path / "run")
        foreign(tmp_path / "run", content=9)
        return open_checkpoint(*arguments, **options)

    monkeypatch.setattr(module, "open_checkpoint", later)
    with pytest.raises(Conflict, match="another checkpoint"):
        register(tag, catalog, fingerprint=True)


def without_any(tmp_path: Path) -> str:
    place = tmp_path / "old"
    url = universal(place, 1).url
    with_fingerprints(place, list.clear)
    return url


def virtual(tmp_path: Path) -> str:
    return ucformat.convert(foreign(tmp_path / "f"), tmp_path / "v", virtual=True).url


@pytest.mark.parametrize("make", [without_any, virtual])
def test_manifests_that_have_none_are_named(
    catalog: Catalog, tmp_path: Path, make: Callable[[Path], str]
) -> None:
    url = make(tmp_path)
    with pytest.raises(UsageError, match=f"{url} is a universal checkpoint"):
        register(url, catalog, fingerprint=True)
    done = register(tmp_path, catalog, recursive=True, fingerprint=True)
    assert [f.url for f in done.failures] == [url]
    assert ucformat.open(url).id in done.ids  # it is registered all the same


def test_a_cluster_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(UcformatError, match="Dask"):
        register(tmp_path, catalog, recursive=True, fingerprint=True, on="dask://nowhere:1")
