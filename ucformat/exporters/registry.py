"""Checkpoints in the formats of other tools, as files that are planned here and written by `jobs`."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.exporters.base import Exporter

__all__ = ["EXPORTERS", "make_exporter"]


class _Exporters(UserDict[str, "type[Exporter]"]):
    """The class of each exporter, which is imported when it is asked for."""

    def __getitem__(self, kind: str) -> type[Exporter]:
        if kind not in self.data and kind in _HOMES:
            module, _, name = _HOMES[kind].partition(":")
            self.data[kind] = getattr(import_module(f"ucformat.exporters.registry.{module}"), name)
        return self.data[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self.data or kind in _HOMES

    def __iter__(self) -> Iterator[str]:
        return iter({**_HOMES, **self.data})

    def __len__(self) -> int:
        return len({**_HOMES, **self.data})


_HOMES = {
    "safetensors": "exporters.safetensors:SafetensorsExporter",
    "dcp": "engines.pytorch.dcp_export:DcpExporter",
    "megatron": "engines.megatron.export:MegatronExporter",
    "deepspeed": "engines.deepspeed.export:DeepSpeedExporter",
    "deepspeed-universal": "engines.deepspeed.export:DeepSpeedUniversalExporter",
    "torch": "engines.pytorch.torch_save_export:TorchExporter",
    "orbax": "engines.orbax.export:OrbaxExporter",
    "npz": "engines.numpy.export:NpzExporter",
    "npy": "engines.numpy.export:NpyExporter",
}

#: All exporters, by kind.
EXPORTERS = _Exporters()


def make_exporter(kind: str, **options: Any) -> Exporter:
    """The exporter of a kind."""
    if kind not in EXPORTERS:
        raise UsageError(f"there is no export to {kind!r}", hint=f"there are: {', '.join(_HOMES)}")
    return EXPORTERS[kind](**options)
