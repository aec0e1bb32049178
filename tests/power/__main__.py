"""`python -m tests.power`: has the power fail under all commands, or those that are named; see the package's text."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import click


def main() -> int:
    """Print the counts, and what is wrong; 1 where anything was."""
    os.environ["UCP_CATALOG"] = "none"  # the user's own is none of our business
    from tests.power.commands import COMMANDS
    from tests.power.failure import Bench, Found

    parser = argparse.ArgumentParser(prog="python -m tests.power")
    parser.add_argument("commands", nargs="*", choices=[[], *COMMANDS], metavar="COMMAND")
    names = parser.parse_args().commands or COMMANDS
    all_found = Found()
    shared = Path("/dev/shm")  # noqa: S108 - memory: nothing here is to last
    with (
        tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder,
        Bench(Path(folder)) as bench,
    ):
        for name in names:
            for way in (bench.fail, bench.kill, bench.lie):
                begun = time.monotonic()
                found = way(name)
                took = time.monotonic() - begun
                click.echo(f"{name:<18} {way.__name__:<5} {found}, {took:.0f} s")
                click.echo("".join(f"  {wrong}\n" for wrong in found.complaints), nl=False)
                all_found += found
    click.echo(f"{'all':<24} {all_found}")
    return bool(all_found.complaints)


if __name__ == "__main__":
    sys.exit(main())
