"""What a caller may say of a DeepSpeed checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.geometry.layout import Layout

__all__ = ["DeepSpeedOptions"]


class DeepSpeedOptions(NamedTuple):
    """The arguments of `DeepSpeed`, which says what they are."""

    allow: tuple[str, ...]
    groups: Sequence[Sequence[str]] | None
    layout: Layout | str | None
    vocab: int | None
    cuts: Mapping[str, str | int] | None
