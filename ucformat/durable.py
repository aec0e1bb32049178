"""Folders whose names are durable: a power failure takes away the name of a file until its folder was synced."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["make_folder", "sync_folder", "sync_open_folder"]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; a missing folder is ignored.

    Args:
        folder: the folder.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        sync_open_folder(fd)
    finally:
        os.close(fd)


def sync_open_folder(fd: int) -> None:
    """Make the names in an open folder durable.

    Args:
        fd: its file descriptor.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no fsync of folders, and need none
            raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, all of them durable.

    Each is made when the one above it lasts: so of those that are there, only the last may not last yet, which somebody
    made who was killed.

    Args:
        folder: the folder.
    """
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    with suppress(PermissionError):  # a folder that we may not list is not where one of us made another
        sync_folder(folder.parent)
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        sync_folder(one.parent)
