"""Makes arrays of a packed or virtual checkpoint, at another place, or in its own, and then replaces it.

First every block of the packed files is compared with its checksum, for what becomes arrays gets checksums of its own.
Then the arrays are written under a new attempt, as `convert` writes them. In place, the manifest that was read is
replaced, if it still stands, and then the packed files are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import ChecksumError, Conflict, Refused, UcformatError
from ucformat.format.blocks import blocks_of, is_whole
from ucformat.format.commit import abandon, begin, commit, read_manifest
from ucformat.format.universal import Universal
from ucformat.jobs.convert import How, plan_document, write
from ucformat.jobs.record import record_commits
from ucformat.jobs.run import run as run_tasks
from ucformat.jobs.verify import source_file
from ucformat.references import open_reference
from ucformat.storage.url import open_store
from ucformat.storage.watched import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import Block
    from ucformat.schema.manifest import Manifest, SourceFileDoc
    from ucformat.storage.base import Store

__all__ = ["is_packed", "materialize"]

record_commits()  # whoever imports this: the rooms below know nothing of the catalog

_TASK = 64 << 20  # bytes of blocks that one task checks


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
    the checkpoint keeps its id, too. Every checksum of the packed files is checked first. Interrupted at any instant,
    the packed checkpoint is whole, or the arrays are committed; called again with the same arguments it continues.

    Args:
        src: a checkpoint, or where one lies.
        dst: where a new checkpoint is to lie, as `convert` makes it. None: in place, and then the packed files are
            deleted, so that whoever has the packed checkpoint open must open it again. A checkpoint that is arrays
            already is then left as it is.
        chunk_bytes: the most bytes of a chunk, the unit of reading (default 1 MiB).
        shard_bytes: the most bytes of a shard, the unit of writing (default 128 MiB).
        overwrite: replace a checkpoint that is committed at `dst`; it stays whole until the new one is.
        workers: shards written at once (default: one for each core).
        verify: compare the bytes that are read with the checksums of the files that they lie in.
        progress: called with the bytes done and the bytes in all: those that are checked, and those of the arrays.

    Raises:
        ChecksumError: a packed file is damaged.
        Conflict: a checkpoint is committed at `dst` already, or the one that is to be replaced has changed; or a file
            of the source was changed since it was opened.
        Refused: in place, of a foreign checkpoint, or in a place that cannot replace a file only if it is unchanged.
    """
    source = src if isinstance(src, Checkpoint) else open_reference(src)
    how = How(chunk_bytes, shard_bytes, workers, progress, verify)
    if dst is None:
        return _in_place(source, how)
    store = open_store(dst) if isinstance(dst, str | PathLike) else dst
    plan = {**plan_document(source, list(source.tensors.values()), how), "materialize": source.id}
    attempt = begin(store, plan, overwrite=overwrite)
    manifest, made = _write(source, store, attempt, how)
    new = {"id": made.id, "created": made.created, "lineage": (*manifest.lineage, *made.lineage)}
    done = commit(store, attempt, manifest.model_copy(update=new))
    return Checkpoint(Universal(store, manifest=done.as_read()))


def is_packed(ck: Checkpoint) -> bool:
    """Whether some tensors of a universal checkpoint are not arrays."""
    return isinstance(ck.source, Universal) and any(t.path is None for t in ck.manifest.tensors)


def _in_place(source: Checkpoint, how: How) -> Checkpoint:
    found = watched(source.store)
    store = source.store if found is None else found.inner  # files that are written are not to stay what they were
    before = source.manifest
    if not isinstance(source.source, Universal):
        raise Refused(
            f"{source.url} is a checkpoint of {source.kind}, whose files are not replaced",
            hint="say where the arrays are to lie: `ucp materialize SRC DST`, or materialize(src, dst)",
        )
    if not is_packed(source):
        store.sweep()  # a writer killed just after its commit leaves hidden names
        return source
    plan = {**plan_document(source, list(source.tensors.values()), how), "materialize": before.attempt}
    attempt = begin(store, plan, overwrite=True)
    now = None if attempt.replaces is None else attempt.replaces[0]
    if now is None or now.attempt != before.attempt:  # since it was opened
        return _overtaken(store, attempt, now, before)
    try:
        _must_replace(store, attempt)
        manifest, _ = _write(source, store, attempt, how)
    except UcformatError:
        now = _standing(store)
        if now is None or now.attempt == before.attempt:
            raise
        return _overtaken(store, attempt, now, before)  # who committed took away what we read
    try:
        done = commit(store, attempt, manifest)
    except Conflict:
        return _overtaken(store, attempt, _standing(store), before)
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
    """Refused, before much is written, where a file cannot be replaced only if it is unchanged."""
    record = f"attempts/{attempt.id}.json"
    try:
        store.replace(record, *store.read_versioned(record))
    except Refused as error:
        abandon(store, attempt.id)
        raise Refused(
            f"{error.message}: a checkpoint there cannot be materialised in place",
            hint="say where the arrays are to lie: `ucp materialize SRC DST`, or materialize(src, dst)",
        ) from error


def _standing(store: Store) -> Manifest | None:
    """The manifest that stands at a place, if that can be known."""
    try:
        return read_manifest(store)[0]
    except UcformatError:
        return None


#: What a manifest says of the files of its attempt; all else is of the checkpoint, whatever its form.
_OF_FILES = ("attempt", "objects", "assets", "sidecar", "tensors", "verified")


def _write(source: Checkpoint, store: Store, attempt: Attempt, how: How) -> tuple[Manifest, Manifest]:
    """Check the packed files, then write everything; the source's manifest with the new files, and `write`'s."""
    infos = list(source.tensors.values())
    universal = source.source if how.verify and isinstance(source.source, Universal) and is_packed(source) else None
    checks = [] if universal is None else list(_checks(universal))
    total, done = sum(i.nbytes for i in infos), 0
    checked = sum(c.nbytes for c in checks)
    for check, _ in run_tasks(lambda check: check.run(), checks, how.workers):
        done += check.nbytes
        if how.progress is not None:
            how.progress(done, checked + total)
    if (tell := how.progress) is not None:
        how = replace(how, progress=lambda written, _: tell(checked + written, checked + total))
    made = write(source, store, attempt, infos, how)
    changed = {name: getattr(made, name) for name in _OF_FILES}
    changed["producer"] = {**source.manifest.producer, **made.producer}
    return source.manifest.model_copy(update=changed), made


@dataclass(frozen=True, slots=True)
class _Check:
    """Blocks of one file, in the order of their offsets, each with the number of a tensor that has it."""

    source: Universal
    file: str
    blocks: tuple[tuple[int, Block], ...]

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for _, b in self.blocks)

    def run(self) -> None:
        """Read them.

        Raises:
            ChecksumError: a block is not what its checksum says.
        """
        store = self.source.store
        for tensor, block in self.blocks:
            if not is_whole(store, self.file, block):
                doc = self.source.manifest.tensors[tensor]
                where = f"{store.url}/{self.file}: crc32c differs (block at byte {block.offset})"
                raise ChecksumError(
                    f"{where} in {doc.name} ({doc.state})",
                    hint="restore the file from another copy of the checkpoint; nothing was replaced",
                )


@dataclass(frozen=True, slots=True)
class _FileCheck:
    """A file of another checkpoint that has a checksum."""

    source: Universal
    doc: SourceFileDoc

    @property
    def nbytes(self) -> int:
        return self.doc.nbytes

    def run(self) -> None:
        """Read it.

        Raises:
            ChecksumError: it is not what was registered.
        """
        for problem in source_file(self.source, self.doc):
            raise ChecksumError(str(problem), hint="restore the file from another copy; nothing was replaced")


def _checks(source: Universal) -> Iterator[_Check | _FileCheck]:
    """Every file with a checksum, and every block once, those of one file in tasks of some 64 MiB."""
    listed = source.manifest.sidecar
    yield from (_FileCheck(source, doc) for doc in (listed.sources if listed else ()) if doc.digest is not None)
    some: list[tuple[int, Block]] = []
    current, nbytes = "", 0
    for file, tensor, block in blocks_of(source.sidecar()):
        if some and (file != current or nbytes >= _TASK):
            yield _Check(source, current, tuple(some))
            some, nbytes = [], 0
        some.append((tensor, block))
        current, nbytes = file, nbytes + block.nbytes
    if some:
        yield _Check(source, current, tuple(some))
