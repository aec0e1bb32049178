"""Small tensors of a save, which are packed beside the arrays if there are many."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ucformat.format import small as limits
from ucformat.torch.saving.plan import Held, plan_save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.format.commit import Attempt
    from ucformat.geometry.tensor import Key
    from ucformat.storage.base import Store
    from ucformat.torch.comm.group import Group
    from ucformat.torch.saving.assignment import GlobalPlan
    from ucformat.torch.saving.options import SaveOptions

_HASH_BYTES = 8


class SmallPart(NamedTuple):
    """The small tensors of a save.

    Attributes:
        held: what this rank holds of them.
        pieces: the (item, piece) that it writes.
        plan: of all ranks, on rank 0.
    """

    held: Held
    pieces: Sequence[tuple[int, int]]
    plan: GlobalPlan | None


def split_small(group: Group, held: Held) -> tuple[Held | None, Held]:
    """What a rank holds of small tensors, if all ranks together have too many for arrays, and everything else.

    All ranks call this together. They tell each other hashes of names, as many as matter, so that
    it does not depend on how the tensors are distributed.
    """
    with group.sharing_errors():
        small = [n for n, item in enumerate(held.items) if limits.is_small(item.info)]
        hashes = b"".join(_hash(held.items[n].info.key) for n in islice(small, _counted()))
    found: bytes = group.combine(hashes, _union, bytes)
    if len(np.unique(np.frombuffer(found, "<u8"))) < _counted():
        return None, held
    packed = set(small)
    return held.part(small, {}), held.part(
        [n for n in range(len(held.items)) if n not in packed], held.objects
    )


def _counted() -> int:
    return limits.MOST_SMALL_ARRAYS + 1  # further ones make no difference


def _hash(key: Key) -> bytes:
    text = f"{len(key.state)} {key.state}{key.name}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_HASH_BYTES).digest()


def _union(a: bytes, b: bytes) -> bytes:
    return np.unique(np.frombuffer(a + b, "<u8"))[: _counted()].tobytes()


def plan_small(
    group: Group, options: SaveOptions, store: Store, held: Held, attempt: Attempt | None
) -> SmallPart:
    """Plan the packed files of small tensors; all ranks call this together, after the plan of the arrays."""
    part = group.for_call(group.call)
    part.cache = group.cache.setdefault("small", {})
    assignment, _, plan = plan_save(part, replace(options, form="packed"), store, held, attempt)
    return SmallPart(held, assignment.part.pieces, plan)
