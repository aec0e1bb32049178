"""The exporters to DeepSpeed: its own files, and its universal format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.engines.deepspeed.export_options import DeepSpeedExportOptions, UniversalExportOptions
from ucformat.exporters.base import Exporter, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo


__all__ = ["DeepSpeedExporter", "DeepSpeedUniversalExporter"]


class DeepSpeedExporter(Exporter):
    """Plans the files of a DeepSpeed engine."""

    kind = "deepspeed"
    title = "DeepSpeed"
    summary = "DeepSpeed's own files, for any ZeRO stage and number of ranks."
    options_type = DeepSpeedExportOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.deepspeed.export_plan import EnginePlan

        plan = EnginePlan(source, infos, self.options)
        return Target(tuple(plan.files()), plan.left_out())


class DeepSpeedUniversalExporter(Exporter):
    """Plans the files of DeepSpeed's universal format."""

    kind = "deepspeed-universal"
    title = "DeepSpeed's universal format"
    summary = "DeepSpeed's universal format."
    options_type = UniversalExportOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.deepspeed.export_plan import UniversalPlan

        plan = UniversalPlan(source, infos, self.options)
        return Target(tuple(plan.files()), (*plan.left_out(), *plan.not_restored()))
