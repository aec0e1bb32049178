"""What a source is: a reader of one kind of foreign checkpoint, which yields tensors and their extents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.facts import Facts
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.storage.base import Store

__all__ = ["OpenSource", "Record", "Source"]


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of a file that stand under one checksum; `crc32` is None where the writer computed none."""

    file: str
    name: str
    nbytes: int
    crc32: int | None
    offset: Callable[[], int]  # where they begin; it may have to be read


class OpenSource(Protocol):
    """One opened foreign checkpoint."""

    kind: str
    store: Store
    facts: Facts

    def extents(self, key: Key) -> Iterator[Extent]:
        """Where the bytes of one tensor lie. Together they cover it; else MissingData or CoverageError."""

    def records(self) -> Iterator[Record]:
        """Every record of the checkpoint's files, where these have records with checksums; else none."""


class Source(Protocol):
    """How one kind of foreign checkpoint is recognised and opened."""

    kind: str

    def marks(self, name: str) -> bool:
        """Whether a folder with a file of this name is a checkpoint of this kind: how a tree of them is searched."""

    def find(self, store: Store) -> bool:
        """Whether this place looks like a checkpoint of this kind; reads a folder listing and little else."""

    def open(self, store: Store) -> OpenSource:
        """Open it, reading kilobytes of each file."""
