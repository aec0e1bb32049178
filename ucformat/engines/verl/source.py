"""The source for checkpoints of veRL's FSDP workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.verl.folder import RANK_FILE, VerlOptions
from ucformat.sources.base import Source
from ucformat.sources.model_files import root_files

if TYPE_CHECKING:
    from ucformat.engines.verl.opened import OpenVerl
    from ucformat.storage.base import Store

__all__ = ["Verl"]


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
