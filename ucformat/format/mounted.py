"""The files of a virtual checkpoint: those of other checkpoints, read in place under the keys `roots/<n>/…`.

A file is read only if its root is in a place that the opener allows, and only while it is the file
that was registered: of the same size and time.
"""

from __future__ import annotations

import os
import reprlib
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

from ucformat.errors import IntegrityError, MissingData, NotFound, UnsafeError
from ucformat.format.structure import MOUNT
from ucformat.storage.folders import roots_hint
from ucformat.storage.url import open_store, split_url
from ucformat.storage.wrappers import RoutedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.schema.manifest import SidecarDoc, SourceFileDoc
    from ucformat.storage.base import Costs, Info, Store


def mounted_key(number: int, key: str) -> str:
    """The key in a virtual checkpoint of a file below a root."""
    return f"{MOUNT}{number}/{key}"


def is_below(url: str, roots: Sequence[str]) -> bool:
    """Whether a place is one of some roots, or below one; symbolic links in paths are followed."""
    # some stores resolve `..`
    if not url or "\0" in url or ("://" in url and ".." in unquote(url).split("/")):
        return False
    place = _plain(url)
    return any(
        place == root or place.startswith(root.rstrip("/") + "/") for root in map(_plain, roots)
    )


def _plain(url: str) -> str:
    scheme, path = split_url(url)
    return os.path.realpath(path) if scheme in ("", "file") else url.rstrip("/")


class MountedStore(RoutedStore):
    """The store of a virtual checkpoint; `allowed` returns the places in which its files may be."""

    def __init__(
        self, inner: Store, sidecar: SidecarDoc, allowed: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(inner)
        self.roots = sidecar.roots
        self._sources = {doc.path: doc for doc in sidecar.sources}
        self._allowed = allowed
        self._open: dict[int, Store] = {}

    @property
    def costs(self) -> Costs:
        """The costs of the first root, which has the tensors."""
        return self._first.costs

    @cached_property
    def _first(self) -> Store:
        return open_store(self.roots[0]) if self.roots else self.inner

    def place(self, key: str) -> tuple[Store, str] | None:
        """The store of a file below a root, and its key there; None for the checkpoint's own."""
        if not key.startswith(MOUNT):
            return None
        if key not in self._sources:  # which are below roots: the manifest was checked
            raise IntegrityError(
                f"{self.url}: the manifest does not list the file {reprlib.repr(key)}"
            )
        number, _, name = key.removeprefix(MOUNT).partition("/")
        root = int(number)
        if root not in self._open:
            url = self.roots[root]
            if not is_below(url, self._allowed()):
                raise UnsafeError(
                    f"{self.url} has its files in {url}, and reading files there is not allowed",
                    hint=roots_hint(url),
                )
            self._open[root] = open_store(url)
        return self._open[root], name

    def _routed(self, key: str) -> tuple[Store, str]:
        """Find a file, and check that it is the one that was registered."""
        place = self.place(key)
        if place is None:
            return self.inner, key
        self._check(place, self._sources[key])
        return place

    def _check(self, place: tuple[Store, str], doc: SourceFileDoc) -> Info:
        store, key = place
        try:
            info = store.info(key)
        except NotFound as error:
            raise MissingData(
                f"{error.message}; {self.url} has tensors in it",
                hint="restore it, or register its checkpoint again",
            ) from error
        if (info.size, info.modified, info.etag) != (doc.nbytes, doc.modified, doc.etag):
            raise IntegrityError(
                f"{store.url}/{key} has changed since {self.url} was registered",
                hint="register its checkpoint again: `ucp register SRC DST --virtual --overwrite`",
            )
        return info

    def info(self, key: str) -> Info:
        """See Store."""
        place = self.place(key)
        return self.inner.info(key) if place is None else self._check(place, self._sources[key])
