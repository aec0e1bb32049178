"""The values of a Zarr hierarchy: where each is stored, and virtual files for those that must be decoded.

A value is a file, or a part of a file of a key-value store. Extents refer to a virtual file like to
any other file, so planning and reading know nothing of codecs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.storage.base import HIDDEN, ByteRange, check_range
from ucformat.storage.concurrency import Cache
from ucformat.storage.wrappers import SyntheticStore, layers, routed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.storage.base import Info, Store

# bytes of a metadata document: a consolidated one contains those of all arrays
_MAX_METADATA = 256 << 20


#: A value: a range of a file, or the bytes themselves if they were part of something that was
#: decoded.
Value = ByteRange | bytes


def read_value(store: Store, value: Value) -> bytes:
    """Read a value."""
    return value if isinstance(value, bytes) else store.read(*value)


def slice_value(value: Value, offset: int, nbytes: int) -> Value:
    """A part of a value."""
    if isinstance(value, bytes):
        return value[offset : offset + nbytes]
    return ByteRange(value.file, value.offset + offset, nbytes)


def size_of(value: Value) -> int:
    """Bytes of a value."""
    return len(value) if isinstance(value, bytes) else value.nbytes


def list_values(store: Store, folder: str = "") -> dict[str, ByteRange]:
    """List the files of a folder as values, by their path in it."""
    cut = len(folder) + 1 if folder else 0
    return {info.key[cut:]: ByteRange(info.key, 0, info.size) for info in store.list(folder)}


def read_json(store: Store, values: Mapping[str, Value], key: str) -> Any:
    """Read a JSON document of at most 256 MiB."""
    if (nbytes := size_of(values[key])) > _MAX_METADATA:
        raise UnsupportedError(f"{store.url}: {key} has {nbytes} bytes, too many for metadata")
    try:
        return json.loads(read_value(store, values[key]))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{store.url}: {key} is not a JSON document: {str(error)[:200]}"
        ) from None


#: The prefix of the keys of virtual files, which `check_key` refuses for stored files.
DECODED = f"{HIDDEN}decoded/"


class Decoder(Protocol):
    """Decodes virtual files, by their names below `DECODED`. It can be pickled, and used from several threads."""

    def info(self, name: str) -> Info:
        """Describe a virtual file: its decoded size, and a version that changes when the stored bytes do.

        Raises:
            NotFound: there is no such file.
        """

    def decode(self, name: str) -> memoryview:
        """Decode a virtual file."""

    def is_checked(self, name: str) -> bool:
        """Whether decoding compares all decoded bytes with a stored checksum."""


class DecodedStore(SyntheticStore):
    """A store in which the keys below `DECODED` are virtual files; all others are those of the inner store."""

    def __init__(self, inner: Store, decoder: Decoder) -> None:
        super().__init__(inner)
        self._decoder, self._cache = decoder, Cache[memoryview]()

    def is_checked(self, key: str) -> bool:
        """Whether this is a virtual file that is compared with a checksum when it is decoded."""
        return self._holds(key) and self._decoder.is_checked(key[len(DECODED) :])

    def _holds(self, key: str) -> bool:
        return key.startswith(DECODED)

    def _info(self, key: str) -> Info:
        return self._decoder.info(key[len(DECODED) :])

    def _content(self, key: str, offset: int, nbytes: int) -> memoryview:
        data = self._cache.get(key[len(DECODED) :], self._decoder.decode)
        check_range(f"{self.url}/{key}", offset, nbytes, data.nbytes)
        return data[offset : offset + nbytes]


def is_checked(store: Store, key: str) -> bool:
    """Whether a file is a virtual one, of this store or a store that it wraps, that is checked when it is decoded."""
    store, key = routed(store, key)
    return any(isinstance(layer, DecodedStore) and layer.is_checked(key) for layer in layers(store))
