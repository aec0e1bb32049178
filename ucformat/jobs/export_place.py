"""The destination of an export: it is empty, or holds this export unfinished, or what may be removed first."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ucformat.catalog.refs import same_url
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import Conflict, UcformatError
from ucformat.format.digest import encoded
from ucformat.jobs.documents import protections_of
from ucformat.jobs.export_files import CLAIM, FOLDER, Claim, read_claim
from ucformat.reading.readable import TRACKERS
from ucformat.schema import CATALOG_DOCUMENT, MANIFEST
from ucformat.storage.base import check_key, exists

if TYPE_CHECKING:
    from ucformat.jobs.export_files import ExportJob
    from ucformat.storage.base import Store


def begin_export(job: ExportJob, *, overwrite: bool) -> None:
    """Begin or continue an export.

    No file of it is written before `cleared.json` is there: whoever puts it has seen that the place
    is as the claim says, and has removed what the export replaces.

    Raises:
        Conflict: the destination holds other files, or another export.
    """
    store, cleared = job.store, f"{FOLDER}/{job.attempt}/cleared.json"
    claim = job.own_claim()
    job.continued = claim is not None
    if claim is None:
        claim = _put_claim(job, overwrite=overwrite)
    if exists(store, cleared):
        return
    if claim.removes and not overwrite:
        raise Conflict(
            f"{store.url} holds an export that was to replace {len(claim.removes):,} files, and "
            "was interrupted",
            hint="run it again with overwrite=True (--overwrite), or choose another place",
        )
    removes = [check_key(key) for key in claim.removes]
    late = [key for key in _there(job) if key not in removes and not _is_own_record(job, key)]
    if late and not exists(store, cleared):
        _withdraw(job)
        raise Conflict(
            f"another program has written {late[0]} in {store.url} at the same time",
            hint="choose another place, or wait until that program has ended",
        )
    for key in removes:
        if not _is_own_record(job, key):
            job.check_claim()  # an export that has taken the place meanwhile may have written this file
            store.delete(key)
    store.flush()
    with suppress(Conflict):  # another process of the same export was faster
        store.put_if_absent(cleared, b"{}")


def _put_claim(job: ExportJob, *, overwrite: bool) -> Claim:
    """Claim the destination, or continue the same export of another process that was faster."""
    store, other = job.store, read_claim(job.store, job.claim)
    try:
        removes = _in_the_way(store, job, overwrite=overwrite)
    except Conflict:
        if (claim := job.own_claim()) is not None:
            return claim
        raise
    claim = Claim(
        attempt=job.attempt, files=tuple(f.key for f in job.target.files), removes=tuple(removes)
    )
    data = encoded(claim)
    try:
        if other is None:
            store.put_if_absent(job.claim, data)
        else:
            store.replace(job.claim, data, other[1])
            store.delete_prefix(f"{FOLDER}/{other[0].attempt}")
    except Conflict:
        if (own := job.own_claim()) is not None:
            return own
        raise Conflict(
            f"another export has begun to write {job.url} at the same time",
            hint="choose another place, or wait until that export has ended",
        ) from None
    return claim


def _is_own_record(job: ExportJob, key: str) -> bool:
    return key == job.claim or key.startswith(f"{FOLDER}/{job.attempt}/")


def _there(job: ExportJob) -> list[str]:
    """What there may be at the destination: all files of a folder; of a file itself, and the claim on its folder."""
    if not job.exporter.one_file:
        return [info.key for info in job.store.list()]
    return [key for key in (CLAIM, job.target.files[0].key) if exists(job.store, key)]


def _in_the_way(store: Store, job: ExportJob, *, overwrite: bool) -> list[str]:
    """The keys of the files at the destination, all of which may be removed."""
    if job.exporter.one_file:
        return _file_in_the_way(job, overwrite=overwrite)
    there = [info.key for info in store.list()]
    if not there:
        return []
    if not overwrite and any(key.startswith(f"{FOLDER}/") for key in there):
        raise _unfinished(store.url)
    if not overwrite:
        raise Conflict(
            f"{store.url} is not empty: it holds "
            f"{there[0]}{' and other files' if len(there) > 1 else ''}",
            hint=(
                "choose an empty folder, or pass overwrite=True (--overwrite) to remove a "
                "checkpoint that is there"
            ),
        )
    if MANIFEST in there:
        raise Conflict(
            f"{store.url} holds a universal checkpoint, which an export does not replace",
            hint="choose another place, or delete that checkpoint with `ucp delete` and `ucp gc`",
        )
    removable = {key for key in there if key.startswith(f"{FOLDER}/")}
    late: set[str] = set()  # what exports that are not finished may still write
    for key in [k for k in removable if k.count("/") == 1]:
        if (versioned := read_claim(store, key)) is not None:
            late |= {check_key(name) for name in versioned[0].files}
            removable |= late | set(versioned[0].removes)
    if not removable:
        removable = _checkpoint_files(store, job)
    if others := [key for key in there if key not in removable]:
        raise Conflict(
            f"{store.url} holds {others[0]}{' and other files' if len(others) > 1 else ''}, "
            "which belongs to no checkpoint that could be replaced",
            hint="choose another place, or remove these files",
        )
    return sorted({*there, *late})


def _unfinished(url: str) -> Conflict:
    return Conflict(
        f"{url} holds an unfinished export of another checkpoint, or with other options",
        hint=(
            "finish that one, choose another place, or pass overwrite=True (--overwrite) to "
            "remove it"
        ),
    )


def _file_in_the_way(job: ExportJob, *, overwrite: bool) -> list[str]:
    """The same for a target that is a file, beside which there may be others."""
    key = job.target.files[0].key
    if exists(job.store, MANIFEST):
        raise Conflict(
            f"{job.store.url} holds a universal checkpoint, in which an export writes nothing",
            hint="choose another place",
        )
    if exists(job.store, CLAIM):
        raise Conflict(
            f"{job.store.url} holds an unfinished export of a whole folder",
            hint=f"finish it, choose another place, or remove the folder {FOLDER} there",
        )
    if not overwrite and exists(job.store, job.claim):
        raise _unfinished(job.url)
    if not exists(job.store, key):
        return []
    if not overwrite:
        raise Conflict(
            f"{job.url} exists", hint="choose another name, or pass overwrite=True (--overwrite)"
        )
    source = job.source
    if same_url(job.url) in {
        same_url(f"{source.store.url}/{file}") for file in source.metadata.files
    }:
        raise Conflict(
            f"{job.url} is a file of the source of the export", hint="choose another name"
        )
    try:
        checkpoint = open_checkpoint(job.url)
    except UcformatError:  # any file may be replaced that the user names
        return [key]
    _check_unprotected(job.url, checkpoint.id)
    return [key]


def _check_unprotected(url: str, checkpoint: str) -> None:
    if reasons := protections_of(url, checkpoint):
        raise Conflict(
            f"the checkpoint at {url} is not replaced: {'; '.join(reasons)}",
            hint="choose another place, or remove the protections (docs/retention.md)",
        )


def _checkpoint_files(store: Store, job: ExportJob) -> set[str]:
    """The files of the foreign checkpoint at the destination."""
    try:
        checkpoint = open_checkpoint(store)
    except UcformatError:
        return set()
    if same_url(checkpoint.home) in (same_url(job.source.url), same_url(job.source.home)):
        raise Conflict(
            f"{checkpoint.home} is the source of the export", hint="choose another place"
        )
    _check_unprotected(store.url, checkpoint.id)
    return {*checkpoint.metadata.files, *checkpoint.metadata.assets, *TRACKERS, CATALOG_DOCUMENT}


def give_up_export(job: ExportJob) -> None:
    """Remove the records of an export that failed before it wrote any file, or whose place another one has taken."""
    if job.own_claim() is None:
        job.store.delete_prefix(f"{FOLDER}/{job.attempt}")
        job.store.prune(FOLDER)
    elif all(key.startswith(f"{FOLDER}/") for key in _there(job)):
        _withdraw(job)


def _withdraw(job: ExportJob) -> None:
    """Remove the claim of an export and its other records, and no other's."""
    job.store.delete_prefix(f"{FOLDER}/{job.attempt}")
    job.store.delete(job.claim)
    job.store.prune(FOLDER)
    job.store.flush()


def end_export(job: ExportJob) -> None:
    """Remove the records of an export, which is complete.

    Raises:
        Conflict: another export has taken the place.
    """
    job.check_claim()
    # While the records are there, an export that is killed is repeated, and sweeps again. The folder
    # of a file may hold a whole home directory.
    if job.continued or not job.exporter.one_file:
        job.store.sweep()
    if job.exporter.one_file:  # other exports may be writing beside it
        _withdraw(job)
    else:
        job.store.delete_prefix(FOLDER)
        job.store.flush()
