"""`ucp export KIND`: a checkpoint in the format of another tool, a command for each format."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from ucformat.cli.program import LazyGroup
from ucformat.cli.ui.options import (
    CATALOG,
    LOSSY,
    OLDER,
    OPENING,
    SIZE,
    SRC,
    STATES,
    Opening,
    apply_options,
    command,
    layout_of,
)
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import field
from ucformat.cli.ui.where import (
    NO_VERIFY,
    ON,
    PART,
    Work,
    cost_fields,
    work_options,
    workers_option,
)
from ucformat.exporters.base import options_of
from ucformat.exporters.registry import EXPORTERS
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from dataclasses import Field

    from ucformat.cli.ui.output import Output
    from ucformat.exporters.base import Target
    from ucformat.jobs.cost import Cost


class _Exports(LazyGroup):
    """A command for each exporter that a package registers."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The kinds of exporters."""
        return list(EXPORTERS.names())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of an exporter."""
        return export_command(cmd_name) if cmd_name in EXPORTERS else None

    def lines(self) -> dict[str, list[tuple[str, str]]]:
        """The kinds of exporters and what they write."""
        return {
            "Formats": [
                (kind, exporter.summary or exporter.title) for kind, exporter in EXPORTERS.items()
            ]
        }


export = _Exports("export", {}, help="Write a checkpoint in the format of another tool.")


@lru_cache
def export_command(kind: str) -> click.Command:
    """The command of a format, with the options of its exporter."""

    def export_to(
        src: str, dst: str, opening: Opening, work: Work, out: Output, **given: Any
    ) -> None:
        import ucformat
        from ucformat.jobs.cost import estimate_export
        from ucformat.jobs.export import planned_job

        lossy, older = given.pop("lossy"), given.pop("older")
        given = {name: value for name, value in given.items() if value not in (None, ())}
        source = opening.open(src)
        if lossy:
            source = source.with_lossy()
        if older:
            source = source.with_older()
        if work.dry_run:
            given |= work.arguments("verify")
            given.pop("like", None)  # a plan is not compared
            with planned_job(source, dst, kind, **given) as job:
                _print_plan(job.target, estimate_export(job, work.workers), out)
            return
        question = f"remove the checkpoint at {dst}, if there is one?"
        if work.overwrite and not out.confirm(question, yes=work.yes):
            raise click.exceptions.Exit(1)
        begun = time.perf_counter()
        with work.running("exporting", out, f"{dst} is not complete") as progress:
            arguments = work.arguments("overwrite", "workers", "verify", "on")
            done = ucformat.export(source, dst, kind, **arguments, progress=progress, **given)
        seconds = time.perf_counter() - begun
        data = {
            "url": done.url,
            "kind": kind,
            "files": done.files,
            "tensors": done.tensors,
            "bytes": done.nbytes,
            "left_out": list(done.left_out),
            "verified": done.verified,
            "seconds": round(seconds, 3),
            "mb_per_s": round(done.nbytes / seconds / 1e6, 3),
        }
        if done.left_out:
            out.note(
                f"left out, because {EXPORTERS[kind].title} has no place for it: "
                f"{'; '.join(done.left_out)}"
            )
        if given.get("link"):
            out.note(
                "the files are linked, and were not read: `ucp verify SRC` compares them with "
                "checksums"
            )
        elif not done.verified:
            why = (
                "--no-verify was given"
                if work.no_verify
                else "SRC's files have no checksums for all of it"
            )
            out.note(f"exported without verification: {why}")
        amount = f"{plural(done.tensors, 'tensor')} in {plural(done.files, 'file')}, {bytes_text(done.nbytes)}"
        speed = f"in {seconds:.1f} s, {data['mb_per_s']:,.0f} MB/s"
        out.result(lambda: [f"{done.url}  {amount} {speed}"], lambda: data, lambda: [done.url])

    title = EXPORTERS[kind].title
    export_to.__doc__ = f"""Export SRC to DST as {title}.

    Resumable: if interrupted, DST is no checkpoint yet, and running the same command again writes only what is missing.
    What {title} has no place for is listed.
    """
    own = options_of(EXPORTERS[kind])
    options = apply_options(
        *(_own_option(name, option) for name, option in own.items()),
        SRC,
        click.argument("dst", metavar="DST"),
        STATES,
        *_COMMON,
        _WORK,
        OPENING,
        CATALOG,
    )
    subcommand = command(options(export_to))
    subcommand.name = kind
    return subcommand


_COMMON = (
    click.option(
        "--cast",
        metavar="DTYPE",
        help="Round floating-point tensors to this dtype: float32, bfloat16, float16, …",
    ),
    click.option(
        "--like",
        metavar="REF",
        help=(
            "A checkpoint of the model that will load the export; other names and shapes than "
            "there are an error."
        ),
    ),
    LOSSY,
    OLDER,
)
_WORK = work_options(
    click.option(
        "--overwrite",
        is_flag=True,
        help="Remove the foreign checkpoint, or the unfinished export, that is at DST first.",
    ),
    click.option(
        "-y", "--yes", is_flag=True, help="With --overwrite, do not ask for confirmation."
    ),
    workers_option("files to write"),
    NO_VERIFY,
    ON,
    PART,
    click.option(
        "--dry-run",
        is_flag=True,
        help=(
            "Print the files, their sizes, what is left out, and about how long it takes; write "
            "nothing."
        ),
    ),
)


def _own_option(
    name: str, option: Field[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option of a command for an option of an exporter."""
    reader, text = option.metadata["how"], option.metadata["text"]
    spelled, help_text = f"--{name.replace('_', '-')}", f"{text[0].upper()}{text[1:].rstrip('.')}."
    if reader == "flag":
        both = (
            f"{spelled}/--no-{spelled[2:]}" if option.default is None else spelled
        )  # of three values
        return click.option(both, name, is_flag=True, default=None, help=help_text)
    if reader == "link":  # `--link` alone, or `--link=hard`
        return click.option(
            spelled, name, is_flag=False, flag_value="reflink", metavar="[=hard]", help=help_text
        )
    kind, metavar, read = {
        "number": (click.INT, "N", None),
        "size": (SIZE, "SIZE", None),
        "names": (None, "NAME,…", lambda _c, _p, v: None if v is None else tuple(v.split(","))),
        "layout": (None, "FILE|PRESET", lambda _c, _p, v: None if v is None else layout_of(v)),
        "text": (None, "TEXT", None),
        "path": (None, "PATH", None),
    }[reader]
    return click.option(spelled, name, type=kind, metavar=metavar, callback=read, help=help_text)


def _print_plan(target: Target, cost: Cost, out: Output) -> None:
    files = [{"file": f.key, "bytes": f.nbytes} for f in target.files]
    nbytes = sum(f.nbytes for f in target.files)

    def lines() -> Iterator[str]:
        width = terminal_width()
        yield Heading(f"{plural(len(files), 'file')}, {bytes_text(nbytes)}; nothing was written")
        for file in target.files:
            yield f"{bytes_text(file.nbytes):>10}  {file.key}"
        for what in target.left_out:
            yield from field("left out", what, width)
        yield from cost_fields(cost, width)

    data = {**asdict(cost), "files": files, "bytes": nbytes, "left_out": list(target.left_out)}
    out.result(lines, lambda: data, lambda: [f.key for f in target.files])
