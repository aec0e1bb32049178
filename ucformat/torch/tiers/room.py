"""Whether a node has room for what its tier is to hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ucformat.errors import UcformatError
from ucformat.storage.base import HIDDEN

__all__ = ["check_room"]


def check_room(checkpoint: str, nbytes: int, times: int) -> None:
    """Check that a file system has room for what a tier will hold, that which it holds now included.

    Args:
        checkpoint: the folder of a checkpoint in the tier's folder.
        nbytes: that this rank is about to write.
        times: how many times as many bytes the ranks of this node will hold.

    Raises:
        UcformatError: there is not; nothing is written.
    """
    root = Path(checkpoint).parent
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free, used = shutil.disk_usage(existing).free, _bytes_below(root)
    if nbytes * times > free + used:
        raise UcformatError(
            f"the tier {root} will hold {nbytes * times:,} bytes on this node, which has room for "
            f"{free + used:,}: {times} times the {nbytes:,} that this rank writes, for the "
            "checkpoints that are kept, the one that is written, those that slower tiers are filled "
            "from, copies of other nodes, and each rank",
            hint="keep or copy fewer (keep=, replicas= of the first tier), or give it another folder",
        )


def _bytes_below(root: Path) -> int:
    """The bytes of files below a folder, except of those that are being written."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += 0 if name.startswith(HIDDEN) else Path(folder, name).stat().st_size
            except OSError:  # removed meanwhile
                continue
    return total
