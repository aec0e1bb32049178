"""Groups of many processes: few connections and requests for each, and one that dies is named by all others."""

from __future__ import annotations

import json
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.forkserver import Program
from tests.forkserver import run as forked
from tests.patience import PATIENCE
from tests.torch.many_ranks import LAYOUTS, whole
from tests.torch.running import MODULES, environment
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.group import FAN_OUT, parents_of, ranks_of_hosts

if TYPE_CHECKING:
    from pathlib import Path


def run(folder: Path, scenario: str, size: int, lost: int = -1, **arguments: Any) -> list[Any]:
    """What each rank gives, other than the lost one."""
    argv = ["-m", "tests.torch.scale_program", scenario, str(folder), json.dumps(arguments)]
    logs = [str(folder / f"rank-{rank}.log") for rank in range(size)]
    codes = forked(
        sys.executable,
        MODULES,
        Program(argv, environment(), logs, ranks=size, together=False),
        PATIENCE,
    )
    for rank, code in enumerate(codes):
        if rank != lost:
            assert code == 0, (folder / f"rank-{rank}.log").read_text()[-4000:]
    return [
        json.loads((folder / f"rank-{rank}.json").read_text())
        for rank in range(size)
        if rank != lost
    ]


@pytest.mark.front("2")
@pytest.mark.parametrize("size", [2, 9, 64])
def test_collectives(tmp_path: Path, size: int) -> None:
    found = run(tmp_path, "collectives", size)
    for rank, out in enumerate(found):
        assert all(out[name] for name in ("everybody", "mine", "joined", "bulk"))
        assert (out["top"], out["last"]) == (f"of {size - 1}", size - 1)
        assert out["sockets"] <= FAN_OUT + 8
        assert out["requests"] <= 10 + 2 * (rank == 0)
        assert out["failed"] == found[0]["failed"]
    middle = size // 2
    gathered, combined, merged, called, early = found[0]["failed"]
    assert gathered == ["Conflict", f"rank {min(3, middle) if size > 3 else middle}: taken"]
    assert combined == ["Conflict", f"rank {middle}: taken"]
    assert merged == ["Conflict", "cannot be merged"]
    odd, calls = ("1", ("save", "load")) if size == 2 else ("5", ("load", "save"))
    assert called == ["UsageError", f"rank {odd} calls {calls[0]} while rank 0 calls {calls[1]}"]
    assert early == ["Conflict", f"rank {middle}: too early"]


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_killed_is_named_by_all(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    doomed = (0, 1, chance.randrange(64))[seed]
    found = run(
        tmp_path, "killed", 64, doomed, doomed=doomed, after=chance.random() / 2, how=signal.SIGKILL
    )
    assert len(found) == 63
    for message, seconds in found:
        assert message.startswith(f"rank {doomed} died or has been unresponsive for ")
        assert seconds < PATIENCE / 2


@pytest.mark.matrix
def test_a_rank_that_is_stopped_is_named_by_all(tmp_path: Path) -> None:
    """By the first that runs out of patience, which asks who waits for whom."""
    for message, _ in run(tmp_path, "stopped", 24, 13, doomed=13, place=str(tmp_path)):
        assert message.startswith("rank 13 died or has been unresponsive for 3 s")


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_layouts_of_64_ranks(tmp_path: Path, form: str) -> None:
    found = run(tmp_path, "layouts", 64, place=str(tmp_path), form=form)
    for out in found:
        for layout, (saved, fits, unexpected, equal, listed) in out.items():
            assert saved == ucformat.open(tmp_path / layout).id
            assert (fits, unexpected, equal, listed) == (True, [], True, False)
    for seed, layout in enumerate(LAYOUTS):
        ck = ucformat.open(tmp_path / layout)
        assert len(ck.names()) == 32
        assert all(
            (ck[name][...] == whole(name, ck[name].shape, seed).numpy()).all()
            for name in ck.names()
        )
        assert ucformat.verify(tmp_path / layout)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_is_killed_at_any_instant_of_a_save(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    doomed = chance.randrange(64)
    form, after = chance.choice(["zarr", "packed"]), 3 * chance.random()
    found = run(
        tmp_path,
        "killed_in_a_save",
        64,
        doomed,
        doomed=doomed,
        after=after,
        place=str(tmp_path),
        form=form,
    )
    most = max(len(done) for _, done in found)
    for message, done in found:
        assert message.startswith(f"rank {doomed} died or has been unresponsive for ")
        assert (
            len(done) >= most - 1
        )  # of the last one, some ranks may not have learnt that it was committed
    for number in range(most):
        assert ucformat.verify(tmp_path / str(number))
    last = tmp_path / str(most)  # rank 0 may be killed when it has just committed it
    assert not (last / "manifest.json").exists() or (doomed == 0 and ucformat.verify(last))


@pytest.mark.matrix
def test_hundreds_of_ranks_agree(tmp_path: Path) -> None:
    for out in run(tmp_path, "agree", 256):
        assert out["joined"] == 255 * 128
        assert out["sockets"] <= FAN_OUT + 8
        assert out["requests"] <= 12


@pytest.mark.parametrize("hosts", [[1] * 9, [8] * 512, [64] * 4, [1000], [3, 1, 20, 8], [1] * 500])
def test_hosts_come_first_in_the_tree(hosts: list[int]) -> None:
    of = [f"host {h}" for h, count in enumerate(hosts) for _ in range(count)]
    parents = parents_of(of)
    assert parents[0] == -1
    children: dict[int, list[int]] = {}
    for rank, parent in enumerate(parents[1:], 1):
        assert parent < rank
        children.setdefault(parent, []).append(rank)
    assert (
        max(map(len, children.values())) <= FAN_OUT + 8 - 2
    )  # and the parent, and the one at which it listens
    for host in set(of):  # one rank of each host has a parent on another
        assert sum(of[parents[r]] != host for r in range(1, len(of)) if of[r] == host) == (
            host != of[0]
        )
    depth = [0] * len(of)
    for rank, parent in enumerate(parents[1:], 1):
        depth[rank] = depth[parent] + 1
    assert max(depth) <= 6
    order: list[int] = []
    stack = [0]
    while stack:
        order.append(stack.pop())
        stack += reversed(children.get(order[-1], []))
    assert order == list(range(len(of)))  # so that values are merged in the order of ranks


@pytest.mark.parametrize("hosts", [[1] * 9, [8] * 64, [64] * 4, [300], [3, 1, 20, 8]])
def test_the_ranks_of_a_host_are_a_part_of_the_tree(hosts: list[int]) -> None:
    of = [f"host {h}" for h, count in enumerate(hosts) for _ in range(count)]
    parents = parents_of(of)
    for run in ranks_of_hosts(of):
        for rank in run:
            children = tuple(r for r, parent in enumerate(parents) if parent == rank)
            place = TreeNode(
                rank, len(of), parents[rank], children, (run.start, run.stop)
            ).on_host()
            assert place.size == len(run)
            assert (place.parent < 0) == (rank == run.start)
            assert place.parent < 0 or place.parent in run
            assert set(place.children) == set(children) & set(run)
    assert [run.stop - run.start for run in ranks_of_hosts(of)] == hosts


def test_hosts_that_alternate_are_ignored_in_the_tree() -> None:
    assert parents_of(["a", "b"] * 5) == parents_of(["a"] * 10)
    assert ranks_of_hosts(["a", "b"] * 5) == []
