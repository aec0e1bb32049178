"""The SQL catalog: which checkpoints exist, where they came from, their labels, and which may be deleted.

Here are its hooks, so that subscribing to them does not import the catalog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucformat.schema.manifest import Manifest

__all__ = ["dependent_finders", "find_dependents", "on_change", "thinners"]

#: Called after every change that the documents beside checkpoints have to record, with the catalog
#: and a frozenset of the serials of these checkpoints.
on_change: list[Callable[..., object]] = []

#: Called before checkpoints are deleted, with their ids and places; return, by id, the ids of the
#: checkpoints that need their files according to the documents beside them. The catalog itself does
#: not access storage.
dependent_finders: list[Callable[[Mapping[str, Sequence[str]]], Mapping[str, frozenset[str]]]] = []

#: Called to drop all but some states of the checkpoint with an id at a place, with these states and
#: the reason; return the manifest of what is left.
thinners: list[Callable[[str, str, Sequence[str], str], Manifest]] = []


def find_dependents(places: Mapping[str, Sequence[str]]) -> dict[str, frozenset[str]]:
    """Ask all `dependent_finders`.

    Returns:
        The ids of the checkpoints that need files of another, by the id of that one.
    """
    needed_by: dict[str, frozenset[str]] = {}
    for finder in dependent_finders if places else ():
        for checkpoint, dependents in finder(places).items():
            needed_by[checkpoint] = needed_by.get(checkpoint, frozenset()) | dependents
    return needed_by
