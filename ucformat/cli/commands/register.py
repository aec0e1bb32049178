"""`ucp register`, `ucp reindex`: making the catalog know what lies in storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.ui.catalogs import entry_data, opened_catalog
from ucformat.cli.ui.options import (
    CATALOG,
    CONFIG,
    IGNORE_DEPENDENT,
    METRIC,
    SOURCE,
    VIEW,
    command,
    ignore_dependents_of,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import bytes_text, plural, table
from ucformat.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.register import Registered, Reindexed

__all__ = ["register", "reindex"]


TRUST = click.option(
    "--trust-documents",
    is_flag=True,
    help="Believe what other catalogs wrote beside the checkpoints: names move, tags go, deletions keep their grace.",
)


@command
@click.argument("places", metavar="PLACE…", nargs=-1, required=True)
@click.option("-r", "--recursive", is_flag=True, help="Search the folders below, too.")
@click.option("--rescan", is_flag=True, help="With -r: read what is known and unchanged, too.")
@click.option(
    "--run", metavar="NAME", help="The run they belong to.  [default: theirs, else the folder that theirs is in]"
)
@click.option("--virtual", is_flag=True, help="Make a virtual checkpoint: PLACE… is SRC DST.")
@click.option("--checksums", is_flag=True, help="With --virtual: read SRC's files once and keep their checksums.")
@click.option("--overwrite", is_flag=True, help="With --virtual: replace the checkpoint at DST.")
@click.option(
    "--unprotected",
    is_flag=True,
    help="With --virtual: also where nothing can be written beside SRC's files, to say that they are needed.",
)
@IGNORE_DEPENDENT
@TRUST
@CONFIG
@METRIC
@VIEW
@SOURCE
@CATALOG
def register(
    places: tuple[str, ...],
    recursive: bool,  # noqa: FBT001
    rescan: bool,  # noqa: FBT001
    run: str | None,
    config: dict[str, Any] | None,
    metrics: dict[str, float],
    virtual: bool,  # noqa: FBT001
    checksums: bool,  # noqa: FBT001
    overwrite: bool,  # noqa: FBT001
    unprotected: bool,  # noqa: FBT001
    ignored: tuple[str, ...],
    trust_documents: bool,  # noqa: FBT001
    view: str | None,
    options: dict[str, Any] | None,
    out: Output,
) -> None:
    """Make checkpoints known to the catalog, universal ones and those of engines, as they lie.

    PLACE is a path or a url. Nothing is converted, copied or changed. What is known already stays as it is, and with
    --run gets into that run. What --source says is not recorded: it is given again where one of them is opened.

    With --virtual a universal checkpoint of SRC is made at DST that holds no bytes of tensors, only where these lie in
    SRC's files. It opens like any other as long as those stay as they are; `ucp materialize DST` makes arrays of it.
    That it needs them is said beside them, in needed-by/, and kept by every catalog.
    """
    import ucformat
    from ucformat.cli.program import Interrupted

    if virtual:
        if len(places) != 2 or recursive or rescan or trust_documents:
            raise UsageError("--virtual takes two places, SRC and DST", hint="ucp register SRC DST --virtual")
        source = ucformat.open(places[0], view=view, options=options)
        said = {"run": run, "config": config, "metrics": metrics}
        ignore_dependents_of(ignored, [places[1]], out, "register")
        how = {"checksums": checksums, "overwrite": overwrite, "unprotected": unprotected}
        _register_virtual(source, places[1], said, out, how)
        return
    if checksums or overwrite or unprotected or ignored or view is not None:
        raise UsageError("--checksums, --overwrite, --unprotected, --ignore-dependent and --view go with --virtual")
    try:
        with opened_catalog() as catalog, out.progress("registering", "checkpoints") as progress:
            found = ucformat.register(
                places,
                catalog,
                recursive=recursive,
                run=run,
                config=config,
                metrics=metrics,
                rescan=rescan,
                trust_documents=trust_documents,
                options=options,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise Interrupted("interrupted: what was registered until now stays; the same command continues") from None
    out.result(lambda: _list(found), lambda: _data(found), lambda: (e.id for e in found.entries))
    _raise_failures(found)


def _register_virtual(source: Checkpoint, dst: str, said: dict[str, Any], out: Output, how: dict[str, Any]) -> None:
    import ucformat

    with out.progress("reading checksums") as progress:
        ck = ucformat.convert(source, dst, virtual=True, progress=progress, **how, **said)
    nbytes = sum(info.nbytes for info in ck.tensors.values())
    sidecar = ck.manifest.sidecar
    files = len(sidecar.sources) if sidecar else 0
    found = {"url": ck.url, "id": ck.id, "tensors": len(ck.tensors), "bytes": nbytes, "files": files}
    amount = f"{plural(len(ck.tensors), 'tensor')}, {bytes_text(nbytes)} in {plural(files, 'file')}, not copied"
    if ck.manifest.verified is not None and not ck.manifest.verified.default:
        why = "SRC's files carry no checksums of them" if how["checksums"] else "--checksums reads the files to compare"
        bare = len(ck.tensors) - len(ck.manifest.verified.but)
        out.note(f"the bytes of {plural(bare, 'tensor')} are unverified: {why}")
    out.result(lambda: [f"{ck.url}  {ck.id}  {amount}"], lambda: found, lambda: [ck.id])


@command
@click.argument("place", metavar="PLACE")
@click.option("--forget", is_flag=True, help="Forget the checkpoints that the catalog knew there and that are gone.")
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
    """Make the catalog know what lies below PLACE.

    A catalog that was lost comes back this way, with the tags, aliases, holds, metrics and notes that were written
    beside the checkpoints, which an empty catalog believes. What it knew there and does not find is an error, for so it
    is with a disk that is not mounted; with --forget it is forgotten, and no longer protects what it needed.
    """
    import ucformat
    from ucformat.cli.program import Interrupted
    from ucformat.errors import UcformatError

    try:
        with opened_catalog() as catalog, out.progress("reindexing", "checkpoints") as progress:
            found = ucformat.reindex(
                place, catalog, forget=forget, trust_documents=trust_documents, options=options, progress=progress
            )
    except KeyboardInterrupt:
        raise Interrupted("interrupted: what was recorded until now stays; the same command again does all") from None
    out.result(
        lambda: _summary(found),
        lambda: _data(found) | {"missing": list(found.missing), "forgotten": list(found.forgotten)},
        lambda: (e.id for e in found.entries),
    )
    _raise_failures(found)
    if found.missing and not forget:
        places = plural(len(found.missing), "place")
        raise UcformatError(
            f"the catalog knew checkpoints in {places} that hold none: nothing was forgotten",
            hint=f"is a disk not mounted? If they are gone for good: ucp reindex {place} --forget",
        )


def _list(found: Registered) -> Iterator[str]:
    width = terminal_width()
    cut = None if width is None else 12
    rows = [(e.name, e.id[:cut], e.kind, bytes_text(e.nbytes), e.url or "-") for e in found.entries]
    if rows:
        head = ("name", "id", "kind", "size", "url")
        yield from table(head, rows, left=(0, 1, 2, 4), shrink=(0, 4), width=width)
    yield from _failures(found)


def _summary(found: Reindexed) -> Iterator[str]:
    size = bytes_text(sum(e.nbytes for e in found.entries))
    yield Heading(f"{plural(len(found.entries), 'checkpoint')}, {size}")
    for url in found.missing:
        yield f"  {'forgotten' if url in found.forgotten else 'missing':<9} {url}"
    yield from _failures(found)


def _failures(found: Registered) -> Iterator[str]:
    for failure in found.failures:
        yield f"  failed    {failure.url}: {failure.message}"


def _data(found: Registered) -> dict[str, Any]:
    return {
        "checkpoints": [entry_data(e) for e in found.entries],
        "failures": [{"url": f.url, "message": f.message} for f in found.failures],
    }


def _raise_failures(found: Registered) -> None:
    """Fail if a place that looked like a checkpoint could not be read; the others are recorded."""
    from ucformat.errors import UcformatError

    if found.failures:
        raise UcformatError(
            f"{plural(len(found.failures), 'place')} could not be read, and {len(found.entries)} could",
            hint="`ucp show PLACE` says more about each",
        )
