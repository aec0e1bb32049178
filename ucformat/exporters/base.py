"""The interface of an exporter, which plans the files of a checkpoint in another format.

A target is a list of files; a file is a list of parts: bytes that the format prescribes, and spans
of elements of tensors. Exporters plan, and move no tensor: `jobs/export_files.py` reads the
elements wherever the source stores them, and writes every file from beginning to end, for all
formats in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ucformat.errors import UnsupportedError, UsageError
from ucformat.geometry.box import Box, row_major
from ucformat.geometry.tensor import Piece
from ucformat.schema import ITEMSIZE, TORCH_SAVE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import TensorInfo

__all__ = [
    "DistcpOptions",
    "ExportOptions",
    "Exporter",
    "Link",
    "Part",
    "Sealed",
    "Span",
    "Target",
    "TargetFile",
    "left_out",
    "option",
    "options_of",
    "weights_of",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive elements in a file, in row-major order, that are elements of tensors.

    Attributes:
        dtype: of the elements.
        size: number of elements.
        pieces: the tensors, and for each a piece, placed in the span: elements in no piece are
            zeros.
    """

    dtype: str
    size: int
    pieces: tuple[tuple[TensorInfo, Piece], ...]

    @classmethod
    def whole(cls, info: TensorInfo) -> Span:
        """All of a tensor.

        Args:
            info: the tensor.
        """
        piece = Piece(Box.whole(info.shape), 0, row_major(info.shape))
        return cls(info.dtype, info.size, ((info, piece),))

    @property
    def nbytes(self) -> int:
        """Bytes of the span."""
        return self.size * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Sealed:
    """Bytes that depend on the spans before them in their file.

    Attributes:
        nbytes: how many.
        make: returns them; called with the CRC-32 of each span that was written since the file
            began.
    """

    nbytes: int
    make: Callable[[Sequence[int]], bytes]


Part = bytes | Span | Sealed


@dataclass(frozen=True, slots=True)
class Link:
    """A file of the source that is the file of the target, as it is.

    Attributes:
        key: its key in the source's store.
        hard: whether to make a hard link; otherwise the two share blocks until one of them is
            written (a reflink).
        read_only: whether the permission to write may be removed from a file that gets a hard link.
    """

    key: str
    hard: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file of the target.

    Attributes:
        key: its path below the destination.
        nbytes: its size.
        parts: returns its parts in order; called when it is written.
        last: whether it is written after all others are durable, since its presence makes the
            folder a checkpoint.
        checksums: whether it has `Sealed` parts.
        link: the file of the source to link instead of writing the parts.
    """

    key: str
    nbytes: int
    parts: Callable[[], Iterable[Part]]
    last: bool = False
    checksums: bool = False
    link: Link | None = None

    @classmethod
    def of(cls, key: str, *parts: Part, last: bool = False) -> TargetFile:
        """A file of known parts.

        Args:
            key: its path.
            parts: the parts.
            last: see above.
        """
        nbytes = sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts)
        return cls(key, nbytes, lambda: parts, last, any(isinstance(p, Sealed) for p in parts))


@dataclass(frozen=True, slots=True)
class Target:
    """The files of the target, those that are `last` in the order in which they are written.

    Attributes:
        files: the files.
        left_out: what of the source has no place in the target, such as `exp_avg of 290 tensors`.
    """

    files: tuple[TargetFile, ...]
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that no file replaces another."""
        twice = [
            key for key, count in Counter(file.key for file in self.files).items() if count > 1
        ]
        if twice:
            raise UnsupportedError(
                f"two files of the export would have the path {twice[0]}",
                hint="give tensors other names by a view",
            )


def option(default: Any, how: str, text: str) -> Any:
    """Define a field of an exporter's options (a subclass of `ExportOptions`).

    Args:
        default: the value if the caller does not give the option.
        how: how the command line takes it: `flag`, `number`, `size` in bytes, `names`, `layout`,
            `link`, `text` or `path`.
        text: what it means, in one sentence, for `--help` and error messages.
    """
    return field(default=default, metadata={"how": how, "text": text})


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an exporter; a subclass defines them with `option`."""


@dataclass(frozen=True, kw_only=True)
class DistcpOptions(ExportOptions):
    """The options of formats whose files are those of DCP (`exporters/distcp.py`)."""

    max_file_bytes: int = option(
        1_000_000_000,
        "size",
        "maximum size of a file, unless a single item is larger; 1 GB by default",
    )
    max_item_bytes: int = option(
        64 << 20,
        "size",
        "maximum size of a chunk of a tensor, which loaders read whole; 64 MiB by default",
    )

    def __post_init__(self) -> None:
        for name, value in (
            ("max_file_bytes", self.max_file_bytes),
            ("max_item_bytes", self.max_item_bytes),
        ):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")


class Exporter(ABC):
    """Plans the files of one format.

    To support a format, subclass this, define `kind`, `title` and `target`, and register it in the
    group `ucformat.exporters` of the entry points of your package (CONTRIBUTING.md, "Add an
    exporter"). `ucp export --help` imports all of them, so their modules import what plans the files
    when it is needed.

    Attributes:
        kind: the identifier of the format in the API and on the command line.
        title: the name of the format in messages.
        summary: its line in `ucp export --help` (default: the title).
        weights_only: whether the format has a place for one tensor of each name: its weight, or its
            master where only that is stored.
        dtypes: those that the format has.
        endings: the endings of file names, in lower case, if the format is a single file, or may be
            one. A destination with such a name is the file itself, and its name becomes the option
            `name`.
        options_type: the dataclass of its options.
        options: an instance of it, made from the keyword arguments of the constructor.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str] = ""
    weights_only: bool = False
    dtypes: ClassVar[Collection[str]] = TORCH_SAVE_DTYPES
    endings: ClassVar[tuple[str, ...]] = ()
    options_type: ClassVar[type[ExportOptions]] = ExportOptions
    options: Any

    def __init__(self, **options: Any) -> None:
        defined = options_of(type(self))
        for name in options:
            if name not in defined:
                listed = [f"\n    {n}: {f.metadata['text']}" for n, f in defined.items()]
                raise UsageError(
                    f"{self.title} is not exported with the option {name!r}",
                    hint=f"its options are:{''.join(listed)}" if listed else "it takes none",
                )
        self.options = self.options_type(**options)

    @property
    def one_file(self) -> bool:
        """Whether the target is a file, beside which there may be any others, and not a folder."""
        return bool(self.endings) and self.options.name.lower().endswith(self.endings)

    @abstractmethod
    def target(self, source: Checkpoint, infos: Sequence[TensorInfo]) -> Target:
        """Plan the files; reads no tensors.

        The result is a pure function of the source and the options: other processes plan the same
        files.

        Args:
            source: the checkpoint, perhaps through a view.
            infos: the tensors to export, in order; with `weights_only`, one of each name.

        Raises:
            UcformatError: something cannot be expressed in the format; the message names the
                tensor.
        """


def options_of(exporter: type[Exporter]) -> dict[str, Field[Any]]:
    """The fields of an exporter's options, by name; `metadata` of each has the arguments of `option`.

    Args:
        exporter: the exporter's class.
    """
    return {f.name: f for f in fields(exporter.options_type)}


def weights_of(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The tensors that a file with one tensor of each name holds: the weights, or masters where only these are stored.

    Args:
        infos: all tensors.
    """
    best: dict[str, TensorInfo] = {}
    for info in infos:
        if info.state == "weight" or (info.state == "master" and info.name not in best):
            best[info.name] = info
    return list(best.values())


def left_out(
    source: Checkpoint,
    infos: Sequence[TensorInfo],
    *,
    values: Collection[str] = (),
    assets: Collection[str] = (),
    groups: bool = False,
    part: bool = False,
) -> tuple[str, ...]:
    """What of a checkpoint a target leaves out.

    Args:
        source: the checkpoint.
        infos: the tensors that are exported.
        values: the names of non-tensor values that are exported (default: none).
        assets: the names of assets that are exported (default: none).
        groups: whether the hyper-parameters of the optimizer are exported (default: no).
        part: whether the target says that it is only a part of a checkpoint, if it is (default:
            no).
    """
    exported = {info.key for info in infos}
    states = Counter(key.state for key in source.tensors if key not in exported)
    part_of = source.metadata.part_of
    descriptions = (
        [f"that it is only a part of a checkpoint: {part_of}"] if part_of and not part else []
    )
    descriptions += [
        f"{state} of {count:,} tensor{'s' * (count != 1)}" for state, count in states.items()
    ]
    if source.metadata.groups and not groups:
        descriptions.append("the hyper-parameters of the optimizer")
    for kind, names, exported_names in (
        ("value", source.objects, values),
        ("value of each rank", source.per_rank, values),
        ("asset", source.assets, assets),
    ):
        descriptions += [f"the {kind} {name}" for name in names if name not in exported_names]
    descriptions += [
        f"the file {name}, which was not read"
        for name in source.unread
        if name not in source.assets
    ]
    return tuple(descriptions)
