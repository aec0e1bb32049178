"""The checkpoints of a run: when they are saved, which stay, and which one is restored after a failure."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.torch.running import torchrun
from ucformat.catalog.catalog import Catalog
from ucformat.errors import Conflict, IntegrityError, Refused, UcformatError, UsageError
from ucformat.format.commit import MANIFEST
from ucformat.jobs.record import keep_documents
from ucformat.storage.base import HIDDEN
from ucformat.storage.url import open_store
from ucformat.torch import Manager, Saved, SaveHandle, keeping
from ucformat.torch import manager as module
from ucformat.torch.keeping import policy_of
from ucformat.torch.stopping import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    State = dict[str, Any]


def state_at(step: int) -> State:
    """A state that tells its step: several chunks and shards, and a plain value."""
    generator = torch.Generator().manual_seed(step)
    weights = {n: torch.randn(33, 16, generator=generator) for n in ("a", "b")}
    return {"model": weights, "progress": {"step": step, "loss": step / 7}}


def manager_of(place: Path, **options: Any) -> Manager:
    """With shards of 256 bytes."""
    return Manager(place, **{"chunk_bytes": 64, "shard_bytes": 256, "signals": (), **options})


def fill(place: Path, *steps: int, **options: Any) -> None:
    """Checkpoints of these steps, one after another."""
    manager = manager_of(place, **options)
    for step in steps:
        assert isinstance(manager.save(step, state_at(step)), Saved)


def restored(place: Path, **options: Any) -> tuple[int, Any]:
    """The step that is restored, which the whole state must tell alike, and the report."""
    state = state_at(0)
    report = manager_of(place).restore_latest(state, **options)
    assert report is not None
    expected = state_at(state["progress"]["step"])
    assert all(torch.equal(state["model"][n], t) for n, t in expected["model"].items())
    assert state["progress"] == expected["progress"]
    return state["progress"]["step"], report


def folders(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir() if not p.name.startswith(HIDDEN))


def names(*steps: int) -> list[str]:
    return [f"step-{s:08d}" for s in steps]


# --- when


def test_saves_are_due_at_steps_that_divide(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, every=3)
    answers = [(s, manager.should_save(s), manager.save(s, state_at(s)) is not None) for s in range(1, 8)]
    assert [s for s, due, saved in answers if due] == [s for s, due, saved in answers if saved] == [3, 6]
    assert folders(tmp_path) == names(3, 6)
    assert manager.last is not None
    assert ucformat.open(manager.last.url).manifest.step == 6
    assert manager.last.nbytes == 2 * 33 * 16 * 4


def test_a_step_that_stands_is_not_saved_again(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, every=2)
    first = manager.save(2, state_at(2))
    assert not manager.should_save(2)
    assert manager.save(2, state_at(2)) is None
    assert manager.save(2, state_at(2), force=True) is first
    again = manager_of(tmp_path, every=2)
    again.restore_latest(state_at(0))
    assert not again.should_save(2)
    assert again.save(3, state_at(3), force=True) is not None
    assert folders(tmp_path) == names(2, 3)


def test_without_every_each_call_saves(tmp_path: Path) -> None:
    fill(tmp_path, 5, 7)
    assert folders(tmp_path) == names(5, 7)


def test_saves_are_due_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    manager = manager_of(tmp_path, every=timedelta(minutes=1))
    now += 59
    assert not manager.should_save(1)
    now += 1
    assert manager.should_save(2)
    assert manager.save(2, state_at(2)) is not None
    now += 59
    assert manager.save(3, state_at(3)) is None
    now += 2
    assert manager.save(4, state_at(4)) is not None
    assert folders(tmp_path) == names(2, 4)


@pytest.mark.parametrize("every", [0, -5, timedelta(0)])
def test_what_is_no_interval_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(UsageError, match="no interval"):
        Manager(tmp_path, every=every)


def test_a_step_of_another_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    with pytest.raises(Conflict, match="already holds"):
        fill(tmp_path, 5)
    fill(tmp_path, 5, overwrite=True)
    assert folders(tmp_path) == names(5)


def test_each_checkpoint_notes_the_one_before_and_what_was_given(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, run="r", config={"lr": 0.1})
    manager.save(1, state_at(1), metrics={"loss": 2.0})
    manager.save(2, state_at(2))
    resumed = manager_of(tmp_path)
    resumed.restore_latest(state_at(0))
    resumed.save(3, state_at(3))
    found = [ucformat.open(tmp_path / n).manifest for n in names(1, 2, 3)]
    assert [[(p.kind, p.url, p.id) for p in m.lineage] for m in found] == [
        [],
        [("resume", str(tmp_path / "step-00000001"), found[0].id)],
        [("resume", str(tmp_path / "step-00000002"), found[1].id)],
    ]
    assert (found[0].run, found[0].config, found[0].metrics, found[0].step) == ("r", {"lr": 0.1}, {"loss": 2.0}, 1)


# --- restoring


def test_nothing_is_restored_where_there_is_nothing(tmp_path: Path) -> None:
    assert manager_of(tmp_path / "none").restore_latest(state_at(0)) is None
    (tmp_path / "step-00000004" / "attempts").mkdir(parents=True)
    (tmp_path / "step-00000004" / "attempts" / "abc.json").write_text("{}")
    assert manager_of(tmp_path).restore_latest(state_at(0)) is None


def data_file(checkpoint: Path) -> Path:
    files = [p for p in checkpoint.glob("data/**/*") if p.is_file() and p.suffix not in (".json", ".safetensors")]
    return max(files)


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
    "of another version": lambda c: (c / MANIFEST).write_text('{"format": "ucformat", "version": 99}'),
}


@pytest.mark.parametrize("form", ["zarr", "packed"])
@pytest.mark.parametrize("verify", ["full", "quick"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str, verify: str, damage: str
) -> None:
    fill(tmp_path, 1, 2, form=form)
    assert restored(tmp_path, verify=verify)[0] == 2
    DAMAGES[damage](tmp_path / "step-00000002")
    step, report = restored(tmp_path, verify=verify)
    assert (step, report.url) == (1, str(tmp_path / "step-00000001"))
    assert "step-00000002 is skipped" in caplog.text


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_whole_chunks_of_another_step_are_found(tmp_path: Path, form: str) -> None:
    fill(tmp_path, 1, 2, form=form)
    data_file(tmp_path / "step-00000002").write_bytes(data_file(tmp_path / "step-00000001").read_bytes())
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
    with pytest.raises(IntegrityError, match="none is whole") as caught:
        manager_of(tmp_path).restore_latest(state_at(0))
    assert all(name in str(caught.value) for name in names(1, 2))


def test_a_place_that_cannot_be_read_is_no_reason_to_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, 2)

    def lost(*_: Any) -> None:
        raise UcformatError("the connection is lost")

    monkeypatch.setattr("ucformat.jobs.verify.check_shard", lost)
    with pytest.raises(UcformatError, match="the connection is lost"):
        manager_of(tmp_path).restore_latest(state_at(0))


def test_the_newest_is_what_was_created_last(tmp_path: Path) -> None:
    fill(tmp_path, 10, 20, 30)
    fill(tmp_path, 15)  # somebody went back
    assert restored(tmp_path)[0] == 15


def test_what_was_left_behind_is_replaced_when_training_comes_there_again(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    data_file(tmp_path / "step-00000003").unlink()
    data_file(tmp_path / "step-00000002").unlink()
    flip(tmp_path / "step-00000002" / MANIFEST, 0)  # nobody knows what this is: it stays, beside the new one
    manager = manager_of(tmp_path)
    assert manager.restore_latest(state_at(0)) is not None
    for step in (2, 3):
        manager.save(step, state_at(step + 40))
    assert folders(tmp_path) == ["step-00000001", "step-00000002", "step-00000002.2", "step-00000003"]
    assert ucformat.open(tmp_path / "step-00000003").objects["progress"]["step"] == 43
    assert restored(tmp_path)[0] == 43


def test_where_nothing_can_be_replaced_it_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, 2)
    data_file(tmp_path / "step-00000002").unlink()
    manager = manager_of(tmp_path)
    manager.restore_latest(state_at(0))

    def refused(*_: Any) -> None:
        raise Refused("object stores cannot")

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


def test_an_interrupted_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = manager_of(tmp_path)
    manager.save(1, state_at(1))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:  # what a killed process leaves: all data, and no manifest
        patched.setattr("ucformat.torch.writing.commit", killed)
        patched.setattr("ucformat.torch.writing.abandon", lambda *_: None)
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


# --- keeping, without a catalog


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, [50, 60]),
        ({"last": 1, "every": 20}, [20, 40, 60]),
        ({"best": {"metric": "loss", "count": 2, "mode": "min"}}, [10, 20, 60]),
        ({"keep": {"younger": "1h"}, "grace": "3d"}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_the_folder_keeps_what_the_rules_say(tmp_path: Path, keep: Any, left: list[int]) -> None:
    with manager_of(tmp_path, keep=keep) as manager:
        for step in range(10, 70, 10):
            manager.save(step, state_at(step), metrics={"loss": step / 3})
    assert folders(tmp_path) == names(*left)
    assert restored(tmp_path)[0] == 60


def test_a_rule_that_keeps_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = {"metric": "los", "count": 1, "mode": "min"}
    with manager_of(tmp_path, keep={"last": 1, "best": rule}) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step), metrics={"loss": 1.0})
    assert caplog.text.count("the rule keeps nothing: best of its run by min los") == 1


def test_only_what_is_ours_goes(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    ucformat.torch.save(state_at(1), tmp_path / "by-hand")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-2").mkdir()
    with manager_of(tmp_path, keep=1) as manager:
        manager.save(4, state_at(4))
    assert folders(tmp_path) == ["by-hand", "step-00000001", "step-00000004", "step-2"]
    assert folders(tmp_path / "step-00000001") == ["notes.txt"]
    assert ucformat.verify(tmp_path / "by-hand")


def test_what_a_catalog_protects_stays_without_it(tmp_path: Path) -> None:
    place = tmp_path / "run"
    fill(place, 1, 2, 3, 4, 5)
    keep_documents()
    with Catalog(str(tmp_path / "theirs.db")) as catalog:
        entries = [catalog.record(ucformat.open(place / n).manifest, str(place / n)) for n in names(1, 2, 3, 4)]
        catalog.tag(entries[0].id, "released")
        catalog.hold(entries[1].id, "paper")
        catalog.alias("best", entries[2].id)
        catalog.note(entries[3].id, "a note protects nothing")
    with manager_of(place, keep=1) as manager:
        manager.save(6, state_at(6))
    assert folders(place) == names(1, 2, 3, 6)


def test_an_interrupted_removal_is_ended_by_the_next_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("ucformat.jobs.removal.bury", killed)
        with manager_of(tmp_path, keep=1) as manager:
            for step in (1, 2):
                manager.save(step, state_at(step))
    assert (tmp_path / "step-00000001" / "tombstone.json").exists()
    assert restored(tmp_path)[0] == 2
    with manager_of(tmp_path, keep=2) as manager:
        manager.save(3, state_at(3))
    assert folders(tmp_path) == names(2, 3)


def test_failures_to_delete_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise UcformatError("not allowed here")

    monkeypatch.setattr(keeping, "remove", refused)
    with manager_of(tmp_path, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert "not allowed here" in caplog.text
    assert folders(tmp_path) == names(1, 2)


def test_what_keep_may_be(tmp_path: Path) -> None:
    assert policy_of(3).keep.last[0].count == 3
    assert policy_of(3).grace == timedelta(0)
    assert policy_of({"every": 5}).keep.last[0].count == 1  # the newest always stays
    assert policy_of({"keep": {"last": {"count": 3, "group": "all"}}}).grace == timedelta(days=7)
    (tmp_path / "p.yaml").write_text("version: 1\nkeep: {every: 7}\n")
    assert policy_of(tmp_path / "p.yaml").keep.every == 7
    with pytest.raises(UsageError, match="lats"):
        policy_of({"lats": 3})
    with pytest.raises(UsageError, match="need a catalog"):
        Manager(tmp_path, keep={"last": 1, "where": "step > 1"})


# --- keeping, by a catalog


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """A catalog that the settings name."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    with Catalog() as opened:
        yield opened


def test_the_catalog_decides_what_stays(tmp_path: Path, catalog: Catalog) -> None:
    place, other = tmp_path / "it's_100%", tmp_path / "it's_1000"
    fill(other, 1, 2)
    fill(place, 1, 2, 3, 4)
    entries = {e.step: e for e in catalog.find() if str(e.url).startswith(f"{place}/")}
    catalog.tag(entries[1].id, "released")
    catalog.alias("best", entries[2].id)
    catalog.hold(entries[3].id, "paper")
    with manager_of(place, keep={"last": 2, "where": "metric.loss < 1"}) as manager:
        manager.restore_latest(state_at(0))
        for step in (5, 6, 7, 8):
            manager.save(step, state_at(step), metrics={"loss": 0.5 if step == 5 else 1.5})
    assert folders(place) == names(1, 2, 3, 5, 7, 8)
    assert folders(other) == names(1, 2)
    assert catalog.get(entries[4].id).state == "purged"  # although 5 was resumed from it
    assert {e.action for e in catalog.events(entries[4].id)} >= {"delete", "purge", "purged"}
    assert restored(place)[0] == 8


def test_with_a_grace_bytes_stay_but_are_not_restored(tmp_path: Path, catalog: Catalog) -> None:
    place = tmp_path / "run"
    with manager_of(place, keep={"keep": {"last": 1}, "grace": "2d"}) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert folders(place) == names(1, 2)
    (one,) = catalog.find("state = 'deleted'")
    assert one.step == 1
    data_file(place / "step-00000002").unlink()
    with pytest.raises(IntegrityError, match="none is whole") as caught:
        manager_of(place).restore_latest(state_at(0))
    assert "step-00000001" not in str(caught.value)
    catalog.restore(one.id)
    assert restored(place)[0] == 1


def test_copies_elsewhere_and_a_young_catalog_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    place = tmp_path / "run"
    fill(place, 1, 2, 3)  # of which no catalog knows
    shutil.copytree(place / "step-00000001", tmp_path / "archive")
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "young.db"))
    with Catalog() as catalog:
        catalog.record(ucformat.open(tmp_path / "archive").manifest, str(tmp_path / "archive"))
        with manager_of(place, keep=1) as manager:
            manager.save(4, state_at(4))
        assert folders(place) == names(1, 4)
        assert ucformat.verify(tmp_path / "archive")
    assert caplog.text.count("it lies elsewhere too") == 1


def test_what_is_protected_is_not_replaced(tmp_path: Path, catalog: Catalog) -> None:
    place = tmp_path / "run"
    fill(place, 1, 2)
    data_file(place / "step-00000002").unlink()
    manager = manager_of(place)
    manager.restore_latest(state_at(0))
    (two,) = catalog.find("step = 2")
    assert two.verified is not None
    assert not two.verified.ok
    catalog.tag(two.id, "to be repaired")
    manager.save(2, state_at(2))
    assert folders(place) == [*names(1, 2), "step-00000002.2"]


def test_a_catalog_that_nobody_named_and_that_cannot_be_opened_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("UCP_CATALOG")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.chdir(tmp_path)
    with manager_of(tmp_path / "run", keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    assert folders(tmp_path / "run") == names(2)
    assert "is kept without a catalog" in caplog.text


# --- being told to stop


def test_a_signal_saves_once_more_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with manager_of(tmp_path, every=100, signals=(signal.SIGTERM,)) as manager:
        assert manager.save(1, state_at(1)) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2)
        assert manager.stopping
        assert isinstance(manager.save(2, state_at(2)), Saved)
        assert manager.save(3, state_at(3)) is None
        assert manager.stopping
    assert signal.getsignal(signal.SIGTERM) is before
    assert folders(tmp_path) == names(2)


def test_a_signal_where_the_step_stands_already_saves_nothing_more(tmp_path: Path) -> None:
    with manager_of(tmp_path, every=2, signals=(signal.SIGTERM,)) as manager:
        saved = manager.save(2, state_at(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(2, state_at(2)) is saved
        assert manager.stopping


def test_handlers_that_were_there_are_called_too(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with manager_of(tmp_path, signals=(signal.SIGUSR1, signal.SIGINT)) as manager:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert manager.should_save(1)
            assert manager.stopping
        assert seen == [signal.SIGUSR1]
        with manager_of(tmp_path, signals=(signal.SIGINT,)) as manager:
            os.kill(os.getpid(), signal.SIGINT)  # the first only asks to stop
            assert manager.should_save(1)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_forked_process_still_dies_of_the_signal(tmp_path: Path) -> None:
    with manager_of(tmp_path, signals=(signal.SIGTERM,)) as manager:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(7)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert manager.should_save(1)
        assert not manager.stopping


def test_outside_of_the_main_thread_a_warning_says_that_nobody_listens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: Manager(tmp_path).close())
    thread.start()
    thread.join()
    assert "SIGTERM will end this process" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before


# --- in the background


def test_saves_in_the_background_follow_one_another(tmp_path: Path) -> None:
    with manager_of(tmp_path, every=2, keep=2, asynchronous=True, signals=(signal.SIGTERM,)) as manager:
        state = state_at(2)
        handle = manager.save(2, state)
        assert isinstance(handle, SaveHandle)
        state["model"]["a"].zero_()
        second = manager.save(4, state_at(4))
        assert handle.committed
        assert isinstance(second, SaveHandle)
        assert manager.wait() == second.wait() == manager.last
        manager.save(6, state_at(6))
        os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(manager.save(7, state_at(7)), Saved)
    assert folders(tmp_path) == names(6, 7)
    assert restored(tmp_path)[0] == 7
    parents = [ucformat.open(tmp_path / n).manifest.lineage[0].url[-8:] for n in names(6, 7)]
    assert parents == ["00000004", "00000006"]


def failing(url: str) -> SaveHandle:
    handle = SaveHandle(str(url), 0.0)
    handle._done.set_exception(UcformatError("rank 1: the disk is full"))
    return handle


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves in the background fail."""
    monkeypatch.setattr(module, "async_save", lambda state, url, **_: failing(url))


@pytest.mark.usefixtures("fails")
def test_a_failure_in_the_background_comes_at_the_next_call(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, every=2, asynchronous=True)
    manager.save(2, state_at(2))
    with pytest.raises(UcformatError, match="the disk is full"):
        manager.should_save(3)
    assert not manager.should_save(3)
    assert manager.save(2, state_at(2)) is not None  # it does not stand
    with pytest.raises(UcformatError, match="the disk is full"):
        manager.wait()
    assert manager.save(4, state_at(4)) is not None  # told once
    with pytest.raises(UcformatError, match="the disk is full"):
        manager.close()


@pytest.mark.usefixtures("fails")
def test_a_failure_in_the_background_does_not_hinder_the_last_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path, every=2, asynchronous=True, signals=(signal.SIGTERM,)) as manager:
        manager.save(2, state_at(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(manager.save(2, state_at(2)), Saved)
    assert "is made up for by the last one" in caplog.text
    assert restored(tmp_path)[0] == 2


@pytest.mark.usefixtures("fails")
def test_the_error_of_the_program_is_not_hidden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def train() -> None:
        with manager_of(tmp_path, asynchronous=True) as manager:
            manager.save(2, state_at(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the disk is full" in caplog.text


# --- on several ranks


class Wired:
    """A group of threads that hand each other bytes."""

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int], SimpleQueue[bytes]]) -> None:
        self.rank, self.size, self._wires = rank, size, wires

    def send(self, data: Any, to: int) -> None:
        self._wires[self.rank, to].put(data.tobytes())

    def receive(self, out: Any, source: int) -> None:
        out[:] = list(self._wires[source, self.rank].get(timeout=20))

    def receive_all(self, buffers: list[tuple[Any, int]]) -> None:
        for out, source in buffers:
            self.receive(out, source)


@pytest.mark.parametrize("size", [1, 2, 9, 10, 75])
def test_any_number_of_ranks_tell_each_other(size: int) -> None:
    wires: dict[tuple[int, int], SimpleQueue[bytes]] = {(a, b): SimpleQueue() for a in range(size) for b in range(size)}
    with ThreadPoolExecutor(size) as pool:
        for who in {0, size // 2, size - 1}:

            def bits(rank: int, who: int = who) -> int:
                return 4 * (rank == who) | (rank == 0)

            groups: list[Any] = [Wired(r, size, wires) for r in range(size)]
            assert list(pool.map(together, groups, map(bits, range(size)))) == [5] * size


def test_two_ranks_agree(tmp_path: Path) -> None:
    program = Path(__file__).parent / "manager_program.py"
    log = torchrun(2, [str(program), str(tmp_path / "run")], tmp_path / "log.txt", 120)
    assert log.count("rank 0 did all") == log.count("rank 1 did all") == 1
    assert log.count("is skipped") == 2  # twice damaged, each said by one rank
