"""Partial saves: of what is not chosen nothing is written, and the base's tensors stand for it.

All ranks read the manifest of the base, so each of them finds the same choice by itself. What only
ranks together know, which of the base's tensors the program still has, is a bit for each of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ucformat.errors import Conflict, UcformatError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.references import open_reference
from ucformat.storage.url import open_store
from ucformat.torch.comm.merging import either
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.base import newest_beside, open_base
from ucformat.torch.saving.deltas import Deltas, DeltaSelection
from ucformat.torch.saving.experts import (
    ExpertNames,
    Experts,
    HeldByRanks,
    Left,
    PartialSave,
    RecordBefore,
    Selection,
    bits_of_docs,
    check_state,
    counts_of,
    fits,
    record_of,
)
from ucformat.torch.saving.window import Groups, Window, WindowSelection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.jobs.increments import Base
    from ucformat.schema.manifest import Manifest
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.manifest import SaveMetadata
    from ucformat.torch.saving.options import SaveArguments, SaveOptions
    from ucformat.torch.state.deltas import DeltaBatch
    from ucformat.torch.state.local import LocalState


_log = logging.getLogger("ucformat")


@message
class _Asked:
    """What ranks ask for, which must be the same: rank and text of the first, and of one that differs."""

    rank: int
    text: str
    other: int = -1
    other_text: str = ""


def _compare(a: _Asked, b: _Asked) -> _Asked:
    if a.other < 0 and b.text != a.text:
        return replace(a, other=b.rank, other_text=b.text)
    return a if a.other >= 0 or b.other < 0 else replace(a, other=b.other, other_text=b.other_text)


@message
class _Place:
    """The base, by its url and id, and whether the training that saves goes on from it as it is in memory."""

    url: str = ""
    id: str = ""
    goes_on: bool = False
    before: RecordBefore = RecordBefore()


@dataclass(frozen=True)
class _Wanted:
    """What is to be saved in part, as the arguments of a save have it."""

    partial: Experts | Window | Deltas
    step: int
    counts: Mapping[str, Sequence[int]]
    names: ExpertNames | Groups | None
    batch: DeltaBatch | None

    @property
    def is_whole(self) -> bool:
        """Whether everything is saved: no deltas are there."""
        return isinstance(self.partial, Deltas) and self.batch is None


def leave_parts(
    local: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata,
    arguments: SaveArguments,
    ranks: Group,
) -> tuple[LocalState, SaveOptions, SaveMetadata]:
    """Leave out the tensors that are not saved, and add deltas; all ranks call this before anything is copied.

    Raises:
        UsageError: the save has no step, a later one than the base's, or no counts where the choice needs them.
    """
    with ranks.sharing_errors():
        wanted = _wanted(local, options, metadata, arguments)
    if wanted is None:
        return local, options, metadata
    place = _agree_on_place(wanted, options, metadata, ranks)
    if not place.url:
        record = None
        if isinstance(wanted.names, ExpertNames):
            record = record_of(Selection(wanted.names, None), wanted.counts, place.before)
        options = replace(options, base=None, patch=False)
        return local, options, replace(metadata, partial=PartialSave(record=record))
    from ucformat.torch.loading.share import open_together

    base = open_together(place.url, ranks, more=True)
    with ranks.sharing_errors():
        assert base.universal is not None  # noqa: S101 - rank 0 has opened it as a base
        if base.universal.manifest.id != place.id:
            raise Conflict(f"{place.url} was replaced while a part of it was chosen")
        base_manifest = base.universal.manifest
        held_by, leave = _choice(wanted, base_manifest, place, local)
        own = held_by(local)

    def both(a: HeldByRanks, b: HeldByRanks) -> HeldByRanks:
        return HeldByRanks(either(a.tensors, b.tensors), either(a.others, b.others))

    held: HeldByRanks = ranks.combine(own, both, HeldByRanks, lambda every: every, HeldByRanks)
    with ranks.sharing_errors():
        left = leave(held)
        keys = {Key(doc.name, doc.state) for doc in left.tensors}
        kept = tuple(t for t in local.tensors if t.key not in keys)
        taken = PartialSave(
            *(base_manifest.id, base_manifest.attempt, bits_of_docs(base_manifest, left.tensors)),
            *(left.record, left.window, left.deltas),
        )
    return (
        replace(local, tensors=(*kept, *left.added)),
        replace(options, base=place.url),
        replace(metadata, partial=taken),
    )


def _wanted(
    local: LocalState, options: SaveOptions, metadata: SaveMetadata, arguments: SaveArguments
) -> _Wanted | None:
    """What is to be saved in part; None if that is nothing."""
    partial, step, deltas = options.partial, metadata.step, arguments.get("deltas")
    for name, kind in (("tokens", Experts), ("deltas", Deltas)):
        if arguments.get(name) is not None and not isinstance(partial, kind):
            raise UsageError(
                f"{name} are given without partial={kind.__name__}(…), which uses them",
                hint=f"partial={kind.__name__}(…), or leave {name} out",
            )
    if partial is None:
        return None
    counts = counts_of(partial, arguments.get("tokens")) if isinstance(partial, Experts) else {}
    names: ExpertNames | Groups | None = None
    batch: DeltaBatch | None = None
    if not isinstance(partial, Deltas):
        names = Groups(partial) if isinstance(partial, Window) else ExpertNames(partial.pattern)
        check_state(local, names)
    elif deltas is not None:
        from ucformat.torch.state.deltas import stack_deltas  # not above: the writer has no torch

        batch = stack_deltas(deltas, step)
    if step is None:
        raise UsageError(
            "a partial save records of which step each tensor is, and has no step",
            hint="step=, the number of the training step",
        )
    return _Wanted(partial, step, counts, names, batch)


def _agree_on_place(
    wanted: _Wanted, options: SaveOptions, metadata: SaveMetadata, ranks: Group
) -> _Place:
    """Find the base; all ranks call this together, and have to want the same."""

    def find(asked: _Asked) -> _Place:
        if asked.other >= 0:
            raise UsageError(
                f"rank {asked.other} saves with {asked.other_text}, rank {asked.rank} with {asked.text}",
                hint="give all ranks the same arguments; tokens are those of all ranks together",
            )
        if wanted.is_whole:
            return _Place()
        base = open_base(options.base, open_store(options.url).url)
        if base is None and wanted.batch is not None:
            raise UsageError(
                f"there is no checkpoint that the {wanted.batch.told} could follow",
                hint="save everything first, without deltas=; or base=, the checkpoint of the step before",
            )
        before = _record_before(base, options, metadata, wanted.counts)
        if base is None:
            return _Place(before=before)
        base.check_depth()
        _check_step(base.manifest, wanted.step, base.url)
        goes_on = _goes_on(base.manifest, metadata)
        is_loaded = base.manifest.id in {edge.id for edge in metadata.lineage}
        if wanted.batch is not None and not goes_on and not is_loaded:
            raise UsageError(
                f"{base.url} is not of this training, or that was restarted since, so deltas do not lead from it",
                hint="base= the checkpoint of the step before, and lineage=[report.lineage] of the load; or save "
                "everything, without deltas=",
            )
        return _Place(base.url, base.manifest.id, goes_on, before)

    lineage = [edge.id or edge.url for edge in metadata.lineage]
    text = (
        f"{wanted.partial}, step {wanted.step}, lineage {lineage}, tokens of "
        f"{sorted(wanted.counts.items())} and {wanted.batch.told if wanted.batch else 'no deltas'}"
    )
    asked = _Asked(ranks.rank, text)
    place: _Place = ranks.combine(asked, _compare, _Asked, find, _Place)
    return place


def _choice(
    wanted: _Wanted, base: Manifest, place: _Place, local: LocalState
) -> tuple[Callable[[LocalState], HeldByRanks], Callable[[HeldByRanks], Left]]:
    """What tells what a rank has of the base, and what then chooses the tensors of it that stand for others."""
    partial, names, batch = wanted.partial, wanted.names, wanted.batch
    if isinstance(partial, Window) and isinstance(names, Groups):
        window = WindowSelection(partial, names, base, wanted.step, goes_on=place.goes_on)
        return window.held_by, lambda held: Left(window.leave(held), window=window.document)
    if isinstance(partial, Deltas) and batch is not None:
        deltas = DeltaSelection(partial, batch, base)
        return deltas.held_by, lambda held: Left(
            deltas.leave(held),
            deltas=deltas.document,
            added=(*batch.tensors, *deltas.check(local)),
        )
    assert isinstance(partial, Experts)  # noqa: S101 - the rest
    assert isinstance(names, ExpertNames)  # noqa: S101 - those of experts
    chosen = Selection(names, base)
    return chosen.held_by, lambda held: Left(
        *chosen.leave(partial, held, wanted.counts, place.before)
    )


def check_partial(options: SaveOptions, metadata: SaveMetadata) -> None:
    """Check that experts were chosen before a state was taken for that of a partial save."""
    if options.partial is not None and metadata.partial is None:
        raise UsageError(
            "partial= is not supported here",
            hint="ucformat.torch.save, async_save and Manager have it",
        )


def _check_step(base: Manifest, step: int, url: str) -> None:
    if base.step is None or base.step >= step:
        has = "no step" if base.step is None else f"step {base.step}"
        raise UsageError(
            f"step {step} cannot take experts from {url}, which has {has}",
            hint="base= an earlier checkpoint of the same training, or base=False to save everything",
        )


def _record_before(
    base: Base | None,
    options: SaveOptions,
    metadata: SaveMetadata,
    counts: Mapping[str, Sequence[int]],
) -> RecordBefore:
    """The last record of tokens: a whole save, and one on a base without counts, make no tokens good again."""
    if not counts:
        return RecordBefore()
    ids = {edge.id for edge in metadata.lineage}
    if base is not None and base.manifest.experts is not None:
        return RecordBefore(base.manifest.experts, base.manifest.id in ids)
    newest = newest_beside(open_store(options.url).url) if base is None else base.url
    for place in dict.fromkeys((newest, *(edge.url for edge in metadata.lineage))):
        for manifest in () if place is None else _manifests_from(place, metadata):
            record = manifest.experts
            is_earlier = (manifest.step or 0) < (metadata.step or 0)
            if record is not None and is_earlier and fits(record, counts):
                return RecordBefore(record, not _goes_on(manifest, metadata))
    return RecordBefore()


def _manifests_from(place: str, metadata: SaveMetadata) -> Iterator[Manifest]:
    """The manifests of a checkpoint of the same training, and of those that it is based on, the newest first."""
    try:
        universal = open_reference(place).universal
        if universal is None:
            return
        named = universal.manifest.id in {edge.id for edge in metadata.lineage}
        if named or _goes_on(universal.manifest, metadata):
            bases = universal.bases
            below = [bases.opened(n).manifest for n in range(len(bases.docs))]
            yield universal.manifest
            yield from sorted(below, key=lambda m: m.step or 0, reverse=True)
    except UcformatError as error:
        _log.warning("tokens that were lost up to %s are not counted: %s", place, error.message)


def _goes_on(base: Manifest, metadata: SaveMetadata) -> bool:
    """Whether the training that saves was not restarted since it saved the base; rank 0's launch counts."""
    began_with = {edge.id for edge in metadata.lineage} - {edge.id for edge in base.lineage}
    launches = [launch and launch.id for launch in (base.launch, metadata.launch)]
    return not began_with and launches[0] == launches[1]
