"""Reads that stay in the memory in which a store got them, and count towards its budget as long as they are looked at.

For bytes that cannot go straight into the destination's memory: where a store has a copy of its own anyway, another one
would cost time, and memory that no budget knows of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from ucformat.storage.base import Store

    Lent = AbstractContextManager[Sequence[memoryview]]

__all__ = ["Lends", "lend"]


@runtime_checkable
class Lends(Protocol):
    """A store that can do so, or one around such a store."""

    def lend(self, key: str, ranges: Sequence[tuple[int, int]]) -> Lent | None:
        """Ranges of a file, (offset, bytes), to be looked at in a block; None where the store inside cannot."""


def lend(store: Store, key: str, ranges: Sequence[tuple[int, int]]) -> Lent | None:
    """Ranges of a file, (offset, bytes), to be looked at in a block; None where this store fills memory of others."""
    return store.lend(key, ranges) if isinstance(store, Lends) else None
