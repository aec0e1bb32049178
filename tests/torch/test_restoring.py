"""Which checkpoint of a run is restored after a failure."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch

import ucformat
import ucformat.torch
from tests.fakes import manifest_file
from tests.torch.runs import data_file, fill, folders, manager_of, names, restored, state_at
from ucformat.errors import IntegrityError, UcformatError, UnsupportedError
from ucformat.schema import MANIFEST
from ucformat.schema.limits import MOST_COMMITS
from ucformat.storage.url import open_store
from ucformat.torch import Manager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.schema.manifest import LineageDoc, Manifest


def test_nothing_is_restored_where_there_is_nothing(tmp_path: Path) -> None:
    assert manager_of(tmp_path / "none").restore_latest(state_at(0)) is None
    (tmp_path / "step-00000004" / "attempts").mkdir(parents=True)
    (tmp_path / "step-00000004" / "attempts" / "abc.json").write_text("{}")
    assert manager_of(tmp_path).restore_latest(state_at(0)) is None


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda c: flip(data_file(c), 37),
    "truncated": lambda c: os.truncate(data_file(c), data_file(c).stat().st_size - 1),
    "missing": lambda c: data_file(c).unlink(),
    "objects": lambda c: flip(next(c.glob("objects/*/objects.json")), 20),
    "no manifest to read": lambda c: flip(c / MANIFEST, 0),
    "of another version": lambda c: (c / MANIFEST).write_bytes(
        manifest_file({"format": "ucformat", "version": 99})
    ),
}


FORMS: dict[str, dict[str, str]] = {
    "zarr": {"form": "zarr"},
    "packed": {"form": "packed"},
    "encoded": {"form": "packed", "codec": "blosc"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verify", ["full", "quick"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, verify: str, damage: str
) -> None:
    fill(tmp_path, 1, 2, **FORMS[form])
    assert restored(tmp_path, verify=verify)[0] == 2
    DAMAGES[damage](tmp_path / "step-00000002")
    step, report = restored(tmp_path, verify=verify)
    assert (step, report.url) == (1, str(tmp_path / "step-00000001"))
    assert "step-00000002 is skipped" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_whole_chunks_of_another_step_are_found(tmp_path: Path, form: str) -> None:
    fill(tmp_path, 1, 2, **FORMS[form])
    data_file(tmp_path / "step-00000002").write_bytes(
        data_file(tmp_path / "step-00000001").read_bytes()
    )
    assert restored(tmp_path)[0] == 1


def test_damage_is_found_in_what_is_not_loaded(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    flip(data_file(tmp_path / "step-00000002"), 37)  # of `b`
    state = {"model": {"a": torch.zeros(33, 16)}}
    report = manager_of(tmp_path).restore_latest(state)
    assert report is not None
    assert report.step == 1


def test_where_all_is_damaged_training_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    for folder in tmp_path.iterdir():
        data_file(folder).unlink()
    with pytest.raises(IntegrityError, match="are damaged") as caught:
        manager_of(tmp_path).restore_latest(state_at(0))
    assert all(name in str(caught.value) for name in names(1, 2))


def test_a_place_that_cannot_be_read_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 2)

    def lost(*_: Any, **__: Any) -> None:
        raise UcformatError("the connection is lost")

    monkeypatch.setattr("ucformat.format.audit.check_shard", lost)
    with pytest.raises(UcformatError, match="the connection is lost"):
        manager_of(tmp_path).restore_latest(state_at(0))


def test_the_newest_is_what_was_created_last(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30)
    fill(tmp_path, 15)  # somebody went back
    assert restored(tmp_path)[0] == 15


@pytest.mark.parametrize("hours", [-1, 1, 24 * 3650, -24 * 3650])
@pytest.mark.parametrize("keep", [None, 2])
def test_no_clock_decides_what_is_the_newest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hours: int,
    keep: int | None,
) -> None:
    """What training went on from is older, whatever clock its host has."""
    monkeypatch.setenv("UCP_CATALOG", "none")
    skew(monkeypatch, 0)
    fill(tmp_path, 100)
    for step, wrong in ((200, max(0, hours)), (300, min(hours, 0))):
        skew(monkeypatch, wrong)
        manager = manager_of(tmp_path, keep=keep)
        manager.restore_latest(state_at(0))
        manager.save(step, state_at(step))
        manager.wait()
    before = {
        step: ucformat.open(tmp_path / name).id
        for step, name in ((200, names(200)[0]), (300, names(300)[0]))
    }
    assert restored(tmp_path)[0] == 300
    assert "a clock was wrong" in caplog.text
    assert folders(tmp_path) == (names(100, 200, 300) if keep is None else names(200, 300))
    manager = manager_of(tmp_path)
    manager.restore_latest(state_at(0))
    manager.save(400, state_at(400))
    assert {s: ucformat.open(tmp_path / f"step-{s:08d}").id for s in before} == before


def skew(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(hours=hours)

    monkeypatch.setattr("ucformat.torch.saving.manifest.datetime", Clock)


def test_a_training_that_went_back_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a clock that is behind, and where what it went on from counts less than what it left."""
    fill(tmp_path, 10, 20, 30)
    skew(monkeypatch, -1)
    manager = manager_of(tmp_path)
    manager.load(state_at(0), tmp_path / "step-00000010")
    manager.save(15, state_at(15))
    counts = {
        step: ucformat.open(tmp_path / names(step)[0]).manifest.commits for step in (10, 15, 20, 30)
    }
    assert counts == {10: 1, 20: 2, 30: 3, 15: 4}
    assert restored(tmp_path)[0] == 15


def test_commits_are_counted_as_far_as_they_are_known(tmp_path: Path) -> None:
    def saved(name: str, **more: Any) -> Manifest:
        ucformat.torch.save(state_at(1), tmp_path / name, **more)
        return ucformat.open(tmp_path / name).manifest

    def edge(name: str) -> LineageDoc:
        return ucformat.torch.load(state_at(0), tmp_path / name).lineage

    assert saved("nothing").commits is None
    assert saved("from nothing", lineage=[edge("nothing")]).commits is None
    assert saved("first", after=0).commits == 1
    assert saved("second", lineage=[edge("first"), edge("nothing")]).commits == 2
    assert saved("seventh", after=6, lineage=[edge("second")]).commits == 7
    ucformat.convert(tmp_path / "second", tmp_path / "converted")
    made = ucformat.open(tmp_path / "converted").manifest
    assert (made.commits, made.lineage[0].commits) == (None, 2)
    assert saved("third", lineage=[edge("converted")]).commits == 3
    assert saved("last", after=MOST_COMMITS).commits == MOST_COMMITS


def test_what_is_whole_is_not_replaced_when_training_went_back(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20)
    fill(tmp_path, 15)
    whole = ucformat.open(tmp_path / "step-00000020").id
    manager = manager_of(tmp_path)
    manager.restore_latest(state_at(0))
    manager.save(20, state_at(21))
    assert ucformat.open(tmp_path / "step-00000020").id == whole
    assert folders(tmp_path) == [*names(10, 15, 20), "step-00000020.2"]
    assert restored(tmp_path)[0] == 21


def test_what_was_left_behind_is_replaced_when_training_comes_there_again(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    data_file(tmp_path / "step-00000003").unlink()
    data_file(tmp_path / "step-00000002").unlink()
    flip(
        tmp_path / "step-00000002" / MANIFEST, 0
    )  # nobody knows what this is: it stays, beside the new one
    manager = manager_of(tmp_path)
    assert manager.restore_latest(state_at(0)) is not None
    for step in (2, 3):
        manager.save(step, state_at(step + 40))
    assert folders(tmp_path) == [
        "step-00000001",
        "step-00000002",
        "step-00000002.2",
        "step-00000003",
    ]
    assert ucformat.open(tmp_path / "step-00000003").objects["progress"]["step"] == 43
    assert restored(tmp_path)[0] == 43


def test_where_nothing_can_be_replaced_it_lies_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 2)
    data_file(tmp_path / "step-00000002").unlink()
    manager = manager_of(tmp_path)
    manager.restore_latest(state_at(0))

    def refused(*_: Any) -> None:
        raise UnsupportedError("object stores cannot")

    monkeypatch.setattr("ucformat.storage.local.LocalStore.replace", refused)
    manager.save(2, state_at(2))
    assert folders(tmp_path) == [*names(1, 2), "step-00000002.2"]
    assert restored(tmp_path)[0] == 2


def test_a_run_may_lie_in_any_store(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/run"
    with Manager(place, keep=2, signals=()) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
    store = open_store(place)
    assert sorted({i.key.partition("/")[0] for i in store.list()}) == names(2, 3)
    state = state_at(0)
    report = Manager(place, signals=()).restore_latest(state)
    assert report is not None
    assert (report.step, state["progress"]["step"]) == (3, 3)


def test_an_interrupted_save_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, state_at(1))

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patched
    ):  # what a killed process leaves: all data, and no manifest
        patched.setattr("ucformat.torch.saving.save.commit", killed)
        patched.setattr("ucformat.torch.saving.save.discard", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, state_at(2))
    assert list((tmp_path / "step-00000002").glob("data/**/c/*"))
    assert restored(tmp_path)[0] == 1
    fresh = manager_of(tmp_path, keep=1)
    assert fresh.restore_latest(state_at(0)) is not None
    fresh.save(2, state_at(2))
    fresh.wait()
    assert restored(tmp_path)[0] == 2
    assert not (tmp_path / "step-00000001").exists()
