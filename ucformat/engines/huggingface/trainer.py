"""The source for directories of Hugging Face's Trainer and Accelerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.engines.huggingface.trainer_folder import classify, is_marker, looks_like_trainer
from ucformat.sources.base import PickleOptions, Source, groups_by_optimizer, option, options_of
from ucformat.sources.model_files import root_files
from ucformat.sources.registry import SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucformat.engines.huggingface.trainer_opened import OpenHuggingFace
    from ucformat.storage.base import Store


__all__ = ["HuggingFace"]


@dataclass(frozen=True, kw_only=True)
class _OwnOptions(PickleOptions):
    """The options of `HuggingFace` besides those of the engine whose files it contains."""

    groups: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None = option(
        None,
        "document",
        "the parameters of each group, in order, by the name of an optimizer (`optimizer`); of a "
        "single one its groups "
        "suffice",
    )


_ENGINES = tuple(SOURCES[kind].options_type for kind in ("deepspeed", "dcp"))
HuggingFaceOptions: Any = dataclass(frozen=True, kw_only=True)(
    type(
        "HuggingFaceOptions", (_OwnOptions, *_ENGINES), {"__doc__": "The options of `HuggingFace`."}
    )
)


class HuggingFace(Source):
    """Recognises and opens directories of Trainer and of Accelerate's `save_state`."""

    kind = "huggingface"
    title = "Hugging Face Trainer and Accelerate"
    # it may contain any of them
    before = ("dcp", "deepspeed", "megatron", "safetensors", "torch_save")
    packages = (
        "accelerate", "bitsandbytes", "datasets", "diffusers", "peft", "tokenizers",
        "transformers", "trl",
    )  # fmt: skip
    options_type = HuggingFaceOptions
    options: Any

    def is_marker(self, name: str) -> bool:
        """Whether only Trainer or Accelerate write a file of this name."""
        return is_marker(name)

    def find(self, store: Store) -> bool:
        """Whether the folder has the files of Trainer or Accelerate."""
        return looks_like_trainer(root_files(store))

    def open(self, store: Store) -> OpenHuggingFace:
        """Open it: the engine's checkpoint, and the small files next to it."""
        from ucformat.engines.huggingface.trainer_opened import EngineOptions, OpenHuggingFace

        infos = root_files(store)
        files = classify(infos, store.url)
        handled = ("allow", "groups", "part", "optimizer")
        values = {n: getattr(self.options, n) for n in options_of(self) if n not in handled}
        inner = {name: value for name, value in values.items() if value is not None}
        groups = groups_by_optimizer(self.options.groups)
        options = EngineOptions(
            self.options.allow,
            groups,
            inner,
            self.options.optimizer,
            part=self.options.part is True,
        )
        return OpenHuggingFace(store, files, infos, options)
