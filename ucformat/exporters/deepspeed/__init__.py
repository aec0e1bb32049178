"""Exporters to DeepSpeed: its engine's own files, and its universal format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucformat.exporters.base import Exporter, Target
from ucformat.exporters.deepspeed.options import DeepSpeedOptions, UniversalOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

__all__ = ["DeepSpeedExporter", "DeepSpeedUniversalExporter"]


class DeepSpeedExporter(Exporter):
    """Plans the files of a DeepSpeed engine."""

    kind = "deepspeed"
    title = "DeepSpeed"
    options_type = DeepSpeedOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.exporters.deepspeed.native import EnginePlan

        plan = EnginePlan(source, infos, self.options)
        return Target(tuple(plan.files()), plan.left_out())


class DeepSpeedUniversalExporter(Exporter):
    """Plans the files of DeepSpeed's universal format."""

    kind = "deepspeed-universal"
    title = "DeepSpeed's universal format"
    options_type = UniversalOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.exporters.deepspeed.universal import UniversalPlan

        plan = UniversalPlan(source, infos, self.options)
        return Target(tuple(plan.files()), (*plan.left_out(), *plan.not_restored()))
