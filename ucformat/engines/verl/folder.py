"""What the files of veRL's ranks are called, and what a caller can say of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.sources.base import PickleOptions, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RANK_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")


@dataclass(frozen=True, kw_only=True)
class VerlOptions(PickleOptions):
    """The options of `Verl`."""

    optimizer: bool = option(
        default=True, how="flag", text="whether to read the optimizer's states"
    )
    groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the names of each optimizer group's parameters, in order, if the files do not determine "
        "them",
    )
