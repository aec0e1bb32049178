"""The files beside the weights that Hugging Face's tools need: given by the caller, or written by the model itself."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.adapter import ADAPTER_CONFIG
from ucformat.sources.model_files import find_assets
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike


def assets_of(
    state: Mapping[str, Any], folder: str | PathLike[str] | None, form: str
) -> dict[str, bytes]:
    """The configuration of the model in a state, and the files of a folder, which take precedence.

    Args:
        folder: with `config.json`, tokenizer and similar files (None: there is none).
    """
    models = [model for value in state.values() if (model := _model(value)) is not None]
    if form == "safetensors" and any(map(_adapters, models)):
        raise UnsupportedError(
            "PEFT has wrapped the model: its tensors have other names than those that Hugging Face's tools load",
            hint="save it with form='packed' or 'zarr', of which `ucp export safetensors` writes PEFT's files of the "
            "adapter; or merge_and_unload() before",
        )
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
    return (
        value
        if _adapters(value) or hasattr(getattr(value, "config", None), "to_json_string")
        else None
    )


def _adapters(model: Any) -> dict[str, Any]:
    """The configurations of the adapters that PEFT has added to a model, by name."""
    adapters = getattr(model, "peft_config", None)
    return adapters if isinstance(adapters, dict) else {}


def _configuration(model: Any) -> dict[str, bytes]:
    """What `save_pretrained` writes of a model besides its weights; with several adapters nothing."""
    if adapters := _adapters(model):
        return _adapter_config(model, *adapters.values()) if len(adapters) == 1 else {}
    config = copy.deepcopy(model.config)
    config.architectures = [
        type(model).__name__.removeprefix("FSDP")
    ]  # the class that `fully_shard` makes of it
    if hasattr(config, "dtype"):
        config.dtype = model.dtype
    files = {"config.json": config.to_json_string().encode()}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _adapter_config(model: Any, config: Any) -> dict[str, bytes]:
    """The configuration of an adapter as PEFT writes it."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(
            getattr(model, "config", None), "_name_or_path", None
        )
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_bytes()}
