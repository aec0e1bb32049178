"""Makes checkpoints known to a catalog from storage alone: one, a tree of them, or all that a lost catalog knew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.catalog.entries import load_ids
from ucformat.catalog.reader import now
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import NotFound, UcformatError
from ucformat.format.commit import MANIFEST
from ucformat.jobs.documents import find_document, write_documents
from ucformat.schema.tombstone import TOMBSTONE
from ucformat.sources import SOURCES
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.catalog_document import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Info, Store

__all__ = ["Failure", "Registered", "Reindexed", "register", "reindex"]

_THREADS = 8
_AHEAD = 64  # checkpoints that are opened before the first of them is recorded


@dataclass(frozen=True, slots=True)
class Failure:
    """A place that looked like a checkpoint and could not be registered."""

    url: str
    message: str


@dataclass(frozen=True, slots=True)
class Registered:
    """What became known (or was known before), and what could not."""

    entries: tuple[Entry, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Reindexed(Registered):
    """Also `missing`: places below the root where the catalog knew a checkpoint, and none is left."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    url: str
    kind: str
    manifest: Manifest
    files: tuple[int, int] | None
    doc: CatalogDoc | None
    keys: tuple[str, ...] | None  # of the files of a foreign one; a universal one's are all below its folder


def register(
    places: Sequence[str],
    catalog: Catalog,
    *,
    recursive: bool = False,
    run: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Registered:
    """Record the checkpoints in these places, foreign ones as they lie; nothing is converted.

    Args:
        places: paths or urls of checkpoints, or with `recursive` of trees in which they lie.
        catalog: where to record them.
        recursive: search the trees; what looks like a checkpoint and cannot be read is a failure, not an error.
        run: to which run they belong; by default the folder that a checkpoint's folder is in.
        progress: called with the checkpoints done and in all.

    Raises:
        NotFound: nothing is at one of the places, or no checkpoint.
    """
    opened = (f for p in places for f in _open_below(p)) if recursive else _open_all(places)
    done = _record_all(catalog, opened, run, progress, strict=not recursive)
    if recursive and not done.present:
        raise NotFound(f"there is no checkpoint below {', '.join(places)}", hint="check the path")
    write_documents(catalog, None)
    return Registered(_entries(catalog, done.ids), done.failures)


def reindex(place: str, catalog: Catalog, *, progress: Callable[[int, int], None] | None = None) -> Reindexed:
    """Record all that lies below a place, with what catalogs wrote beside it, and forget what is gone from there."""
    done = _record_all(catalog, _open_below(place), None, progress, strict=False)
    missing = catalog.forget_places(open_store(place).url, done.present)
    write_documents(catalog, None)
    return Reindexed(_entries(catalog, done.ids), done.failures, tuple(missing))


def _entries(catalog: Catalog, ids: Sequence[str]) -> tuple[Entry, ...]:
    """The checkpoints of these ids as they are now that all is recorded."""
    with catalog.database.reading() as c:
        return tuple(load_ids(c, ids, now()))


@dataclass(frozen=True, slots=True)
class _Done:
    ids: tuple[str, ...]
    failures: tuple[Failure, ...]
    present: frozenset[str]  # the places that were opened, or could not be


def _record_all(
    catalog: Catalog,
    opened: Iterable[tuple[str, _Found | UcformatError, int]],
    run: str | None,
    progress: Callable[[int, int], None] | None,
    *,
    strict: bool,
) -> _Done:
    """Record what was opened; what could not be opened or recorded is a failure, or if `strict` an error."""
    ids, failures, present = [], [], set()
    for done, (root, found, left) in enumerate(opened, 1):
        try:
            if isinstance(found, UcformatError):
                raise found
            ids.append(_record(catalog, found, run).id)
            present.add(found.url)
        except UcformatError as error:
            if strict:
                raise
            failures.append(Failure(root, error.message))
            present.add(root)
        if progress is not None:
            progress(done, done + left)
    return _Done(tuple(ids), tuple(failures), frozenset(present))


def _search(store: Store) -> list[str]:
    """The folders of a store that look like checkpoints, in order, an outer one before those inside of it."""
    folders = set()
    for info in store.list():
        folder, _, name = info.key.rpartition("/")
        if name in (MANIFEST, TOMBSTONE) or any(s.marks(name) for s in SOURCES):
            folders.add(folder)
    return sorted(folders, key=lambda f: f.split("/") if f else [])


def _open_below(place: str) -> Iterator[tuple[str, _Found | UcformatError, int]]:
    """Open what looks like a checkpoint below a place, or itself, and not what is part of one.

    What lies inside of a folder that turns out to be none is opened after it: anybody may call a file manifest.json. So
    is what lies beside the files of a foreign one: `checkpoint-500/` next to the model that the run ended with.
    """
    store = open_store(place)
    folders = _search(store)
    while folders:
        inside: dict[str, list[str]] = {}  # of each outermost one
        for folder in folders:
            last = next(reversed(inside), None)
            if last is not None and (last == "" or folder.startswith(f"{last}/")):
                inside[last].append(folder)
            else:
                inside[folder] = []
        folders = []
        roots = {f"{store.url}/{folder}" if folder else store.url: found for folder, found in inside.items()}
        for root, found, left in _open_all(list(roots)):
            if isinstance(found, UcformatError):
                folders += roots[root]
            elif found.keys is not None:
                above = root.removeprefix(store.url).lstrip("/")
                folders += [f for f in roots[root] if not _is_part(f.removeprefix(f"{above}/"), found.keys)]
            yield root, found, left + len(folders)


def _is_part(folder: str, keys: Sequence[str]) -> bool:
    return any(key.startswith(f"{folder}/") for key in keys)


def _open_all(roots: Sequence[str]) -> Iterator[tuple[str, _Found | UcformatError, int]]:
    """Open them, several at a time, in order; with each the number of those that are left."""
    with ThreadPoolExecutor(_THREADS, "ucformat-register") as pool:
        for at in range(0, len(roots), _AHEAD):
            part = roots[at : at + _AHEAD]
            for i, (root, found) in enumerate(zip(part, pool.map(_try_open, part), strict=True), at + 1):
                yield root, found, len(roots) - i


def _try_open(root: str) -> _Found | UcformatError:
    try:
        ck = open_checkpoint(root)
        doc = find_document(open_store(ck.home))
        if ck.kind == "ucformat":
            return _Found(ck.home, ck.kind, ck.manifest, None, doc, None)
        infos = ck.files()
        files = (len(infos), sum(i.size for i in infos))
        return _Found(ck.home, ck.kind, _described(ck, infos), files, doc, ck.facts.files)
    except UcformatError as error:
        return error


def _described(ck: Checkpoint, files: Sequence[Info]) -> Manifest:
    """The manifest of a foreign checkpoint, with its id, and the time of its newest file."""
    times = [i.modified for i in files if i.modified is not None]
    created = datetime.fromtimestamp(max(times), UTC) if times else ck.manifest.created
    return ck.manifest.model_copy(update={"id": ck.id, "created": created})


def _record(catalog: Catalog, found: _Found, run: str | None) -> Entry:
    entry = catalog.record(found.manifest, found.url, kind=found.kind, run=run, files=found.files)
    if found.doc is not None:
        entry = catalog.absorb(entry.id, found.doc)
    if run is not None and entry.run != run:  # the document says another, but not as loud
        entry = catalog.record(found.manifest, found.url, run=run)
    return entry
