"""Rewrites a checkpoint in another form, at another place or in place: a packed, virtual or based one as arrays.

The new files are written under a new attempt, as by `convert`: blocks of packed files are compared
with their checksums as they are read. Files of another checkpoint have digests of whole files, and
are compared first. In place, the manifest that was read is replaced, if it is unchanged, and then
the old files are deleted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
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
from ucformat.format.bases import BasesStore
from ucformat.format.commit import abandon, begin, commit, settle
from ucformat.format.encoded import EncodedStore
from ucformat.format.mounted import MountedStore
from ucformat.format.structure import find_manifest
from ucformat.format.universal import Universal
from ucformat.geometry.tensor import Key
from ucformat.jobs.convert import write
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.increments import refuse_deltas
from ucformat.jobs.run import run as run_tasks
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.where import CheckedArguments, Where
from ucformat.references import open_reference
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_store
from ucformat.storage.wrappers import find_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = [
    "FILE_FIELDS",
    "Form",
    "compare_fingerprints",
    "is_packed",
    "materialize",
    "must_replace",
    "own_store",
    "rewrite",
]


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
        UnsupportedError: a tensor has an unknown dtype; or in place, the checkpoint is foreign or
            the place has no conditional replacement of files.
    """
    check_keywords("materialize", arguments, CheckedArguments)
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    refuse_deltas(source)
    job_arguments: dict[str, Any] = dict(arguments)
    where = Where.parse(job_arguments.pop("on", "threads"))
    options = WriteOptions(
        chunk_bytes, shard_bytes, workers, **job_arguments, where=where, codec=codec
    )
    infos = list(source.tensors.values())
    arrays = Form(
        "materialize",
        plan_document(source, infos, options),
        lambda ck: not is_packed(ck),
        lambda store, attempt: _write(source, store, attempt, options),
        options.verify,
    )
    return rewrite(source, dst, arrays, where, overwrite=overwrite)


def is_packed(ck: Checkpoint) -> bool:
    """Whether some tensors of a universal checkpoint are not arrays."""
    return (
        ck.universal is not None
        and not ck.viewed
        and any(k.path is None for k in ck.manifest.tensors.kinds)
    )


@dataclass(frozen=True, slots=True)
class Form:
    """Another form in which a checkpoint is written.

    Attributes:
        command: the subcommand of `ucp`, and the function, that writes it.
        plan: what identifies the work, except for the checkpoint.
        is_of: whether a checkpoint has this form.
        write: writes it under an attempt; returns the manifest of what was written, and whether there are records.
        verify: whether what was written must have the fingerprints that the checkpoint states.
        needs: the urls of the bases of what is written.
    """

    command: str
    plan: Mapping[str, Any]
    is_of: Callable[[Checkpoint], bool]
    write: Callable[[Store, Attempt], tuple[Manifest, bool]]
    verify: bool
    needs: Sequence[str] = ()

    def written(
        self, source: Checkpoint, store: Store, attempt: Attempt
    ) -> tuple[Manifest, Manifest, bool]:
        """Write it; returns the checkpoint's manifest with the new files, and what `write` does."""
        manifest, recorded = self.write(store, attempt)
        if self.verify:
            compare_fingerprints(source, manifest)
        changed = {name: getattr(manifest, name) for name in FILE_FIELDS}
        changed["producer"] = {**source.manifest.producer, **manifest.producer}
        return source.manifest.model_copy(update=changed), manifest, recorded

    @property
    def hint(self) -> str:
        """What to do where nothing can be replaced."""
        return f"give another place: `ucp {self.command} SRC DST`, or {self.command}(src, dst)"


def rewrite(
    source: Checkpoint,
    dst: str | PathLike[str] | Store | None,
    form: Form,
    where: Where,
    *,
    overwrite: bool,
) -> Checkpoint:
    """Write a checkpoint in another form, and commit it.

    Args:
        dst: the place of a new checkpoint; None: in place, where one that has the form is left as it is.
        where: where tasks run.
        overwrite: replace what is committed at `dst`.
    """
    if dst is None:
        return _in_place(source, form, where)
    source.check_readable()
    store = as_store(dst)
    plan = {**form.plan, form.command: source.id}
    attempt = where.begin(lambda: begin(store, plan, overwrite=overwrite, needs=form.needs))
    manifest, written, recorded = form.written(source, store, attempt)
    new = {
        "id": written.id,
        "created": written.created,
        "commits": None,
        "lineage": (*manifest.lineage, *written.lineage),
    }
    done = commit(store, attempt, manifest.model_copy(update=new))
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, allowed_roots, done))


def _in_place(source: Checkpoint, form: Form, where: Where) -> Checkpoint:
    store, before = own_store(source), source.manifest
    if source.viewed or not source.universal:
        raise UnsupportedError(
            f"{source.url} is a checkpoint of {source.kind}, whose files are not replaced",
            hint=form.hint,
        )
    if form.is_of(source):
        settle(store)
        return source
    source.check_readable()  # what is not read would be lost
    plan = {**form.plan, form.command: before.attempt}
    attempt = where.begin(
        lambda: begin(store, plan, overwrite=True, keeps=before.id, needs=form.needs)
    )
    now = None if attempt.replaces is None else attempt.replaces[0]
    if now is None or now.attempt != before.attempt:  # since it was opened
        return _overtaken(store, attempt, now, before, form)
    try:
        must_replace(store, attempt, "rewritten", form.hint)
        manifest, _, recorded = form.written(source, store, attempt)
    except UcformatError:
        now = find_manifest(store, UcformatError)
        if now is None or now.attempt == before.attempt:
            raise
        # another commit deleted the files that were being read
        return _overtaken(store, attempt, now, before, form)
    try:
        done = commit(store, attempt, manifest)
    except Conflict:
        now = find_manifest(store, UcformatError)
        return _overtaken(store, attempt, now, before, form)
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, allowed_roots, done))


def own_store(source: Checkpoint) -> Store:
    """The store of the checkpoint's own files as they are, without the check for unchanged ones, since they change."""
    watching = find_watched(source.store)
    store = source.store if watching is None else watching.inner
    while isinstance(store, MountedStore | EncodedStore | BasesStore):
        store = store.inner
    return store


def _overtaken(
    store: Store, attempt: Attempt, now: Manifest | None, before: Manifest, form: Form
) -> Checkpoint:
    """What replaced the opened checkpoint, if it is the same one in the form; else Conflict."""
    if now is None or now.attempt != attempt.id:
        abandon(store, attempt.id)
    if now is not None and now.id == before.id:
        checkpoint = open_checkpoint(store, roots=allowed_roots)
        if form.is_of(checkpoint):
            return checkpoint
    raise Conflict(
        f"the checkpoint {before.id} at {store.url} was replaced or deleted since it was opened",
        hint="open it again, and check what is there now",
    )


def must_replace(store: Store, attempt: Attempt, action: str, hint: str) -> None:
    """Raise UnsupportedError, before much is written, if the place has no conditional replacement of files."""
    record = record_key(attempt.id)
    try:
        with suppress(Conflict):  # with another process that writes the same files
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


def compare_fingerprints(source: Checkpoint, written: Manifest) -> None:
    """Compare the fingerprints of the tensors that were written with those of the source."""
    before = source.metadata.fingerprints
    for doc in written.tensors:
        expected = before.get(Key(doc.name, doc.state))
        if expected is not None and doc.fingerprint != expected:
            raise ChecksumError(
                f"{source.url}: {doc.name} ({doc.state}) has another fingerprint than the manifest "
                "says",
                hint="restore it from another copy; nothing was removed",
            )


def _write(
    source: Checkpoint, store: Store, attempt: Attempt, options: WriteOptions
) -> tuple[Manifest, bool]:
    """Verify registered files, then write, as `jobs.convert.write`."""
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
    return write(job, attempt)
