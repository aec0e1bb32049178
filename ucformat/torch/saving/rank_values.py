"""Values that each rank has as its own, on the way to rank 0: encoded, or in files that ranks wrote on the way.

A rank encodes its values once. On the way up the tree, those of consecutive ranks are put together. A rank at which
they exceed `MOST_BYTES` writes them, and passes on only the entries of the files. So no rank gets the values of all
others, and there are files of some megabytes, however many ranks there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.format.objects import encode_range, put_ranges
from ucformat.schema.manifest import RangesDoc
from ucformat.torch.comm.wire import message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.storage.base import Store

#: The most bytes of values that a rank passes on; it receives no more from each of its children.
MOST_BYTES = 4 << 20


@message
class Ranges:
    """The values of consecutive ranks, from number `first` on: the range of each in a file."""

    first: int
    ranges: tuple[bytes, ...]


@message
class RankValues:
    """The values of consecutive ranks.

    Attributes:
        names: of the values; a rank need not have each.
    """

    names: tuple[str, ...]
    parts: tuple[Ranges | RangesDoc, ...]

    @classmethod
    def of(cls, rank: int, values: Mapping[str, Any]) -> RankValues:
        """Encode the values of a rank."""
        return cls(tuple(values), (Ranges(rank, (encode_range(values),)),))

    @property
    def nbytes(self) -> int:
        """The bytes of values that are in no file; 0 if no rank has any."""
        ranges = (r for part in self.parts if isinstance(part, Ranges) for r in part.ranges)
        return sum(map(len, ranges)) if self.names else 0

    def merged(self, other: RankValues) -> RankValues:
        """Put values together."""
        names, parts = tuple(dict.fromkeys((*self.names, *other.names))), [*self.parts]
        for part in other.parts:
            match parts[-1:], part:
                case [Ranges() as last], Ranges() if last.first + len(last.ranges) == part.first:
                    parts[-1] = Ranges(last.first, last.ranges + part.ranges)
                case _:
                    parts.append(part)
        return RankValues(names, tuple(parts))

    def relieved(self, store: Store, folder: str) -> RankValues:
        """Return what a rank passes on: if the values are many bytes, they are put in files, and made durable."""
        if self.nbytes <= MOST_BYTES:
            return self
        files = self.write(store, folder)
        store.flush()
        return RankValues(self.names, files)

    def write(self, store: Store, folder: str) -> tuple[RangesDoc, ...]:
        """Write the values that are in no file, and return the files with all of them."""
        return tuple(
            put_ranges(store, folder, part.first, part.ranges) if isinstance(part, Ranges) else part
            for part in self.parts
        )
