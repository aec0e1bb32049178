"""Two processes that commit to one url at once: exactly one wins, whatever becomes of the answers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.fakes import same
from tests.storage.fault_runs import is_whole, source, truth
from tests.storage.proxy import fine

if TYPE_CHECKING:
    from tests.storage.conftest import Faulty
    from tests.storage.proxy import Fault, Request

ROOT = Path(__file__).parents[2]
RUNS = [
    pytest.param(8, ("fine", "losing"), id="few"),
    pytest.param(50, ("fine",), id="fine", marks=pytest.mark.matrix),
    pytest.param(50, ("losing",), id="losing", marks=pytest.mark.matrix),
]


class Racer:
    """A process of `racer.py`."""

    def __init__(self, stack: ExitStack, *words: str) -> None:
        command = [sys.executable, "-m", "tests.storage.racer", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCP_DEADLINE": "30"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self._process = stack.enter_context(process)
        stack.callback(process.kill)

    def tell(self, *words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()


def losing(seed: int) -> Any:
    """Loses half of the answers to commits, and some of these requests before they are carried out."""
    chance = random.Random(seed)
    faults: list[Fault | None] = ["lost", "lied", "reset", None, None, None]

    def choose(request: Request) -> Fault | None:
        return (
            chance.choice(faults)
            if request.conditional and request.key.endswith("manifest.json")
            else None
        )

    return choose


def commits(request: Request) -> bool:
    return request.method == "PUT" and request.key.endswith("manifest.json")


def test_a_commit_that_only_looks_first_is_caught(faulty: Faulty, tmp_path: Path) -> None:
    """The races below are real: two that look, and then put, both take themselves for the winner."""
    place = faulty.bucket.place()
    with ExitStack() as stack:
        racers = [Racer(stack, "careless") for _ in range(2)]
        for racer, seed in zip(racers, range(2), strict=True):
            racer.tell(source(tmp_path, seed), place, "new")
        assert [racer.hear() for racer in racers] == [["ready"], ["ready"]]
        faulty.proxy.let_meet(2, commits)
        for racer in racers:
            racer.tell("go")
        assert [racer.hear()[0] for racer in racers] == ["won", "won"]


@pytest.mark.matrix
@pytest.mark.parametrize(("rounds", "faults"), RUNS)
def test_exactly_one_of_two_processes_wins(
    rounds: int, faults: tuple[str, ...], faulty: Faulty, tmp_path: Path
) -> None:
    sources = [source(tmp_path, seed) for seed in range(2)]
    wins, lost = [0, 0], 0
    with ExitStack() as stack:
        racers = [Racer(stack) for _ in sources]
        for round_ in range(rounds):
            place = faulty.bucket.place()
            replaced = None
            again = round_ % 4 > 1  # both replace what is committed
            if again:
                replaced = ucformat.convert(sources[0], place, chunk_bytes=64)
            for racer, src in zip(racers, sources, strict=True):
                racer.tell(src, place, "overwrite" if again else "new")
            assert [racer.hear() for racer in racers] == [["ready"], ["ready"]]
            faulty.proxy.done.clear()
            if faults[round_ % len(faults)] == "losing":
                faulty.proxy.choose = losing(round_)
            if (
                round_ % 4 < 3
            ):  # both commits are under way; else one may be over when the other begins
                faulty.proxy.let_meet(2, commits)
            for racer in racers if round_ % 2 else reversed(racers):
                racer.tell("go")
            said = [racer.hear() for racer in racers]
            faulty.proxy.choose = fine
            lost += faulty.proxy.done["lost"] + faulty.proxy.done["lied"]
            assert sorted(words[0] for words in said) == ["conflict", "won"], said
            winner = 0 if said[0][0] == "won" else 1
            wins[winner] += 1
            assert said[1 - winner][1] == "4"
            ck = ucformat.open(place)
            assert ck.id == said[winner][1]
            assert replaced is None or ck.id != replaced.id
            if not round_ % 3:
                assert is_whole(place, truth(winner))
            assert same(ck["b", "master"][...], truth(winner)["b", "master"])
            root = place.removeprefix(f"s3://{faulty.bucket.name}/")
            folders = {
                key.removeprefix(f"{root}/").split("/")[1]
                for key in faulty.bucket.keys(f"{root}/data/")
            }
            assert folders == {ck.manifest.attempt}  # the other's files are gone
    assert sum(wins) == rounds
    assert (lost > 0) == ("losing" in faults)
