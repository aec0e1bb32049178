"""`load` fills a training state under any layout; `state_dict` reads plain weights for evaluation and serving."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from ucformat.checkpoint import Checkpoint
from ucformat.errors import TensorNotFound, UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Key, Piece, TensorInfo
from ucformat.reading.rank import LOAD_INVALID
from ucformat.reading.readable import TRACKERS
from ucformat.references import open_reference
from ucformat.sources.dcp.names import dotted
from ucformat.storage.watched import check_unchanged
from ucformat.torch.comm.group import TIMEOUT, group_for_call, group_of
from ucformat.torch.comm.wire import message
from ucformat.torch.loading.match import PARAMETER, Matched, Problems, edge_of, match, raise_for, stored_names
from ucformat.torch.loading.read import ReadAmount, read, read_and_broadcast
from ucformat.torch.loading.values import SavedState, fit_groups, fit_objects, take_values
from ucformat.torch.state.collect import collect
from ucformat.torch.state.local import LocalShard, locals_of, mesh_of, without_ties
from ucformat.torch.state.memory import check_fillable, dtype_name, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.reading.plan import Verify
    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.match import Rename, Strict

__all__ = ["LoadReport", "load", "load_local", "state_dict"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: bytes that this rank read from storage, seconds, and what did not fit.

    `bytes_unverified` are those of them in tensors for which no checksum was checked: the file has none, or `verify`
    did not ask for it.
    `layout` is the layout of the state that was filled: the number of ranks as `world`, and the sizes of mesh axes.
    `lineage` is what the checkpoint is to those that are saved from now on, for `save(lineage=[report.lineage])`, the
    same on all ranks: `finetune` where no optimizer state was loaded, else `reshard` where it was saved under another
    layout, else `resume`.
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
    problems: Problems = field(default_factory=Problems)

    @property
    def missing(self) -> tuple[str, ...]:
        """What was wanted, and is not in the checkpoint."""
        return self.problems.missing

    @property
    def unexpected(self) -> tuple[str, ...]:
        """What is in the checkpoint, and was not wanted."""
        return self.problems.unexpected

    def __bool__(self) -> bool:
        return not self.problems.lines(unexpected=False)


def load(
    state: Mapping[str, Any],
    url: str | PathLike[str] | Checkpoint,
    strict: Strict = "report",
    *,
    rename: Rename | None = None,
    cast: bool = False,
    trust: bool = False,
    verify: Verify = "whole",
    threads: int | None = None,
    group: dist.ProcessGroup | None = None,
    broadcast_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    progress: Callable[[int], None] | None = None,
) -> LoadReport:
    """Fill a training state in place from any checkpoint; all ranks call it together.

    Each rank reads the boxes that it holds, and nothing else, straight into its tensors. Give the model alone to load
    weights alone. Whatever does not fit is found before anything is changed, and told at once, on all ranks.

    Args:
        state: as given to `save`; plain values in mappings are replaced.
        url: a checkpoint of any kind that `ucformat.open` opens, or a reference to one, or one that is open.
        strict: "report": what is missing or of another shape or dtype is an error that lists all of it, and what is
            only in the checkpoint is in the report; True: that is an error too; False: what fits is loaded, and the
            report says what did not.
        rename: makes the state's name of the checkpoint's: a function, or `{regex of the whole name: replacement}`.
        cast: cast tensors to the dtypes of the state.
        trust: open pickled objects, which may run code.
        verify: which checksums to check. `whole`: of blocks of packed files, all of them, and of chunks of arrays that
            are wanted whole; `always`: of all, reading whole chunks for it; `never`.
        threads: how many read on this rank.
        group: the ranks that take part (default: all). Threads that load one checkpoint at once need one each.
        broadcast_group: ranks that hold the same (data-parallel replicas): each byte is read by one of them, and handed
            on over this group, which must carry tensors of the state's devices.
        timeout: seconds after which an unresponsive rank is considered dead.
        progress: called with the bytes of each read that is done.

    Raises:
        StateMismatch: the checkpoint does not fit the state; all that does not is listed.
        ChecksumError: a chunk does not match its checksum.
        Conflict: a file of the checkpoint was changed since it was opened.
        UnsafeError: an object is a pickle, and `trust` is false.
    """
    with group_for_call(group, timeout, "load", url.url if isinstance(url, Checkpoint) else url) as ranks:
        with ranks.sharing_errors():
            ck = url if isinstance(url, Checkpoint) else open_reference(url)
            found = collect(state)
            for path, tensor in found.tensors.items():
                check_fillable(str(found.keys[path]), tensor)
            names = stored_names(ck, rename)
            recorded = SavedState(ck, names)
            found.keys |= {p: key for p in found.tensors if (key := recorded.tensors.get(dotted(p))) is not None}
            take_values(found, recorded)
            aliases, targets = without_ties(locals_of(found))
            objects, put_objects = fit_objects(found, recorded, ranks, trust=trust, cast=cast)
            groups, put_groups = fit_groups(found, recorded)

        def put() -> None:
            put_objects()
            put_groups()
            for finish in found.finish:
                finish()

        return load_local(
            targets,
            ck,
            strict=strict,
            aliases=aliases,
            names=names,
            cast=cast,
            verify=verify,
            threads=threads,
            group=ranks,
            broadcast_group=broadcast_group,
            progress=progress,
            problems=objects | groups,
            then=put,
            layout=mesh_of(list(found.tensors.values())),
            stateful=len(groups.missing) < sum(map(len, found.groups.values())),
        )


def load_local(
    targets: Sequence[LocalShard],
    ck: Checkpoint,
    *,
    strict: Strict = "report",
    aliases: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    cast: bool = False,
    verify: Verify = "whole",
    threads: int | None = None,
    group: Group | None = None,
    broadcast_group: dist.ProcessGroup | None = None,
    progress: Callable[[int], None] | None = None,
    problems: Problems | None = None,
    then: Callable[[], None] = lambda: None,
    layout: Mapping[str, Any] | None = None,
    stateful: bool = False,
) -> LoadReport:
    """Fill what this rank holds, whatever engine it belongs to; see `load`.

    `names` are those of `stored_names`, and `problems` those that were found besides tensors; `then` is called when all
    tensors are filled. `layout` is what a save would note of this rank, and `stateful` says that hyper-parameters of an
    optimizer are loaded.
    """
    begun = time.monotonic()
    ranks = group or group_of()
    with ranks.sharing_errors():
        matched, found = match(targets, aliases or {}, ck, names or stored_names(ck, None), cast=cast)
        stateful = stateful or any(m.target.info.state not in PARAMETER for m in matched)
    told: list[_RankReport] = ranks.all_gather(
        _RankReport(found | (problems or Problems()), layout or {}, stateful), _RankReport
    )
    found = _join_problems([t.problems for t in told])
    raise_for(found, strict, ck.url)
    amount, failure = ReadAmount(), None
    try:
        amount = _read(ck, matched, verify, threads, broadcast_group, ranks.timeout, progress)
        then()
    except Exception as error:  # noqa: BLE001 - told to all ranks
        failure = error
    ranks.all_gather(failure, None)
    now = {"world": ranks.size} | {k: v for t in told for k, v in t.layout.items()}
    lineage = edge_of(ck, now, continues=any(t.stateful for t in told))
    seconds = time.monotonic() - begun
    return LoadReport(ck.url, ck.id, ck.metadata.step, len(matched), *amount, seconds, now, lineage, found)


@message
class _RankReport:
    """What does not fit on a rank, its layout, and whether it loads hyper-parameters of an optimizer."""

    problems: Problems
    layout: Mapping[str, Any]
    stateful: bool


def _read(
    ck: Checkpoint,
    matched: Sequence[Matched],
    verify: Verify,
    threads: int | None,
    broadcast_group: dist.ProcessGroup | None,
    timeout: float,
    progress: Callable[[int], None] | None,
) -> ReadAmount:
    if broadcast_group is None:
        amount = read(ck, matched, verify, threads, progress)
    else:
        amount = read_and_broadcast(ck, matched, broadcast_group, timeout, verify, threads, progress)
    check_unchanged(ck.store, LOAD_INVALID, TRACKERS)
    return amount


def _join_problems(everybody: Sequence[Problems]) -> Problems:
    """The problems of all ranks; what is unexpected is what no rank expects."""
    out = Problems()
    for found in everybody:
        out |= found
    common = [u for u in out.unexpected if all(u in found.unexpected for found in everybody)]
    return Problems(out.missing, tuple(common), out.shapes, out.dtypes, out.others)


_FEW = 5  # names that an error offers
_PRECISE = (torch.float32, torch.float64)


def state_dict(
    ck: str | PathLike[str] | Checkpoint,
    names: str | Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    rename: Rename | None = None,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name, whole, each read straight into its tensor; no optimizer state is read.

    Tied names share one tensor. On the CPU and without a cast nothing but the result is allocated; what is cast, or
    goes to another device, passes through two buffers of 32 MiB.

    Args:
        ck: a checkpoint of any kind that `ucformat.open` opens, or a reference to one, or one that is open.
        names: which to read (default: all): a name, the beginning of names up to a dot (`model.layers.3`), a glob
            (`*.norm.weight`), or several of these; they are the names of the result.
        dtype: None: as stored in the state `weight`, or `master` if there is only that. Else floating-point tensors
            are of this dtype, cast where they have another: float32 (and 64) is made of `master` where there is one.
        device: where the tensors are to be.
        rename: makes the result's names of the checkpoint's: a function, or `{regex of the whole name: replacement}`.
        threads: how many read.

    Raises:
        TensorNotFound: one of `names` fits no weight.
        UsageError: `dtype` is no floating-point dtype, or `rename` makes one name of two tensors.
        ChecksumError: a chunk does not match its checksum.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"weights cannot be cast to {dtype}", hint="give a floating-point dtype, as torch.bfloat16")
    opened = ck if isinstance(ck, Checkpoint) else open_reference(ck)
    wanted = _chosen(_weights(opened, rename), names, opened.url)
    matched = {stored: _target(opened, stored, dtype, device) for stored in dict.fromkeys(wanted.values())}
    read(opened, list(matched.values()), threads=threads)
    return {name: matched[stored].target.tensor for name, stored in wanted.items()}


def _weights(ck: Checkpoint, rename: Rename | None) -> dict[str, str]:
    """The name under which each weight is stored, by the result's name for it."""
    names = stored_names(ck, rename)
    return {new: stored for new, stored in names.items() if not {"weight", "master"}.isdisjoint(ck.states(stored))}


def _chosen(weights: Mapping[str, str], names: str | Iterable[str] | None, url: str) -> dict[str, str]:
    """Those that are asked for, in the order of the checkpoint."""
    if names is None:
        return dict(weights)
    patterns = [names] if isinstance(names, str) else list(names)
    found: set[str] = set()
    for pattern in patterns:
        fitting = {pattern} & weights.keys() or {name for name in weights if _fits(name, pattern)}
        if not fitting:
            raise TensorNotFound(f"{url} has no weight {pattern!r}", hint=_nearest(pattern, weights))
        found |= fitting
    return {name: stored for name, stored in weights.items() if name in found}


def _fits(name: str, pattern: str) -> bool:
    return name.startswith(pattern.rstrip(".") + ".") or fnmatchcase(name, pattern)


def _nearest(pattern: str, weights: Iterable[str]) -> str:
    from difflib import get_close_matches

    known = list(weights)
    near = get_close_matches(pattern, known, _FEW, 0.5) or known[:_FEW]
    return f"there are, among others: {', '.join(near)}" if near else "the checkpoint holds no weights at all"


def _target(ck: Checkpoint, name: str, dtype: torch.dtype | None, device: str | torch.device) -> Matched:
    """An empty tensor for a weight, and the stored tensor that fills it."""
    have = {s: ck.tensors[Key(name, s)] for s in ("weight", "master") if s in ck.states(name)}
    stored = have["master" if dtype in _PRECISE and "master" in have else next(iter(have))]
    as_stored = torch_dtype(stored.dtype)
    wanted = as_stored if dtype is None or not as_stored.is_floating_point else dtype
    info = TensorInfo(name, "weight", dtype_name(wanted), stored.shape)
    tensor = torch.empty(stored.shape, dtype=wanted, device=device)
    whole = Piece(Box.whole(stored.shape), 0, row_major(stored.shape))
    return Matched(LocalShard(info, (whole,) if stored.size else (), tensor), stored)
