"""The source for checkpoints of veRL's FSDP workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.sources.base import PickleOptions, Source, option
from ucformat.sources.model_files import root_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.engines.verl.opened import OpenVerl
    from ucformat.storage.base import Store

__all__ = ["Verl"]

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


class Verl(Source):
    """Recognises and opens what veRL's FSDP workers save: a file of each rank."""

    kind = "verl"
    title = "veRL"
    before = ("huggingface", "torch_save")
    packages = ("verl",)
    options_type = VerlOptions
    options: VerlOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with a file of this name is a checkpoint of veRL."""
        match = RANK_FILE.fullmatch(name)
        return match is not None and match[1] == "model"

    def find(self, store: Store) -> bool:
        """Whether the folder has files of ranks."""
        return any(map(RANK_FILE.fullmatch, root_files(store)))

    def open(self, store: Store) -> OpenVerl:
        """Open the files of the first rank, after a check that those of all others are there."""
        from ucformat.engines.verl.opened import OpenVerl

        return OpenVerl(store, self.options)
