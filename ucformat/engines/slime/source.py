"""How the weight versions of slime and miles are recognised."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucformat.errors import UcformatError, UsageError
from ucformat.sources.base import Source, SourceOptions, option

if TYPE_CHECKING:
    from ucformat.engines.slime.opened import OpenVersion
    from ucformat.sources.base import OpenSource
    from ucformat.storage.base import Store

__all__ = ["Slime"]


@dataclass(frozen=True, kw_only=True)
class VersionOptions(SourceOptions):
    """The options for opening a weight version."""

    version: int | None = option(
        None,
        "number",
        "of the folder of all versions, the number of the one to open; the newest by default",
    )
    base: str | None = option(
        None,
        "text",
        "the path or url of version 0, the Hugging Face checkpoint that the first delta changes",
    )

    def __post_init__(self) -> None:
        if self.version is not None and (type(self.version) is not int or self.version < 0):
            raise UsageError(f"version={self.version!r} is not the number of a version")
        if self.base is not None and (not isinstance(self.base, str) or not self.base):
            raise UsageError(f"base={self.base!r} is not the path or url of a checkpoint")


class Slime(Source):
    """Recognises and opens the folder of a delta, and the folder of all versions."""

    kind = "slime"
    title = "slime weight versions"
    before = ("huggingface", "safetensors", "torch_save")
    options_type = VersionOptions
    options: VersionOptions

    def is_marker(self, name: str) -> bool:  # noqa: ARG002 - see below
        """None: the files are named as in any folder of safetensors files, whose source marks it."""
        return False

    def find(self, store: Store) -> bool:
        """Whether the folder is that of a delta, or of versions."""
        from ucformat.engines.slime.folder import has_versions, is_delta

        return is_delta(store) or has_versions(store)

    def open(self, store: Store) -> OpenVersion:
        """Open a version, with all deltas back to a full one: reads their indexes and headers."""
        from ucformat.engines.slime.folder import find_version
        from ucformat.engines.slime.opened import OpenVersion

        return OpenVersion(*find_version(store, self.options.version), self.options.base)

    def find_file(self, store: Store, key: str) -> bool:
        """Whether the file is one of a delta, which alone is nothing."""
        from ucformat.engines.slime.folder import is_delta, is_weights

        with suppress(UcformatError):
            return is_weights(key) and is_delta(store)
        return False

    def open_file(self, store: Store, key: str) -> OpenSource:
        """Refuse it.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{store.url}/{key} is a file of a delta, which only has meaning with the version that it changes",
            hint=f"open the folder: {store.url}",
        )
