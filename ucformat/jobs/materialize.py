"""Rewrites a packed or virtual checkpoint as arrays, at another place or in place.

The arrays are written under a new attempt, as by `convert`: blocks of packed files are compared
with their checksums as they are read. Files of another checkpoint have digests of whole files, and
are compared first. In place, the manifest that was read is replaced, if it is unchanged, and then
the packed files are deleted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import (
    ChecksumError,
    Conflict,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    check_keywords,
)
from ucformat.format.attempts import record_key
from ucformat.format.audit import SourceFile, checked, source_files
from ucformat.format.commit import abandon, begin, commit, settle
from ucformat.format.structure import find_manifest
from ucformat.format.universal import Universal
from ucformat.jobs.convert import write
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.run import run as run_tasks
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.where import CheckedArguments, Where
from ucformat.references import open_reference
from ucformat.storage.url import as_store
from ucformat.storage.wrappers import find_watched

if TYPE_CHECKING:
    from os import PathLike

    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["FILE_FIELDS", "is_packed", "materialize", "must_replace"]

_GIVE_DST = "give the place for the arrays: `ucp materialize SRC DST`, or materialize(src, dst)"


def materialize(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,  # noqa: FBT001, FBT002 - as of convert
    workers: int | None = None,
    codec: Literal["blosc"] | None = None,
    **arguments: Unpack[CheckedArguments],
) -> Checkpoint:
    """Rewrite a packed or virtual checkpoint as arrays, in place or as a new checkpoint, and commit them.

    Everything else is kept: run, step, metrics, config, layout, groups, objects, assets, aliases,
    producer and lineage; in place also the id. Nothing is committed unless all bytes that are read
    match their checksums. It is resumable: interrupted at any instant, either the packed checkpoint
    is whole or the arrays are committed, and a call with the same arguments continues.

    Args:
        src: a checkpoint, or the place of one.
        dst: the place of a new checkpoint, as in `convert`. None: in place; then the packed files
            are deleted, and processes that have the packed checkpoint open must open it again. A
            checkpoint that consists of arrays already is then left as it is.
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one
            is committed.
        workers: shards written at once (default: one for each core).
        codec: as for `convert`.
        arguments: see `CheckedArguments`. Files of another checkpoint that were registered with
            checksums are read a second time to verify them.

    Raises:
        ChecksumError: a file of the source is damaged; the message names the file, and the tensors
            of a block.
        Conflict: a checkpoint is committed at `dst` already, or the one to be replaced has changed;
            or a file of the source was changed since it was opened.
        UnsupportedError: in place, if the checkpoint is foreign or the place has no conditional
            replacement of files.
    """
    check_keywords("materialize", arguments, CheckedArguments)
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    job_arguments: dict[str, Any] = dict(arguments)
    where = Where.parse(job_arguments.pop("on", "threads"))
    options = WriteOptions(
        chunk_bytes, shard_bytes, workers, **job_arguments, where=where, codec=codec
    )
    if dst is None:
        return _in_place(source, options)
    store = as_store(dst)
    plan = {
        **plan_document(source, list(source.tensors.values()), options),
        "materialize": source.id,
    }
    attempt = options.where.begin(lambda: begin(store, plan, overwrite=overwrite))
    manifest, written, recorded = _write(source, store, attempt, options)
    new = {
        "id": written.id,
        "created": written.created,
        "commits": None,
        "lineage": (*manifest.lineage, *written.lineage),
    }
    done = commit(store, attempt, manifest.model_copy(update=new))
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, manifest=done))


def is_packed(ck: Checkpoint) -> bool:
    """Whether some tensors of a universal checkpoint are not arrays."""
    return (
        ck.universal is not None
        and not ck.viewed
        and any(k.path is None for k in ck.manifest.tensors.kinds)
    )


def _in_place(source: Checkpoint, options: WriteOptions) -> Checkpoint:
    watching = find_watched(source.store)
    # without the check for unchanged files, since these change
    store = source.store if watching is None else watching.inner
    before = source.manifest
    if source.viewed or not source.universal:
        raise UnsupportedError(
            f"{source.url} is a checkpoint of {source.kind}, whose files are not replaced",
            hint=_GIVE_DST,
        )
    if not is_packed(source):
        settle(store)
        return source
    plan = {
        **plan_document(source, list(source.tensors.values()), options),
        "materialize": before.attempt,
    }
    attempt = options.where.begin(lambda: begin(store, plan, overwrite=True, keeps=before.id))
    now = None if attempt.replaces is None else attempt.replaces[0]
    if now is None or now.attempt != before.attempt:  # since it was opened
        return _overtaken(store, attempt, now, before)
    try:
        must_replace(store, attempt, "materialised", _GIVE_DST)
        manifest, _, recorded = _write(source, store, attempt, options)
    except UcformatError:
        now = find_manifest(store, UcformatError)
        if now is None or now.attempt == before.attempt:
            raise
        # another commit deleted the files that were being read
        return _overtaken(store, attempt, now, before)
    try:
        done = commit(store, attempt, manifest)
    except Conflict:
        return _overtaken(store, attempt, find_manifest(store, UcformatError), before)
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, manifest=done))


def _overtaken(
    store: Store, attempt: Attempt, now: Manifest | None, before: Manifest
) -> Checkpoint:
    """What replaced the opened checkpoint, if it is the same one as arrays; else Conflict."""
    if now is None or now.attempt != attempt.id:
        abandon(store, attempt.id)
    if now is not None and now.id == before.id:
        checkpoint = open_checkpoint(store)
        if not is_packed(checkpoint):
            return checkpoint
    raise Conflict(
        f"the checkpoint {before.id} at {store.url} was replaced or deleted since it was opened",
        hint="open it again, and check what is there now",
    )


def must_replace(store: Store, attempt: Attempt, action: str, hint: str) -> None:
    """Raise UnsupportedError, before much is written, if the place has no conditional replacement of files."""
    record = record_key(attempt.id)
    try:
        with suppress(Conflict):  # with another process that writes the same arrays
            store.replace(record, *store.read_versioned(record))
    except (PermissionDenied, UnsupportedError) as error:
        abandon(store, attempt.id)
        raise UnsupportedError(
            f"{error.message}: a checkpoint there cannot be {action} in place", hint=hint
        ) from error


#: The fields of a manifest that describe the files of its attempt; the others are the same in every
#: form.
FILE_FIELDS = (
    "attempt",
    "objects",
    "per_rank",
    "assets",
    "sidecar",
    "bases",
    "requires",
    "grid",
    "tensors",
    "verified",
)


def _write(
    source: Checkpoint, store: Store, attempt: Attempt, options: WriteOptions
) -> tuple[Manifest, Manifest, bool]:
    """Verify registered files, then write; returns the source's manifest with the new files, and `write`'s result."""
    infos = list(source.tensors.values())
    registered: list[SourceFile] = []
    # a digest of a whole file cannot be verified from parts
    if options.verify and source.universal:
        registered = [f for f in source_files(source.universal) if f.doc.digest is not None]
    files = registered if options.where.finishes else []
    total, done = sum(i.nbytes for i in infos), 0
    before = sum(file.nbytes for file in files)
    for file, (_, wrong) in run_tasks(
        lambda file: checked(file, source.origin.store), files, options.workers
    ):
        for problem in wrong:
            raise ChecksumError(
                str(problem), hint="restore the file from another copy; nothing was replaced"
            )
        done += file.nbytes
        if options.progress is not None:
            options.progress(done, before + total)
    if (report := options.progress) is not None:
        options = replace(
            options, progress=lambda written, _: report(before + written, before + total)
        )
    job = ShardJob(source, store, attempt.id, infos, options, {file.file for file in registered})
    written_manifest, recorded = write(job, attempt)
    changed = {name: getattr(written_manifest, name) for name in FILE_FIELDS}
    changed["producer"] = {**source.manifest.producer, **written_manifest.producer}
    return source.manifest.model_copy(update=changed), written_manifest, recorded
