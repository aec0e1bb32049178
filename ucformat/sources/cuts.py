"""`cuts`: how tensors lie over tensor-parallel ranks, as a caller says it in a word for each pattern of names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError, option_text
from ucformat.geometry.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CUTS", "how_to_say", "layout_of_cuts"]

_TP = "tp"

#: By the words that callers give; any number is a dim along which the ranks' parts are joined.
CUTS: dict[str, list[Any]] = {
    "replicate": ["replicate"],
    "mean": [{"partial": "mean", "over": _TP}],
    "halves": [{"shard": 0, "over": _TP, "parts": [1, 1]}],
}


def layout_of_cuts(cuts: Mapping[str, str | int] | None, ranks: int) -> Layout | None:
    """The layout that says the same; UsageError where a word is none of those of `CUTS`."""
    if not cuts:
        return None
    return Layout({_TP: ranks}, [{"match": pattern, "place": _place(pattern, how)} for pattern, how in cuts.items()])


def how_to_say(cuts: Mapping[str, str]) -> str:
    """The option that says these cuts, as `option_text` spells it."""
    return option_text("cuts", repr(dict(cuts)), ",".join(f"{pattern}={how}" for pattern, how in cuts.items()))


def _place(pattern: str, how: str | int) -> list[Any]:
    if str(how).isdecimal():
        return [{"shard": int(how), "over": _TP}]
    if how not in CUTS:
        raise UsageError(
            f"{how!r}, said of {pattern!r}, is no way in which a tensor is cut",
            hint=f"the ways are: {', '.join(CUTS)}, or the number of the dim along which the ranks' parts are joined",
        )
    return CUTS[str(how)]
