"""Searching trees for checkpoints, and opening those that are found, here or on a cluster."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from zlib import crc32

from ucformat.catalog.refs import same_url
from ucformat.checkpoint import open_checkpoint
from ucformat.errors import NotFound, UcformatError
from ucformat.jobs.batches import Opened, OpenedCheckpoint
from ucformat.jobs.documents import find_document
from ucformat.jobs.listing import ListedTree, listing_hashes, search
from ucformat.jobs.record import step_in_name
from ucformat.jobs.reopen import options_of, plain_options
from ucformat.jobs.run import naming_place
from ucformat.jobs.tasks import Job, job_name
from ucformat.jobs.where import HERE, Where, run_job
from ucformat.schema import MANIFEST
from ucformat.storage.base import exists
from ucformat.storage.concurrency import gc_paused, map_io
from ucformat.storage.url import open_store
from ucformat.storage.wrappers import WatchedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.schema.manifest import Manifest
    from ucformat.storage.base import Info, Store

    Watch = Callable[[Store], WatchedStore]

_AHEAD = 64  # the most checkpoints that are opened before the first of them is recorded
_AHEAD_ELSEWHERE = 2048  # the same on a cluster
_OPENED_BYTES = 64 << 10


def search_tree(store: Store) -> ListedTree:
    """Search a place for folders that look like checkpoints."""
    begun = time.time()
    return tree_of(store, list(store.list()), begun)


def tree_of(store: Store, infos: Sequence[Info], begun: float) -> ListedTree:
    """The folders of a place that look like checkpoints, according to its listing.

    Args:
        begun: the time when the listing began, in seconds since 1970.
    """
    folders = search(infos)
    if not folders:
        raise NotFound(
            f"there is no checkpoint below {store.url}",
            hint="check the path; if it is right, is its disk mounted?",
        )
    return ListedTree(store, folders, listing_hashes(store, folders, infos, begun))


def part_of(tree: ListedTree, where: Where) -> ListedTree:
    """The folders of one part: the outermost ones are dealt by a hash of their names."""
    index, count = where.part
    if count == 1:
        return tree
    groups = by_outermost(tree.folders)
    mine = [
        outer for outer in groups if crc32(outer.encode("utf-8", "surrogatepass")) % count == index
    ]
    return replace(tree, folders=[folder for outer in mine for folder in (outer, *groups[outer])])


def by_outermost(folders: Iterable[str]) -> dict[str, list[str]]:
    """The folders inside of each outermost one."""
    inside: dict[str, list[str]] = {}
    for folder in folders:
        last = next(reversed(inside), None)
        if last is not None and (last == "" or folder.startswith(f"{last}/")):
            inside[last].append(folder)
        else:
            inside[folder] = []
    return inside


def open_below(
    store: Store, folders: list[str], options: Mapping[str, Any] | None, where: Where = HERE
) -> Iterator[Opened]:
    """Open the folders of a place that look like checkpoints, except those that are part of another.

    Folders inside of one that turns out not to be a checkpoint are opened after it: any program may
    write a manifest.json. So are folders beside the files of a foreign one: `checkpoint-500/` next
    to the final model of a run.
    """
    while folders:
        inside = by_outermost(folders)
        folders = []
        roots = {
            f"{store.url}/{folder}" if folder else store.url: nested
            for folder, nested in inside.items()
        }
        for root, outcome, left in open_all(list(roots), options, where):
            folders += left_inside(root.removeprefix(store.url).lstrip("/"), outcome, roots[root])
            yield root, outcome, left + len(folders)


def left_inside(
    above: str, outcome: OpenedCheckpoint | UcformatError, inside: Iterable[str]
) -> list[str]:
    """The folders inside of one that was opened that are not part of its checkpoint."""
    if isinstance(outcome, UcformatError):
        return list(inside)
    keys = outcome.keys
    if keys is None:
        return []
    parts = {folder: f"{folder.removeprefix(f'{above}/')}/" for folder in inside}
    return [
        folder for folder, part in parts.items() if not any(key.startswith(part) for key in keys)
    ]


def open_all(
    roots: Sequence[str], options: Mapping[str, Any] | None, where: Where = HERE
) -> Iterator[Opened]:
    """Open them in order, several at a time as soon as requests wait; with each the number of those that are left."""
    open_one = partial(try_open, options=options)
    together = _AHEAD_ELSEWHERE if where.kind == "dask" else _AHEAD
    for at in range(0, len(roots), together):
        batch = roots[at : at + together]
        if where.kind == "dask":
            job = OpenJob(batch, options)
            run_job(job, where)
            opened = [job.results[task] for task in range(job.count)]
        else:
            with gc_paused():
                opened = map_io(open_one, batch)
        for i, (root, outcome) in enumerate(zip(batch, opened, strict=True), at + 1):
            yield root, outcome, len(roots) - i


class OpenJob(Job):
    """Opens checkpoints on other machines."""

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
        return try_open(self._roots[task], self._options)

    def record(self, results: Mapping[int, OpenedCheckpoint | UcformatError]) -> str:
        """See Job."""
        return json.dumps(
            {
                task: [outcome.message, outcome.hint]
                if isinstance(outcome, UcformatError)
                else outcome.dump()
                for task, outcome in results.items()
            }
        )

    def keep(self, record: str) -> None:
        """Keep nothing: the catalog has what was recorded."""

    def take(self, record: str) -> None:
        """See Job."""
        for task, outcome in json.loads(record).items():
            failed = isinstance(outcome, list)
            self.results[int(task)] = (
                UcformatError(outcome[0], hint=outcome[1])
                if failed
                else OpenedCheckpoint.parse(outcome)
            )
            self.finished.add(int(task))

    def spec(self) -> dict[str, Any]:
        """See Job."""
        return {
            "job": job_name(self),
            "roots": list(self._roots),
            "options": plain_options(self._options or {}),
        }

    @classmethod
    def of_spec(cls, spec: Mapping[str, Any]) -> Self:
        """See Job."""
        return cls(spec["roots"], options_of(spec["options"]) or None)


def try_open(
    root: str, options: Mapping[str, Any] | None, watch: Watch = WatchedStore
) -> OpenedCheckpoint | UcformatError:
    """Open a checkpoint to record it; the error if that fails."""
    try:
        with naming_place(root):
            return _open(root, options, watch)
    except UcformatError as error:
        return error


def _open(root: str, options: Mapping[str, Any] | None, watch: Watch) -> OpenedCheckpoint:
    if options and exists(watch(open_store(root)), MANIFEST):  # a universal checkpoint takes none
        options = None
    return recordable(open_checkpoint(root, options=options, watch=watch), watch)


def recordable(ck: Checkpoint, watch: Watch = WatchedStore) -> OpenedCheckpoint:
    """An opened checkpoint as it is recorded."""
    doc = find_document(watch(open_store(ck.home)))
    if ck.kind == "ucformat":
        return OpenedCheckpoint(ck.home, ck.kind, ck.manifest, None, doc, None)
    infos = ck.files()
    files = (len(infos), sum(i.size for i in infos))
    return OpenedCheckpoint(
        ck.home,
        ck.kind,
        _described(ck, infos),
        files,
        doc,
        ck.metadata.files,
        tuple(ck.unread),
        ck.manifest.step,
    )


def _described(ck: Checkpoint, files: Sequence[Info]) -> Manifest:
    """The manifest of a foreign checkpoint, with its id, and the time of its newest file."""
    times = [i.modified for i in files if i.modified is not None]
    created = ck.manifest.created
    if times:
        # a file may have a time of the year 10,000
        with suppress(ValueError, OverflowError, OSError):
            created = datetime.fromtimestamp(max(times), UTC)
    step = step_in_name(ck.home) if ck.manifest.step is None else ck.manifest.step
    return ck.manifest.model_copy(update={"id": ck.id, "created": created, "step": step})


def unchanged(catalog: Catalog, tree: ListedTree) -> dict[str, str]:
    """The places of a tree whose files are unchanged since their checkpoints were read, with the ids of these."""
    listings = catalog.listings(tree.store.url)
    ids = {}
    for folder in tree.folders:
        checkpoint, listing = listings.get(same_url(tree.url(folder)), (None, None))
        if checkpoint is not None and listing == tree.listings.get(folder):
            ids[tree.url(folder)] = checkpoint
    return ids
