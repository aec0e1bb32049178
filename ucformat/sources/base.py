"""The interface of a source, which reads one kind of foreign checkpoint in place, and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.geometry.box import Box
    from ucformat.geometry.tensor import Extent, Key
    from ucformat.reading.readable import CheckpointMetadata, FileRecord
    from ucformat.storage.base import Store

__all__ = [
    "OpenSource",
    "PickleOptions",
    "Source",
    "SourceOptions",
    "groups_by_optimizer",
    "option",
    "options_of",
    "with_options",
]


class OpenSource(Protocol):
    """An opened foreign checkpoint: a `Readable` that also knows its kind, its store and the records of its files.

    It may also have the attribute `part`: what it is only a part of, according to the content of
    its files, such as one rank's; empty if the content proves that it is whole, as when files were
    compared with the number of ranks that they record; or None, as if it were missing: the names of
    the files decide. And where the files tell them, the attributes `id` and `training_info` of the
    checkpoint, and `place`, the url that opens it again.

    Attributes:
        kind: the `kind` of the source that opened it.
        store: the store with its files. The `file` of an extent is a key of this store.
        metadata: the tensors, objects and optimizer groups, and where the checkpoint came from.
    """

    kind: str
    store: Store
    metadata: CheckpointMetadata

    def extents(self, key: Key, within: Box | None = None) -> Iterator[Extent]:
        """Find where the bytes of a tensor are stored.

        Args:
            key: the name and state of a tensor in `metadata`.
            within: a box of the tensor; extents that do not overlap it may be left out. None: all
                of the tensor.

        Returns:
            the extents; together they cover `within`.

        Raises:
            TensorNotFound: the checkpoint has no such tensor.
            IntegrityError: the files are damaged or contradict each other.
            MissingData: a file, or a part of the tensor, is missing.
        """

    def records(self) -> Iterator[FileRecord]:
        """List the records (members, chunks) of the files that can be checked on their own.

        Returns:
            every record of every file, with its checksum if the format has one; nothing if the
            format has no checksums.
        """


def option(default: Any, how: str, text: str) -> Any:
    """Define a field of a source's options (a subclass of `SourceOptions`).

    Args:
        default: the value if the caller does not give the option.
        how: how the command line takes it: `flag`, `number`, `names`, `cuts`, `text`, or `layout`
            or `document` for a file that contains one.
        text: what it means, in one sentence, for `--help` and error messages.
    """
    return field(default=default, metadata={"how": how, "text": text})


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Facts that a caller can give to a source because the files do not contain them.

    This class has the option of all sources. A source with more defines a subclass, a frozen
    dataclass whose fields are made with `option`, and sets it as its `options_type`. The Python API
    and the command line take names and types from there.
    """

    part: bool | None = option(
        None,
        "flag",
        "true: open one part of a checkpoint by itself (one rank's file, one shard of several), "
        "and record that in "
        "whatever is made of it; false: it is whole, whatever names and content suggest",
    )


@dataclass(frozen=True, kw_only=True)
class PickleOptions(SourceOptions):
    """The options shared by all sources that read pickles."""

    allow: tuple[str, ...] = option(
        (),
        "names",
        "packages of your own whose pickled classes become inert stand-ins instead of being "
        "refused",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", tuple(self.allow))


class Source(ABC):
    """Recognises and opens one kind of foreign checkpoint.

    To support a format, subclass this, define `kind`, `title`, `is_marker`, `find` and `open`, and
    register it in the group `ucformat.sources` of the entry points of your package
    (CONTRIBUTING.md, "Add a source"). A checkpoint is a folder. For some kinds, it may also be a
    single file (`model.safetensors`): such a source defines `find_file` and `open_file`, too.

    All sources are imported whenever a checkpoint is opened, so the module of a subclass should
    import little: `open` and `open_file` import what reads the files.

    Attributes:
        kind: the identifier of the format in the API, in manifests and on the command line:
            `"dcp"`.
        title: the name of the format in messages: `"PyTorch DCP"`.
        before: the kinds whose `find` may also return true for a checkpoint of this kind; this
            source is asked first.
        packages: the packages whose classes its pickles name; these become inert stand-ins in every
            pickle.
        part_files: regular expressions of the names, in lower case, of files that only ever hold a
            part of its checkpoints, and what they are.
        options_type: the dataclass of the source's options.
        options: an instance of it, made from the keyword arguments of the constructor.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    before: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    part_files: ClassVar[Mapping[str, str]] = MappingProxyType({})
    options_type: ClassVar[type[SourceOptions]] = SourceOptions
    options: Any

    def __init__(self, **options: Any) -> None:
        self.options = self.options_type(**options)

    @abstractmethod
    def is_marker(self, name: str) -> bool:
        """Whether a file of this name marks the folder that contains it as a checkpoint of this kind.

        Used to search a tree of folders for checkpoints (`ucp register`), from listings alone.

        Args:
            name: the name of a file, without folders.
        """

    def marked_folder(self, folder: str) -> str:
        """The folder of the checkpoint that a marker is in; by default, the one that contains the file.

        Args:
            folder: the key of the folder that contains the marker.
        """
        return folder

    @abstractmethod
    def find(self, store: Store) -> bool:
        """Whether a folder looks like a checkpoint of this kind.

        Called for every location that is opened, so it should read no more than a listing and the
        first bytes of a few files. It should be true for damaged checkpoints, too, so that `open`
        can explain the damage.

        Args:
            store: a store whose root is the folder.
        """

    @abstractmethod
    def open(self, store: Store) -> OpenSource:
        """Open the checkpoint in a folder, reading metadata only: a few kilobytes of each file, no tensors.

        Args:
            store: a store whose root is the folder.

        Returns:
            the opened checkpoint.

        Raises:
            UcformatError: the checkpoint is damaged, incomplete or not supported, or an option is
                needed. Whatever the files contain, a source raises no exceptions but the subclasses
                of this one.
        """

    def part_of(self, url: str, value: Mapping[Any, Any]) -> str:  # noqa: ARG002 - for subclasses
        """What a file of this engine is a part of by the URL of its folder or by its content; else empty.

        Args:
            url: the URL of the folder; empty if only the content is asked about.
            value: the dictionary that the file holds; empty if only the URL is asked about.
        """
        return ""

    def program(self, value: Mapping[Any, Any]) -> dict[str, str]:  # noqa: ARG002 - for subclasses
        """The `name` and `version` of the program that wrote a dictionary to a file; empty if unknown."""
        return {}

    def find_file(self, store: Store, key: str) -> bool:  # noqa: ARG002 - for subclasses
        """Whether a single file looks like a checkpoint of this kind; by default, no file does.

        Args:
            store: a store whose root is the file's folder.
            key: the name of the file; at most a few bytes of it should be read.
        """
        return False

    def open_file(self, store: Store, key: str) -> OpenSource:
        """Open a single file as a checkpoint, as `open` does a folder.

        A source whose `find_file` can return true must override this.

        Args:
            store: a store whose root is the file's folder.
            key: the name of the file, for which `find_file` returned true.

        Returns:
            the opened checkpoint; `metadata.folder` is `key`.

        Raises:
            NotImplementedError: the source does not override this method.
            UcformatError: as for `open`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} defines find_file but not open_file ({store.url}/{key})"
        )


def options_of(source: Source) -> dict[str, Field[Any]]:
    """The fields of a source's options, by name; `metadata` of each has the arguments of `option`.

    Args:
        source: the source.
    """
    return {f.name: f for f in fields(source.options)}


def with_options(source: Source, options: Mapping[str, Any]) -> Source:
    """Create a source of the same kind with other options.

    Args:
        source: the source.
        options: values by name; the others get their defaults. If empty, `source` itself is
            returned.

    Raises:
        UsageError: the source has no option of that name.
    """
    if not options:
        return source
    defined = options_of(source)
    for name in options:
        if name not in defined:
            listed = [f"\n    {n}: {f.metadata['text']}" for n, f in defined.items()]
            raise UsageError(
                f"a checkpoint of {source.title} is not opened with the option {name!r}",
                hint=f"its options are:{''.join(listed)}",
            )
    return type(source)(**options)


def groups_by_optimizer(
    given: Mapping[str, Sequence[Sequence[str]]] | Sequence[Sequence[str]] | None,
) -> dict[str, Sequence[Sequence[str]]]:
    """The value of the option `groups`, by the path of each optimizer.

    Args:
        given: the parameter names of each group, in order, by the optimizer's path; or, without a
            path, those of the optimizer at `optimizer`; None if the option was not given.
    """
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {"optimizer": given}
