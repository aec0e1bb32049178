"""Serves the files of checkpoints in a node's folder, or in memory, to the other ranks of the job, and to nobody else.

Connections come from the listener of the group, which has authenticated the other side. Only files
below the folders of steps are served, read only, and no link is followed out of the tier's folder.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ucformat.errors import MissingData, NotFound, UcformatError
from ucformat.storage.base import check_key, check_range
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.memory import MemoryStore
from ucformat.storage.strided import read_scattered
from ucformat.torch.comm.wire import encode
from ucformat.torch.manager.steps import step_of
from ucformat.torch.tiers.requests import (
    ANSWER,
    ERRORS,
    INFO,
    LIST,
    MOST_BYTES,
    OTHER,
    READ,
    REQUEST,
    Listing,
)

if TYPE_CHECKING:
    from ucformat.storage.local import LocalStore

__all__ = ["MOST_READERS", "FileServer"]

#: The most connections that are answered at once; one that is idle gives way to another.
MOST_READERS = 64
_IDLE_S = 0.5  # seconds after which a connection may be closed for another one


class _Reader:
    """A connection over which a rank reads.

    `since` is when it was answered last, and None while it is answered, or has not asked yet.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.since: float | None = None


class FileServer:
    """Answers ranks that read files of a node, each connection in a thread of its own.

    Args:
        store: the folder of the tier on this node (None: none is served).
    """

    def __init__(self, store: LocalStore | None = None) -> None:
        self._store = None if store is None else store.confined(lambda _: False)
        self._in_memory: dict[str, MemoryStore] = {}  # by folder
        self._readers: dict[socket.socket, _Reader] = {}
        self._changing = threading.Lock()

    def has_room(self) -> bool:
        """See FileTaker."""
        with self._changing:
            if len(self._readers) < MOST_READERS:
                return True
            now = time.monotonic()
            idle = [r for r in self._readers.values() if r.since and now - r.since > _IDLE_S]
            if not idle:
                return False
            longest = min(idle, key=lambda r: r.since or now)
            del self._readers[longest.connection]
        with suppress(OSError):  # its thread then ends
            longest.connection.shutdown(socket.SHUT_RDWR)
        return True

    def take(self, connection: socket.socket) -> None:
        """See FileTaker."""
        reader = _Reader(connection)
        with self._changing:
            self._readers[connection] = reader
        thread = threading.Thread(
            target=self._serve, args=(reader,), daemon=True, name="ucformat-files"
        )
        thread.start()

    def add(self, folder: str, store: MemoryStore) -> None:
        """Serve a folder of files in memory, too."""
        self._in_memory[folder] = store

    def remove(self, folder: str) -> None:
        """Serve it no longer."""
        del self._in_memory[folder]

    def close(self) -> None:
        """End all connections."""
        with self._changing:
            readers, self._readers = list(self._readers), {}
        for connection in readers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, reader: _Reader) -> None:
        connection = reader.connection
        connection.setblocking(True)
        try:
            while True:
                head = _receive(connection, REQUEST.size)
                reader.since = None
                what, key_bytes, offset, nbytes, step, count = REQUEST.unpack(head)
                key = _receive(connection, key_bytes).decode()
                self._answer(connection, what, key, (offset, nbytes, step, count))
                reader.since = time.monotonic()
        except (OSError, UnicodeDecodeError):  # it hung up, or is no client of ours
            pass
        finally:
            with self._changing:
                self._readers.pop(connection, None)
            connection.close()

    def _answer(
        self, connection: socket.socket, what: int, key: str, at: tuple[int, int, int, int]
    ) -> None:
        """Answer one request; OSError if the connection is lost."""
        data: memoryview | bytes
        try:
            store = self._served(key)
            if what == LIST:
                data = encode(tuple(store.list(key)), Listing)
            elif what == INFO:
                data = encode((store.info(key),), Listing)
            elif what == READ and at[3] == 1:
                _send(connection, store, key, at[0], at[1])
                return
            elif what == READ:
                data = _rows(store, key, *at)
            else:
                _refuse(what)
        except UcformatError as error:
            outcome = next((n for n, kind in ERRORS.items() if isinstance(error, kind)), OTHER)
            text = error.message.encode(errors="replace")
            connection.sendall(ANSWER.pack(outcome, len(text)) + text)
            return
        connection.sendall(ANSWER.pack(0, len(data)))
        connection.sendall(data)

    def _served(self, key: str) -> LocalStore | MemoryStore:
        """The store of a key, which is below the folder of a step, or one in memory."""
        folder = check_key(key).partition("/")[0]
        store = self._in_memory.get(folder)
        if store is None and self._store is not None and step_of(folder) is not None:
            return self._store
        if store is None:
            raise NotFound(f"{key} is not served: it is of no step")
        return store


def _send(
    connection: socket.socket, store: LocalStore | MemoryStore, key: str, offset: int, nbytes: int
) -> None:
    """Send a range of a file from the page cache, or from memory; the bytes are not copied in this process."""
    if isinstance(store, MemoryStore):
        with store.viewed(key, offset, None if nbytes < 0 else nbytes) as data:
            connection.sendall(ANSWER.pack(0, data.nbytes))
            connection.sendall(data)
        return
    with store.opened(key) as file:
        name, size = f"{store.url}/{key}", os.fstat(file).st_size
        nbytes = size - offset if nbytes < 0 else nbytes
        check_range(name, offset, nbytes, size)
        connection.sendall(ANSWER.pack(0, nbytes))
        while nbytes:
            sent = os.sendfile(connection.fileno(), file, offset, nbytes)
            if not sent:  # the file became shorter: the other side sees the end of the answer
                raise OSError(f"{name} was truncated")
            offset, nbytes = offset + sent, nbytes - sent


def _rows(
    store: LocalStore | MemoryStore, key: str, offset: int, nbytes: int, step: int, count: int
) -> memoryview:
    if not (nbytes > 0 and count >= 0 and nbytes * count <= MOST_BYTES):
        raise MissingData(f"{count} rows of {nbytes} bytes are more than one answer has")
    out = memoryview(bytearray(nbytes * count))
    rows = [out[n * nbytes : (n + 1) * nbytes] for n in range(count)]
    if isinstance(store, MemoryStore):
        store.read_rows(key, offset, step, rows)
        return out
    name = f"{store.url}/{key}"
    check_range(name, min(offset, step), 0, 0)
    # not by the store, which would keep the file open, and with it the memory of one that is removed
    with store.opened(key) as file, mapping_os_errors("read", name):
        for number, row in enumerate(rows):
            got = read_scattered(file, offset + number * step, [row])
            check_range(name, offset + number * step, nbytes, offset + number * step + got)
    return out


def _refuse(what: int) -> NoReturn:
    raise UcformatError(f"{what} is no request for files")


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        chunk = connection.recv(nbytes - len(data))
        if not chunk:
            raise ConnectionResetError("it hung up")
        data += chunk
    return bytes(data)
