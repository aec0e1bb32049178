"""Ranks of a host that want the same read it once; what cannot be shared each reads for itself."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.storage.proxy import Proxy, Request
from tests.torch.faults_program import TIMEOUT
from tests.torch.ranks import KILLED, Ranks
from tests.torch.sharing_program import full_state
from ucformat.torch.loading import share

if TYPE_CHECKING:
    from pathlib import Path

    from tests.s3 import Bucket

STATE = sum(t.nbytes for t in full_state().values())


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.sharing_program")


def test_replicas_request_each_byte_of_a_bucket_once(
    ranks: Ranks, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bucket.place()
    ranks.run("save_there", 1, tmp_path, place=place)
    read: dict[str, list[tuple[int, int]]] = {}

    def note(request: Request) -> None:
        wanted = re.fullmatch(rb"bytes=(\d+)-(\d+)", request.headers.get(b"range", b""))
        if wanted is not None and request.method == "GET":
            read.setdefault(request.key, []).append((int(wanted[1]), int(wanted[2]) + 1))

    with Proxy(bucket.endpoint) as proxy:
        proxy.choose = note
        monkeypatch.setenv("UCP_ENDPOINT", proxy.endpoint)
        found = ranks.run("load_from", 4, tmp_path, place=place)
    assert all(equal for _, _, equal in found)
    for ranges in read.values():
        assert all(stop <= start for (_, stop), (start, _) in pairwise(sorted(ranges)))
    total = sum(stop - start for ranges in read.values() for start, stop in ranges)
    assert STATE <= total <= 1.1 * STATE
    assert sum(nbytes for nbytes, _, _ in found) == total
    assert max(nbytes for nbytes, _, _ in found) < 0.4 * STATE


@pytest.mark.front("aabb-*")
@pytest.mark.parametrize(
    ("hosts", "together"), [("aaaa", [4]), ("aabb", [2, 2]), ("abbb", [1, 3]), ("abab", [1] * 4)]
)
def test_each_host_reads_once(
    ranks: Ranks, tmp_path: Path, hosts: str, together: list[int]
) -> None:
    """Unless the ranks of a host are not consecutive."""
    found = ranks.run("layouts", 4, tmp_path, hosts=hosts)
    assert all(equal for out in found for _, _, equal in out.values())
    nbytes = {name: [out[name][0] for out in found] for name in found[0]}
    ends = np.cumsum([0, *together]).tolist()
    for first, stop in pairwise(ends):
        count = stop - first
        for name in ("plain", "one round"):
            assert STATE <= sum(nbytes[name][first:stop]) < 1.1 * STATE
        assert max(nbytes["plain"][first:stop]) < 1.3 * STATE / count
        matrices = 6 * 128 * 96 * 4
        least = matrices * count // 4 + 6 * 96 * 2 + 4
        assert least <= sum(nbytes["tp"][first:stop]) < 1.1 * least
        halves = len({rank % 2 for rank in range(first, stop)})
        assert (
            matrices * halves // 2 <= sum(nbytes["hsdp"][first:stop]) < 1.05 * matrices * halves / 2
        )
    assert all(n >= STATE for n in nbytes["local"])  # of the page cache


def test_ranks_want_other_dtypes_and_strides(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("targets", 4, tmp_path)
    for _, _, equal, untouched, _, both in found:
        assert (equal, untouched, both) == (True, True, True)
    assert STATE <= sum(nbytes for nbytes, *_ in found) < 1.1 * STATE
    assert sum(out[4] for out in found) < 1.1 * 2 * 128 * 96 * 4


def test_memory_that_may_not_be_used_is_not_shared(ranks: Ranks, tmp_path: Path) -> None:
    for nbytes, _, equal in ranks.run("refused", 3, tmp_path):
        assert equal
        assert STATE <= nbytes < 1.1 * STATE


@pytest.mark.front("read", "damaged")
@pytest.mark.parametrize("how", ["damaged", "plan", "read", "copy"])
def test_all_ranks_raise_the_error_of_one(ranks: Ranks, tmp_path: Path, how: str) -> None:
    found = ranks.run("failing", 4, tmp_path, how=how)
    (kind,) = {seen["kind"] for seen, _ in found}
    (message,) = {seen["message"] for seen, _ in found}
    if how == "damaged":
        assert kind == "ChecksumError"
        assert re.match(r"rank \d: (?!rank)", message)
    else:
        assert (kind, message) == ("UcformatError", "rank 2: OSError: broken")
    for _, (nbytes, _, equal) in found:  # the connections are as good as before
        assert equal
        assert nbytes < 0.5 * STATE


@pytest.mark.matrix
def test_a_rank_that_is_killed_is_named(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("failing", 4, tmp_path, how="killed")
    assert found[2] == KILLED
    for rank in (0, 1, 3):
        assert found[rank][0]["message"].startswith(
            f"rank 2 died or has been unresponsive for {TIMEOUT:g} s"
        )


def dealt(held: dict[int, list[bytes]], nbytes: dict[bytes, int], least: int) -> dict[bytes, int]:
    """The reader of each part, by the parts that each rank wants."""
    wants = []
    for rank, parts in held.items():
        sizes = np.array([nbytes[p] for p in parts], np.int64)
        wants.append(
            share._Wants(
                b"".join(parts), sizes, np.arange(len(parts)), np.full(len(parts), rank, np.int32)
            )
        )
    out = share._deal(share._joined(wants[0], wants[1]) if len(wants) > 1 else wants[0], least)
    return dict(zip(share._split(out.digests), out.readers.tolist(), strict=True))


def test_readers_take_turns() -> None:
    parts = [bytes([n]) * 16 for n in range(64)]
    nbytes = {p: (1 << 20) + 16 * n for n, p in enumerate(parts)}
    readers = dealt({4: parts, 5: parts[::-1]}, nbytes, 2)
    assert list(readers) == parts  # in the order of the lowest rank
    loads: Counter[int] = Counter()
    for part, reader in readers.items():
        loads[reader] += nbytes[part]
    assert abs(loads[4] - loads[5]) <= share._TURN_BYTES + max(nbytes.values())
    turns = 1 + sum(a != b for a, b in pairwise(readers.values()))
    assert turns <= sum(nbytes.values()) // share._TURN_BYTES + 1
    assert dealt({4: parts[:40], 5: parts[30:]}, nbytes, 2).keys() == set(parts[30:40])
    assert dealt({4: parts, 5: []}, nbytes, 2) == {}
