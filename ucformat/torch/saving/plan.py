"""Planning of a save by all ranks together: which rank writes what, cached from step to step, and the attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from ucformat.format.chunking import Grid, Tiling
from ucformat.format.commit import begin
from ucformat.format.described import Described, DescribedRow, file_order
from ucformat.format.digest import document_digest
from ucformat.reading.garbage import gc_paused
from ucformat.torch.saving.agree import agree, checksums, manifest_paths, paths_by_key
from ucformat.torch.saving.assignment import GlobalPlan, WriteItem, WritePlan, table_of
from ucformat.torch.saving.listed import plan_listed
from ucformat.torch.saving.shards import plan_shards
from ucformat.torch.saving.statement import Exceptions, Facts, Statement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from ucformat.format.arrays import Array
    from ucformat.format.commit import Attempt
    from ucformat.geometry.distribution import Distribution
    from ucformat.geometry.tensor import Key
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.agree import Joined
    from ucformat.torch.saving.options import Form, SaveOptions
    from ucformat.torch.state.elements import Elements


class Held(NamedTuple):
    """What one rank saves.

    Attributes:
        distributions: of each item; None if it is not known.
        elements: returns the array of an (item, piece).
    """

    items: Sequence[WriteItem]
    distributions: Sequence[Distribution | None]
    aliases: Mapping[str, str]
    objects: Mapping[str, Any]
    elements: Callable[[int, int], Elements]

    def part(self, numbers: Sequence[int], objects: Mapping[str, Any]) -> Held:
        """Return what the rank saves of some items."""
        return Held(
            [self.items[n] for n in numbers],
            [self.distributions[n] for n in numbers],
            self.aliases,
            objects,
            lambda item, piece: self.elements(numbers[item], piece),
        )


class Assignment(NamedTuple):
    """This rank's assignment: its part of the plan, the attempt, and the names of the objects that it provides."""

    attempt: str
    part: WritePlan
    object_names: frozenset[str]

    def arrays(self, options: SaveOptions) -> list[Array]:
        """Return the arrays of the Zarr form to which this rank's part refers."""
        return options.arrays(self.part.infos, self.attempt, self.part.folders)


def plan_save(
    group: Group, options: SaveOptions, store: Store, held: Held, attempt: Attempt | None = None
) -> tuple[Assignment, Attempt | None, GlobalPlan | None]:
    """Plan a save in one small collective, if nothing but values has changed since the last one.

    All ranks call this together. They describe their tensors, and list the boxes of those that some
    rank cannot describe.

    Args:
        attempt: on rank 0, the attempt that this is a part of (None: one is begun).

    Returns:
        the assignment of this rank; on rank 0 also the attempt and the plan of all ranks.

    Raises:
        Conflict: a checkpoint exists, and is not to be replaced or is protected.
    """

    def start() -> Attempt:
        return attempt or begin(store, {"save": uuid4().hex}, overwrite=options.overwrite)

    with group.sharing_errors():
        sums = checksums(held.items, held.elements)
        digests = {k: document_digest(v) for k, v in held.objects.items()}
    described = _plan_described(group, options, start, held, sums, digests)
    if described is None:
        dealt = plan_listed(group, options, start, held.items, sums, held.aliases, digests)
        return Assignment(dealt.attempt, dealt.part, dealt.object_names), dealt.begun, dealt.plan
    listed, first = described.statement.listed, described.assignment
    if not listed:
        return first, described.attempt, described.plan
    numbers = [n for n, item in enumerate(held.items) if item.info.key in listed]
    items, begin_at = [held.items[n] for n in numbers], first.part.nbytes(held.items)
    dealt = plan_listed(
        group,
        options,
        start,
        items,
        [sums[n] for n in numbers],
        held.aliases,
        {},
        begin_at,
        described.plan,
    )
    joint: tuple[WritePlan, WritePlan, WritePlan] | None = group.cache.get("joint part")
    if joint is None or joint[0] is not first.part or joint[1] is not dealt.part:
        both = first.part.followed_by(dealt.part, numbers, group.rank, described.exceptions.folder)
        joint = group.cache["joint part"] = (first.part, dealt.part, both)
    return Assignment(dealt.attempt, joint[2], first.object_names), dealt.begun, dealt.plan


class _Described(NamedTuple):
    """What follows from descriptions, without an attempt if boxes of other tensors are listed."""

    statement: Statement
    exceptions: Exceptions
    assignment: Assignment
    attempt: Attempt | None
    plan: GlobalPlan | None


def _plan_described(
    group: Group,
    options: SaveOptions,
    start: Callable[[], Attempt],
    held: Held,
    sums: Sequence[NDArray[np.uint32]],
    digests: Mapping[str, str],
) -> _Described | None:
    """The plan of the tensors that all ranks can describe; None if boxes of all tensors have to be listed."""
    arrays, grid = (
        options.form != "packed",
        (options.form, options.chunk_bytes, options.shard_bytes),
    )
    listed: frozenset[Key] = group.cache.get(
        "listed", frozenset()
    )  # equal on all ranks, or the options are not
    attempt: Attempt | None = None

    def begun() -> str:
        nonlocal attempt
        if not listed:
            attempt = start()
        return attempt.id if attempt else ""

    while True:
        with group.sharing_errors():
            facts = Facts(held.aliases, digests)
            stated: tuple[Any, Statement] | None = group.cache.get("statement")
            if (
                stated is None
                or stated[0] != grid
                or not stated[1].is_of(held.items, held.distributions, facts, listed)
            ):
                if arrays:  # which raises if a tensor cannot be an array
                    options.arrays([i.info for i in held.items], "")
                made = Statement(group.rank, held.items, held.distributions, facts, listed)
                stated = group.cache["statement"] = (grid, made)
        statement = stated[1]
        equal = options.replicas == "equal"
        answer, joined = agree(
            group, statement, str(options), sums, begun, equal=equal, arrays=arrays
        )
        if answer.attempt is not None:
            break
        listed = group.cache["listed"] = frozenset(answer.listed)
        if not listed:
            return None
    objects = frozenset(name for name, rank in answer.providers.items() if rank == group.rank)
    exceptions = answer.exceptions or Exceptions()
    part: tuple[Statement, Exceptions, WritePlan] | None = group.cache.get("described part")
    if part is None or part[0] is not statement or part[1] != exceptions:
        part = group.cache["described part"] = (
            statement,
            exceptions,
            write_plan(statement, exceptions, options),
        )
    assignment = Assignment(answer.attempt, part[2], objects)
    if joined is None:
        return _Described(statement, exceptions, assignment, attempt, None)
    plan: tuple[Joined, str, GlobalPlan] | None = group.cache.get("described plan")
    if plan is None or plan[0] is not joined or plan[1] != options.form:
        plan = group.cache["described plan"] = (
            joined,
            options.form,
            described_plan(joined, options.form),
        )
    return _Described(statement, exceptions, assignment, attempt, plan[2])


@gc_paused()
def write_plan(statement: Statement, exceptions: Exceptions, options: SaveOptions) -> WritePlan:
    """Return the part of one rank, which follows from what it states."""
    if options.form == "packed":
        return WritePlan(pieces=tuple(statement.pieces(exceptions)))
    infos = tuple(item.info for item in statement.items)
    folders = {i.key: exceptions.folder(i.key) for i in infos}
    grids = [Grid.of(i.shape, i.itemsize, options.chunk_bytes, options.shard_bytes) for i in infos]
    batches, messages = plan_shards(statement, exceptions, grids)
    return WritePlan(infos, batches=batches, messages=messages, folders=folders)


@gc_paused()
def described_plan(joined: Joined, form: Form) -> GlobalPlan:
    """Return the plan of described tensors, in the order of rank 0, then of further ranks."""
    infos = tuple(w.row.info for _, w in sorted(joined.rows, key=lambda r: r[0]))
    paths = manifest_paths(infos, paths_by_key(((rank, d.rows) for rank, d in joined.stated), {}))
    if form != "packed":
        return GlobalPlan(infos, paths)
    number = {info.key: n for n, info in enumerate(infos)}
    written = sorted(
        (w for _, w in joined.rows), key=lambda w: file_order(w.row.info, w.distribution)
    )
    rows = [
        DescribedRow(number[i.key], w.distribution, w.writer, Tiling.of(i.shape, i.itemsize).tile)
        for w, i in ((w, w.row.info) for w in written)
    ]
    described = Described(rows, infos, "") if rows else None
    return GlobalPlan(infos, paths, described=described, table=table_of(infos, paths))
