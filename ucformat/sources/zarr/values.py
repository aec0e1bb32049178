"""The values of a Zarr hierarchy: where each is stored, and virtual files of those that must be decoded.

A value is a file, or a part of a file of a key-value store. Extents point into a virtual file as into any other file,
and planning and reading know nothing of codecs.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from ucformat.errors import IntegrityError, UnsupportedError
from ucformat.storage.base import HIDDEN, ByteRange, check_range
from ucformat.storage.wrappers import SyntheticStore, WrappedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.storage.base import Info, Store

__all__ = [
    "DECODED",
    "Cache",
    "DecodedStore",
    "Decoder",
    "Value",
    "is_checked",
    "list_values",
    "read_json",
    "read_value",
    "size_of",
    "slice_value",
]

_MAX_METADATA = 256 << 20  # bytes of a metadata document: consolidated ones hold those of every array


#: A value: a range of a file, or the bytes themselves where they were inside something that was decoded.
Value = ByteRange | bytes


def read_value(store: Store, value: Value) -> bytes:
    """All of a value."""
    return value if isinstance(value, bytes) else store.read(*value)


def slice_value(value: Value, offset: int, nbytes: int) -> Value:
    """The `nbytes` bytes of a value from `offset` on."""
    if isinstance(value, bytes):
        return value[offset : offset + nbytes]
    return ByteRange(value.file, value.offset + offset, nbytes)


def size_of(value: Value) -> int:
    """Bytes of a value."""
    return len(value) if isinstance(value, bytes) else value.nbytes


def list_values(store: Store, folder: str = "") -> dict[str, ByteRange]:
    """The files below a folder as values, by their path in it."""
    cut = len(folder) + 1 if folder else 0
    return {info.key[cut:]: ByteRange(info.key, 0, info.size) for info in store.list(folder)}


def read_json(store: Store, values: Mapping[str, Value], key: str) -> Any:
    """A document of JSON.

    Raises:
        IntegrityError: it is none.
    """
    if (nbytes := size_of(values[key])) > _MAX_METADATA:
        raise UnsupportedError(f"{store.url}: {key} has {nbytes} bytes, too many for metadata")
    try:
        return json.loads(read_value(store, values[key]))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{store.url}: {key} is no JSON document: {str(error)[:200]}") from None


#: How the keys of virtual files begin. No stored file can be named so: `check_key` refuses it.
DECODED = f"{HIDDEN}decoded/"

_HELD = 256 << 20  # bytes of decoded chunks that are kept
_LEAST = 4  # chunks that are kept, however large: a chunk is read in many requests, each of which would decode it anew


class Decoder(Protocol):
    """Knows the virtual files, by their names below `DECODED`. Pickles, and is safe to use from several threads."""

    def info(self, name: str) -> Info:
        """The size once decoded, and a version that changes when the stored bytes do; NotFound where there is none."""

    def decode(self, name: str) -> memoryview:
        """The bytes, decoded; IntegrityError where they cannot be."""

    def is_checked(self, name: str) -> bool:
        """Whether decoding compares all that is decoded with a CRC-32C that is stored with it."""


class Cache:
    """Byte strings by key, the last used ones kept; each is made once, whoever asks meanwhile waits for it."""

    def __init__(self, limit: int = _HELD, least: int = _LEAST) -> None:
        self._limit, self._least = limit, least
        self._lock = threading.Lock()
        self._held: OrderedDict[str, memoryview] = OrderedDict()
        self._making: dict[str, Future[memoryview]] = {}
        self._nbytes = 0

    def __reduce__(self) -> tuple[type[Cache], tuple[int, int]]:
        return Cache, (self._limit, self._least)

    def get(self, key: str, make: Callable[[str], memoryview]) -> memoryview:
        """What is kept under this key, or else what `make` makes; an error is not kept."""
        with self._lock:
            if (held := self._held.get(key)) is not None:
                self._held.move_to_end(key)
                return held
            theirs = self._making.get(key)
            mine = self._making.setdefault(key, Future())
        if theirs is not None:
            return theirs.result()
        try:
            value = make(key)
        except BaseException as error:
            with self._lock:
                del self._making[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._held[key] = value
            self._nbytes += value.nbytes
            while self._nbytes > self._limit and len(self._held) > self._least:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes
        mine.set_result(value)
        return value


class DecodedStore(SyntheticStore):
    """A store in which the keys below `DECODED` are virtual files; all else is in the store inside."""

    def __init__(self, inner: Store, decoder: Decoder) -> None:
        super().__init__(inner)
        self._decoder, self._cache = decoder, Cache()

    def is_checked(self, key: str) -> bool:
        """Whether this is a virtual file, and all of it is compared with a checksum when it is decoded."""
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
    """Whether a file is a virtual one of a store, or of one inside, that is compared with checksums when decoded."""
    while isinstance(store, WrappedStore):
        if isinstance(store, DecodedStore) and store.is_checked(key):
            return True
        store = store.inner
    return False
