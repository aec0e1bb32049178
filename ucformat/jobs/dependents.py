"""Virtual checkpoints and the files that they need: what is beside these says so, and every catalog honours it.

The document `needed-by/<id>.json` is put before the virtual checkpoint is committed, and goes when that is gone.
Whoever removes or replaces a checkpoint says so beside it first (a tombstone, `replacing` in the record of an attempt),
and then asks for these documents; whoever puts one looks for that afterwards. So of two at once at least one sees the
other. A document that was left behind costs space, until the owner says that it is to be ignored.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ucformat.catalog.stamp import make_stamp
from ucformat.errors import Conflict, NotFound, PermissionDenied, UcformatError, UnsupportedError
from ucformat.format.attempts import KINDS, replacing_attempts
from ucformat.format.mounted import is_below
from ucformat.format.structure import read_manifest
from ucformat.schema.documents import NEEDED_BY, TOMBSTONE, NeededByDoc
from ucformat.settings import allowed_roots, load_settings
from ucformat.storage.base import exists
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.manifest import AttemptDoc
    from ucformat.storage.base import Store

__all__ = [
    "Home",
    "dependents_at",
    "dependents_of",
    "find_homes",
    "forget_dependents",
    "ignore_dependents",
    "need",
    "release",
    "unprotected",
]

_log = logging.getLogger("ucformat")
_NAME = re.compile(r"([0-9a-f]{32})\.json", re.ASCII)  # of the documents: by an id as `new_id` makes it

#: A place in which the need of files is to be said, and the attempts there that these files are of, if of any.
Home = tuple[str, frozenset[str]]


# Who needs files


def find_homes(files: Sequence[tuple[Store, str]]) -> tuple[Home, ...]:
    """Find the places where files must be recorded as needed: their roots, and checkpoints around or below those.

    Such a one has them in the folders of its attempt: all else nobody removes with it.

    Args:
        files: the store and the key of each file.
    """
    found: dict[str, set[str]] = {}
    candidates: dict[str, set[str]] = {}
    for store, key in files:
        found.setdefault(store.url, set())
        *folders, _ = f"{store.url}/{key}".split("/")
        above = 3 if "://" in store.url else 1  # what a place has at least
        for at, name in enumerate(folders[above + 1 : -1], above + 1):
            if name in KINDS:
                candidates.setdefault("/".join(folders[:at]), set()).add(folders[at + 1])
    for url, attempts in candidates.items():
        standing = _attempt_at(url)
        if standing in attempts or (standing is not None and url in found):
            found.setdefault(url, set()).update(attempts if url in found else {standing})
    return tuple((url, frozenset(attempts)) for url, attempts in found.items())


def _attempt_at(url: str) -> str | None:
    """The attempt of the checkpoint of ours at a place, if one can be read there."""
    try:
        return read_manifest(open_store(url))[0].attempt
    except UcformatError:
        return None


def need(homes: Sequence[Home], checkpoint: str, url: str, *, unprotected: bool = False) -> None:
    """Say in these places, for good, that a checkpoint needs their files.

    Args:
        homes: the places.
        checkpoint: its id.
        url: where it is going to lie.
        unprotected: go on where that cannot be written, with a warning.

    Raises:
        Conflict: what is there is being removed or replaced, or was replaced since it was opened.
        PermissionDenied: it cannot be written there.
    """
    stamp = make_stamp()
    doc = NeededByDoc(id=checkpoint, url=url, created=stamp.now, who=stamp.who)
    for place, attempts in homes:
        store = open_store(place)
        try:
            with store.create(_key(checkpoint)) as out:
                out.write(doc.model_dump_json(indent=1).encode())
            store.flush()
        except UcformatError as error:
            if not unprotected:
                raise PermissionDenied(
                    f"it cannot be said in {place} that {url} needs its files, which anybody could then remove: "
                    f"{error.message}",
                    hint="make that place one that can be written to; or take the risk: --unprotected, or "
                    "unprotected=True",
                ) from error
            _log.warning("nothing in %s says that %s needs its files: %s", place, url, error.message)
        _refuse_dying(store, attempts)


def _refuse_dying(store: Store, attempts: frozenset[str]) -> None:
    """Conflict where somebody removes or replaces the checkpoint whose files these are, or has done so."""
    if exists(store, TOMBSTONE):
        raise Conflict(
            f"what lies at {store.url} was deleted, and is being removed",
            hint="run it again if the checkpoint is still there when `ucp gc --apply` has ended",
        )
    if not attempts:
        return
    standing = _attempt_at(store.url)
    if standing is None or attempts - {standing}:
        raise Conflict(
            f"the checkpoint at {store.url} was replaced or deleted since it was opened", hint="open it again"
        )
    if replacing_attempts(store) - {standing}:
        raise Conflict(
            f"the checkpoint at {store.url} is being replaced",
            hint="run it again when that is done; if it was interrupted, end it, or remove what it left: "
            "`ucp gc PLACE --apply`",
        )


def release(store: Store, record: AttemptDoc) -> None:
    """Withdraw that a checkpoint whose attempt is gone needs files elsewhere; failures are warnings.

    Only where this user's virtual checkpoints may have files, and only what speaks of this place: a record may be
    anybody's.

    Args:
        store: the place of the checkpoint.
        record: the record of its attempt.
    """
    for place in record.needs:
        try:
            if record.id is None or not _may_ask(place):
                raise PermissionDenied("nothing says that this user's checkpoints have files there")
            other, key = open_store(place), _key(record.id)
            there, doc = exists(other, key), _read(other, record.id)
            if not there or (doc is not None and _is_same(doc.url, store.url)):
                with suppress(
                    *()
                    if there
                    else (
                        PermissionDenied,
                        UnsupportedError,
                    )
                ):  # where nothing can be removed, nothing was put
                    other.delete(key)
                    other.flush()  # before the record goes, which alone says that it was needed
        except UcformatError as error:
            _log.warning(
                "%s still says that it is needed by %s: %s; --ignore-dependent ends that",
                *(place, record.id, error.message),
            )


def _may_ask(place: str) -> bool:
    allowed = allowed_roots()
    return is_below(place, allowed) or any(is_below(root, [place]) for root in allowed)


def _is_same(one: str, other: str) -> bool:
    return is_below(one, [other]) and is_below(other, [one])


# Who is needed


def dependents_at(store: Store) -> tuple[str, ...]:
    """The ids of the checkpoints that need files of a place, according to the documents there.

    Args:
        store: the place.
    """
    names = (_NAME.fullmatch(info.key.removeprefix(f"{NEEDED_BY}/")) for info in store.list(NEEDED_BY))
    return tuple(found[1] for found in names if found)


def dependents_of(places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """Find the dependents of checkpoints.

    A place that cannot be asked counts as one that nobody needs: it is asked once more before anything of it goes.

    Args:
        places: the id of each checkpoint with the urls of its places.
    """

    def ask(url: str) -> tuple[str, ...]:
        try:
            return dependents_at(open_store(url))
        except UcformatError as error:
            _log.warning("it cannot be asked who needs what lies at %s: %s", url, error.message)
            return ()

    asked = [(checkpoint, url) for checkpoint, urls in places.items() for url in urls]
    found: dict[str, frozenset[str]] = {}
    for (checkpoint, _), ids in zip(asked, map_io(lambda of: ask(of[1]), asked), strict=True):
        others = frozenset(ids) - {checkpoint}
        if others:
            found[checkpoint] = found.get(checkpoint, frozenset()) | others
    return found


def forget_dependents(store: Store) -> None:
    """Remove the documents of dependents, after the files are gone.

    Args:
        store: the place.
    """
    for who in dependents_at(store):
        store.delete(_key(who))


def ignore_dependents(url: str, ids: Collection[str], *, command: str) -> frozenset[str]:
    """Let what these checkpoints need of a place be removed, by the word of the owner, which the catalog's log keeps.

    Args:
        url: the place.
        ids: of the dependents.
        command: for which it is done, for the log.

    Returns:
        those of the ids that were said, beside the files or in the catalog, to need them.
    """
    store, stamp = open_store(url), make_stamp()
    beside = frozenset(dependents_at(store)) & frozenset(ids)
    said = {who: doc.url for who in beside if (doc := _read(store, who)) is not None}
    catalog_url = load_settings().catalog_url()
    found = set(beside)
    if catalog_url is not None:
        from ucformat.catalog.catalog import Catalog
        from ucformat.catalog.deletion import ignore_dependent
        from ucformat.catalog.refs import same_url

        place = same_url(store.url)
        why = {who: {"command": command, "at": said.get(who)} for who in ids}
        with Catalog(catalog_url) as catalog:  # first: what is done is in the log
            found = catalog.database.write(
                lambda c: {w for w in ids if ignore_dependent(c, w, place, stamp, beside=w in beside, why=why[w])}
            )
    for who in beside:
        store.delete(_key(who))
        _log.warning("%s is no longer kept for %s, which needs its files", url, who)
    return frozenset(found)


def unprotected(ck: Checkpoint) -> tuple[str, ...]:
    """The places of a virtual checkpoint's files that do not record that it needs them.

    Places that nobody allows to be read, or that cannot be, are left out.

    Args:
        ck: the checkpoint.
    """
    source = ck.universal
    if source is None or source.manifest.sidecar is None:
        return ()
    found = []
    for root in source.manifest.sidecar.roots:
        try:
            if is_below(root, allowed_roots()):
                doc = _read(open_store(root), source.manifest.id)
                if doc is None or not _is_same(doc.url, ck.home):
                    found.append(root)
        except UcformatError:
            continue
    return tuple(found)


def _key(checkpoint: str) -> str:
    return f"{NEEDED_BY}/{checkpoint}.json"


def _read(store: Store, checkpoint: str) -> NeededByDoc | None:
    """What says that this checkpoint needs files here; None if there is nothing, or nothing of ours."""
    try:
        return NeededByDoc.model_validate_json(store.read(_key(checkpoint)))
    except (NotFound, ValidationError):
        return None
