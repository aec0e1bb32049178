"""The folders below a local root: made once, checked once, and remembered with what must be synced for them to last."""

from __future__ import annotations

import os
from pathlib import Path

from ucformat.errors import Refused
from ucformat.lasting import make_folder
from ucformat.storage.oserrors import explaining

__all__ = ["Folders"]


class Folders:
    """Makes folders below `root` and never leaves it through a symbolic link."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._made: dict[str, tuple[Path, ...]] = {}

    def make(self, folder: str) -> tuple[Path, ...]:
        """Make a folder and those above it; the folders to sync so that the name of a file in it lasts."""
        known = self._made.get(folder)
        if known is not None:
            if os.path.isdir(folder):  # noqa: PTH112
                return known
            self._made.clear()  # somebody deleted it
        if folder == self._root:
            with explaining("write", folder):
                make_folder(Path(folder))
            self._made[folder] = (Path(folder),)
            return self._made[folder]
        up = self.make(os.path.dirname(folder))  # noqa: PTH120
        with explaining("write", folder):
            try:
                os.mkdir(folder)  # noqa: PTH102
            except FileExistsError:
                self.stay_inside(folder)
                if not os.path.isdir(folder):  # noqa: PTH112
                    raise NotADirectoryError from None
            except FileNotFoundError:  # one above it was deleted meanwhile
                self._made.clear()
                return self.make(folder)
        self._made[folder] = (Path(folder), *up)
        return self._made[folder]

    def stay_inside(self, folder: str) -> None:
        """Refused if the folder leads out of the root through a symbolic link."""
        if not Path(folder).resolve().is_relative_to(Path(self._root).resolve()):
            raise Refused(
                f"{folder} leads out of {self._root} through a symbolic link",
                hint="ucformat reads through such links and never writes or deletes through them",
            )

    def has_no_links(self, folder: str) -> None:
        """Refused if the way from the root to the folder leads through a symbolic link: what it holds is another's."""
        below = os.path.relpath(folder, self._root)
        if os.path.realpath(folder) != os.path.normpath(os.path.join(os.path.realpath(self._root), below)):  # noqa: PTH118
            raise Refused(
                f"{folder} lies behind a symbolic link",
                hint="ucformat reads through such links and never deletes through them",
            )

    def forget(self) -> None:
        """Folders were deleted: look again."""
        self._made.clear()
