"""What there is to see of a folder that nobody is to touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["looks"]


def looks(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file and folder: its content, and what `lstat` says, times and the number of names among it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        s = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (s.st_ino, s.st_mode, s.st_nlink, s.st_mtime_ns, s.st_ctime_ns, content)
    return found
