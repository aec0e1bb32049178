"""Partial saves: of experts that are not chosen nothing is written, and the base's tensors stand for them.

All ranks read the manifest of the base, so each of them finds the same choice by itself. What only
ranks together know, which of the base's tensors the program still has, is a bit for each of them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.references import open_reference
from ucformat.storage.url import open_store
from ucformat.torch.comm.merging import either
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.base import newest_beside, open_base
from ucformat.torch.saving.experts import (
    ExpertNames,
    Experts,
    HeldByRanks,
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
    from collections.abc import Iterator, Mapping, Sequence

    from ucformat.jobs.increments import Base
    from ucformat.schema.manifest import Manifest
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.manifest import SaveMetadata
    from ucformat.torch.saving.options import SaveArguments, SaveOptions
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
    """The base, by its url, and whether the training that saves goes on from it as it is in memory."""

    url: str = ""
    goes_on: bool = False
    before: RecordBefore = RecordBefore()


def leave_experts(
    local: LocalState,
    options: SaveOptions,
    metadata: SaveMetadata,
    arguments: SaveArguments,
    ranks: Group,
) -> tuple[LocalState, SaveOptions, SaveMetadata]:
    """Leave out the tensors of experts that are not saved; all ranks call this before anything is copied.

    Raises:
        UsageError: the save has no step, a later one than the base's, or no counts where the choice needs them.
    """
    experts = options.partial
    with ranks.sharing_errors():
        if arguments.get("tokens") is not None and not isinstance(experts, Experts):
            raise UsageError(
                "tokens are counted for a choice of experts, and none is made",
                hint="partial=Experts(…), or leave tokens out",
            )
    if experts is None:
        return local, options, metadata
    step = metadata.step
    with ranks.sharing_errors():
        counts = counts_of(experts, arguments.get("tokens"))
        names = Groups(experts) if isinstance(experts, Window) else ExpertNames(experts.pattern)
        check_state(local, names)
        if step is None:
            raise UsageError(
                "a partial save records of which step each tensor is, and has no step",
                hint="step=, the number of the training step",
            )
    assert step is not None  # noqa: S101 - every rank has one

    def find(asked: _Asked) -> _Place:
        if asked.other >= 0:
            raise UsageError(
                f"rank {asked.other} saves with {asked.other_text}, rank {asked.rank} with {asked.text}",
                hint="give all ranks the same arguments; tokens are those of all ranks together",
            )
        base = open_base(options.base, open_store(options.url).url)
        if base is None:
            return _Place(before=_record_before(None, options, metadata, counts))
        base.check_depth()
        _check_step(base.manifest, step, base.url)
        before = _record_before(base, options, metadata, counts)
        return _Place(base.url, _goes_on(base.manifest, metadata), before)

    lineage = [edge.id or edge.url for edge in metadata.lineage]
    asked = _Asked(
        ranks.rank,
        f"{experts}, step {step}, lineage {lineage} and tokens of {sorted(counts.items())}",
    )
    place: _Place = ranks.combine(asked, _compare, _Asked, find, _Place)
    if not place.url:
        record = None
        if isinstance(names, ExpertNames):
            record = record_of(Selection(names, None), counts, place.before)
        options = replace(options, base=None, patch=False)
        return local, options, replace(metadata, partial=PartialSave(record=record))
    from ucformat.torch.loading.share import open_together

    base = open_together(place.url, ranks, more=True)
    with ranks.sharing_errors():
        assert base.universal is not None  # noqa: S101 - rank 0 has opened it as a base
        manifest = base.universal.manifest
        selection: Selection | WindowSelection
        if isinstance(names, Groups):
            assert isinstance(experts, Window)  # noqa: S101 - which has groups
            selection = WindowSelection(experts, names, manifest, step, goes_on=place.goes_on)
        else:
            selection = Selection(names, manifest)
        own = selection.held_by(local)

    def both(a: HeldByRanks, b: HeldByRanks) -> HeldByRanks:
        return HeldByRanks(either(a.tensors, b.tensors), either(a.others, b.others))

    held: HeldByRanks = ranks.combine(own, both, HeldByRanks, lambda every: every, HeldByRanks)
    with ranks.sharing_errors():
        record = window = None
        if isinstance(selection, WindowSelection):
            left = selection.leave(held)
            window = selection.document
        else:
            assert isinstance(experts, Experts)  # noqa: S101 - which has no groups
            left, record = selection.leave(experts, held, counts, place.before)
        keys = {Key(doc.name, doc.state) for doc in left}
        kept = tuple(t for t in local.tensors if t.key not in keys)
        bits = bits_of_docs(manifest, left)
        partial = PartialSave(manifest.id, manifest.attempt, bits, record, window)
    return (
        replace(local, tensors=kept),
        replace(options, base=place.url),
        replace(metadata, partial=partial),
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
