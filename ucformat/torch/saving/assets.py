"""The files beside the weights that Hugging Face's tools need: given by the caller, or written by the model itself."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.sources.model_files import find_assets
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

__all__ = ["assets_of"]


def assets_of(state: Mapping[str, Any], folder: str | PathLike[str] | None) -> dict[str, bytes]:
    """The configuration of the model in a state, and the files of a folder, which take precedence.

    Args:
        state: of the training program.
        folder: with `config.json`, tokenizer and similar files (None: there is none).

    Raises:
        UsageError: the folder has no such file.
    """
    models = [found for value in state.values() if (found := _model(value)) is not None]
    assets = _configuration(models[0]) if len(models) == 1 else {}
    if folder is None:
        return assets
    store = open_store(folder)
    given = find_assets(store.list())
    if not given:
        raise UsageError(f"{store.url} has no config.json, tokenizer or similar file")
    return {**assets, **{name: store.read(name) for name in given}}


def _model(value: Any) -> Any:
    """The model of transformers that a value is, or that it wraps; None if it is none."""
    for attribute in ("module", "_orig_mod"):  # of DistributedDataParallel and torch.compile
        inner = getattr(value, "__dict__", {}).get("_modules", {}).get(attribute)
        value = value if inner is None else inner
    return value if hasattr(getattr(value, "config", None), "to_json_string") else None


def _configuration(model: Any) -> dict[str, bytes]:
    """What `save_pretrained` writes of a model besides its weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the class that `fully_shard` makes of it
    if hasattr(config, "dtype"):
        config.dtype = model.dtype
    found = {"config.json": config.to_json_string().encode()}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        found["generation_config.json"] = generation.to_json_string().encode()
    return found
