"""Run PyTorch's own tests of `torch.distributed.checkpoint` with our Writer and Reader as its storage.

    python -m tests.torch.pytorch_suite PYTORCH/test/distributed/checkpoint/test_dtensor_resharding.py [-v -k PATTERN]

The file of a PyTorch checkout is run as it is, but `FileSystemWriter` and `FileSystemReader` are ours, tests that ask
for several GPUs run on the CPU, and `.cuda()` does nothing where there is none. Needs `pip install expecttest`.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def use_ours() -> None:
    """Put our storage in place of PyTorch's, wherever it is named."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem

    import ucformat.torch as ucf

    class FileSystemWriter(ucf.Writer):
        """Writes as PyTorch's does by default: over what is there."""

        def __init__(self, path: Any, *_: Any, overwrite: bool = True, **__: Any) -> None:
            super().__init__(path, overwrite=overwrite)

    class FileSystemReader(ucf.Reader):
        def __init__(self, path: Any, *_: Any, **__: Any) -> None:
            super().__init__(path)

    for module in (dcp, filesystem, _storage_utils):
        module.FileSystemWriter, module.FileSystemReader = FileSystemWriter, FileSystemReader


def do_without_gpus() -> None:
    """Let tests that ask for GPUs run on the CPU."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def as_it_is(_: int, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = common_dtensor.skip_if_lt_x_gpu = as_it_is
    torch.nn.Module.cuda = lambda self, *_: self
    torch.Tensor.cuda = lambda self, *_: self


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that the tests start
    use_ours()
    if not torch.cuda.is_available():
        do_without_gpus()

if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(place.parent))
    importlib.import_module(place.stem)
    unittest.main(module=place.stem, argv=[str(place), *sys.argv[2:]])
