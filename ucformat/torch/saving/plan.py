"""The plan of a save on each rank, and what it keeps so that the next one tells almost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from ucformat.exporters.base import weights_of
from ucformat.format.chunking import Grid, Tiling
from ucformat.format.commit import begin, discard
from ucformat.format.described import ALIGNMENT
from ucformat.format.digest import document_digest
from ucformat.geometry.fingerprint import NO_ELEMENTS, added, text_of
from ucformat.geometry.flat_buffer import align_up
from ucformat.jobs.increments import NO_REFERENCES, Base, References
from ucformat.storage.concurrency import gc_paused
from ucformat.torch.comm.merging import merged
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.agree import Coordinator, agree, digest_of, rows_of, without
from ucformat.torch.saving.experts import left_tensors
from ucformat.torch.saving.in_place import WeightPlanner, begin_weights
from ucformat.torch.saving.shards import OwnPart, plan_shards
from ucformat.torch.saving.statement import Exceptions, StatedFacts, Statement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.format.arrays import StoredArray
    from ucformat.format.commit import Attempt
    from ucformat.schema.tensors import TensorDoc
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.experts import PartialSave
    from ucformat.torch.saving.in_place import InPlace, WeightFilesPlan
    from ucformat.torch.saving.options import SaveOptions
    from ucformat.torch.saving.shards import GlobalPlan
    from ucformat.torch.saving.statement import ListedTensor, PieceFingerprints, RankState


class Begun(NamedTuple):
    """A save as rank 0 has begun it."""

    attempt: Attempt
    plan: GlobalPlan
    arrays: Sequence[StoredArray]
    references: References = NO_REFERENCES


class RankPlan(NamedTuple):
    """The plan of a save as one rank knows it.

    Attributes:
        attempt: its id.
        statement: what the rank has stated.
        arrays: of which it writes or sends something, by the number of its item.
        objects: the names of the objects that this rank provides.
        exceptions: those of the plan of all ranks.
        weights: of the safetensors form.
        begun: on rank 0, the plan of all ranks.
        referenced: bytes of the tensors of a base, which no rank writes.
    """

    attempt: str
    statement: Statement
    part: OwnPart
    arrays: dict[int, StoredArray]
    objects: frozenset[str]
    exceptions: Exceptions
    weights: InPlace | None
    begun: Begun | None
    referenced: int = 0


@message
class _Referenced:
    """The tensors that a base has, as for `Exceptions.without`, and their bytes."""

    rows: Mapping[bytes, bytes] = field(default_factory=dict)
    nbytes: int = 0


class SavePlanner:
    """Plans saves; ranks agree in one small collective if nothing but values has changed."""

    def __init__(self) -> None:
        self._statement: tuple[SaveOptions, Statement] | None = None
        # of the last save, and their digest; 0: there was none
        self._exceptions = (bytes(16), Exceptions())
        self._part: tuple[Statement, bytes, Mapping[bytes, bytes], OwnPart] | None = None
        self._weights = WeightPlanner()
        self._coordinator = Coordinator()  # used on rank 0

    @property
    def listed(self) -> tuple[ListedTensor, ...]:
        """The tensors of the last save that some rank could not describe."""
        return self._exceptions[1].listed

    @property
    def plan(self) -> GlobalPlan | None:
        """On rank 0, the last plan of all ranks."""
        return self._coordinator.plan

    def state(self, rank: int, options: SaveOptions, state: RankState) -> Statement:
        """What a rank states."""
        statement = self._stated(rank, options, state)
        statement.tell({k: document_digest(v) for k, v in state.objects.items()})
        return statement

    def _stated(self, rank: int, options: SaveOptions, state: RankState) -> Statement:
        """What a rank states of its tensors."""
        facts = StatedFacts(state.aliases)
        if self._statement is not None:
            last_options, last = self._statement
            if last_options.stored_like(options) and last.is_of(
                state.items, state.distributions, facts
            ):
                return last
        in_files = options.form == "safetensors"
        weights = weights_of(item.info for item in state.items) if in_files else ()
        keys = frozenset(info.key for info in weights)
        statement = Statement(rank, state.items, state.distributions, facts, keys)
        self._statement = (options, statement)
        return statement

    def agree(
        self,
        group: Group,
        options: SaveOptions,
        store: Store,
        statement: Statement,
        sums: PieceFingerprints,
        base: Base | None,
        partial: PartialSave | None = None,
    ) -> RankPlan:
        """Agree on who writes what, and begin the attempt; all ranks call this together.

        Args:
            sums: of the items of this rank.
            base: on rank 0, that of the checkpoint.
            partial: what a partial save leaves in the base.

        Raises:
            Conflict: a checkpoint exists, and is not to be replaced or is protected.
        """
        begun: Begun | None = None
        needs = () if base is None else base.urls

        def start(plan: GlobalPlan) -> tuple[str, WeightFilesPlan | None]:
            nonlocal begun
            options.arrays(plan.arrays.infos, "")  # raises if a tensor cannot be an array
            attempt = begin(store, {"save": uuid4().hex}, overwrite=options.overwrite, needs=needs)
            try:
                begun = Begun(attempt, plan, options.arrays(plan.arrays.infos, attempt.id))
                in_files = options.form == "safetensors"
                return attempt.id, begin_weights(store, attempt.id, plan) if in_files else None
            except BaseException:
                discard(store, attempt.id)
                raise

        def compare(contents: Mapping[bytes, bytes]) -> _Referenced:
            nonlocal begun
            if begun is None or base is None:
                return _Referenced()
            try:
                left = left_tensors(base, partial)
                # of a window, each checkpoint has to store what its place tells
                compared = {} if partial is not None and partial.window is not None else contents
                chained = partial is not None and partial.deltas is not None
                references = _references(
                    *(begun.plan, base, compared, left),
                    patch=options.compares_tiles,
                    chained=chained,
                )
                references.kept(patched=False).protect(str(begun.attempt.keeps))
                rows = rows_of(begun.plan, references.keys)
                plan = without(begun.plan, rows)
                arrays = options.arrays(plan.arrays.infos, begun.attempt.id)
            except BaseException:
                discard(store, begun.attempt.id)
                raise
            begun = Begun(begun.attempt, plan, arrays, references)
            return _Referenced(rows, sum(doc.nbytes for doc in references.tensors))

        if not group.rank:
            self._coordinator.begin(statement, options, start)
        # a single rank has no replica to compare with
        compared = sums if options.replicas == "equal" and group.size > 1 else None
        answer = agree(group, statement, options, compared, self._exceptions, self._coordinator)
        if answer.exceptions is not None:
            self._exceptions = (digest_of(answer.exceptions), answer.exceptions)
        digest, exceptions = self._exceptions
        referenced = _Referenced()
        if options.base is not None:
            referenced = group.combine(
                statement.sums(exceptions, ("array", "packed"), sums.of_piece),
                lambda a, b: merged(a, b, added),
                Mapping[bytes, bytes],
                compare,
                _Referenced,
            )
        with group.sharing_errors():
            if self._part is None or self._part[:3] != (statement, digest, referenced.rows):
                written = exceptions.without(referenced.rows)
                part = own_part(statement, written, options)
                self._part = (statement, digest, referenced.rows, part)
            part, weights = self._part[3], None
            if answer.weights is not None:
                listed = {t.info.key: boxes for t, boxes in exceptions.box_lists("weight")}
                weights = self._weights.plan(
                    group, statement.items, part.weights, answer.weights, listed
                )
            used = {f.tensor for m in part.messages for f in m.fragments}
            used |= {task.tensor for batch in part.batches for task in batch}
            infos = {n: statement.items[n].info for n in sorted(used)}
            folders = {i.key: exceptions.folder(i.key) for i in infos.values()}
            arrays = options.arrays([*infos.values()], answer.attempt, folders)
            objects = frozenset(n for n, rank in answer.providers.items() if rank == group.rank)
        by_item = dict(zip(infos, arrays, strict=True))
        return RankPlan(
            *(answer.attempt, statement, part, by_item, objects, exceptions, weights, begun),
            referenced.nbytes,
        )


def _references(
    plan: GlobalPlan,
    base: Base,
    contents: Mapping[bytes, bytes],
    left: Sequence[TensorDoc] = (),
    *,
    patch: bool,
    chained: bool,
) -> References:
    """The tensors that a base has, by the sums of what the ranks hold of each description.

    Args:
        left: tensors of the base that stand for what no rank saves.
        patch: whether tiles of others may be patches of those of the base, which is number 0 then.
        chained: whether the base is needed even if nothing of it is referenced.
    """
    sums = plan.sums(contents)
    matches = (
        base.match(info, text_of(sums.get(info.key, NO_ELEMENTS)))
        for info in (*plan.arrays.infos, *plan.packed.infos)
    )
    equal = (doc for doc in matches if doc is not None)
    return base.referenced(equal, patch=patch, left=left, chained=chained)


@gc_paused()
def own_part(statement: Statement, exceptions: Exceptions, options: SaveOptions) -> OwnPart:
    """Return the part of one rank, which follows from what it states."""
    pieces, listed_at = statement.pieces(exceptions, "packed"), 0
    described = len(pieces) - len(statement.listed_pieces(exceptions, "packed"))
    for item, piece in pieces[:described] if exceptions.listed else ():
        info, box = statement.items[item].info, statement.items[item].boxes[piece]
        tiling = Tiling.of(info.shape, info.itemsize)
        # as `write_packed` lays the file out
        listed_at = align_up(listed_at, ALIGNMENT) + tiling.nbytes(box)
    batches, messages = plan_shards(
        statement,
        exceptions,
        lambda i: Grid.of(i.shape, i.itemsize, options.chunk_bytes, options.shard_bytes),
    )
    weights = tuple(statement.pieces(exceptions, "weight"))
    return OwnPart(tuple(pieces), listed_at, batches, messages, weights)
