"""Thins deleted checkpoints to what others need of them: the tensors that are based on theirs.

What is left has the id of the whole, by which others find it, and an edge `thin` to itself in its lineage.
It is replaced as by `ucformat.thin`. Whoever begins to need it either sees that, or is seen: then it stays whole.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.errors import Conflict, NotFound
from ucformat.format.attempts import attempt_of, folders_of, parse_record
from ucformat.format.structure import find_manifest
from ucformat.geometry.tensor import Key
from ucformat.jobs.dependents import dependent_places
from ucformat.jobs.materialize import own_store
from ucformat.jobs.thin import keep_tensors
from ucformat.settings import allowed_roots
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Store

__all__ = ["RemnantPlan", "keep_needed", "plan_remnant", "remnant_at"]

_REASON = "it was deleted, and others need the rest"
_LATER = "`ucp gc --thin` thins it when that is over"


@dataclass(frozen=True, slots=True)
class RemnantPlan:
    """What others need of a checkpoint at a place.

    Attributes:
        needed: the tensors that they need.
        dependents: their ids.
        stored: the bytes of all of its tensors in storage.
        left: about how many of these are left; all of them if nothing is to be gained.
    """

    checkpoint: Checkpoint
    needed: frozenset[Key]
    dependents: frozenset[str]
    stored: int
    left: int


def plan_remnant(url: str, checkpoint: str) -> RemnantPlan:
    """Find out what others need of the checkpoint with an id at a place.

    Raises:
        Conflict: what is needed is not known, or it has no files of its own.
    """
    source = open_checkpoint(url, roots=allowed_roots)
    universal = source.universal
    if source.id != checkpoint or universal is None:
        raise Conflict(
            f"{url} holds the checkpoint {source.id} by now, not {checkpoint}", hint="plan again"
        )
    manifest, store = source.manifest, own_store(source)
    if manifest.sidecar is not None and manifest.sidecar.roots:
        raise Conflict(f"{url} is virtual: its tensors are in files elsewhere", hint=_COMPACT)
    by_dependent = _needed(store, manifest.id)
    needed = frozenset[Key]().union(*by_dependent.values())
    data, *_ = folders_of(manifest.attempt)
    stored = sum(info.size for info in store.list(data))
    if by_dependent and not needed:
        raise Conflict(
            f"{', '.join(sorted(by_dependent))} is based on {url}, but needs none of its tensors",
            hint=_COMPACT,
        )
    sizes = {info.key: info.nbytes for info in source.tensors.values()}
    part, whole = (
        sum(sizes[key] for key in keys & sizes.keys()) for keys in (needed, sizes.keys())
    )
    if needed >= sizes.keys():
        left = stored
    elif manifest.bases:  # its patches are made whole
        docs = [universal.docs[key] for key in needed & sizes.keys()]
        left = min(sum(doc.nbytes for doc in docs if not doc.is_referenced), stored)
    else:
        left = stored * part // (whole or 1)
    return RemnantPlan(source, needed, frozenset(by_dependent), stored, left)


_COMPACT = "`ucp compact` makes those that need it whole, so that it can be removed"


def keep_needed(url: str, checkpoint: str) -> None:
    """Keep only what others need of the checkpoint with an id at a place, unless that takes as much room.

    Raises:
        Conflict: as for `plan_remnant`, or others need more by now.
    """
    plan = plan_remnant(url, checkpoint)
    if plan.left >= plan.stored:
        return
    store = own_store(plan.checkpoint)

    def check_needed() -> None:
        if not frozenset[Key]().union(*_needed(store, checkpoint).values()) <= plan.needed:
            raise Conflict(f"others need more of {url} by now", hint=_LATER)

    keep_tensors(plan.checkpoint, plan.needed, _REASON, check_needed=check_needed)


def remnant_at(url: str, checkpoint: str) -> Manifest | None:
    """What is left of the checkpoint with an id at a place; None if it is whole, or not there."""
    manifest = find_manifest(open_store(url))
    if manifest is None or manifest.id != checkpoint or not manifest.is_remnant:
        return None
    return manifest


def _needed(store: Store, checkpoint: str) -> dict[str, frozenset[Key]]:
    """The tensors of one checkpoint that others need, by the ids of these.

    Raises:
        Conflict: what one of them needs is not known, as when it is being written.
    """
    return {
        dependent: frozenset().union(
            *(_needed_at(place, dependent, checkpoint) for place in places)
        )
        for dependent, places in dependent_places(store, checkpoint).items()
    }


def _needed_at(place: str, dependent: str, base: str) -> set[Key]:
    store = open_store(place)
    writing = _being_written(store)
    manifest = find_manifest(store)  # last: what is committed since is in it
    if manifest is None or manifest.id != dependent:
        raise Conflict(
            f"{dependent} is not at {place}, or not yet: what it needs is not known",
            hint="wait until it is written; or ucp gc --ignore-dependent, if it is gone for good",
        )
    if writing - {manifest.attempt}:
        raise Conflict(f"{place} is being written anew, and may need more", hint=_LATER)
    numbers = {n for n, doc in enumerate(manifest.bases) if doc.id == base}
    return {Key(doc.name, doc.state) for doc in manifest.tensors if doc.base in numbers}


def _being_written(store: Store) -> set[str]:
    """The attempts at a place that need something elsewhere, or may."""
    attempts = set()
    for info in store.list("attempts"):
        attempt = attempt_of(info.key)
        with suppress(NotFound):  # removed at this instant
            record = parse_record(store.read(info.key))
            if attempt is not None and (record is None or record.needs):
                attempts.add(attempt)
    return attempts
