"""The checkpoints that a server has, by the names under which clients ask for them, opened once for many requests.

A repository is a run, an alias, an id, or the name of a place that was given when the server was
started. Its revisions are steps, `latest`, aliases and ids, and commits: 40 hexadecimal digits that
are the id and a digest of how the checkpoint is presented, so equal commits have equal files.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from ucformat.catalog.entries import PageEntry
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import Conflict, NotFound, TensorNotFound, UnsupportedError, UsageError
from ucformat.format.digest import bytes_digest, document_digest
from ucformat.jobs.bands import FileRanges
from ucformat.jobs.export import plan_export
from ucformat.references import open_entry
from ucformat.sources.model_files import find_assets
from ucformat.storage.url import open_store
from ucformat.views.document import read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.filter.syntax import Node, Sort
    from ucformat.checkpoint import Checkpoint
    from ucformat.errors import UcformatError
    from ucformat.exporters.base import TargetFile
    from ucformat.views.document import Steps
    from ucformat.zarr_store.store import CheckpointStore

#: Names of the newest revision: that of the hub's clients, git's, and ours.
NEWEST = ("main", "HEAD", "latest")
#: Some clients want a namespace before each name.
NAMESPACE = "ucformat/"
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
#: Boxes of tensors that a rank may have in a plan: of that many it takes some seconds.
MOST_BOXES = 1 << 18
#: Part of every commit; to be raised when the same checkpoint is presented by other files.
_PRESENTATION = 1
#: What is told instead of a problem that may name files.
_WITHHELD = "its files cannot be read as they should be; who runs the server is told more"
#: Members of a certificate that cannot name files.
_CERTIFIED = ("id", "step", "created", "verdict", "layout", "values", "left", "counts")
_NO_TENSOR = "the checkpoint has no such tensor, or not in this state"
_OPEN = 32  # checkpoints that stay open
#: An absolute path, or a URL, in a message.
_PATH = re.compile(r"(?<![\w.])(?:~?/|[A-Za-z][\w+.-]{0,20}://)\S", re.ASCII)
_FRESH = 5.0  # seconds for which a place without a catalog is not opened again


@dataclass(frozen=True)
class Presentation:
    """How checkpoints become the files of a model.

    Attributes:
        view: the steps of a view (None: none).
        options: of the exporter of safetensors files.
    """

    view: Steps | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """What tells one presentation from another, 8 hexadecimal digits: of steps and files their content."""
        steps = [] if self.view is None else [str(step) for _, step in read_steps(self.view)]
        options = {name: value for name, value in self.options.items() if name != "assets"}
        files = []
        if "assets" in self.options:
            store = open_store(self.options["assets"])
            files = [(key, bytes_digest(store.read(key))) for key in find_assets(store.list())]
        described = [_PRESENTATION, steps, sorted(options.items()), sorted(files)]
        return document_digest(described).rpartition(":")[2][:8]


class VirtualFile:
    """A file of a model that is computed when it is asked for.

    Attributes:
        name: its path.
        nbytes: its size.
        oid: 40 hexadecimal digits; of a file of bytes alone those that git computes.
        source: the checkpoint that its elements are read from.
    """

    def __init__(self, file: TargetFile, source: Checkpoint, commit: str) -> None:
        self.name, self.nbytes, self.source = file.key, file.nbytes, source
        self._file = file
        self._ranges: FileRanges | None = None
        content = self._content()
        if content is None:
            self.oid = hashlib.sha256(f"{commit} {file.key}".encode()).hexdigest()[:40]
        else:
            blob = b"blob %d\0" % len(content) + content
            self.oid = hashlib.sha1(blob, usedforsecurity=False).hexdigest()

    @property
    def ranges(self) -> FileRanges:
        """Its parts."""
        if self._ranges is None:
            self._ranges = FileRanges(self._file)
        return self._ranges

    def _content(self) -> bytes | None:
        """The bytes of a file without tensors."""
        parts = list(self._file.parts())
        return b"".join(parts) if all(isinstance(part, bytes) for part in parts) else None  # type: ignore[arg-type]


class Served:
    """An opened checkpoint.

    Attributes:
        checkpoint: the checkpoint, through the view of the presentation.
        commit: the name of this revision.
        entry: what the catalog has of it; None if the place was given instead.
    """

    def __init__(
        self, checkpoint: Checkpoint, commit: str, entry: Entry | None, presentation: Presentation
    ) -> None:
        self.checkpoint, self.commit, self.entry = checkpoint, commit, entry
        self._presentation = presentation
        self._files: dict[str, VirtualFile] | None = None
        self.files_of_document: dict[str, Any] = {}  # see `web.document`
        self._lock = threading.Lock()

    @cached_property
    def arrays(self) -> CheckpointStore:
        """The tensors as arrays of a Zarr group."""
        try:
            return self.checkpoint.zarr_store()
        except ImportError as error:
            raise UnsupportedError(
                f"this server serves no arrays: {error}", hint="pip install 'ucformat[zarr]' there"
            ) from None

    @property
    def files(self) -> Mapping[str, VirtualFile]:
        """The files of the model, as an export would write them."""
        with self._lock:
            if self._files is None:
                target = plan_export(self.checkpoint, "safetensors", **self._presentation.options)
                self._files = {
                    file.key: VirtualFile(file, self.checkpoint, self.commit)
                    for file in sorted(target.files, key=lambda file: file.key)
                    if file.key.isprintable()  # others no client could ask for
                }
            return self._files


@dataclass(frozen=True)
class Access:
    """What a client may see.

    Attributes:
        name: of whom, for the log.
        scope: a filter of the catalog that checkpoints must match; empty: all.
        rate: requests in a second (None: any number).
        expires: until when, in seconds since 1970 (None: for ever).
    """

    name: str = "local"
    scope: str = ""
    rate: float | None = None
    expires: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has expired."""
        return self.expires is not None and time.time() >= self.expires


class Library:
    """The checkpoints of a server.

    Args:
        catalog: where checkpoints are looked up (None: only the places are served).
        places: what opens each checkpoint that needs no catalog, by the name of its repository.
        presentation: how checkpoints become files.
        runs: serve only these runs of the catalog (default: all of it).
    """

    def __init__(
        self,
        catalog: Catalog | None,
        places: Mapping[str, Callable[[], Checkpoint]] | None = None,
        presentation: Presentation = Presentation(),
        *,
        runs: Sequence[str] = (),
    ) -> None:
        self.catalog, self.places, self.presentation = catalog, dict(places or {}), presentation
        self._runs = f"run in ({', '.join(map(quoted, runs))})" if runs else ""
        self._digest = presentation.digest()
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._opened: dict[str, tuple[float, Served]] = {}  # of places, and when
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def entries(self, access: Access, where: str = "", **options: Any) -> list[Entry]:
        """Find the checkpoints that match a filter, among those that a client may see, as it may see them.

        Args:
            options: those of `Catalog.find`.
        """
        return [self.shown(entry, access) for entry in self._entries(access, where, **options)]

    def page(self, access: Access, where: str, sort: str, **options: int) -> PageEntry:
        """As `Catalog.page`, of the checkpoints that a client may see, as it may see them."""
        if self.catalog is None:
            return PageEntry([], {}, None)
        page = self.catalog.page(
            self.within(access, where), sort=self._order(access, sort), **options
        )
        return replace(page, entries=[self.shown(entry, access) for entry in page.entries])

    def _entries(self, access: Access, where: str = "", **options: Any) -> list[Entry]:
        """As `entries`, with all that the catalog has of them."""
        if self.catalog is None:
            return []
        if "sort" in options:
            options["sort"] = self._order(access, options["sort"])
        return self.catalog.find(self.within(access, where), **options)

    def _order(self, access: Access, sort: str) -> str | Sort:
        """An order; whom may not see all is not told whether hidden checkpoints have what it names."""
        from ucformat.catalog.filter.parse import parse_sort
        from ucformat.catalog.search import NEWEST as NEWEST_FIRST

        return parse_sort(sort) if self.is_limited(access) and sort != NEWEST_FIRST else sort

    def within(self, access: Access, where: str = "") -> str | Node:
        """A filter that is met by what meets a condition and may be seen by a client.

        To whom may not see all, a metric that no checkpoint has is one that none in sight has: its
        values are unknown, and no error tells that others have it.

        Raises:
            UsageError: the condition is no filter, such as `step > 1) or (step > 0`, which would
                lead out of the scope.
        """
        if not self.is_limited(access):
            return where
        from ucformat.catalog.filter.check import used_keys
        from ucformat.catalog.filter.parse import parse
        from ucformat.catalog.filter.syntax import And, operands

        nodes = [_parsed(text) for text in (self._runs, access.scope) if text]
        if where.strip():
            nodes.append(parse(where))
            if "url" in used_keys(nodes[-1]):
                raise UsageError("this server does not tell where files are, nor filters by it")
        # flat, so that a scope takes no depth away
        parts = tuple(part for node in nodes for part in operands(node))
        return parts[0] if len(parts) == 1 else And(parts)

    def shown(self, entry: Entry, access: Access) -> Entry:
        """What a client may know of a checkpoint that it sees: where the files are only if it may see all."""
        if not self.is_limited(access):
            return entry
        verified, certified = entry.verified, entry.certified
        if verified is not None:
            problems = (_WITHHELD,) if verified.problems else ()
            verified = replace(verified, url="", problems=problems)
        if certified is not None:
            document = {k: v for k, v in certified.document.items() if k in _CERTIFIED}
            certified = replace(certified, url="", document=document)
        return replace(
            entry,
            urls=(),
            launch=None,
            family=None,
            continues={},
            verified=verified,
            certified=certified,
        )

    def shown_error(self, error: UcformatError, access: Access) -> dict[str, str | None]:
        """What a client may know of an error: message and hint, unless they may tell where files are."""
        ours = (UsageError, UnsupportedError, TensorNotFound, NoRepository, NoRevision, NoFile)
        if self.is_limited(access) and (
            not isinstance(error, ours) or _PATH.search(f"{error.message} {error.hint}")
        ):
            absent = isinstance(error, TensorNotFound)
            return {"message": _NO_TENSOR if absent else _WITHHELD, "hint": None}
        return {"message": error.message, "hint": error.hint}

    # --- looking up

    def revision(self, repository: str, revision: str, access: Access) -> Served:
        """Look up a revision of a repository, which may be written below the namespace `ucformat`.

        Raises:
            NoRepository: there is no such repository, or this client may not see it.
            NoRevision: the repository has no such revision.
        """
        repository = repository.removeprefix(NAMESPACE)
        if self._has_place(repository, access):
            return self._placed(repository, revision)
        entry = self._find(repository, revision, access)
        served = self.open(entry)
        if _COMMIT.fullmatch(revision) and served.commit != revision:
            raise NoRevision(
                f"{repository} is not presented as in the commit {revision} any more",
                hint="ask for the step instead",
            )
        return served

    def reference(self, ref: str, access: Access) -> Served:
        """Look up a reference of the catalog, or the name of a place."""
        if self._has_place(ref, access):
            return self._placed(ref, "latest")
        return self.open(self.entry(ref, access))

    def fresh(self, ref: str, access: Access) -> Checkpoint:
        """Open what `reference` finds anew, for one request alone."""
        if self._has_place(ref, access):
            return self._presented(self.places[ref]())
        return self._presented(self._opened_entry(self.entry(ref, access)))

    def _has_place(self, name: str, access: Access) -> bool:
        """Whether a client may see a place of this name: it is in no catalog, so no filter admits it."""
        return name in self.places and not access.scope

    def is_limited(self, access: Access) -> bool:
        """Whether there may be checkpoints in the catalog that a client may not see."""
        return bool(access.scope or self._runs)

    def visible_places(self, access: Access) -> list[str]:
        """The names of the places that a client may see."""
        return [name for name in self.places if self._has_place(name, access)]

    def entry(self, ref: str, access: Access) -> Entry:
        """What the catalog has of a reference; a place is none, so no client chooses paths.

        Raises:
            NoRepository: there is none. Whom may not see all is not told more, since hints and
                ambiguities may be of hidden checkpoints.
        """
        from ucformat.catalog.refs import parse_ref

        missing = NoRepository(f"there is no checkpoint {ref!r}")
        if self.is_limited(access):
            entry = self._entry_in_sight(ref, access)
            if entry is None:
                raise missing
        else:
            if self.catalog is None or parse_ref(ref).place is not None:
                raise missing
            try:
                entry = self.catalog.get(ref)
            except NotFound as error:
                raise NoRepository(missing.message, hint=error.hint) from None
        if entry.state != "committed":
            raise missing
        return entry

    def _entry_in_sight(self, ref: str, access: Access) -> Entry | None:
        """The checkpoint of a reference, as if there were only those that a client may see."""
        from ucformat.catalog.refs import parse_ref

        try:
            parsed = parse_ref(ref)
        except UsageError:
            return None
        places = (parsed.place, parsed.folder, parsed.launch)
        if self.catalog is None or any(place is not None for place in places):
            return None
        with suppress(NotFound, UsageError):
            entry = self.catalog.get(ref)
            if self._entries(access, f"id = {quoted(entry.id)}", limit=1):
                return entry
        entries: list[Entry] = []
        if parsed.id is not None:
            entries = self._entries(access, f"id like {quoted(parsed.id + '%')}", limit=2)
        elif parsed.run is not None:
            run = f"run = {quoted(parsed.run)}"
            if parsed.at == "latest":
                where = self.within(access, f"{run} and step is not null")
                entries = [line.head for line in self.catalog.lines(where)]
            elif isinstance(parsed.at, int):
                entries = self._entries(access, f"{run} and step = {parsed.at}", limit=100)
                entries = [e for e in entries if e.kind == "ucformat"] or entries
            else:
                own = quoted(f"{parsed.run}/{parsed.at}")
                entries = self._entries(access, f"alias = {own}", limit=1) or self._entries(
                    access, f"{run} and alias = {quoted(str(parsed.at))}", limit=1
                )
        return entries[0] if len(entries) == 1 else None

    def _find(self, repository: str, revision: str, access: Access) -> Entry:
        """The checkpoint of a revision: `repository` is a run, else an alias or an id."""
        if not self._is_run(repository, access):
            entry = self._first((repository, f"alias:{repository}"), access)
            if entry is None:
                raise NoRepository(f"there is no repository {repository!r}")
            if revision not in (*NEWEST, entry.id, self.commit(entry), str(entry.step)):
                entry = None
        elif _COMMIT.fullmatch(revision):
            # of most ids it is the beginning
            entry = self._first((revision[:32],), access)
            in_run = f"run = {quoted(repository)}"
            entries = self._entries(access, in_run, limit=1000) if entry is None else [entry]
            entry = next((e for e in entries if self.commit(e)[:32] == revision[:32]), None)
        else:
            at = "latest" if revision in NEWEST else revision
            entry = self._first((f"{repository}@{at}", revision), access)
        if entry is None or (entry.run != repository and self._is_run(repository, access)):
            raise NoRevision(f"{repository} has no revision {revision!r}")
        return entry

    def _first(self, refs: Sequence[str], access: Access) -> Entry | None:
        """The checkpoint of the first reference that there is."""
        for ref in refs:
            with suppress(NotFound, UsageError):
                return self.entry(ref, access)
        return None

    def _is_run(self, name: str, access: Access) -> bool:
        return bool(self.entries(access, f"run = {quoted(name)}", limit=1))

    def repositories(self, access: Access, limit: int = 1000) -> Iterator[str]:
        """The names of places, runs, aliases, and ids of checkpoints without a run."""
        yield from self.visible_places(access)
        entries = self.entries(access, limit=limit)
        yield from dict.fromkeys(entry.run or entry.id for entry in entries)
        yield from dict.fromkeys(alias for entry in entries for alias in entry.aliases)

    def revisions(self, repository: str, access: Access, limit: int = 1000) -> list[Entry]:
        """The checkpoints of a run, newest first."""
        run = repository.removeprefix(NAMESPACE)
        return self.entries(access, f"run = {quoted(run)}", limit=limit)

    # --- opening

    def open(self, entry: Entry) -> Served:
        """The opened checkpoint of an entry."""
        with self._lock:
            lock = self._locks.setdefault(entry.id, threading.Lock())
        with lock:
            served = self._served.get(entry.id)
            if served is None:
                checkpoint = self._opened_entry(entry)
                served = Served(
                    self._presented(checkpoint), self._commit(entry.id), entry, self.presentation
                )
            with self._lock:
                served.entry = entry  # of which the catalog may have more by now
                self._served[entry.id] = served
                self._served.move_to_end(entry.id)
                while len(self._served) > _OPEN:
                    oldest, _ = self._served.popitem(last=False)
                    self._locks.pop(oldest, None)
        return served

    def _opened_entry(self, entry: Entry) -> Checkpoint:
        """Open the checkpoint of an entry.

        Raises:
            Conflict: an engine has written a step in place again.
        """
        assert self.catalog is not None  # noqa: S101 - it has the entry
        checkpoint, place = open_entry(self.catalog, entry, entry.name)
        if checkpoint.id != entry.id:
            raise Conflict(
                f"{entry.name} is not what the catalog has recorded: its files were written again",
                hint=f"`ucp register {place}` records what is there",
            )
        return checkpoint

    def forget(self, served: Served) -> None:
        """Open a checkpoint again when it is next asked for, since its files have changed."""
        with self._lock:
            if served.entry is not None:
                self._served.pop(served.entry.id, None)
            self._opened = {n: (at, s) for n, (at, s) in self._opened.items() if s is not served}

    def _placed(self, name: str, revision: str) -> Served:
        """The checkpoint at a place that was given when the server was started."""
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            at, served = self._opened.get(name, (0.0, None))
            if served is None or time.monotonic() - at > _FRESH:
                checkpoint = self.places[name]()
                commit = self._commit(checkpoint.id)
                if served is None or served.commit != commit:
                    served = Served(self._presented(checkpoint), commit, None, self.presentation)
                self._opened[name] = (time.monotonic(), served)
        if revision not in (*NEWEST, served.commit, served.checkpoint.id):
            raise NoRevision(f"{name} has no revision {revision!r}")
        return served

    def _presented(self, checkpoint: Checkpoint) -> Checkpoint:
        view = self.presentation.view
        return checkpoint if view is None else checkpoint.view(view)

    def commit(self, entry: Entry) -> str:
        """The name of the revision that a checkpoint of the catalog is."""
        return self._commit(entry.id)

    def _commit(self, identity: str) -> str:
        """The name of the revision that the checkpoint of an id is."""
        if not _ID.fullmatch(identity):
            identity = document_digest(identity).rpartition(":")[2][:32]
        return identity + self._digest


def reasons(ck: Checkpoint, *, limited: bool) -> list[dict[str, str]]:
    """The tensors that cannot be read, and why; to whom may not know where files are, without what may name these."""
    return [
        {"name": key.name, "state": key.state, "reason": _WITHHELD if limited else reason}
        for key, reason in ck.unreadable.items()
    ]


@cache
def _parsed(scope: str) -> Node:
    from ucformat.catalog.filter.parse import parse

    return parse(scope)


class NoRepository(NotFound):
    """There is no such repository, or the client may not see it."""


class NoRevision(NotFound):
    """The repository has no such revision."""


class NoFile(NotFound):
    """The revision has no such file."""
