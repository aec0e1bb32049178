"""Dependents, recorded beside the files that they need: virtual checkpoints, and catalogs that keep a checkpoint.

The document `needed-by/<id>.json` is written before a checkpoint is committed that is virtual or has
bases, and deleted after it is removed; that of a catalog is written when it holds, tags or names a checkpoint.
A process that removes or replaces a checkpoint first marks that beside it (a tombstone, or
`replacing` in the record of an attempt) and then lists these documents; a process that writes one
looks for such a mark afterwards. So if both run at once, at least one sees the other. A document
that was left behind keeps files until the owner ignores it.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from ucformat.catalog.stamp import make_stamp
from ucformat.errors import (
    Conflict,
    NotACheckpoint,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
)
from ucformat.format.attempts import KINDS, TRIES, contended, replacing_attempts
from ucformat.format.bases import place_of_base, url_of_base
from ucformat.format.commit import settle
from ucformat.format.digest import encoded
from ucformat.format.mounted import is_below
from ucformat.format.structure import read_manifest, sibling_name
from ucformat.schema import NEEDED_BY, TOMBSTONE
from ucformat.schema.documents import NeededByDoc
from ucformat.schema.values import parsed
from ucformat.settings import allowed_roots, load_settings
from ucformat.storage.base import exists
from ucformat.storage.concurrency import map_io
from ucformat.storage.folders import roots_hint
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.documents import ReasonDoc
    from ucformat.schema.manifest import AttemptDoc
    from ucformat.storage.base import Store

_log = logging.getLogger("ucformat")
_NAME = re.compile(r"([0-9a-f]{32})\.json", re.ASCII)  # of the documents: an id from `new_id`

#: A place where files must be recorded as needed, and the attempts there that the files belong to,
#: if any.
Home = tuple[str, frozenset[str]]


# Recording dependents


def find_homes(files: Sequence[tuple[Store, str]]) -> tuple[Home, ...]:
    """Find the places where files must be recorded as needed: their roots, and checkpoints around or below those.

    Only files in the folders of a checkpoint's attempt are removed with it.
    """
    attempts_by_url: dict[str, set[str]] = {}
    candidates: dict[str, set[str]] = {}
    for store, key in files:
        attempts_by_url.setdefault(store.url, set())
        *folders, _ = f"{store.url}/{key}".split("/")
        above = 3 if "://" in store.url else 1  # the least number of parts of a place
        for at, name in enumerate(folders[above + 1 : -1], above + 1):
            if name in KINDS:
                candidates.setdefault("/".join(folders[:at]), set()).add(folders[at + 1])
    for url, attempts in candidates.items():
        committed = _attempt_at(url)
        if committed in attempts or (committed is not None and url in attempts_by_url):
            attempts_by_url.setdefault(url, set()).update(
                attempts if url in attempts_by_url else {committed}
            )
    return tuple((url, frozenset(attempts)) for url, attempts in attempts_by_url.items())


def _attempt_at(url: str) -> str | None:
    """The attempt of the universal checkpoint at a place; None if none can be read."""
    try:
        return read_manifest(open_store(url))[0].attempt
    except UcformatError:
        return None


def need(homes: Sequence[Home], checkpoint: str, url: str, *, unprotected: bool = False) -> None:
    """Record durably in these places that a checkpoint needs their files.

    Raises:
        Conflict: the checkpoint there is being removed or replaced, or was replaced since it was
            opened.
    """
    stamp = make_stamp()
    doc = NeededByDoc(id=checkpoint, url=url, created=stamp.now, who=stamp.who)
    for place, attempts in homes:
        store = open_store(place)
        try:
            with store.create(_key(checkpoint)) as out:
                out.write(encoded(doc))
            store.flush()
        except UcformatError as error:
            if not unprotected:
                raise PermissionDenied(
                    f"{place} cannot record that {url} needs its files, so they could be "
                    f"removed: {error.message}",
                    hint=(
                        "make that place writable; or accept the risk with --unprotected, or "
                        "unprotected=True"
                    ),
                ) from error
            _log.warning("%s has no record that %s needs its files: %s", place, url, error.message)
        _refuse_dying(store, attempts)


def need_base(base: Home, kept: str, checkpoint: str, home: str) -> None:
    """Record durably, where a base is, that a checkpoint needs it; a copy of that may need it, too.

    Args:
        kept: the id of the base.
        home: the place of the checkpoint.

    Raises:
        Conflict: the base is being removed or replaced, or was replaced since it was opened.
        PermissionDenied: nothing can be written beside it.
    """
    place, attempts = base
    store, stamp, url = open_store(place), make_stamp(), url_of_base(place, home)
    for _ in range(TRIES):
        data, version = read_versioned(store, _key(checkpoint))
        before = None if data is None else _parse(data)
        others = () if before is None or before.keeps != kept else (before.url, *before.urls)
        doc = NeededByDoc(
            id=checkpoint,
            url=url,
            created=stamp.now,
            who=stamp.who,
            keeps=kept,
            urls=tuple(other for other in dict.fromkeys(others) if other != url),
        )
        try:
            put_version(store, _key(checkpoint), encoded(doc), version)
            break
        except Conflict:
            continue
        except (PermissionDenied, UnsupportedError) as error:
            raise PermissionDenied(
                f"{place} cannot record that {home} is based on it, so it could be removed: "
                f"{error.message}",
                hint=f"make that place writable; or `ucp register {place} DST --virtual --unprotected` makes a "
                "base of it elsewhere, at the risk that it is removed; or write the checkpoint whole",
            ) from error
    else:
        raise contended(store, _key(checkpoint))
    _refuse_dying(store, attempts)


def _refuse_dying(store: Store, attempts: frozenset[str]) -> None:
    """Raise Conflict if the checkpoint with these files is being removed or replaced, or gone."""
    if exists(store, TOMBSTONE):
        raise Conflict(
            f"the checkpoint at {store.url} was deleted, and is being removed",
            hint="run it again if the checkpoint is still there after `ucp gc --apply`",
        )
    if not attempts:
        return
    committed = _attempt_at(store.url)
    if committed is None or attempts - {committed}:
        raise Conflict(
            f"the checkpoint at {store.url} was replaced or deleted since it was opened",
            hint="open it again",
        )
    if replacing_attempts(store) - {committed}:
        raise Conflict(
            f"the checkpoint at {store.url} is being replaced",
            hint="run it again when that is done; if it was interrupted, resume it, or remove its leftovers: "
            "`ucp gc PLACE --apply`",
        )


def release(store: Store, record: AttemptDoc) -> None:
    """Remove the records that a checkpoint whose attempt is gone needs files elsewhere; failures are warnings.

    Only beside this place, or where this user's virtual checkpoints may have files, and only records
    with the url of this place: the record of an attempt may be another user's. A base that the
    checkpoint still has when its files were replaced in place stays recorded.
    """
    for need_url in record.needs:
        place = need_url
        try:
            if need_url in _bases_at(store, record.id):
                continue
            place = place_of_base(store.url, need_url)
            if record.id is None or not (sibling_name(need_url) or _is_allowed(place)):
                raise PermissionDenied(
                    "this user's checkpoints are not allowed to have files there"
                )
            other, key = open_store(place), _key(record.id)
            there, doc = exists(other, key), _read(other, record.id)
            if doc is not None and doc.keeps is not None and doc.reasons is None:
                _release_base(other, doc, store.url)
            elif not there or (doc is not None and _is_same(doc.url, store.url)):
                # where nothing can be removed, nothing was written
                harmless = () if there else (PermissionDenied, UnsupportedError)
                with suppress(*harmless):
                    other.delete(key)
                    other.flush()  # before the record is deleted, the only trace of the need
        except UcformatError as error:
            _log.warning(
                "%s is still recorded as needed by %s: %s; remove that with --ignore-dependent",
                *(place, record.id, error.message),
            )


def _bases_at(store: Store, checkpoint: str | None) -> frozenset[str]:
    """The urls of the bases of a checkpoint at a place; none if it is not there."""
    try:
        manifest, _ = read_manifest(store)
    except NotACheckpoint:
        return frozenset()
    return frozenset(base.url for base in manifest.bases if manifest.id == checkpoint)


def _release_base(store: Store, doc: NeededByDoc, home: str) -> None:
    """Take the place of a checkpoint off the record that it needs its base; the last one deletes that."""
    for _ in range(TRIES):
        data, version = read_versioned(store, _key(doc.id))
        now = None if data is None else _parse(data)
        if now is None or version is None:
            return
        places = {url: place_of_base(store.url, url) for url in (now.url, *now.urls)}
        left = [url for url, place in places.items() if not _is_same(place, home)]
        with suppress(Conflict):
            if left:
                rest = now.model_copy(update={"url": left[0], "urls": tuple(left[1:])})
                put_version(store, _key(doc.id), encoded(rest), version)
            else:
                store.delete(_key(doc.id))
                store.flush()
            return
    raise contended(store, _key(doc.id))


def _is_allowed(place: str) -> bool:
    allowed = allowed_roots()
    return is_below(place, allowed) or any(is_below(root, [place]) for root in allowed)


def _is_same(url: str, other: str) -> bool:
    return is_below(url, [other]) and is_below(other, [url])


# Finding dependents


def _recorded(store: Store) -> tuple[str, ...]:
    """The ids of the documents at a place, also of catalogs that no longer keep the checkpoint."""
    names = (
        _NAME.fullmatch(info.key.removeprefix(f"{NEEDED_BY}/")) for info in store.list(NEEDED_BY)
    )
    return tuple(name[1] for name in names if name)


def reasons_beside(
    store: Store, checkpoint: str, *, annotations: bool = True
) -> dict[str, tuple[str, ...]]:
    """Why others than a checkpoint itself need its files, by the ids of the documents at its place.

    A document that cannot be read counts as that of a checkpoint.

    Args:
        annotations: whether the annotations of catalogs count, and checkpoints that are based on
            it (default: yes; what keeps its id loses none of them).
    """
    now, reasons = make_stamp().now, {}
    for other in _recorded(store):
        doc = None if other == checkpoint else _read(store, other)
        if doc is not None and doc.reasons is not None:
            kept = [r.text for r in doc.reasons if r.until is None or r.until > now]
            if kept and annotations and doc.keeps == checkpoint:
                reasons[other] = tuple(kept)
        elif doc is not None and doc.keeps == checkpoint and not annotations:
            continue
        elif other != checkpoint:
            reasons[other] = (f"needed by {other}",)
    return reasons


def dependent_places(store: Store, checkpoint: str) -> dict[str, tuple[str, ...]]:
    """The places of the checkpoints that are based on one, by their ids.

    Raises:
        Conflict: something else needs it, or a place must not be read.
    """
    places: dict[str, tuple[str, ...]] = {}
    for other, why in reasons_beside(store, checkpoint).items():
        doc = _read(store, other)
        if doc is None or doc.keeps != checkpoint or doc.reasons is not None:
            raise Conflict(
                f"all of {store.url} is {'; '.join(why)}",
                hint="what is based on a checkpoint tells which of its tensors it needs; all else needs the whole",
            )
        urls = (doc.url, *doc.urls)
        places[other] = tuple(place_of_base(store.url, url) for url in urls)
        for url, place in zip(urls, places[other], strict=True):
            if sibling_name(url) is None and not is_below(place, allowed_roots()):
                raise Conflict(
                    f"{other} at {place} is based on {store.url}, and reading files there is not allowed",
                    hint=roots_hint(place),
                )
    return places


def dependents_at(store: Store, checkpoint: str) -> tuple[str, ...]:
    """The ids of the checkpoints that need the files of one, and of the catalogs that keep it."""
    return tuple(reasons_beside(store, checkpoint))


def keep(
    store: Store, checkpoint: str, catalog: str, reasons: tuple[ReasonDoc, ...], revision: int
) -> None:
    """Record durably that a catalog keeps a checkpoint at a place, or no longer does, unless it said more since."""
    key, stamp = _key(catalog), make_stamp()
    doc = NeededByDoc(
        id=catalog,
        url=store.url,
        created=stamp.now,
        who=stamp.who,
        keeps=checkpoint,
        reasons=reasons,
        revision=revision,
    )
    for _ in range(TRIES):
        data, version = read_versioned(store, key)
        before = None if data is None else _parse(data)
        if before is None and (data is not None or not reasons):
            return  # what cannot be read counts as it is
        if (
            before is not None
            and before.keeps == checkpoint
            and (before.revision > revision or before.reasons == reasons)
        ):
            settle(store, key)  # its writer may have been killed before it was durable
            return
        with suppress(Conflict):
            put_version(store, key, encoded(doc), version)
            return
    raise contended(store, key)


def read_versioned(store: Store, key: str) -> tuple[bytes | None, str | None]:
    """The content and version of a file; None if there is none."""
    try:
        return store.read_versioned(key)
    except NotFound:
        return None, None


def put_version(store: Store, key: str, data: bytes, version: str | None) -> None:
    """Write a file if it is unchanged since it was read with this version (None: if there is none).

    Raises:
        Conflict: another process wrote it.
    """
    if version is None:
        store.put_if_absent(key, data)
        return
    try:
        store.replace(key, data, version)
    # without conditional writes the last writer wins, so check whether it was this one
    except (PermissionDenied, UnsupportedError):
        with store.create(key) as out:
            out.write(data)
        store.flush()
        if store.read(key) != data:
            raise Conflict(
                f"{store.url}/{key} was written by another process at the same time"
            ) from None


def take_over(store: Store, catalog: str, reasons: Collection[ReasonDoc]) -> None:
    """Remove the records of other catalogs that keep a checkpoint for nothing but reasons of this one, too."""
    for other in _recorded(store):
        doc = None if other == catalog else _read(store, other)
        if doc is not None and doc.reasons and {*doc.reasons} <= {*reasons}:
            store.delete(_key(other))
            store.flush()


def kept_keys(store: Store) -> set[str]:
    """The records at a place of what catalogs keep."""
    docs = ((other, _read(store, other)) for other in _recorded(store))
    return {_key(other) for other, doc in docs if doc is not None and doc.reasons is not None}


def copy_kept(src: Store, dst: Store) -> None:
    """Record at a copy what catalogs keep, as they do at the original."""
    for catalog in _recorded(src):
        doc = _read(src, catalog)
        if doc is not None and doc.reasons and doc.keeps is not None:
            keep(dst, doc.keeps, catalog, doc.reasons, doc.revision)


def dependents_of(places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """Find the dependents of checkpoints.

    A place that cannot be listed counts as one without dependents: it is listed again before any
    file is removed.
    """
    failures: dict[str, str] = {}

    def list_dependents(pair: tuple[str, str]) -> tuple[str, ...]:
        checkpoint, url = pair
        try:
            return dependents_at(open_store(url), checkpoint)
        except UcformatError as error:
            failures[url] = error.message
            return ()

    pairs = [(checkpoint, url) for checkpoint, urls in places.items() for url in urls]
    dependents: dict[str, frozenset[str]] = {}
    for (checkpoint, _), ids in zip(pairs, map_io(list_dependents, pairs), strict=True):
        if ids:
            dependents[checkpoint] = dependents.get(checkpoint, frozenset()) | frozenset(ids)
    if failures:
        first = min(failures)
        others = f", and of {len(failures) - 1:,} other places" if len(failures) > 1 else ""
        _log.warning("cannot list the dependents of %s%s: %s", first, others, failures[first])
    return dependents


def forget_dependents(store: Store) -> None:
    """Remove the documents of dependents, after the files are gone."""
    for dependent in _recorded(store):
        store.delete(_key(dependent))


def ignore_dependents(url: str, ids: Collection[str], *, command: str) -> frozenset[str]:
    """Allow the files of a place to be removed although these checkpoints need them; the catalog logs it.

    Returns:
        Those of the ids that were recorded, beside the files or in the catalog, as dependents.
    """
    store, stamp = open_store(url), make_stamp()
    beside = frozenset(_recorded(store)) & frozenset(ids)
    urls = {
        dependent: doc.url for dependent in beside if (doc := _read(store, dependent)) is not None
    }
    catalog_url = load_settings().catalog_url()
    recorded = set(beside)
    if catalog_url is not None:
        from ucformat.catalog.catalog import Catalog
        from ucformat.catalog.deletion import ignore_dependent
        from ucformat.catalog.refs import same_url

        place = same_url(store.url)
        why = {dependent: {"command": command, "at": urls.get(dependent)} for dependent in ids}
        with Catalog(catalog_url) as catalog:  # first, so that the log is complete
            recorded = catalog.database.write(
                lambda c: {
                    w
                    for w in ids
                    if ignore_dependent(c, w, place, stamp, beside=w in beside, why=why[w])
                }
            )
    for dependent in beside:
        store.delete(_key(dependent))
        _log.warning("%s is no longer protected for %s, which needs its files", url, dependent)
    return frozenset(recorded)


def unprotected(ck: Checkpoint) -> tuple[str, ...]:
    """The places of a virtual checkpoint's files, and of bases, that do not record that it needs them.

    Places that must not be read, or cannot be, are left out.
    """
    source = ck.universal
    if source is None:
        return ()
    unrecorded = []
    for number, base in enumerate(source.bases.docs):
        with suppress(UcformatError):
            place = source.bases.place(number)
            doc = _read(open_store(place), source.manifest.id)
            urls = () if doc is None or doc.keeps != base.id else (doc.url, *doc.urls)
            if not any(_is_same(place_of_base(place, url), ck.home) for url in urls):
                unrecorded.append(place)
    sidecar = source.manifest.sidecar
    for root in () if sidecar is None else sidecar.roots:
        try:
            if is_below(root, allowed_roots()):
                doc = _read(open_store(root), source.manifest.id)
                if doc is None or not _is_same(doc.url, ck.home):
                    unrecorded.append(root)
        except UcformatError:
            continue
    return tuple(unrecorded)


def _key(checkpoint: str) -> str:
    return f"{NEEDED_BY}/{checkpoint}.json"


def _read(store: Store, checkpoint: str) -> NeededByDoc | None:
    """The record that this checkpoint needs files here; None if it is missing or invalid."""
    try:
        return _parse(store.read(_key(checkpoint)))
    except NotFound:
        return None


def _parse(data: bytes) -> NeededByDoc | None:
    try:
        return parsed(NeededByDoc, data)
    except ValueError:
        return None
