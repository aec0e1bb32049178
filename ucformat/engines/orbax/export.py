"""The exporter of Orbax checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UsageError
from ucformat.exporters.base import Exporter, ExportOptions, Target, option
from ucformat.schema import ITEMSIZE, TENSORSTORE_DTYPES, ZARR_DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

__all__ = ["OrbaxExporter"]


@dataclass(frozen=True, kw_only=True)
class OrbaxExportOptions(ExportOptions):
    """The options of `OrbaxExporter`."""

    max_file_bytes: int = option(
        1 << 30, "size", "size of a data file after which another begins; 1 GiB by default"
    )
    max_chunk_bytes: int = option(
        64 << 20,
        "size",
        "maximum size of a chunk, of which Orbax reads no part alone; 64 MiB by default",
    )

    def __post_init__(self) -> None:
        if self.max_file_bytes < 1 or self.max_chunk_bytes < ITEMSIZE["complex128"]:
            raise UsageError("a data file must have at least 1 byte, and a chunk 16 bytes")


class OrbaxExporter(Exporter):
    """Plans the files of an Orbax checkpoint."""

    kind = "orbax"
    title = "Orbax"
    summary = "Orbax, for JAX."
    options_type = OrbaxExportOptions
    dtypes = (*ZARR_DTYPES, *TENSORSTORE_DTYPES)

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.orbax.export_plan import plan_target

        return plan_target(source, infos, **vars(self.options))
