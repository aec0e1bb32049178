"""An opened checkpoint that lies in a folder of another one's store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import Record
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store

__all__ = ["Inside"]


class Inside:
    """The same checkpoint, its files under keys of the store around it."""

    def __init__(self, source: OpenSource, store: Store, folder: str) -> None:
        self.kind, self.store = source.kind, store
        self._source, self._below = source, f"{folder}/"
        facts = source.facts
        self.facts = facts.but(
            assets=tuple(self._below + key for key in facts.assets),
            files=tuple(self._below + key for key in facts.files),
            folder=self._below + facts.folder if facts.folder else folder,
        )

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Where the bytes of a tensor lie."""
        for extent in self._source.extents(key, within):
            yield replace(extent, file=self._below + extent.file)

    def records(self) -> Iterator[Record]:
        """Every record of its files."""
        for record in self._source.records():
            yield replace(record, file=self._below + record.file)
