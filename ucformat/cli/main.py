"""The entry point `ucp` and the table of its commands, which does not import them."""

from __future__ import annotations

import gc
import os

import click

from ucformat._version import __version__
from ucformat.cli.program import LazyGroup, Program
from ucformat.registry import Registry

_ALIAS = LazyGroup(
    "alias",
    {
        "set": ("labels:set_", "Point an alias to a checkpoint."),
        "rm": ("labels:rm", "Remove an alias."),
        "list": ("labels:list_", "List the aliases and their targets."),
        "log": ("labels:log", "Show the history of an alias."),
    },
    help="Named references to checkpoints that can be moved.",
)

_CATALOG = LazyGroup(
    "catalog",
    {
        "info": ("catalog:info", "Show which catalog is used, and its contents."),
        "upgrade": ("catalog:upgrade", "Upgrade a catalog from an older version of ucformat."),
    },
    help="Inspect and upgrade the catalog.",
)

_IMPORT = LazyGroup(
    "import",
    {
        "mlflow": ("importing:mlflow", "Import from a server, a database or a folder of MLflow."),
        "tensorboard": ("importing:tensorboard", "Import from event files of TensorBoard."),
        "wandb": ("importing:wandb", "Import from offline runs of W&B."),
    },
    help="Record parameters and metrics of experiment trackers with their checkpoints.",
)

_LAYOUT = LazyGroup(
    "layout",
    {
        "check": (
            "layouts:check",
            "Check a layout file, and show which tensors each rule matches.",
        ),
        "schema": ("layouts:schema", "Print the JSON Schema of layout files."),
    },
    help="Layout files: how tensors are sharded across ranks.",
)

ucp = Program(
    "ucp",
    {
        "demo": (
            "demo:demo",
            "Make a small run of checkpoints, and show what can be done with it.",
        ),
        "show": ("show:show", "Show the contents of a checkpoint."),
        "get": ("get:get", "Read a tensor or a slice of one."),
        "plan": ("layouts:plan", "Compute what the ranks of a layout would read."),
        "fits": ("layouts:fits", "Check whether checkpoints can be loaded under a layout."),
        "convert": ("convert:convert", "Convert any checkpoint to a universal one."),
        "export": ("export:export", "Write a checkpoint in the format of another tool."),
        "average": (None, "Average checkpoints."),
        "merge": (None, "Merge models, or adapters into their base."),
        "materialize": ("convert:materialize", "Convert a packed checkpoint to arrays."),
        "patch": ("patch:patch", "Write a checkpoint as a patch of another one."),
        "compact": ("patch:compact", "Make a checkpoint that depends on others whole."),
        "thin": ("thin:thin", "Remove states, such as moments, from checkpoints in place."),
        "copy": ("convert:copy", "Copy a universal checkpoint to another location."),
        "verify": ("verify:verify", "Read every byte and compare it with its checksums."),
        "sign": ("sign:sign", "Sign the manifest of a checkpoint."),
        "attest": ("attest:attest", "Print what is known of a checkpoint, for other tools."),
        "serve": ("serve:serve", "Serve checkpoints over HTTP, as a hub of models."),
        "doctor": ("doctor:doctor", "Check storage capabilities."),
        "cache": (None, "Show or clear the cache of files read over a network."),
        "layout": (_LAYOUT, "Validate layout files."),
        "ls": ("ls:ls", "List the checkpoints in the catalog."),
        "runs": ("runs:runs", "List the runs in the catalog."),
        "diff": ("diff:diff", "Show the differences between two checkpoints."),
        "lineage": ("lineage:lineage", "Show the ancestors or descendants of a checkpoint."),
        "sql": ("sql:sql", "Query the catalog in SQL."),
        "register": ("register:register", "Record existing checkpoints in the catalog."),
        "reindex": ("register:reindex", "Rebuild the catalog from storage."),
        "tag": ("labels:tag", "Add tags to a checkpoint."),
        "untag": ("labels:untag", "Remove tags from a checkpoint, with a reason."),
        "alias": (_ALIAS, "Manage named references to checkpoints."),
        "metric": ("labels:metric", "Set metrics of a checkpoint."),
        "import": (_IMPORT, "Record parameters and metrics of experiment trackers."),
        "note": ("labels:note", "Add a note to a checkpoint."),
        "hold": ("labels:hold", "Protect a checkpoint from deletion."),
        "release": ("labels:release", "Release the holds on a checkpoint."),
        "link": ("lineage:link", "Record that a checkpoint was made from another one."),
        "log": ("log:log", "Show the audit log."),
        "delete": (
            "retention:delete",
            "Delete checkpoints; they can be restored during a grace period.",
        ),
        "restore": ("retention:restore", "Undo a deletion."),
        "retain": ("retention:retain", "Show what a policy keeps and deletes, and apply it."),
        "gc": ("retention:gc", "Show what can be removed from storage, and remove it."),
        "catalog": (_CATALOG, "Inspect and upgrade the catalog."),
    },
    sections={"demo": "Checkpoints", "ls": "The catalog of checkpoints"},
    registered=Registry("commands", "command"),
    help="""Checkpoints for large models: save with any layout, and read exactly one rank's slice with any other.

    SRC and REF are paths or URLs of universal checkpoints or of checkpoints from training engines. All are read in
    place, and code in them is never executed. Checkpoints in the catalog can also be given as run@step, run@latest,
    alias:name, or an id or a prefix of one.

    Results go to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict,
    5 damaged, 6 refused, 7 needs an upgrade. UCP_DEBUG=1 shows tracebacks.""",
)
click.version_option(__version__, prog_name="ucp", message="%(prog)s %(version)s")(ucp)


def _delay_first_collection() -> None:
    """Let garbage be collected for the first time after as many objects as a short command makes.

    Imports make few cycles, and searching their objects takes a tenth of the time of `ucp show`.
    After that first time it is collected as often as in every program.
    """
    usual = gc.get_threshold()

    def restore(*_: object) -> None:
        gc.callbacks.remove(restore)
        gc.set_threshold(*usual)

    gc.callbacks.append(restore)
    gc.set_threshold(200_000)


def main() -> None:
    """Run `ucp` with the arguments of this process, and exit."""
    # No command uses BLAS, whose threads, one for each core, take as long to start as the rest of
    # NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # nor plugins of pydantic: to look for them opens the metadata of every installed package
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    _delay_first_collection()
    try:
        ucp.main()
    finally:
        gc.freeze()  # skips the final garbage collection, which takes a quarter of the time of `ucp ls`


if __name__ == "__main__":
    main()
