"""The tables of the documents list what is registered, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import chain
from pathlib import Path

import click
import pytest

from ucformat.catalog.entries import Entry
from ucformat.cli.main import ucp
from ucformat.cli.program import LazyGroup
from ucformat.exporters.registry import EXPORTERS
from ucformat.sources.base import options_of
from ucformat.sources.registry import SOURCES
from ucformat.storage.url import STORES
from ucformat.views.document import PRESETS

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str, heading: str = "") -> list[str]:
    """The first cells of the rows of the first table of a page, or of a section."""
    text = (DOCS / page).read_text()
    rows = text[text.index(heading) :].partition("\n|")[2].split("\n\n")[0].split("\n|")
    return [row.split(" |")[0].strip() for row in rows[2:]]


def test_sources() -> None:
    rows = [re.findall(r"\((\w+)\.md\)", cell) for cell in first_cells("sources/README.md")]
    assert sorted(chain(*rows)) == sorted(SOURCES.names())
    pages = {page.stem for page in (DOCS / "sources").glob("*.md")}
    assert pages == {*SOURCES.names(), "README", "evidence"}


@pytest.mark.parametrize("kind", SOURCES.names())
def test_options_of_sources(kind: str) -> None:
    """Each is in the page of the source, but what all sources have."""
    text = (DOCS / "sources" / f"{kind}.md").read_text()
    assert [
        name for name in options_of(SOURCES[kind]()) if name != "part" and name not in text
    ] == []


def test_exporters() -> None:
    rows = [re.findall(r"\[`([\w-]+)`\]\(\1\.md\)", c) for c in first_cells("export/README.md")]
    assert sorted(chain(*rows)) == sorted(EXPORTERS.names())
    pages = {page.stem for page in (DOCS / "export").glob("*.md")}
    assert pages == {*EXPORTERS.names(), "README"}


def test_commands() -> None:
    """The columns of options and the sections are checked by `tests/cli/test_program.py`."""
    rows = [cell for cell in first_cells("cli.md") if cell.startswith("[")]
    found = [name for row in rows for name in re.findall(r"\[`ucp ([\w -]+)`\]", row)]
    assert sorted(found) == sorted(commands(ucp))


def commands(group: LazyGroup, path: str = "") -> list[str]:
    """The commands below a group."""
    context, found = click.Context(group), []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        below = isinstance(command, LazyGroup)
        found += commands(command, f"{path}{name} ") if below else [f"{path}{name}"]  # type: ignore[arg-type]
    return found


def test_schemes() -> None:
    cells = " ".join(first_cells("storage.md"))
    for scheme in STORES.names():
        assert f"`{scheme}://" in cells or f"(`{scheme}`)" in cells, scheme


def test_presets_of_views() -> None:
    text = (DOCS / "view.md").read_text()
    assert [name for name in PRESETS.names() if f"`{name}`" not in text] == []


def test_attributes_of_a_checkpoint_in_the_catalog() -> None:
    text = (DOCS / "cli.md").read_text().partition("**A checkpoint of the catalog**")[2]
    words = set(re.findall(r"\w+", text.split("```")[1]))
    assert {f.name.replace("nbytes", "bytes") for f in fields(Entry)} - words == set()
