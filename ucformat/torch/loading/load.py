"""`load` fills a training state of any layout; `state_dict` reads plain weights for evaluation and serving."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ucformat.checkpoint import Checkpoint
from ucformat.errors import (
    Conflict,
    StateMismatch,
    TensorNotFound,
    UsageError,
    check_choice,
    check_keywords,
    first_names,
)
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.execute import ReadOptions
from ucformat.reading.plan import check_verify
from ucformat.reading.rank import LOAD_INVALID
from ucformat.reading.readable import TRACKERS, check_exact
from ucformat.references import open_reference
from ucformat.schema.manifest import ReaderDoc, is_delta
from ucformat.storage.cache.scope import consistent
from ucformat.storage.concurrency import gc_paused
from ucformat.storage.error_mapping import retries
from ucformat.storage.url import as_strings
from ucformat.storage.wrappers import checking_unchanged
from ucformat.torch.comm.group import TIMEOUT, group_for_call, group_of
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.align import align
from ucformat.torch.loading.arguments import LoadArguments, LoadOptions
from ucformat.torch.loading.certify import certify_state
from ucformat.torch.loading.find import is_asked, is_inside, is_named, left_by_all
from ucformat.torch.loading.match import (
    PARAMETER,
    AskedTensors,
    Matched,
    Problems,
    asked_tensors,
    dropped_problems,
    edge_of,
    fits,
    labels_of,
    match,
    parameter_of,
    raise_for,
    stored_names,
)
from ucformat.torch.loading.read import ReadAmount, read
from ucformat.torch.loading.share import AnotherRankFailed, Fill, open_together, read_shared
from ucformat.torch.state.local import LocalShard, mesh_of
from ucformat.torch.state.memory import dtype_name, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from os import PathLike

    from ucformat.schema.manifest import LaunchDoc, LineageDoc
    from ucformat.torch.certificate import Certificate
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Rename, Strict

__all__ = ["LoadReport", "load", "load_local", "state_dict"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load; true if all that was asked for is in the state as it was saved.

    It is false if something was missing or did not fit, if something is not as it was saved
    (`problems.inexact`), or if `left` has entries: what the checkpoint has of the entries of the
    state and the state has no place for, unless `leave` named it; or if some tensors are `older`, unless
    `strict_step=False` asked for them.

    `older` are the tensors that are as they were before the checkpoint's step, because a partial save
    took them from an earlier one: by how many steps each is older. `older_asked` says whether they
    were asked for.

    `tolerated` are problems of what need not be complete by `strict`.

    `url`, `id` and `step` are those of the checkpoint, and `tensors` is the number of tensors that
    were filled. `nbytes` are the bytes that this rank read from storage; `bytes_unverified` are
    those of tensors whose checksums were not checked, because the file has none or by `verify`.
    `seconds` is the duration on this rank. `layout` is that of the state: the number of ranks as
    `world`, and the sizes of mesh axes. `lineage` describes how later checkpoints derive from this
    one, the same on all ranks, for `save(lineage=[report.lineage])`: `finetune` if no optimizer
    state was loaded, else `reshard` if it was saved under another layout, else `resume`. `launch`
    is the launch that saved the checkpoint, if it records one. `certificate` is that of the state
    after the load, with `certify=True`.
    """

    url: str
    id: str
    step: int | None
    tensors: int
    nbytes: int
    bytes_unverified: int
    seconds: float
    layout: Mapping[str, Any]
    lineage: LineageDoc
    launch: LaunchDoc | None = None
    problems: Problems = field(default_factory=Problems)
    left: tuple[str, ...] = ()
    tolerated: Problems = field(default_factory=Problems)
    certificate: Certificate | None = None
    older: Mapping[Key, int] = field(default_factory=dict)
    older_asked: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """What the state has and the checkpoint does not."""
        return self.problems.missing + self.tolerated.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        """What the checkpoint has and the state does not."""
        return self.problems.unexpected + self.tolerated.unexpected

    def __bool__(self) -> bool:
        return (
            not self.left
            and (self.older_asked or not self.older)
            and not self.problems.inexact
            and not self.problems.lines(unexpected=False)
        )


def load(
    state: Mapping[str, Any],
    url: str | PathLike[str] | Checkpoint,
    strict: Strict = "report",
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Fill a training state in place from a checkpoint of any layout; all ranks call this together.

    Each rank reads only the boxes that it holds, straight into its tensors; from storage on a
    network, the ranks of a host read once what several of them hold, and share it. Pass the model
    alone to load weights only. All mismatches are found before anything is changed, and raised in
    one error on all ranks.

    Args:
        state: as for `save`; tensors are filled, and plain values in mappings are replaced.
        url: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        strict: `"report"`: missing entries and different shapes or dtypes are errors, and entries
            that only the checkpoint has, and values that are not as they were saved, are listed in
            the report; True: these are errors too; `"weights"`, or a list of names, prefixes of
            names that end at a dot, or globs: of these alone, and of the rest what fits is loaded;
            False: what fits is loaded. The report lists the rest.
        arguments: those of `LoadArguments`, by keyword.

    Raises:
        StateMismatch: the checkpoint does not fit the state; the message lists all mismatches.
        ChecksumError: a chunk does not match its checksum.
        Conflict: a file of the checkpoint has changed since it was opened.
        NotCertified: with `certify=True`, the state is not as it was saved after the load.
        UcformatError: a rank failed or died. Every rank gets the same error.
    """
    check_keywords("load", arguments, LoadArguments)
    timeout = arguments.get("timeout", TIMEOUT)
    with group_for_call("load", url, arguments.get("group"), timeout) as ranks:
        ck = open_together(url, ranks, more=True)
        with ranks.sharing_errors():
            options = LoadOptions.of(strict, arguments)
        report = load_state(state, ck, ranks, options)
        if not options.certify:
            return report
        return replace(report, certificate=certify_state(state, ck, ranks, options).checked())


@gc_paused()
def load_state(
    state: Mapping[str, Any],
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions,
    fill: Fill = read_shared,
) -> LoadReport:
    """Fill a training state, together with the other ranks of a group; see `load`."""
    with ranks.sharing_errors():
        aligned = align(state, ck, ranks, options)
        collected = aligned.collected

    def set_values() -> None:
        aligned.objects.put()
        aligned.groups.put()
        for finish in collected.finish:
            finish()

    targets = LoadTargets(
        aligned.targets,
        aligned.aliases,
        aligned.problems,
        set_values,
        mesh_of(collected.tensors.values()),
        stateful=len(aligned.groups.missing) < sum(map(len, collected.groups.values())),
        optimizer=aligned.has_optimizer,
        asked=aligned.entries,
        fill=fill,
    )
    return load_local(targets, ck, ranks, options, aligned.recorded.names)


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """What one rank asks of a checkpoint.

    Attributes:
        aliases: further names of tied tensors.
        problems: those that were found before.
        then: called when the tensors are filled.
        layout: that of the state, for the report.
        stateful: whether more than parameters is loaded.
        optimizer: whether the state has an optimizer.
        asked: the entries of the saved state that are asked for (None: all).
        fill: fills the tensors, as `read_shared` does.
    """

    tensors: Sequence[LocalShard]
    aliases: Mapping[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    then: Callable[[], None] = lambda: None
    layout: Mapping[str, Any] = field(default_factory=dict)
    stateful: bool = False
    optimizer: bool = False
    asked: Sequence[str] | None = None
    fill: Fill = read_shared


_DEFAULTS = LoadOptions()
_LISTED = 16  # ranks that a load records: each checkpoint of the launch may do so


def load_local(
    targets: LoadTargets,
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions = _DEFAULTS,
    names: Mapping[str, str] | None = None,
) -> LoadReport:
    """Fill the tensors of this rank, of any engine; see `load`."""
    begun, retried = time.monotonic(), int(retries)
    entries = targets.asked
    if options.lossy:
        ck = ck.with_lossy()
    older_asked = ck.metadata.older_allowed or options.strict_step is False
    ck = ck.with_older()  # which the report names
    with ranks.sharing_errors():
        if not isinstance(options.strict, list | tuple):
            check_choice("strict", options.strict, ("report", "weights", True, False))
        verify = check_verify(options.verify)
        reading = ReadOptions(verify, threads=options.threads, progress=options.progress)
        names = names or stored_names(ck, options.rename)
        matched, mismatches, meant = match(
            targets.tensors, targets.aliases, ck, names, cast=options.cast
        )
        check_exact(ck.metadata, (m.stored.key for m in matched), ck.url)
        asked = asked_tensors(
            ck,
            meant,
            targets.tensors,
            optimizer=targets.optimizer,
            inside=lambda key: is_inside(ck, key, entries or ()),
        )
        stateful = targets.stateful or any(m.target.info.state not in PARAMETER for m in matched)
        others = mismatches | targets.problems
        if stateful or targets.optimizer:
            # an optimizer would begin anew where its states are gone
            others |= dropped_problems(ck, (s for s in ck.dropped if s != "weight"))
    own_report = _RankReport(
        ranks.rank,
        others,
        asked,
        targets.layout,
        stateful,
        None if entries is None else tuple(entries),
        shares=options.broadcast_group is not None or ck.store.costs.parallel is not None,
    )
    joined: _RankReport = ranks.combine(own_report, _join, _RankReport)
    lacking_keys = list(compress(ck.tensors, joined.tensors.unexpected(len(ck.tensors))))
    labels = {
        key: label
        for key, label in zip(lacking_keys, labels_of(lacking_keys, names), strict=True)
        if not (options.leave and is_named(ck, key, label, options.leave))
        # which have no place in a state
        and not (options.own_step and is_delta(key.state))
    }
    reachable = set(names.values())  # not what another tensor has been renamed to
    left_labels = [
        label
        for key, label in labels.items()
        if key.name in reachable and (joined.entries is None or is_asked(ck, key, joined.entries))
    ]
    values = joined.problems.unexpected
    mismatches = replace(joined.problems, unexpected=(*labels.values(), *values))
    mismatches, tolerated = mismatches.of(options.strict)
    left = (*left_labels, *values)
    older = {} if options.own_step else _older(ck, set(lacking_keys), joined.tensors)
    if older and (options.strict_step or (options.strict is True and not older_asked)):
        raise _too_old(ck, older)
    refused = replace(mismatches, unexpected=left, inexact=()) if options.complete else mismatches
    raise_for(refused, options.strict, ck.url, complete=options.complete)
    planned = time.monotonic()
    amount, failure, filled = ReadAmount(), None, planned
    broadcast_group = options.broadcast_group
    try:
        share = (
            ranks.on_host(alone=not joined.shares)
            if broadcast_group is None
            else group_of(broadcast_group, ranks.timeout, f"share {ck.url}")
        )
        with consistent(), checking_unchanged(ck.store, LOAD_INVALID, TRACKERS):
            current = [
                m for m in matched if not (options.own_step and m.stored.key in ck.metadata.older)
            ]
            amount = targets.fill(ck, current, share, broadcast_group, reading)
        filled = time.monotonic()
        targets.then()
    # the next collective raises the error of that rank
    except AnotherRankFailed:
        pass
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        failure = error
    done = time.monotonic()
    phases = {"plan": planned - begun, "read": filled - planned, "put": done - filled}
    own = ReaderDoc(
        rank=ranks.rank,
        nbytes=amount.nbytes,
        seconds=done - begun,
        phases=phases,
        retries=int(retries) - retried,
    )
    readers = ranks.combine(failure or (own,), _slowest, tuple[ReaderDoc, ...])
    layout = {"world": ranks.size} | dict(joined.layout)
    lineage = edge_of(ck, layout, continues=joined.stateful, readers=readers)
    launch = None if ck.universal is None else ck.universal.manifest.launch
    return LoadReport(
        ck.url,
        ck.id,
        ck.metadata.step,
        len(matched),
        *amount,
        done - begun,
        layout,
        lineage,
        launch,
        mismatches,
        left,
        tolerated,
        older=older,
        older_asked=older_asked,
    )


def _older(ck: Checkpoint, lacking: Collection[Key], asked: AskedTensors) -> dict[Key, int]:
    """By how many steps each tensor that some rank has a place for is older than the checkpoint."""
    if not ck.metadata.older:
        return {}
    placed = zip(ck.tensors, asked.has_place(len(ck.tensors)), strict=True)
    own = ck.metadata.step or 0
    return {
        key: own - ck.metadata.older[key]
        for key, is_placed in placed
        if is_placed and key in ck.metadata.older and key not in lacking
    }


def _too_old(ck: Checkpoint, older: Mapping[Key, int]) -> StateMismatch:
    return StateMismatch(
        f"{ck.url} is of step {ck.metadata.step}, and {first_names(older, _SUGGESTIONS)} are older, by "
        f"{min(older.values())} to {max(older.values())} steps",
        hint="a partial save took them from earlier checkpoints: strict_step=False loads them, or load "
        "a checkpoint in which everything was saved",
    )


def _slowest(a: tuple[ReaderDoc, ...], b: tuple[ReaderDoc, ...]) -> tuple[ReaderDoc, ...]:
    """The ranks that the report lists: those that took longest, in order."""
    longest = sorted((*a, *b), key=lambda reader: -reader.seconds)[:_LISTED]
    return tuple(sorted(longest, key=lambda reader: reader.rank))


@message
class _RankReport:
    """The mismatches of ranks from `rank` on, the layout, whether optimizer state is loaded, and what is asked for.

    `shares` says whether a rank may read what others want, too.
    """

    rank: int
    problems: Problems
    tensors: AskedTensors
    layout: Mapping[str, Any]
    stateful: bool
    entries: tuple[str, ...] | None
    shares: bool


def _join(a: _RankReport, b: _RankReport) -> _RankReport:
    """The reports of some ranks and of those after them; unexpected is what no rank that asks for it has."""
    if len(a.tensors.asked) != len(b.tensors.asked):
        raise Conflict(
            f"rank {b.rank} has opened a checkpoint with a different number of tensors than rank "
            f"{a.rank}",
            hint="load the same checkpoint on all ranks, and do not replace it meanwhile",
        )
    left = left_by_all((a.problems.unexpected, a.entries), (b.problems.unexpected, b.entries))
    return _RankReport(
        a.rank,
        replace(a.problems | b.problems, unexpected=left),
        a.tensors | b.tensors,
        dict(a.layout) | dict(b.layout),
        a.stateful or b.stateful,
        None
        if a.entries is None or b.entries is None
        else tuple(dict.fromkeys((*a.entries, *b.entries))),
        a.shares or b.shares,
    )


_SUGGESTIONS = 5  # names that an error lists
_MASTER_DTYPES = (torch.float32, torch.float64)


def state_dict(
    ck: str | PathLike[str] | Checkpoint,
    names: str | Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    rename: Rename | None = None,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read the full weights of a checkpoint, without ranks and without optimizer states.

    Tied names share one tensor. Each weight is read straight into its tensor; only weights that are
    cast, or are not on the CPU, pass through two buffers of 32 MiB.

    Args:
        ck: a checkpoint of any kind that `ucformat.open` opens, a reference to one, or an open
            checkpoint.
        names: which weights to read (default: all): a name, a prefix of names that ends at a dot
            (`model.layers.3`), a glob (`*.norm.weight`), or several of these; all refer to names of
            the result.
        dtype: of floating-point weights in the result, cast if necessary; float32 and float64 are
            read from `master` if it is stored (default: as stored in `weight`, or in `master` if
            only that is stored).
        device: of the tensors in the result.
        rename: maps names of the checkpoint to names of the result: a function, or `{regex:
            replacement}`, where the regex matches the whole name.
        threads: how many threads read (default: as many as the storage can use).

    Returns:
        the weights by name, in the order of the checkpoint.

    Raises:
        TensorNotFound: one of `names` matches no weight.
        UsageError: `dtype` is not a floating-point dtype, or `rename` maps two tensors to one name.
        ChecksumError: a chunk does not match its checksum.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(
            f"weights cannot be cast to {dtype}",
            hint="pass a floating-point dtype, such as torch.bfloat16",
        )
    opened = ck if isinstance(ck, Checkpoint) else open_reference(ck)
    patterns = None if names is None else as_strings(names)
    opened.check_readable(PARAMETER, lambda name: patterns is None or fits(name, *patterns))
    chosen = _chosen(_weights(opened, rename), patterns, opened.url)
    matched = {
        stored: _target(opened, stored, dtype, device) for stored in dict.fromkeys(chosen.values())
    }
    read(opened, list(matched.values()), ReadOptions(threads=threads))
    return {name: matched[stored].target.tensor for name, stored in chosen.items()}


def _weights(ck: Checkpoint, rename: Rename | None) -> dict[str, str]:
    """The name under which each weight is stored, by the result's name for it."""
    names = stored_names(ck, rename)
    return {
        new: stored
        for new, stored in names.items()
        if not set(PARAMETER).isdisjoint(ck.states(stored))
    }


def _chosen(weights: Mapping[str, str], patterns: Sequence[str] | None, url: str) -> dict[str, str]:
    """The weights that patterns select, in the order of the checkpoint."""
    if patterns is None:
        return dict(weights)
    keys: set[str] = set()
    for pattern in patterns:
        fitting = {pattern} & weights.keys() or {name for name in weights if fits(name, pattern)}
        if not fitting:
            raise TensorNotFound(
                f"{url} has no weight {pattern!r}", hint=_nearest(pattern, weights)
            )
        keys |= fitting
    return {name: stored for name, stored in weights.items() if name in keys}


def _nearest(pattern: str, weights: Iterable[str]) -> str:
    from difflib import get_close_matches

    names = list(weights)
    near = get_close_matches(pattern, names, _SUGGESTIONS, 0.5) or names[:_SUGGESTIONS]
    return (
        f"there are, among others: {', '.join(near)}"
        if near
        else "the checkpoint contains no weights"
    )


def _target(
    ck: Checkpoint, name: str, dtype: torch.dtype | None, device: str | torch.device
) -> Matched:
    """An empty tensor for a weight, and the stored tensor that fills it."""
    by_state = {i.state: i for i in parameter_of(name, ck)}
    stored = by_state[
        "master" if dtype in _MASTER_DTYPES and "master" in by_state else next(iter(by_state))
    ]
    as_stored = torch_dtype(stored.dtype)
    target_dtype = as_stored if dtype is None or not as_stored.is_floating_point else dtype
    info = TensorInfo(name, "weight", dtype_name(target_dtype), stored.shape)
    tensor = torch.empty(stored.shape, dtype=target_dtype, device=device)
    whole = Piece(Box.whole(stored.shape), 0, row_major(stored.shape))
    return Matched(LocalShard(info, (whole,) if stored.size else (), tensor), stored)
