"""The integrations of transformers, with PEFT, and of Accelerate."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError
from ucformat.torch.integration import Integration

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["ACCELERATE", "HUGGINGFACE"]

_ADAPTER_CONFIG = "adapter_config.json"


class _Accelerate(Integration):
    title = "Hugging Face Accelerate"
    module = "ucformat.torch.integrations.accelerate"


class _HuggingFace(Integration):
    title = "Hugging Face Transformers"
    module = "ucformat.torch.integrations.huggingface"

    def model_files(
        self, module: torch.nn.Module, form: str
    ) -> Callable[[], dict[str, bytes]] | None:
        """What `save_pretrained` writes of a model besides its weights."""
        model = _model(module)
        if model is None:
            return None
        if form == "safetensors" and _adapters(model):
            raise UnsupportedError(
                "PEFT has wrapped the model: its tensors have other names than those that "
                "Hugging Face's tools load",
                hint="save it with form='packed' or 'zarr', of which `ucp export safetensors` writes PEFT's files of "
                "the adapter; or merge_and_unload() before",
            )
        return partial(_configuration, model)


def _model(value: Any) -> Any:
    """The model of transformers that a value is, or that it wraps; None if it is none."""
    # of DistributedDataParallel, FSDP1 and torch.compile
    for attribute in ("module", "_fsdp_wrapped_module", "_orig_mod"):
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
        return {_ADAPTER_CONFIG: (Path(folder) / _ADAPTER_CONFIG).read_bytes()}


ACCELERATE, HUGGINGFACE = _Accelerate(), _HuggingFace()
