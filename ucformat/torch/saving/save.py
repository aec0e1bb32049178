"""`save`: the ranks agree on a plan, write, and commit one universal checkpoint; all or nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import Uncertain
from ucformat.format.arrays import put_array, put_groups
from ucformat.format.commit import commit, discard
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.assignment import WriteItem
from ucformat.torch.saving.manifest import SaveMetadata, StateInfo, WriteReport, manifest_of, state_info
from ucformat.torch.saving.plan import SaveOptions, plan_save
from ucformat.torch.saving.write import Leaves, packed_file, write_packed, write_shards
from ucformat.torch.state.local import local_state
from ucformat.torch.state.memory import copied_to_host, elements_of, elements_within, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.schema.manifest import LineageDoc
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.plan import Assignment
    from ucformat.torch.state.local import LocalState
    from ucformat.torch.state.memory import Elements, Memory

__all__ = ["Saved", "save", "save_in_group", "save_local", "write_checkpoint"]


@message
class Saved:
    """A checkpoint that was committed, and what this rank did for it: bytes, and seconds for planning and writing."""

    url: str
    id: str
    nbytes: int
    planning_s: float
    writing_s: float


def write_checkpoint(
    state: StateInfo,
    memories: Sequence[Memory],
    options: SaveOptions,
    metadata: SaveMetadata,
    group: Group,
    progress: Callable[[int], None] = lambda _: None,
    threads: int = 1,
) -> Saved:
    """Save what is listed, each tensor's pieces in its host memory; all ranks of the group call this together.

    So many `threads` of this rank write the shards of the Zarr form.

    Any rank's failure fails all with one error that names the rank; then nothing is committed, and what was written is
    removed. Where a rank died, what it wrote stays as an attempt that no reader sees and `ucp gc` removes.
    """
    begun = time.monotonic()
    with group.sharing_errors():
        store = open_store(options.url)
        items = [
            WriteItem(info, tuple(p.box for p in pieces), tuple(state.paths.get(info.key, ())))
            for info, pieces in state.tensors
        ]

    def elements(item: int, piece: int) -> Elements:
        info, pieces = state.tensors[item]
        return elements_of(pieces[piece], memories[item], info.itemsize)

    assignment, attempt, plan = plan_save(group, options, store, items, state.aliases, state.objects, elements)
    planned = time.monotonic()
    try:
        written: Any = _write(state, options, assignment, store, group, elements, progress, threads)
    except Exception as error:  # noqa: BLE001 - told to all ranks
        written = error
    seconds = time.monotonic() - planned
    if isinstance(written, WriteReport):
        stall = state.stall or time.monotonic() - begun
        told = replace(written.state, stall=stall)
        written = replace(written, state=told, seconds=seconds)

    needed = False  # what was written, by what is committed, or may be

    def committed(all_written: list[Any]) -> Sequence[Any]:
        assert attempt is not None  # noqa: S101 - rank 0 has both
        assert plan is not None  # noqa: S101
        nonlocal needed
        manifest = manifest_of(store, options, metadata, attempt, plan, assignment, all_written)
        needed = True  # also where it is interrupted
        try:
            done = commit(store, attempt, manifest)
        except Exception as error:
            needed = isinstance(error, Uncertain)
            raise
        return [done.id] * group.size

    try:
        checkpoint: str = group.gather_scatter(written, committed, WriteReport, str)
    except BaseException:
        if attempt is not None and group.whole and not needed:
            discard(store, attempt.id)
        raise
    nbytes = written.nbytes
    return Saved(options.url, checkpoint, nbytes, planned - begun, time.monotonic() - planned)


def _write(
    state: StateInfo,
    options: SaveOptions,
    assignment: Assignment,
    store: Store,
    group: Group,
    elements: Callable[[int, int], Elements],
    progress: Callable[[int], None],
    threads: int,
) -> WriteReport:
    """Write this rank's part, and make it durable."""
    nbytes, one_at_a_time = 0, threading.Lock()

    def wrote(n: int) -> None:
        nonlocal nbytes
        with one_at_a_time:
            nbytes += n
            progress(n)

    found: Leaves = []
    if options.form == "packed":
        parts = [
            (info, pieces[p].box, elements(item, p))
            for item, p in assignment.part.pieces
            for info, pieces in (state.tensors[item],)
        ]
        write_packed(store, packed_file(f"data/{assignment.attempt}", group.rank), parts, wrote)
    else:
        arrays = assignment.arrays(options)
        found = write_shards(
            store,
            group,
            arrays,
            assignment.part.batches,
            assignment.part.messages,
            lambda f: elements_within(elements(f.item, f.piece), state.tensors[f.item][1][f.piece].box, f.box),
            wrote,
            threads,
        )
        for number in sorted({tensor for tensor, at, _ in found if not any(at)}):
            put_array(store, arrays[number])
        if not group.rank:
            put_groups(store, arrays)
            for array in arrays:
                if not array.grid.count:  # nobody writes a shard of it
                    put_array(store, array)
    store.flush()
    objects = {k: state.objects[k] for k in assignment.give}
    told = replace(state, tensors=(), objects={}, paths={})
    return WriteReport(found, objects, told, nbytes, 0.0)


_NO_METADATA = SaveMetadata()


def save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    after: int | None = None,
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save a training state; all ranks call it together, and return when it is committed.

    Args:
        state: nested mappings of modules, optimizers, tensors (plain, DTensor, ShardedTensor), objects with a state
            dict, PerRank values and plain values; or the state dicts of all these.
        url: where to write the checkpoint; the same on all ranks.
        step: the training step.
        run: the name of the training run, for the catalog.
        metrics: numbers to note, for the catalog: `{"val_loss": 2.1}`.
        config: the configuration of the training, plain JSON values.
        form: `zarr` writes arrays, for which ranks send each other parts of shards; `packed` writes one file for each
            rank without any sending, which opens the same, and which `ucp materialize` makes arrays of.
        overwrite: replace a checkpoint that is committed there; it stays whole until this one is.
        lineage: what this checkpoint comes from.
        after: the greatest count of commits (`Manifest.commits`) among the run's checkpoints, 0 if there are none; as
            `Manager` says it. This one counts one more than that, and than those in `lineage`. Without both it has no
            count, and its step says how new it is.
        replicas: what ranks hold in common must be `equal` (objects and tensors of at most 64 KiB are compared, of
            larger ones that ranks hold whole a few places), or that of the `first` rank is taken.
        chunk_bytes: the most bytes of a chunk of the Zarr form (default 1 MiB).
        shard_bytes: the most bytes of a shard of the Zarr form (default 128 MiB).
        group: the ranks that take part (default: all). Threads that save at once to one url need one each.
        timeout: seconds after which an unresponsive rank is considered dead.

    Raises:
        Conflict: a checkpoint is committed there already.
        UsageError: ranks disagree on what should be the same.
        CoverageError: nobody holds some part of a tensor.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    with group_for_call(group, timeout, "save", url) as ranks:
        with ranks.sharing_errors():
            held = local_state(state)
            options = SaveOptions(str(url), form, overwrite, replicas, chunk_bytes, shard_bytes)
            metadata = SaveMetadata.of(step, run, metrics, config, lineage, after)
        return save_in_group(held, options, metadata, ranks)


def save_local(
    state: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata = _NO_METADATA,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save what this rank holds, whatever engine it was collected from; see `save`."""
    with group_for_call(group, timeout, "save", options.url) as ranks:
        return save_in_group(state, options, metadata, ranks)


def save_in_group(state: LocalState, options: SaveOptions, metadata: SaveMetadata, ranks: Group) -> Saved:
    """Save what this rank holds, together with the ranks of one of our own groups."""
    with ranks.sharing_errors():
        memories = [host_memory(copied_to_host(t.tensor)) for t in state.tensors]
    return write_checkpoint(state_info(state), memories, options, metadata, ranks)
