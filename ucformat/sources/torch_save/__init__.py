"""Files of `torch.save` as tensors and extents."""

from ucformat.sources.torch_save.source import TorchSave

__all__ = ["TorchSave"]
