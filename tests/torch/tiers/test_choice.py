"""Peers, inventories and the choice of places, against models that try everything."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import PATIENCE
from tests.torch.tiers.simulated import ATTEMPT, simulated, step
from ucformat.errors import UnsafeError, UnsupportedError, UsageError
from ucformat.format.described import packed_file
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.storage.local import LocalStore
from ucformat.testing.stores import put
from ucformat.torch.comm.wire import decode, encode
from ucformat.torch.tiers.choice import Copies, choose_places, copies_of
from ucformat.torch.tiers.inventory import Contents, contents_of, number_of, ranges_of
from ucformat.torch.tiers.nodes import (
    Node,
    Nodes,
    _check_distinct,
    _identity_of,
    peers_of,
    rack_of,
)
from ucformat.torch.tiers.tier import Tier, check_tiers

if TYPE_CHECKING:
    from pathlib import Path

OTHER = "b" * 20
names_of_nodes = st.lists(
    st.sampled_from(["", "a/", "b/", "c/", "d/"]), min_size=2, max_size=9
).map(lambda racks: [f"{rack}node{n}" for n, rack in enumerate(racks)])


# --- peers


@given(names_of_nodes, st.integers(0, 3))
def test_each_node_keeps_as_many_copies_as_it_has(names: list[str], replicas: int) -> None:
    if replicas >= len(names):
        with pytest.raises(UsageError, match=rf"needs at least {replicas + 1} nodes"):
            peers_of(names, replicas)
        return
    peers = peers_of(names, replicas)
    assert all(len(set(p)) == replicas and n not in p for n, p in enumerate(peers))
    kept = Counter(itertools.chain.from_iterable(peers))
    assert all(kept[n] == replicas for n in range(len(names)))
    assert peers == peers_of(names, replicas)


def most_far(names: list[str]) -> int:
    """The most nodes whose copy can be in another rack if each node keeps one copy: all ways tried."""
    count = len(names)
    return max(
        sum(rack_of(names[n]) != rack_of(names[p]) for n, p in enumerate(order))
        for order in itertools.permutations(range(count))
        if all(n != p for n, p in enumerate(order))
    )


@given(names_of_nodes.filter(lambda names: len(names) <= 7))
def test_as_many_copies_as_possible_are_in_another_rack(names: list[str]) -> None:
    peers = peers_of(names, 1)
    far = sum(rack_of(names[n]) != rack_of(names[p]) for n, (p,) in enumerate(peers))
    assert far == most_far(names)


def test_any_rack_may_go_where_no_rack_has_more_than_half() -> None:
    names = [f"rack{n % 4}/node{n}" for n in range(32)]
    for replicas in (1, 2, 3):
        for n, peers in enumerate(peers_of(names, replicas)):
            assert rack_of(names[n]) not in {rack_of(names[p]) for p in peers}


def test_nodes_with_one_name_or_one_folder_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="node a have different folders"):
        _check_distinct([("a", "1"), ("a", "2"), ("b", "3")], tmp_path)
    with pytest.raises(UsageError, match="nodes a and c have the same folder"):
        _check_distinct([("a", "1"), ("b", "2"), ("c", "1")], tmp_path)
    _check_distinct([("a", "1"), ("b", "2")], tmp_path)


def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "new" / "ck"
    _identity_of(own)
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)
    with pytest.raises(UnsafeError, match="others may write in"):
        _identity_of(own)


def test_the_ranks_of_a_node_need_not_follow_each_other() -> None:
    nodes = Nodes((Node("a", ((0, 1), (3, 5))), Node("b", ((1, 3),))))
    assert [nodes.number_of(r) for r in range(5)] == [0, 1, 1, 0, 0]
    assert nodes.nodes[0].members == [0, 3, 4]
    assert nodes.by_rank == [0, 1, 1, 0, 0]


# --- tiers


@pytest.mark.parametrize(
    ("tiers", "every", "kind", "text"),
    [
        ([Tier("s3://b/fast")], None, UnsupportedError, "no local folder"),
        ([Tier("/a"), Tier("/b", replicas=1)], None, UnsupportedError, "replicas=1"),
        ([Tier("/a", every=10)], 15, UsageError, "every=15 is not divisible by the every=10"),
        ([Tier("/a", every=2), Tier("/b", every=4)], 6, UsageError, "every=6"),
        ([Tier("/a"), Tier("/a/")], None, UsageError, "/a/? is given as two tiers"),
        ([Tier("/home")], None, UsageError, "/home is given as two tiers"),
    ],
)
def test_tiers_that_make_no_sense_are_errors(
    tiers: list[Tier], every: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        check_tiers(tiers, "/home", every)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}, {"replicas": -1}, {"every": 1.5}])
def test_numbers_of_a_tier_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be"):
        Tier("/a", **wrong)


# --- inventories


@given(st.sets(st.integers(0, 60)))
def test_numbers_are_ranges(numbers: set[int]) -> None:
    ranges = ranges_of(numbers)
    assert [n for a, b in ranges for n in range(a, b)] == sorted(numbers)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (f"data/{ATTEMPT}/rank-00012.bin", 12),
        (packed_file(f"data/{ATTEMPT}", 123_456), 123_456),
        (f"data/{ATTEMPT}/rank-12.bin", None),
        (f"data/{ATTEMPT}/extents.safetensors", None),
        (f"x/data/{ATTEMPT}/rank-00012.bin", None),
        (MANIFEST, None),
    ],
)
def test_the_files_of_ranks_have_numbers(key: str, number: int | None) -> None:
    assert number_of(key) == number


holdings = st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=5)


def on_nodes(holding: list[set[int]], folder: str = "step-00000001") -> Contents:
    """What nodes have that hold these numbers, merged as ranks do."""
    documents = (MANIFEST, "objects/x")
    parts = [
        Contents(
            {(folder, "1" * 32): step(1)},
            {(folder, "1" * 32): ((n, n + 1),)},
            {},
            {(folder, ATTEMPT): ((n, ranges_of(numbers)),)} if numbers else {},
            {(folder, documents): ((n, n + 1),)},
        )
        for n, numbers in enumerate(holding)
    ]
    return functools.reduce(Contents.__add__, parts)


@given(
    holdings,
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 8))),
    st.booleans(),
    st.integers(0, 9),
)
def test_a_file_is_read_where_it_is_and_lost_where_it_is_nowhere(
    holding: list[set[int]], damaged: set[tuple[int, int]], is_in_tier: bool, ranks: int
) -> None:
    nodes = len(holding)
    contents = on_nodes(holding)
    if is_in_tier:
        placed = ("step-00000001", "1" * 32)
        contents += Contents({placed: step(1)}, {placed: ((nodes, nodes + 1),)})
    assert decode(encode(contents, Contents), Contents) == contents
    copies = copies_of(contents, ("step-00000001", "1" * 32), ATTEMPT, nodes)
    keys = [packed_file(f"data/{ATTEMPT}", n) for n in range(9)]
    bad = {(place, keys[n]) for place, n in damaged}
    near = [n % nodes for n in range(ranks)]
    places, lost = choose_places(copies, "step-00000001", [*keys, MANIFEST], bad, near)
    for n, key in enumerate(keys):
        there = {p for p, held in enumerate(holding) if n in held and (p, key) not in bad}
        chosen = places.locate(key)
        is_whole = is_in_tier and (nodes, key) not in bad
        assert (key in lost) == (not there and not is_whole)
        if there:
            assert chosen in there
            if n < ranks and near[n] in there:
                assert chosen == near[n]
        elif is_whole:
            assert chosen == nodes
    assert places.locate(MANIFEST) == 0
    assert places.locate("objects/none") == (nodes if is_in_tier else None)


def test_slower_tiers_serve_what_no_node_has() -> None:
    """Also what an interrupted copy has left there, but after one that has the whole checkpoint."""
    folder, placed = "step-00000001", ("step-00000001", "1" * 32)
    keys = [packed_file(f"data/{ATTEMPT}", n) for n in range(3)]
    contents = on_nodes([{0}]) + Contents(files={(folder, ATTEMPT): ((1, ((0, 2),)),)})
    places, lost = choose_places(copies_of(contents, placed, ATTEMPT, 1), folder, keys)
    assert places.files.tolist() == [0, 1, -1]
    assert lost == keys[2:]
    contents += Contents({placed: step(1)}, {placed: ((2, 3),)})
    places, lost = choose_places(copies_of(contents, placed, ATTEMPT, 1), folder, keys)
    assert places.files.tolist() == [0, 2, 2]
    assert not lost


def test_what_is_being_removed_from_a_slower_tier_is_not_used(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for folder in ("step-00000007", "step-00000008"):
        put(store, f"{folder}/data/{ATTEMPT}/rank-00000.bin")
    put(store, f"step-00000008/{TOMBSTONE}")
    assert list(contents_of(store, 1, partial=False).files) == [("step-00000007", ATTEMPT)]


@given(holdings, st.randoms(use_true_random=False))
def test_merging_is_associative(holding: list[set[int]], chance: Any) -> None:
    folder, placed = "step-00000001", ("step-00000001", "1" * 32)
    parts = [on_nodes([numbers]) for numbers in holding]
    parts = [
        Contents(
            p.steps,
            {placed: ((n, n + 1),)},
            {},
            {at: tuple((n, r) for _, r in held) for at, held in p.files.items()},
            dict.fromkeys(p.documents, ((n, n + 1),)),
        )
        for n, p in enumerate(parts)
    ]
    whole = functools.reduce(Contents.__add__, parts)
    while len(parts) > 1:
        n = chance.randrange(len(parts) - 1)
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    assert parts[0] == whole == on_nodes(holding, folder)


def test_nodes_serve_about_as_much_as_each_other() -> None:
    files = tuple((place, ((0, 400),)) for place in range(4))
    places, _ = choose_places(
        Copies(files, {}, ()), "f", [packed_file(f"data/{ATTEMPT}", n) for n in range(400)]
    )
    assert np.bincount(places.files).tolist() == [100] * 4


def test_what_a_folder_has_is_described(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in (
        *(f"step-00000007/data/{ATTEMPT}/rank-{n:05d}.bin" for n in (0, 1, 2, 5)),
        f"step-00000007/data/{OTHER}/rank-00001.bin",
        "step-00000007/objects/x",
        "step-7/objects/x",
        "notes.txt",
    ):
        put(store, key)
    put(store, "step-00000008/manifest.json", b"{}")
    found = contents_of(store, 3)
    assert found.files == {
        ("step-00000007", ATTEMPT): ((3, ((0, 3), (5, 6))),),
        ("step-00000007", OTHER): ((3, ((1, 2),)),),
    }
    assert found.documents == {
        ("step-00000007", ("objects/x",)): ((3, 4),),
        ("step-00000008", (MANIFEST,)): ((3, 4),),
    }
    assert list(found.unreadable) == ["step-00000008"]
    assert found.steps == {}


# --- growth


def test_4096_nodes_are_described_and_chosen_among() -> None:
    """Counted: what reaches rank 0 is a few numbers for each node, and every file has a place after a rack is lost."""
    nodes, each = 4096, 8
    parts = simulated(nodes, each)
    begun = time.monotonic()
    survived = [p for n, p in enumerate(parts) if n // 32 != 17]
    merged = functools.reduce(Contents.__add__, survived[:64])
    size = len(encode(merged, Contents))
    assert size < 64 * 200, "bytes that 64 nodes pass on together"
    while len(survived) > 1:  # as a tree does
        survived = [
            functools.reduce(Contents.__add__, survived[at : at + 8])
            for at in range(0, len(survived), 8)
        ]
    (contents,) = survived
    assert len(encode(contents, Contents)) < nodes * 150
    copies = copies_of(contents, ("step-00000002", "2" * 32), ATTEMPT, nodes)
    keys = [packed_file(f"data/{ATTEMPT}", n) for n in range(nodes * each)]
    places, lost = choose_places(
        copies, "step-00000002", [MANIFEST, *keys], near=[n // each for n in range(nodes * each)]
    )
    assert lost == []
    assert (places.files >= 0).all()
    assert np.bincount(places.files).max() <= 2 * each
    assert len(encode(places, type(places))) < nodes * each * 5
    assert time.monotonic() - begun < PATIENCE
