"""The files in a foreign checkpoint's folder that its source has not read: small ones are kept, all others are named.

A source lists what it has read (`metadata.files`) and what it keeps as it is (`metadata.assets`).
Whatever else is in the folder may be a part of the training state that this version does not know,
so nothing of it is left out in silence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ucformat.reading.readable import TRACKERS
from ucformat.schema import CATALOG_DOCUMENT, NEEDED_BY, TOMBSTONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.sources.base import OpenSource

_MAX_FILE_BYTES = 1 << 20  # of a file that is kept
_MAX_KEPT_BYTES = 32 << 20  # of all that are kept
_MAX_KEPT = 256
# that DeepSpeed copies beside each checkpoint
_SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})
# in the folder of a universal checkpoint
_ATTEMPT = re.compile(r"(.+/)attempts/[0-9a-f]{20}\.json")


def find_unread(source: OpenSource) -> dict[str, int]:
    """List the files of the folder that the source neither read nor keeps, with their sizes.

    If the store's root is above the checkpoint's folder, the files beside that folder count, too,
    and other folders there do not: they are other checkpoints of the run. Neither do universal
    checkpoints inside the folder.
    """
    metadata = source.metadata
    # a file that was opened by its name, whatever is beside it
    if metadata.folder in metadata.files:
        return {}
    sizes = {info.key: info.size for info in source.store.list()}
    listed = {*metadata.files, *metadata.assets}
    below = f"{metadata.folder}/" if metadata.folder else ""
    universal = tuple({match[1] for key in sizes if (match := _ATTEMPT.fullmatch(key))})
    return {
        key: size
        for key, size in sorted(sizes.items())
        if key not in listed
        and not key.startswith(universal)
        and _is_part(key, below)
        and not _is_record(key, below)
    }


def small_enough(unread: Mapping[str, int]) -> Iterator[str]:
    """The files that are kept as assets although their meaning is unknown."""
    room, count = _MAX_KEPT_BYTES, 0
    for key, size in unread.items():
        if size <= min(_MAX_FILE_BYTES, room) and count < _MAX_KEPT:
            room -= size
            count += 1
            yield key


def _is_part(key: str, below: str) -> bool:
    """Whether a file is in the checkpoint's folder, or directly in one above it."""
    folder = key.rpartition("/")[0]
    return key.startswith(below) or not folder or below.startswith(f"{folder}/")


def _is_record(key: str, below: str) -> bool:
    """Whether a file has no state: it names the last checkpoint, is an engine's script, or a record of ours."""
    if key in TRACKERS or key.rpartition("/")[2] in _SCRIPTS:
        return True
    path = key.removeprefix(below)
    return path in (CATALOG_DOCUMENT, TOMBSTONE) or path.startswith(f"{NEEDED_BY}/")
