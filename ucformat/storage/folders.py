"""The folders below a local root, each opened by name relative to its parent, so that no symbolic link is followed.

Operations on names in an open folder affect that folder, even if its path leads elsewhere by then.
So an attacker who exchanges folders for symbolic links, at any moment, cannot cause a file
elsewhere to be written, renamed or removed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucformat.durable import make_folder, sync_open_folder
from ucformat.errors import UnsafeError
from ucformat.settings import roots_with
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.local_files import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterable

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Opens, creates and syncs folders below a root, by their keys.

    `""` is the root, whose own path may contain links.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._made = False

    def open(self, folder: str) -> Descriptor:
        """Open a folder."""
        return Descriptor(self._open_path(folder))

    def make(self, folder: str) -> Descriptor:
        """Open a folder after creating it and its parents, if they are missing."""
        with mapping_os_errors("write", self._path(folder)):
            while True:
                if not self._made:
                    make_folder(Path(self._root))
                    self._made = True
                try:
                    return Descriptor(self._open_path(folder, make=True))
                except FileNotFoundError:  # one of them was removed meanwhile
                    self._made = False

    def check_same(self, folder: str, opened: Descriptor) -> None:
        """Check that the path of a folder still leads to the folder that was opened."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path(folder)), os.fstat(opened.fd)):  # noqa: PTH116
                return
        self.open(folder)  # raises the specific error
        raise FileNotFoundError(errno.ENOENT, "another folder has its name by now")

    def sync(self, folders: Iterable[str]) -> None:
        """Make the names in folders durable; a missing folder has none."""
        # the last folder and those above it that are open, so that few are opened twice
        line: list[tuple[str, Descriptor]] = []
        for folder in sorted(folders):
            while line and line[-1][0] and not folder.startswith(f"{line[-1][0]}/"):
                line.pop()
            with mapping_os_errors("make durable", self._path(folder)), suppress(FileNotFoundError):
                opened = Descriptor(self._open_path(folder, above=line[-1] if line else None))
                line.append((folder, opened))
                sync_open_folder(opened.fd)

    def sync_upwards(self, folder: str, opened: Descriptor) -> None:
        """Make durable the names in an open folder and in its parents, and check that its path is unchanged."""
        with mapping_os_errors("make durable", self._path(folder)):
            sync_open_folder(opened.fd)
        self.sync(with_parents(folder)[1:])
        with mapping_os_errors("make durable", self._path(folder)):
            self.check_same(folder, opened)

    def _path(self, folder: str) -> str:
        return f"{self._root}/{folder}" if folder else self._root

    def _open_path(
        self, folder: str, *, make: bool = False, above: tuple[str, Descriptor] | None = None
    ) -> int:
        """Open the root, then each folder relative to its parent; with `make`, create missing ones.

        Args:
            above: an open folder, and its key, from which to begin (default: the root).
        """
        fd = os.open(self._root, _FLAGS) if above is None else os.dup(above[1].fd)
        names = folder.split("/") if folder else []
        depth = 0 if above is None else len(with_parents(above[0])) - 1
        for number, name in enumerate(names[depth:], depth + 1):
            parent = fd
            try:
                fd = (
                    _made(name, parent)
                    if make
                    else os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=parent)
                )
            except NotADirectoryError:  # also raised for a link
                _reject_link("/".join((self._root, *names[:number])), name, parent)
                raise
            finally:
                os.close(parent)
        return fd


def with_parents(folder: str) -> list[str]:
    """A folder and its parents, up to the root."""
    folders = [folder]
    while folder:
        folder = folder.rpartition("/")[0]
        folders.append(folder)
    return folders


def is_folder(name: str, above: Descriptor, *, follow: bool = True) -> bool:
    """Whether a name in an open folder is a folder."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=above.fd, follow_symlinks=follow).st_mode)
    except FileNotFoundError:
        return False


def remove(name: str, folder: Descriptor) -> None:
    """Delete a file in an open folder, if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder.fd)


def reject_broken_link(path: Path, folder: Descriptor) -> None:
    """Check that the name of a file is not a dangling symbolic link, through which nothing can be put."""
    try:
        os.stat(path.name, dir_fd=folder.fd)
    except FileNotFoundError:
        _reject_link(str(path), path.name, folder.fd)


def _made(name: str, above: int) -> int:
    while True:
        with suppress(FileNotFoundError):
            return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)


def _reject_link(path: str, name: str, above: int) -> None:
    try:
        target = os.readlink(name, dir_fd=above)
    except OSError:  # it is not a link
        return
    raise UnsafeError(
        f"{path} is a symbolic link, to {target}",
        hint="ucformat reads through such links and never writes or deletes through them: replace the link by its "
        "target, or use the path of the target",
    ) from None


def roots_hint(folder: str) -> str:
    """A hint how to allow reading files in a folder."""
    return (
        f"if files may be read there: {roots_with(folder)}, `roots` in config.toml, or "
        "open(place, roots=[…])"
    )


def link_target(root: str | os.PathLike[str], key: str) -> str:
    """The target of the last symbolic link on the path of a file, or its folder if the target is the file."""
    at = target = os.path.realpath(root)
    for name in key.split("/"):
        at = os.path.realpath(f"{at}/{name}")
        if not at.startswith(f"{target}/"):
            target = at
    return target if os.path.isdir(target) else os.path.dirname(target)  # noqa: PTH112, PTH120 - strings, to be shown
