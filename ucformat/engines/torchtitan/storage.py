"""The storage that torchtitan's managers ask about the folder of a run (`CheckpointStorage`, after 0.3.0)."""

from __future__ import annotations

from ucformat.errors import UnsupportedError
from ucformat.storage.base import exists
from ucformat.storage.url import open_store

__all__ = ["RunStorage"]


class RunStorage:
    """Answers torchtitan's questions about paths and URLs, and deletes nothing."""

    def isdir(self, path: str) -> bool:
        """Whether there are files below a path."""
        return next(iter(open_store(path).list()), None) is not None

    def isfile(self, path: str) -> bool:
        """Whether a path is that of a file."""
        folder, _, name = path.rstrip("/").rpartition("/")
        return bool(name) and exists(open_store(folder or "."), name)

    def listdir(self, path: str) -> list[str]:
        """The names directly below a path."""
        return sorted({info.key.partition("/")[0] for info in open_store(path).list()})

    def remove(self, path: str) -> None:
        """Refuse to delete: what the run no longer keeps is deleted by the rules of the catalog.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{path} is not deleted by torchtitan: others may need it",
            hint="keep_latest_k keeps the last checkpoints, and `ucp delete` deletes one",
        )
