"""Frees storage: purges deleted checkpoints whose grace is over, and attempts that nobody committed.

Nothing is deleted that no manifest, attempt record or tombstone of ours names. A tombstone is put before the manifest
goes, and goes last, so that one who is stopped at any instant leaves either a checkpoint, or a tombstone from which the
next `collect` goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.deletion import begin_purge, end_purge
from ucformat.catalog.names import Stamp
from ucformat.catalog.reader import GRACE
from ucformat.catalog.refs import Ref, resolve
from ucformat.errors import Conflict, IntegrityError, NotACheckpoint, NotFound, UcformatError, UpgradeNeeded
from ucformat.format.commit import MANIFEST, abandon, read_manifest
from ucformat.jobs.documents import read_document
from ucformat.schema.catalog_document import CATALOG_DOCUMENT
from ucformat.schema.manifest import AttemptDoc
from ucformat.schema.tombstone import TOMBSTONE, TombstoneDoc
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.purge import PurgePlan
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["Collected", "Leftover", "collect"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an interrupted writer or purge left at a place: an attempt that nobody committed, or a tombstone."""

    url: str
    attempt: str
    nbytes: int
    started: datetime


@dataclass(frozen=True, slots=True)
class Collected:
    """What may go (`plan`, `resumed`, `leftovers`), and, if it was applied, what went and what could not."""

    plan: PurgePlan
    resumed: tuple[str, ...]  # ids of checkpoints whose purge was begun before
    leftovers: tuple[Leftover, ...]
    purged: tuple[str, ...]  # ids
    failures: tuple[str, ...]


def collect(
    catalog: Catalog,
    places: Sequence[str] = (),
    *,
    apply: bool = False,
    grace: timedelta = GRACE,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Show what may be removed from storage, and with `apply` remove it.

    Args:
        catalog: whose deleted checkpoints are purged, once their grace is over and if nothing protects them.
        places: also look below these for attempts that nobody committed and nobody wrote to for `grace`.
        apply: remove it; without, nothing is touched.
        grace: for deleted checkpoints that have none of their own, and for attempts.
        progress: called with the checkpoints and attempts done and in all.
    """
    plan = catalog.purgeable(grace)
    if apply and _absorb(catalog, [r.id for r in plan.purge]):
        plan = catalog.purgeable(grace)  # another catalog protects some of them
    resumed = tuple(e.id for e in catalog.find("state = 'purging'"))
    before = datetime.now(UTC) - grace
    leftovers = tuple(left for place in places for left in _leftovers(place, before))
    if not apply:
        return Collected(plan, resumed, leftovers, (), ())
    purged, failures = [], []
    ids = [*resumed, *(r.id for r in plan.purge)]
    for done, checkpoint in enumerate(ids, 1):
        try:
            if _purge(catalog, checkpoint):
                purged.append(checkpoint)
        except UcformatError as error:
            failures.append(f"{checkpoint}: {error.message}")
        if progress is not None:
            progress(done, len(ids) + len(leftovers))
    for done, left in enumerate(leftovers, len(ids) + 1):
        try:
            _remove_leftover(left)
        except UcformatError as error:
            failures.append(f"{left.url}: {error.message}")
        if progress is not None:
            progress(done, len(ids) + len(leftovers))
    return Collected(plan, resumed, leftovers, tuple(purged), tuple(failures))


def _absorb(catalog: Catalog, ids: Sequence[str]) -> bool:
    """Take in what other catalogs say of these checkpoints; whether they said anything."""
    said = False
    for checkpoint in ids:
        entry = catalog.get(checkpoint)
        for url in entry.urls:
            doc = read_document(open_store(url))
            if doc is not None and doc.id == checkpoint:
                said |= catalog.absorb(checkpoint, doc) != entry
    return said


def _purge(catalog: Catalog, checkpoint: str) -> bool:
    """Remove one checkpoint from all its places; False if something protects it by now."""
    stamp = Stamp(catalog.who, datetime.now(UTC))
    with catalog.database.reading() as c:
        serial = resolve(c, Ref(checkpoint, id=checkpoint))
    urls = catalog.database.write(lambda c: begin_purge(c, serial, stamp))
    if urls is None:
        return False
    for url in urls:
        _remove(open_store(url), checkpoint)
    catalog.database.write(lambda c: end_purge(c, serial, stamp))
    return True


def _remove(store: Store, checkpoint: str) -> None:
    """Remove a checkpoint from one place, if it is still that one which lies there."""
    try:
        manifest, _ = read_manifest(store)
    except NotACheckpoint:
        tombstone = _tombstone(store)  # of a purge that was interrupted: nobody writes here until it is done
        if tombstone is not None and tombstone.id == checkpoint:
            _bury(store, tombstone)
        return
    if manifest.id != checkpoint:
        return  # another one replaced it, and removed its files
    tombstone = TombstoneDoc(id=checkpoint, attempt=manifest.attempt, files=_files(manifest), created=datetime.now(UTC))
    try:
        store.put_if_absent(TOMBSTONE, tombstone.model_dump_json(indent=1).encode())
    except Conflict:
        other = _tombstone(store)
        if other is None or other.id != checkpoint:
            raise
    store.delete(MANIFEST)
    _bury(store, tombstone)


def _files(manifest: Manifest) -> tuple[str, ...]:
    """The files that a manifest names and that may lie outside of the attempt's folders."""
    files = [*manifest.assets.values(), *(f for f in (manifest.objects, manifest.sidecar) if f is not None)]
    return tuple(f.path for f in files)


def _bury(store: Store, tombstone: TombstoneDoc) -> None:
    """Remove all that a tombstone names, itself last."""
    for file in tombstone.files:
        store.delete(file)
    abandon(store, tombstone.attempt)
    store.delete(CATALOG_DOCUMENT)
    store.delete(TOMBSTONE)
    store.prune()


def _tombstone(store: Store) -> TombstoneDoc | None:
    try:
        return TombstoneDoc.model_validate_json(store.read(TOMBSTONE))
    except NotFound:
        return None
    except ValidationError:
        raise IntegrityError(
            f"{store.url}/{TOMBSTONE} cannot be read",
            hint="look at it; delete the checkpoint's folder by hand if it may go",
        ) from None


def _leftovers(place: str, before: datetime) -> Iterator[Leftover]:
    """Attempts below a place that no manifest commits and that began before this time."""
    store = open_store(place)
    attempts = [
        i.key
        for i in store.list()
        if i.key.rpartition("/")[0].rpartition("/")[2] == "attempts" or i.key.startswith("attempts/")
    ]
    for key in attempts:
        root = key.rpartition("attempts/")[0].rstrip("/")
        try:
            doc = AttemptDoc.model_validate_json(store.read(key))
        except (ValidationError, NotFound):
            continue  # not a record of ours
        home = open_store(f"{store.url}/{root}" if root else store.url)
        if key.rpartition("/")[2] != f"{doc.attempt}.json" or doc.started > before or _committed(home) == doc.attempt:
            continue
        nbytes = sum(i.size for kind in ("data", "objects", "assets") for i in home.list(f"{kind}/{doc.attempt}"))
        yield Leftover(home.url, doc.attempt, nbytes, doc.started)


def _committed(store: Store) -> str | None:
    """The attempt that the manifest of a place commits."""
    try:
        return read_manifest(store)[0].attempt
    except NotACheckpoint:
        tombstone = _tombstone(store)
        return None if tombstone is None else tombstone.attempt


def _remove_leftover(left: Leftover) -> None:
    store = open_store(left.url)
    try:
        if _committed(store) == left.attempt:  # it was committed after all
            return
    except (IntegrityError, UpgradeNeeded) as error:
        raise Conflict(f"its manifest cannot be read: {error.message}") from error
    abandon(store, left.attempt)
    store.sweep()
    store.prune()
