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
        "set": ("labels:set_", "Point an alias to a checkpoint."),
        "rm": ("labels:rm", "Remove an alias."),
        "list": ("labels:list_", "List the aliases and where they point."),
        "log": ("labels:log", "Show where an alias has pointed."),
    },
    help="Names that point to checkpoints, and can be moved.",
)

_CATALOG = LazyGroup(
    "catalog",
    {
        "info": ("catalog:info", "Say which catalog is used and what is in it."),
        "upgrade": ("catalog:upgrade", "Bring a catalog of an older ucformat up to date."),
    },
    help="The catalog itself.",
)

_LAYOUT = LazyGroup(
    "layout",
    {
        "check": ("layouts:check", "Check a layout file, and which rule takes which tensor."),
        "schema": ("layouts:schema", "Print the JSON Schema of layout files."),
    },
    help="Layout files: how tensors lie on ranks.",
)

ucp = Program(
    "ucp",
    {
        "show": ("show:show", "Say what a checkpoint holds."),
        "get": ("get:get", "Read a tensor, or a slice of one."),
        "plan": ("layouts:plan", "Say what ranks of a layout would read, before any of it is read."),
        "fits": ("layouts:fits", "Say whether checkpoints can be resumed under a layout."),
        "convert": ("convert:convert", "Make a universal checkpoint of any checkpoint."),
        "materialize": ("convert:materialize", "Make arrays of a packed checkpoint."),
        "copy": ("convert:copy", "Copy a universal checkpoint to another place."),
        "verify": ("verify:verify", "Read every byte and compare it with its checksums."),
        "doctor": ("doctor:doctor", "Probe what a storage place can do."),
        "layout": (_LAYOUT, "Layout files: how tensors lie on ranks."),
        "ls": ("ls:ls", "List the checkpoints that the catalog knows."),
        "diff": ("diff:diff", "Show in what two checkpoints differ."),
        "lineage": ("lineage:lineage", "Show what a checkpoint was made from, or what was made from it."),
        "sql": ("sql:sql", "Ask the catalog in SQL."),
        "register": ("register:register", "Make checkpoints known to the catalog."),
        "reindex": ("register:reindex", "Make the catalog know what lies below a place."),
        "tag": ("labels:tag", "Put tags on a checkpoint."),
        "untag": ("labels:untag", "Take tags off a checkpoint, and say why."),
        "alias": (_ALIAS, "Names that point to checkpoints, and can be moved."),
        "metric": ("labels:metric", "Write metrics of a checkpoint."),
        "note": ("labels:note", "Write something about a checkpoint."),
        "hold": ("labels:hold", "Keep a checkpoint from being deleted."),
        "release": ("labels:release", "End the holds on a checkpoint."),
        "link": ("lineage:link", "Say that a checkpoint was made from another one."),
        "log": ("log:log", "Show who did what, when."),
        "delete": ("delete:delete", "Delete checkpoints; they can be restored for a time."),
        "restore": ("delete:restore", "Take a deletion back."),
        "retain": ("retention:retain", "Show what a policy keeps and deletes, and delete it."),
        "gc": ("retention:gc", "Show what can be removed from storage, and remove it."),
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
