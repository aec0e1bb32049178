"""Writes a checkpoint as a patch of another one, whatever the forms of the two.

Tensors that are equal are referenced, as `convert` does with a base. All others are stored in packed files, tile by
tile in the fewest bytes: equal to the base, as a patch of it, compressed, or as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UsageError, check_keywords
from ucformat.format.attempts import folders_of
from ucformat.format.commit import begin, commit
from ucformat.format.universal import Universal
from ucformat.geometry.tensor import Key
from ucformat.jobs.convert import chosen, step_of, warn_of_unread, write
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.increments import find_references
from ucformat.jobs.patch_files import TilesJob, TilesPlan
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.where import JobArguments, Where
from ucformat.references import open_reference
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_store, as_strings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike

    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.increments import References
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["Patch", "StoredBytes", "patch", "stored_bytes"]


def patch(
    base: str | PathLike[str] | Checkpoint,
    src: str | PathLike[str] | Checkpoint,
    dst: str | PathLike[str] | Store,
    states: str | Iterable[str] | None = None,
    **arguments: Unpack[JobArguments],
) -> Checkpoint:
    """Write a checkpoint as a patch of another one, and commit it.

    It has the content of `src`, and reads what it does not store in `base`, which must then stay; a document beside
    it keeps every catalog from removing it. The two need not be neighbors, nor of one form; `base` may be a patch
    itself. Tensors without one of the same name, state, dtype and shape in `base` are stored compressed. Resumable, as
    `convert` is.

    Args:
        base: a universal checkpoint with fingerprints, or its path, url or reference.
        src: a checkpoint of any form, or its path, url or reference.
        dst: the path, url or store of the new checkpoint.
        states: the state, or states, to write (default: all).
        arguments: see `JobArguments`. The bytes of `base` are compared with their checksums in any case.

    Raises:
        ChecksumError: the source or the base is damaged; the message names the file and the tensors.
        Conflict: a checkpoint is committed at `dst` already, or another writer committed one in the meantime; or a
            file that is read was changed since it was opened.
        UnsupportedError: `base` is no universal checkpoint, or has no fingerprints; or numcodecs is not installed.
        UsageError: no tensor of `src` has one like it in `base`.
    """
    check_keywords("patch", arguments, JobArguments)
    job_arguments: dict[str, Any] = dict(arguments)
    where = Where.parse(job_arguments.pop("on", "threads"))
    overwrite = job_arguments.pop("overwrite", False)
    options = WriteOptions(where=where, **job_arguments)
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    store = as_store(dst)
    infos = chosen(source, None if states is None else as_strings(states))
    planned = Patch.of(source, infos, base, store.url, options)
    warn_of_unread(source)
    attempt = where.begin(
        lambda: begin(store, planned.document, overwrite=overwrite, needs=planned.references.urls)
    )
    planned.references.protect(str(attempt.keeps))
    manifest, recorded = planned.write(store, attempt)
    done = commit(store, attempt, manifest)
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, allowed_roots, done))


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch that is about to be written: of which base, and which of its tensors are referenced and patched."""

    source: Checkpoint
    infos: Sequence[TensorInfo]
    base: Checkpoint
    references: References
    options: WriteOptions

    @classmethod
    def of(
        cls,
        source: Checkpoint,
        infos: Sequence[TensorInfo],
        base: str | PathLike[str] | Checkpoint,
        home: str,
        options: WriteOptions,
    ) -> Patch:
        """Find out what the base has; errors are as of `patch`.

        Args:
            home: the place of the new checkpoint.
        """
        opened = base if isinstance(base, Checkpoint) else open_reference(base)
        references = find_references(source, infos, opened, home, patch=True)
        if not references.owners:
            raise nothing_alike(source, opened)
        return cls(source, infos, opened, references, options)

    @property
    def document(self) -> dict[str, Any]:
        """The plan of an attempt."""
        keys = sorted(Key(doc.name, doc.state) for doc in self.references.patched)
        plan = plan_document(self.source, self.infos, self.options)
        return {**plan, **self.references.plan, "patch": self.base.id, "patched": keys}

    def job(self, store: Store, attempt: str) -> TilesJob:
        """The job that writes its files."""
        referenced, patched = (
            {Key(doc.name, doc.state): doc for doc in docs}
            for docs in (self.references.tensors, self.references.patched)
        )
        plan = TilesPlan(self.infos, referenced, patched)
        return TilesJob(self.source, self.base, store, attempt, plan, self.options)

    def write(self, store: Store, attempt: Attempt) -> tuple[Manifest, bool]:
        """Write it, as `jobs.convert.write`, when its bases were told that they are needed."""
        manifest, recorded = write(
            ShardJob(self.source, store, attempt.id, [], self.options),
            attempt,
            lambda: self.job(store, attempt.id),
            replace(self.references, tensors=()),  # the job has them, in the order of the source
        )
        step = step_of(self.source, manifest)
        return manifest.model_copy(update={"step": step}), recorded


def nothing_alike(source: Checkpoint, base: Checkpoint) -> UsageError:
    """The error for a source of which nothing would be a patch."""
    return UsageError(
        f"no tensor of {source.url} has the name, state, dtype and shape of one of "
        f"{base.url} that has a fingerprint, so nothing would be a patch",
        hint="give another base; or `ucp convert SRC DST --codec blosc` writes it compressed",
    )


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """The bytes of the tensors of a universal checkpoint.

    Attributes:
        plain: of the tensors that it stores, without a codec.
        written: of the files in which it stores them.
        referenced: of the tensors that it has from its bases.
    """

    plain: int
    written: int
    referenced: int


def stored_bytes(ck: Checkpoint) -> StoredBytes:
    """Find out what a universal checkpoint stores itself."""
    assert ck.universal is not None  # noqa: S101 - the caller has written it
    referenced = sum(nbytes for _, nbytes in ck.universal.bases.amounts().values())
    data, *_ = folders_of(ck.manifest.attempt)
    written = sum(info.size for info in ck.universal.store.list(data))
    return StoredBytes(ck.manifest.tensors.nbytes - referenced, written, referenced)
