"""Checkpoints in the formats of other tools, as files that are planned here and written by `jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.exporters.numpy_files import NpyExporter, NpzExporter
from ucformat.exporters.orbax import OrbaxExporter
from ucformat.exporters.safetensors import SafetensorsExporter
from ucformat.exporters.torch_save import TorchExporter

if TYPE_CHECKING:
    from ucformat.exporters.base import Exporter

__all__ = ["EXPORTERS", "make_exporter"]

#: All exporters, by kind.
EXPORTERS: dict[str, type[Exporter]] = {
    e.kind: e for e in (NpyExporter, NpzExporter, OrbaxExporter, SafetensorsExporter, TorchExporter)
}


def make_exporter(kind: str, **options: Any) -> Exporter:
    """The exporter of a kind.

    Args:
        kind: its name.
        options: its options.

    Raises:
        UsageError: there is no such kind, or it has no such option.
    """
    if kind not in EXPORTERS:
        raise UsageError(f"there is no export to {kind!r}", hint=f"there are: {', '.join(EXPORTERS)}")
    return EXPORTERS[kind](**options)
