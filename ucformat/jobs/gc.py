"""Frees storage: purges deleted checkpoints whose grace is over, and attempts that were never committed.

Nothing is deleted but the files of attempts that a manifest, attempt record or tombstone names, in
folders that are provably theirs (`format.attempts`), and the documents of ucformat beside them. A
tombstone is written before the manifest is deleted, and is itself deleted last: a process that is
killed at any instant leaves either a checkpoint, or a tombstone from which the next `collect`
resumes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.catalog.as_json import data_of, instant, row_data
from ucformat.catalog.deletion import begin_purge, end_purge, stop_purge
from ucformat.catalog.refs import Ref, places_of, resolve
from ucformat.catalog.retention import needed_by, plan_id
from ucformat.catalog.stamp import GRACE, make_stamp
from ucformat.errors import Conflict, IntegrityError, NotFound, UcformatError
from ucformat.format.attempts import (
    attempt_of,
    folders_of,
    is_inside_attempt,
    names_below,
    record_key,
    refuse_others,
)
from ucformat.format.commit import abandon
from ucformat.format.digest import encoded
from ucformat.format.structure import find_manifest
from ucformat.jobs.documents import read_document, write_documents
from ucformat.jobs.listing import check_listed, check_removed, is_empty
from ucformat.jobs.removal import (
    bury,
    orphaned_document,
    read_tombstone,
    remove,
    remove_orphaned_document,
)
from ucformat.jobs.run import naming_place
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST, TOMBSTONE
from ucformat.schema.manifest import AttemptDoc
from ucformat.schema.values import parsed
from ucformat.storage.base import exists
from ucformat.storage.url import as_strings, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.deletion import Deferred, PurgePlan
    from ucformat.catalog.retention import RetentionRow
    from ucformat.schema.documents import TombstoneDoc
    from ucformat.storage.base import Store

__all__ = ["Collected", "Leftover", "Thinning", "collect", "collected_data", "consult", "purge"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """The leftovers of an interrupted writer or purge: an attempt that was never committed, or a tombstone.

    `attempt` is None for a catalog's document without a checkpoint, written while that was removed.
    """

    url: str
    attempt: str | None
    nbytes: int
    started: datetime


@dataclass(frozen=True, slots=True)
class Thinning:
    """A deleted checkpoint of which others need only a part; the bytes of its tensors that are left are an estimate."""

    row: RetentionRow
    stored: int
    left: int


@dataclass(frozen=True, slots=True)
class Collected:
    """What can be removed (`plan`, `resumed`, `leftovers`, `thin`), and if applied, what was removed and what failed.

    `whole` has the reasons why others that wait are not thinned, by id.
    """

    plan: PurgePlan
    resumed: tuple[str, ...]  # ids of checkpoints whose purge was begun before
    leftovers: tuple[Leftover, ...]
    thin: tuple[Thinning, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    purged: tuple[str, ...] = ()  # ids
    thinned: tuple[str, ...] = ()  # ids
    failures: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The id of the plan, also of what it thins."""
        return (
            plan_id(["thin", self.plan.id], [t.row for t in self.thin])
            if self.thin
            else self.plan.id
        )

    @property
    def waiting(self) -> list[Deferred]:
        """The checkpoints that stay as they are."""
        thin = {t.row.id for t in self.thin}
        return [deferred for deferred in self.plan.wait if deferred.row.id not in thin]


def collected_data(collected: Collected, *, applied: bool) -> dict[str, Any]:
    """The JSON of what may be removed from storage, or was."""
    plan = collected.plan
    return {
        "plan": collected.id,
        "applied": applied,
        "purge": [row_data(row) for row in plan.purge],
        "resumed": list(collected.resumed),
        "leftovers": [data_of(left) for left in collected.leftovers],
        "waiting": [
            row_data(
                w.row,
                reasons=list(w.reasons),
                until=instant(w.until),
                not_thinned=collected.whole.get(w.row.id),
            )
            for w in collected.waiting
        ],
        "thin": [row_data(t.row, bytes_stored=t.stored, bytes_kept=t.left) for t in collected.thin],
        "thinned": list(collected.thinned),
        "purged": list(collected.purged),
        "failures": list(collected.failures),
        "bytes": plan.bytes_purged + sum(left.nbytes for left in collected.leftovers),
    }


def collect(
    catalog: Catalog,
    places: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
    *,
    thin: bool = False,
    apply: bool = False,
    expect: str | None = None,
    grace: timedelta = GRACE,
    progress: Callable[[int, int], None] | None = None,
) -> Collected:
    """Show what may be removed from storage, and with `apply` remove it.

    Args:
        catalog: the catalog; its deleted checkpoints are purged once their grace is over and
            nothing protects them.
        places: also search below these places for uncommitted attempts that were not written to for
            `grace`.
        thin: also thin the deleted checkpoints that only others protect, which need a part of them
            (default: no).
        apply: remove it; otherwise nothing is touched (default: no).
        expect: the id of a plan: nothing is removed if the plan has changed (None: any plan).
        grace: for deleted checkpoints that have none of their own, and for attempts.
        progress: called with the checkpoints and attempts done and in all.

    Raises:
        Conflict: the plan is not the expected one; nothing was removed.
    """
    plan = catalog.purgeable(grace)
    resumed = plan.begun
    failures: list[str] = []
    before = make_stamp().now - grace
    leftovers = tuple(
        x
        for place in as_strings(places)
        for x in _leftovers(catalog, place, before, resumed, failures)
    )
    thinnings, whole = _thinnings(plan) if thin else ((), dict[str, str]())
    planned_all = Collected(plan, resumed, leftovers, thinnings, whole, failures=tuple(failures))
    if not apply:
        return planned_all
    if expect is not None and planned_all.id != expect:
        raise Conflict(
            "what can be removed has changed since the plan was made: nothing was removed",
            hint="review the new plan, and apply that",
        )
    write_documents(catalog, None)  # what we no longer keep must not count
    planned = [r.id for r in plan.purge]
    needed = [deferred.row.id for deferred in plan.wait if deferred.row.dependents]
    unclear = consult(catalog, [*planned, *needed])
    failures += unclear.values()
    plan = catalog.purgeable(grace)  # without those that other catalogs protect
    clear = {*planned} - {*unclear}  # not those whose grace has ended only now
    waiting = {deferred.row.id for deferred in plan.wait} - {*unclear}
    to_thin = [t.row.id for t in thinnings if t.row.id in waiting]
    ids = [*resumed, *(r.id for r in plan.purge if r.id in clear), *to_thin]
    purged, thinned = [], []
    may_thin = {*resumed, *to_thin} if thin else set()
    for done, checkpoint in enumerate(ids, 1):
        try:
            with naming_place(checkpoint):
                if purge(catalog, checkpoint, thin=checkpoint in may_thin):
                    purged.append(checkpoint)
                elif checkpoint in may_thin and catalog.get(checkpoint).state == "thinned":
                    thinned.append(checkpoint)
        except UcformatError as error:
            failures.append(f"{checkpoint}: {_with_hint(error)}")
        if progress is not None:
            progress(done, len(ids) + len(leftovers))
    for done, left in enumerate(leftovers, len(ids) + 1):
        try:
            with naming_place(left.url):
                _remove_leftover(left, before, grace)
        except UcformatError as error:
            failures.append(f"{left.url}: {error.message}")
        if progress is not None:
            progress(done, len(ids) + len(leftovers))
    return replace(
        planned_all,
        plan=plan,
        purged=tuple(purged),
        thinned=tuple(thinned),
        failures=tuple(failures),
    )


def _thinnings(plan: PurgePlan) -> tuple[tuple[Thinning, ...], dict[str, str]]:
    """What can be thinned of the checkpoints that wait only for others, and why the rest cannot, by id."""
    from ucformat.jobs.remnants import plan_remnant  # which needs NumPy

    thin: list[Thinning] = []
    whole: dict[str, str] = {}
    for deferred in plan.wait:
        row = deferred.row
        if deferred.reasons != tuple(needed_by(row.dependents)):
            continue
        try:
            plans = [plan_remnant(url, row.id) for url in row.places]
            stored, left = sum(p.stored for p in plans), sum(p.left for p in plans)
            if others := {*row.dependents}.difference(*(p.dependents for p in plans)):
                raise Conflict(f"there is no record of what {min(others)} needs")
            if left >= stored:
                raise Conflict("what they need takes as much room as all that is there")
        except UcformatError as error:
            whole[row.id] = error.message
        else:
            thin.append(Thinning(row, stored, left))
    return tuple(thin), whole


def _places(catalog: Catalog, checkpoint: str) -> tuple[int, tuple[str, ...]]:
    """The serial of the checkpoint with an id, and its places."""
    with catalog.database.reading() as c:
        serial = resolve(c, Ref(checkpoint, id=checkpoint))
        return serial, tuple(places_of(c, [serial]).get(checkpoint, ()))


def consult(catalog: Catalog, ids: Sequence[str]) -> dict[str, str]:
    """Import what other catalogs recorded about checkpoints; returns the reason for each that cannot be read."""
    unclear = {}
    for checkpoint in ids:
        for url in _places(catalog, checkpoint)[1]:
            try:
                with naming_place(url):
                    _consult(catalog, checkpoint, url)
            except UcformatError as error:
                unclear[checkpoint] = f"{checkpoint}: it may be protected: {_with_hint(error)}"
    return unclear


def _with_hint(error: UcformatError) -> str:
    """The message of an error, and what to do about it."""
    return error.message if error.hint is None else f"{error.message} {error.hint}"


def _consult(catalog: Catalog, checkpoint: str, url: str) -> None:
    store = open_store(url)
    doc = read_document(store)
    if doc is None and is_empty(store):
        check_removed(store, begun=False)
    if doc is not None and doc.id == checkpoint:
        catalog.import_document(checkpoint, doc, url)


def purge(catalog: Catalog, checkpoint: str, *, thin: bool = False) -> bool:
    """Remove a checkpoint from all its places; False if something protects it in one of them.

    Args:
        thin: where others need it, keep what they need, and remove the rest.
    """
    stamp = make_stamp()
    serial, _ = _places(catalog, checkpoint)
    urls = catalog.database.write(lambda c: begin_purge(c, serial, stamp, thin_needed=thin))
    if urls is None:
        return False
    failures, needed, gone = [], set[str](), []
    for url in urls:
        try:
            dependents = remove(open_store(url), checkpoint)
        except UcformatError as error:
            failures.append(error.message)
        else:
            needed.update(dependents)
            gone += [] if dependents else [url]
    if failures:
        raise UcformatError("; ".join(failures))
    if needed:  # to be thinned, or by dependents that were recorded after the plan
        from ucformat.jobs.remnants import keep_needed, remnant_at  # which need NumPy

        kept = [url for url in urls if url not in gone]
        try:
            for url in kept if thin else ():
                keep_needed(url, checkpoint)
        finally:
            manifests = ((url, remnant_at(url, checkpoint)) for url in kept)
            remnants = {url: manifest for url, manifest in manifests if manifest is not None}
            for url, manifest in remnants.items():
                catalog.record(manifest, url)
            left = max((m.tensors.nbytes for m in remnants.values()), default=None)
            catalog.database.write(
                lambda c: stop_purge(c, serial, gone, sorted(needed), make_stamp(), left=left)
            )
        return False
    catalog.database.write(lambda c: end_purge(c, serial, make_stamp()))
    return True


def _leftovers(
    catalog: Catalog, place: str, before: datetime, resumed: Sequence[str], failures: list[str]
) -> Iterator[Leftover]:
    """The leftovers below a place that were last written to before a time; unreadable places are failures.

    Attempts, tombstones of purges that are not in `resumed`, and documents of catalogs without a
    checkpoint.
    """
    store = open_store(place)
    if is_empty(store):
        try:
            check_listed(store, catalog)
        except NotFound as error:
            failures.append(error.message)
        return
    homes, committed = _homes(store)
    for root, attempts in homes.items():
        home = open_store(f"{store.url}/{root}" if root else store.url)
        try:
            with naming_place(home.url):
                leftovers = (
                    ()
                    if _is_of_another(store, root, committed)
                    else _left_at(home, attempts, before, resumed)
                )
        except UcformatError as error:
            failures.append(f"{home.url}: {error.message}")
        else:
            yield from leftovers


def _homes(store: Store) -> tuple[dict[str, list[str]], set[str]]:
    """The folders that may have leftovers, with their attempts, and those that have a manifest."""
    homes: dict[str, list[str]] = {}
    committed: set[str] = set()
    documented: set[str] = set()
    for info in store.list():
        *folder, name = info.key.split("/")
        if folder[-1:] == ["attempts"]:
            if (attempt := attempt_of(name)) is not None:
                homes.setdefault("/".join(folder[:-1]), []).append(attempt)
        elif name == TOMBSTONE:
            homes.setdefault("/".join(folder), [])
        elif name == MANIFEST:
            committed.add("/".join(folder))
        elif name == CATALOG_DOCUMENT:
            documented.add("/".join(folder))
    for root in sorted(documented - committed):
        homes.setdefault(root, [])
    return homes, committed


def _is_of_another(store: Store, root: str, committed: Collection[str]) -> bool:
    """Whether an apparent place is among the files of an attempt, or of a checkpoint above it."""
    if is_inside_attempt(root):
        return True
    parts = root.split("/") if root else []
    for above in ("/".join(parts[:n]) for n in range(len(parts))):
        if above in committed:
            outer = open_store(f"{store.url}/{above}" if above else store.url)
            manifest = find_manifest(outer)
            if manifest is not None and names_below(
                outer, manifest, root[len(above) :].lstrip("/")
            ):
                return True
    return False


def _left_at(
    home: Store, attempts: Sequence[str], before: datetime, resumed: Sequence[str]
) -> list[Leftover]:
    """The leftovers at one place."""
    tombstone, manifest = read_tombstone(home), find_manifest(home)
    current = manifest or tombstone
    leftovers = [
        _leftover(home, a, before) for a in attempts if current is None or a != current.attempt
    ]
    if tombstone is not None and manifest is None and tombstone.id not in resumed:
        leftovers.append(_leftover_purge(home, tombstone, before))
    if current is None and not attempts:
        leftovers.append(_leftover_document(home, before))
    return [left for left in leftovers if left is not None]


def _leftover(store: Store, attempt: str, before: datetime) -> Leftover | None:
    """An attempt, if it began and was last written to before this time."""
    inspected = inspect_attempt(store, attempt, before)
    return (
        None
        if inspected is None
        else Leftover(store.url, attempt, inspected.nbytes, inspected.doc.started)
    )


@dataclass(frozen=True, slots=True)
class Inspected:
    """A leftover attempt as it was inspected: its record with the raw bytes and version, and its size in bytes.

    `written` is the last write by the clock of the place, in seconds since 1970; None if unknown.
    `files` is how many files were looked at, and `has_more` whether there are others.
    """

    doc: AttemptDoc
    data: bytes
    version: str
    nbytes: int
    written: float | None
    files: int = 0
    has_more: bool = False


def inspect_attempt(
    store: Store, attempt: str, before: datetime, most: int | None = None
) -> Inspected | None:
    """Look at an attempt; None if it was written to since a time, or its record is not valid.

    Args:
        most: how many of its files are looked at (None: all); `has_more` tells that there are others.
    """
    key = record_key(attempt)
    try:
        data, version = store.read_versioned(key)
        doc = parsed(AttemptDoc, data)
        own = store.info(key)
    except (ValueError, NotFound):
        return None  # no valid record, or one of a later version
    files = (i for folder in folders_of(attempt) for i in store.list(folder))
    infos = list(islice(files, most))
    has_more = most is not None and next(files, None) is not None
    written = max((i.modified for i in (own, *infos) if i.modified is not None), default=None)
    last = max((doc.removed or doc.started).timestamp(), written or 0.0)
    if doc.attempt != attempt or last > before.timestamp():
        return None
    nbytes = sum(i.size for i in infos)
    return Inspected(doc, data, version, nbytes, written, len(infos), has_more)


def _leftover_purge(store: Store, tombstone: TombstoneDoc, before: datetime) -> Leftover | None:
    """The rest of an interrupted purge, if that began before this time."""
    infos = [i for folder in folders_of(tombstone.attempt) for i in store.list(folder)]
    own = [
        store.info(key) for key in (TOMBSTONE, record_key(tombstone.attempt)) if exists(store, key)
    ]
    written = max((i.modified for i in (*own, *infos) if i.modified is not None), default=0.0)
    # its attempt may be being written
    if max(tombstone.created.timestamp(), written) > before.timestamp():
        return None
    return Leftover(store.url, tombstone.attempt, sum(i.size for i in infos), tombstone.created)


def _leftover_document(store: Store, before: datetime) -> Leftover | None:
    """The document of a catalog, if it was written before this time and nothing else is there."""
    with suppress(IntegrityError):  # not a valid document
        if orphaned_document(store) is not None:
            info = store.info(CATALOG_DOCUMENT)
            if info.modified is not None and info.modified <= before.timestamp():
                return Leftover(
                    store.url, None, info.size, datetime.fromtimestamp(info.modified, UTC)
                )
    return None


def _remove_leftover(left: Leftover, before: datetime, grace: timedelta) -> None:
    """Remove a leftover, if it is unchanged."""
    store = open_store(left.url)
    if left.attempt is None:
        if _leftover_document(store, before) is not None:
            remove_orphaned_document(store)
        return
    tombstone, manifest = read_tombstone(store), find_manifest(store)
    if tombstone is not None and manifest is None and tombstone.attempt == left.attempt:
        bury(store, tombstone)
    elif manifest is None or manifest.attempt != left.attempt:
        refuse_others(store, left.attempt, manifest)  # before it is marked
        if _condemn(store, left.attempt, before, grace):
            abandon(store, left.attempt)
            store.sweep()


def _condemn(store: Store, attempt: str, before: datetime, grace: timedelta) -> bool:
    """Mark an attempt, if it is still a leftover, so that no writer resumes or commits it; False if it must stay.

    The clock of the place decides: if this host's is ahead, an attempt that is being written looks
    like a leftover.
    """
    inspected = inspect_attempt(store, attempt, before)
    if inspected is None:
        return False
    key = record_key(attempt)
    marked = inspected.doc.model_copy(update={"removed": make_stamp().now})
    try:
        version = store.replace(key, encoded(marked), inspected.version)
        modified = store.info(key).modified
        young = (
            modified is not None
            and inspected.written is not None
            and modified - inspected.written < grace.total_seconds()
        )
        manifest = find_manifest(store)
        # committed in the meantime
        if young or (manifest is not None and manifest.attempt == attempt):
            store.replace(key, inspected.data, version)
            return False
    except (Conflict, NotFound):  # another process resumes or removes it
        return False
    return True
