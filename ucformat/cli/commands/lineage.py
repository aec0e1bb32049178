"""`ucp lineage`, `ucp link`: the ancestors and descendants of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ucformat.catalog.as_json import data_of
from ucformat.cli.ui.catalogs import opened_catalog
from ucformat.cli.ui.options import CATALOG, REF, command, ref_argument
from ucformat.cli.ui.output import terminal_width
from ucformat.schema import LINEAGE_KINDS
from ucformat.texts import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.lineage import Lineage
    from ucformat.cli.ui.output import Output


@command
@REF
@click.option("--up/--down", default=True, help="Show ancestors or descendants.  [default: --up]")
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of steps.  [default: all]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["tree", "mermaid", "dot"]),
    default="tree",
    help="A tree, or a graph for Mermaid or Graphviz.  [default: tree]",
)
@CATALOG
def lineage(
    ref: str,
    up: bool,  # noqa: FBT001
    depth: int | None,
    form: str,
    out: Output,
) -> None:
    """Show the ancestors of a checkpoint, or with --down its descendants."""
    with opened_catalog() as catalog:
        graph = catalog.lineage(ref, "up" if up else "down", depth)
    out.result(
        lambda: _lines(graph, form),
        lambda: _data(graph),
        lambda: (key for key in graph.nodes if key != graph.root),
    )


def _lines(graph: Lineage, form: str) -> Iterator[str]:
    from ucformat.catalog.lineage import render_dot, render_mermaid, render_tree

    if form != "tree":
        return iter((render_dot if form == "dot" else render_mermaid)(graph).splitlines())
    width = terminal_width()
    return (shorten(line, width) for line in render_tree(graph))


def _data(graph: Lineage) -> dict[str, Any]:
    return {
        "root": graph.root,
        "direction": graph.direction,
        "nodes": [{"key": key} | data_of(node) for key, node in graph.nodes.items()],
        "edges": [data_of(edge) for edge in graph.edges],
    }


@command
@ref_argument("child", "CHILD")
@ref_argument("parent", "PARENT")
@click.option("--kind", type=click.Choice(LINEAGE_KINDS), required=True, help="How CHILD was made.")
@CATALOG
def link(child: str, parent: str, kind: str, out: Output) -> None:
    """Record that a checkpoint was made from another.

    PARENT may also be a path or URL that is not in the catalog. Checkpoints made by ucformat are
    linked automatically.
    """
    with opened_catalog() as catalog:
        entry = catalog.get(child)
        catalog.link(entry.id, parent, kind)
    out.result(
        lambda: [f"{entry.name} was made from {parent} ({kind})"],
        lambda: {"id": entry.id, "name": entry.name, "parent": parent, "kind": kind},
    )
