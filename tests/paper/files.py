"""Files of checkpoints, changed after they were written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.engines.deepspeed.megatron_deepspeed import _fragment_address

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["rewrite"]


def rewrite(folder: Path, pattern: str, change: Callable[[dict[str, Any], str], None]) -> None:
    """Load the checkpoint's files of these names, let `change` work on what is in them, and save them."""
    paths = sorted(folder.glob(f"*/{pattern}"))
    assert paths
    for path in paths:
        with _fragment_address():
            value = torch.load(path, weights_only=False)
            change(value, path.name)
            torch.save(value, path)
