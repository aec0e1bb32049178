"""The entry point `ucp`, and what it knows of its commands before loading any of them."""

from __future__ import annotations

import gc

import click

from ucformat._version import __version__
from ucformat.cli.program import LazyGroup, Program

__all__ = ["main", "ucp"]

_ALIAS = LazyGroup(
    "alias",
    {
        "set": ("ucformat.cli.alias:set_", "Point an alias to a checkpoint."),
        "rm": ("ucformat.cli.alias:rm", "Remove an alias."),
        "list": ("ucformat.cli.alias:list_", "List the aliases and where they point."),
        "log": ("ucformat.cli.alias:log", "Show where an alias has pointed."),
    },
    help="Names that point to checkpoints, and can be moved.",
)

_CATALOG = LazyGroup(
    "catalog",
    {
        "info": ("ucformat.cli.catalog:info", "Say which catalog is used and what is in it."),
        "upgrade": ("ucformat.cli.catalog:upgrade", "Bring a catalog of an older ucformat up to date."),
    },
    help="The catalog itself.",
)

_LAYOUT = LazyGroup(
    "layout",
    {
        "check": ("ucformat.cli.layout:check", "Check a layout file, and which rule takes which tensor."),
        "schema": ("ucformat.cli.layout:schema", "Print the JSON Schema of layout files."),
    },
    help="Layout files: how tensors lie on ranks.",
)

ucp = Program(
    "ucp",
    {
        "show": ("ucformat.cli.show:show", "Say what a checkpoint holds."),
        "get": ("ucformat.cli.get:get", "Read a tensor, or a slice of one."),
        "plan": ("ucformat.cli.plan:plan", "Say what ranks of a layout would read, before any of it is read."),
        "fits": ("ucformat.cli.fits:fits", "Say whether checkpoints can be resumed under a layout."),
        "convert": ("ucformat.cli.convert:convert", "Make a universal checkpoint of any checkpoint."),
        "materialize": ("ucformat.cli.materialize:materialize", "Make arrays of a packed checkpoint."),
        "copy": ("ucformat.cli.copy:copy", "Copy a universal checkpoint to another place."),
        "verify": ("ucformat.cli.verify:verify", "Read every byte and compare it with its checksums."),
        "doctor": ("ucformat.cli.doctor:doctor", "Probe what a storage place can do."),
        "layout": (_LAYOUT, "Layout files: how tensors lie on ranks."),
        "ls": ("ucformat.cli.ls:ls", "List the checkpoints that the catalog knows."),
        "diff": ("ucformat.cli.diff:diff", "Show in what two checkpoints differ."),
        "lineage": ("ucformat.cli.lineage:lineage", "Show what a checkpoint was made from, or what was made from it."),
        "sql": ("ucformat.cli.sql:sql", "Ask the catalog in SQL."),
        "register": ("ucformat.cli.register:register", "Make checkpoints known to the catalog."),
        "reindex": ("ucformat.cli.register:reindex", "Make the catalog know what lies below a place."),
        "tag": ("ucformat.cli.mark:tag", "Put tags on a checkpoint."),
        "untag": ("ucformat.cli.mark:untag", "Take tags off a checkpoint, and say why."),
        "alias": (_ALIAS, "Names that point to checkpoints, and can be moved."),
        "metric": ("ucformat.cli.mark:metric", "Write metrics of a checkpoint."),
        "note": ("ucformat.cli.mark:note", "Write something about a checkpoint."),
        "hold": ("ucformat.cli.mark:hold", "Keep a checkpoint from being deleted."),
        "release": ("ucformat.cli.mark:release", "End the holds on a checkpoint."),
        "link": ("ucformat.cli.lineage:link", "Say that a checkpoint was made from another one."),
        "log": ("ucformat.cli.log:log", "Show who did what, when."),
        "delete": ("ucformat.cli.delete:delete", "Delete checkpoints; they can be restored for a time."),
        "restore": ("ucformat.cli.delete:restore", "Take a deletion back."),
        "retain": ("ucformat.cli.retain:retain", "Show what a policy keeps and deletes, and delete it."),
        "gc": ("ucformat.cli.gc:gc", "Show what can be removed from storage, and remove it."),
        "catalog": (_CATALOG, "The catalog itself: which it is, and upgrading it."),
    },
    sections={"show": "Checkpoints", "ls": "The catalog of checkpoints"},
    help="""Checkpoints for large models: every layout saves them, every layout reads exactly its slice.

    A checkpoint SRC or REF is a path or a url, of a universal checkpoint or of one that an engine wrote: all are read
    in place, and nothing in them is ever executed. One that the catalog knows is also run@step, run@latest, alias:name,
    or its id or the beginning of it.

    Results go to stdout, all else to stderr. Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict, 5 damaged,
    6 refused, 7 needs an upgrade. UCP_DEBUG=1 shows where an error came from.""",
)
click.version_option(__version__, prog_name="ucp", message="%(prog)s %(version)s")(ucp)


def main() -> None:
    """Run `ucp` with the arguments of this process, and exit."""
    try:
        ucp.main()
    finally:
        gc.freeze()  # or Python, ending, looks for garbage in all that was imported: a quarter of the time of `ucp ls`


if __name__ == "__main__":
    main()
