"""`python -m tests.memory`: has memory end under all commands, or those that are named; see the package's text."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.same_hashes import with_same_hashes


def main() -> int:
    """Print the counts, and what is wrong; 1 where anything was."""
    parser = argparse.ArgumentParser(prog="python -m tests.memory")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="'[COMMAND] [CHECKPOINT]'",
        help="such as 'convert torch' or zarr",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="how far apart those allocations of Python's are that fail",
    )
    given = parser.parse_args()
    shared = Path("/dev/shm")  # noqa: S108 - memory: nothing here is to last
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        # the user's own are none of our business
        os.environ |= {"UCP_CATALOG": "none", "XDG_DATA_HOME": folder, "XDG_CONFIG_HOME": folder}
        from tests.memory.allocations import WHOSE
        from tests.memory.commands import COMMANDS, KINDS
        from tests.memory.failing import Found, World

        (Path(folder) / "world").mkdir()
        world, all_found = World(Path(folder) / "world"), Found()
        for place in KINDS:
            for name in COMMANDS:
                if given.names and not any(
                    {name, place} >= set(words.split()) for words in given.names
                ):
                    continue
                for whose in WHOSE:
                    begun = time.monotonic()
                    found = world.fail(name, place, whose, given.every if whose == "python" else 1)
                    took = time.monotonic() - begun
                    click.echo(f"{f'{name} {place}':<20} {whose:<6} {found}, {took:.0f} s")
                    click.echo("".join(f"  {wrong}\n" for wrong in found.complaints), nl=False)
                    all_found += found
    click.echo(f"{'all':<27} {all_found}")
    return bool(all_found.complaints)


if __name__ == "__main__":
    with_same_hashes("tests.memory")  # or the n-th allocation is another one each time
    sys.exit(main())
