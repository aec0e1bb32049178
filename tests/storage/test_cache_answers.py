"""How long a listing waits for other processes that ask, by a clock that only moves while it waits."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from ucformat.errors import PermissionDenied
from ucformat.storage.base import Info
from ucformat.storage.cache import store as answers
from ucformat.storage.cache.store import Answers

SECOND = 1_000_000_000
START = 100 * SECOND


class Clock:
    def __init__(self) -> None:
        self.now = START

    def monotonic(self) -> float:
        return self.now / SECOND

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * SECOND)


class Folder:
    """A folder without any answers: another process asked `ago`, is there for some seconds, and may ask on and on."""

    def __init__(self, clock: Clock, ago: int | None, there: float, *, insists: bool) -> None:
        self.clock, self.gone, self.insists = clock, START + round(there * SECOND), insists
        self.asked = (0, 0) if ago is None else (START - ago, os.getpid() + 1)

    def want(self, _: object, now: int) -> None:
        self.asked = now, os.getpid()

    def wanted(self, _: object) -> tuple[int, int]:
        return (self.clock.now, os.getpid() + 1) if self.insists else self.asked

    def has_others(self, *_: object) -> bool:
        return self.clock.now < self.gone

    def lock(self, *_: object) -> None: ...
    def read(self, _: object) -> None: ...
    def write(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("patience", "ago", "there", "insists", "waited"),
    [
        (0.0, None, 0.0, False, 0.0),
        (0.0, 0, 0.0, False, 0.2),
        (0.0, 5 * SECOND - 1, 0.0, False, 0.2),
        (0.0, 5 * SECOND, 0.0, False, 0.0),
        (0.0, 0, 9.0, False, 0.2),
        (0.0, None, 0.0, True, 1.0),
        (2.0, None, 0.0, False, 0.0),
        (2.0, 0, 0.0, False, 0.0),
        (2.0, 0, 0.5, False, 0.5),
        (2.0, 0, 9.0, True, 2.0),
    ],
)
def test_a_listing_waits_for_those_who_will_ask_the_same(
    patience: float,
    ago: int | None,
    there: float,
    insists: bool,
    waited: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, file = Clock(), Info("a", 3, "v")
    monkeypatch.setattr(answers, "time", clock)
    store: Any = SimpleNamespace(identity="s3://bucket", list=lambda: iter([file]))
    folder: Any = Folder(clock, ago, there, insists=insists)
    assert Answers(store, folder).listing(patience) == {"a": file}
    assert (clock.now - START) / SECOND == waited


def test_a_place_that_cannot_be_listed_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MAX_FILES", 2)
    asked: list[int | None] = []

    def place(count: int | None) -> Answers:
        def listing() -> Any:
            asked.append(count)
            if count is None:
                raise PermissionDenied("no list")
            return (Info(f"{n}", 1, "") for n in range(count))

        store: Any = SimpleNamespace(identity="s3://bucket", list=listing)
        folder: Any = Folder(Clock(), None, 0.0, insists=False)
        return Answers(store, folder)

    for count, found, times in ((2, {"0", "1"}, 2), (3, None, 1), (None, None, 1)):
        one = place(count)
        for _ in range(2):
            listed = one.listing(0)
            assert (listed and set(listed)) == found
        assert asked.count(count) == times
