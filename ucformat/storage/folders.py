"""The folders below a local root, each opened by its name in the one above it, so that no link leads anywhere else.

What is done to names in a folder that is open is done in that folder, whatever stands in its place by then. So whoever
exchanges folders for symbolic links, at whatever moment, has nothing written, renamed or removed elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from ucformat.durable import make_folder, sync_open_folder
from ucformat.errors import UnsafeError
from ucformat.settings import roots_with
from ucformat.storage.error_mapping import mapping_os_errors
from ucformat.storage.local_files import Descriptor

__all__ = ["Folders", "is_folder", "link_target", "refuse_broken_link", "remove", "roots_hint", "upwards"]

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folders:
    """Opens, makes and syncs folders below `root`, known by their keys; `""` is the root, whose path may hold links."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._made = False

    def open(self, folder: str) -> Descriptor:
        """Open a folder.

        Raises:
            UnsafeError: a symbolic link stands on the way to it.
        """
        return Descriptor(self._opened(folder))

    def make(self, folder: str) -> Descriptor:
        """Open a folder, after it and those above it were made where they are missing; UnsafeError as `open`."""
        with mapping_os_errors("write", self._path(folder)):
            while True:
                if not self._made:
                    make_folder(Path(self._root))
                    self._made = True
                try:
                    return Descriptor(self._opened(folder, make=True))
                except FileNotFoundError:  # one of them was removed meanwhile
                    self._made = False

    def must_be(self, folder: str, opened: Descriptor) -> None:
        """Raise an error if something else, a symbolic link for one, stands where the folder stood that was opened.

        Args:
            folder: its key.
            opened: what was opened by that.

        Raises:
            UnsafeError: a symbolic link stands on the way to it.
            OSError: it is gone, or another folder stands there.
        """
        with suppress(OSError):
            if os.path.samestat(os.stat(self._path(folder)), os.fstat(opened.fd)):  # noqa: PTH116
                return
        self.open(folder)  # which says what it is
        raise FileNotFoundError(errno.ENOENT, "another folder stands there by now")

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable; a folder that is gone has none."""
        with mapping_os_errors("make durable", self._path(folder)), suppress(FileNotFoundError):
            opened = self.open(folder)
            sync_open_folder(opened.fd)

    def settle(self, folder: str, opened: Descriptor) -> None:
        """Make durable the names in a folder that is open, and its own and those above it, if it still stands there.

        Args:
            folder: its key.
            opened: what was opened by that.

        Raises:
            UcformatError: they may not last, or something else stands there by now.
        """
        with mapping_os_errors("make durable", self._path(folder)):
            sync_open_folder(opened.fd)
        for above in upwards(folder)[1:]:
            self.sync(above)
        with mapping_os_errors("make durable", self._path(folder)):
            self.must_be(folder, opened)

    def _path(self, folder: str) -> str:
        return f"{self._root}/{folder}" if folder else self._root

    def _opened(self, folder: str, *, make: bool = False) -> int:
        """Open the root, and each folder in the one above it; with `make`, make those that are missing."""
        fd = os.open(self._root, _FLAGS)
        names = folder.split("/") if folder else []
        for number, name in enumerate(names, 1):
            above = fd
            try:
                fd = _made(name, above) if make else os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
            except NotADirectoryError:  # so it is said of a link, too
                _refuse_link("/".join((self._root, *names[:number])), name, above)
                raise
            finally:
                os.close(above)
        return fd


def upwards(folder: str) -> list[str]:
    """A folder and those above it, up to the root."""
    found = [folder]
    while folder:
        folder = folder.rpartition("/")[0]
        found.append(folder)
    return found


def is_folder(name: str, above: Descriptor, *, follow: bool = True) -> bool:
    """Whether a folder has this name.

    Args:
        name: what is looked for.
        above: where, which is open.
        follow: a link to a folder is one, too (default: yes).
    """
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=above.fd, follow_symlinks=follow).st_mode)
    except FileNotFoundError:
        return False


def remove(name: str, folder: Descriptor) -> None:
    """Remove a file, if it is there.

    Args:
        name: the file's.
        folder: where it is, which is open.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder.fd)


def refuse_broken_link(path: Path, folder: Descriptor) -> None:
    """See that no link that leads nowhere has a file's name, so that there is none and none can be put there.

    Args:
        path: the file's.
        folder: where it is, which is open.

    Raises:
        UnsafeError: it names the link.
    """
    try:
        os.stat(path.name, dir_fd=folder.fd)
    except FileNotFoundError:
        _refuse_link(str(path), path.name, folder.fd)


def _made(name: str, above: int) -> int:
    while True:
        with suppress(FileNotFoundError):
            return os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=above)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)


def _refuse_link(path: str, name: str, above: int) -> None:
    try:
        leads = os.readlink(name, dir_fd=above)
    except OSError:  # it is none
        return
    raise UnsafeError(
        f"{path} is a symbolic link, to {leads}",
        hint="ucformat reads through such links and never writes or deletes through them: put what they lead to in "
        "their place, or give the place where that is",
    ) from None


def roots_hint(folder: str) -> str:
    """How to say that files in this folder, or place, may be read."""
    return f"if files may be read there: {roots_with(folder)}, `roots` in config.toml, or open(place, roots=[…])"


def link_target(root: str | os.PathLike[str], key: str) -> str:
    """The folder that the last link on the way from a root to a file leads to, or in which the file is that it is.

    Args:
        root: a local place.
        key: the file's.
    """
    at = led = os.path.realpath(root)
    for name in key.split("/"):
        at = os.path.realpath(f"{at}/{name}")
        if not at.startswith(f"{led}/"):
            led = at
    return led if os.path.isdir(led) else os.path.dirname(led)  # noqa: PTH112, PTH120 - texts, as they are shown
