"""Strangers on the port: nothing of theirs is looked at or run, and those who belong together meet all the same."""

from __future__ import annotations

import pickle
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist

import ucformat
from tests.patience import PATIENCE, wait_until
from tests.torch.attack import Attack
from tests.torch.ranks import Ranks, all_gather
from tests.torch.strangers_program import said_by_strangers
from ucformat.errors import IntegrityError, UcformatError
from ucformat.torch.comm import group as tree
from ucformat.torch.comm import handshake
from ucformat.torch.comm.bulk import Links
from ucformat.torch.comm.connections import TreeNode
from ucformat.torch.comm.group import Group, Host, connect_by_store, host_here, listen
from ucformat.torch.comm.handshake import ask, connect, send_alarm
from ucformat.torch.state.elements import SharedMemory

if TYPE_CHECKING:
    from pathlib import Path

SECRET = secrets.token_bytes(32)


def at_loopback(count: int) -> list[socket.socket]:
    return [listen([Host("here", "")] * count, 0) for _ in range(count)]


def member(listener: socket.socket, rank: int, size: int, timeout: float = PATIENCE) -> Links:
    """One rank of a group in which all others are children of rank 0."""
    place = TreeNode(rank, size, 0 if rank else -1, () if rank else tuple(range(1, size)))
    return Links(place, timeout, listener, SECRET)


def connect_all(listeners: list[socket.socket]) -> list[Links]:
    """The connections of each rank."""
    meeting = listeners[0].getsockname()
    found = [member(listener, rank, len(listeners)) for rank, listener in enumerate(listeners)]
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(lambda one: one.join(meeting), found))
    return found


def talk(found: list[Links]) -> None:
    """All ranks exchange messages, also those that are not connected yet; all connections end then."""
    groups = [Group(one) for one in found]
    with ThreadPoolExecutor(len(groups)) as pool:
        everybody = list(pool.map(lambda g: all_gather(g, g.rank, int), groups))
        assert everybody == [list(range(len(found)))] * len(found)
        list(pool.map(send_to_next, groups))
    for one in groups:
        one.end()


def send_to_next(group: Group) -> None:
    """Each rank sends bulk data to the next one."""
    data, shared = np.array([group.rank], np.uint8), SharedMemory(1)
    sender = threading.Thread(
        target=group.send_bulk, args=([((group.rank + 1) % group.size, lambda: [data])],)
    )
    sender.start()
    group.receive_bulk(shared, {(group.rank - 1) % group.size: (0, 1)})
    sender.join()
    assert shared.memory.tolist() == [(group.rank - 1) % group.size]
    shared.close()


def call(
    place: Any, *, rank: int = 1, secret: bytes = SECRET, seconds: float = PATIENCE
) -> socket.socket | None:
    """Connect to rank 0."""
    return connect(place, rank, 0, secret, time.monotonic() + seconds, lambda: None)


def test_strangers_who_come_first_change_nothing(tmp_path: Path) -> None:
    listeners = at_loopback(3)
    with ExitStack() as stack:
        for listener in listeners[:2]:
            for said in said_by_strangers(tmp_path):
                stranger = stack.enter_context(socket.create_connection(listener.getsockname()))
                stranger.sendall(said)
            gone = socket.create_connection(listener.getsockname())
            gone.close()
        found = connect_all(listeners)
        talk(found)
    assert not (tmp_path / "ran").exists()


def test_strangers_who_come_later_change_nothing(tmp_path: Path) -> None:
    """Each rank listens as long as its group lives, and then no more."""
    listeners = at_loopback(3)
    places = [listener.getsockname() for listener in listeners]
    found = connect_all(listeners)
    with ExitStack() as stack:
        for place in places:
            for said in said_by_strangers(tmp_path):
                stranger = stack.enter_context(socket.create_connection(place))
                stranger.sendall(said)
        talk(found)
        for place in places:
            wait_until(partial(refused, place))
    assert not (tmp_path / "ran").exists()


def refused(place: Any) -> bool:
    try:
        socket.create_connection(place).close()
    except ConnectionError:
        return True
    return False


def test_more_strangers_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_MAX_HANDSHAKES", 2)
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.05)
    listeners = at_loopback(2)
    meeting = listeners[0].getsockname()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        strangers = [stack.enter_context(socket.create_connection(meeting)) for _ in range(12)]
        first = member(listeners[0], 0, 2)
        calls = [pool.submit(first.join, None)]
        assert [s.recv(1) for s in strangers] == [b""] * 12  # one after another is sent away
        second = member(listeners[1], 1, 2)
        calls += [pool.submit(second.join, meeting)]
        for one in calls:
            one.result()
        talk([first, second])


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    listeners = at_loopback(2)
    found = [member(listener, rank, 2) for rank, listener in enumerate(listeners)]
    meeting = listeners[0].getsockname()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(found[0].join, None)
        with pytest.raises(
            UcformatError,
            match=r"rank 0 died or is unreachable: .* does not know this job's secret",
        ):
            call(meeting, secret=bytes(32))
        found[1].join(meeting)
        first.result()
    talk(found)


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(
        UcformatError,
        match=r"rank 1 did not connect to rank 0 within 0\.1 s, nor did 1 other ranks",
    ) as caught:
        member(at_loopback(1)[0], 0, 3, 0.1).join(None)
    assert "MASTER_ADDR" in str(caught.value.hint)
    gone = at_loopback(1)[0]
    place = gone.getsockname()
    gone.close()
    with pytest.raises(
        UcformatError, match=r"rank 1 could not connect to it at 127\.0\.0\.1:\d+ \(.*refused"
    ):
        call(place)


def test_who_is_never_let_in_gives_up() -> None:
    """Whatever answers there hangs up each time."""
    listener = at_loopback(1)[0]
    place = listener.getsockname()

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hang_up)
        try:
            with pytest.raises(
                UcformatError, match=r"could not connect .*did not accept this rank"
            ):
                call(place, seconds=0.3)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.mark.parametrize("when", ["at once", "after the hello", "after the proof"])
def test_who_took_too_long_calls_again(when: str) -> None:
    """The first time, the one that is called goes away."""
    listener = at_loopback(1)[0]
    place = listener.getsockname()

    def serve() -> Any:
        with listener.accept()[0] as caller:
            hello = b"" if when == "at once" else caller.recv(49)
            if when == "after the proof":
                caller.sendall(bytes(32) + handshake._proof(SECRET, b"called", hello + bytes(32)))
                caller.recv(32)
        first = member(listener, 0, 2)
        first.join(None)
        return first

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(serve)
        second = member(at_loopback(1)[0], 1, 2)
        second.join(place)
        talk([first.result(), second])


def test_a_handshake_that_was_overheard_lets_nobody_in() -> None:
    """A stranger between two ranks passes on and notes all that they say, and says it again at another meeting."""
    listeners = at_loopback(2)
    between = socket.create_server(("127.0.0.1", 0))
    heard: list[bytearray] = []
    meeting = listeners[0].getsockname()

    def pass_on() -> None:
        caller = between.accept()[0]
        called = socket.create_connection(meeting)
        noted = bytearray()
        heard.append(noted)
        for source, target, size in (
            (caller, called, 49),
            (called, caller, 64),
            (caller, called, 32),
            (called, caller, 1),
        ):
            said = b""
            while len(said) < size:
                said += source.recv(size - len(said))
            target.sendall(said)
            if source is caller:
                noted += said
        sockets.extend([caller, called])

    sockets: list[socket.socket] = []
    relay = threading.Thread(target=pass_on)
    relay.start()
    found = [member(listener, rank, 2) for rank, listener in enumerate(listeners)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(found[0].join, None)
        line = call(between.getsockname())
        assert line is not None
        relay.join()
        for one in (line, *sockets):
            one.close()
        with pytest.raises(UcformatError, match="rank 1 died"):
            first.result()
    found[1].end()
    between.close()
    again = at_loopback(2)
    for place in [one.getsockname() for one in again]:
        for said in heard:
            stranger = socket.create_connection(place)
            stranger.sendall(said)  # hello and proof, as they were
            sockets.append(stranger)
    talk(connect_all(again))
    for one in sockets:
        one.close()


def test_an_alarm_of_a_stranger_is_no_news() -> None:
    listeners = at_loopback(2)
    places = [listener.getsockname() for listener in listeners]
    found = connect_all(listeners)
    for rank, place in enumerate(places):
        send_alarm(place, 1 - rank, rank, bytes(32), 1)
    with pytest.raises(PermissionError, match="does not know this job's secret"):
        ask(places[0], 1, 0, bytes(32), time.monotonic() + PATIENCE, lambda: None)
    assert ask(places[0], 1, 0, SECRET, time.monotonic() + PATIENCE, lambda: None) == (0, ())
    assert all(one.intact for one in found)
    talk(found)


def test_a_stranger_who_calls_himself_the_one_that_is_called() -> None:
    """He answers at the place of rank 0, and learns nothing that he could use there."""
    false = socket.create_server(("127.0.0.1", 0))

    def answer() -> bytes:
        caller = false.accept()[0]
        with caller:
            hello = caller.recv(49)
            caller.sendall(bytes(64))
            return hello + caller.recv(1)

    with ThreadPoolExecutor(2) as pool:
        heard = pool.submit(answer)
        with pytest.raises(UcformatError, match="does not know this job's secret"):
            call(false.getsockname())
        assert len(heard.result()) == 49
    false.close()


def test_a_rank_that_sends_a_pickle_is_refused(tmp_path: Path) -> None:
    """It belongs to the job, and is out of its mind: all ranks get an error, and nothing runs."""
    store = dist.HashStore()

    def rank(number: int) -> Any:
        one = Group(connect_by_store(dist.PrefixStore("test", store), number, 2, PATIENCE))
        try:
            if number:
                one.links.send(0, 0, [memoryview(pickle.dumps(Attack(tmp_path / "ran")))])
                return one._answered(list[int])
            return all_gather(one, 1, int)
        except UcformatError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert [type(e) for e in found] == [IntegrityError] * 2
    assert all("a message from another rank cannot be decoded" in e.message for e in found)
    assert not (tmp_path / "ran").exists()


def test_the_secret_is_not_left_at_the_store() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: connect_by_store(store, r, 2, PATIENCE), range(2)))
    assert not store.check(["secret"])
    assert store.check(["host/0", "place/1", "address/1"])


@pytest.mark.parametrize("refusing", [0, 1, 4])
def test_a_rank_that_cannot_listen_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch, refusing: int
) -> None:
    here = threading.local()

    def refuse(places: list[Host], rank: int) -> socket.socket:
        if here.rank == refusing:
            raise OSError(99, "Cannot assign requested address")
        return listen(places, rank)

    monkeypatch.setattr(tree, "listen", refuse)
    monkeypatch.setattr(tree, "FAN_OUT", 2)  # so that rank 1 has children
    store = dist.HashStore()

    def rank(number: int) -> str:
        here.rank = number
        with pytest.raises(UcformatError) as caught:
            connect_by_store(store, number, 7, PATIENCE)
        return caught.value.message

    with ThreadPoolExecutor(7) as pool:
        found = list(pool.map(rank, range(7)))
    assert (
        found == [f"rank {refusing} cannot listen: [Errno 99] Cannot assign requested address"] * 7
    )


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "127.0.0.1"),
        (
            [Host("there", "127.0.0.1")],
            "10.1.2.3",
        ),  # this is the host of the store: its way to the other one
        ([Host("there", "")], "10.9.9.9"),  # nobody knows a way: what this host's name stands for
    ],
)
def test_where_a_rank_listens(
    monkeypatch: pytest.MonkeyPatch, others: list[Host], expected: str
) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(tree, "_route_to", lambda host, _: "10.1.2.3" if host else "")
    monkeypatch.setattr(tree, "_own_address", lambda: "10.9.9.9")
    monkeypatch.setattr(socket, "create_server", lambda address, **_: bound.append(address))
    listen([Host("here", ""), Host("here", ""), *others], 0)
    assert bound == [(expected, 0)]


def test_a_rank_that_is_not_at_the_store_listens_where_it_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(
        socket, "create_server", lambda address, **given: bound.append((address, given["family"]))
    )
    listen([Host("here", "10.7.7.7"), Host("there", "")], 0)
    listen([Host("here", "fd00::7"), Host("there", "")], 0)
    assert bound == [(("10.7.7.7", 0), socket.AF_INET), (("fd00::7", 0), socket.AF_INET6)]


def test_a_host_knows_itself() -> None:
    assert host_here(None) == host_here(None)
    assert host_here(None).identity


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks("tests.torch.strangers_program")


@pytest.mark.matrix
def test_strangers_at_the_writers_of_async_save(ranks: Ranks, tmp_path: Path) -> None:
    """Every port that a rank or its writer opens is called, with pickles and garbage, while a save is under way."""
    for saved, listening, called in ranks.run("attacked", 2, tmp_path):
        assert ucformat.open(tmp_path / "saved").id == saved
        assert listening == []
        assert called > 0
    assert not (tmp_path / "ran").exists()
