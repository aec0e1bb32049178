"""Records existing checkpoints in a catalog from storage alone: one, a tree of them, or all those of a lost catalog."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from ucformat.catalog.loading import load_by_id
from ucformat.catalog.refs import same_url
from ucformat.catalog.stamp import now
from ucformat.errors import NotACheckpoint, NotFound, UcformatError, UsageError, check_keywords
from ucformat.jobs.batches import Failure, Opened, OpenedCheckpoint, RecordOptions, record_all
from ucformat.jobs.documents import write_documents
from ucformat.jobs.fingerprints import record_fingerprints
from ucformat.jobs.listing import check_listed, is_empty, search
from ucformat.jobs.opening import open_all, open_below, part_of, search_tree, unchanged
from ucformat.jobs.where import HERE, TaskArguments, Where
from ucformat.sources.configuration import with_config
from ucformat.storage.url import as_strings, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from os import PathLike

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.catalog.refs import LocationEntry

__all__ = ["Failure", "Registered", "Reindexed", "register", "reindex"]


@dataclass(frozen=True)
class Registered:
    """The ids of the checkpoints that are now in the catalog (new or known before), and the failures.

    `unread` lists the files whose meaning is unknown in the folder of each foreign checkpoint, by
    its url.
    """

    ids: tuple[str, ...]
    failures: tuple[Failure, ...]
    unread: Mapping[str, tuple[str, ...]]
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


class RegisterArguments(TaskArguments, total=False):
    """The arguments of `register` besides the places and the catalog.

    With `on`, which takes `recursive`, each part and each process of torchrun records its own
    folders in the catalog: there is nothing to commit. Progress is in checkpoints, with
    `fingerprint` in bytes.

    Attributes:
        recursive: search the trees; a folder that looks like a checkpoint and cannot be read is a
            failure, not an error (default: no).
        run: the run that they belong to (default: the folder that a checkpoint's folder is in).
        config: the configuration of the training, in addition to that in the files of a foreign
            checkpoint.
        metrics: measured numbers by name, which replace those that are recorded.
        step: the training step of one foreign checkpoint whose files have none; it replaces one
            that is recorded (default: that in its files, else in its name).
        rescan: with `recursive`, also read known checkpoints. Otherwise a checkpoint is not opened
            if its files have the same sizes, inodes and times, or etags, as when it was last read,
            and its manifest is the same.
        trust_documents: trust the documents of other catalogs beside the checkpoints like changes
            to this one: aliases move, tags are removed, and deleted checkpoints keep their grace
            (docs/security.md). Known, unchanged checkpoints are read, too (default: no).
        options: facts that the files of foreign checkpoints lack, as in `ucformat.open`. They are
            not recorded, and must be given again to open one of these.
        fingerprint: read the tensors of foreign checkpoints of which no fingerprints are recorded,
            compare them with the checksums in their files, and record fingerprints, by which the
            catalog finds and compares contents (default: no). Those of a checkpoint are recorded
            when all are computed; called again, it continues with the next checkpoint.
    """

    recursive: bool
    run: str | None
    config: Mapping[str, Any] | None
    metrics: Mapping[str, float] | None
    step: int | None
    rescan: bool
    trust_documents: bool
    options: Mapping[str, Any] | None
    fingerprint: bool


def register(
    places: str | PathLike[str] | Iterable[str | PathLike[str]],
    catalog: Catalog,
    **arguments: Unpack[RegisterArguments],
) -> Registered:
    """Record the checkpoints in these places, foreign ones in place; nothing is converted.

    Args:
        places: a path or url of a checkpoint, or with `recursive` of a tree of them; or several of
            these.
        catalog: the catalog that records them.
        arguments: see `RegisterArguments`.

    Raises:
        UsageError: `config` or `step` is given for a universal checkpoint, whose manifest has it,
            or `step` for one whose files have another; or `fingerprint` for a universal one whose
            manifest has none.
        ChecksumError: with `fingerprint`, a file of a foreign checkpoint is damaged.
        NotFound: one of the places is empty, or has no checkpoint.
    """
    check_keywords("register", arguments, RegisterArguments)
    on, recursive = arguments.get("on", "threads"), arguments.get("recursive", False)
    config, step = arguments.get("config"), arguments.get("step")
    options, trust = arguments.get("options"), arguments.get("trust_documents", False)
    where = Where.parse(on)
    if where.kind == "commit" or (where != HERE and not recursive):
        raise UsageError(
            f"there is nothing to register on {on!r}",
            hint="with recursive=True (-r), parts record alone",
        )
    fingerprint = arguments.get("fingerprint", False)
    if fingerprint and where.kind == "dask":
        raise UsageError(
            "fingerprints are not computed on a Dask cluster",
            hint="on='part:I/N' (--part I/N), or torchrun, divides the checkpoints among processes",
        )
    places = as_strings(places)
    trees = [part_of(search_tree(open_store(p)), where) for p in places] if recursive else []
    if step is not None and (recursive or len(places) > 1):
        raise UsageError(
            "step is that of one checkpoint",
            hint="register checkpoints of several steps one by one",
        )
    recorded: dict[str, str] = {}
    if not any(
        map(arguments.get, ("rescan", "trust_documents", "run", "config", "metrics", "options"))
    ):
        for tree in trees:
            recorded |= unchanged(catalog, tree)
    unknown = [(t.store, [f for f in t.folders if t.url(f) not in recorded]) for t in trees]
    below = (f for store, folders in unknown for f in open_below(store, folders, options, where))
    opened = below if recursive else open_all(places, options)
    if config or step is not None:
        opened = (
            (root, _with_given(outcome, config, step), left) for root, outcome, left in opened
        )
    listed = {t.url(folder): value for t in trees for folder, value in t.listings.items()}
    record_options = RecordOptions(
        arguments.get("run"),
        bool(config),
        strict=not recursive,
        trust=trust,
        replace_step=step is not None,
    )
    progress = arguments.get("progress")
    shown = None if fingerprint else progress
    done = record_all(catalog, opened, record_options, shown, listings=listed)
    if metrics := arguments.get("metrics"):
        for _, checkpoint in done.present:
            catalog.metric(checkpoint, metrics)
    write_documents(catalog, None)
    present = [*recorded.items(), *done.present]
    if recursive:  # in one order, whichever were skipped
        present.sort()
    failures = done.failures
    if fingerprint:
        failures += record_fingerprints(
            catalog, present, options, progress, listings=listed, strict=not recursive
        )
    return Registered(tuple(i for _, i in present), failures, done.unread, catalog)


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

    Checkpoints that the catalog has there and that are not found stay recorded, so that they
    protect the files that they need: a disk that is not mounted looks like one whose files were
    removed.

    Args:
        place: a path or url.
        catalog: the catalog that records them.
        forget: forget checkpoints that are not found (default: no). Unreadable ones are never
            forgotten.
        trust_documents: as in `register`; always if the catalog is empty.
        options: facts that the files of foreign checkpoints lack, as in `ucformat.open`.
        progress: called with the checkpoints done and in all.

    Raises:
        NotFound: without `forget`, the place does not exist, or is empty and the catalog knows
            checkpoints there.
        UcformatError: the place cannot be listed to its end; nothing was recorded or forgotten.
    """
    store = open_store(place)
    recorded = catalog.places(store.url)
    empty = is_empty(store)
    if empty and not forget:
        check_listed(store, catalog)
    folders = [] if empty else search(store.list())
    record_options = RecordOptions(trust=trust_documents or catalog.empty)
    done = record_all(catalog, open_below(store, folders, options), record_options, progress)
    missing, reopened = _missing(
        recorded, [u for u, _ in done.present] + [f.url for f in done.failures], options
    )
    also = record_all(catalog, reopened, record_options, None)
    forgotten = catalog.forget(missing if forget else [])
    write_documents(catalog, None)
    ids = tuple(i for _, i in (*done.present, *also.present))
    missed = tuple(p.url for p in missing)
    failures, unread = (*done.failures, *also.failures), done.unread | also.unread
    return Reindexed(ids, failures, unread, catalog, missed, tuple(forgotten))


def _missing(
    recorded: Sequence[LocationEntry], present: Collection[str], options: Mapping[str, Any] | None
) -> tuple[list[LocationEntry], list[Opened]]:
    """The known places without a checkpoint, and the results of opening the others that the search did not find.

    A search does not follow linked folders, or look inside of other checkpoints.
    """
    there = {same_url(p) for p in present}
    unseen = {p.url: p for p in recorded if p.url not in there}
    missing, reopened = [], []
    for opened in open_all(list(unseen), options):
        if isinstance(opened[1], NotFound | NotACheckpoint):
            missing.append(unseen[opened[0]])
        else:
            reopened.append(opened)
    return missing, reopened


def _with_given(
    outcome: OpenedCheckpoint | UcformatError, config: Mapping[str, Any] | None, step: int | None
) -> OpenedCheckpoint | UcformatError:
    """An opened checkpoint with the given configuration and step."""
    if isinstance(outcome, UcformatError):
        return outcome
    if outcome.kind == "ucformat":
        return UsageError(
            f"{outcome.url} is a universal checkpoint, and its manifest has the configuration and "
            "the step",
            hint="give --config and --step when it is made: `ucp convert SRC DST --config FILE`",
        )
    if step is not None and outcome.step not in (None, step):
        return UsageError(
            f"the files of {outcome.url} have the step {outcome.step}, not {step}",
            hint="leave the step out: the one in the files counts",
        )
    update = {"config": with_config(outcome.manifest.config, config)}
    manifest = outcome.manifest.model_copy(
        update=update if step is None else {**update, "step": step}
    )
    return replace(outcome, manifest=manifest)
