"""What follows a commit whose answer is lost: nothing that a committed checkpoint needs is ever dropped."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import ucformat
from tests.fakes import Arrays, random_array
from tests.storage.fault_runs import is_whole, source, truth
from tests.storage.proxy import answer, fine
from ucformat.errors import Conflict, NotFound, UcformatError, Uncertain
from ucformat.torch import save

if TYPE_CHECKING:
    from pathlib import Path

    from tests.storage.conftest import Faulty
    from tests.storage.proxy import Choice, Fault, Request
    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

ARRAYS: Arrays = {("w", "weight"): random_array((97, 33), "float32", 1)}
REFUSED = answer(
    "403 Forbidden", "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
)


def state() -> dict[str, Any]:
    return {"model": {name: torch.from_numpy(np.array(a)) for (name, _), a in ARRAYS.items()}}


def is_commit(request: Request) -> bool:
    return request.conditional and request.key.endswith("manifest.json")


def after_the_commit(fault: Fault | bytes, last: Fault | None = None) -> Choice:
    """Chooses `last` for the commit, and this fault for all that follows it."""
    over = False

    def choose(request: Request) -> Fault | bytes | None:
        nonlocal over
        was, over = over, over or is_commit(request)
        return fault if was else last if over else None

    return choose


@pytest.fixture
def place(faulty: Faulty, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCP_DEADLINE", "0.5")
    return faulty.bucket.place()


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_save_that_cannot_tell_whether_it_is_committed_drops_nothing(
    form: Any, faulty: Faulty, place: str
) -> None:
    faulty.proxy.choose = after_the_commit("reset", last="lost")
    with pytest.raises(
        Uncertain, match=r"it is unknown whether the checkpoint at .* was committed"
    ) as failure:
        save(state(), place, form=form)
    assert "open it" in (failure.value.hint or "")
    faulty.proxy.choose = fine
    assert is_whole(place, ARRAYS)
    with pytest.raises(Conflict):
        save(state(), place, form=form)


def test_a_save_whose_commit_never_came_can_be_run_again(faulty: Faulty, place: str) -> None:
    faulty.proxy.choose = lambda r: "reset" if is_commit(r) else None
    with pytest.raises(Uncertain):
        save(state(), place)
    faulty.proxy.choose = fine
    with pytest.raises(NotFound):
        ucformat.open(place)
    save(state(), place)
    assert is_whole(place, ARRAYS)


def test_a_save_whose_commit_is_refused_leaves_nothing(faulty: Faulty, place: str) -> None:
    faulty.proxy.choose = lambda r: REFUSED if is_commit(r) else None
    with pytest.raises(UcformatError, match="AccessDenied"):
        save(state(), place)
    assert faulty.bucket.keys(place.removeprefix(f"s3://{faulty.bucket.name}/")) == []


@pytest.mark.parametrize("after", [KeyboardInterrupt, UcformatError])
def test_a_save_that_is_interrupted_within_its_commit(
    after: type[BaseException], faulty: Faulty, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucformat.format.commit import commit

    def interrupted(store: Store, attempt: Attempt, manifest: Manifest, **how: Any) -> None:
        if after is KeyboardInterrupt:
            commit(store, attempt, manifest, **how)
        raise after("now")

    monkeypatch.setattr("ucformat.torch.saving.save.commit", interrupted)
    with pytest.raises(after, match="now"):
        save(state(), place)
    if after is KeyboardInterrupt:  # which comes when the request has ended
        assert is_whole(place, ARRAYS)
    else:
        assert faulty.bucket.keys(place.removeprefix(f"s3://{faulty.bucket.name}/")) == []


def test_a_local_save_whose_commit_may_not_last_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(folder: int) -> None:
        if "manifest.json" in os.listdir(folder):
            raise UcformatError("Input/output error")

    monkeypatch.setattr("ucformat.storage.folders.sync_open_folder", failing)
    with pytest.raises(
        Uncertain,
        match=r"was committed: .*manifest.json was written, but may not be durable: Input",
    ):
        save(state(), tmp_path / "ck")
    monkeypatch.undo()
    assert is_whole(str(tmp_path / "ck"), ARRAYS)


def test_what_cannot_be_cleared_away_hides_no_error(
    faulty: Faulty, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(request: Request) -> Fault | bytes | None:
        if request.method == "POST" and "delete" in request.target:
            return REFUSED
        return (
            answer("403 Forbidden", "<Error><Code>QuotaExceeded</Code></Error>")
            if is_commit(request)
            else None
        )

    faulty.proxy.choose = choose
    with pytest.raises(UcformatError, match="QuotaExceeded"):
        save(state(), place)
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize("fault", ["reset", REFUSED], ids=["reset", "refused"])
def test_a_conversion_is_done_when_it_is_committed(
    fault: Fault | bytes, faulty: Faulty, place: str, tmp_path: Path
) -> None:
    """It asks nothing more that could fail."""
    faulty.proxy.choose = after_the_commit(fault)
    ck = ucformat.convert(source(tmp_path), place, chunk_bytes=1024)
    faulty.proxy.choose = fine
    assert is_whole(place, truth(0))
    found = ucformat.open(place)
    assert (ck.manifest, ck.id, list(ck)) == (found.manifest, found.id, list(found))


@pytest.mark.front("lost")
@pytest.mark.parametrize("last", [None, "lost", "lied"])
def test_a_replacement_is_done_when_it_is_committed(
    last: Fault | None, faulty: Faulty, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = ucformat.convert(source(tmp_path, 1), place, chunk_bytes=1024)

    def deleting(request: Request) -> bool:
        return request.method in ("DELETE", "POST")

    chosen = after_the_commit(REFUSED, last)

    def choose(request: Request) -> Fault | bytes | None:
        found = chosen(request)
        return found if found != REFUSED or deleting(request) else None

    faulty.proxy.choose = choose
    second = ucformat.convert(source(tmp_path), place, chunk_bytes=1024, overwrite=True)
    faulty.proxy.choose = fine
    assert is_whole(place, truth(0))
    assert ucformat.open(place).id == second.id
    assert f"the attempt {first.manifest.attempt} could not be removed" in caplog.text


def test_a_conversion_that_cannot_tell_says_so_and_is_done_when_run_again(
    faulty: Faulty, place: str, tmp_path: Path
) -> None:
    src = source(tmp_path)
    faulty.proxy.choose = after_the_commit("busy", last="lost")
    with pytest.raises(Uncertain, match=r"SlowDown|503"):
        ucformat.convert(src, place, chunk_bytes=1024)
    faulty.proxy.choose = fine
    with pytest.raises(Conflict, match="made by this very plan: nothing is left to do"):
        ucformat.convert(src, place, chunk_bytes=1024)
    assert is_whole(place, truth(0))
