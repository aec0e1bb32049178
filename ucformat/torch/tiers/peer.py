"""The files that another rank serves, as a store."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

from ucformat.errors import UcformatError, UnsupportedError
from ucformat.storage.base import Costs, FlatStore, Info, check_key, check_range
from ucformat.storage.concurrency import grouped, thread_memory
from ucformat.storage.strided import extend, fill, nbytes_of
from ucformat.torch.comm.wire import decode
from ucformat.torch.tiers.requests import (
    ANSWER,
    ERRORS,
    INFO,
    LIST,
    MOST_BYTES,
    READ,
    REQUEST,
    Listing,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Checksums, FileWriter
    from ucformat.torch.comm.bulk import Links

__all__ = ["PeerStore", "ReadOnlyStore"]

_MOST_IDLE = 4  # connections that a store keeps for its next reads
_MOST_BUFFERS = 64  # that one call receives into
_AT_ONCE = 1 << 20  # bytes of buffers that are received together
_COSTS = Costs(gap=16 << 10, short=4 << 10, request=16 << 20, join=8 << 20, parallel=8)


class ReadOnlyStore(FlatStore):
    """A store that refuses whatever would change it."""

    def create(self, key: str, unit: int = 1) -> FileWriter:  # noqa: ARG002
        """See Store."""
        self._refuse(key)

    def put_if_absent(self, key: str, data: bytes) -> str:  # noqa: ARG002
        """See Store."""
        self._refuse(key)

    def replace(self, key: str, data: bytes, version: str) -> str:  # noqa: ARG002
        """See Store."""
        self._refuse(key)

    def delete(self, key: str) -> None:
        """See Store."""
        self._refuse(key)

    def delete_prefix(self, prefix: str) -> None:
        """See Store."""
        self._refuse(prefix)

    def _refuse(self, key: str) -> NoReturn:
        check_key(key)
        raise UnsupportedError(
            f"{self.url}/{key} cannot be changed, only read",
            hint="save to the url of the manager, or of one of its tiers",
        )


class PeerStore(ReadOnlyStore):
    """Files of a folder that another rank serves.

    Bytes are received straight into their destination. Each thread that reads uses a connection of
    its own; a few are kept.

    Args:
        rank: the rank that serves them.
        folder: below the folder that it serves (`""`: that itself).
    """

    def __init__(self, links: Links, rank: int, root: str, folder: str) -> None:
        self._links, self._rank, self._root, self._folder = links, rank, root, folder
        self._idle: list[socket.socket] = []
        self._changing = threading.Lock()

    @property
    def url(self) -> str:
        """The folder, as its rank calls it, and the rank."""
        folder = f"/{self._folder}" if self._folder else ""
        return f"{self._root}{folder} of rank {self._rank}"

    @property
    def costs(self) -> Costs:
        """Those of a network."""
        return _COSTS

    def info(self, key: str) -> Info:
        """See Store."""
        with self._asking(INFO, self._key(key)) as (connection, nbytes):
            (info,) = decode(_receive(connection, nbytes), Listing)
        return self._relative(info)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if offset < 0 or (nbytes or 0) < 0:
            check_range(f"{self.url}/{check_key(key)}", offset, nbytes or 0, self.info(key).size)
        asked = -1 if nbytes is None else nbytes
        with self._asking(READ, self._key(key), offset, asked) as (connection, size):
            return bytes(_receive(connection, size))

    def read_into(
        self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None
    ) -> None:
        """Receive a range into buffers, without a copy where these are contiguous."""
        name, wanted = self._key(key), nbytes_of(buffers)
        if not wanted:
            return
        if offset < 0:
            check_range(f"{self.url}/{key}", offset, wanted, self.info(key).size)
        with self._asking(READ, name, offset, wanted) as (connection, _):
            _scatter(connection, list(buffers))
        extend(crcs, list(buffers))

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Receive rows of equal sizes by one request for many of them."""
        name = self._key(key)
        for nbytes, group in groupby(enumerate(rows), lambda numbered: numbered[1].nbytes):
            numbered = iter(group)
            if nbytes == 0:
                continue
            while batch := list(islice(numbered, max(1, MOST_BYTES // nbytes))):
                first = offset + batch[0][0] * step
                if first < 0 or step < 0 or len(batch) == 1:
                    self._each_row(key, offset, step, batch)
                    continue
                with self._asking(READ, name, first, nbytes, step, len(batch)) as (connection, _):
                    _scatter(connection, [row for _, row in batch])

    def _each_row(
        self, key: str, offset: int, step: int, batch: Sequence[tuple[int, memoryview]]
    ) -> None:
        for number, row in batch:
            self.read_into(key, offset + number * step, [row])

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        name = self._key(prefix) if prefix else self._folder
        with self._asking(LIST, name) as (connection, nbytes):
            listed: Listing = decode(_receive(connection, nbytes), Listing)
        return map(self._relative, listed)

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._changing:
            idle, self._idle = self._idle, []
        for connection in idle:
            self._links.close_files(connection)

    def _key(self, key: str) -> str:
        return f"{self._folder}/{check_key(key)}" if self._folder else check_key(key)

    def _relative(self, info: Info) -> Info:
        from dataclasses import replace

        return replace(info, key=info.key.removeprefix(f"{self._folder}/"))

    @contextmanager
    def _asking(
        self, what: int, key: str, offset: int = 0, nbytes: int = 0, step: int = 0, count: int = 1
    ) -> Iterator[tuple[socket.socket, int]]:
        """Ask, and use the connection to receive the answer of so many bytes; it is kept if all were received."""
        name = key.encode()
        request = REQUEST.pack(what, len(name), offset, nbytes, step, count) + name
        connection, size = self._ask(request, key)
        if size < 0 or (what == READ and nbytes >= 0 and size != nbytes * count):
            self._links.close_files(connection)
            raise UcformatError(
                f"{self._root}/{key}: rank {self._rank} answers with {size} bytes, not {nbytes * count}"
            )
        try:
            yield connection, size
        except OSError as error:
            self._links.close_files(connection)
            raise self._lost(key, error) from error
        except BaseException:  # bytes of the answer may be left
            self._links.close_files(connection)
            raise
        self._keep(connection)

    def _ask(self, request: bytes, key: str) -> tuple[socket.socket, int]:
        """A connection over which a request is answered, and the size of the answer."""
        while True:
            with self._changing:
                kept = self._idle.pop() if self._idle else None
            connection = kept or self._connect()
            try:
                connection.sendall(request)
                outcome, size = ANSWER.unpack(_receive(connection, ANSWER.size))
                if not outcome:
                    return connection, size
                text = bytes(_receive(connection, size)).decode(errors="replace")
            except OSError as error:
                self._links.close_files(connection)
                if kept is None:  # one that was kept may have given way to another
                    raise self._lost(key, error) from error
                continue
            self._keep(connection)
            raise ERRORS.get(outcome, UcformatError)(f"{text} (rank {self._rank})")

    def _connect(self) -> socket.socket:
        with self._links.communicating("to read files of", self._rank):
            connection = self._links.connect_to_files(self._rank)
        connection.settimeout(self._links.timeout)
        return connection

    def _keep(self, connection: socket.socket) -> None:
        with self._changing:
            if len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
                return
        self._links.close_files(connection)

    def _lost(self, key: str, error: OSError) -> UcformatError:
        return UcformatError(
            f"{self._root}/{key} cannot be read from rank {self._rank}: {error}",
            hint="see the first error in the log of that rank",
        )


def _receive(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    _fill(connection, [memoryview(data)])
    return data


def _scatter(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Receive into buffers; those with rows apart, or short ones, by way of contiguous memory of this thread."""
    for group in grouped(buffers, attrgetter("nbytes"), _AT_ONCE):
        if all(b.c_contiguous for b in group) and len(group) <= _MOST_BUFFERS:
            _fill(connection, [b.cast("B") for b in group if b.nbytes])
        else:
            data = thread_memory("received", sum(b.nbytes for b in group)).data
            _fill(connection, [data])
            fill(group, data)


def _fill(connection: socket.socket, buffers: list[memoryview]) -> None:
    """Receive into buffers, one after another."""
    remaining = [b for b in reversed(buffers) if b.nbytes]
    while remaining:
        got = connection.recvmsg_into(remaining[::-1])[0]
        if not got:
            raise ConnectionResetError("the connection was closed")
        while remaining and got >= remaining[-1].nbytes:
            got -= remaining.pop().nbytes
        if got:
            remaining[-1] = remaining[-1][got:]
