"""Where the values of a Zarr hierarchy lie: a file each, or parts of the files of a key-value store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.storage.base import Store

__all__ = ["Stored", "Values", "list_values", "read_json"]

_MOST = 256 << 20  # bytes of a metadata document: consolidated ones hold those of every array


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of one value: a range of a file, or `data` itself, where it lies inside something that was decoded."""

    file: str
    offset: int
    nbytes: int
    data: bytes | None = None

    def read(self, store: Store) -> bytes:
        """All of it."""
        return self.data if self.data is not None else store.read(self.file, self.offset, self.nbytes)


Values = dict[str, Stored]


def list_values(store: Store, folder: str = "") -> Values:
    """The files below a folder as values, by their path in it."""
    cut = len(folder) + 1 if folder else 0
    return {info.key[cut:]: Stored(info.key, 0, info.size) for info in store.list(folder)}


def read_json(store: Store, values: Mapping[str, Stored], key: str) -> Any:
    """A document of JSON.

    Raises:
        IntegrityError: it is none.
    """
    stored = values[key]
    if stored.nbytes > _MOST:
        raise Refused(f"{store.url}: {key} has {stored.nbytes} bytes, too many for metadata")
    try:
        return json.loads(stored.read(store))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{store.url}: {key} is no JSON document: {str(error)[:200]}") from None
