"""The source for the folders of NeMo AutoModel's recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.automodel.folder import (
    INCOMPLETE,
    LOSSES,
    MODEL,
    OPTIM,
    SCHEDULER,
    AutomodelOptions,
)
from ucformat.sources.base import Source
from ucformat.sources.model_files import root_files
from ucformat.storage.base import exists

if TYPE_CHECKING:
    from ucformat.engines.automodel.opened import OpenAutomodel
    from ucformat.storage.base import Store


__all__ = ["Automodel"]


class Automodel(Source):
    """Recognises and opens a checkpoint of a recipe: `epoch_0_step_20`."""

    kind = "automodel"
    title = "NeMo AutoModel"
    before = ("dcp", "huggingface", "safetensors", "torch_save")
    packages = ("nemo_automodel",)
    options_type = AutomodelOptions
    options: AutomodelOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with a file of this name is a checkpoint of a recipe."""
        return name == SCHEDULER

    def find(self, store: Store) -> bool:
        """Whether the folder has weights in `model`, beside what only a recipe saves."""
        if not any(exists(store, name) for name in (SCHEDULER, LOSSES, INCOMPLETE)):
            return False
        folders = {key.partition("/")[0] for key in root_files(store) if "/" in key}
        return bool(folders & {MODEL, OPTIM})

    def open(self, store: Store) -> OpenAutomodel:
        """Open the weights and the optimizer by the sources of their formats."""
        from ucformat.engines.automodel.opened import OpenAutomodel

        return OpenAutomodel(store, self.options)
