"""The checkpoints of a run: when they are saved, and how the saving ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ucformat
import ucformat.torch
from tests.torch.running import torchrun
from tests.torch.runs import fill, folders, manager_of, names, restored, state_at
from ucformat.errors import Conflict, UcformatError, UsageError
from ucformat.torch import Manager, Saved, SaveHandle
from ucformat.torch.manager import manager as module

# --- when


def test_saves_are_due_at_steps_that_divide(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, every=3)
    answers = [
        (s, manager.should_save(s), manager.save(s, state_at(s)) is not None) for s in range(1, 8)
    ]
    assert (
        [s for s, due, saved in answers if due]
        == [s for s, due, saved in answers if saved]
        == [3, 6]
    )
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
    with pytest.raises(UsageError, match="is not positive"):
        Manager(tmp_path, every=every)


def test_a_step_of_another_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    with pytest.raises(Conflict, match="already holds"):
        fill(tmp_path, 5)
    fill(tmp_path, 5, overwrite=True)
    assert folders(tmp_path) == names(5)


def test_each_checkpoint_notes_what_it_was_resumed_from_and_what_was_given(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, run="r", config={"lr": 0.1})
    manager.save(1, state_at(1), metrics={"loss": 2.0})
    manager.save(2, state_at(2))
    resumed = manager_of(tmp_path)
    resumed.restore_latest(state_at(0))
    resumed.save(3, state_at(3))
    found = [ucformat.open(tmp_path / n).manifest for n in names(1, 2, 3)]
    assert [[(p.kind, p.url, p.id) for p in m.lineage] for m in found] == [
        [],
        [],
        [("resume", str(tmp_path / "step-00000002"), found[1].id)],
    ]
    assert (found[0].run, found[0].config, found[0].metrics, found[0].step) == (
        "r",
        {"lr": 0.1},
        {"loss": 2.0},
        1,
    )


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
        forked, into = os.pipe()
        child = os.fork()
        if not child:
            os.write(into, b"!")
            signal.pause()
            os._exit(7)
        assert os.read(forked, 1) == b"!"  # it has left `fork`, where what a signal does is changed
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        os.close(forked)
        os.close(into)
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
    with manager_of(
        tmp_path, every=2, keep=2, asynchronous=True, signals=(signal.SIGTERM,)
    ) as manager:
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
    manifests = [ucformat.open(tmp_path / n).manifest for n in names(6, 7)]
    assert [m.lineage for m in manifests] == [(), ()]  # nothing was resumed
    assert manifests[0].launch == manifests[1].launch is not None


def test_a_relative_place_is_below_the_folder_in_which_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):  # written by the same process, which began in the first
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        ucformat.torch.async_save(state_at(1), "ck").wait()
        assert ucformat.open(tmp_path / name / "ck").manifest is not None


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
    assert "the last checkpoint replaces it" in caplog.text
    assert restored(tmp_path)[0] == 2


@pytest.mark.usefixtures("fails")
def test_the_error_of_the_program_is_not_hidden(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def train() -> None:
        with manager_of(tmp_path, asynchronous=True) as manager:
            manager.save(2, state_at(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the disk is full" in caplog.text


# --- on several ranks


def test_two_ranks_agree(tmp_path: Path) -> None:
    program = Path(__file__).parent / "manager_program.py"
    log = torchrun(2, [str(program), str(tmp_path / "run")], tmp_path / "log.txt")
    assert log.count("rank 0 did all") == log.count("rank 1 did all") == 1
    assert log.count("is skipped") == 2  # twice damaged, each said by one rank


def test_a_restore_takes_no_group_of_its_own(tmp_path: Path) -> None:
    with Manager(tmp_path) as manager:
        for restore in (manager.restore_latest, partial(manager.load, url=tmp_path)):
            with pytest.raises(TypeError, match="multiple values for keyword argument 'group'"):
                restore({}, group=None)
