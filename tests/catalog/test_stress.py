"""Many processes work on one catalog at once, and some are killed: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.catalog.manifests import manifest
from tests.catalog.stress import POSTS, PROCESSES, Task, post, work
from tests.catalog.stress_checks import Notes, check
from tests.patience import PATIENCE, wait_until
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

WORKERS = 16
FEW, TURNS, MANY = 5, 25, 400  # of each worker

lengths = pytest.mark.parametrize("turns", [FEW, TURNS, MANY])


@pytest.mark.front(f"sqlite-{FEW}")
@lengths
def test_many_that_work_at_once_lose_nothing(database_url: str, tmp_path: Path, turns: int) -> None:
    tasks = _tasks(database_url, tmp_path, turns)
    processes = _start(tasks)
    _end(processes)
    notes = Notes([t.notes for t in tasks])
    assert [p.exitcode for p in processes] == [0] * WORKERS, notes.errors[:1]
    assert not notes.open
    _check(database_url, notes)


@pytest.mark.matrix
@lengths
def test_many_of_whom_half_are_killed_lose_nothing(
    database_url: str, tmp_path: Path, turns: int
) -> None:
    rng = random.Random(7)
    half = WORKERS // 2
    # One half of those that die kill themselves within a transaction, the other is killed wherever
    # it is.
    tasks = _tasks(database_url, tmp_path, turns)
    when = [round(rng.uniform(0.2, 0.8) * turns) for _ in range(half)]
    tasks[:half] = [
        replace(t, turns=None, dies=w if t.number < half // 2 else None)
        for t, w in zip(tasks[:half], when, strict=True)
    ]
    processes = _start(tasks)
    for w, i in sorted((w, i) for i, w in enumerate(when) if i >= half // 2):
        wait_until(lambda t=tasks[i], w=w: t.notes.read_bytes().count(b"\n") > w)  # type: ignore[misc]
        os.kill(processes[i].pid or 0, signal.SIGKILL)
    _end(processes)
    notes = Notes([t.notes for t in tasks])
    assert [p.exitcode for p in processes] == [-signal.SIGKILL] * half + [0] * half, notes.errors[
        :1
    ]
    _check(database_url, notes)


def _tasks(url: str, folder: Path, turns: int) -> list[Task]:
    with Catalog(url) as catalog:
        for i in range(POSTS):
            catalog.record(post(i), f"/data/posts/{i}")
    return [Task(url, i, WORKERS, turns, folder / f"{i}.notes") for i in range(WORKERS)]


def _start(tasks: list[Task]) -> list[ForkServerProcess]:
    """The workers, all of them at work."""
    barrier = PROCESSES.Barrier(len(tasks) + 1)
    processes = [PROCESSES.Process(target=work, args=(t, barrier), daemon=True) for t in tasks]
    for p in processes:
        p.start()
    barrier.wait(PATIENCE)
    return processes


def _end(processes: list[ForkServerProcess]) -> None:
    try:
        wait_until(lambda: not any(p.is_alive() for p in processes))
    finally:
        for p in processes:
            p.kill()


def _check(url: str, notes: Notes) -> None:
    """The database is sound, and a fresh catalog reads and writes it."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    with Catalog(url) as catalog:
        check(catalog, notes)
        assert catalog.record(manifest("ab" * 16), "/data/after").tags == ()
        catalog.tag("abababab", "written")
        assert catalog.find("tag = 'written'")[0].url == "/data/after"
