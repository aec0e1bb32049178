"""A store whose files are kept in a folder of the host, for all processes of a user."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ucformat.errors import NotFound, UcformatError
from ucformat.storage.base import check_key, check_range, content_version
from ucformat.storage.cache.answers import Answers
from ucformat.storage.cache.blocks import Blocks, FileVersion, Part
from ucformat.storage.cache.scope import current_pins, is_uncached, read_consistently
from ucformat.storage.concurrency import map_io
from ucformat.storage.strided import extend, fill
from ucformat.storage.strided import rows as rows_of
from ucformat.storage.wrappers import WrappedStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.storage.base import Checksums, Costs, Info
    from ucformat.storage.cache.base import VersionedStore
    from ucformat.storage.cache.folder import CacheFolder
    from ucformat.storage.cache.scope import Pins
    from ucformat.storage.local_files import Descriptor


class CachingStore(WrappedStore):
    """Reads files from the cache if they are there, and else from the inner store, which knows their current versions."""

    inner: VersionedStore

    def __init__(self, inner: VersionedStore, folder: CacheFolder) -> None:
        super().__init__(inner)
        self.known: dict[str, Info] = {}
        self._folder = folder
        self._answers, self._blocks = Answers(inner, folder), Blocks(inner, folder)

    def __reduce__(self) -> tuple[type[CachingStore], tuple[VersionedStore, CacheFolder]]:
        return CachingStore, (self.inner, self._folder)

    def __repr__(self) -> str:
        return f"CachingStore({self.inner!r})"

    @property
    def costs(self) -> Costs:
        """The costs of the inner store; but ranges are read into the destination, one with each call."""
        return replace(self.inner.costs, together=1, in_flight=None)

    # --- versions

    def ask(self, keys: Sequence[str], span: tuple[int, int] | None = None) -> Mapping[str, Info]:
        """See Asks."""

        def one(key: str) -> Info | None:
            return self._answers.info(key, partial(self._begin, key, span))

        return {key: info for key, info in zip(keys, map_io(one, keys), strict=True) if info is not None}

    def ask_listing(self, patience: float) -> Mapping[str, Info] | None:
        """See Asks."""
        return self._answers.listing(patience)

    def join(self) -> Descriptor | None:
        """See Asks."""
        return self._answers.join()

    def has_others(self, joined: Descriptor) -> bool:
        """See Asks."""
        return self._answers.has_others(joined)

    def _begin(self, key: str, span: tuple[int, int] | None) -> Info:
        if span is not None and 0 <= span[0] < span[1]:
            with suppress(UcformatError):  # the file may end before the span
                return self._blocks.begin(key, *span)
        return self.inner.info(key)

    def info(self, key: str) -> Info:
        """See Store."""
        check_key(key)
        if is_uncached():
            return self.inner.info(key)
        pins = current_pins(self)
        found = self.ask([key]).get(key) if pins is None else pins.find(key)
        if found is None:
            raise self._missing(key)
        return found

    def list(self, prefix: str = "") -> Iterator[Info]:
        """See Store."""
        below = f"{check_key(prefix)}/" if prefix else ""
        pins = None if is_uncached() else current_pins(self)
        files = None if pins is None else pins.files()
        if files is None:
            return self.inner.list(prefix)
        return (info for key, info in files.items() if key.startswith(below))

    def _missing(self, key: str) -> NotFound:
        return NotFound(f"{self.url}/{key} does not exist")

    # --- reading

    def read(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """See Store."""
        check_key(key)
        if nbytes == 0 or is_uncached():
            return self.inner.read(key, offset, nbytes)
        return read_consistently(lambda: self._read(key, offset, nbytes), listing=False)

    def _read(self, key: str, offset: int, nbytes: int | None) -> bytes:
        file = self._find(key, (offset, offset + (self.inner.costs.request if nbytes is None else nbytes)))
        if file is None:
            return self.inner.read(key, offset, nbytes)
        if nbytes is None:
            nbytes = file.info.size - offset
        self._check(file, offset, nbytes)
        out = bytearray(nbytes)
        self._fill(file, [Part(offset, memoryview(out))])
        return bytes(out)

    def read_versioned(self, key: str) -> tuple[bytes, str]:
        """See Store."""
        data = self.read(key)
        return data, content_version(data)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview], crcs: Checksums | None = None) -> None:
        """See Store."""
        check_key(key)
        nbytes = sum(b.nbytes for b in buffers)
        if not nbytes or is_uncached():
            self.inner.read_into(key, offset, buffers, crcs)
            return
        direct = all(b.c_contiguous for b in buffers)
        parts: list[Part] = []
        for row in [row for b in buffers for row in rows_of(b)] if direct else [memoryview(bytearray(nbytes))]:
            parts.append(Part(parts[-1].end if parts else offset, row))
        if not read_consistently(lambda: self._read_parts(key, parts), listing=False):
            self.inner.read_into(key, offset, buffers, crcs)
        elif direct:
            extend(crcs, buffers)
        else:
            fill(buffers, parts[0].view, crcs)

    def read_rows(self, key: str, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """See Store."""
        check_key(key)
        parts = [Part(offset + k * step, row.cast("B")) for k, row in enumerate(rows) if row.nbytes]
        if not parts or is_uncached() or not read_consistently(lambda: self._read_parts(key, parts), listing=False):
            self.inner.read_rows(key, offset, step, rows)

    def _read_parts(self, key: str, parts: Sequence[Part]) -> bool:
        """Fill parts; False if the file is not cached, because its versions cannot be told apart."""
        file = self._find(key, (parts[0].begin, max(part.end for part in parts)))
        if file is None:
            return False
        for part in parts:
            self._check(file, part.begin, part.view.nbytes)
        self._fill(file, parts)
        return True

    def _pins(self) -> Pins:
        pins = current_pins(self)
        assert pins is not None  # noqa: S101 - all reads are in a scope
        return pins

    def _find(self, key: str, span: tuple[int, int]) -> FileVersion | None:
        """The version of a file; None if it cannot be told apart from others, so that the file is not cached."""
        known = self.known.get(key)
        if known is not None and FileVersion.of(known) is None:
            return None
        found = self._pins().find(key, span)
        if found is None:
            raise self._missing(key)
        return FileVersion.of(found)

    def _check(self, file: FileVersion, offset: int, nbytes: int) -> None:
        check_range(f"{self.url}/{file.info.key}", offset, nbytes, file.info.size)

    def _fill(self, file: FileVersion, parts: Sequence[Part]) -> None:
        pins = self._pins()
        self._blocks.fill(file, parts, partial(pins.received, file.info.key), pins.has_others)
