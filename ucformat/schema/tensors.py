"""The tensors of a manifest, as columns of a table (docs/spec/format.md, "Tensors").

A table of a million tensors is parsed and checked as columns. A TensorDoc is made for the rows that
somebody asks for.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import add, lt
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator
from pydantic_core import to_json

from ucformat.schema import FINGERPRINT, ITEMSIZE
from ucformat.schema.limits import MAX_BASES, MAX_INTEGER, MAX_TEXT
from ucformat.schema.values import Finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Size = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Edge = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|xxh3:[0-9a-f]{32})$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_SCHEMA = {"maxLength": MAX_TEXT}


def _limited(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise ValueError(f"a text has at most {MAX_TEXT:,} characters, and this one {len(text):,}")
    return text


def _all_limited(texts: list[str]) -> list[str]:
    _limited(max(texts, key=len, default=""))
    return texts


_Names = Annotated[
    list[Annotated[str, Field(json_schema_extra=_SCHEMA)]], AfterValidator(_all_limited)
]
#: Text that a writer may have from anywhere. What is not Unicode is refused with its place when the
#: document is encoded; pydantic's own `max_length` would refuse it without saying what to do.
Text = Annotated[str, AfterValidator(_limited), Field(json_schema_extra=_SCHEMA)]
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~%/-]+$", max_length=MAX_TEXT)]
DType = Annotated[str, Field(max_length=MAX_TEXT, examples=list(ITEMSIZE))]
StatePath = tuple[
    Annotated[str | Annotated[int, Field(strict=True)], Field(union_mode="left_to_right")], ...
]

_Number = Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # of a row or an entry
_Row = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]
_Part = Annotated[
    str | Annotated[int, Field(strict=True)] | tuple[str, str], Field(union_mode="left_to_right")
]
_Template = tuple[_Part, ...]
_Error = Annotated[Finite, Field(ge=0)]


def _listed(
    numbers: Any,
) -> Any:  # of a function that is built in pydantic would parse the signature
    return list(numbers)


if TYPE_CHECKING:
    _Column = Sequence[int]
else:  # 4 bytes for each row instead of 40
    _Column = Annotated[
        list[_Number], AfterValidator(lambda rows: array("i", rows)), PlainSerializer(_listed)
    ]


_BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}


#: How tensors are encoded: the chunks of arrays by Blosc, packed tiles each as its file's index says.
BLOSC, TILES = "blosc", "tiles"
CODECS = (BLOSC, TILES)


class _Stored:
    """What a document of a tensor, or of a kind of tensors, says of its elements and of where they are."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def dtype(self) -> str: ...
        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def itemsize(self) -> int | None: ...
        @property
        def path(self) -> str | None: ...
        @property
        def codec(self) -> str | None: ...
        @property
        def base(self) -> int | None: ...

    @property
    def is_referenced(self) -> bool:
        """Whether it is a tensor of another checkpoint, of which nothing is stored here."""
        return self.base is not None and self.codec is None

    @property
    def in_sidecar(self) -> bool:
        """Whether the sidecar says where its elements are: it is neither an array nor referenced."""
        return self.path is None and not self.is_referenced

    @property
    def stored_dtype(self) -> str:
        """The dtype, or one of elements of the same size if it is of a later version or a vendor."""
        return self.dtype if self.dtype in ITEMSIZE else _BITS[self.itemsize or 1]

    @property
    def unit(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.stored_dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements of one tensor."""
        return math.prod(self.shape) * self.unit


@dataclass(frozen=True, slots=True)
class TensorDoc(_Stored):
    """One tensor in one state: a Zarr array if it has a `path`, that of another checkpoint if `is_referenced`.

    Of any other the sidecar lists or describes the extents. `at` are its paths in the state of the
    program that saved: several of tied names. `bound` are the largest absolute and relative
    error that the encoding `lossy` has made. `step` is that at which the program had these elements,
    if that is an earlier one than the checkpoint's.
    """

    name: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...] | None = None
    shard: tuple[int, ...] | None = None
    digest: str | None = None
    path: str | None = None
    at: tuple[StatePath, ...] = ()
    itemsize: int | None = None
    fingerprint: str | None = None
    codec: str | None = None
    base: int | None = None
    lossy: str | None = None
    bound: tuple[float, float] | None = None
    step: int | None = None


class KindDoc(_Stored, BaseModel):
    """What many tensors have in common.

    Attributes:
        chunk: the shape of a chunk; None if the tensors are not arrays.
        shard: the shape of a shard, likewise.
        path: the folder of the arrays' folders, likewise.
        at: the paths in the state of the program, in which a pair of texts stands for these with
            the tensor's name between them.
        itemsize: bytes of an element, needed if the dtype is not one of this version.
        codec: how chunks or tiles are encoded, one of `CODECS`; None if they are raw.
        base: the number, among the `bases` of the manifest, of the checkpoint of which tiles are patches,
            or, without a codec, of which these tensors are.
        lossy: the encoding with loss that has changed the elements since the program had them, however they
            are stored now.
        step: the training step at which the program had these elements; None if that is the checkpoint's.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Text
    dtype: DType
    shape: tuple[Size, ...]
    chunk: tuple[Edge, ...] | None = None
    shard: tuple[Edge, ...] | None = None
    path: Folder | None = None
    at: tuple[_Template, ...] = ()
    itemsize: Literal[1, 2, 4, 8, 16] | None = None
    codec: Text | None = None
    base: Annotated[int, Field(ge=0, lt=MAX_BASES)] | None = None
    lossy: Text | None = None
    step: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] | None = None

    @model_validator(mode="after")
    def _check_itemsize(self) -> Self:
        if (itemsize := ITEMSIZE.get(self.dtype)) is None and self.itemsize is None:
            raise ValueError(f"the dtype {self.dtype[:100]!r} is unknown, and has no itemsize")
        if itemsize is not None and self.itemsize not in (None, itemsize):
            raise ValueError(f"{self.dtype} has elements of {itemsize} bytes, not {self.itemsize}")
        return self


class TensorTable(BaseModel):
    """All tensors of a manifest: a sequence of TensorDoc, in the order of the training program, stored as columns.

    Attributes:
        kinds: the kinds of tensors, each once.
        name: for each tensor, the number of its name.
        kind: for each tensor, the number of its kind.
        digest: for each tensor, its digest; empty if none has one.
        fingerprint: for each tensor, its fingerprint; likewise.
        path: the folders of arrays whose folder is not the name as `quoted`, by the number of the
            tensor.
        at: the paths in the state of the program that are not those of the kind, by the number of
            the tensor.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    names: _Names
    kinds: list[KindDoc]
    name: _Column
    kind: _Column
    digest: list[Digest | None] = []
    fingerprint: list[Fingerprint | None] = []
    path: dict[_Row, Folder] = {}
    at: dict[_Row, tuple[StatePath, ...]] = {}
    bound: dict[_Row, tuple[_Error, _Error]] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        rows = len(self.name)
        optional = [len(column) for column in (self.digest, self.fingerprint)]
        if len(self.kind) != rows or any(n not in (0, rows) for n in optional):
            raise ValueError(
                f"the columns have {rows}, {len(self.kind)}, {optional[0]} and {optional[1]} rows"
            )
        if max(self.name, default=-1) >= len(self.names) or max(self.kind, default=-1) >= len(
            self.kinds
        ):
            raise ValueError("a tensor has the number of no name or kind")
        if len(self._numbers) != len(self.names):
            raise ValueError("a name is listed twice")
        if any(int(row) >= rows for row in (*self.path, *self.at)):
            raise ValueError("a path is that of no tensor")
        if any(self.kinds[self.kind[int(row)]].path is None for row in self.path):
            raise ValueError("a tensor that is no array has a folder")
        lossy = sum(self.by_kind(lambda kind: kind.lossy is not None))
        if len(self.bound) != lossy or any(
            int(row) >= rows or self.kinds[self.kind[int(row)]].lossy is None for row in self.bound
        ):
            raise ValueError("a lossy tensor has no bound, or one that is not lossy has one")
        return self

    @classmethod
    def of(cls, tensors: Iterable[TensorDoc]) -> Self:
        """The table of tensors."""
        columns = TableColumns()
        for t in tensors:
            folder = None
            if t.path is not None:
                folder = t.path.rpartition("/")[0] or t.path
                if t.path != f"{folder}/{quoted(t.name)}":
                    columns.paths[str(len(columns.name))] = t.path
            if t.bound is not None:
                columns.bounds[str(len(columns.name))] = t.bound
            kind = (t.state, t.dtype, t.shape, t.itemsize, t.codec, t.base, t.lossy, t.step)
            columns.add(t.name, t.at, (*kind, t.chunk, t.shard, folder))
            columns.digests.append(t.digest)
            columns.fingerprints.append(t.fingerprint)
        return cls(**columns.members())

    def __len__(self) -> int:
        return len(self.name)

    def __getitem__(self, row: int) -> TensorDoc:
        row = range(len(self))[row]
        kind = self.kinds[self.kind[row]]
        return TensorDoc(
            self.names[self.name[row]],
            *(kind.state, kind.dtype, kind.shape, kind.chunk, kind.shard),
            digest=self.digest[row] if self.digest else None,
            path=self.folder(row),
            at=self.at_of(row),
            itemsize=kind.itemsize,
            fingerprint=self.fingerprint[row] if self.fingerprint else None,
            codec=kind.codec,
            base=kind.base,
            lossy=kind.lossy,
            bound=self.bound.get(str(row)) if self.bound else None,
            step=kind.step,
        )

    def __iter__(self) -> Iterator[TensorDoc]:  # type: ignore[override]
        return map(self.__getitem__, range(len(self)))

    def encoded(self, codec: str) -> Self:
        """The same tensors, stored with a codec."""
        kinds = [kind.model_copy(update={"codec": codec}) for kind in self.kinds]
        return self.model_copy(update={"kinds": kinds})

    def folder(self, row: int) -> str | None:
        """The folder of an array; None if the tensor is none."""
        folder = self.kinds[self.kind[row]].path
        if folder is None:
            return None
        listed = self.path.get(str(row)) if self.path else None
        return f"{folder}/{quoted(self.names[self.name[row]])}" if listed is None else listed

    def at_of(self, row: int) -> tuple[StatePath, ...]:
        """The paths of a tensor in the state of the program that saved."""
        if self.at and (listed := self.at.get(str(row))) is not None:
            return listed
        name = self.names[self.name[row]]
        return tuple(
            tuple(name.join(p) if isinstance(p, tuple) else p for p in template)
            for template in self.kinds[self.kind[row]].at
        )

    def by_kind(self, of: Callable[[KindDoc], Any]) -> Iterator[Any]:
        """A value for each tensor that depends only on its kind.

        Args:
            of: returns the value of a kind; it is called once for each.
        """
        return map([of(k) for k in self.kinds].__getitem__, self.kind)

    def content(self) -> list[str | None]:
        """What identifies the elements of each tensor: its fingerprint, else its digest; None if it has neither."""
        none: list[None] = [None] * len(self)
        return [
            digest if fingerprint is None else FINGERPRINT + fingerprint
            for fingerprint, digest in zip(
                self.fingerprint or none, self.digest or none, strict=True
            )
        ]

    def older(self) -> Iterator[tuple[tuple[str, str], int]]:
        """The name and state of each tensor that is older than the checkpoint, and its step."""
        if any(kind.step is not None for kind in self.kinds):
            for row, kind in enumerate(map(self.kinds.__getitem__, self.kind)):
                if kind.step is not None:
                    yield (self.names[self.name[row]], kind.state), kind.step

    @cached_property
    def states(self) -> frozenset[str]:
        """The states in which tensors are stored."""
        return frozenset(kind.state for kind in self.kinds)

    @property
    def is_encoded(self) -> bool:
        """Whether a kind of tensors has a codec."""
        return any(kind.codec is not None for kind in self.kinds)

    @property
    def ndims(self) -> list[int]:
        """The number of dims of each tensor."""
        return list(self.by_kind(lambda k: len(k.shape)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.by_kind(lambda k: k.nbytes))

    @cached_property
    def _numbers(self) -> Mapping[str, int]:
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def _order(self) -> tuple[Sequence[int], Sequence[int]]:
        """The rows, sorted by name, and the number of the name of each."""
        rows = array("i", sorted(range(len(self)), key=self.name.__getitem__))
        return rows, array("i", map(self.name.__getitem__, rows))

    def rows(self, name: str) -> list[int]:
        """The numbers of the tensors of a name, in order; empty if there is none."""
        number = self._numbers.get(name)
        if number is None:
            return []
        rows, numbers = self._order
        first = bisect_left(numbers, number)
        return list(rows[first : bisect_right(numbers, number, first)])

    def row(self, name: str, state: str) -> int | None:
        """The number of the tensor of a name and state; None if there is none."""
        number = self._numbers.get(name)
        if number is None or state not in self.states:
            return None
        rows, numbers = self._order
        for at in range(bisect_left(numbers, number), len(numbers)):
            if numbers[at] != number:
                break
            if self.kinds[self.kind[rows[at]]].state == state:
                return rows[at]
        return None

    def shared_folders(self) -> Iterator[tuple[str, int]]:
        """The folders that several arrays have: each as often as it is one's, with the bytes of that array."""
        if not self.path and not any(self._again(lambda kind: kind.path)):
            return
        folders = [self.folder(row) for row in range(len(self))]
        counts = Counter(folders)
        for folder, nbytes in zip(folders, self.by_kind(lambda kind: kind.nbytes), strict=True):
            if folder is not None and counts[folder] > 1:
                yield folder, nbytes

    def repeated(self) -> list[int]:
        """The numbers of the tensors whose name and state are those of an earlier one."""
        return list(self._again(lambda kind: kind.state))

    def _again(self, label: Callable[[KindDoc], str | None]) -> Iterator[int]:
        """The numbers of the tensors whose name and label are those of an earlier one; None is no label."""
        if len(set(self.name)) == len(self):
            return
        labels = {text: n for n, text in enumerate(dict.fromkeys(map(label, self.kinds)))}
        if labels.keys() <= {None}:
            return
        of_kind = self.by_kind(lambda kind: labels[label(kind)])
        # A number for each pair of a name and a label. In most tables they ascend, so none repeats.
        keys = list(map(add, map(len(labels).__mul__, self.name), of_kind))
        if all(map(lt, keys, islice(keys, 1, None))) or len(set(keys)) == len(keys):
            return
        seen: set[int] = set()
        for row, key in enumerate(keys):
            if key in seen and key % len(labels) != labels.get(None):
                yield row
            seen.add(key)

    def as_json(self) -> bytes:
        """The table as it stands in a manifest's file: each column is on a line, and so is each name and kind."""
        between = b",\n   "
        members = [
            b'"names": [\n   '
            + to_json(self.names)[1:-1].replace(b'","', b'"' + between + b'"')
            + b"\n  ]",
            b'"kinds": [\n   '
            + between.join(k.model_dump_json(exclude_defaults=True).encode() for k in self.kinds)
            + b"\n  ]",
            b'"name": ' + to_json(list(self.name)),
            b'"kind": ' + to_json(list(self.kind)),
        ]
        optional = {
            "digest": self.digest,
            "fingerprint": self.fingerprint,
            "path": self.path,
            "at": self.at,
            "bound": self.bound,
        }
        members += [
            b'"%s": %s' % (label.encode(), to_json(column))
            for label, column in optional.items()
            if column
        ]
        return b"{\n  " + b",\n  ".join(members) + b"\n }"


class TableColumns:
    """The columns of a table, to which tensors are added one after another."""

    #: Of kinds: what `add` is given, as far as it goes, and then the paths.
    FIELDS = (
        *("state", "dtype", "shape", "itemsize", "codec", "base", "lossy", "step"),
        *("chunk", "shard", "path"),
    )

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.kinds: dict[tuple[tuple[Any, ...], tuple[_Template, ...]], int] = {}
        self.name, self.kind = list[int](), list[int]()
        self.paths: dict[str, str] = {}
        self.at: dict[str, tuple[StatePath, ...]] = {}
        self.bounds: dict[str, tuple[float, float]] = {}
        self.digests: list[str | None] = []
        self.fingerprints: list[str | None] = []

    def add(self, name: str, at: tuple[StatePath, ...], kind: tuple[Any, ...]) -> None:
        """Add a tensor with its paths in the state of the program, and the first `FIELDS` of its kind."""
        templates = tuple([_template(path, name) for path in at])
        for template, path in zip(templates, at, strict=True):
            if template == path:  # no kind shares it
                self.at[str(len(self.name))], templates = at, ()
                break
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.kind.append(self.kinds.setdefault((kind, templates), len(self.kinds)))

    def members(self) -> dict[str, Any]:
        """The members of the table."""
        return {
            "names": list(self.names),
            "kinds": [
                KindDoc(**dict(zip(self.FIELDS, kind, strict=False)), at=at)
                for kind, at in self.kinds
            ],
            "name": self.name,
            "kind": self.kind,
            "digest": self.digests if any(self.digests) else [],
            "fingerprint": self.fingerprints if any(self.fingerprints) else [],
            "path": self.paths,
            "at": self.at,
            "bound": self.bounds,
        }

    def table(self) -> TensorTable:
        """The table of all that was added."""
        return TensorTable(**self.members())


def _template(path: StatePath, name: str) -> _Template:
    """A path with the tensor's name marked in it."""
    if not name:
        return path
    if name in path:
        return tuple([("", "") if part == name else part for part in path])
    return tuple(
        (part[: part.index(name)], part[part.index(name) + len(name) :])
        if isinstance(part, str) and name in part
        else part
        for part in path
    )


_PLAIN_NAME = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]*")  # most are


def quoted(name: str) -> str:
    """A name as that of a folder: percent-encoded, except ASCII letters, digits, `.`, `_`, `-`; a leading dot too."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    folder = quote(name, safe="", errors="surrogatepass").replace("~", "%7E")
    return "%2E" + folder[1:] if folder.startswith(".") else folder
