"""Stores over the files of other ranks, and over several places at once: what every store does."""

from __future__ import annotations

import os
import random
import socket
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE, wait_until
from tests.torch.comm_pairs import pair
from ucformat.errors import NotFound, UcformatError, UnsafeError, UnsupportedError
from ucformat.format.described import packed_file
from ucformat.storage.local import LocalStore
from ucformat.storage.wrappers import WrappedStore
from ucformat.testing.stores import StoreTests, put
from ucformat.torch.tiers import copying, serving
from ucformat.torch.tiers.copying import copy_from_peers
from ucformat.torch.tiers.located import LocatedStore
from ucformat.torch.tiers.nodes import Node, Nodes
from ucformat.torch.tiers.peer import PeerStore
from ucformat.torch.tiers.requests import ANSWER, MOST_BYTES
from ucformat.torch.tiers.serving import FileServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.storage.base import FileWriter, Store
    from ucformat.torch.comm.bulk import Links

STEP = "step-00000001"


@pytest.fixture(scope="module")
def links() -> Iterator[tuple[Links, Links]]:
    """The connections of two ranks, both in this process."""
    with pair() as both:
        yield both


@pytest.fixture
def peer(links: tuple[Links, Links], tmp_path: Path) -> Iterator[PeerStore]:
    """The files of rank 0's node in a step, as rank 1 reads them."""
    server = FileServer(LocalStore(tmp_path))
    links[0].files = server
    store = PeerStore(links[1], 0, str(tmp_path), STEP)
    yield store
    store.close()
    links[0].files = None
    server.close()


class _WrittenThere(WrappedStore):
    """Reads through one store what is written to the folders that it reads."""

    def __init__(self, reading: Store, folders: Sequence[LocalStore]) -> None:
        super().__init__(reading)
        self.folders = folders

    def _folder(self, key: str) -> LocalStore:
        return self.folders[place_of(key, len(self.folders))]

    def create(self, key: str, unit: int = 1) -> FileWriter:
        return self._folder(key).create(key, unit)

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._folder(key).put_if_absent(key, data)

    def replace(self, key: str, data: bytes, version: str) -> str:
        return self._folder(key).replace(key, data, version)

    def flush(self) -> None:
        for folder in self.folders:
            folder.flush()

    def delete(self, key: str) -> None:
        self._folder(key).delete(key)

    def delete_prefix(self, prefix: str) -> None:
        for folder in self.folders:
            folder.delete_prefix(prefix)

    def prune(self, folder: str) -> None:
        for each in self.folders:
            each.prune(folder)


def place_of(key: str, count: int) -> int:
    return zlib.crc32(key.encode(errors="replace")) % count


class TestPeer(StoreTests):
    @pytest.fixture
    def store(self, peer: PeerStore, tmp_path: Path) -> Store:
        return _WrittenThere(peer, [LocalStore(tmp_path / STEP)])


class TestLocated(StoreTests):
    """Files that are dealt to this node, to a peer and to a slower tier."""

    @pytest.fixture
    def store(self, peer: PeerStore, tmp_path: Path) -> Store:
        folders = [LocalStore(tmp_path / n / STEP) for n in ("own", "slow")]
        folders.append(LocalStore(tmp_path / STEP))
        places: list[Store] = [*folders[:2], peer]
        located = LocatedStore(
            str(tmp_path), lambda key: place_of(key, 3), places.__getitem__, range(3)
        )
        return _WrittenThere(located, folders)


def test_nothing_is_written_through_them(peer: PeerStore, tmp_path: Path) -> None:
    put(LocalStore(tmp_path / STEP), "f")
    located = LocatedStore("here", lambda _: 0, lambda _: peer, [0])
    changes: list[Callable[[Store], object]] = [
        lambda s: s.create("f"),
        lambda s: s.put_if_absent("g", b""),
        lambda s: s.replace("f", b"", ""),
        lambda s: s.delete("f"),
        lambda s: s.delete_prefix("f"),
    ]
    for store in (peer, located):
        for change in changes:
            with pytest.raises(UnsupportedError, match="only read"):
                change(store)
    assert peer.read("f") == b"x"


def test_what_is_nowhere_is_not_found(tmp_path: Path) -> None:
    store = LocatedStore(str(tmp_path), lambda _: None, lambda _: LocalStore(tmp_path), [])
    put(LocalStore(tmp_path), "f")
    for read in (store.info, store.read, store.read_versioned):
        with pytest.raises(NotFound, match="f does not exist anywhere"):
            read("f")
    assert list(store.list()) == []


class TestWhatIsServed:
    """Only files below the folders of steps, in the tier's folder."""

    def test_no_other_folder(self, peer: PeerStore, tmp_path: Path) -> None:
        put(LocalStore(tmp_path), "secret/key")
        put(LocalStore(tmp_path), "step-1")
        put(LocalStore(tmp_path / STEP), "f")
        for folder in ("secret", "step-1", "..", f"{STEP}/../secret", "/etc"):
            other = PeerStore(peer._links, 0, str(tmp_path), folder)
            for read in (other.info, other.read, lambda key, o=other: list(o.list())):
                with pytest.raises((NotFound, UnsafeError)):
                    read("key")
            other.close()
        assert peer.read("f") == b"x"

    def test_no_link_out_of_it(self, peer: PeerStore, tmp_path: Path) -> None:
        folder = tmp_path / STEP
        folder.mkdir()
        outside = tmp_path.parent / f"{tmp_path.name}-outside"
        outside.write_bytes(b"secret")
        (folder / "link").symlink_to(outside)
        with pytest.raises(UnsafeError, match="leads out of"):
            peer.read("link")
        with pytest.raises(UnsafeError, match="leads out of"):
            peer.read_into("link", 0, [memoryview(bytearray(3))])

    def test_nobody_without_the_secret(self, peer: PeerStore, links: tuple[Links, Links]) -> None:
        """As for all connections of a group: a stranger is not answered."""
        with socket.create_connection(links[0].address) as stranger:
            stranger.sendall(b"ucformat" + bytes(8) + b"\4" + bytes(32) + bytes(32))
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionError):
                assert len(stranger.recv(1 << 16)) <= 64  # a challenge, which answers nothing
                assert stranger.recv(1) == b""

    def test_not_what_is_no_request(self, peer: PeerStore) -> None:
        with (
            pytest.raises(UcformatError, match="no request"),
            peer._asking(9, f"{STEP}/f"),
        ):
            pass

    def test_no_rows_without_bytes(self, peer: PeerStore, tmp_path: Path) -> None:
        put(LocalStore(tmp_path / STEP), "f", bytes(100))
        with (
            pytest.raises(UcformatError, match="more than one answer has"),
            peer._asking(0, f"{STEP}/f", 0, 0, 0, 1 << 60),
        ):
            pass

    def test_not_more_rows_than_it_has_memory_for(self, peer: PeerStore, tmp_path: Path) -> None:
        put(LocalStore(tmp_path / STEP), "f", bytes(100))
        with (
            pytest.raises(UcformatError, match="more than one answer has"),
            peer._asking(0, f"{STEP}/f", 0, 1 << 40, 0, 1 << 30),
        ):
            pass
        assert peer.read("f", 0, 3) == bytes(3)


def test_a_file_that_becomes_shorter_while_it_is_sent_is_an_error(
    peer: PeerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(1).randbytes(1 << 20)
    put(LocalStore(tmp_path / STEP), "f", data)
    true_send = os.sendfile

    def send(out: int, file: int, offset: int, nbytes: int) -> int:
        os.truncate(tmp_path / STEP / "f", 1000)
        return true_send(out, file, offset, nbytes)

    monkeypatch.setattr(os, "sendfile", send)
    with pytest.raises(UcformatError, match="cannot be read from rank 0"):
        peer.read_into("f", 0, [memoryview(bytearray(1 << 20))])
    monkeypatch.undo()
    assert peer.read("f") == data[:1000]


def test_more_readers_than_there_is_room_for_take_turns(
    peer: PeerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: tuple[Links, Links]
) -> None:
    monkeypatch.setattr(serving, "MOST_READERS", 2)
    monkeypatch.setattr(serving, "_IDLE_S", 0.02)
    files = {f"f{n}": random.Random(n).randbytes(10_000) for n in range(8)}
    for key, data in files.items():
        put(LocalStore(tmp_path / STEP), key, data)
    stores = [PeerStore(links[1], 0, str(tmp_path), STEP) for _ in files]
    failures: list[Any] = []

    def read(store: PeerStore, key: str) -> None:
        try:
            assert [store.read(key) for _ in range(5)] == [files[key]] * 5
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(stores, files, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    for store in stores:
        store.close()


def test_a_connection_that_was_closed_meanwhile_is_made_anew(
    peer: PeerStore, tmp_path: Path, links: tuple[Links, Links]
) -> None:
    put(LocalStore(tmp_path / STEP), "f", b"abc")
    assert peer.read("f") == b"abc"
    server: Any = links[0].files
    server.close()  # as when it gives way to another
    wait_until(lambda: not server._readers)
    assert peer.read("f") == b"abc"


def test_rows_of_a_file_come_by_few_requests(
    peer: PeerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(4).randbytes(100_000)
    put(LocalStore(tmp_path / STEP), "f", data)
    asked: list[bytes] = []
    true_ask = PeerStore._ask

    def ask(self: PeerStore, request: bytes, key: str) -> tuple[socket.socket, int]:
        asked.append(request)
        return true_ask(self, request, key)

    monkeypatch.setattr(PeerStore, "_ask", ask)
    rows = [bytearray(10) for _ in range(5000)]
    peer.read_rows("f", 3, 20, [memoryview(row) for row in rows])
    assert rows == [data[3 + 20 * n : 13 + 20 * n] for n in range(5000)]
    assert len(asked) == 1
    assert MOST_BYTES >= 5000 * 10


def test_peers_copy_what_a_node_has_written_while_it_copies_too(
    peer: PeerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: tuple[Links, Links]
) -> None:
    """Each of its files once, and none that came from elsewhere, whenever each rank lists them."""
    nodes = Nodes((Node("a", ((0, 1), (3, 5))), Node("b", ((1, 3),))))
    there, own = LocalStore(tmp_path / STEP), LocalStore(tmp_path / "b" / STEP)
    files = [packed_file(f"data/{'a' * 20}", n) for n in range(5)]
    for key in ("manifest.json", "objects/x", *(files[n] for n in (0, 3, 4)), "own"):
        put(there, key)
    put(own, files[1], b"its own")
    monkeypatch.setattr(copying, "PeerStore", lambda _, __, *at: PeerStore(links[1], 0, *at))
    for rank in (1, 2):
        ranks: Any = SimpleNamespace(rank=rank, links=links[1])
        documents = {"manifest.json", "objects/x"}
        copy_from_peers(own, str(tmp_path), STEP, [0], documents, nodes, ranks)
        for key in files[1:3]:  # what it gets from others meanwhile
            put(there, key)
    assert {i.key for i in own.list()} == {*files[:2], *files[3:], "own"}
    assert own.read(files[1]) == b"its own"


def test_what_was_served_and_is_removed_is_not_kept_open(peer: PeerStore, tmp_path: Path) -> None:
    """A removed file that is open keeps its memory."""
    put(LocalStore(tmp_path / STEP), "f", bytes(1000))
    peer.read("f")
    peer.read_rows("f", 0, 20, [memoryview(bytearray(10)) for _ in range(5)])
    (tmp_path / STEP / "f").unlink()
    assert not [p for p in Path("/proc/self/fd").iterdir() if str(tmp_path) in _target(p)]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # that of the listing
        return ""


def test_an_answer_of_another_size_is_an_error(
    peer: PeerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it is taken for the answer to the next request."""
    put(LocalStore(tmp_path / STEP), "f", bytes(range(100)))
    monkeypatch.setattr(serving, "_rows", lambda *_: memoryview(bytes(30)))

    def send(connection: socket.socket, *_: Any) -> None:
        connection.sendall(ANSWER.pack(0, 5) + bytes(5))

    with monkeypatch.context() as patch:
        patch.setattr(serving, "_send", send)
        for read in (
            lambda: peer.read("f", 0, 3),
            lambda: peer.read_into("f", 0, [memoryview(bytearray(7))]),
            lambda: peer.read_rows("f", 0, 20, [memoryview(bytearray(10)) for _ in range(5)]),
        ):
            with pytest.raises(UcformatError, match="rank 0 answers with"):
                read()
    assert peer.read("f") == bytes(range(100))
