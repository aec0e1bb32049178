"""The values that queries of the catalog return, and the table of their keys.

The keys are those of the filter language, of `ucp ls --columns` and of docs/filters.md. An
attribute of `Entry` that is a column of the same name in the table `checkpoint` is loaded without
more, and is part of the JSON of every command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from ucformat.schema.manifest import Manifest


@dataclass(frozen=True, slots=True)
class HoldEntry:
    """A hold: why a checkpoint must not be deleted, and until when (None: until it is released)."""

    id: int
    reason: str
    until: datetime | None
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class NoteEntry:
    """A note on a checkpoint."""

    text: str
    created: datetime
    who: str


@dataclass(frozen=True, slots=True)
class VerificationEntry:
    """The result of a verification; `problems` has the first 100."""

    at: datetime
    ok: bool
    url: str
    bytes_verified: int
    bytes_unverified: int
    problems: tuple[str, ...]
    tool: str


@dataclass(frozen=True, slots=True)
class CertificationEntry:
    """What was found of the state of a training; `document` is that of `ucformat.torch.Certificate`."""

    at: datetime
    ok: bool
    url: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in the catalog.

    `kind` is `ucformat`, or the engine that wrote it; `state` is committed, deleted, thinned, purging,
    purged or replaced. `urls` are its places. `files` and `files_nbytes` are the number and bytes
    of a foreign checkpoint's files. `holds` are those that are neither released nor expired.
    `from_documents` names the annotations that come from documents beside it and not from this
    catalog: `tag good`, `hold 3`. `launch` is the id of the launch that saved it, or the folder
    with a slash at the end if it records none, `continues` the positions up to which that continues
    others, and `family` the name of the first of the launches that continue each other.
    """

    id: str
    kind: str
    state: str
    run: str | None
    step: int | None
    commits: int | None
    launch: str | None
    created: datetime
    recorded: datetime
    deleted: datetime | None
    purge_after: datetime | None
    tensors: int
    nbytes: int
    files: int | None
    files_nbytes: int | None
    format_version: int | None
    engine: str | None
    producer: Mapping[str, Any] = field(default_factory=dict)
    topology: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    urls: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holds: tuple[HoldEntry, ...] = ()
    notes: tuple[NoteEntry, ...] = ()
    from_documents: tuple[str, ...] = ()
    verified: VerificationEntry | None = None
    certified: CertificationEntry | None = None
    continues: Mapping[str, int] = field(default_factory=dict)
    family: str | None = None

    @property
    def url(self) -> str | None:
        """Its first place; None if it is gone."""
        return self.urls[0] if self.urls else None

    @property
    def name(self) -> str:
        """Its short name: `run7@1000`, else the name of its folder or file, else the beginning of its id."""
        if self.run is not None and self.step is not None:
            return f"{self.run}@{self.step}"
        return (self.url or "").rstrip("/").rpartition("/")[2] or self.id[:12]


@dataclass(frozen=True, slots=True)
class LineEntry:
    """A line of a run: its newest checkpoint, how many there are behind it, with it, and their bytes."""

    run: str
    head: Entry
    checkpoints: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageEntry:
    """Some of the checkpoints that match a filter.

    `counts` says how many of the first that match have each run, kind and tag, the most frequent
    first. `total` is how many match; None if more than 10,000 would have to be tested.
    """

    entries: list[Entry]
    counts: Mapping[str, Mapping[str, int]]
    total: int | None


@dataclass(frozen=True, slots=True)
class CurvesEntry:
    """The metrics of a run along its steps.

    `points` are pairs of a step and a value by the name of the metric, those of most steps first,
    and `others` are the names of further ones, of which `unnamed` more are not listed. If `every`
    is more than 1, the first checkpoint of each so many steps is told, else all are; what only other
    checkpoints have is not even named.
    """

    points: Mapping[str, list[tuple[int, float]]]
    others: list[str]
    unnamed: int
    every: int


@dataclass(frozen=True, slots=True)
class BestEntry:
    """The best value of a metric in a run, and the id and step of the first checkpoint that has it."""

    value: float
    id: str
    step: int | None


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run: how many checkpoints it has, their lowest and highest step, and when the last was saved.

    `nbytes` are the bytes of their tensors; in `disk_nbytes`, those of the files where these are
    recorded, as they are of foreign checkpoints. `best` is None if no metric was asked for, or the
    run has none.
    """

    name: str
    checkpoints: int
    first_step: int | None
    last_step: int | None
    nbytes: int
    disk_nbytes: int
    first_saved: datetime
    last_saved: datetime
    best: BestEntry | None = None


@dataclass(frozen=True, slots=True)
class AliasEntry:
    """An alias and the id of the checkpoint that it points to."""

    name: str
    id: str
    version: int
    moved: datetime


@dataclass(frozen=True, slots=True)
class MoveEntry:
    """A move of an alias between the ids of checkpoints: `source` None creates it, `target` None removes it."""

    name: str
    version: int
    source: str | None
    target: str | None
    moved: datetime
    who: str


class Kind(Enum):
    """The type of a key's values; the text describes what it can be compared with."""

    TEXT = "text in quotes, such as 'good'"
    INTEGER = "a number"
    SIZE = "a number of bytes, or a size such as 10GB"
    FLOAT = "a number, such as 2.1 or 1e-4"
    TIME = "a time in quotes, such as '2026-11-01' or '2026-11-01T12:00:00+02:00'"
    AGE = "an age, such as 7d or 36h"
    BOOLEAN = "true or false"
    JSON = "text in quotes, a number, true or false"


@dataclass(frozen=True, slots=True)
class EntryKey:
    """A key of checkpoints, in filters and as a column of `ucp ls`.

    Args:
        name: as it is written; a part in capitals stands for any name.
        kind: the type of its values (None: filters do not have it).
        about: its value, for docs/filters.md.
        column: `table.column` in the database (default: of the table `checkpoint`).
        shown: what `ucp ls` shows of a checkpoint (default: the attribute of this name).
        many: whether a checkpoint may have any number of values.
        indexed: whether the database has an index by its values.
        whole: whether `ucp ls` never shortens it.
        recorded: the value of the column for a new checkpoint, from its manifest (default: it is
            not from there alone).
    """

    name: str
    kind: Kind | None
    about: str
    column: str = ""
    shown: Callable[[Entry], Any] | None = None
    many: bool = False
    indexed: bool = False
    whole: bool = False
    recorded: Callable[[Manifest], Any] | None = None

    @property
    def root(self) -> str:
        """Its first part."""
        return self.name.partition(".")[0]

    @property
    def place(self) -> tuple[str, str]:
        """The table and the column of the database."""
        table, _, column = (self.column or f"checkpoint.{self.root}").partition(".")
        return table, column

    def value(self, entry: Entry) -> Any:
        """What `ucp ls` shows; of a key with a path, all that paths lead to."""
        return getattr(entry, self.root) if self.shown is None else self.shown(entry)


#: All keys, in the order of docs/filters.md. CONTRIBUTING.md tells how to add one.
KEYS = (
    EntryKey("id", Kind.TEXT, "its id", indexed=True, whole=True),
    EntryKey("name", None, "its short name, such as `run7@1000`"),
    EntryKey("kind", Kind.TEXT, "`ucformat`, or the engine that wrote it", whole=True),
    EntryKey(
        "state", Kind.TEXT, "committed, deleted, thinned, purging, purged or replaced", whole=True
    ),
    EntryKey("run", Kind.TEXT, "its run", "run.name", indexed=True),
    EntryKey("launch", None, "the launch that saved it, or its folder"),
    EntryKey(
        "engine",
        Kind.TEXT,
        "the engine that it or its source is from",
        recorded=lambda m: m.producer.get("engine.name"),
    ),
    EntryKey("step", Kind.INTEGER, "the training step", recorded=lambda m: m.step),
    EntryKey("tensors", Kind.INTEGER, "number of tensors", recorded=lambda m: len(m.tensors)),
    EntryKey("format_version", Kind.INTEGER, "the format version; none if an engine wrote it"),
    EntryKey(
        "size",
        Kind.SIZE,
        "bytes of its tensors",
        "checkpoint.nbytes",
        lambda e: e.nbytes,
        recorded=lambda m: m.tensors.nbytes,
    ),
    EntryKey("created", Kind.TIME, "when it was created"),
    EntryKey("recorded", Kind.TIME, "when the catalog recorded it first"),
    EntryKey("deleted", Kind.TIME, "when it was deleted"),
    EntryKey(
        "age", Kind.AGE, "time since it was created", "checkpoint.created", lambda e: e.created
    ),
    EntryKey("url", Kind.TEXT, "its locations", "location.url", many=True, indexed=True),
    EntryKey("tag", Kind.TEXT, "its tags", "tag.name", lambda e: e.tags, many=True, indexed=True),
    EntryKey(
        "alias",
        Kind.TEXT,
        "its aliases",
        "alias.name",
        lambda e: e.aliases,
        many=True,
        indexed=True,
    ),
    EntryKey(
        "note", Kind.TEXT, "its notes", "note.text", lambda e: [n.text for n in e.notes], many=True
    ),
    EntryKey(
        "hold",
        Kind.BOOLEAN,
        "whether a hold is in force now",
        "hold.reason",
        lambda e: [hold.reason for hold in e.holds],
    ),
    EntryKey(
        "verified",
        Kind.BOOLEAN,
        "result of the last `ucp verify`; no value if there was none",
        "verification.ok",
        lambda e: None if e.verified is None else e.verified.ok,
        whole=True,
    ),
    EntryKey(
        "metrics",
        None,
        "all its metrics",
        shown=lambda e: [f"{name}={value:.6g}" for name, value in sorted(e.metrics.items())],
    ),
    EntryKey(
        "metric.NAME",
        Kind.FLOAT,
        "a metric; NaN is no value",
        "metric.value",
        lambda e: e.metrics,
        indexed=True,
    ),
    EntryKey(
        "config.PATH", Kind.JSON, "a value in the configuration", "config.document", indexed=True
    ),
    EntryKey("topology.PATH", Kind.JSON, "a value in the layout that it was saved in"),
    EntryKey("producer.PATH", Kind.JSON, "a value of the tool that made it"),
    EntryKey("tensor.name", Kind.TEXT, "name of any of its tensors", "tensor.name"),
    EntryKey("tensor.state", Kind.TEXT, "state of one", "tensor.state"),
    EntryKey("tensor.dtype", Kind.TEXT, "dtype of one", "tensor.dtype"),
    EntryKey("tensor.shape", Kind.TEXT, "shape of one, such as `4096,1024`", "tensor.shape"),
    EntryKey("tensor.digest", Kind.TEXT, "digest of one", "digest.digest"),
    EntryKey("tensor.size", Kind.SIZE, "bytes of one", "tensor.nbytes"),
)

#: Those with a path into a mapping are here by its name, such as `metric`.
BY_NAME = {key.root if key.name.endswith(("NAME", "PATH")) else key.name: key for key in KEYS}
