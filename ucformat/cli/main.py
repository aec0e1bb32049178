"""The entry point `ucp`, and what it knows of its commands before loading any of them."""

from __future__ import annotations

import click

from ucformat._version import __version__
from ucformat.cli.program import LazyGroup, Program

__all__ = ["main", "ucp"]

ucp = Program(
    "ucp",
    {
        "show": ("ucformat.cli.show:show", "Say what a checkpoint holds."),
        "get": ("ucformat.cli.get:get", "Read a tensor, or a slice of one."),
        "plan": ("ucformat.cli.plan:plan", "Say what ranks of a layout would read, before any of it is read."),
        "convert": ("ucformat.cli.convert:convert", "Make a universal checkpoint of any checkpoint."),
        "verify": ("ucformat.cli.verify:verify", "Read every byte and compare it with its checksums."),
        "layout": (
            LazyGroup(
                "layout",
                {"schema": ("ucformat.cli.layout:schema", "Print the JSON Schema of layout files.")},
                help="Layout files: how tensors lie on ranks.",
            ),
            "Layout files: how tensors lie on ranks.",
        ),
    },
    help="""Checkpoints for large models: every layout saves them, every layout reads exactly its slice.

    A checkpoint SRC is a path or a url, of a universal checkpoint or of one that DeepSpeed wrote: both are read in
    place, and nothing in them is ever executed.

    Results go to stdout, all else to stderr. Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict, 5 damaged,
    6 refused, 7 needs a newer ucformat. UCP_DEBUG=1 shows where an error came from.""",
)
click.version_option(__version__, prog_name="ucp", message="%(prog)s %(version)s")(ucp)


def main() -> None:
    """Run `ucp` with the arguments of this process, and exit."""
    ucp.main()


if __name__ == "__main__":
    main()
