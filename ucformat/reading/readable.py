"""What tensors are read from: an opened checkpoint of any kind, or a view of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key, Tiles
    from ucformat.reading.facts import Facts
    from ucformat.storage.base import Store

__all__ = ["Readable", "Record"]


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of a file that stand under one checksum; `crc32` is None where the writer computed none.

    They begin at `offset()`, after `near` and before any other record's `near`.
    """

    file: str
    name: str
    nbytes: int
    crc32: int | None
    offset: Callable[[], int]  # it may have to be read
    near: int = 0


class Readable(Protocol):
    """What tensors are read from: an opened checkpoint, whoever wrote it, or a view of one."""

    kind: str
    store: Store
    facts: Facts

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent | Tiles]:
        """Where the bytes of one tensor lie: at least those extents that meet the box `within` (None: all).

        Together they cover it. Of a source that says more than it must, the callers take what they need.

        Args:
            key: the tensor's.
            within: the box, in elements of the tensor.

        Raises:
            MissingData: a part of the tensor is stored in no file.
            CoverageError: the extents leave a hole.
        """
