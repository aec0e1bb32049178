"""What there is in a place, listed once while a foreign checkpoint is recognised and opened.

Many kinds are tried, and each looks for files of its own. In an object store every look is a request that waits; one
list of the place answers them all.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ucformat.errors import NotFound, UcformatError
from ucformat.storage.base import check_key
from ucformat.storage.lending import lend
from ucformat.storage.wrapped import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from ucformat.storage.base import Info, Store
    from ucformat.storage.lending import Lent

__all__ = ["Remembered"]

_MOST = 10_000  # files; of a place with more nothing is remembered


class Remembered(WrappedStore):
    """A store that, inside its block, knows what it held when it was first asked; after that it is the one inside."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._known: dict[str, Info] | None = None
        self._asked = True

    def __enter__(self) -> Self:
        self._asked = self.inner.costs.parallel is None  # on a local disk a look costs nothing
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._known, self._asked = None, True

    def _files(self) -> dict[str, Info] | None:
        """All files by key; None where that is not known."""
        if not self._asked:
            self._asked = True
            try:
                found = {info.key: info for info in islice(self.inner.list(), _MOST + 1)}
            except UcformatError:  # a place that cannot be listed
                return None
            self._known = found if len(found) <= _MOST else None
        return self._known

    def info(self, key: str) -> Info:
        """See Store."""
        files = self._files()
        if files is None:
            return self.inner.info(key)
        if check_key(key) not in files:
            raise NotFound(f"{self.url}/{key} does not exist")
        return files[key]

    def lend(self, key: str, ranges: Sequence[tuple[int, int]]) -> Lent | None:
        """See Lends."""
        return lend(self.inner, key, ranges)

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        files = self._files()
        if files is None:
            return self.inner.list(prefix)
        below = f"{check_key(prefix)}/" if prefix else ""
        return (info for key, info in files.items() if key.startswith(below))
