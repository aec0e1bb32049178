"""Removes tensors from a checkpoint in place: the moments of an optimizer, while the weights stay.

What is kept is written under a new attempt, as by `convert`, and compared with its checksums and
fingerprints as it is read; of a virtual checkpoint only a new sidecar is written. The manifest that
was read is then replaced, if it is unchanged, and the files that it named are removed. Killed at
any instant, the checkpoint is either whole or thinned. What is left is a checkpoint with an id of
its own, since an id stands for the same tensors everywhere, also in copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import Conflict, UcformatError, UnsupportedError, UsageError
from ucformat.exporters.base import weights_of
from ucformat.format.attempts import mark_replacing
from ucformat.format.commit import abandon, announce, begin, commit, discard, give_up, settle
from ucformat.format.extents import put_sidecar
from ucformat.format.sidecar import encode
from ucformat.format.structure import MOUNT, find_manifest
from ucformat.format.thinned import THIN, DroppedDoc, ThinDoc, amounts, dropped_states
from ucformat.format.universal import Universal, marked
from ucformat.geometry.tensor import Key
from ucformat.jobs.convert import put_others, write
from ucformat.jobs.dependents import need, unprotected
from ucformat.jobs.documents import protections_of
from ucformat.jobs.finished import discard_finished
from ucformat.jobs.increments import references_of
from ucformat.jobs.materialize import FILE_FIELDS, compare_fingerprints, must_replace, own_store
from ucformat.jobs.record import lineage_to
from ucformat.jobs.shards import ShardJob, WriteOptions, plan_document
from ucformat.jobs.virtual import VirtualExtents
from ucformat.jobs.weight_files import WeightsJob, plan_files
from ucformat.references import open_reference
from ucformat.schema.tensors import BLOSC, TensorDoc, TensorTable
from ucformat.settings import allowed_roots
from ucformat.storage.url import as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from os import PathLike

    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import TensorInfo
    from ucformat.jobs.increments import References
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["ThinPlan", "keep_tensors", "plan_thin", "thin", "thin_at"]

WEIGHT = "weight"
_COPY = "`ucp convert SRC DST --state weight` writes only the weights, at another place"


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What would be kept and dropped of a checkpoint: the number of tensors and their bytes, by state."""

    checkpoint: Checkpoint
    keys: frozenset[Key]  # of what is kept
    kept: dict[str, tuple[int, int]]
    dropped: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, checkpoint: Checkpoint, keys: Collection[Key]) -> ThinPlan:
        """The plan that keeps these tensors."""
        infos = checkpoint.tensors.values()
        return cls(
            checkpoint,
            frozenset(keys),
            amounts(i for i in infos if i.key in keys),
            amounts(i for i in infos if i.key not in keys),
        )

    @property
    def bytes_kept(self) -> int:
        """The bytes of the tensors that are kept."""
        return sum(nbytes for _, nbytes in self.kept.values())

    @property
    def bytes_dropped(self) -> int:
        """The bytes of the tensors that are dropped."""
        return sum(nbytes for _, nbytes in self.dropped.values())


def thin(
    ref: str | PathLike[str] | Checkpoint,
    drop: str | Iterable[str],
    *,
    workers: int | None = None,
    verify: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Remove states from a checkpoint in place, permanently; all else stays.

    The checkpoint gets a new id, and an edge `thin` in its lineage that tells what was dropped. It
    keeps its step, its place among the checkpoints of its run, metrics, configuration, objects,
    values of ranks and optimizer groups. Until the commit there must be space for what is kept, in
    addition. Called again with the same arguments it continues, or finds the work done.

    Args:
        ref: a universal checkpoint, or its path, url or reference.
        drop: names of states, or globs. The weight, or the master where only this is stored, is
            dropped only if `weight` itself is among them.
        workers: shards written at once (default: one for each core; for object stores eight at
            least).
        verify: compare the bytes that are read with the checksums in the files.
        progress: called with the bytes done and the bytes in all.

    Raises:
        UsageError: no state matches one of `drop`, or no tensor would remain.
        Conflict: the checkpoint is held, tagged, has an alias or is needed by others; or it was
            replaced meanwhile.
        ChecksumError: what is to be kept is damaged; nothing was removed.
        UnsupportedError: it is not a universal checkpoint, or the place has no conditional
            replacement of files.
    """
    patterns = as_strings(drop)
    plan = plan_thin(ref, patterns)
    reason = f"drop {', '.join(patterns)}"
    options = WriteOptions(workers=workers, verify=verify, progress=progress)
    return keep_tensors(plan.checkpoint, plan.keys, reason, options)


def plan_thin(ref: str | PathLike[str] | Checkpoint, drop: str | Iterable[str]) -> ThinPlan:
    """Find out what `thin` would keep and drop; errors are as there. Nothing is changed."""
    checkpoint = ref if isinstance(ref, Checkpoint) else open_reference(ref)
    _check_universal(checkpoint)
    infos = list(checkpoint.tensors.values())
    state_of = _as_weights(infos)
    patterns = as_strings(drop)
    states = set(state_of.values())
    ever_there = states | dropped_states(checkpoint.manifest).keys()
    for pattern in patterns:
        if not any(_drops(pattern, state) for state in ever_there):
            raise UsageError(
                f"{checkpoint.url} stores no state that {pattern!r} drops",
                hint=f"there are: {', '.join(sorted(states))}"
                + ("" if pattern == WEIGHT else "; `weight` is dropped only by its own name"),
            )
    dropped = {s for s in states if any(_drops(pattern, s) for pattern in patterns)}
    if dropped == states:
        raise UsageError(
            f"{checkpoint.url} would have no tensor left",
            hint="`ucp delete` removes a whole checkpoint",
        )
    return ThinPlan.of(checkpoint, {key for key, state in state_of.items() if state not in dropped})


def thin_at(url: str, checkpoint: str, states: Collection[str], reason: str) -> Manifest:
    """Keep only these states of the checkpoint with an id at a place; a master without a weight counts as one."""
    source = open_checkpoint(url, roots=allowed_roots)
    # one that an interrupted call has thinned is continued, and then recorded
    if checkpoint not in (source.id, *(e.id for e in source.manifest.lineage if e.kind == THIN)):
        raise Conflict(
            f"{url} holds the checkpoint {source.id} by now, not {checkpoint}",
            hint=f"`ucp reindex {url}` makes the catalog know it; then plan again",
        )
    state_of = _as_weights(source.tensors.values())
    keys = {key for key, state in state_of.items() if state in states}
    return keep_tensors(source, keys, reason).manifest


def _as_weights(infos: Iterable[TensorInfo]) -> dict[Key, str]:
    """The state of each tensor, where a master of which no weight is stored is the weight."""
    infos = list(infos)
    weights = {info.key for info in weights_of(infos)}
    return {info.key: WEIGHT if info.key in weights else info.state for info in infos}


def _drops(pattern: str, state: str) -> bool:
    return pattern == state or (state != WEIGHT and fnmatchcase(state, pattern))


def _check_universal(checkpoint: Checkpoint) -> None:
    if checkpoint.viewed or not checkpoint.universal:
        raise UnsupportedError(
            f"{checkpoint.url} is "
            f"{'a view' if checkpoint.viewed else f'a checkpoint of {checkpoint.kind}'}"
            ", of which nothing is removed",
            hint=_COPY,
        )
    checkpoint.check_readable()


def keep_tensors(
    source: Checkpoint,
    keep: Collection[Key],
    reason: str,
    options: WriteOptions | None = None,
    *,
    check_needed: Callable[[], None] | None = None,
) -> Checkpoint:
    """Remove all tensors but some from a universal checkpoint in place.

    Arrays stay arrays, of the same chunks, and weights in safetensors files stay such; packed
    tensors become arrays, patches too. Virtual checkpoints stay virtual, and what is stored in a
    base stays there.

    Args:
        keep: the tensors that stay.
        reason: why the others go, for the lineage and for those who look for them.
        options: how arrays are written (default: as they are).
        check_needed: the checkpoint is deleted and its id stays, for those that are based on it. This is called when
            whoever begins to need it sees that it is replaced; it raises Conflict if others need more (default: what
            is left has an id of its own, and what is needed or kept is not thinned).

    Returns:
        The checkpoint that is left; `source` if nothing had to be dropped.
    """
    _check_universal(source)
    assert source.universal is not None  # noqa: S101 - it was checked
    store = own_store(source)
    infos = [info for info in source.tensors.values() if info.key in keep]
    dropped = [info for info in source.tensors.values() if info.key not in keep]
    if not dropped:
        settle(store)
        announce(store.url, source.manifest)  # its writer may have been killed before it did
        return source
    if not infos:
        raise UsageError(
            f"{source.url} would have no tensor left",
            hint="`ucp delete` removes a whole checkpoint",
        )
    before = source.manifest
    if check_needed is None:
        _check_unprotected(source, store)
    options = _as_stored(before, options or WriteOptions())
    placed = _placed(source, infos)
    references = references_of(source.universal, [info.key for info in infos], store.url)
    edge = lineage_to(source, THIN, _how(dropped, reason))
    # by its attempt, as what keeps its id may be thinned again
    replaced, keeps = (before.id, None) if check_needed is None else (before.attempt, before.id)
    plan = {**plan_document(source, infos, options), **references.plan, THIN: replaced}
    needs = references.urls if placed is None else tuple(url for url, _ in placed.homes)
    attempt = begin(store, plan, overwrite=True, keeps=keeps, needs=needs)
    now = None if attempt.replaces is None else attempt.replaces[0]
    try:
        if now is None or now.attempt != before.attempt:
            return _overtaken(store, attempt, before, keep)
        must_replace(store, attempt, "thinned", _COPY)
        if placed is None:
            references.protect(str(attempt.keeps))
            referenced = references.keys
            own = [info for info in infos if info.key not in referenced]
            written, recorded = _write(source, store, attempt, own, options, references)
        else:
            written, recorded = _write_virtual(source, store, attempt, placed), False
        changed = {name: getattr(written, name) for name in (*FILE_FIELDS, "aliases")}
        changed |= {
            "id": attempt.keeps or written.id,
            "producer": {**before.producer, **written.producer},
            "lineage": (*before.lineage, edge),
        }
        manifest = before.model_copy(update=changed)
        compare_fingerprints(source, manifest)
    except UcformatError:
        now = find_manifest(store, UcformatError)
        if now is not None and now.attempt != before.attempt:
            # its files were removed by who replaced it, while they were read here
            return _overtaken(store, attempt, before, keep)
        if placed is not None:  # little work is lost, and the files elsewhere are not needed for it
            give_up(store, attempt)
        raise
    if check_needed is not None:
        _check_marked(store, attempt, check_needed)
    done = commit(store, attempt, manifest)
    if recorded:
        discard_finished(store, attempt.id)
    return Checkpoint(Universal(store, allowed_roots, done))


def _check_unprotected(source: Checkpoint, store: Store) -> None:
    """Raise an error if a checkpoint must stay as it is."""
    if why := protections_of(store.url, source.id):
        raise Conflict(
            f"the checkpoint {source.id} at {source.url} is not thinned: {'; '.join(why)}",
            hint="remove the protections first (docs/retention.md)",
        )


def _check_marked(store: Store, attempt: Attempt, check_needed: Callable[[], None]) -> None:
    """Check what others need, after whoever begins to need the checkpoint sees that it is replaced."""
    mark_replacing(store, attempt.id)
    try:
        check_needed()
    except UcformatError:
        discard(store, attempt.id)  # as nobody can begin to need what is marked
        raise


def _as_stored(manifest: Manifest, options: WriteOptions) -> WriteOptions:
    """The options with the codec of the tensors, and the sizes of chunks and shards of the arrays."""
    grid = manifest.grid
    chunk_bytes = options.chunk_bytes or (grid.chunk_bytes if grid else None)
    shard_bytes = options.shard_bytes or (grid.shard_bytes if grid else None)
    codec = options.codec or (BLOSC if manifest.tensors.is_encoded else None)
    return replace(options, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes, codec=codec)


def _how(dropped: Iterable[TensorInfo], reason: str) -> dict[str, object]:
    docs = tuple(
        DroppedDoc(state=state, tensors=tensors, nbytes=nbytes)
        for state, (tensors, nbytes) in amounts(dropped).items()
    )
    return ThinDoc(at=datetime.now(UTC), reason=reason, dropped=docs).model_dump(mode="json")


def _placed(source: Checkpoint, infos: Sequence[TensorInfo]) -> VirtualExtents | None:
    """Where the tensors of a virtual checkpoint lie; None for one with files of its own."""
    universal = source.universal
    assert universal is not None  # noqa: S101 - it was checked
    sidecar = universal.manifest.sidecar
    if sidecar is None or not sidecar.roots:
        return None
    own = [k for k in universal.manifest.tensors.kinds if k.path is not None]
    if own or not all(file.startswith(MOUNT) for file in universal.sidecar().files):
        raise UnsupportedError(
            f"{source.url} has some tensors in files of its own, and others in files elsewhere",
            hint="`ucp materialize` makes all of them its own",
        )
    return VirtualExtents(source, infos)


def _write(
    source: Checkpoint,
    store: Store,
    attempt: Attempt,
    infos: Sequence[TensorInfo],
    options: WriteOptions,
    references: References,
) -> tuple[Manifest, bool]:
    """Write the tensors of a checkpoint with files of its own; as `write`."""
    universal = source.universal
    as_files = universal is not None and universal.weights_folder is not None
    weights = "safetensors" if as_files and weights_of(infos) else None
    files = plan_files(source, infos, attempt.id, weights)
    in_files = (
        None
        if files is None
        else partial(WeightsJob, source, store, attempt.id, infos, files, options, weights)
    )
    others = [i for i in infos if files is None or i.key not in files.tensors]
    job = ShardJob(source, store, attempt.id, others, options)
    return write(job, attempt, in_files, references)


def _write_virtual(
    source: Checkpoint, store: Store, attempt: Attempt, placed: VirtualExtents
) -> Manifest:
    """Write the sidecar of a virtual checkpoint; the files elsewhere are those that were registered."""
    sidecar = source.manifest.sidecar
    assert sidecar is not None  # noqa: S101 - it is virtual
    need(placed.homes, str(attempt.keeps), store.url, unprotected=bool(unprotected(source)))
    registered = {doc.path: doc for doc in sidecar.sources}
    sources = [registered[k].model_copy(update={"path": new}) for k, new in placed.files.items()]
    docs = marked(
        (
            TensorDoc(
                *(i.name, i.state, i.dtype, i.shape),
                fingerprint=source.metadata.fingerprints.get(i.key),
            )
            for i in placed.infos
        ),
        source.metadata,
    )
    put = put_sidecar(
        store,
        attempt.folder("data"),
        encode(placed.extents),
        TensorTable.of(docs),
        placed.roots,
        sources,
    )
    manifest = put_others(source, store, attempt, docs).with_sidecar(*put)
    return manifest.model_copy(update={"verified": source.manifest.verified})


def _overtaken(
    store: Store, attempt: Attempt, before: Manifest, keep: Collection[Key]
) -> Checkpoint:
    """What replaced the opened checkpoint, if that was thinned to the same tensors; else Conflict."""
    now = find_manifest(store, UcformatError)
    if now is None or now.attempt != attempt.id:
        abandon(store, attempt.id)
    if now is not None and any(e.kind == THIN and e.id == before.id for e in now.lineage):
        left = {Key(doc.name, doc.state) for doc in now.tensors}
        if left == set(keep):
            return open_checkpoint(store, roots=allowed_roots)
    raise Conflict(
        f"the checkpoint {before.id} at {store.url} was replaced or deleted since it was opened",
        hint="open it again, and check what is there now",
    )
