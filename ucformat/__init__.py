"""Checkpoints for large models: every layout saves them, every layout reads exactly its slice."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ucformat._version import __version__

if TYPE_CHECKING:
    from ucformat import errors
    from ucformat.checkpoint import Checkpoint
    from ucformat.checkpoint import open_checkpoint as open  # noqa: A004
    from ucformat.format.zarr_types import register_zarr_dtypes
    from ucformat.geometry.layout import Layout
    from ucformat.jobs.convert import convert
    from ucformat.jobs.verify import Report, verify
    from ucformat.planning import ReadPlan
    from ucformat.tensor import Tensor

__all__ = [
    "Checkpoint",
    "Layout",
    "ReadPlan",
    "Report",
    "Tensor",
    "__version__",
    "convert",
    "errors",
    "open",
    "register_zarr_dtypes",
    "verify",
]

_HOMES = {
    "Checkpoint": "checkpoint:Checkpoint",
    "Layout": "geometry.layout:Layout",
    "ReadPlan": "planning:ReadPlan",
    "Report": "jobs.verify:Report",
    "Tensor": "tensor:Tensor",
    "convert": "jobs.convert:convert",
    "errors": "errors:",
    "open": "checkpoint:open_checkpoint",
    "register_zarr_dtypes": "format.zarr_types:register_zarr_dtypes",
    "verify": "jobs.verify:verify",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used, so that `import ucformat` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ucformat' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found: object = import_module(f"ucformat.{module}")
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
