"""Adapters in the checkpoint of a model that PEFT has wrapped: the files that PEFT's own `save_pretrained` writes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

ADAPTER_CONFIG = "adapter_config.json"
_ROOT = "base_model.model."
#: Parameters of an adapter: what PEFT calls them in its file, the adapter, and what follows.
_PARAMETER = re.compile(
    r"(.+\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.([^.]+)(\.weight|\.bias)?"
)
_REPLACED = re.compile(r"(.+)\.modules_to_save\.([^.]+)(\..+)")
_OF_BASE = re.compile(r".*\.(base_layer|original_module)\..+")


def is_wrapped(names: Iterable[str]) -> bool:
    """Whether tensors have the names of a model that PEFT has wrapped, which no loader of models knows."""
    return any(_PARAMETER.fullmatch(name) or _OF_BASE.fullmatch(name) for name in names)


def adapter_names(
    source: Checkpoint, infos: Sequence[TensorInfo], assets: Mapping[str, bytes]
) -> dict[str, TensorInfo]:
    """The tensors of the adapter, by their names in PEFT's file."""
    _check(source, assets)
    out: dict[str, TensorInfo] = {}
    adapters: set[str] = set()
    for info in infos:
        if match := _PARAMETER.fullmatch(info.name):
            ending = "" if match[1].endswith("magnitude_vector") else match[3] or ""
        elif match := _REPLACED.fullmatch(info.name):
            ending = match[3]
        else:
            continue
        adapters.add(match[2])
        out[(match[1] if match[1].startswith(_ROOT) else _ROOT + match[1]) + ending] = info
    if len(adapters) != 1:
        listed = ", ".join(sorted(adapters)) or "none"
        raise UnsupportedError(
            f"{source.url} has the names of a model that PEFT has wrapped, and not one adapter, "
            f"but {listed}",
            hint="a view (--view) with the step `drop` chooses one of several",
        )
    return out


def _check(source: Checkpoint, assets: Mapping[str, bytes]) -> None:
    if ADAPTER_CONFIG not in assets:
        raise UnsupportedError(
            f"{source.url} has the names of a model that PEFT has wrapped, and no {ADAPTER_CONFIG}",
            hint=f"give the folder of {ADAPTER_CONFIG}: --assets DIR",
        )
    try:
        config: Any = json.loads(assets[ADAPTER_CONFIG])
        kind, bias = config.get("peft_type"), config.get("bias", "none")
    except (AttributeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{source.url}: {ADAPTER_CONFIG} is not a JSON object: {error}"
        ) from None
    unsupported = (
        [f"peft_type {kind!r}"] if kind != "LORA" else [f"bias {bias!r}"] if bias != "none" else []
    )
    unsupported += [k for k in ("trainable_token_indices", "target_parameters") if config.get(k)]
    if unsupported:
        raise UnsupportedError(
            f"{source.url}: the files of an adapter with {', '.join(unsupported)} are not written",
            hint=(
                "write them with PEFT: load the checkpoint into the model, and call save_pretrained"
            ),
        )
