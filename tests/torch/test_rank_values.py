"""Values of each rank on their way to rank 0: none gets many, and files have those of all."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.torch.ranks import Ranks
from tests.torch.values_program import FILES, LACKING, MORE, RANKS
from ucformat.errors import Inconsistent
from ucformat.format.objects import encode_range
from ucformat.format.structure import per_rank_problems
from ucformat.schema.manifest import PerRankDoc
from ucformat.storage.memory import MemoryStore
from ucformat.storage.url import open_store
from ucformat.torch import PerRank, load, save
from ucformat.torch.comm.group import parents_of
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.saving import manifest as rank_values
from ucformat.torch.saving.manifest import RankValues

if TYPE_CHECKING:
    import random
    from pathlib import Path

numbers = count()


class Flushed(MemoryStore):
    """Knows whether it was flushed after the last file was put."""

    def __init__(self) -> None:
        super().__init__(f"rank-values-{next(numbers)}")
        self.durable = True

    def create(self, key: str, unit: int = 1) -> Any:
        self.durable = False
        return super().create(key, unit)

    def flush(self) -> None:
        self.durable = True
        super().flush()


def up_the_tree(
    parents: list[int], ranks: list[dict[str, Any]], store: Flushed
) -> tuple[RankValues, list[int]]:
    """What rank 0 gets, and the bytes of values that each other rank passes on."""
    below: list[list[bytes]] = [[] for _ in ranks]
    passed = []
    for rank in range(len(ranks) - 1, -1, -1):
        values = RankValues.of(rank, ranks[rank])
        for child in reversed(below[rank]):
            values = values.merged(decode(child, RankValues))
        if rank:
            values = values.relieved(store, "objects")
            assert store.durable
            passed.append(values.nbytes)
            below[parents[rank]].append(encode(values, RankValues))
    return values, passed


def check(store: Flushed, values: RankValues, ranks: list[dict[str, Any]]) -> int:
    """Whether a reader finds the values of each rank; the number of files."""
    files = values.write(store, "objects")
    doc = PerRankDoc(ranks=len(ranks), names=values.names, files=files)
    assert not [*per_rank_problems(doc)]
    assert {*values.names} == {name for own in ranks for name in own}
    for file in files:
        data = store.read(file.path)
        assert len(data) == file.nbytes
        for rank in range(file.first, file.first + file.ranks):
            encoded = encode_range(ranks[rank])
            assert data.startswith(encoded)
            data = data[len(encoded) :]
        assert len(data) == 16 * file.ranks + 4
    return len(files)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.integers(1, 400),
    st.randoms(use_true_random=False),
)
def test_every_rank_passes_on_few_bytes(
    hosts: list[int], bound: int, chance: random.Random
) -> None:
    """Ranks of some hosts, with values of any size under names of their own."""
    parents = parents_of([str(h) for h, size in enumerate(hosts) for _ in range(size)])
    ranks: list[dict[str, Any]] = [
        {chance.choice("abc"): "x" * chance.choice((0, 3, 50, 500))} for _ in parents
    ]
    store = Flushed()
    with mock.patch.object(rank_values, "MOST_BYTES", bound):
        values, passed = up_the_tree(parents, ranks, store)
    assert max(passed, default=0) <= bound
    total = sum(len(encode_range(own)) for own in ranks)
    assert check(store, values, ranks) <= 1 + 2 * total / bound


@pytest.mark.matrix
def test_16384_ranks_write_few_files() -> None:
    """Of 20 kB each, all numbers divided by 1000."""
    parents = parents_of([str(rank // 8) for rank in range(16384)])
    ranks = [{"n": f"{rank:09}"} for rank in range(16384)]  # 21 bytes in all
    store = Flushed()
    with mock.patch.object(rank_values, "MOST_BYTES", 4194):
        values, passed = up_the_tree(parents, ranks, store)
    assert max(passed) <= 4194
    assert values.nbytes <= 4194
    assert 40 < check(store, values, ranks) < 100


def test_ranks_without_values_write_no_file() -> None:
    store = Flushed()
    with mock.patch.object(rank_values, "MOST_BYTES", 10):
        values, _ = up_the_tree(parents_of(["a"] * 30), [{}] * 30, store)
    assert not [*store.list()]
    assert (values.names, values.nbytes) == ((), 0)


def test_only_values_of_consecutive_ranks_are_put_together() -> None:
    values = [RankValues.of(rank, {"n": rank}) for rank in range(4)]
    parts = values[0].merged(values[1]).merged(values[3]).merged(values[2]).parts
    assert [part.first for part in parts] == [0, 3, 2]


def test_values_of_other_ranks_than_those_that_save_are_not_committed() -> None:
    """No reader would open the checkpoint."""
    url, right = f"memory://rank-values-{next(numbers)}", RankValues.of

    def wrong(_: type[RankValues], rank: int, values: dict[str, Any]) -> RankValues:
        return right(rank + 1, values)

    with (
        mock.patch.object(RankValues, "of", classmethod(wrong)),
        pytest.raises(Inconsistent, match="has the values of ranks from 1 on, not from 0 on"),
    ):
        save({"own": PerRank(1)}, url)
    assert not [*open_store(url).list()]


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.values_program")


@pytest.mark.front("sync")
@pytest.mark.parametrize("how", ["sync", "async"])
def test_ranks_get_their_values_back_from_several_files(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    assert ranks.run("back_and_forth", RANKS, tmp_path, how=how) == [(True, True)] * RANKS
    ck = ucformat.open(tmp_path / "ck")
    assert ck.manifest.per_rank is not None
    assert [(f.first, f.ranks) for f in ck.manifest.per_rank.files] == FILES
    assert ucformat.verify(ck)
    assert set(ck.per_rank) == {"rng", "loader", "more"}
    assert [v and v["at"] for v in ck.per_rank["loader"]] == [
        None if n == LACKING else n for n in range(RANKS)
    ]
    assert [*ck.per_rank["more"]] == [[1, 2] if n == MORE else None for n in range(RANKS)]
    in_folder = {p.name for p in tmp_path.glob("ck/objects/*/*")}
    assert in_folder == {"objects.json", *(f"per_rank-{first:05}.bin" for first, _ in FILES)}
    assert {p.name for p in tmp_path.glob("small/objects/*/*")} == {
        "objects.json",
        "per_rank-00000.bin",
    }


@pytest.mark.front("sync-3")
@pytest.mark.parametrize(("how", "doomed"), [("sync", 3), ("sync", 5), ("async", 10)])
def test_a_rank_that_cannot_write_values(
    ranks: Ranks, tmp_path: Path, how: str, doomed: int
) -> None:
    """One with a child, one that has much itself: the error names it on all ranks, and nothing stays."""
    found = ranks.run("full_at_an_inner_rank", RANKS, tmp_path, how=how, doomed=doomed)
    for seen, left, _ in found:
        assert seen["message"] == f"rank {doomed}: OSError: [Errno 28] No space left on device"
        assert left == []
    assert {saved for *_, saved in found} == {ucformat.open(tmp_path / "ck").id}


def test_values_of_ranks_follow_a_checkpoint_that_is_written_anew_in_place(tmp_path: Path) -> None:
    url = tmp_path / "step"
    save({"own": PerRank({"seed": 1}), "w": torch.ones(3)}, url, form="packed")
    before = ucformat.open(url).id
    made = ucformat.materialize(url)
    assert made.id == before
    assert [f.path.split("/")[1] for f in made.manifest.per_rank.files] == [made.manifest.attempt]  # type: ignore[union-attr]
    assert {p.name for p in (url / "objects").iterdir()} == {made.manifest.attempt}
    state = {"own": PerRank(None), "w": torch.zeros(3)}
    load(state, url)
    assert state["own"].value == {"seed": 1}
