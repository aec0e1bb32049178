"""`ucp ls`: the checkpoints of the catalog, for people, for scripts and for programs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING
from unittest import mock

from tests.cli.conftest import LONG_RUN, object_of
from ucformat.catalog.entries import Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Run, Shell, Terminal

CHECKPOINT = [
    "id", "name", "kind", "state", "run", "step", "commits", "launch", "created", "recorded", "deleted", "purge_after",
    "tensors", "bytes", "files", "files_bytes", "format_version", "engine",
]  # fmt: skip


def test_the_newest_come_first(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    lines = run("ls").stdout.splitlines()
    assert lines[0].split() == [
        "name",
        "id",
        "kind",
        "size",
        "age",
        "alias",
        "tag",
        "metrics",
        "url",
    ]
    assert [line.split()[0] for line in lines[1:]] == [
        f"{LONG_RUN}@4000",
        "run7@3000",
        "run7@2000",
        "run7@1000",
    ]
    row = [
        "run7@3000",
        entry("run7@3000").id,
        "ucformat",
        "32",
        "B",
        "8d",
        "-",
        "-",
        "val_loss=1.5",
    ]
    assert lines[2].split() == [*row, "/nowhere/run7/3000"]


def test_json_and_ids(run: Run, catalog: Path, entry: Callable[[str], Entry]) -> None:
    found = object_of(run("ls", "run = 'run7'", "--sort", "step", "-n", 2, "--json").stdout)
    assert list(found) == ["checkpoints", "total"]
    assert found["total"] == 3
    first = found["checkpoints"][0]
    assert list(first)[: len(CHECKPOINT)] == CHECKPOINT
    assert len(first) == len(fields(Entry)) + 1  # and the name
    assert first["name"] == "run7@1000"
    assert first["metrics"] == {"val_loss": 2.5}
    assert first["config"]["optimizer"]["name"] == "adamw"
    assert first["urls"] == ["/nowhere/run7/1000"]
    assert first["created"].endswith("Z")
    assert run("ls", "-q", "step >= 2000", "--sort=step", "--offset", 1).stdout.split() == [
        entry("run7@3000").id,
        entry(f"{LONG_RUN}@4000").id,
    ]
    assert object_of(run("ls", "--offset", 3, "--json").stdout)["total"] == 4


def test_people_are_told_that_there_are_more(run: Run, catalog: Path) -> None:
    assert (
        run("ls", "-n", 2).stderr
        == "note: 2 of 4 checkpoints; -n 4 shows more, or a narrower filter\n"
    )
    with mock.patch(
        "ucformat.catalog.search.count_checkpoints", return_value=None
    ):  # too many to count
        assert (
            run("ls", "-n", 2).stderr
            == "note: the first 2; -n 4 shows more, or a narrower filter\n"
        )
    assert run("ls", "-n", 2, "--offset", 2).stderr == ""
    assert run("ls", "-n", 4).stderr == ""
    assert run("ls", "-n", 0).stderr == ""
    assert run("ls", "-n", 2, "-q").stderr == ""


def test_columns_are_keys_of_the_filter_language(run: Run, catalog: Path) -> None:
    run("tag", "run7@2000", "good")
    run("metric", "run7@2000", "acc=nan")
    keys = "name,step,metric.val_loss,metric.acc,config.optimizer.lr,config.optimizer,topology.dp,tag,url,config.none"
    lines = run("ls", "run = 'run7' and step < 3000", "--columns", keys).stdout.splitlines()
    assert lines[0].split() == keys.split(",")
    row = lines[1].replace('{"lr": 0.0006, "name": "adamw"}', "{}").split()
    assert row == [
        "run7@2000",
        "2,000",
        "2",
        "nan",
        "0.0006",
        "{}",
        "8",
        "good",
        "/nowhere/run7/2000",
        "-",
    ]
    assert "did you mean step?" in run("ls", "--columns", "stepp", code=2).stderr
    assert "config.PATH" in run("ls", "--columns", "nonsense.x", code=2).stderr


def test_a_column_that_nobody_has_may_be_misspelled(run: Run, catalog: Path) -> None:
    result = run("ls", "--columns", "name,metric.val_los,config.optimizer.lr", "-n", 0)
    assert result.stderr.startswith("note: ")
    assert "metric.val_los" in result.stderr
    assert "val_loss" in result.stderr
    run("metric", "run7@1000", "acc=1")
    assert run("ls", "run = 'run7' and step > 1000", "--columns", "name,metric.acc").stderr == ""


def test_filters_that_cannot_be_read_are_usage(run: Run, catalog: Path) -> None:
    assert run("ls", "step >", code=2).stdout == ""
    assert "step" in run("ls", "stepp > 1", code=2).stderr
    assert run("ls", "--sort", "nonsense", code=2).stderr.startswith("error: ")


def test_an_empty_catalog(run: Run, tmp_path: Path) -> None:
    assert run("ls", "--catalog", tmp_path / "new.db").stdout == "no checkpoints\n"
    assert object_of(run("ls", "--json", "--catalog", tmp_path / "new.db").stdout) == {
        "checkpoints": [],
        "total": 0,
    }
    assert run("ls", "-q", "--catalog", tmp_path / "new.db").stdout == ""
    assert "switched off" in run("ls", "--catalog", "none", code=6).stderr


def test_tables_fit_a_terminal(terminal: Terminal, run: Run, catalog: Path) -> None:
    run("alias", "set", "best-of-all-that-were-ever-tried-in-this-sweep", f"{LONG_RUN}@4000")
    run("tag", f"{LONG_RUN}@4000", *(f"tag-{k}" for k in range(20)))
    run("note", f"{LONG_RUN}@4000", "word " * 40)
    run("hold", f"{LONG_RUN}@4000", "--reason", "word " * 40)
    text = terminal(
        ["ls", "run = 'run7'"], ["ls"], ["ls", "--all"],
        ["ls", "--columns", "name,url,config.optimizer,note,tag"], ["log"], ["alias", "list"],
        ["alias", "log", "best-of-all-that-were-ever-tried-in-this-sweep"], ["catalog", "info"],
        ["show", f"{LONG_RUN}@4000"],
    )  # fmt: skip
    lines = text.splitlines()
    assert not [
        line for line in lines if len(line) > 80 and not line.startswith(("/", "sqlite:", "note:"))
    ]
    assert lines[0].split() == [
        "name",
        "id",
        "kind",
        "size",
        "age",
        "metrics",
        "url",
    ]  # where nothing stands is left out
    assert lines[4].split() == ["name", "id", "kind", "size", "age", "alias", "tag"]
    assert lines[5].startswith("a-swee")
    assert "…" in lines[5]
    assert "@4000" in lines[5]


def test_readers_that_go_away_are_no_error(shell: Shell, catalog: Path) -> None:
    done = shell("ucp ls | head -1; ucp ls -q | true; ucp sql 'select * from event' | head -1")
    assert done.stderr == ""
