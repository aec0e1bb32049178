"""The interface of a source, which reads one kind of foreign checkpoint in place, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import Facts, Record
    from ucformat.storage.base import Store

__all__ = ["Folders", "OpenSource", "Source", "groups_by_optimizer", "options_of", "with_options"]


class OpenSource(Protocol):
    """One opened foreign checkpoint."""

    kind: str
    store: Store
    facts: Facts

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """See Readable."""

    def records(self) -> Iterator[Record]:
        """Every record of the checkpoint's files, where these have records with checksums; else none."""


class Folders:
    """What a source of folders alone says of single files."""

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - see Source
        """None is one of its checkpoints."""
        return False

    def open_file(self, store: Store, key: str) -> NoReturn:
        """There is none to open."""
        raise NotImplementedError(f"{store.url}/{key}")


class Source(Protocol):
    """How one kind of foreign checkpoint is recognised and opened.

    A checkpoint is a folder; of some kinds also a single file (`model.safetensors`), which is opened as a file of the
    folder that it lies in.
    """

    kind: str
    title: str  # as people call it: "PyTorch DCP"

    def marks(self, name: str) -> bool:
        """Whether a folder with a file of this name is a checkpoint of this kind: how a tree of them is searched."""

    def find(self, store: Store) -> bool:
        """Whether this place looks like a checkpoint of this kind; reads a folder listing and little else."""

    def open(self, store: Store) -> OpenSource:
        """Open it, reading kilobytes of each file."""

    def find_file(self, store: Store, key: str) -> bool:
        """Whether this single file looks like a checkpoint of this kind; reads a few bytes of it at most."""

    def open_file(self, store: Store, key: str) -> OpenSource:
        """Open it; its `facts.folder` is the file's key."""


def options_of(source: Source) -> list[str]:
    """The names of the options that a kind of source takes."""
    return [n for n, p in inspect.signature(type(source)).parameters.items() if p.kind is p.KEYWORD_ONLY]


def with_options(source: Source, options: Mapping[str, Any]) -> Source:
    """A source of the same kind that is told these options; UsageError where it does not take one."""
    if not options:
        return source
    known = options_of(source)
    for name in options:
        if name not in known:
            raise UsageError(
                f"a checkpoint of {source.title} is not opened with the option {name!r}",
                hint=f"its options are: {', '.join(known)}" if known else "it takes none",
            )
    made: Source = type(source)(**options)
    return made


def groups_by_optimizer(
    given: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None,
) -> dict[str, Sequence[Sequence[str]]]:
    """The option `groups` of files that may hold several optimizers: of one, the groups alone do."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"optimizer": given}
