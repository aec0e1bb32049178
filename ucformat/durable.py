"""Durable names: after a power failure a new file may have no name in its folder unless that was synced."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a missing folder is ignored."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_open_folder(fd)
    finally:
        os.close(fd)


def sync_open_folder(fd: int) -> None:
    """Make the names in an open folder durable."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no fsync of folders, and need none
            raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, all of them durable.

    Each is made after the one above it is durable: so of the existing ones only the innermost may
    not be durable yet, if its creator was killed.
    """
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    # without read permission, no ucformat process made a folder there
    with suppress(PermissionError):
        sync_folder(folder.parent)
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)
