"""When increments are based on what, and when anchors are due: the policies alone, on made-up histories."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import UsageError
from ucformat.torch.manager.increments import Increments, choose_base, is_anchor_cheaper
from ucformat.torch.manager.steps import RunStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FULL = 1000


def run(
    increments: Increments, saves: int, nbytes: Callable[[int], int]
) -> tuple[list[RunStep], list[RunStep | None]]:
    """What a run saves, the newest first, and the base of each save, the oldest first."""
    saved: list[RunStep] = []
    bases: list[RunStep | None] = []
    for step in range(saves):
        base = choose_base(increments, step, saved)
        bases.append(base)
        made = RunStep(f"/run/{step}", step, f"{step:032x}", datetime.now(UTC), FULL)
        written = FULL if base is None else nbytes(step - base.step)
        of = () if base is None else (base.id,)
        saved.insert(0, replace(made, bases=of, written=written))
    return saved, bases


def steps(bases: Sequence[RunStep | None]) -> list[int | None]:
    return [None if base is None else base.step for base in bases]


def test_a_chain_is_as_long_as_it_may_be() -> None:
    _, bases = run(Increments(max_chain=3), 9, lambda _: 10)
    assert steps(bases) == [None, 0, 1, 2, None, 4, 5, 6, None]


def test_one_shot_has_one_anchor() -> None:
    _, bases = run(Increments(policy="one-shot"), 5, lambda distance: 10 * distance)
    assert steps(bases) == [None, 0, 0, 0, 0]


def test_an_anchor_is_due_after_steps_and_after_bytes() -> None:
    _, bases = run(Increments(anchor_every=3), 7, lambda _: 10)
    assert steps(bases) == [None, 0, 1, None, 3, 4, None]
    _, bases = run(Increments(anchor_bytes=25), 6, lambda _: 10)
    assert steps(bases) == [None, 0, 1, 2, None, 4]


def test_intermittent_saves_an_anchor_when_that_is_cheaper() -> None:
    # increments of 300, 600, … bytes: 1000 + 300 <= 2 * 600 is false, 1000 + 300 + 600 <= 3 * 900 true
    _, bases = run(Increments(policy="intermittent"), 6, lambda distance: 300 * distance)
    assert steps(bases) == [None, 0, 0, 0, None, 4]
    assert is_anchor_cheaper(1000, [300, 600, 900])
    assert not is_anchor_cheaper(1000, [300, 600])
    assert not is_anchor_cheaper(1000, [])


@given(st.integers(1, 900), st.integers(2, 40))
def test_intermittent_writes_no_more_than_one_shot_and_whole_checkpoints(
    growth: int, saves: int
) -> None:
    def size(distance: int) -> int:
        return min(FULL, growth * distance)

    intermittent, one_shot = (
        sum(s.written for s in run(Increments(policy=policy), saves, size)[0])
        for policy in ("intermittent", "one-shot")
    )
    assert intermittent <= one_shot + FULL  # an anchor too many at the end
    assert intermittent <= saves * FULL


def test_bases_of_other_runs_do_not_count() -> None:
    other = "f" * 32
    step = RunStep("/run/0", 0, "0" * 32, datetime.now(UTC), FULL, bases=(other,), written=10)
    assert choose_base(Increments(max_chain=1), 1, [step]) is step


@pytest.mark.parametrize(
    "arguments",
    [{"max_chain": 0}, {"anchor_every": 0}, {"anchor_bytes": -1}, {"policy": "sometimes"}],
)
def test_impossible_increments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Increments(**arguments)
