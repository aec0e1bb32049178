"""`ucp sql`: questions in SQL, and nothing but questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cli.conftest import LONG_RUN, object_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal

QUERY = "select r.name, max(c.step) as step, count(*) as n from checkpoint c join run r on r.id = c.run_id group by 1"


def test_a_query(run: Run, catalog: Path) -> None:
    lines = run("sql", f"{QUERY} order by 2").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["name", "step", "n"],
        ["run7", "3000", "3"],
        [LONG_RUN, "4000", "1"],
    ]
    found = object_of(run("sql", f"{QUERY} order by 2", "--json").stdout)
    assert found == {
        "columns": ["name", "step", "n"],
        "rows": [["run7", 3000, 3], [LONG_RUN, 4000, 1]],
        "truncated": False,
    }
    assert run("sql", f"{QUERY} order by 2", "-q").stdout == f"run7\t3000\t3\n{LONG_RUN}\t4000\t1\n"


def test_odd_values(run: Run, catalog: Path) -> None:
    query = "select null as a, x'00ff' as b, 'tab\there' as c, 1.5 as d"
    found = object_of(run("sql", query, "--json").stdout)
    assert found["rows"] == [[None, "00ff", "tab\there", 1.5]]
    assert run("sql", query, "-q").stdout == "\t00ff\ttab\\there\t1.5\n"
    assert run("sql", query).stdout.splitlines()[1].split() == ["-", "00ff", "tab\\there", "1.5"]


def test_people_are_told_that_there_are_more(run: Run, catalog: Path) -> None:
    result = run("sql", "select id from checkpoint", "-n", 2)
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "note: there are more than 2 rows; -n 0 shows all\n"
    assert (
        object_of(run("sql", "select id from checkpoint", "-n", 2, "--json").stdout)["truncated"]
        is True
    )
    assert run("sql", "select id from checkpoint", "-n", 0).stderr == ""
    assert run("sql", "select id from checkpoint where 0").stdout == "id\nno rows\n"


def test_nothing_is_written(run: Run, catalog: Path) -> None:
    run("sql", "delete from checkpoint", code=6)
    assert run("sql", "select count(*) from checkpoint", "-q").stdout == "4\n"
    assert run("sql", "select nonsense", code=2).stdout == ""


def test_wide_rows_fit_a_terminal(terminal: Terminal, catalog: Path) -> None:
    lines = terminal(
        ["sql", QUERY], ["sql", "select name, name as other, length(name) from run"]
    ).splitlines()
    assert max(map(len, lines)) <= 80
