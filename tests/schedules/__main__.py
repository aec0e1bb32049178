"""`python -m tests.schedules`: plays one schedule, all of pairs of actors, or many of three; see the package's text."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tests.same_hashes import with_same_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.schedules.schedule import Played, Player

_BLOCK = 500  # schedules of three actors that are one unit of work


def main() -> int:
    """Do what the command line says; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.schedules")
    commands = parser.add_subparsers(dest="command", required=True)
    play = commands.add_parser("play", help="play a schedule: 'resume:12 gc:7 !resume gc'")
    play.add_argument("schedule")
    pairs = commands.add_parser("pairs", help="all of one actor, and of pairs: of these, or of all")
    pairs.add_argument("actors", nargs="*", metavar="'A B'")
    three = commands.add_parser("three", help="schedules of three actors, by seed")
    three.add_argument("first", type=int)
    three.add_argument("count", type=int)
    faults = commands.add_parser(
        "faults", help="each fault at each call of these commands, or of all"
    )
    faults.add_argument("actors", nargs="*", metavar="COMMAND")
    for sub in (pairs, three, faults):
        sub.add_argument(
            "--out",
            type=Path,
            help="where to note what was done; what is noted there is not done again",
        )
        sub.add_argument(
            "--part", default="1/1", metavar="K/N", help="this part of so many, each with an --out"
        )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        os.environ |= {
            "UCP_CATALOG": "none",
            "XDG_DATA_HOME": data,
        }  # the user's own are none of our business
        from tests.schedules.schedule import Player
        from tests.schedules.world import World

        with World() as world:
            player = Player(world)
            gc.freeze()  # what lasts as long as the process need not be looked through again and again
            return _do(given, player)


def _do(given: argparse.Namespace, player: Player) -> int:
    from tests.schedules.commands import COMMANDS
    from tests.schedules.explore import faults, pair, single, three
    from tests.schedules.schedule import parse

    if given.command == "play":
        played = player.play(parse(given.schedule))
        click.echo("\n".join(map(str, (*played.trace, played))))
        return bool(played.complaints)
    units: dict[str, Callable[[], Iterable[Played]]] = {}
    if given.command == "pairs":
        for names in given.actors or _all_pairs():
            words = names.split()
            act = pair if len(words) == 2 else single
            units[names] = lambda act=act, words=words: act(player, *words)  # type: ignore[misc]
    elif given.command == "faults":
        for name in given.actors or COMMANDS:
            units[f"faults {name}"] = lambda name=name: faults(player, name)  # type: ignore[misc]
    else:
        for first in range(given.first, given.first + given.count, _BLOCK):
            seeds = range(first, min(first + _BLOCK, given.first + given.count))
            units[f"three {seeds.start} {len(seeds)}"] = lambda seeds=seeds: (
                player.play(three(s)) for s in seeds
            )  # type: ignore[misc]
    k, n = map(int, given.part.split("/"))
    return _run(
        {name: unit for at, (name, unit) in enumerate(units.items(), 1) if at % n == k % n},
        player,
        given.out,
    )


def _all_pairs() -> Iterator[str]:
    from tests.schedules.commands import COMMANDS, KEEPERS

    yield from COMMANDS
    for a in COMMANDS:
        for b in COMMANDS:
            yield f"{a} {b}" if a != b else f"{a} {b}@1"
            if a in KEEPERS and b in KEEPERS:
                yield f"{a} {b}@2"


def _run(units: dict[str, Callable[[], Iterable[Played]]], player: Player, out: Path | None) -> int:
    """Do what is not noted as done, note it, and print the counts and the shortest schedule of each complaint."""
    done: dict[str, Any] = {}
    if out is not None and out.exists():
        done = {d["unit"]: d for d in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    for name, unit in units.items():
        if name in done:
            continue
        begun, played, states = time.monotonic(), player.played, player.states
        found: dict[str, str] = {}
        for one in unit():
            for complaint in one.complaints:
                kind = complaint.partition(": ")[0]
                if kind not in found or len(one.steps) < len(found[kind].split("|")[0].split()):
                    found[kind] = f"{' '.join(map(str, one.steps))} | {complaint.splitlines()[0]}"
        done[name] = {
            "unit": name,
            "schedules": player.played - played,
            "states": player.states - states,
            "seconds": round(time.monotonic() - begun, 1),
            "found": found,
        }
        click.echo(json.dumps(done[name]))
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(done[name])}\n")
    mine = [done[name] for name in units]
    schedules, seconds = sum(d["schedules"] for d in mine), sum(d["seconds"] for d in mine)
    click.echo(
        f"{schedules:,} schedules, {sum(d['states'] for d in mine):,} ends, {seconds:,.0f} s"
    )
    return any(d["found"] for d in mine)


if __name__ == "__main__":
    with_same_hashes("tests.schedules")  # or some calls come in another order
    sys.exit(main())
