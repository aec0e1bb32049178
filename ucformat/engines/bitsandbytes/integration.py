"""The integration of bitsandbytes, whose modules keep beside a parameter what quantizes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.torch.integration import AttachedEntries, Integration

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch

__all__ = ["BITSANDBYTES"]

_PACKED = ".quant_state.bitsandbytes__"  # plain values as bytes, whose number varies


class _BitsAndBytes(Integration):
    title = "bitsandbytes"

    def attached_entries(
        self, module: torch.nn.Module, keys: Collection[str]
    ) -> Iterator[AttachedEntries]:
        """What quantizes each parameter: an attribute of it, and entries below it in the state dict."""
        for prefix, inner in module.named_modules():
            for name, param in inner.named_parameters(recurse=False):
                if hasattr(getattr(param, "quant_state", None), "from_dict"):
                    yield _attached(f"{prefix}.{name}.".removeprefix("."), inner, param, keys)


def _attached(
    prefix: str, module: torch.nn.Module, param: Any, keys: Collection[str]
) -> AttachedEntries:
    def load(values: Mapping[str, Any]) -> None:
        mine = {key.removeprefix(prefix): value for key, value in values.items()}
        param.quant_state = type(param.quant_state).from_dict(mine, device=param.device)
        module.quant_state = param.quant_state

    below = frozenset(key for key in keys if key.startswith(prefix))
    return AttachedEntries(below, frozenset(key for key in below if _PACKED in key), load)


BITSANDBYTES = _BitsAndBytes()
