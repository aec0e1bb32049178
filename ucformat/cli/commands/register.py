"""`ucp register`, `ucp reindex`: recording existing checkpoints in the catalog."""

from __future__ import annotations

import gc
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import data_of, entry_data
from ucformat.cli.ui.catalogs import opened_catalog, url_of_catalog
from ucformat.cli.ui.options import (
    CATALOG,
    IGNORE_DEPENDENT,
    OPENING,
    SOURCE,
    Opening,
    RecordedFacts,
    bundle,
    command,
    facts_options,
    ignore_dependents_of,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import table
from ucformat.cli.ui.where import DRY_RUN, ON, Work, print_cost, work_options
from ucformat.errors import UsageError, first_names
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.register import Registered, Reindexed

_MAX_NAMED = 5  # unread files of a checkpoint

TRUST = click.option(
    "--trust-documents",
    is_flag=True,
    help=(
        "Trust the documents of other catalogs: aliases move, tags are removed, deletions keep "
        "their grace period."
    ),
)


@dataclass(frozen=True)
class Search:
    """Where checkpoints are looked for, what is read of them, and what their documents may change."""

    recursive: bool = False
    rescan: bool = False
    trust_documents: bool = False
    fingerprint: bool = False


@dataclass(frozen=True)
class Virtual:
    """Whether a virtual checkpoint is created, and how."""

    virtual: bool = False
    checksums: bool = False
    overwrite: bool = False
    unprotected: bool = False


@command
@click.argument("places", metavar="PLACE…", nargs=-1, required=True)
@bundle(
    "search",
    Search,
    click.option("-r", "--recursive", is_flag=True, help="Also search subfolders."),
    click.option(
        "--rescan",
        is_flag=True,
        help="With -r: also read checkpoints that are recorded and unchanged.",
    ),
    TRUST,
    click.option(
        "--fingerprint",
        is_flag=True,
        help="Read the tensors of foreign checkpoints, verify them and record fingerprints.",
    ),
)
@bundle(
    "virtual",
    Virtual,
    click.option("--virtual", is_flag=True, help="Create a virtual checkpoint: PLACE… is SRC DST."),
    click.option(
        "--checksums",
        is_flag=True,
        help="With --virtual: read SRC's files and record their checksums and fingerprints.",
    ),
    click.option(
        "--overwrite", is_flag=True, help="With --virtual: replace the checkpoint at DST."
    ),
    click.option(
        "--unprotected",
        is_flag=True,
        help=(
            "With --virtual: proceed even if no record that SRC's files are needed can be "
            "written beside them."
        ),
    ),
)
@work_options(
    ON,
    click.option(
        "--part", metavar="I/N", help="With -r: record one of N parts of the folders, I from 0 on."
    ),
    DRY_RUN,
    IGNORE_DEPENDENT,
)
@facts_options(
    "The run they belong to.  [default: the run in the checkpoint, else the parent folder]"
)
@OPENING
@CATALOG
def register(
    places: tuple[str, ...],
    search: Search,
    virtual: Virtual,
    work: Work,
    facts: RecordedFacts,
    opening: Opening,
    out: Output,
) -> None:
    """Record existing checkpoints in the catalog: universal ones, and those of training engines.

    PLACE is a path or URL. Nothing is converted, copied or changed. Checkpoints that are recorded
    already stay as they are, except that --run moves them to that run, and that --fingerprint adds
    fingerprints, by which the catalog finds and compares the contents of tensors. --source is not recorded:
    pass it again to open one of them.

    With --virtual, a universal checkpoint is created at DST that references the bytes in SRC's
    files instead of copying them. It can be used like any other while those files are unchanged;
    `ucp materialize DST` converts it to arrays. Records in needed-by/ beside SRC's files, and every
    catalog, protect them.
    """
    import ucformat
    from ucformat.cli.program import interruptible

    elsewhere = bool(work.on or work.part)
    if virtual.virtual:
        if len(places) != 2 or search != Search() or elsewhere or work.dry_run:
            raise UsageError(
                "--virtual takes two places, SRC and DST", hint="ucp register SRC DST --virtual"
            )
        source = opening.open(places[0])
        ignore_dependents_of(work.ignored, [places[1]], out, "register")
        _register_virtual(source, places[1], facts, virtual, out)
        return
    if virtual != Virtual() or work.ignored or opening.view is not None:
        raise UsageError(
            "--checksums, --overwrite, --unprotected, --ignore-dependent and --view go with "
            "--virtual"
        )
    if work.dry_run:
        if not search.recursive or elsewhere:
            raise UsageError(
                "--dry-run goes with -r, and without --on and --part: it estimates one process"
            )
        if search.fingerprint:
            raise UsageError("--dry-run estimates no --fingerprint, which reads all tensors")
        new = facts.run or facts.config or facts.metrics or opening.options
        read_all = search.rescan or search.trust_documents or bool(new)
        _estimate(places, opening.options, out, rescan=read_all)
        return
    kept = "interrupted: what was registered is kept; run the same command again to continue"
    with interruptible(kept), opened_catalog() as catalog:
        gc.freeze()  # of thousands of checkpoints, nothing that is here now is looked through each time
        what = ("fingerprints",) if search.fingerprint else ("registering", "checkpoints")
        with out.progress(*what) as progress:
            registered = ucformat.register(
                places,
                catalog,
                **asdict(search),
                **asdict(facts),
                options=opening.options,
                on=work.where,
                progress=progress,
            )
        out.result(lambda: _list(registered), lambda: _data(registered), lambda: registered.ids)
    _raise_failures(registered)


def _estimate(
    places: tuple[str, ...], options: dict[str, Any] | None, out: Output, *, rescan: bool
) -> None:
    import ucformat
    from ucformat.errors import NotFound
    from ucformat.jobs.cost import estimate_register

    with ExitStack() as stack:
        catalog = None
        with suppress(NotFound):  # the first command that records creates it
            catalog = stack.enter_context(ucformat.Catalog(url_of_catalog(), read_only=True))
        print_cost(estimate_register(places, catalog, rescan=rescan, options=options), out)


def _register_virtual(
    source: Checkpoint, dst: str, facts: RecordedFacts, virtual: Virtual, out: Output
) -> None:
    import ucformat

    with out.progress("reading checksums") as progress:
        ck = ucformat.convert(source, dst, **asdict(virtual), **asdict(facts), progress=progress)
    nbytes = sum(info.nbytes for info in ck.tensors.values())
    sidecar = ck.manifest.sidecar
    files = len(sidecar.sources) if sidecar else 0
    data = {
        "url": ck.url,
        "id": ck.id,
        "tensors": len(ck.tensors),
        "bytes": nbytes,
        "files": files,
    }
    amount = f"{plural(len(ck.tensors), 'tensor')}, {bytes_text(nbytes)} in {plural(files, 'file')}, not copied"
    if ck.manifest.verified is not None and not ck.manifest.verified.default:
        why = (
            "SRC's files have no checksums for them"
            if virtual.checksums
            else "--checksums verifies those it can"
        )
        bare = len(ck.tensors) - len(ck.manifest.verified.but)
        out.note(f"the bytes of {plural(bare, 'tensor')} are unverified: {why}")
    out.result(lambda: [f"{ck.url}  {ck.id}  {amount}"], lambda: data, lambda: [ck.id])


@command
@click.argument("place", metavar="PLACE")
@click.option(
    "--forget", is_flag=True, help="Remove the records of checkpoints that no longer exist."
)
@TRUST
@SOURCE
@CATALOG
def reindex(
    place: str,
    forget: bool,  # noqa: FBT001
    trust_documents: bool,  # noqa: FBT001
    options: dict[str, Any] | None,
    out: Output,
) -> None:
    """Bring the catalog up to date with the checkpoints below PLACE.

    This rebuilds a lost catalog, with the tags, aliases, holds, metrics and notes that are stored
    beside the checkpoints, which an empty catalog trusts. Checkpoints that the catalog has there
    but that are missing are an error, since a disk may not be mounted; --forget removes them, and
    they no longer protect the files they needed.
    """
    import ucformat
    from ucformat.cli.program import interruptible
    from ucformat.errors import UcformatError

    kept = "interrupted: what was recorded is kept; run the same command again for the rest"
    with interruptible(kept), opened_catalog() as catalog:
        with out.progress("reindexing", "checkpoints") as progress:
            reindexed = ucformat.reindex(
                place,
                catalog,
                forget=forget,
                trust_documents=trust_documents,
                options=options,
                progress=progress,
            )
        out.result(
            lambda: _summary(reindexed),
            lambda: (
                _data(reindexed)
                | {"missing": list(reindexed.missing), "forgotten": list(reindexed.forgotten)}
            ),
            lambda: reindexed.ids,
        )
    _raise_failures(reindexed)
    if reindexed.missing and not forget:
        places = plural(len(reindexed.missing), "place")
        raise UcformatError(
            f"the catalog has checkpoints in {places} where there are none: nothing was forgotten",
            hint=(
                "check that all disks are mounted; if the checkpoints are gone: ucp reindex "
                f"{place} --forget"
            ),
        )


def _list(registered: Registered) -> Iterator[str]:
    width = terminal_width()
    cut = None if width is None else 12
    rows = [
        (e.name, e.id[:cut], e.kind, bytes_text(e.nbytes), e.url or "-") for e in registered.entries
    ]
    if rows:
        head = ("name", "id", "kind", "size", "url")
        yield from table(head, rows, left=(0, 1, 2, 4), shrink=(0, 4), width=width)
    yield from _failures(registered)


def _summary(reindexed: Reindexed) -> Iterator[str]:
    size = bytes_text(sum(e.nbytes for e in reindexed.entries))
    yield Heading(f"{plural(len(reindexed.ids), 'checkpoint')}, {size}")
    for url in reindexed.missing:
        yield f"  {'forgotten' if url in reindexed.forgotten else 'missing':<9} {url}"
    yield from _failures(reindexed)


def _failures(registered: Registered) -> Iterator[str]:
    for url, names in registered.unread.items():
        yield f"  not read  {first_names(names, _MAX_NAMED)} of {url}"
    for failure in registered.failures:
        yield f"  failed    {failure.url}: {failure.message}"


def _data(registered: Registered) -> dict[str, Any]:
    return {
        "checkpoints": [entry_data(e) for e in registered.entries],
        "failures": [data_of(failure) for failure in registered.failures],
        "unread": {url: list(names) for url, names in registered.unread.items()},
    }


def _raise_failures(registered: Registered) -> None:
    """Raise an error if a place that looked like a checkpoint could not be read; the others are recorded."""
    from ucformat.errors import UcformatError

    if registered.failures:
        raise UcformatError(
            f"{plural(len(registered.failures), 'place')} could not be read, and "
            f"{len(registered.ids)} could",
            hint="`ucp show PLACE` shows why",
        )
