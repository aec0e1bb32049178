"""The exporters to the formats of PyTorch: DCP, and files of `torch.save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.engines.pytorch.export_options import TORCH_ENDINGS, DcpOptions, TorchOptions
from ucformat.exporters.base import Exporter, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo


class DcpExporter(Exporter):
    """Plans the files of a DCP checkpoint."""

    kind = "dcp"
    title = "PyTorch DCP"
    summary = "PyTorch Distributed Checkpoint, for FSDP2, torchtitan and others."
    options_type = DcpOptions

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.pytorch.dcp_export import plan_target

        return plan_target(source, infos, self.options)


class TorchExporter(Exporter):
    """Plans a file that `torch.load` reads."""

    kind = "torch"
    title = "PyTorch (torch.save)"
    summary = "One file of torch.save."
    endings = TORCH_ENDINGS
    options_type = TorchOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weights_only = not self.options.nested

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        from ucformat.engines.pytorch.torch_save_export import plan_target

        return plan_target(source, infos, self.options)
