"""What a checkpoint has of a whole model although a view takes only a part of it; imports no view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ucformat.reading.readable import OUTDATED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.views.viewed import Viewed


def outdated(view: Viewed | None, assets: Iterable[str], objects: Mapping[str, Any]) -> list[str]:
    """The names of assets and objects with the sizes of a whole model, of which the checkpoint has only a part.

    Args:
        view: the view that takes the part; None if there is none.
    """
    recorded = objects.get(OUTDATED)
    names = (
        dict.fromkeys(n for n in recorded if isinstance(n, str))
        if isinstance(recorded, list)
        else {}
    )
    if view is not None and _takes_part(view):
        names |= dict.fromkeys(name for name in assets if name.rpartition("/")[2] == "config.json")
        names |= dict.fromkeys({"args"} & objects.keys())
    return list(names)


def _takes_part(view: Viewed) -> bool:
    from ucformat.schema.view import Select, Take

    below: Viewed | None = view
    while below is not None:
        if any(isinstance(step, Take | Select) for _, step in below.steps):
            return True
        below = cast("Viewed", below.base) if getattr(below.base, "is_view", False) else None
    return False
