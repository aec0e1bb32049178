"""The interface of a source, which reads one kind of foreign checkpoint in place, and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import CheckpointMetadata, FileRecord
    from ucformat.storage.base import Store

__all__ = [
    "OpenSource",
    "PickleOptions",
    "Source",
    "SourceOptions",
    "by_precedence",
    "groups_by_optimizer",
    "option",
    "options_of",
    "with_options",
]


class OpenSource(Protocol):
    """One opened foreign checkpoint."""

    kind: str
    store: Store
    metadata: CheckpointMetadata

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """See Readable."""

    def records(self) -> Iterator[FileRecord]:
        """Every record of the checkpoint's files, where these have records with checksums; else none."""


def option(default: Any, how: str, text: str) -> Any:
    """A field of a source's options.

    Args:
        default: its value where the caller does not give one.
        how: how it is written on the command line: `flag`, `number`, `names`, `cuts`, or `layout` or `document` for a
            file with one.
        text: what it means, in a sentence.
    """
    return field(default=default, metadata={"how": how, "text": text})


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a caller can tell a source that the files do not: none; a source that has options has a subclass."""


@dataclass(frozen=True, kw_only=True)
class PickleOptions(SourceOptions):
    """The option of all that unpickle."""

    allow: tuple[str, ...] = option(
        (), "names", "packages of your own whose pickled classes become inert stand-ins instead of being refused"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", tuple(self.allow))


class Source(ABC):
    """How one kind of foreign checkpoint is recognised and opened.

    A checkpoint is a folder; of some kinds also a single file (`model.safetensors`), which is opened as a file of its
    folder. The keyword arguments are those of `options_type`.
    """

    kind: ClassVar[str]
    title: ClassVar[str]  # as people call it: "PyTorch DCP"
    before: ClassVar[tuple[str, ...]] = ()  # the kinds that may recognise the same place, and must not open it
    options_type: ClassVar[type[SourceOptions]] = SourceOptions
    options: Any

    def __init__(self, **options: Any) -> None:
        self.options = self.options_type(**options)

    @abstractmethod
    def marks(self, name: str) -> bool:
        """Whether a folder with a file of this name is a checkpoint of this kind: how a tree of them is searched."""

    @abstractmethod
    def find(self, store: Store) -> bool:
        """Whether this place looks like a checkpoint of this kind; reads a folder listing and little else."""

    @abstractmethod
    def open(self, store: Store) -> OpenSource:
        """Open it, reading kilobytes of each file."""

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - no file is one, unless a source says so
        """Whether this single file looks like a checkpoint of this kind; reads a few bytes of it at most."""
        return False

    def open_file(self, store: Store, key: str) -> OpenSource:
        """Open it; its `metadata.folder` is the file's key."""
        raise NotImplementedError(f"{store.url}/{key}")


def by_precedence(sources: Iterable[Source]) -> tuple[Source, ...]:
    """The sources, each ahead of those that it comes `before`."""
    kinds = {source.kind: source for source in sources}
    order: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(kinds, ()))
    for kind, source in kinds.items():
        for other in source.before:
            order.add(other, kind)
    return tuple(kinds[kind] for kind in order.static_order())


def options_of(source: Source) -> dict[str, Field[Any]]:
    """The options that a kind of source takes, by name."""
    return {f.name: f for f in fields(source.options)}


def with_options(source: Source, options: Mapping[str, Any]) -> Source:
    """A source of the same kind with these options; UsageError where it does not take one."""
    if not options:
        return source
    known = options_of(source)
    for name in options:
        if name not in known:
            listed = [f"\n    {n}: {f.metadata['text']}" for n, f in known.items()]
            raise UsageError(
                f"a checkpoint of {source.title} is not opened with the option {name!r}",
                hint=f"its options are:{''.join(listed)}" if listed else "it takes none",
            )
    return type(source)(**options)


def groups_by_optimizer(
    given: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None,
) -> dict[str, Sequence[Sequence[str]]]:
    """The option `groups` of files that may hold several optimizers: of one, the groups alone do."""
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"optimizer": given}
