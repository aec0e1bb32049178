"""What a caller may say of a Megatron checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.geometry.layout import Layout

__all__ = ["MegatronOptions"]


class MegatronOptions(NamedTuple):
    """The arguments of `Megatron`, which says what they are."""

    allow: tuple[str, ...]
    stacked: bool
    vocab_size: int | None
    optimizer: bool
    layout: Layout | None
    cuts: Mapping[str, str | int] | None
