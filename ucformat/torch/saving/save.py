"""`save`: the ranks plan together, write, and commit one universal checkpoint, all or nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ucformat.errors import Uncertain, UsageError, check_keywords
from ucformat.format.arrays import put_array, put_groups
from ucformat.format.commit import commit, discard
from ucformat.format.described import packed_file
from ucformat.format.lossy_states import packed_losses
from ucformat.geometry.fingerprint import packed_sums, summed, unpacked_sums
from ucformat.reading.execute import default_threads
from ucformat.sources.model_files import find_assets
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.error_mapping import retries
from ucformat.storage.url import open_store, path_text
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.comm.wire import message
from ucformat.torch.integration import integrations
from ucformat.torch.saving.base import open_base
from ucformat.torch.saving.in_place import (
    WrittenParts,
    abort_uploads,
    complete_uploads,
    write_in_place,
)
from ucformat.torch.saving.manifest import (
    SaveMetadata,
    StateInfo,
    WriteReport,
    WrittenByRank,
    manifest_of,
    merge_reports,
    state_info,
    write_report,
)
from ucformat.torch.saving.options import SaveArguments, SaveOptions
from ucformat.torch.saving.partial import check_partial, leave_parts
from ucformat.torch.saving.patching import KeptTiles, agree_on_base
from ucformat.torch.saving.plan import SavePlanner
from ucformat.torch.saving.statement import PieceFingerprints, RankState, WriteItem
from ucformat.torch.saving.tracked import logger_of
from ucformat.torch.saving.write import TileOptions, write_packed, write_shards
from ucformat.torch.state.elements import elements_of, host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike

    from ucformat.geometry.box import Box
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.plan import RankPlan
    from ucformat.torch.saving.statement import StoredAs
    from ucformat.torch.state.changed import Interval
    from ucformat.torch.state.elements import Elements, Memory
    from ucformat.torch.state.local import LocalState

__all__ = ["Saved", "save", "save_in_group", "save_local", "write_checkpoint"]


@message
class Saved:
    """A committed checkpoint.

    `nbytes` are the bytes that this rank wrote, `planning_s` and `writing_s` the seconds that it
    took. `referenced` are the bytes of the tensors of a base, which no rank wrote.
    """

    url: str
    id: str
    nbytes: int
    planning_s: float
    writing_s: float
    referenced: int = 0


@gc_paused()  # a full collection goes through all objects of torch, for 0.2 s
def write_checkpoint(
    state: StateInfo,
    memories: Sequence[Memory],
    options: SaveOptions,
    metadata: SaveMetadata,
    group: Group,
    progress: Callable[[int], None] = lambda _: None,
    threads: int = 1,
    kept: KeptTiles | None = None,
) -> Saved:
    """Plan, write and commit a checkpoint; all ranks of the group call this together.

    If a rank fails, all ranks raise the same error, nothing is committed, and the files are
    removed. If a rank dies, its files remain as an attempt, which is never visible to readers and
    is removed by `ucp gc`.

    Args:
        progress: called with the bytes of each write that is done.
        kept: what this rank has written before, and writes now.
    """
    begun, retried = time.monotonic(), int(retries)
    with group.kept(SavePlanner) as planner:
        with group.sharing_errors():
            check_partial(options, metadata)
            store, own = open_store(options.url), _rank_state(state, memories)
        base, options, patcher = agree_on_base(group, options, store.url, state.changed, kept)
        with group.sharing_errors():  # plan here
            statement = planner.state(group.rank, options, own)
            sums = PieceFingerprints(own.items, own.elements)
            if options.base is not None and group.size == 1:  # ranks on one host share its cores
                sums.compute(default_threads())
        plan = planner.agree(group, options, store, statement, sums, base, metadata.partial)
    planned = time.monotonic()
    report: WriteReport | Exception
    try:
        if options.times:
            _check_room(plan, own, options)
        how = TileOptions(options.tile_codec, threads, patcher, options.encode)
        written = _write(plan, own, store, group, how, progress)
        if options.certify:
            written = written._replace(live=_live_sums(plan, own, state.live))
        now = time.monotonic()
        times = (now - planned, state.stall or now - begun, state.stall, planned - begun)
        report = write_report(group.rank, state, written, times, int(retries) - retried)
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        report = error
    checkpoint_id = _commit(plan, report, options, metadata, store, group)
    if kept is not None and patcher is not None:
        kept.end(checkpoint_id)
    return Saved(
        *(options.url, checkpoint_id, written.nbytes, planned - begun),
        *(time.monotonic() - planned, plan.referenced),
    )


def _check_room(plan: RankPlan, state: RankState, options: SaveOptions) -> None:
    from ucformat.torch.tiers.room import check_room  # for few saves

    pieces = ((state.items[n], state.items[n].boxes[p]) for n, p in plan.part.pieces)
    nbytes = sum(box.size * item.info.itemsize for item, box in pieces)
    check_room(options.url, nbytes, options.times)


def _live_sums(plan: RankPlan, state: RankState, live: bytes) -> dict[bytes, bytes]:
    """The fingerprints at the call of what this rank writes, or one of its replicas, by description."""
    numbers = ((item, piece) for item, i in enumerate(state.items) for piece in range(len(i.boxes)))
    sums = dict(zip(numbers, unpacked_sums(live), strict=True))
    kinds: tuple[StoredAs, ...] = ("array", "packed", "weight")
    return plan.statement.sums(plan.exceptions, kinds, lambda *at: sums[at])


def _rank_state(state: StateInfo, memories: Sequence[Memory]) -> RankState:
    boxes: dict[int, tuple[Box, ...]] = {}  # by the identity of pieces, which many tensors share
    items = [
        WriteItem(
            info,
            boxes.get(id(pieces)) or boxes.setdefault(id(pieces), tuple(p.box for p in pieces)),
            tuple(state.paths.get(info.key, ())),
        )
        for info, pieces in state.tensors
    ]

    def elements(item: int, piece: int) -> Elements:
        info, pieces = state.tensors[item]
        return elements_of(pieces[piece], memories[item], info.itemsize)

    distributions = [None if n < 0 else state.distributions[n] for n in state.distributed]
    return RankState(
        items, distributions or [None] * len(items), state.aliases, state.objects, elements
    )


def _write(
    plan: RankPlan,
    state: RankState,
    store: Store,
    group: Group,
    how: TileOptions,
    progress: Callable[[int], None],
) -> WrittenByRank:
    """Write this rank's part of the checkpoint, and make it durable."""
    nbytes, counting = 0, threading.Lock()

    def wrote(n: int) -> None:
        nonlocal nbytes
        with counting:
            nbytes += n
            progress(n)

    part, in_files, fingerprints = plan.part, WrittenParts(), dict[bytes, bytes]()
    threads, patched, losses = how.threads, dict[bytes, bytes](), dict[bytes, bytes]()
    shards = write_shards(store, group, plan.arrays, part, state.within, wrote, threads)
    by_key = {a.info.key: a for a in plan.arrays.values()}
    for key in sorted({key for key, at, _ in shards if not any(at)}):
        put_array(store, by_key[key])
    if plan.begun is not None and plan.begun.arrays:
        put_groups(store, plan.begun.arrays)
        for array in plan.begun.arrays:
            if not array.grid.count:  # no rank writes a shard of it
                put_array(store, array)
    if plan.weights is not None:  # after the exchange, for which other ranks wait
        in_files = write_in_place(store, plan.weights, state, group, wrote, threads)
    if plan.exceptions.have_packed:
        boxes = [
            (state.items[n].info, state.items[n].boxes[p], state.elements(n, p))
            for n, p in part.pieces
        ]
        file = packed_file(f"data/{plan.attempt}", group.rank)
        sums, need_base, of_boxes = write_packed(store, file, boxes, wrote, how)
        items, count = [item for item, _ in part.pieces], len(state.items)
        fingerprints = plan.statement.by_description(summed(items, sums, count))
        if need_base:
            by_item = ((items[box], (1, 0)) for box in need_base)
            patched = plan.statement.by_description(packed_sums(by_item, count))
        if of_boxes:
            with_loss = ((items[box], loss) for box, loss in of_boxes.items())
            losses = plan.statement.by_description(packed_losses(with_loss, count))
    syncing = time.monotonic()
    store.flush()
    sync_s = time.monotonic() - syncing
    objects = {name: state.objects[name] for name in plan.objects}
    return WrittenByRank(
        *(shards, objects, nbytes, sync_s, fingerprints, in_files, part.listed_at),
        patched=patched,
        losses=losses,
    )


def _commit(
    plan: RankPlan,
    report: WriteReport | Exception,
    options: SaveOptions,
    metadata: SaveMetadata,
    store: Store,
    group: Group,
) -> str:
    """Gather what all ranks have written, and commit it on rank 0; the id of the checkpoint."""
    keep_files = False  # whether the files belong to a checkpoint that is, or may be, committed

    def relay(merged_report: WriteReport) -> WriteReport:
        return replace(
            merged_report, values=merged_report.values.relieved(store, f"objects/{plan.attempt}")
        )

    def committed(all_written: WriteReport) -> str:
        assert plan.begun is not None  # noqa: S101 - on rank 0
        nonlocal keep_files
        if plan.weights is not None:
            complete_uploads(store, plan.weights, all_written.parts.etags)
        manifest = manifest_of(store, options, metadata, plan, plan.begun, all_written)
        keep_files = True  # also if the commit is interrupted
        try:
            return commit(store, plan.begun.attempt, manifest, announced=options.announced).id
        except Exception as error:
            keep_files = isinstance(error, Uncertain)
            raise

    try:
        checkpoint_id: str = group.combine(
            report, merge_reports, WriteReport, committed, str, relay
        )
    except BaseException:
        if plan.begun is not None and not keep_files:
            if plan.weights is not None:
                abort_uploads(store, plan.weights)
            if group.intact:
                discard(store, plan.attempt)
        raise
    return checkpoint_id


@gc_paused()
def save(
    state: Mapping[str, Any], url: str | PathLike[str], **arguments: Unpack[SaveArguments]
) -> Saved:
    """Save a training state as one checkpoint; all ranks call this together.

    Blocks until the checkpoint is committed, and durable. Uncommitted data is never visible to
    readers.

    Args:
        state: nested mappings of modules, optimizers, tensors (plain, DTensor, ShardedTensor),
            objects with a state dict, PerRank values and plain values; or the state dicts of all
            these.
        url: where to write the checkpoint, a path or URL; the same on all ranks.
        arguments: those of `SaveArguments`, by keyword.

    Returns:
        the committed checkpoint.

    Raises:
        Conflict: a checkpoint exists at `url`.
        UsageError: an argument or a replica differs between ranks, or a value cannot be saved.
        UnsupportedError: the safetensors form does not have a dtype.
        CoverageError: no rank holds some part of a tensor.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    with saving_group(url, "save", arguments) as ranks:
        with ranks.sharing_errors():
            prepared = prepare(state, url, ranks, arguments)
        return save_prepared(*prepared, arguments, ranks)


def save_prepared(
    local: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata,
    log: Callable[[str], None] | None,
    arguments: SaveArguments,
    ranks: Group,
) -> Saved:
    """Save what `prepare` has collected, together with the other ranks of a group."""
    local, options, interval = with_tracked_rows(local, options, arguments, ranks)
    local, options, metadata = leave_parts(local, options, metadata, arguments, ranks)
    saved = save_in_group(local, options, metadata, ranks)
    if interval is not None:
        interval.saved = lambda: saved.id
    if log is not None:
        log(saved.url)
    return saved


def saving_group(
    url: str | PathLike[str], call: str, arguments: SaveArguments
) -> AbstractContextManager[Group]:
    """Use the group of the ranks that save; TypeError for arguments that there are not."""
    check_keywords(call, arguments, SaveArguments)
    return group_for_call(call, url, arguments.get("group"), arguments.get("timeout", TIMEOUT))


def prepare(
    state: Mapping[str, Any] | LocalState,
    url: str | PathLike[str],
    ranks: Group,
    arguments: SaveArguments,
) -> tuple[LocalState, SaveOptions, SaveMetadata, Callable[[str], None] | None]:
    """Collect what this rank saves, unless it is, check the arguments of `save`, and bind its `log_to`."""
    # not above: the background writer does not import torch
    from ucformat.torch.state.local import LocalState, local_state

    options = SaveOptions.of(path_text(url), arguments)
    log = logger_of(arguments, ranks.rank)
    local, live = (
        (state, {})
        if isinstance(state, LocalState)
        else (local_state(state, arguments.get("names")), state)
    )
    options.check(local)
    changed: Any = arguments.get("changed")
    if changed is not None:
        from ucformat.torch.state.changed import ChangedRows, packed_masks

        if isinstance(changed, Mapping):
            local = replace(local, changed=packed_masks(changed, local))
        elif isinstance(changed, ChangedRows):
            changed.find_names(live, local, arguments.get("names") or {})
        else:
            raise UsageError(
                f"changed is neither masks by name nor ChangedRows, but a {type(changed).__name__}",
                hint="changed={name: mask}",
            )
    assets = {} if ranks.rank else assets_of(live, arguments.get("assets"), options.form)
    return local, options, SaveMetadata.of(arguments, assets), log


def with_tracked_rows(
    state: LocalState, options: SaveOptions, arguments: SaveArguments, ranks: Group
) -> tuple[LocalState, SaveOptions, Interval | None]:
    """The rows that `ChangedRows` has seen since the base was saved, which is found now; all ranks call this."""
    tracked = arguments.get("changed")
    if tracked is None or isinstance(tracked, Mapping):
        return state, options, None
    interval = tracked.end()
    if options.compares_tiles:

        def find(_: None) -> tuple[str, str]:
            base = open_base(options.base, open_store(options.url).url)
            return ("", "") if base is None else (base.manifest.id, base.url)

        found: tuple[str, str] = ranks.combine(None, then=find, answer_kind=tuple[str, str])
        if found[0]:
            state = replace(state, changed=tracked.since(found[0]))
        options = replace(options, base=found[1] or None, patch=options.patch and bool(found[0]))
    return state, options, interval


_NO_METADATA = SaveMetadata()


def save_local(
    state: LocalState, options: SaveOptions, metadata: SaveMetadata = _NO_METADATA
) -> Saved:
    """Save the local state of this rank; see `save`."""
    with group_for_call("save", options.url) as ranks:
        return save_in_group(state, options, metadata, ranks)


def save_in_group(
    state: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata,
    ranks: Group,
    kept: KeptTiles | None = None,
) -> Saved:
    """Save the local state of this rank, together with the other ranks of a group."""
    from ucformat.torch.state.memory import copied_to_host

    with ranks.sharing_errors():
        info = state_info(state, ranks.links.members, certify=options.certify)
        memories = list(map(host_memory, copied_to_host([t.tensor for t in state.tensors])))
    return write_checkpoint(info, memories, options, metadata, ranks, kept=kept)


def assets_of(
    state: Mapping[str, Any], folder: str | PathLike[str] | None, form: str
) -> dict[str, bytes]:
    """The files that a model's library writes, and those of a folder, which take precedence.

    Args:
        folder: with `config.json`, tokenizer and similar files (None: there is none).
    """
    import torch  # which the process that writes in the background does not

    makers = [
        make
        for module in state.values()
        if isinstance(module, torch.nn.Module)  # a state may have thousands of tensors
        for integration in integrations()
        if (make := integration.model_files(module, form)) is not None
    ]
    assets = makers[0]() if len(makers) == 1 else {}
    return assets if folder is None else {**assets, **assets_in(folder)}


def assets_in(folder: str | PathLike[str]) -> dict[str, bytes]:
    """The `config.json`, tokenizer and similar files of a folder."""
    store = open_store(folder)
    names = find_assets(store.list())
    if not names:
        raise UsageError(f"{store.url} has no config.json, tokenizer or similar file")
    return {name: store.read(name) for name in names}
