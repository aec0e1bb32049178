"""Where tensors and optimizer groups lay in the state of the program that saved, as the manifest says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.reading.readable import path_to_json
from ucformat.schema.manifest import GroupDoc

if TYPE_CHECKING:
    from ucformat.geometry.tensor import Key
    from ucformat.reading.readable import Facts, Place

__all__ = ["at_of", "group_doc", "group_docs"]


def at_of(facts: Facts, key: Key) -> tuple[tuple[str | int, ...], ...]:
    """The paths of a tensor as the manifest holds them."""
    return tuple(tuple(path_to_json(p)) for p in facts.paths.get(key, ()))


def group_docs(facts: Facts) -> tuple[GroupDoc, ...]:
    """The optimizer groups as the manifest holds them."""
    places = facts.places or (None,) * len(facts.groups)
    return tuple(
        group_doc(tuple(g["params"]), {k: v for k, v in g.items() if k != "params"}, place)
        for g, place in zip(facts.groups, places, strict=True)
    )


def group_doc(params: tuple[str, ...], options: dict[str, Any], place: Place | None) -> GroupDoc:
    """An optimizer group as the manifest holds it."""
    if place is None:
        return GroupDoc(params=params, options=options)
    names = place.names if place.names != params else None
    at = tuple(path_to_json(place.path))
    return GroupDoc(params=params, options=options, at=at, names=names, flattened=place.flattened)
