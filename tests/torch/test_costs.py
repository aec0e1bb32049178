"""What a save tells, sends and holds, and what a load reads: no more than it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ucformat
from tests.torch.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.costs_program")


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_plan_is_made_once_and_anew_where_the_state_changed(
    ranks: Ranks, tmp_path: Path, form: str
) -> None:
    found = ranks.run("plans", 2, tmp_path, form=form)
    told = found[1]
    check_plans(tmp_path)
    assert abs(told["second"] - told["third"]) < 100
    assert (
        told["one rank"] > told["same again"] + 500
    )  # the other rank's state is the same, and has to be told again
    assert (
        told["second"] - 10 < told["first"] < told["second"] + 1000
    )  # otherwise rank 1 tells only digests
    assert abs(told["other"] - told["first"]) < 100


def check_plans(tmp_path: Path) -> None:
    for seed, name in enumerate(
        ("first", "second", "third", "other", "same again", "one rank", "back"), 1
    ):
        ck = ucformat.open(tmp_path / name)
        assert len(ck) == 100 + (name in ("other", "same again", "one rank")) + (name == "one rank")
        for n in (0, 1, 98, 99):
            assert (ck[f"layers.{n}.weight"][...] == seed).all()
    assert (ucformat.open(tmp_path / "terms")["layers.1.weight"][...] == 7).all()


def test_what_is_told_depends_on_no_size(ranks: Ranks, tmp_path: Path) -> None:
    for small, large in ranks.run("twice_as_large", 2, tmp_path):
        assert abs(large - small) < 200


@pytest.mark.parametrize(("form", "size"), [("zarr", 4), ("packed", 2)])
def test_what_is_read(ranks: Ranks, tmp_path: Path, form: str, size: int) -> None:
    found = ranks.run("reads", size, tmp_path, form=form)
    state = 2 * 8 * MIB
    for name in ("copies", "rows", "columns", "shards, shared in vain"):
        for out in found:
            nbytes, held = out[name]
            assert held == (state if name == "copies" else state // size)
            assert nbytes <= 1.05 * held, name
    shared = [
        "copies, shared",
        "transposed copies, shared",
        *(["hybrid, shared"] if size == 4 else []),
    ]
    for name in shared:
        total = [out[name][0] for out in found]
        assert sum(total) <= 1.05 * state, name
        assert max(total) <= 1.05 * state / 2  # two tensors, each read by one rank
    for out in found:
        assert out["damaged"]["kind"] == "ChecksumError"


@pytest.mark.front("2")
@pytest.mark.parametrize("world", [2, 3])
def test_a_load_tells_a_bit_for_what_a_rank_does_not_want(
    ranks: Ranks, tmp_path: Path, world: int
) -> None:
    for told, unexpected, other in ranks.run("parts", world, tmp_path):
        assert told < 1500 * world
        assert list(unexpected) == [
            f"layers.{n:04}.some.long.name.of.a.weight (weight)" for n in range(990, 1000)
        ]
        assert other["kind"] == "Conflict"
        assert (
            "rank 1 has opened a checkpoint with a different number of tensors" in other["message"]
        )


def test_memory_is_bounded_by_shards_not_by_the_state(ranks: Ranks, tmp_path: Path) -> None:
    """A state of 256 MiB, half of it on each of two ranks; a rank holds a bundle of shards, and one that it sends."""
    for out in ranks.run("memory", 2, tmp_path):
        grown, sent = out["zarr"]
        assert sent == 64 * MIB
        assert grown < 80 * MIB
        assert not out["left open"]
        grown, sent = out["packed"]
        assert sent == 0
        assert grown < 8 * MIB
        for form in ("zarr", "packed"):
            grown, equal = out[f"load {form}"]
            assert equal
            assert grown < 16 * MIB


@pytest.mark.front("2")
@pytest.mark.parametrize("now", [1, 2, 3])
def test_what_each_rank_has_for_itself(ranks: Ranks, tmp_path: Path, now: int) -> None:
    drawn = ranks.run("save_per_rank", 2, tmp_path)
    found = ranks.run("load_per_rank", now, tmp_path)
    rest = []
    for rank, (seen, untouched, value, random, n) in enumerate(found):
        assert n == 5
        if now == 2:
            assert "message" not in seen
            assert untouched == (rank, 5)
            assert value == {"rank": rank, "t": [rank, rank]}
        else:
            assert seen["kind"] == "StateMismatch"
            assert (
                f"at (dict) has a value of each of 2 ranks, and is loaded by {now}"
                in seen["message"]
            )
            assert untouched == (-1, 0)
            assert value == {"rank": [0, 1], "t": [1, 1], "new": (rank, now)}
        if rank < 2:
            assert random == drawn[rank]
        else:
            rest.append(tuple(random))
    torch.manual_seed(77)
    assert tuple(torch.rand(2).tolist()) not in rest
    assert len(set(rest)) == len(rest)


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_ranks_of_a_group_describe_what_they_hold(ranks: Ranks, tmp_path: Path, form: str) -> None:
    for listed, equal in ranks.run("some_ranks", 4, tmp_path, form=form):
        assert listed == []
        assert equal
