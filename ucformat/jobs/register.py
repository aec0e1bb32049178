"""Records existing checkpoints in a catalog from storage alone: one, a tree of them, or all those of a lost catalog."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

from ucformat.catalog.entries import load_by_id
from ucformat.catalog.refs import same_url
from ucformat.catalog.stamp import now
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import NotACheckpoint, NotFound, UcformatError, UsageError
from ucformat.format.commit import MANIFEST
from ucformat.jobs.batches import Failure, How, Opened, OpenedCheckpoint, record_all
from ucformat.jobs.documents import find_document, write_documents
from ucformat.jobs.listing import Tree, check_listed, is_empty, listing_hashes, search
from ucformat.jobs.reopen import options_of, plain_options
from ucformat.jobs.run import naming_place
from ucformat.jobs.tasks import Job
from ucformat.jobs.where import HERE, Where, run_job
from ucformat.reading.garbage import gc_paused
from ucformat.sources.configuration import with_config
from ucformat.storage.base import exists
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import as_strings, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.refs import LocationEntry
    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Info, Store

__all__ = ["Failure", "Registered", "Reindexed", "open_existing", "register", "reindex"]

_AHEAD = 64  # the most checkpoints that are opened before the first of them is recorded
_AHEAD_ELSEWHERE = 2048  # the same on a cluster
_OPENED_BYTES = 64 << 10


@dataclass(frozen=True)
class Registered:
    """The ids of the checkpoints that are now in the catalog (new or known before), and the failures."""

    ids: tuple[str, ...]
    failures: tuple[Failure, ...]
    _catalog: Catalog = field(repr=False, compare=False)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The checkpoints, read from the catalog when they are first asked for."""
        with self._catalog.database.reading() as c:
            return tuple(load_by_id(c, self.ids, now()))


@dataclass(frozen=True)
class Reindexed(Registered):
    """Also places in the catalog whose checkpoints are `missing` in storage, and those that were `forgotten`: urls."""

    missing: tuple[str, ...]
    forgotten: tuple[str, ...]


def register(
    places: str | PathLike[str] | Iterable[str | PathLike[str]],
    catalog: Catalog,
    *,
    recursive: bool = False,
    run: str | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    rescan: bool = False,
    trust_documents: bool = False,
    options: Mapping[str, Any] | None = None,
    on: str = "threads",
    progress: Callable[[int, int], None] | None = None,
) -> Registered:
    """Record the checkpoints in these places, foreign ones in place; nothing is converted.

    Args:
        places: a path or url of a checkpoint, or with `recursive` of a tree of them; or several of these.
        catalog: the catalog that records them.
        recursive: search the trees; a folder that looks like a checkpoint and cannot be read is a failure, not an
            error.
        run: the run that they belong to (default: the folder that a checkpoint's folder is in).
        config: the configuration of the training, in addition to that in the files of a foreign checkpoint.
        metrics: measured numbers by name, which replace those that are recorded.
        rescan: with `recursive`, also read known checkpoints. Otherwise a checkpoint is not opened if its files have
            the same sizes, inodes and times, or etags, as when it was last read, and its manifest is the same.
        trust_documents: trust the documents of other catalogs beside the checkpoints like changes to this one: aliases
            move, tags are removed, and deleted checkpoints keep their grace (docs/security.md). Known, unchanged
            checkpoints are read, too.
        options: facts that the files of foreign checkpoints lack, as in `ucformat.open`. They are not recorded, and
            must be given again to open one of these.
        on: with `recursive`, where checkpoints are opened, as for `convert`. Each part, and each process of torchrun,
            records its own folders in the catalog; there is nothing to commit.
        progress: called with the checkpoints done and in all.

    Raises:
        UsageError: `config` is given for a universal checkpoint, whose manifest has it.
        NotFound: one of the places is empty, or has no checkpoint.
    """
    where = Where.parse(on)
    if where.kind == "commit" or (where != HERE and not recursive):
        raise UsageError(f"there is nothing to register on {on!r}", hint="with recursive=True (-r), parts record alone")
    places = as_strings(places)
    trees = [_part_of(_search_tree(p), where) for p in places] if recursive else []
    known: dict[str, str] = {}
    for tree in () if rescan or run or config or metrics or options or trust_documents else trees:
        known |= _unchanged(catalog, tree)
    unknown = [(t.store, [f for f in t.folders if t.url(f) not in known]) for t in trees]
    below = (f for store, folders in unknown for f in _open_below(store, folders, options, where))
    opened = below if recursive else _open_all(places, options)
    if config:
        opened = ((root, _with_config(found, config), left) for root, found, left in opened)
    listed = {t.url(folder): value for t in trees for folder, value in t.listings.items()}
    how = How(run, replace_config=bool(config), strict=not recursive, trust=trust_documents)
    done = record_all(catalog, opened, how, progress, listings=listed)
    for _, checkpoint in done.present if metrics else ():
        catalog.metric(checkpoint, metrics or {})
    write_documents(catalog, None)
    present = [*known.items(), *done.present]
    if recursive:  # in one order, whichever were skipped
        present.sort()
    return Registered(tuple(i for _, i in present), done.failures, catalog)


def _unchanged(catalog: Catalog, tree: Tree) -> dict[str, str]:
    """The places of a tree whose files are unchanged since their checkpoints were read, with the ids of these."""
    known = catalog.listings(tree.store.url)
    found = {}
    for folder in tree.folders:
        checkpoint, listing = known.get(same_url(tree.url(folder)), (None, None))
        if checkpoint is not None and listing == tree.listings.get(folder):
            found[tree.url(folder)] = checkpoint
    return found


def reindex(
    place: str | PathLike[str],
    catalog: Catalog,
    *,
    forget: bool = False,
    trust_documents: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Reindexed:
    """Record all checkpoints below a place, with the documents beside them, which an empty catalog trusts.

    Checkpoints that the catalog has there and that are not found stay recorded, so that they protect the files that
    they need: a disk that is not mounted looks like one whose files were removed.

    Args:
        place: a path or url.
        catalog: the catalog that records them.
        forget: forget checkpoints that are not found (default: no). Unreadable ones are never forgotten.
        trust_documents: as in `register`; always if the catalog is empty.
        options: facts that the files of foreign checkpoints lack, as in `ucformat.open`.
        progress: called with the checkpoints done and in all.

    Raises:
        NotFound: without `forget`, the place does not exist, or is empty and the catalog knows checkpoints there.
        UcformatError: the place cannot be listed to its end; nothing was recorded or forgotten.
    """
    store = open_store(place)
    known = catalog.places(store.url)
    empty = is_empty(store)
    if empty and not forget:
        check_listed(store, catalog)
    folders = [] if empty else search(store.list())
    how = How(trust=trust_documents or catalog.empty)
    done = record_all(catalog, _open_below(store, folders, options), how, progress)
    missing, reopened = _missing(known, [u for u, _ in done.present] + [f.url for f in done.failures], options)
    more = record_all(catalog, reopened, how, None)
    forgotten = catalog.forget(missing if forget else [])
    write_documents(catalog, None)
    ids = tuple(i for _, i in (*done.present, *more.present))
    missed = tuple(p.url for p in missing)
    return Reindexed(ids, (*done.failures, *more.failures), catalog, missed, tuple(forgotten))


def _missing(
    known: Sequence[LocationEntry], present: Collection[str], options: Mapping[str, Any] | None
) -> tuple[list[LocationEntry], list[Opened]]:
    """The known places without a checkpoint, and the results of opening the others that the search did not find.

    A search does not follow linked folders, or look inside of other checkpoints.
    """
    there = {same_url(p) for p in present}
    unseen = {p.url: p for p in known if p.url not in there}
    missing, found = [], []
    for opened in _open_all(list(unseen), options):
        if isinstance(opened[1], NotFound | NotACheckpoint):
            missing.append(unseen[opened[0]])
        else:
            found.append(opened)
    return missing, found


def _with_config(
    found: OpenedCheckpoint | UcformatError, config: Mapping[str, Any]
) -> OpenedCheckpoint | UcformatError:
    """An opened checkpoint with the given configuration."""
    if isinstance(found, UcformatError):
        return found
    if found.kind == "ucformat":
        return UsageError(
            f"{found.url} is a universal checkpoint, and its manifest has the configuration",
            hint="give --config when it is made: `ucp convert SRC DST --config FILE`",
        )
    manifest = found.manifest.model_copy(update={"config": with_config(found.manifest.config, config)})
    return replace(found, manifest=manifest)


def _search_tree(place: str) -> Tree:
    """Search a place for folders that look like checkpoints; NotFound if there are none."""
    store, begun = open_store(place), time.time()
    infos = list(store.list())
    folders = search(infos)
    if not folders:
        raise NotFound(
            f"there is no checkpoint below {store.url}", hint="check the path; if it is right, is its disk mounted?"
        )
    return Tree(store, folders, listing_hashes(store, folders, infos, begun))


def _part_of(tree: Tree, where: Where) -> Tree:
    """The folders of one part: the outermost ones are dealt by a hash of their names."""
    index, count = where.part
    if count == 1:
        return tree
    groups = _by_outermost(tree.folders)
    mine = [outer for outer in groups if crc32(outer.encode("utf-8", "surrogatepass")) % count == index]
    return replace(tree, folders=[folder for outer in mine for folder in (outer, *groups[outer])])


def _by_outermost(folders: Iterable[str]) -> dict[str, list[str]]:
    """The folders inside of each outermost one, which comes before them."""
    inside: dict[str, list[str]] = {}
    for folder in folders:
        last = next(reversed(inside), None)
        if last is not None and (last == "" or folder.startswith(f"{last}/")):
            inside[last].append(folder)
        else:
            inside[folder] = []
    return inside


def _open_below(
    store: Store, folders: list[str], options: Mapping[str, Any] | None, where: Where = HERE
) -> Iterator[Opened]:
    """Open the folders of a place that look like checkpoints, except those that are part of another.

    Folders inside of one that turns out not to be a checkpoint are opened after it: any program may write a
    manifest.json. So are folders beside the files of a foreign one: `checkpoint-500/` next to the final model of a run.
    """
    while folders:
        inside = _by_outermost(folders)
        folders = []
        roots = {f"{store.url}/{folder}" if folder else store.url: found for folder, found in inside.items()}
        for root, found, left in _open_all(list(roots), options, where):
            if isinstance(found, UcformatError):
                folders += roots[root]
            elif found.keys is not None:
                above = root.removeprefix(store.url).lstrip("/")
                folders += [f for f in roots[root] if not _is_part(f.removeprefix(f"{above}/"), found.keys)]
            yield root, found, left + len(folders)


def _is_part(folder: str, keys: Sequence[str]) -> bool:
    return any(key.startswith(f"{folder}/") for key in keys)


def _open_all(roots: Sequence[str], options: Mapping[str, Any] | None, where: Where = HERE) -> Iterator[Opened]:
    """Open them in order, several at a time as soon as requests wait; with each the number of those that are left."""
    try_open = partial(_try_open, options=options)
    together = _AHEAD_ELSEWHERE if where.kind == "dask" else _AHEAD
    for at in range(0, len(roots), together):
        part = roots[at : at + together]
        if where.kind == "dask":
            job = OpenJob(part, options)
            run_job(job, where)
            opened = [job.results[task] for task in range(job.count)]
        else:
            with gc_paused():
                opened = map_io(try_open, part)
        for i, (root, found) in enumerate(zip(part, opened, strict=True), at + 1):
            yield root, found, len(roots) - i


class OpenJob(Job):
    """Opens checkpoints on other machines.

    Args:
        roots: their places.
        options: facts that the files of foreign ones lack.
    """

    kind = "register"

    def __init__(self, roots: Sequence[str], options: Mapping[str, Any] | None) -> None:
        self._roots, self._options = roots, options
        self.count = len(roots)
        self.finished = set()
        self.results: dict[int, OpenedCheckpoint | UcformatError] = {}

    def nbytes(self, task: int) -> int:  # noqa: ARG002 - see Job
        """See Job: of each the same, so that a batch has about a hundred."""
        return _OPENED_BYTES

    def run(self, task: int) -> OpenedCheckpoint | UcformatError:
        """See Job."""
        return _try_open(self._roots[task], self._options)

    def record(self, results: Mapping[int, OpenedCheckpoint | UcformatError]) -> str:
        """See Job."""
        return json.dumps(
            {
                task: [found.message, found.hint] if isinstance(found, UcformatError) else found.dump()
                for task, found in results.items()
            }
        )

    def keep(self, record: str) -> None:
        """Keep nothing: the catalog has what was recorded."""

    def take(self, record: str) -> None:
        """See Job."""
        for task, found in json.loads(record).items():
            failed = isinstance(found, list)
            self.results[int(task)] = (
                UcformatError(found[0], hint=found[1]) if failed else OpenedCheckpoint.parse(found)
            )
            self.finished.add(int(task))

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {"job": "register:OpenJob", "roots": list(self._roots), "options": plain_options(self._options or {})}

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        return cls(spec["roots"], options_of(spec["options"]) or None)


def _try_open(root: str, options: Mapping[str, Any] | None) -> OpenedCheckpoint | UcformatError:
    try:
        with naming_place(root):
            return open_existing(root, options)
    except UcformatError as error:
        return error


def open_existing(root: str, options: Mapping[str, Any] | None) -> OpenedCheckpoint:
    """Open a checkpoint as the catalog records it.

    Args:
        root: its place.
        options: facts that its files lack, if it is a foreign one.
    """
    if options and exists(open_store(root), MANIFEST):  # a universal checkpoint takes none
        options = None
    ck = open_checkpoint(root, options=options)
    doc = find_document(open_store(ck.home))
    if ck.kind == "ucformat":
        return OpenedCheckpoint(ck.home, ck.kind, ck.manifest, None, doc, None)
    infos = ck.files()
    files = (len(infos), sum(i.size for i in infos))
    return OpenedCheckpoint(ck.home, ck.kind, _described(ck, infos), files, doc, ck.metadata.files)


def _described(ck: Checkpoint, files: Sequence[Info]) -> Manifest:
    """The manifest of a foreign checkpoint, with its id, and the time of its newest file."""
    times = [i.modified for i in files if i.modified is not None]
    created = ck.manifest.created
    if times:
        with suppress(ValueError, OverflowError, OSError):  # a file may have a time of the year 10,000
            created = datetime.fromtimestamp(max(times), UTC)
    return ck.manifest.model_copy(update={"id": ck.id, "created": created})
