"""Many processes work on one catalog at once, and some are killed: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from tests.catalog.manifests import manifest
from tests.catalog.stress import POSTS, PROCESSES, Task, post, work
from tests.catalog.stress_checks import Notes, check
from ucformat.catalog.catalog import Catalog

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

WORKERS = 16
SECONDS = float(os.environ.get("UCP_STRESS_SECONDS", "4"))
LONG = 60.0
_PATIENCE = 120  # seconds after which one that should have come to an end hangs

durations = pytest.mark.parametrize("seconds", [SECONDS, pytest.param(LONG, marks=pytest.mark.matrix)])


@durations
def test_many_that_work_at_once_lose_nothing(database_url: str, tmp_path: Path, seconds: float) -> None:
    tasks = _tasks(database_url, tmp_path, seconds)
    processes = _start(tasks)
    _end(processes)
    notes = Notes([t.notes for t in tasks])
    assert [p.exitcode for p in processes] == [0] * WORKERS, notes.errors[:1]
    assert not notes.open
    _check(database_url, notes)


@durations
def test_many_of_whom_half_are_killed_lose_nothing(database_url: str, tmp_path: Path, seconds: float) -> None:
    rng = random.Random(7)
    half = WORKERS // 2
    # One half of those that die kill themselves within a transaction, the other is killed wherever it is.
    dies = {i: rng.uniform(0.2, 0.8) * seconds for i in range(half // 2)}
    tasks = _tasks(database_url, tmp_path, seconds, dies)
    processes = _start(tasks)
    begun = time.monotonic()
    for at, i in sorted((rng.uniform(0.2, 0.8) * seconds, i) for i in range(half // 2, half)):
        time.sleep(max(0.0, begun + at - time.monotonic()))
        os.kill(processes[i].pid or 0, signal.SIGKILL)
    _end(processes)
    notes = Notes([t.notes for t in tasks])
    assert [p.exitcode for p in processes] == [-signal.SIGKILL] * half + [0] * half, notes.errors[:1]
    _check(database_url, notes)


def _tasks(url: str, folder: Path, seconds: float, dies: dict[int, float] | None = None) -> list[Task]:
    with Catalog(url) as catalog:
        for i in range(POSTS):
            catalog.record(post(i), f"/data/posts/{i}")
    return [Task(url, i, WORKERS, seconds, folder / f"{i}.notes", (dies or {}).get(i)) for i in range(WORKERS)]


def _start(tasks: list[Task]) -> list[ForkServerProcess]:
    """The workers, all of them at work."""
    barrier = PROCESSES.Barrier(len(tasks) + 1)
    processes = [PROCESSES.Process(target=work, args=(t, barrier), daemon=True) for t in tasks]
    for p in processes:
        p.start()
    barrier.wait(_PATIENCE)
    return processes


def _end(processes: list[ForkServerProcess]) -> None:
    limit = time.monotonic() + LONG + _PATIENCE
    for p in processes:
        p.join(max(0.0, limit - time.monotonic()))
    hanging = [p for p in processes if p.is_alive()]
    for p in hanging:
        p.kill()
    assert not hanging


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
    assert max(n["seconds"] for n in notes.did) < _PATIENCE / 2
