"""`ucp lineage`, `ucp link`: what checkpoints were made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tests.cli.conftest import LONG_RUN, object_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal
    from ucformat.catalog.entries import Entry


def test_up_and_down(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    one, two, three = (entry(f"run7@{step}").id for step in (1000, 2000, 3000))
    assert run("lineage", "run7@3000").stdout.splitlines() == [
        f"run7@3000  {three[:12]}  ucformat",
        f"← resume  run7@2000  {two[:12]}  ucformat",
        f"← resume  run7@1000  {one[:12]}  ucformat",
    ]
    assert run("lineage", "run7@3000", "-q", "--depth", 1).stdout == f"{two}\n"
    assert run("lineage", "run7@2000", "-q", "--down").stdout.split() == [
        three,
        entry(f"{LONG_RUN}@4000").id,
    ]
    found = object_of(run("lineage", "run7@2000", "--json").stdout)
    assert list(found) == ["root", "direction", "nodes", "edges"]
    assert (found["root"], found["direction"]) == (two, "up")
    assert list(found["nodes"][0]) == [
        "key", "id", "name", "url", "state", "kind", "run", "step", "created", "distance",
    ]  # fmt: skip
    assert found["edges"] == [
        {"child": two, "parent": one, "kind": "resume", "depends": False, "how": {}}
    ]


def test_graphs(run: Run, catalog: Path) -> None:
    assert run("lineage", "run7@2000", "--format", "mermaid").stdout.startswith("flowchart LR\n")
    text = run("lineage", "run7@2000", "--format", "dot").stdout
    assert text.startswith("digraph lineage {\n")
    assert text.endswith("}\n")


def test_links(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    said = "run7@1000 was made from /nowhere/base (finetune)\n"
    assert run("link", "run7@1000", "/nowhere/base", "--kind", "finetune").stdout == said
    assert run("lineage", "run7@1000", "-q").stdout == "/nowhere/base\n"
    found = object_of(run("link", "run7@3000", "run7@1000", "--kind", "merge", "--json").stdout)
    assert found == {
        "id": entry("run7@3000").id,
        "name": "run7@3000",
        "parent": "run7@1000",
        "kind": "merge",
    }
    assert (
        "made from itself"
        in run("link", "run7@1000", "run7@3000", "--kind", "merge", code=2).stderr
    )
    assert "--kind" in run("link", "run7@1000", "run7@3000", "--kind", "copy", code=2).stderr


def test_every_kind_is_offered() -> None:
    from ucformat.cli.commands.lineage import link
    from ucformat.schema import LINEAGE_KINDS

    (kind,) = (param.type for param in link.params if param.name == "kind")
    assert isinstance(kind, click.Choice)
    assert tuple(kind.choices) == LINEAGE_KINDS


def test_a_tree_fits_a_terminal(terminal: Terminal, catalog: Path) -> None:
    lines = terminal(["lineage", f"{LONG_RUN}@4000"]).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
