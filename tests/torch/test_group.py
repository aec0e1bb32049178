"""Our own group of ranks: one error for all that names the rank, whoever failed, died or said nothing.

Ranks are threads here, each with a group of its own over one store; `test_faults.py` has processes
that are killed.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.patience import PATIENCE
from tests.torch.ranks import all_gather
from ucformat.errors import Conflict, UcformatError
from ucformat.torch.comm import bulk
from ucformat.torch.comm import group as tree
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.group import Group, Host, connect_by_store, group_of, single_process_group
from ucformat.torch.saving.worker import WorkerStart, _connect
from ucformat.torch.state.elements import SharedMemory, map_range, write_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.torch.comm.bulk import Links
    from ucformat.torch.state.elements import SharedRange


def together(
    size: int, act: Callable[[Group], Any], connect: Callable[..., Links] = connect_by_store
) -> list[Any]:
    """What each rank's act gives, or the error it raises."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        group = Group(connect(dist.PrefixStore("test", store), number, size, PATIENCE))
        try:
            return act(group)
        except Exception as error:  # noqa: BLE001 - the tests look at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_are_gathered_and_answered(size: int) -> None:
    def act(group: Group) -> Any:
        everybody = all_gather(group, (group.rank, b"x" * 10**6), tuple[int, bytes])
        mine = group.gather_scatter(group.rank, lambda values: [10 * v for v in values], int, int)
        return [rank for rank, _ in everybody], mine

    assert together(size, act) == [(list(range(size)), 10 * r) for r in range(size)]


@pytest.fixture(params=["shared memory", "another host", "another container", "no access"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How bulk data goes to another rank; of all ways but the first it goes over the connection."""
    written: list[bool] = []
    true_write = write_shared

    def write(target: SharedRange, parts: Sequence[memoryview]) -> bool:
        if (
            request.param == "another container"
        ):  # where this number belongs to another process's memory
            target = target._replace(name=b"0" * 32)
        elif request.param == "no access":
            target = target._replace(pid=1 << 30)
        written.append(true_write(target, parts))
        return written[-1]

    monkeypatch.setattr(bulk, "write_shared", write)
    if request.param == "another host":
        monkeypatch.setattr(bulk, "_is_here", lambda _: False)
    yield request.param
    assert set(written) == {"shared memory": {True}, "another host": set()}.get(
        request.param, {False}
    )


@pytest.mark.parametrize("parts", [1, 3000])
def test_one_thread_sends_while_another_receives(way: str, parts: int) -> None:
    """More than any socket holds, both ways at once, and more buffers than one call takes."""
    size = 8 << 20

    def act(group: Group) -> Any:
        shared = SharedMemory(size + 3)
        mine = np.random.default_rng(group.rank).integers(0, 256, size, np.uint8)
        cut = [part for part in np.array_split(mine, parts) for part in (part, part[:0])]
        sender = threading.Thread(target=group.send_bulk, args=([(1 - group.rank, lambda: cut)],))
        sender.start()
        group.receive_bulk(shared, {1 - group.rank: (2, 2 + size)})
        sender.join()
        out = shared.memory.copy()
        shared.close()
        expected = np.random.default_rng(1 - group.rank).integers(0, 256, size, np.uint8)
        return np.array_equal(out[2:-1], expected) and not out[[0, 1, -1]].any()

    assert together(2, act) == [True, True]


def test_bulk_data_of_another_size_is_an_error() -> None:
    def act(group: Group) -> Any:
        if group.rank:
            group.send_bulk([(0, lambda: [np.zeros(4, np.uint8)])])
            return group.combine(1, max, int)
        shared = SharedMemory(8)
        try:
            return group.receive_bulk(shared, {1: (0, 5)})
        finally:
            shared.close()

    found = together(2, act)
    assert "it sent 4 bytes, expected 5" in found[0].message


def test_ranks_of_a_host_meet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep their numbers, and do not wait for those of the other host."""
    here = threading.local()

    def connect(store: dist.Store, rank: int, size: int, timeout: float) -> Links:
        here.rank = rank
        return connect_by_store(store, rank, size, timeout)

    def act(group: Group) -> Any:
        alone = group.on_host()
        joined = [
            alone.combine([group.rank], lambda a, b: a + b, list[int])
            for _ in range(1 + (group.rank > 1))
        ]
        answer = alone.gather_scatter(group.rank, lambda values: [10 * v for v in values], int, int)
        with pytest.raises(Conflict) as seen:
            alone.combine(Conflict("taken") if group.rank in (1, 3, 4) else None)
        return (
            joined[-1],
            alone.size,
            answer,
            seen.value.message,
            group.combine(group.rank, max, int),
        )

    monkeypatch.setattr(tree, "host_here", lambda _: Host("ab"[here.rank > 1], "127.0.0.1"))
    found = together(6, act, connect)
    a, b = ([0, 1], 2), ([2, 3, 4, 5], 4)
    first, second = ("rank 1: taken", 5), ("rank 3: taken", 5)
    assert found[:2] == [(*a, 10 * rank, *first) for rank in range(2)]
    assert found[2:] == [(*b, 10 * rank, *second) for rank in range(2, 6)]


def test_only_memory_of_a_fixed_size_is_mapped() -> None:
    shared = SharedMemory(5000)
    whole = shared.range(0, 5000)
    memory = map_range(whole)
    assert memory is not None
    memory[4999] = 7
    assert shared.memory[4999] == 7
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, 0)
    assert map_range(whole._replace(name=b"0" * 32)) is None
    assert map_range(whole._replace(nbytes=2 * mmap.PAGESIZE + 1)) is None
    assert map_range(whole._replace(pid=0)) is None
    fd = os.memfd_create(whole.name.decode(), os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 5000)
        assert map_range(whole._replace(fd=fd)) is None  # its owner could truncate it
    finally:
        os.close(fd)
        shared.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_is_raised_on_all_and_names_it(failing: int) -> None:
    def act(group: Group) -> Any:
        try:
            all_gather(group, Conflict("taken", hint="go away") if group.rank == failing else None)
        except Conflict as error:
            return error.message, error.hint, all_gather(group, group.rank)
        return None

    assert together(3, act) == [(f"rank {failing}: taken", "go away", [0, 1, 2])] * 3


def test_of_several_errors_the_first_ranks_is_raised() -> None:
    found = together(3, lambda group: all_gather(group, ValueError("bad") if group.rank else None))
    assert [(type(e), e.message) for e in found] == [(UcformatError, "rank 1: ValueError: bad")] * 3
    assert found[0].hint == "see the traceback in the log of that rank"


def test_an_error_of_the_coordinator_is_raised_on_all() -> None:
    def then(_: list[Any]) -> list[Any]:
        raise Conflict("taken")

    found = together(3, lambda group: group.gather_scatter(None, then))
    assert [(type(e), e.message) for e in found] == [(Conflict, "taken")] * 3


class Unreadable(Exception):
    """Cannot be made again of its words."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("error", [OSError("odd"), Unreadable("very", "odd")], ids=repr)
def test_errors_of_other_kinds_are_told_by_their_words(error: Exception) -> None:
    found = together(2, lambda group: all_gather(group, error if group.rank else None))
    assert all(isinstance(e, UcformatError) for e in found)
    assert all("rank 1" in str(e) and "odd" in str(e) for e in found)


def test_one_rank_alone_raises_its_error_as_it_is() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        all_gather(single_process_group(), error)
    assert caught.value is error
    single_process_group().send_bulk([])


@pytest.mark.parametrize("odd", [0, 1])
def test_what_cannot_be_told_is_an_error_on_all(odd: int) -> None:
    found = together(2, lambda group: all_gather(group, object() if group.rank == odd else 1))
    assert all("cannot be sent to other ranks: it is a object" in e.message for e in found)


def test_what_fails_before_a_meeting_is_told_at_the_meeting() -> None:
    def act(group: Group) -> Any:
        with group.sharing_errors():
            if group.rank == 1:
                raise Conflict("too early")
        return all_gather(group, group.rank)

    found = together(3, act)
    assert [(type(e), e.message) for e in found] == [(Conflict, "rank 1: too early")] * 3


def be_impatient(links: Any, other: int) -> None:
    """Soon run out of time when this rank waits for a certain other one, and for no other."""
    poll = links._poll

    def impatient(waited: int, line: Any, event: int, end: float) -> None:
        poll(waited, line, event, time.monotonic() + 0.5 if waited == other else end)

    links._poll = impatient


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_silent_rank_is_named_after_the_time_out(silent: int) -> None:
    over = threading.Semaphore(0)

    def act(group: Group) -> Any:
        if group.rank == silent:  # alive, and connected, until both others have learnt it
            return [over.acquire(timeout=PATIENCE) for _ in range(2)]
        be_impatient(group.links, silent)
        try:
            all_gather(group, None)
        except UcformatError as error:
            return error, group.intact
        finally:
            over.release()

    found = together(3, act)
    assert found.pop(silent) == [True, True]
    for error, intact in found:
        assert f"rank {silent} died or has been unresponsive for" in error.message
        assert error.hint is not None
        assert not intact


@pytest.mark.matrix
def test_a_broken_group_says_so_and_a_new_one_is_made() -> None:
    def act(group: Group) -> Any:
        all_gather(group, None)
        if group.rank:
            group.links.end()
            return None
        with pytest.raises(UcformatError, match="rank 1"):
            all_gather(group, None)
        return group.intact

    assert together(2, act) == [False, None]


def test_without_torch_distributed_there_is_one_rank() -> None:
    group = group_of()
    assert (group.rank, group.size, group.intact) == (0, 1, True)
    assert all_gather(group, "x") == ["x"]


def test_a_writing_process_that_does_not_reach_the_others_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        parent = gone.getsockname()
    listening = socket.create_server(("127.0.0.1", 0))
    start = WorkerStart(TreeNode(1, 2, 0, ()), parent, b"s" * 32, listening.detach(), 0.5)
    with pytest.raises(
        UcformatError, match="the writing processes of the ranks could not connect: "
    ):
        _connect(start)
