"""The options of jobs: where their tasks run, and what they write; and what is printed of it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import click

from ucformat.cli.ui.options import SIZE, bundle
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import field
from ucformat.errors import UsageError
from ucformat.texts import bytes_text, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ucformat.checkpoint import Checkpoint
    from ucformat.cli.ui.output import Output
    from ucformat.jobs.cost import Cost

#: Where jobs run if `--on` is not given; `python -m ucformat` sets it in a process of torchrun.
default_on = "threads"

ON = click.option(
    "--on",
    metavar="WHERE",
    help=(
        "Where to run: threads, dask://HOST:PORT, tls://HOST:PORT, or torchrun, the default in "
        "its processes."
    ),
)
PART = click.option(
    "--part",
    metavar="I/N",
    help=(
        "Do one of N parts, I from 0 on, and commit nothing; `--part commit` then commits what "
        "all parts have done."
    ),
)


CHUNK_BYTES = click.option(
    "--chunk-bytes",
    type=SIZE,
    help="Maximum size of a chunk, the unit of reading.  [default: 1MiB]",
)
SHARD_BYTES = click.option(
    "--shard-bytes",
    type=SIZE,
    help="Maximum size of a shard, the unit of writing.  [default: 128MiB]",
)
CODEC = click.option(
    "--codec",
    type=click.Choice(["blosc"]),
    help="Compress the chunks, without loss.  [default: they are stored as they are]",
)
BASE = click.option(
    "--base",
    metavar="REF",
    help="Do not write tensors that equal those of this checkpoint, but read them there.",
)
OVERWRITE = click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the checkpoint at DST, which stays intact until the new one is committed.",
)
NO_VERIFY = click.option(
    "--no-verify", is_flag=True, help="Do not check the checksums in the files that are read."
)


def workers_option(
    work: str, default: str = "one for each core, at most 16; at least 8 for object stores"
) -> Callable[[Any], Any]:
    """Declare the option for the number of tasks that run concurrently."""
    return click.option(
        "-w",
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Number of {work} concurrently.  [default: {default}]",
    )


DRY_RUN = click.option(
    "--dry-run",
    is_flag=True,
    help="Print what the job would do, and about how long it takes; write nothing.",
)


@dataclass(frozen=True)
class Work:
    """How a command does its job; each command has the options of these that its job takes."""

    chunk_bytes: int | None = None
    shard_bytes: int | None = None
    codec: Literal["blosc", "none"] | None = None
    overwrite: bool = False
    yes: bool = False
    workers: int | None = None
    no_verify: bool = False
    on: str | None = None
    part: str | None = None
    dry_run: bool = False
    ignored: tuple[str, ...] = ()
    weights: Literal["safetensors"] | None = None
    base: str | None = None
    encode: tuple[str, ...] = ()
    with_bases: bool = False

    @property
    def where(self) -> str:
        """The value of `on` for the job."""
        if self.part is None:
            return self.on or default_on
        if self.on is not None:
            raise UsageError(
                "--on and --part exclude each other",
                hint="a part runs on threads of its own process",
            )
        return self.part if self.part == "commit" else f"part:{self.part}"

    def arguments(self, *names: str) -> dict[str, Any]:
        """The arguments of these names for a function of the public API."""
        values = {**vars(self), "verify": not self.no_verify, "on": self.where}
        return {name: values[name] for name in names}

    @contextmanager
    def running(
        self, what: str, out: Output, interrupted: str
    ) -> Iterator[Callable[[int, int], None]]:
        """Show the progress of the job, and say after Ctrl-C what became of it.

        Args:
            what: what is being done, such as `copying`.
            interrupted: what is left if it is interrupted.
        """
        from ucformat.cli.program import interruptible

        again = f"interrupted: {interrupted}; run the same command again and it continues"
        with interruptible(again), out.progress(what) as progress:
            yield progress


def work_options(*options: Callable[[Any], Any]) -> Callable[..., Callable[..., None]]:
    """Declare options of `Work`."""
    return bundle("work", Work, *options)


def print_written(ck: Checkpoint, seconds: float, out: Output, *, nothing: bool = False) -> None:
    """Print the place, id and size of a checkpoint, and how fast it was written."""
    tensors = 0 if nothing else len(ck.tensors)
    nbytes = 0 if nothing else sum(info.nbytes for info in ck.tensors.values())
    data = {
        "url": ck.url,
        "id": ck.manifest.id,
        "tensors": tensors,
        "bytes": nbytes,
        "seconds": round(seconds, 3),
        "mb_per_s": round(nbytes / seconds / 1e6, 3),
    }
    referenced = 0
    if ck.universal is not None and ck.manifest.bases and not nothing:
        referenced = sum(size for _, size in ck.universal.bases.amounts().values())
        data["bytes_referenced"] = referenced
    own = f", {bytes_text(referenced)} of them in bases" if referenced else ""
    amount = f"{plural(tensors, 'tensor')}, {bytes_text(nbytes)}{own} in {seconds:.1f} s, {data['mb_per_s']:,.0f} MB/s"
    out.result(
        lambda: [f"{ck.url}  {ck.manifest.id}  {amount}"], lambda: data, lambda: [ck.manifest.id]
    )


def print_cost(cost: Cost, out: Output) -> None:
    """Print what a job would cost."""
    out.result(lambda: _cost_lines(cost), lambda: asdict(cost), lambda: [str(cost.tasks)])


def _cost_lines(cost: Cost) -> Iterator[str]:
    width = terminal_width()
    yield Heading(f"{plural(cost.tasks, 'task')}; nothing was done")
    if cost.sampled is not None and cost.tasks:
        yield from field(
            "estimate",
            f"from a sample: {cost.sampled:,} of the {plural(cost.tasks, 'task')}",
            width,
        )
    yield from field("files", f"{cost.files:,}", width)
    yield from cost_fields(cost, width)


def cost_fields(cost: Cost, width: int | None) -> Iterator[str]:
    """What is read and written, and the time that it takes, as lines."""
    yield from field("read", bytes_text(cost.bytes_read), width)
    if cost.bytes_written:
        less = " before encoding" if cost.encoded else ""
        yield from field("written", f"{bytes_text(cost.bytes_written)}{less}", width)
    if cost.referenced:
        amount = f"{plural(cost.referenced, 'tensor')}, {bytes_text(cost.bytes_referenced)}"
        yield from field("in base", f"{amount}, not written", width)
    if cost.unread:
        amount = f"{plural(cost.unread, 'tensor')}, counted as written"
        yield from field(
            "unknown", f"{amount}: whether they equal the base's shows when read", width
        )
    yield from field("requests", f"{cost.requests:,}", width)
    if cost.seconds is not None:
        yield from field("time", f"about {_time(cost.seconds)}", width)
    for place in cost.unmeasured:
        yield from field("time", f"unknown: `ucp doctor {place}` measures the speed there", width)


def _time(seconds: float) -> str:
    """A time in its largest unit of which there are two: `0.4 s`, `90 s`, `12 min`, `3 h`."""
    unit, size = next(((u, n) for u, n in (("h", 3600), ("min", 60)) if seconds >= 2 * n), ("s", 1))
    return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
