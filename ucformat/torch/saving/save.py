"""`save`: the ranks plan together, write, and commit one universal checkpoint, all or nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ucformat.errors import Uncertain
from ucformat.format.arrays import put_array, put_groups
from ucformat.format.commit import commit, discard
from ucformat.format.described import packed_file
from ucformat.reading.garbage import gc_paused
from ucformat.storage.url import open_store, path_text
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.assets import assets_of
from ucformat.torch.saving.assignment import WriteItem
from ucformat.torch.saving.in_place import (
    WrittenParts,
    abort_uploads,
    complete_uploads,
    plan_in_place,
    split,
    write_in_place,
)
from ucformat.torch.saving.manifest import (
    SaveMetadata,
    StateInfo,
    WriteReport,
    manifest_of,
    merge_reports,
    state_info,
    write_report,
)
from ucformat.torch.saving.options import SaveOptions
from ucformat.torch.saving.plan import Held, plan_save
from ucformat.torch.saving.small import plan_small, split_small
from ucformat.torch.saving.write import Leaves, write_packed, write_shards
from ucformat.torch.state.elements import elements_of, elements_within, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.format.arrays import Array
    from ucformat.format.commit import Attempt
    from ucformat.schema.manifest import LaunchDoc, LineageDoc
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.assignment import GlobalPlan
    from ucformat.torch.saving.in_place import InPlace
    from ucformat.torch.saving.plan import Assignment
    from ucformat.torch.saving.small import SmallPart
    from ucformat.torch.state.elements import Elements, Memory
    from ucformat.torch.state.local import LocalState

__all__ = ["Saved", "save", "save_in_group", "save_local", "write_checkpoint"]


@message
class Saved:
    """A committed checkpoint.

    `nbytes` are the bytes that this rank wrote, `planning_s` and `writing_s` the seconds that it
    took.
    """

    url: str
    id: str
    nbytes: int
    planning_s: float
    writing_s: float


@gc_paused()  # a full collection goes through all objects of torch, for 0.2 s
def write_checkpoint(
    state: StateInfo,
    memories: Sequence[Memory],
    options: SaveOptions,
    metadata: SaveMetadata,
    group: Group,
    progress: Callable[[int], None] = lambda _: None,
    threads: int = 1,
) -> Saved:
    """Plan, write and commit a checkpoint; all ranks of the group call this together.

    If a rank fails, all ranks raise the same error, nothing is committed, and the files are
    removed. If a rank dies, its files remain as an attempt, which is never visible to readers and
    is removed by `ucp gc`.

    Args:
        progress: called with the bytes of each write that is done.
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

    distributions = [None if n < 0 else state.distributions[n] for n in state.distributed] or [
        None
    ] * len(items)
    held = Held(items, distributions, state.aliases, state.objects, elements)
    parts = _plan_parts(group, options, store, held)
    assignment, attempt, plan = parts.assignment, parts.attempt, parts.plan
    planned = time.monotonic()
    arrays: list[Array] = []  # all of the checkpoint, on rank 0
    try:
        if plan is not None and options.form != "packed":
            arrays = options.arrays(plan.infos, assignment.attempt)
        leaves, in_files, nbytes = _write(parts, options, store, group, progress, threads, arrays)
        now = time.monotonic()
        objects = {k: state.objects[k] for k in assignment.object_names}
        stall = state.stall or now - begun
        written: Any = write_report(
            group.rank, state, leaves, objects, nbytes, now - planned, stall, in_files
        )
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        written = error

    def relay(report: WriteReport) -> WriteReport:
        return replace(
            report, values=report.values.relieved(store, f"objects/{assignment.attempt}")
        )

    needed = False  # whether the files belong to a checkpoint that is, or may be, committed

    def committed(all_written: WriteReport) -> str:
        assert attempt is not None  # noqa: S101 - rank 0 has both
        assert plan is not None  # noqa: S101
        nonlocal needed
        if parts.in_place is not None:
            complete_uploads(store, parts.in_place, all_written.parts.etags)
        small = None if parts.small is None else parts.small.plan
        manifest = manifest_of(
            store, options, metadata, attempt, plan, arrays, all_written, parts.in_place, small
        )
        needed = True  # also if the commit is interrupted
        try:
            done = commit(store, attempt, manifest)
        except Exception as error:
            needed = isinstance(error, Uncertain)
            raise
        return done.id

    try:
        checkpoint: str = group.combine(written, merge_reports, WriteReport, committed, str, relay)
    except BaseException:
        if attempt is not None and parts.in_place is not None and not needed:
            abort_uploads(store, parts.in_place)
        if attempt is not None and group.intact and not needed:
            discard(store, attempt.id)
        raise
    return Saved(options.url, checkpoint, nbytes, planned - begun, time.monotonic() - planned)


class _Parts(NamedTuple):
    """The plans of a save, in the order in which its parts are planned.

    Attributes:
        held: what this rank saves as arrays, or in the packed form.
        plan: on rank 0, that of all ranks.
        small: small tensors, if they are packed beside arrays.
        in_place: the weights of the safetensors form.
    """

    held: Held
    assignment: Assignment
    attempt: Attempt | None
    plan: GlobalPlan | None
    small: SmallPart | None = None
    in_place: InPlace | None = None


def _plan_parts(group: Group, options: SaveOptions, store: Store, held: Held) -> _Parts:
    if options.form == "packed":
        return _Parts(held, *plan_save(group, options, store, held))
    weights, small = None, None
    if options.form == "safetensors":
        with group.sharing_errors():
            weights, held = split(held)
    small, held = split_small(group, held)
    assignment, attempt, plan = plan_save(group, options, store, held)
    try:
        packed = None if small is None else plan_small(group, options, store, small, attempt)
        in_place = (
            None
            if weights is None
            else plan_in_place(group, options, store, weights, plan, attempt)
        )
    except BaseException:
        if attempt is not None and group.intact:
            discard(store, attempt.id)
        raise
    return _Parts(held, assignment, attempt, plan, packed, in_place)


def _write(
    parts: _Parts,
    options: SaveOptions,
    store: Store,
    group: Group,
    progress: Callable[[int], None],
    threads: int,
    every: Sequence[Array],
) -> tuple[Leaves, WrittenParts, int]:
    """Write this rank's part of the checkpoint, and make it durable; rank 0 has every array of the Zarr form.

    Returns:
        digests of the chunks that it wrote in the Zarr form, what `write_in_place` has returned,
        and the bytes.
    """
    held, assignment, small = parts.held, parts.assignment, parts.small
    nbytes, counting = 0, threading.Lock()

    def wrote(n: int) -> None:
        nonlocal nbytes
        with counting:
            nbytes += n
            progress(n)

    def write_pieces(packed: Held, pieces: Sequence[tuple[int, int]]) -> None:
        boxes = [
            (of.info, of.boxes[p], packed.elements(item, p))
            for item, p in pieces
            for of in (packed.items[item],)
        ]
        write_packed(store, packed_file(f"data/{assignment.attempt}", group.rank), boxes, wrote)

    leaves: Leaves = []
    in_files = WrittenParts()
    if options.form == "packed":
        write_pieces(held, assignment.part.pieces)
    else:
        arrays = assignment.arrays(options)
        leaves = write_shards(
            store,
            group,
            arrays,
            assignment.part.batches,
            assignment.part.messages,
            lambda f: elements_within(
                held.elements(f.item, f.piece), held.items[f.item].boxes[f.piece], f.box
            ),
            wrote,
            threads,
        )
        by_key = {a.info.key: a for a in arrays}
        for key in sorted({key for key, at, _ in leaves if not any(at)}):
            put_array(store, by_key[key])
        if every:
            put_groups(store, every)
            for array in every:
                if not array.grid.count:  # no rank writes a shard of it
                    put_array(store, array)
    if parts.in_place is not None:  # after the exchange, for which other ranks wait
        in_files = write_in_place(store, parts.in_place, group, wrote, threads)
    if small is not None:
        write_pieces(small.held, small.pieces)
    store.flush()
    return leaves, in_files, nbytes


_NO_METADATA = SaveMetadata()


def save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed", "safetensors"] = "zarr",
    assets: str | PathLike[str] | None = None,
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    after: int | None = None,
    launch: LaunchDoc | None = None,
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save a training state as one checkpoint; all ranks call this together.

    Blocks until the checkpoint is committed, and durable. Uncommitted data is never visible to
    readers.

    Args:
        state: nested mappings of modules, optimizers, tensors (plain, DTensor, ShardedTensor),
            objects with a state dict, PerRank values and plain values; or the state dicts of all
            these.
        url: where to write the checkpoint, a path or URL; the same on all ranks.
        step: the training step.
        run: name of the training run, for the catalog.
        metrics: numbers to record in the catalog: `{"val_loss": 2.1}`.
        config: configuration of the training, JSON values.
        form: `zarr` writes arrays, for which ranks send each other parts of shards; `packed` writes
            one file per rank without communication, which can be opened alike, and which `ucp
            materialize` converts to arrays; `safetensors` writes the weights to files that Hugging
            Face's tools load (`Checkpoint.hf_url`), each rank its own parts, and everything else as
            arrays. Tensors below 256 KiB are packed instead of arrays if there are more than 1,000
            of them, since each array is two files.
        assets: a folder whose `config.json`, tokenizer and similar files are stored, too. The
            `config.json` of a model of transformers in the state, or the `adapter_config.json` of
            PEFT's, is stored by default.
        overwrite: replace an existing checkpoint, which stays intact until the new one is
            committed.
        lineage: the checkpoints that this one was derived from.
        after: the greatest commit count of the run's checkpoints, 0 if there are none; `Manager`
            passes it. This checkpoint gets the next count after that and those in `lineage`. With
            neither it gets none, and its step determines how new it is.
        launch: the launch of the training; `Manager` passes it. The checkpoints of a folder without
            it count as those of one launch.
        replicas: `equal` requires replicas to be equal on all ranks: it compares objects, tensors
            up to 64 KiB, and samples of larger tensors that ranks hold whole. `first` saves the
            value of the first rank unchecked.
        chunk_bytes: the maximum size of a chunk of the Zarr form (default 1 MiB).
        shard_bytes: the maximum size of a shard of the Zarr form (default 128 MiB).
        group: the ranks that take part (default: all). Threads that save to the same url at once
            need different ones.
        timeout: seconds after which an unresponsive rank is considered dead.

    Returns:
        the committed checkpoint.

    Raises:
        Conflict: a checkpoint exists at `url`.
        UsageError: an argument or a replica differs between ranks, or a value cannot be saved.
        UnsupportedError: the safetensors form does not have a dtype.
        CoverageError: no rank holds some part of a tensor.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    from ucformat.torch.state.local import (
        local_state,
    )  # not above: the background writer does not import torch

    with group_for_call(group, timeout, "save", url) as ranks:
        with ranks.sharing_errors():
            held = local_state(state)
            options = SaveOptions(
                path_text(url), form, overwrite, replicas, chunk_bytes, shard_bytes
            )
            options.check(held)
            beside = {} if ranks.rank else assets_of(state, assets, form)
            metadata = SaveMetadata.of(step, run, metrics, config, lineage, after, beside, launch)
        return save_in_group(held, options, metadata, ranks)


def save_local(
    state: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata = _NO_METADATA,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save the local state of this rank; see `save`."""
    with group_for_call(group, timeout, "save", options.url) as ranks:
        return save_in_group(state, options, metadata, ranks)


def save_in_group(
    state: LocalState, options: SaveOptions, metadata: SaveMetadata, ranks: Group
) -> Saved:
    """Save the local state of this rank, together with the other ranks of a group."""
    from ucformat.torch.state.memory import copied_to_host

    with ranks.sharing_errors():
        memories = [host_memory(copied_to_host(t.tensor)) for t in state.tensors]
    return write_checkpoint(
        state_info(state, ranks.links.members), memories, options, metadata, ranks
    )
