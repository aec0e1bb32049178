"""Presets: the steps between the names and shapes of one family of models and another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PRESETS", "preset_steps"]

#: Name -> what makes the steps.
PRESETS: dict[str, Callable[[Any], Sequence[Mapping[str, Any]]]] = {}


def preset_steps(
    name: str,
    options: Mapping[str, int | bool | None],
    objects: Mapping[str, Any],
    assets: Mapping[str, bytes],
    names: Sequence[str],
) -> Sequence[Mapping[str, Any]]:
    """The steps of a preset, as a layout file spells them.

    LayoutError where there is no such preset, or it needs a number that nobody tells.
    """
    if name not in PRESETS:
        raise LayoutError(f"there is no preset {name!r}", hint=f"there are: {', '.join(PRESETS)}")
    return PRESETS[name]((options, objects, assets, names))
