"""The exporter of Megatron-Core's distributed checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.megatron.export_options import MegatronExportOptions
from ucformat.exporters.base import Exporter, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo


class MegatronExporter(Exporter):
    """Plans the files of a distributed checkpoint of Megatron-Core."""

    kind = "megatron"
    title = "Megatron-Core (torch_dist)"
    summary = "Megatron-Core's distributed checkpoints."
    options_type = MegatronExportOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.megatron.export_plan import plan_target

        return plan_target(source, infos, self.options)
