"""Which schedules are played: of two actors all of at most two switches and one kill, of three as many as are wanted.

Of two actors A and B, A makes i calls, then B makes j, then A ends, then B does; then the same with
the one or the other killed before each of its calls. Left out is what is known to come out as
another schedule does: one in which a call only changed places with calls that it does not meet
(other files, or both only read), a kill before a call that changes nothing, which is as good as one
before the next that does, and a kill in a state of everything in which the same actor was killed
before. Of faults nothing is left out: each kind of them befalls each command at each call.
"""

from __future__ import annotations

import random
from itertools import count, groupby
from typing import TYPE_CHECKING

from tests.schedules.commands import COMMANDS
from tests.schedules.schedule import Step
from tests.schedules.world import FAULTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.schedules.schedule import Played, Player

__all__ = ["faults", "pair", "single", "three"]

Steps = tuple[Step, ...]


def single(player: Player, name: str) -> Iterator[Played]:
    """One actor, whole, and killed before each of its calls that writes."""
    whole = player.play((Step(name),))
    yield whole
    yield from _killed(player, whole, set())


def faults(player: Player, name: str, stride: int = 1) -> Iterator[Played]:
    """One actor, whole, and with each kind of fault at each call that it can befall, or each so many-th."""
    yield player.play((Step(name),))
    for kind in FAULTS:
        for number in count(1, stride):
            played = player.play((Step(name, number, fault=kind),))
            if not played.struck:  # it makes no call of this number
                break
            yield played


def pair(player: Player, a: str, b: str) -> Iterator[Played]:
    """Two actors, the first of which begins, is interrupted by the second, and goes on."""
    seen: set[object] = set()
    alone = player.play((Step(a), Step(b)))
    yield alone
    yield from _killed(player, alone, seen)
    mine = [c for c in alone.trace if c.actor == a]
    for i in range(1, len(mine)):
        after = player.play((Step(a, i), Step(b)))  # to its end, then the rest of the first
        theirs = [c for c in after.trace if c.actor == b]
        if not any(mine[i - 1].meets(c) for c in theirs):
            continue  # as where the first is interrupted one call earlier
        yield after
        yield from _killed(player, after, seen)
        rest = after.trace[i + len(theirs) :]
        for j in range(len(theirs) - 1, 0, -1):
            if not any(theirs[j].meets(c) for c in rest):
                continue  # as with one call more
            done = player.play((Step(a, i), Step(b, j), Step(a), Step(b)))
            rest = tuple(c for c in done.trace[i + j :] if c.actor == a)
            yield done
            yield from _killed(player, done, seen)


def _killed(player: Player, played: Played, seen: set[object]) -> Iterator[Played]:
    """The same schedule with one actor killed, before each of its calls that changes something.

    `seen` are those known: who is killed, in which state of the world and of the other one.
    """
    for at, call in enumerate(played.trace):
        if call.changes and (call.actor, call.state) not in seen:
            seen.add((call.actor, call.state))
            yield player.play(_with_kill(played, at))


def _with_kill(played: Played, at: int) -> Steps:
    """The steps of a schedule up to a call, whose actor is killed there; then all others run to their ends."""
    steps = [
        Step(actor, len([*calls]))
        for actor, calls in groupby(call.actor for call in played.trace[:at])
    ]
    dead = played.trace[at].actor
    others = dict.fromkeys(s.actor for s in played.steps if s.actor != dead)
    return (*steps, Step(dead, kill=True), *map(Step, others))


def three(seed: int) -> Steps:
    """A schedule of three actors by a seed: who they are, how wrong their clocks are, who is killed, all switches."""
    chance = random.Random(seed)
    names: list[str] = []
    while len(names) < 3:
        name = chance.choice([*COMMANDS])
        name += chance.choice(("", "", "@1", "@2")) + chance.choice(("", "", "", "+30", "-30"))
        if name not in names:
            names.append(name)
    steps: list[Step] = []
    for _ in range(chance.randint(1, 6)):
        steps.append(Step(chance.choice(names), int(chance.expovariate(1 / 15)) + 1))
    if chance.random() < 0.5:
        steps.append(Step(chance.choice(names), kill=True))
    chance.shuffle(names)
    return (*steps, *map(Step, names))
