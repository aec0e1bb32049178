"""What the cache needs of a store."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ucformat.storage.base import Info, Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.storage.local_files import Descriptor

#: A file and bytes of it, in memory that belongs to the store until the `with` block ends.
InfoAndBytes = AbstractContextManager[tuple[Info, memoryview]]


class VersionedStore(Store, Protocol):
    """A store of which the cache can keep files."""

    @property
    def identity(self) -> str:
        """What distinguishes its files from all others: the URL, and the service that the settings make of it."""

    def read_with_info(self, key: str, offset: int, nbytes: int, known: Info | None = None) -> InfoAndBytes:
        """Read a range of a file, and the version of the file that the bytes are of.

        Args:
            known: the version that the file probably has, which was asked for earlier (None: unknown).
        """


class Asks(Protocol):
    """A store that knows versions of its files, and asks for the current ones."""

    #: The last known version of each file.
    known: dict[str, Info]

    @property
    def url(self) -> str:
        """The URL of the store."""

    def ask(self, keys: Sequence[str], span: tuple[int, int] | None = None) -> Mapping[str, Info]:
        """Ask for the current version of each of several files; those that do not exist are left out.

        Args:
            span: first byte, and byte after the last, that will be read of them (None: unknown). They may be received
                with the answer.
        """

    def ask_listing(self, patience: float) -> Mapping[str, Info] | None:
        """Ask for the current versions of all files; None if they cannot be listed, or are too many.

        Args:
            patience: seconds to wait for others that read files of the store, and will ask, too.
        """

    def join(self) -> Descriptor | None:
        """Be among those that read files of the store until the descriptor is closed; None if that fails."""

    def has_others(self, joined: Descriptor) -> bool:
        """Whether others read files of the store."""
