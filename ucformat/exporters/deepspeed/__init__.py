"""Exporters to DeepSpeed: its engine's own files, and its universal format."""

from ucformat.exporters.deepspeed.native import DeepSpeedExporter
from ucformat.exporters.deepspeed.universal import DeepSpeedUniversalExporter

__all__ = ["DeepSpeedExporter", "DeepSpeedUniversalExporter"]
