"""How DeepSpeed's checkpoints are recognised."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ucformat.engines.deepspeed.folder import (
    DeepSpeedSourceOptions,
    find_tag,
    is_model_or_optimizer,
    is_universal,
    list_files,
    looks_like_deepspeed,
)
from ucformat.sources.base import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucformat.engines.deepspeed.opened import OpenDeepSpeed
    from ucformat.engines.deepspeed.universal import OpenUniversal
    from ucformat.storage.base import Store


__all__ = ["DeepSpeed"]


class DeepSpeed(Source):
    """How DeepSpeed checkpoints are recognised and opened."""

    kind = "deepspeed"
    title = "DeepSpeed"
    before = ("dcp", "megatron", "safetensors", "torch_save")
    packages = ("deepspeed",)
    part_files = MappingProxyType(
        {r"[\w-]+[-_](model|optim)_states\.pt": "one file of a DeepSpeed checkpoint"}
    )
    options_type = DeepSpeedSourceOptions
    options: DeepSpeedSourceOptions

    def is_marker(self, name: str) -> bool:
        """Whether a folder with such a file is a tag folder."""
        return is_model_or_optimizer(name)

    def part_of(self, url: str, value: Mapping[Any, Any]) -> str:
        """The folder of a parameter in the universal format, or model states, by their content."""
        if "ds_config" in value or "ds_version" in value:
            return "one file of a DeepSpeed checkpoint, according to its content"
        if re.fullmatch(r".*/zero/[^/]+", url):
            return "one tensor of a checkpoint in DeepSpeed's universal format"
        return ""

    def find(self, store: Store) -> bool:
        """Whether this folder has `latest`, or model states as DeepSpeed names them."""
        return looks_like_deepspeed(store)

    def open(self, store: Store) -> OpenDeepSpeed | OpenUniversal:
        """Open the checkpoint that `latest` or `latest_universal` names, or the tag folder that the store is rooted at.

        Reads kilobytes of the model states and layer files, and of the first data-parallel rank's
        optimizer file of each model-parallel rank. The other ranks' files must exist, and are
        opened when their extents are needed.
        """
        tag = find_tag(store)
        if is_universal(store, tag):
            from ucformat.engines.deepspeed.universal import OpenUniversal

            return OpenUniversal(store, tag, self.options)
        from ucformat.engines.deepspeed.opened import OpenDeepSpeed

        return OpenDeepSpeed(
            store, list_files(store, tag, optimizer=self.options.optimizer), self.options
        )
