"""Makes arrays of a packed or virtual checkpoint, at another place, or in its own, and then replaces it.

The arrays are written under a new attempt, as `convert` writes them: blocks of packed files are compared with their
checksums as they pass. Files of another checkpoint, whose digests cover them as wholes, are compared first. In place,
the manifest that was read is replaced, if it still stands, and then the packed files are deleted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import ChecksumError, Conflict, PermissionDenied, UcformatError, UnsupportedError
from ucformat.format.attempts import record_key
from ucformat.format.audit import SourceFile, checked, source_files
from ucformat.format.commit import abandon, begin, commit, settle
from ucformat.format.structure import find_manifest
from ucformat.format.universal import Universal
from ucformat.jobs.convert import How, plan_document, write
from ucformat.jobs.record import record_commits
from ucformat.jobs.run import run as run_tasks
from ucformat.references import open_reference
from ucformat.storage.url import open_store
from ucformat.storage.watched import find_watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["is_packed", "materialize"]

record_commits()  # whoever imports this: the rooms below know nothing of the catalog


def materialize(
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store | None = None,
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,  # noqa: FBT001, FBT002 - as of convert
    workers: int | None = None,
    *,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Make arrays of a packed or virtual checkpoint, in place or as a new checkpoint, and commit them.

    All else stays: run, step, metrics, config, layout, groups, objects, assets, aliases, producer and lineage. In place
    the checkpoint keeps its id, too. Nothing is committed unless all bytes that it is made of are what their checksums
    say. Interrupted at any instant, the packed checkpoint is whole, or the arrays are committed; called again with the
    same arguments it continues.

    Args:
        src: a checkpoint, or where one lies.
        dst: where a new checkpoint is to lie, as `convert` makes it. None: in place, and then the packed files are
            deleted, so that whoever has the packed checkpoint open must open it again. A checkpoint that is arrays
            already is then left as it is.
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one is.
        workers: shards written at once (default: one for each core).
        verify: compare the bytes that are read with the checksums of the files that they lie in, as they pass; files
            of another checkpoint that were registered with checksums are read once more for it.
        progress: called with the bytes done and the bytes in all: those of the files that are read once more, and those
            of the arrays.

    Raises:
        ChecksumError: a file that it is made of is damaged; the message names the file, and the tensors of a block.
        Conflict: a checkpoint is committed at `dst` already, or the one that is to be replaced has changed; or a file
            of the source was changed since it was opened.
        UnsupportedError: in place, of a foreign checkpoint, or in a place that cannot replace a file only if it is
            unchanged.
    """
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    how = How(chunk_bytes, shard_bytes, workers, progress, verify)
    if dst is None:
        return _in_place(source, how)
    store = open_store(dst) if isinstance(dst, str | PathLike) else dst
    plan = {**plan_document(source, list(source.tensors.values()), how), "materialize": source.id}
    attempt = begin(store, plan, overwrite=overwrite)
    manifest, made = _write(source, store, attempt, how)
    new = {"id": made.id, "created": made.created, "commits": None, "lineage": (*manifest.lineage, *made.lineage)}
    done = commit(store, attempt, manifest.model_copy(update=new))
    return Checkpoint(Universal(store, manifest=done.as_read()))


def is_packed(ck: Checkpoint) -> bool:
    """Whether some tensors of a universal checkpoint are not arrays.

    Args:
        ck: the checkpoint.
    """
    return ck.universal is not None and not ck.viewed and any(t.path is None for t in ck.manifest.tensors)


def _in_place(source: Checkpoint, how: How) -> Checkpoint:
    found = find_watched(source.store)
    store = source.store if found is None else found.inner  # files that are written are not to stay what they were
    before = source.manifest
    if source.viewed or not source.universal:
        raise UnsupportedError(
            f"{source.url} is a checkpoint of {source.kind}, whose files are not replaced",
            hint="say where the arrays are to lie: `ucp materialize SRC DST`, or materialize(src, dst)",
        )
    if not is_packed(source):
        settle(store)
        return source
    plan = {**plan_document(source, list(source.tensors.values()), how), "materialize": before.attempt}
    attempt = begin(store, plan, overwrite=True, keeps=before.id)
    now = None if attempt.replaces is None else attempt.replaces[0]
    if now is None or now.attempt != before.attempt:  # since it was opened
        return _overtaken(store, attempt, now, before)
    try:
        _must_replace(store, attempt)
        manifest, _ = _write(source, store, attempt, how)
    except UcformatError:
        now = find_manifest(store, UcformatError)
        if now is None or now.attempt == before.attempt:
            raise
        return _overtaken(store, attempt, now, before)  # who committed took away what we read
    try:
        done = commit(store, attempt, manifest)
    except Conflict:
        return _overtaken(store, attempt, find_manifest(store, UcformatError), before)
    return Checkpoint(Universal(store, manifest=done.as_read()))


def _overtaken(store: Store, attempt: Attempt, now: Manifest | None, before: Manifest) -> Checkpoint:
    """What stands instead of the checkpoint that was opened, if it is the same one as arrays."""
    if now is None or now.attempt != attempt.id:
        abandon(store, attempt.id)
    if now is not None and now.id == before.id:
        found = open_checkpoint(store)
        if not is_packed(found):
            return found
    raise Conflict(
        f"the checkpoint {before.id} at {store.url} was replaced or deleted since it was opened",
        hint="open it again, and see what lies there now",
    )


def _must_replace(store: Store, attempt: Attempt) -> None:
    """UnsupportedError, before much is written, where a file cannot be replaced only if it is unchanged."""
    record = record_key(attempt.id)
    try:
        with suppress(Conflict):  # by one who makes the same arrays
            store.replace(record, *store.read_versioned(record))
    except (PermissionDenied, UnsupportedError) as error:
        abandon(store, attempt.id)
        raise UnsupportedError(
            f"{error.message}: a checkpoint there cannot be materialised in place",
            hint="say where the arrays are to lie: `ucp materialize SRC DST`, or materialize(src, dst)",
        ) from error


#: What a manifest says of the files of its attempt; all else is of the checkpoint, whatever its form.
_OF_FILES = ("attempt", "objects", "assets", "sidecar", "grid", "tensors", "verified")


def _write(source: Checkpoint, store: Store, attempt: Attempt, how: How) -> tuple[Manifest, Manifest]:
    """Compare registered files, then write everything; the source's manifest with the new files, and `write`'s."""
    infos = list(source.tensors.values())
    files = _registered(source) if how.verify else []
    total, done = sum(i.nbytes for i in infos), 0
    compared = sum(file.nbytes for file in files)
    for file, (_, wrong) in run_tasks(lambda file: checked(file, source.origin.store), files, how.workers):
        for problem in wrong:
            raise ChecksumError(str(problem), hint="restore the file from another copy; nothing was replaced")
        done += file.nbytes
        if how.progress is not None:
            how.progress(done, compared + total)
    if (tell := how.progress) is not None:
        how = replace(how, progress=lambda written, _: tell(compared + written, compared + total))
    made = write(source, store, attempt, infos, how, {file.file for file in files})
    changed = {name: getattr(made, name) for name in _OF_FILES}
    changed["producer"] = {**source.manifest.producer, **made.producer}
    return source.manifest.model_copy(update=changed), made


def _registered(source: Checkpoint) -> list[SourceFile]:
    """The files of another checkpoint that have a digest: a digest of a whole file cannot be made of parts of it."""
    return [f for f in source_files(source.universal) if f.doc.digest is not None] if source.universal else []
