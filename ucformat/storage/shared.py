"""The documents of a checkpoint, read by one process for many.

All ranks of a job open the same checkpoint, and make the same requests for it. One of them remembers the answers; the
others get them, and request only what is not among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ucformat.errors import NotFound
from ucformat.storage.base import Info, content_version
from ucformat.storage.watched import WatchedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.storage.base import Store


class Question(NamedTuple):
    """A request to a store.

    Attributes:
        call: `info`, `read`, `list`, or `begin` for the first entries of a listing that was not read to its end.
        nbytes: of a read; -1: to the end of the file.
    """

    store: str
    call: str
    key: str
    offset: int = 0
    nbytes: int = -1


#: What a store has answered: bytes, the files of a listing, one file, or None if there is no such file.
Answer = bytes | tuple[Info, ...] | None


class RememberingStore(WatchedStore):
    """A watched store that asks each question once: those for bytes until `forget_bytes` is called, others always.

    Files that are known from `answers` alone are not compared at the end: that is for the process that has read them.
    """

    def __init__(self, inner: Store, answers: dict[Question, Answer]) -> None:
        super().__init__(inner)
        self._answers = answers
        self._keeps_bytes = True

    def forget_bytes(self) -> None:
        """Read from the inner store from now on; files that were looked up or listed stay known."""
        self._keeps_bytes = False
        self._answers = {q: a for q, a in self._answers.items() if q.call != "read"}

    def info(self, key: str) -> Info:
        """See Store."""
        question = Question(self.url, "info", key)
        if question not in self._answers:
            try:
                self._answers[question] = (super().info(key),)
            except NotFound:
                self._answers[question] = None
        found = self._answers[question]
        if not isinstance(found, tuple):
            raise NotFound(f"{self.url}/{key} does not exist")
        return self._known(found[0])

    def _known(self, info: Info) -> Info:
        """Keep the version of a file as one that was listed, unless each host may have a disk of its own."""
        if not self._uses_info:
            self._seen.setdefault(info.key, info)
        return info

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        whole, begin = Question(self.url, "list", prefix), Question(self.url, "begin", prefix)
        answers = self._answers
        known = answers.get(whole, answers.get(begin))
        known = known if isinstance(known, tuple) else ()
        yield from map(self._known, known)
        if whole in answers:
            return
        keys, found, question = {info.key for info in known}, [], begin
        try:
            for info in super().list(prefix):
                found.append(info)
                if info.key not in keys:
                    yield info
            question = whole
        finally:
            answers[question] = tuple(found)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        if not self._keeps_bytes:
            return super().read(key, offset, nbytes)
        question = Question(self.url, "read", key, offset, -1 if nbytes is None else nbytes)
        known = self._answers.get(question)
        if isinstance(known, bytes):
            return known
        data = self._answers[question] = super().read(key, offset, nbytes)
        return data

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        if not self._keeps_bytes:
            return super().read_versioned(key)
        data = self.read(key)
        return data, content_version(data)
