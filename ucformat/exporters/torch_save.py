"""One file of `torch.save`, which `torch.load(…, weights_only=True)` reads: weights by name, or a nested state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import UnsupportedError, UsageError
from ucformat.exporters.base import Exporter, ExportOptions, Span, Target, left_out, option
from ucformat.exporters.pickle import ALLOWED, Global, SavedTensor, Storage
from ucformat.exporters.state import Leaves, nested_state
from ucformat.exporters.torch_file import torch_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo


@dataclass(frozen=True, kw_only=True)
class TorchOptions(ExportOptions):
    """The options of `TorchExporter`."""

    name: str = option("model.pt", "text", "the name of the file; `model.pt` by default")
    nested: bool = option(
        default=False,
        how="flag",
        text="write the whole nested state of the program that saved, not the weights by name",
    )

    def __post_init__(self) -> None:
        if not self.name.lower().endswith(TorchExporter.endings) or "/" in self.name:
            raise UsageError(
                f"{self.name!r} is not the name of a file of torch.save",
                hint=f"its ending must be one of {', '.join(TorchExporter.endings)}",
            )


class TorchExporter(Exporter):
    """Plans a file that `torch.load` reads."""

    kind = "torch"
    title = "PyTorch (torch.save)"
    endings = (".pt", ".pth", ".bin", ".ckpt")
    options_type = TorchOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.weights_only = not self.options.nested

    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """See Exporter."""
        if self.options.nested:
            value, left = nested_state(source, infos, Leaves(_tensor, _array, _dtype))
            left = (*left_out(source, infos, values=source.objects, groups=True), *left)
        else:
            tensors = {info.name: _tensor(info) for info in infos}
            tied = {alias: tensors[name] for alias, name in source.aliases.items() if name in tensors}
            value, left = tensors | tied, left_out(source, infos)
        return Target((torch_file(self.options.name, value, last=True),), left)


def _tensor(info: TensorInfo) -> SavedTensor:
    return SavedTensor(Storage(Span.whole(info)), info.shape)


def _array(array: NDArray[Any]) -> SavedTensor:
    from ucformat.reading.dtypes import dtype_name  # with NumPy, which the options do not need

    storage = Storage(Span(dtype_name(array.dtype), array.size, ()), array.tobytes())
    return SavedTensor(storage, array.shape)


def _dtype(name: str) -> Global:
    found = Global("torch", name)
    if found not in ALLOWED:
        raise UnsupportedError(f"the dtype {name} is not written to a pickle")
    return found
