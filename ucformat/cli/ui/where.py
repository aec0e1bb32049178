"""The options of jobs that say where their tasks run."""

from __future__ import annotations

import click

from ucformat.errors import UsageError

__all__ = ["ON", "PART", "default_on", "where_of"]

#: Where jobs run if `--on` is not given; `python -m ucformat` sets it in a process of torchrun.
default_on = "threads"

ON = click.option(
    "--on",
    metavar="WHERE",
    help="Where to run: threads, dask://HOST:PORT, tls://HOST:PORT, or torchrun, the default in its processes.",
)
PART = click.option(
    "--part",
    metavar="I/N",
    help="Do one of N parts, I from 0 on, and commit nothing; `--part commit` then commits what all parts have done.",
)


def where_of(on: str | None, part: str | None) -> str:
    """The value of `on` for a job.

    Args:
        on: the value of `--on`.
        part: the value of `--part`.

    Raises:
        UsageError: both are given.
    """
    if part is not None:
        if on is not None:
            raise UsageError("--on and --part exclude each other", hint="a part runs on threads of its own process")
        return part if part == "commit" else f"part:{part}"
    return on or default_on
