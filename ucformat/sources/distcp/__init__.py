"""The items of `torch.distributed.checkpoint`, as several engines store them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.sources.base import PickleOptions, option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METADATA = ".metadata"  # the file that describes all items
#: The shards of DCP's safetensors writer: number of the rank, of the file, and of all files.
SHARD = re.compile(r"shard-(\d{5,})-model-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True, kw_only=True)
class ItemOptions(PickleOptions):
    """The options of sources whose checkpoints consist of items."""

    groups: Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the parameters of each optimizer group, in order, if the states are numbered",
    )
    owners: Mapping[str, str] | None = option(
        None,
        "document",
        "the path of the model that each optimizer trains, by the optimizer's, both joined by dots",
    )
