"""The last save after a signal, within the time until the process is killed."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.torch.ranks import KILLED, Ranks
from ucformat.errors import UsageError
from ucformat.torch import Manager
from ucformat.torch.manager.preemption import Notice

if TYPE_CHECKING:
    from pathlib import Path

SLACK = 20  # seconds, on a machine that does other things; without a bound it were 600
RANKS = Ranks("tests.torch.preemption_program")


def test_signals_at_random_instants(tmp_path: Path) -> None:
    assert RANKS.run("at_random_instants", 2, tmp_path, rounds=5, seed=1) == [[], []]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(2, 6))
def test_signals_at_very_many_random_instants(tmp_path: Path, seed: int) -> None:
    assert RANKS.run("at_random_instants", 2, tmp_path, rounds=25, seed=seed) == [[], []]


@pytest.mark.parametrize(("how", "asynchronous"), [("busy", True), ("killed", False)])
def test_nothing_waits_for_a_rank_that_does_not_come(
    tmp_path: Path, how: str, *, asynchronous: bool
) -> None:
    first, second = RANKS.run(
        "with_a_rank_that_does_not_come", 2, tmp_path, how=how, asynchronous=asynchronous
    )
    assert (second == KILLED) == (how == "killed")
    told = "3 s after the signal" if how == "busy" else "rank 1 died"
    assert told in first.pop("failure")
    assert first.pop("took") < 3 + SLACK
    assert first == {"committed": ["step-00000001"]}


def test_the_last_save_replaces_one_whose_writer_hangs(tmp_path: Path) -> None:
    for given in RANKS.run("with_a_writer_that_hangs", 2, tmp_path):
        committed = ["step-00000001", "step-00000003"]
        assert given == {"failure": "", "in time": True, "committed": committed}


def test_slower_tiers_are_filled_as_far_as_time_permits(tmp_path: Path) -> None:
    for given in RANKS.run("with_a_slow_tier", 2, tmp_path):
        assert given.pop("took") < 4 + SLACK
        assert given == {"memory": ["step-00000001", "step-00000002"], "run": []}


def test_the_time_begins_with_the_first_signal() -> None:
    expired: list[float] = []
    notice = Notice(0.2, lambda: expired.append(time.monotonic()))
    assert notice.left == math.inf
    begun = time.monotonic()
    notice.receive()
    notice.receive(0.0)  # it has begun
    while not expired and time.monotonic() < begun + 60:
        time.sleep(0.01)
    assert expired[0] - begun >= 0.2
    notice.close()
    other = Notice(0.01, lambda: expired.append(0.0))
    other.close()
    other.close()
    assert len(expired) == 1


def test_a_manager_without_signals_refuses(tmp_path: Path) -> None:
    with (
        Manager(tmp_path, signals=()) as manager,
        pytest.raises(UsageError, match="waits for no signal"),
    ):
        manager.on_preemption()
    with Manager(tmp_path) as manager:
        with pytest.raises(UsageError, match="not positive"):
            manager.on_preemption(0)
        manager.on_preemption(50)
        manager.on_preemption(60)  # the last one counts
        os.kill(os.getpid(), signal.SIGTERM)
        manager.save(1, {"step": 1})
        assert manager.stopping
