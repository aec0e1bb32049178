"""Who hears of a change made through a catalog, and who is asked before; apart from the catalog.

Apart from the catalog, so that subscribing loads none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["ask_who_needs", "on_change", "who_needs"]

#: Called after every change that the documents beside checkpoints have to hold, with the catalog (whose type would lead
#: back to who imports this) and the serials of these checkpoints, a frozenset.
#: `ucformat` itself subscribes who writes them, so that no import leads to a catalog that nobody listens to.
on_change: list[Callable[..., object]] = []

#: Asked before checkpoints are deleted, with their ids and the places where they lie: who needs their files, as what
#: lies beside these says. The catalog knows nothing of storage, so `ucformat` itself subscribes who looks there.
who_needs: list[Callable[[Mapping[str, Sequence[str]]], Mapping[str, frozenset[str]]]] = []


def ask_who_needs(places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """What all that were asked said."""
    found: dict[str, frozenset[str]] = {}
    for ask in who_needs if places else ():
        for checkpoint, dependents in ask(places).items():
            found[checkpoint] = found.get(checkpoint, frozenset()) | dependents
    return found
