"""Makes checkpoints known to a catalog from storage alone: one, a tree of them, or all that a lost catalog knew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ucformat.checkpoint import open_checkpoint
from ucformat.errors import NotFound, UcformatError
from ucformat.format.commit import MANIFEST
from ucformat.jobs.documents import read_document, write_documents
from ucformat.sources import SOURCES
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.catalog_document import CatalogDoc
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Info

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
    roots = [r for p in places for r in (_search(p) if recursive else [p])]
    if recursive and not roots:
        raise NotFound(f"there is no checkpoint below {', '.join(places)}", hint="check the path")
    entries, failures = [], []
    for done, (root, found) in enumerate(_open_all(roots), 1):
        if isinstance(found, UcformatError):
            if not recursive:
                raise found
            failures.append(Failure(root, found.message))
        else:
            entries.append(_record(catalog, found, run))
        if progress is not None:
            progress(done, len(roots))
    write_documents(catalog, None)
    return Registered(tuple(entries), tuple(failures))


def reindex(place: str, catalog: Catalog, *, progress: Callable[[int, int], None] | None = None) -> Reindexed:
    """Record all that lies below a place, with what catalogs wrote beside it, and forget what is gone from there."""
    url = open_store(place).url
    roots = list(_search(place))
    entries, failures = [], []
    for done, (root, found) in enumerate(_open_all(roots), 1):
        if isinstance(found, UcformatError):
            failures.append(Failure(root, found.message))
        else:
            entries.append(_record(catalog, found, None))
        if progress is not None:
            progress(done, len(roots))
    present = {u for e in entries for u in e.urls} | {f.url for f in failures}
    missing = catalog.forget_places(url, present)
    write_documents(catalog, None)
    return Reindexed(tuple(entries), tuple(failures), tuple(missing))


def _search(place: str) -> Iterator[str]:
    """The folders below a place, or itself, that look like checkpoints, in order; not what lies inside of one."""
    store = open_store(place)
    folders: set[str] = set()
    for info in store.list():
        folder, _, name = info.key.rpartition("/")
        if name == MANIFEST or any(s.marks(name) for s in SOURCES):
            folders.add(folder)
    last: str | None = None
    for folder in sorted(folders, key=lambda f: f.split("/") if f else []):
        if last is None or not (folder.startswith(f"{last}/") or last == ""):
            last = folder
            yield f"{store.url}/{folder}" if folder else store.url


def _open_all(roots: Sequence[str]) -> Iterator[tuple[str, _Found | UcformatError]]:
    """Open them, several at a time, in order."""
    with ThreadPoolExecutor(_THREADS, "ucformat-register") as pool:
        for at in range(0, len(roots), _AHEAD):
            part = roots[at : at + _AHEAD]
            yield from zip(part, pool.map(_try_open, part), strict=True)


def _try_open(root: str) -> _Found | UcformatError:
    try:
        ck = open_checkpoint(root)
        doc = read_document(open_store(ck.home))
        if ck.kind == "ucformat":
            return _Found(ck.home, ck.kind, ck.manifest, None, doc)
        infos = [ck.store.info(f) for f in ck.facts.files]
        files = (len(infos), sum(i.size for i in infos))
        return _Found(ck.home, ck.kind, _described(ck, infos), files, doc)
    except UcformatError as error:
        return error


def _described(ck: Checkpoint, files: Sequence[Info]) -> Manifest:
    """The manifest of a foreign checkpoint, with its id, and the time of its newest file."""
    times = [i.modified for i in files if i.modified is not None]
    created = datetime.fromtimestamp(max(times), UTC) if times else ck.manifest.created
    return ck.manifest.model_copy(update={"id": ck.id, "created": created})


def _record(catalog: Catalog, found: _Found, run: str | None) -> Entry:
    entry = catalog.record(found.manifest, found.url, kind=found.kind, run=run, files=found.files)
    return entry if found.doc is None else catalog.absorb(entry.id, found.doc)
