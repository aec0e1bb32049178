"""What registering trees will cost, from opening a sample of their checkpoints: what is read depends on the content.

Folders are of one kind if they have files of the same names, apart from numbers. Of each kind some are opened, spread
over the tree, and stand for the others.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ucformat.jobs.cost import Cost, seconds_at
from ucformat.jobs.opening import by_outermost, left_inside, tree_of, try_open, unchanged
from ucformat.storage.concurrency import THREADS
from ucformat.storage.url import as_strings, open_store
from ucformat.storage.watched import WatchedStore
from ucformat.storage.wrappers import RecordingStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.jobs.listing import Tree
    from ucformat.storage.base import Info, Store

_OPENED, _KINDS = 4, 8  # folders that are opened of each kind, and kinds; rare ones are taken together
_PAGE = 1000  # files that one request lists
_NUMBER = re.compile(r"\d+")


class _Folder(NamedTuple):
    """A folder that looks like a checkpoint, those inside of it, and how many it stands for."""

    key: str
    inside: Sequence[str]
    weight: float


@dataclass
class _Total:
    """What was counted, or is estimated."""

    tasks: float = 0
    files: float = 0
    requests: float = 0
    nbytes: float = 0
    processor: float = 0  # seconds

    def add(self, other: _Total, weight: float = 1) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + weight * value)


class _CountingStore(RecordingStore):
    """Also counts requests that read nothing."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.others = 0

    def info(self, key: str) -> Info:
        self.others += 1
        return self.inner.info(key)

    def list(self, prefix: str = "") -> Iterator[Info]:
        self.others += 1
        for number, info in enumerate(self.inner.list(prefix), 1):
            self.others += number % _PAGE == 0
            yield info


def estimate_register(
    places: str | PathLike[str] | Iterable[str | PathLike[str]],
    catalog: Catalog | None,
    *,
    rescan: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Cost:
    """Estimate what `register` of trees costs: opens a sample of their checkpoints, and writes nothing.

    Args:
        catalog: the catalog, whose unchanged checkpoints are not opened (None: there is none yet).

    Raises:
        NotFound: one of the places is empty, or has no checkpoint.
    """
    total, sampled, seconds = _Total(), 0, 0.0
    unmeasured: list[str] = []
    for place in as_strings(places):
        store, begun = _CountingStore(open_store(place)), time.time()
        infos = list(store.list())
        tree = tree_of(store, infos, begun)
        known = {} if rescan or catalog is None else unchanged(catalog, tree)
        folders = [folder for folder in tree.folders if tree.url(folder) not in known]
        found, opened = _sample(tree, folders, _names(infos, folders), options)
        found.add(_counted([store]))
        threads = THREADS if store.costs.parallel else 1
        took = seconds_at(store, round(found.requests), round(found.nbytes), threads)
        if took is None:
            unmeasured.append(store.url)
        seconds += (took or 0) + found.processor
        sampled += opened
        total.add(found)
    return Cost(
        tasks=round(total.tasks),
        files=round(total.files),
        bytes_read=round(total.nbytes),
        bytes_written=0,
        requests=round(total.requests),
        seconds=None if unmeasured else seconds,
        unmeasured=tuple(unmeasured),
        sampled=sampled,
    )


def _names(infos: Iterable[Info], folders: Iterable[str]) -> dict[str, frozenset[str]]:
    """The names of the files in each folder, without their numbers."""
    names: dict[str, set[str]] = {folder: set() for folder in folders}
    plain = cache(lambda name: _NUMBER.sub("#", name))  # most names are in every step
    for info in infos:
        folder, _, name = info.key.rpartition("/")
        if folder in names:
            names[folder].add(plain(name))
    return {folder: frozenset(found) for folder, found in names.items()}


def _sample(
    tree: Tree, folders: Iterable[str], names: Mapping[str, frozenset[str]], options: Mapping[str, Any] | None
) -> tuple[_Total, int]:
    """What it costs to open folders, and how many were opened to find out.

    Folders inside of others are opened after these, if they are not part of them.
    """
    total, opened = _Total(), 0
    level = [_Folder(key, inside, 1) for key, inside in by_outermost(folders).items()]
    while level:
        below: list[_Folder] = []
        for kind in _kinds(level, names):
            try_open(tree.url(kind[0].key), options)  # imports modules, which is not counted
            number = min(len(kind), _OPENED)
            weight = sum(folder.weight for folder in kind) / number
            for i in range(number):
                folder = kind[(2 * i + 1) * len(kind) // (2 * number)]
                stores: list[_CountingStore] = []

                def watch(store: Store, stores: list[_CountingStore] = stores) -> WatchedStore:
                    stores.append(_CountingStore(store))
                    return WatchedStore(stores[-1])

                begun = time.thread_time()
                found = try_open(tree.url(folder.key), options, watch)
                spent = time.thread_time() - begun
                counted = _counted(stores)
                counted.tasks, counted.processor = 1, spent
                total.add(counted, weight)
                opened += 1
                left = by_outermost(left_inside(folder.key, found, folder.inside))
                below += [_Folder(key, inside, weight) for key, inside in left.items()]
        level = below
    return total, opened


def _kinds(folders: Iterable[_Folder], names: Mapping[str, frozenset[str]]) -> list[list[_Folder]]:
    """The folders by kind; the rare kinds are one."""
    kinds: dict[frozenset[str], list[_Folder]] = {}
    for folder in folders:
        kinds.setdefault(names[folder.key], []).append(folder)
    found = sorted(kinds.values(), key=len, reverse=True)
    rare = [folder for kind in found[_KINDS - 1 :] for folder in kind]
    return [*found[: _KINDS - 1], *([rare] if rare else [])]


def _counted(stores: Iterable[_CountingStore]) -> _Total:
    """What was read through stores."""
    reads = [(store.url, read) for store in stores for read in store.reads]
    files = len({(url, read.file) for url, read in reads})
    others = sum(store.others for store in stores)
    return _Total(0, files, len(reads) + others, sum(read.nbytes for _, read in reads))
