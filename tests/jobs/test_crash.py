"""Real processes, real `kill -9`: what was committed stays whole, what was not is not seen."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import Arrays, random_array, same
from tests.jobs.forks import Forks
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import Conflict, NotFound

if TYPE_CHECKING:
    from pathlib import Path

INSTANTS = 50
WORK = """
import ucformat
from ucformat.errors import Conflict
ucformat.convert, ucformat.open
def work(src, dst):
    try:
        return "won " + ucformat.convert(src, dst, chunk_bytes=4096, shard_bytes=1 << 18).manifest.id
    except Conflict as error:
        return f"conflict {error.exit_code}"
"""


def arrays(seed: int, scale: int = 1) -> Arrays:
    shapes = {
        "embed": (211, 30),
        "a": (300 * scale, 401),
        "b": (64, 64),
        "c": (7,),
        "d": (128 * scale, 257),
    }
    return {
        (n, s): random_array(shape, "float32", seed + 100 * i + j)
        for i, (n, shape) in enumerate(shapes.items())
        for j, s in enumerate(FLAT)
    }


@pytest.mark.front("0")
@pytest.mark.parametrize("part", range(5))
def test_kill_9_at_any_instant(part: int, tmp_path: Path) -> None:
    truth = arrays(part, scale=8)
    source = write_zero3(tmp_path / "src", truth, ranks=3)
    chance = random.Random(part)
    seen = {"nothing": 0, "checkpoint": 0}
    with Forks(WORK) as forks:
        assert forks.run(source, tmp_path / "measured")[1][0] == "won"
        whole = forks.seconds
        for round_ in range(INSTANTS // 5):
            target = tmp_path / f"dst{round_}"
            forks.run(source, target, kill_after=chance.uniform(0, 1.1 * whole))
            try:
                ck = ucformat.open(target)
            except NotFound:  # nothing there yet, or nothing that is committed
                seen["nothing"] += 1
                ck = ucformat.convert(source, target, chunk_bytes=4096, shard_bytes=1 << 18)
            else:
                seen["checkpoint"] += 1
                with pytest.raises(
                    Conflict, match="nothing is left to do"
                ):  # and clears away what the killed one left
                    ucformat.convert(source, target, chunk_bytes=4096, shard_bytes=1 << 18)
            ucformat.verify(ck).raise_if_damaged()
            for key, a in truth.items():
                assert same(ck[key][...], a), key
            assert list(target.rglob(".ucf-*.tmp")) == []
    assert seen["nothing"] > 0


@pytest.mark.matrix
def test_two_processes_converting_different_sources_to_one_place(tmp_path: Path) -> None:
    truths = [arrays(seed) for seed in (1, 2)]
    sources = [write_zero3(tmp_path / f"src{k}", truth, ranks=2) for k, truth in enumerate(truths)]
    with Forks(WORK) as one, Forks(WORK) as two:
        workers = [one, two]
        for round_ in range(50):
            target = tmp_path / f"dst{round_}"
            order = [0, 1] if round_ % 2 else [1, 0]
            for k in order:
                workers[k].begin(sources[k], target)
            said = [w.end()[1] for w in workers]
            assert sorted(s[0] for s in said) == ["conflict", "won"], said
            winner = 0 if said[0][0] == "won" else 1
            assert said[1 - winner][1] == "4"
            ck = ucformat.open(target)
            assert ck.manifest.id == said[winner][1]
            assert same(ck["b", "exp_avg"][...], truths[winner]["b", "exp_avg"])
            if round_ % 10 == 0:
                ucformat.verify(ck).raise_if_damaged()
            assert [p.name for p in (target / "data").iterdir()] == [ck.manifest.attempt]


def test_two_processes_running_the_same_command_both_end_well(tmp_path: Path) -> None:
    truth = arrays(7, scale=4)
    source = write_zero3(tmp_path / "src", truth, ranks=2)
    with Forks(WORK) as one, Forks(WORK) as two:
        workers = [one, two]
        for round_ in range(10):
            target = tmp_path / f"dst{round_}"
            for w in workers:
                w.begin(source, target)
            said = [w.end()[1] for w in workers]
            assert "won" in {s[0] for s in said}
            ucformat.verify(target).raise_if_damaged()
            assert same(ucformat.open(target)["a", "master"][...], truth["a", "master"])


def test_sixty_four_ranks_read_by_sixty_four_others_once_in_all(tmp_path: Path) -> None:
    truth = arrays(3)
    ck = ucformat.open(write_zero3(tmp_path / "src", truth, ranks=64))
    rule = {"match": "*", "place": [{"shard": 0, "over": "dp"}]}
    step = {"match": "*", "states": ["step"], "place": [{"owner": 0, "over": "dp"}]}
    layout = ucformat.Layout(mesh={"dp": 64}, rules=[step, rule])
    total = sum(i.nbytes for i in ck.tensors.values())
    read = 0
    for rank in range(64):
        plan = ck.plan(layout, rank)
        read += plan.bytes_read
        if rank in (0, 17, 63):
            found = plan.execute()
            a = truth["a", "exp_avg"]
            rows = -(-a.shape[0] // 64)
            assert same(found["a", "exp_avg"], a[rank * rows : (rank + 1) * rows])
    assert read <= 1.02 * total
