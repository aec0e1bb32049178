"""The destination of an export: it is empty, or holds this export unfinished, or what may be removed first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ucformat.catalog.refs import same_url
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import Conflict, NotFound, UcformatError
from ucformat.jobs.documents import protections_of
from ucformat.jobs.export_files import FOLDER
from ucformat.reading.readable import TRACKERS
from ucformat.schema.documents import CATALOG_DOCUMENT
from ucformat.schema.manifest import MANIFEST
from ucformat.storage.base import check_key, exists

if TYPE_CHECKING:
    from ucformat.jobs.export_files import ExportJob
    from ucformat.storage.base import Store

__all__ = ["begin_export", "end_export", "give_up_export"]


class _Begun(BaseModel):
    """The record of an unfinished export: the keys of its files, and of those that it is to remove first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["ucformat-export-1"] = "ucformat-export-1"
    files: tuple[str, ...]
    removes: tuple[str, ...] = ()


def begin_export(job: ExportJob, *, overwrite: bool) -> None:
    """Begin or continue an export.

    Args:
        job: the export.
        overwrite: remove what is at the destination, if it is a foreign checkpoint or an unfinished export.

    Raises:
        Conflict: the destination holds other files.
    """
    store = job.store
    key, cleared = f"{FOLDER}/{job.attempt}/begun.json", f"{FOLDER}/{job.attempt}/cleared.json"
    begun = _read_begun(store, key)
    job.continued = begun is not None
    if begun is None:
        removes = _in_the_way(store, job, overwrite=overwrite)
        begun = _Begun(files=tuple(f.key for f in job.target.files), removes=tuple(removes))
        try:
            store.put_if_absent(key, begun.model_dump_json(indent=1).encode())
        except Conflict:  # another process of the same job
            begun = _read_begun(store, key) or begun
    if not begun.removes or exists(store, cleared):
        return
    if not overwrite:
        raise Conflict(
            f"{store.url} holds an export that was to replace {len(begun.removes):,} files, and was interrupted",
            hint="run it again with overwrite=True (--overwrite), or choose another place",
        )
    for file in begun.removes:
        if not file.startswith(f"{FOLDER}/{job.attempt}/"):
            store.delete(check_key(file))
    store.flush()
    store.put_if_absent(cleared, b"{}")


def _read_begun(store: Store, key: str) -> _Begun | None:
    try:
        return _Begun.model_validate_json(store.read(key))
    except NotFound:
        return None
    except ValidationError:
        raise Conflict(f"{store.url}/{key} is not a record of an export", hint="choose another place") from None


def _in_the_way(store: Store, job: ExportJob, *, overwrite: bool) -> list[str]:
    """The keys of the files at the destination, all of which may be removed.

    Raises:
        Conflict: they may not.
    """
    if job.exporter.one_file:
        return _file_in_the_way(job, overwrite=overwrite)
    there = [info.key for info in store.list()]
    if not there:
        return []
    if not overwrite and any(key.startswith(f"{FOLDER}/") for key in there):
        raise Conflict(
            f"{store.url} holds an unfinished export of another checkpoint, or with other options",
            hint="finish that one, choose another place, or pass overwrite=True (--overwrite) to remove it",
        )
    if not overwrite:
        raise Conflict(
            f"{store.url} is not empty: it holds {there[0]}{' and other files' if len(there) > 1 else ''}",
            hint="choose an empty folder, or pass overwrite=True (--overwrite) to remove a checkpoint that is there",
        )
    if MANIFEST in there:
        raise Conflict(
            f"{store.url} holds a universal checkpoint, which an export does not replace",
            hint="choose another place, or delete that checkpoint with `ucp delete` and `ucp gc`",
        )
    known = {key for key in there if key.startswith(f"{FOLDER}/")}
    for key in [k for k in known if k.endswith("/begun.json")]:  # of other exports that were not finished
        found = _read_begun(store, key)
        known |= set(found.files) | set(found.removes) if found else set()
    if not known:
        known = _checkpoint_files(store, job)
    if others := [key for key in there if key not in known]:
        raise Conflict(
            f"{store.url} holds {others[0]}{' and other files' if len(others) > 1 else ''}, "
            "which belongs to no checkpoint that could be replaced",
            hint="choose another place, or remove these files",
        )
    return sorted(there)


def _file_in_the_way(job: ExportJob, *, overwrite: bool) -> list[str]:
    """The same for a target that is a file, beside which there may be others."""
    key = job.target.files[0].key
    if exists(job.store, MANIFEST):
        raise Conflict(
            f"{job.store.url} holds a universal checkpoint, in which an export writes nothing",
            hint="choose another place",
        )
    if not exists(job.store, key):
        return []
    if not overwrite:
        raise Conflict(f"{job.url} exists", hint="choose another name, or pass overwrite=True (--overwrite)")
    source = job.source
    if same_url(job.url) in {same_url(f"{source.store.url}/{file}") for file in source.metadata.files}:
        raise Conflict(f"{job.url} is a file of the source of the export", hint="choose another name")
    try:
        found = open_checkpoint(job.url)
    except UcformatError:  # any file may be replaced that the user names
        return [key]
    _check_unprotected(job.url, found.id)
    return [key]


def _check_unprotected(url: str, checkpoint: str) -> None:
    if reasons := protections_of(url, checkpoint):
        raise Conflict(
            f"the checkpoint at {url} is not replaced: {'; '.join(reasons)}",
            hint="choose another place, or remove the protections (docs/retention.md)",
        )


def _checkpoint_files(store: Store, job: ExportJob) -> set[str]:
    """The files of the foreign checkpoint at the destination.

    Raises:
        Conflict: it is the source, or the catalog protects it.
    """
    try:
        found = open_checkpoint(store)
    except UcformatError:
        return set()
    if same_url(found.home) in (same_url(job.source.url), same_url(job.source.home)):
        raise Conflict(f"{found.home} is the source of the export", hint="choose another place")
    _check_unprotected(store.url, found.id)
    return {*found.metadata.files, *found.metadata.assets, *TRACKERS, CATALOG_DOCUMENT}


def give_up_export(job: ExportJob) -> None:
    """Remove the records of an export that failed before it wrote any file.

    Args:
        job: the export.
    """
    if all(info.key.startswith(f"{FOLDER}/") for info in job.store.list()):
        end_export(job)


def end_export(job: ExportJob) -> None:
    """Remove the records of an export, which is complete.

    Args:
        job: the export.
    """
    if job.exporter.one_file:  # other exports may be writing beside it
        job.store.delete_prefix(f"{FOLDER}/{job.attempt}")
        job.store.prune(FOLDER)
    else:
        job.store.delete_prefix(FOLDER)
    job.store.flush()
    if job.continued or not job.exporter.one_file:  # the folder of a file may hold a whole home directory
        job.store.sweep()
