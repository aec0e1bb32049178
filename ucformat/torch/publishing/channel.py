"""A channel: a folder with a checkpoint for each version, and a document that names the newest one.

The document is replaced after a version is committed, and only by the publisher that has read it last. So
whoever reads it finds a version that is whole, and of two publishers at once one gets an error.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from ucformat.errors import Conflict, IntegrityError, Uncertain
from ucformat.format.digest import document_digest, encoded
from ucformat.jobs.dependents import put_version, read_versioned
from ucformat.schema import MANIFEST, TOMBSTONE
from ucformat.schema.documents import CHANNEL, ChannelDoc
from ucformat.schema.values import parsed
from ucformat.storage.base import exists
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from ucformat.schema.documents import VersionDoc
    from ucformat.schema.manifest import Manifest

_FOLDER = re.compile(r"v-(\d{8,})(?:\.\d+)?", re.ASCII)


class Channel:
    """The place of a channel."""

    def __init__(self, place: str | PathLike[str]) -> None:
        self._store = open_store(place)
        self.url = self._store.url

    def place(self, version: VersionDoc) -> str:
        """Where the checkpoint of a version is."""
        return f"{self.url}/{version.folder}"

    def read(self) -> tuple[ChannelDoc | None, str | None]:
        """The document, and its content version; None if nothing has been published."""
        data, content_version = read_versioned(self._store, CHANNEL)
        if data is None:
            return None, None
        try:
            return parsed(ChannelDoc, data), content_version
        except (ValueError, RecursionError) as error:
            raise IntegrityError(
                f"{self.url}/{CHANNEL} is not the document of a channel: {str(error)[:200]}",
                hint="publish to another place",
            ) from error

    def newest(self) -> VersionDoc | None:
        """The newest version."""
        document, _ = self.read()
        return None if document is None else document.versions[0]

    def announce(self, document: ChannelDoc, content_version: str | None) -> None:
        """Replace the document.

        Args:
            content_version: of the document that this one follows.

        Raises:
            Conflict: another publisher has replaced it.
        """
        data = encoded(document)
        try:
            put_version(self._store, CHANNEL, data, content_version)
        except (Conflict, Uncertain) as error:
            current, _ = read_versioned(self._store, CHANNEL)
            if current == data:  # an answer was lost
                return
            if isinstance(error, Uncertain):
                raise
            raise Conflict(
                f"another publisher has published to {self.url} meanwhile",
                hint="a channel has one publisher; end the other one, or publish again",
            ) from error

    def free_folder(self, number: int) -> str:
        """A folder for a version, in which no publisher that was killed has left a checkpoint."""
        again, folder = 0, f"v-{number:08d}"
        while any(exists(self._store, f"{folder}/{name}") for name in (MANIFEST, TOMBSTONE)):
            again += 1
            folder = f"v-{number:08d}.{again}"
        return folder

    def folders(self) -> dict[str, int]:
        """The folders with a committed checkpoint, and the number of the version of each."""
        out = {}
        for info in self._store.list():
            folder, _, file = info.key.partition("/")
            match = _FOLDER.fullmatch(folder)
            if match and file == MANIFEST:
                out[folder] = int(match[1])
        return out

    def check(self, version: VersionDoc, manifest: Manifest) -> None:
        """Check that a checkpoint is the one that was published.

        Raises:
            Conflict: it is another one.
        """
        if manifest.id != version.id or content_digest(manifest) != version.content:
            raise Conflict(
                f"{self.place(version)} is not the checkpoint {version.id} that was published as version "
                f"{version.number} of {self.url}",
                hint="publish a new version",
            )


def content_digest(manifest: Manifest) -> str:
    """The digest of the names, dtypes, shapes and fingerprints of all tensors, however they are stored."""
    return document_digest(
        sorted([d.name, d.state, d.dtype, list(d.shape), d.fingerprint] for d in manifest.tensors)
    )


def named(state: torch.nn.Module | Mapping[str, Any]) -> Mapping[str, Any]:
    """A state as `save` and `load` take it: with a name for a model that is all of it."""
    return {"model": state} if isinstance(state, torch.nn.Module) else state
