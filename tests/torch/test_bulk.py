"""Bulk data between many ranks over few connections: any order, any bound, and ranks that end meanwhile."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.patience import PATIENCE, wait_until
from tests.torch.test_group import together
from ucformat.errors import UcformatError
from ucformat.torch.comm import bulk
from ucformat.torch.state.elements import SharedMemory

if TYPE_CHECKING:
    from ucformat.torch.comm.group import Group

LARGE = 6 << 20  # more than the kernel keeps for a connection


def data(
    seed: int, sender: int, to: int, number: int, size: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([seed, sender, to, number]).integers(0, 256, size, np.uint8)


class Traffic:
    """Who sends what to whom: for each receiver, batches of senders and sizes."""

    def __init__(self, seed: int, ranks: int) -> None:
        chance = random.Random(seed)
        self.seed = seed
        self.batches: list[list[dict[int, int]]] = []
        self.sent: list[list[tuple[int, int, int]]] = [
            [] for _ in range(ranks)
        ]  # receiver, number, size
        for to in range(ranks):
            counts = [0] * ranks
            self.batches.append([])
            for _ in range(chance.randrange(4)):
                others = chance.sample(
                    [r for r in range(ranks) if r != to], chance.randrange(1, ranks)
                )
                sizes = {
                    r: chance.choice([1, 100, 70_000, *([LARGE] if chance.random() < 0.3 else [])])
                    for r in others
                }
                self.batches[-1].append(sizes)
                for sender, size in sizes.items():
                    self.sent[sender].append((to, counts[sender], size))
                    counts[sender] += 1
        for sent in self.sent:  # in any order of receivers, but in that of each one's batches
            receivers = [to for to, _, _ in sent]
            chance.shuffle(receivers)
            of = {to: iter([s for s in sent if s[0] == to]) for to in receivers}
            sent[:] = [next(of[to]) for to in receivers]

    def run(self, group: Group, pause: float) -> bool:
        """One rank's part; returns whether it received what was sent to it."""
        chance = random.Random(f"{self.seed} {group.rank}")

        def rest() -> None:
            time.sleep(pause * chance.random())

        def made(to: int, number: int, size: int) -> Any:
            rest()
            return [data(self.seed, group.rank, to, number, size)]

        messages = [
            (to, lambda m=(to, number, size): made(*m))
            for to, number, size in self.sent[group.rank]
        ]
        failed: list[BaseException] = []

        def send() -> None:
            try:
                rest()
                group.send_bulk(messages)
            except UcformatError as error:
                failed.append(error)

        sender = threading.Thread(target=send)
        sender.start()
        counts, right = [0] * group.size, True
        try:
            for sizes in self.batches[group.rank]:
                rest()
                shared, ends = (
                    SharedMemory(sum(sizes.values())),
                    np.cumsum(list(sizes.values())).tolist(),
                )
                slots = {
                    other: (end - sizes[other], end) for other, end in zip(sizes, ends, strict=True)
                }
                try:
                    group.receive_bulk(shared, slots)
                    for other, (start, stop) in slots.items():
                        expected = data(self.seed, other, group.rank, counts[other], stop - start)
                        right = right and np.array_equal(shared.memory[start:stop], expected)
                        counts[other] += 1
                finally:
                    shared.close()
        finally:
            sender.join()
        if failed:
            raise failed[0]
        return right


@pytest.mark.parametrize("here", [True, False], ids=["one host", "several hosts"])
@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (3, 1), (64, 128)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_any_traffic_over_few_connections(
    monkeypatch: pytest.MonkeyPatch, seed: int, bounds: tuple[int, int], here: bool
) -> None:
    monkeypatch.setattr(bulk, "MOST_CALLS", bounds[0])
    monkeypatch.setattr(bulk, "MOST_CALLERS", bounds[1])
    monkeypatch.setattr(bulk, "_is_here", lambda _: here)
    ranks = 3 + 2 * seed
    traffics = [Traffic(2 * seed, ranks), Traffic(2 * seed + 1, ranks)]

    def act(group: Group) -> Any:
        found: list[Any] = [False] * 2
        most = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(0.002):
                links = group.links
                most = max(most, len(links._sockets) - len(links._lines) - len(links._callers))

        def run(number: int) -> None:  # in each of two threads, over a channel of its own
            try:
                found[number] = traffics[number].run(
                    group.channel("test", f"channel {number}"), 0.01
                )
            except UcformatError as error:
                found[number] = error

        others = [
            threading.Thread(target=watch),
            *(threading.Thread(target=run, args=(n,)) for n in range(2)),
        ]
        for thread in others:
            thread.start()
        for thread in others[1:]:
            thread.join()
        done.set()
        others[0].join()
        group.combine(0, max, int)
        return found, most <= bounds[0] + 1, len(group.links._callers) <= bounds[1] + 1

    for found in together(ranks, act):
        assert found == ([True, True], True, True)


@pytest.mark.front("to ask")
@pytest.mark.parametrize("waiting", ["to ask", "to be asked"])
def test_a_rank_that_ends_is_named(waiting: str) -> None:
    """Rank 2 ends, the others wait for it, or for one that does so."""

    def act(group: Group) -> Any:
        if group.rank == 2:
            time.sleep(0.2)
            return group.end()
        if waiting == "to be asked":
            group.send_bulk([(2, lambda: [np.zeros(3, np.uint8)])])
        shared = SharedMemory(3)
        try:
            group.receive_bulk(shared, {{0: 2, 1: 0, 3: 1}[group.rank]: (0, 3)})
        finally:
            shared.close()

    started = time.monotonic()
    found = together(4, act)
    assert [str(e).split(" died")[0] for e in found if e is not None] == ["rank 2"] * 3
    assert time.monotonic() - started < PATIENCE / 2


def test_a_rank_that_asks_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for anybody, whereas those that it keeps waiting keep others waiting."""

    def act(group: Group) -> Any:
        group.links.timeout = 1.0 if group.rank == 0 else PATIENCE
        if group.rank == 3:
            time.sleep(4)
            return group.combine(0, max, int)
        if group.rank == 2:
            return group.send_bulk([(3, lambda: [np.zeros(3, np.uint8)])])
        if group.rank == 1:
            shared = SharedMemory(3)
            try:
                return group.receive_bulk(shared, {2: (0, 3)})
            finally:
                shared.close()
        return group.send_bulk([(1, lambda: [np.zeros(3, np.uint8)])])

    found = together(4, act)
    assert all(str(e).startswith("rank 3 died or has been unresponsive for ") for e in found)


def test_who_was_interrupted_asks_again() -> None:
    """What it had asked for before is not answered."""

    def act(group: Group) -> Any:
        if group.rank:
            wait_until(lambda: bool(group.links._asked.get(1)))
            first = group.links._asked[1][0][0]
            group.combine(0, max, int)
            wait_until(lambda: first.ended)
            return group.send_bulk([(0, lambda: [np.full(3, 7, np.uint8)])])
        shared = SharedMemory(3)
        call = group.links._ask(1, 1, shared, (0, 3), time.monotonic() + PATIENCE)
        assert call is not None
        group.combine(0, max, int)
        group.links._end_call(call.connection, 1, reuse=False)
        group.receive_bulk(shared, {1: (0, 3)})
        found = shared.memory.tolist()
        shared.close()
        return found

    assert together(2, act) == [[7] * 3, None]


def test_a_bulk_call_that_the_other_side_closed_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act(group: Group) -> Any:
        out = []
        for number in range(20):
            traffic = Traffic(1000 + number, group.size)
            out.append(traffic.run(group, 0))
            group.combine(0, max, int)
            with group.links._change:  # as `accept_bulk` does
                for caller in group.links._callers.values():
                    if not caller.unanswered:
                        caller.refused = True
                        caller.connection.shutdown(2)
        return out

    monkeypatch.setattr(bulk, "_is_here", lambda _: False)
    assert together(3, act) == [[True] * 20] * 3
