"""A checkpoint whose files are in several places: each is read from the one that a function names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.errors import NotFound
from ucformat.storage.base import Costs, check_key
from ucformat.storage.wrappers import RoutedStore
from ucformat.torch.tiers.peer import ReadOnlyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import NoReturn

    from ucformat.storage.base import Checksums, Info, Store

__all__ = ["LocatedStore"]

_HINT = "the nodes that had it, or its copies, did not survive"


class LocatedStore(RoutedStore):
    """The files of one folder, each read from one of the places that have some of them.

    Args:
        url: what errors call the folder; the same on all ranks.
        locate: returns the number of the place from which a file is read, or None if it is in none.
        open_place: opens a place when it is first needed.
        places: the numbers of all places.
    """

    def __init__(
        self,
        url: str,
        locate: Callable[[str], int | None],
        open_place: Callable[[int], Store],
        places: Collection[int],
    ) -> None:
        super().__init__(_Nowhere(url))
        self._locate, self._open_place, self._places = locate, open_place, places
        self._stores: dict[int, Store] = {}

    def place(self, key: str) -> tuple[Store, str] | None:
        """See RoutedStore."""
        number = self._locate(check_key(key))
        return None if number is None else (self._store(number), key)

    def _store(self, number: int) -> Store:
        return self._stores.get(number) or self._stores.setdefault(number, self._open_place(number))

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        listed = (
            info
            for number in self._places
            for info in self._store(number).list(prefix)
            if self._locate(info.key) == number
        )
        return iter(sorted(listed, key=lambda info: info.key))

    def adopt(self, key: str) -> None:
        """See Store."""
        self.info(key)


class _Nowhere(ReadOnlyStore):
    """A store without files; its costs are those of a network, over which the others may be read."""

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    @property
    def costs(self) -> Costs:
        return Costs(request=16 << 20, join=8 << 20, parallel=8)

    def info(self, key: str) -> Info:
        self._miss(key)

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:  # noqa: ARG002
        self._miss(key)

    def read_into(
        self,
        key: str,
        offset: int,  # noqa: ARG002
        buffers: Sequence[memoryview],
        crcs: Checksums | None = None,  # noqa: ARG002
    ) -> None:
        if any(buffer.nbytes for buffer in buffers):
            self._miss(key)

    def list(self, prefix: str = "") -> Iterator[Info]:  # noqa: ARG002
        return iter(())

    def _miss(self, key: str) -> NoReturn:
        raise NotFound(f"{self._url}/{check_key(key)} does not exist anywhere", hint=_HINT)
