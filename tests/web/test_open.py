"""`ucformat.open` of what a server answers: the same checkpoint, or an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.exporters.sources import opened, universal
from tests.fakes import random_array, same
from tests.storage.test_redirects import Host
from tests.storage.test_redirects import serving as redirecting
from tests.web.serving import Client, serving, token
from tests.web.test_plane import KINDS, LAYOUT, recorded
from ucformat.engines.served import source
from ucformat.errors import (
    IntegrityError,
    PermissionDenied,
    UcformatError,
    UnsafeError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.schema import SERVED
from ucformat.web import document, library, plane

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_DEADLINE", "1")


@pytest.mark.front("packed", "view", "huggingface/trainer_bf16/ckpt")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_checkpoint_that_is_served(tmp_path: Path, kind: str) -> None:
    ck = KINDS[kind](tmp_path)
    with serving(places={"m": ck}) as ask:
        remote = ucformat.open(f"{ask.url}/v1/m")
        assert (remote.id, remote.tensors) == (ck.id, ck.tensors)
        for key in ck.tensors:
            assert same(remote[key].read(), ck[key].read()), key
        assert remote.names() == ck.names()
        assert dict(remote.aliases) == dict(ck.aliases)
        assert json.dumps(dict(remote.objects)) == json.dumps(dict(ck.objects))
        assert {name: remote.assets[name] for name in remote.assets} == {
            name: ck.assets[name] for name in ck.assets
        }
        mine, theirs = remote.metadata, ck.metadata
        assert list(mine.groups) == list(theirs.groups)
        assert tuple(mine.places) == tuple(theirs.places)
        assert dict(mine.paths) == {k: v for k, v in theirs.paths.items() if v}
        for name in ("step", "layout", "engine"):
            assert getattr(mine, name) == getattr(theirs, name)
        assert remote.training_info == ck.training_info
        converted = ucformat.convert(remote, tmp_path / "converted")
        for key in ck.tensors:
            assert same(converted[key].read(), ck[key].read()), key


def test_slices_and_plans_read_their_ranges(tmp_path: Path) -> None:
    arrays = {
        ("w", s): random_array((600, 512), "float32", n)
        for n, s in enumerate(("weight", "exp_avg"))
    }
    ck = universal(tmp_path / "u", arrays)
    layout = ucformat.Layout.parse(LAYOUT)
    with serving(places={"m": ck}) as ask:
        remote = ucformat.open(f"{ask.url}/v1/m")
        assert same(remote["w"][17:40, 5:9], arrays["w", "weight"][17:40, 5:9])
        for rank in (0, 5):
            plan, expected = remote.plan(layout, rank), ck.plan(layout, rank).execute()
            assert plan.bytes_read < 0.6 * sum(a.nbytes for a in arrays.values())
            assert {k: a.tobytes() for k, a in plan.execute().items()} == {
                k: a.tobytes() for k, a in expected.items()
            }


def test_latest_moves_while_it_is_read(tmp_path: Path) -> None:
    with ucformat.Catalog(str(tmp_path / "c.db")) as catalog:
        first = recorded(tmp_path, catalog, "run7", 1)
        with serving(catalog) as ask:
            remote = ucformat.open(f"{ask.url}/v1/run7@latest")
            second = recorded(tmp_path, catalog, "run7", 2)
            assert same(remote["w"].read(), first["w"].read())
            assert remote.recipe[0] == f"{ask.url}/v1/{first.id}"
            again = ucformat.open(f"{ask.url}/v1/run7@latest")
            assert (again.id, again.metadata.step) == (second.id, 2)
            assert same(again["w"].read(), second["w"].read())


def test_another_checkpoint_at_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FRESH", 0.0)
    one, other = (
        universal(tmp_path / str(n), {("w", "weight"): np.full(9, n, "f4")}) for n in range(2)
    )
    served = [one]
    with serving(places={}, opening={"m": lambda: served[0]}) as ask:
        remote = ucformat.open(f"{ask.url}/v1/m")
        served[0] = other
        with pytest.raises(UcformatError):
            remote["w"].read()
        assert same(ucformat.open(f"{ask.url}/v1/m")["w"].read(), other["w"].read())


TOKEN = "tok-0f8fad5b-d9cb-469f"  # noqa: S105 - of these tests alone


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Client]:
    with ucformat.Catalog(str(tmp_path / "c.db")) as catalog:
        recorded(tmp_path, catalog, "run7", 1)
        with serving(catalog, tokens=[token(TOKEN)]) as ask:
            yield ask


def test_a_token(guarded: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{guarded.url}/v1/run7@latest"
    with pytest.raises(PermissionDenied):
        ucformat.open(place)
    monkeypatch.setenv("UCP_TOKEN", f"{guarded.url}={TOKEN}")
    remote = ucformat.open(place)
    assert remote["w"].read().shape == (4, 6)
    assert TOKEN not in repr((remote, remote.recipe, remote.store, remote.url))
    monkeypatch.setenv("UCP_TOKEN", f"{guarded.url}={TOKEN}-not")
    with pytest.raises(PermissionDenied) as caught:
        ucformat.open(place)
    assert TOKEN not in str(caught.value)
    monkeypatch.setenv("UCP_TOKEN", TOKEN)
    with pytest.raises(UsageError, match="for which server") as refused:
        ucformat.open(place)
    assert TOKEN not in str(refused.value)


def test_no_other_server_gets_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is asked for, nor one that the right one leads to."""
    with redirecting(Host()) as other, redirecting(Host()) as right:
        monkeypatch.setenv("UCP_TOKEN", f"http://127.0.0.1:{right.port}={TOKEN}")
        for place in (f"http://127.0.0.1:{other.port}", f"http://localhost:{right.port}"):
            with pytest.raises(UcformatError):
                ucformat.open(f"{place}/v1/m")
        assert other.requests
        right.leads_to = f"http://localhost:{other.port}"
        with pytest.raises(UcformatError):
            ucformat.open(f"http://127.0.0.1:{right.port}/v1/m")
        assert any(TOKEN in request for request in right.requests)
        assert not any("authorization" in request.lower() for request in other.requests)


def test_both_sides_have_one_spelling(tmp_path: Path) -> None:
    with serving(
        places={"m": universal(tmp_path / "u", {("w", "weight"): np.ones(3, "f4")})}
    ) as ask:
        assert ask("/v1/m").body.startswith(source._BEGINNING)


HOSTILE: dict[str, Any] = {
    "id": "../../..",
    "ref": "../..",
    "tensors.file": "../../../etc/passwd",
    "tensors.shape": [-3],
    "tensors.shape ": [1 << 62, 1 << 62],
    "tensors.shape  ": [1] * 100,
    "tensors.bytes": 13,
    "tensors.name": 7,
    "tensors.paths": [[{}]],
    "groups": [{"params": [["w"]]}],
    "step": -1,
    "aliases": [],
    "assets": {"../x": {"file": "assets/y"}},
    "metrics": {"loss": "x"},
    "ucformat_served": 2,
    "lossy": [{"name": "w"}],
}


@pytest.mark.parametrize("member", HOSTILE)
def test_hostile_documents(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    def described(*arguments: Any) -> dict[str, Any]:
        told = document.described(*arguments)
        table, _, name = member.strip().rpartition(".")
        (told["tensors"][0] if table else told)[name] = HOSTILE[member]
        return told

    monkeypatch.setattr(plane, "described", described)
    with serving(places={"m": opened({("w", "weight"): np.ones(3, "f4")})}) as ask:
        kind = UpgradeNeeded if member == SERVED else (IntegrityError, UnsafeError)
        with pytest.raises(kind):
            ucformat.open(f"{ask.url}/v1/m")
