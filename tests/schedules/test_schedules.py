"""Commands at once over one store, in a fixed choice of all orders (`python -m tests.schedules` has the others)."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from tests.schedules.commands import COMMANDS, NEXT, Command
from tests.schedules.explore import faults, pair, single, three
from tests.schedules.schedule import Player, parse, text_of
from tests.schedules.world import CATALOGS, Call, World
from ucformat.errors import UcformatError
from ucformat.schema import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What was a fault once. Where one stops is said by the first such call that he makes, since their
#: numbers change.
MENDED = (
    "resume:[write weight/w0/zarr.json] gc",
    "gc:[write new/attempts/]-1 resume:[write objects.json] gc resume",
    "gc:[write new/attempts/] resume:[write objects.json] gc resume",
    "convert:[write weight/w0/zarr.json] gc+30",
    "register-copies gc",
    "register@3 gc@3",
    "hold overwrite",
    "virtual overwrite",
    "virtual materialize",
    "virtual@2 delete gc",
    "overwrite:[write p/manifest.json]-1 hold",
    "overwrite:[write p/manifest.json]-2 hold",
)


#: Parts of a training whose bases are taken away, and tiers of which others copy and remove steps.
TRAINED = (
    "deltas:60 delete gc deltas",
    "experts delete gc",
    "window:40 delete gc window",
    "cut deltas gc",
    "replay:90 delete gc replay",
    "launch:100 fill restore launch",
    "launch:115 !launch restore gc launch",
    "fill:20 launch fill",
    "launch:130 delete-step gc launch",
    "launch@1:12 launch:33 launch@1:26 launch launch@1",
    "deltas:1 thin",
    "experts:3 overwrite",
    "deltas:31 compact",
    "window:10 compact",
    "drop:27 register-copies:8 drop:5 !drop launch@1 register-copies drop",
)


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    with World() as world:
        yield Player(world)


_UNTIL = re.compile(r"(\w+):\[(\w+) (\S+)\](-\d)?")


def numbered(player: Player, schedule: str) -> str:
    """A schedule of `MENDED`, with the number of each call, or of one just before it, in place of what it does."""

    def number(found: re.Match[str]) -> str:
        actor, what, part, before = found.groups()
        calls = player.play(parse(actor)).trace
        at = next(n for n, call in enumerate(calls, 1) if call.what == what and part in call.key)
        return f"{actor}:{at + int(before or 0)}"

    return _UNTIL.sub(number, schedule)


@pytest.mark.front("hold overwrite", "register-copies gc", "virtual materialize")
@pytest.mark.parametrize("schedule", MENDED)
def test_what_was_mended_stays_so(player: Player, schedule: str) -> None:
    assert player.play(parse(numbered(player, schedule))).complaints == ()


@pytest.mark.front("deltas:60*", "launch:100*")
@pytest.mark.parametrize("schedule", TRAINED)
def test_parts_and_tiers_of_a_training(player: Player, schedule: str) -> None:
    assert player.play(parse(schedule)).complaints == ()


def test_one_of_two_twins_fails_later(player: Player) -> None:
    schedule = "copy:12 resume@1:5 copy@1-30:10 copy@1-30:11 resume@1 copy copy@1-30"
    assert player.play(parse(schedule)).complaints == ()


@pytest.mark.matrix
def test_a_removal_from_a_tier_that_was_interrupted_is_finished(player: Player) -> None:
    """By the next launch, which does not wait for gc."""
    old = "w/u/r/step-00000004/"
    calls = player.play(parse("launch")).trace
    at = next(
        n for n, c in enumerate(calls, 1) if (c.what, c.key) == ("delete", f"{old}{MANIFEST}")
    )
    player.run(parse(f"launch:{at} !launch"))
    assert any(key.startswith(old) for key in player.world.files)
    actor = player.world.actor("next", NEXT.work, CATALOGS[0], timedelta(0))
    actor.advance()
    assert actor.error is None
    assert not any(key.startswith(old) for key in player.world.files)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", range(1, 4))
def test_an_attempt_that_cannot_be_removed_is_continued(player: Player, stage: int) -> None:
    assert player.play(parse(f"virtual%flush{stage}")).complaints == ()


@pytest.mark.matrix
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_command_is_killed_before_each_call(player: Player, command: str) -> None:
    for played in single(player, command):
        assert played.complaints == (), played


@pytest.mark.matrix
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_faults_befall_a_command(player: Player, command: str) -> None:
    for played in faults(player, command, stride=7):
        assert played.complaints == (), played


@pytest.mark.matrix
@pytest.mark.parametrize("stride", [1, 2])
def test_a_fault_befalls_each_call(player: Player, stride: int) -> None:
    whole, *struck = faults(player, "hold", stride)
    texts = [text_of(p.steps) for p in struck]
    assert all(f"hold%eio{n}" in texts for n in range(1, len(whole.trace) + 1, stride))
    assert f"hold%eio{len(whole.trace) + 1}" not in texts
    assert any("%lost" in text for text in texts)


def test_what_ends_in_part_of_a_file_is_not_seen(player: Player) -> None:
    played = player.play(parse("save%short1"))
    assert played.struck
    assert not any(call.what == "write" and "/data/" in call.key for call in played.trace)


def test_a_command_that_hides_a_fault_is_found(player: Player) -> None:
    def work() -> None:
        with suppress(UcformatError):
            COMMANDS["hold"].work()

    with mock.patch.dict(COMMANDS, {"quiet": Command(work)}):
        complaints = player.play(parse("quiet%full")).complaints
    assert complaints == ("silent quiet: it succeeded, and did not do all",)


@pytest.mark.front("patched delete")
@pytest.mark.parametrize(
    "actors",
    [
        *("based delete", "delete based", "based thin", "based overwrite", "patch gc"),
        *("remnant based", "patched delete", "thin patched", "retain patched", "patch delete"),
        *("compact patched", "materialize read", "experts delete", "deltas thin", "window gc"),
        *("cut deltas", "remnant experts", "compact window", "overwrite deltas", "replay cut"),
    ],
)
def test_a_base_is_taken_away_while_it_is_needed(player: Player, actors: str) -> None:
    for played in pair(player, *actors.split()):
        assert played.complaints == (), played


@pytest.mark.matrix
@pytest.mark.parametrize(
    "actors", ["fill drop", "fill delete-step", "drop restore", "drop gc", "fill launch"]
)
def test_tiers_are_changed_by_two(player: Player, actors: str) -> None:
    for played in pair(player, *actors.split()):
        assert played.complaints == (), played


@pytest.mark.matrix
def test_three_at_once(player: Player) -> None:
    for seed in range(60):
        played = player.play(three(seed))
        assert played.complaints == (), played


def test_a_schedule_comes_out_the_same_again(player: Player) -> None:
    for text in (
        "resume:12 gc:20 !resume gc",
        "gc:3 gc%lost2 resume%eio gc",
        "copy:9 overwrite:30 register@2:4 hold copy",
    ):
        one, two = player.play(parse(text)), player.play(parse(text))
        assert text_of(one.steps) == text
        assert [*map(str, one.trace)] == [*map(str, two.trace)]
        assert [c.state for c in one.trace] == [c.state for c in two.trace]


@pytest.mark.matrix
def test_a_pair_finds_what_its_schedules_have_in_common_once(player: Player) -> None:
    played = [*pair(player, "hold", "delete")]
    texts = [text_of(p.steps) for p in played]
    assert len(texts) == len({*texts})
    assert {len(p.steps) for p in played} >= {2, 3}
    assert any("!hold" in text for text in texts)
    assert [p for p in played if p.complaints] == []


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (("read", "a/x"), ("read", "a/x"), False),
        (("read", "a/x"), ("write", "a/x"), True),
        (("read", "a/x"), ("write", "a/y"), False),
        (("list", "a"), ("delete", "a/b/x"), True),
        (("list", "a"), ("delete", "ab/x"), False),
        (("list", "a"), ("list", "a"), False),
    ],
)
def test_calls_that_meet(one: tuple[str, str], other: tuple[str, str], meet: bool) -> None:
    a, b = Call("", *one), Call("", *other)
    assert (a.meets(b), b.meets(a)) == (meet, meet)
