"""`ucp alias`: names that point to checkpoints, moved by compare-and-swap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cli.conftest import object_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run
    from ucformat.catalog.entries import Entry


def test_an_alias_is_set_moved_and_removed(
    run: Run, catalog: Path, entry: Callable[[str], Entry]
) -> None:
    one, two = entry("run7@1000").id, entry("run7@2000").id
    assert run("alias", "set", "best", "run7@1000", "--new").stdout == f"best -> run7@1000  {one}\n"
    found = object_of(
        run("alias", "set", "best", "run7@2000", "--expect", "run7@1000", "--json").stdout
    )
    assert found == {"alias": "best", "id": two, "name": "run7@2000", "version": 2, "previous": one}
    assert entry("alias:best").id == two
    assert run("alias", "set", "best", "run7@1000", "-q").stdout == f"{one}\n"
    assert object_of(run("alias", "rm", "best", "--json").stdout) == {
        "alias": "best",
        "version": 4,
        "previous": one,
    }
    moves = object_of(run("alias", "log", "best", "--json").stdout)["moves"]
    assert [(m["version"], m["from"], m["to"]) for m in moves] == [
        (1, None, one),
        (2, one, two),
        (3, two, one),
        (4, one, None),
    ]
    assert run("alias", "log", "best", "-q").stdout.split() == [one, two, one, "-"]
    assert run("alias", "log", "best").stdout.splitlines()[4].split()[:3] == ["4", one, "-"]


def test_who_expected_something_else_is_told(
    run: Run, catalog: Path, entry: Callable[[str], Entry]
) -> None:
    run("alias", "set", "best", "run7@1000")
    for options in (["--new"], ["--expect", "run7@3000"]):
        assert "points to" in run("alias", "set", "best", "run7@2000", *options, code=4).stderr
    run("alias", "rm", "best", "--expect", "run7@2000", code=4)
    assert entry("alias:best").step == 1000
    assert (
        "mutually exclusive"
        in run("alias", "set", "best", "run7@2000", "--new", "--expect", "run7@1000", code=2).stderr
    )
    run("alias", "rm", "best", "--expect", "run7@1000")
    run("alias", "rm", "best", code=3)
    assert "never" in run("alias", "log", "worst", code=3).stderr


def test_the_list(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    assert run("alias", "list").stdout == "no aliases\n"
    assert object_of(run("alias", "list", "--json").stdout) == {"aliases": []}
    run("alias", "set", "run7/best", "run7@1000")
    run("alias", "set", "best", "run7@2000")
    lines = run("alias", "list").stdout.splitlines()
    assert lines[0].split() == ["alias", "checkpoint", "id", "moved"]
    assert lines[1].split()[:3] == ["best", "run7@2000", entry("run7@2000").id]
    found = object_of(run("alias", "list", "--json").stdout)["aliases"]
    assert [(list(a), a["alias"], a["name"]) for a in found] == [
        (["alias", "id", "name", "version", "moved"], "best", "run7@2000"),
        (["alias", "id", "name", "version", "moved"], "run7/best", "run7@1000"),
    ]
    assert run("alias", "list", "-q").stdout == "best\nrun7/best\n"


def test_who_names_an_alias_as_a_checkpoint_is_told_how_it_is_written(
    run: Run, catalog: Path, entry: Callable[[str], Entry]
) -> None:
    run("alias", "set", "best", entry("run7@1000").id)
    assert "alias:best" in run("release", "best", code=3).stderr
    assert "alias:" not in run("release", "worst", code=3).stderr
