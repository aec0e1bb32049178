"""`ucp runs`, and plots in the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.catalog.acts import put
from tests.cli.conftest import object_of
from ucformat.catalog.catalog import Catalog
from ucformat.cli.ui.plot import plot

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run, Terminal

NAN, INFINITE = float("nan"), float("inf")
OF_RUN7 = ["ls", "run = 'run7'", "--plot", "metric.val_loss"]


def drawn(points: list[tuple[int, float | None]], width: int = 40) -> list[str]:
    """The rows of a plot of one series, without the axes."""
    lines = list(plot("t", {"run": points}, width))
    assert all(len(line) <= width for line in lines)
    return [line.partition(" |")[2].ljust(width) for line in lines if " |" in line]


def test_runs_for_people_and_programs(run: Run, catalog: Path) -> None:
    lines = run("runs", "--metric", "val_loss").stdout.splitlines()
    assert lines[0].split() == ["run", "checkpoints", "steps", "val_loss", "at", "disk", "saved"]
    row = next(line for line in lines if line.startswith("run7 "))
    assert row.split()[:7] == ["run7", "3", "1,000", "to", "3,000", "1.5", "3,000"]
    told = object_of(run("runs", "--metric", "val_loss", "--json").stdout)
    assert told["more"] is False
    entry = next(r for r in told["runs"] if r["name"] == "run7")
    assert list(entry) == [
        *("name", "checkpoints", "first_step", "last_step", "bytes", "disk_bytes"),
        *("first_saved", "last_saved", "best"),
    ]
    assert entry["best"]["step"] == 3000
    names = run("runs", "-q").stdout.split()
    assert names == [r["name"] for r in told["runs"]]
    assert run("runs", "step > 10000000").stdout == "no runs\n"


def test_there_are_more_runs(run: Run, catalog: Path) -> None:
    result = run("runs", "-n", 1)
    assert "the first 1 run; -n 2 shows more, -n 0 all" in result.stderr
    assert object_of(run("runs", "-n", 1, "--json").stdout)["more"] is True
    assert run("runs", "-n", 0).stderr == ""


def test_wrong_metrics(run: Run, catalog: Path) -> None:
    assert "did you mean metric.val_loss?" in run("runs", "--metric", "val_los", code=2).stderr
    assert "name it: --metric NAME --max" in run("runs", "--max", code=2).stderr


def test_a_metric_is_drawn_along_the_steps(run: Run, catalog: Path, terminal: Terminal) -> None:
    shown = run(*OF_RUN7).stdout
    lines = shown.splitlines()
    assert lines[0] == "metric.val_loss of run7"
    assert shown.isascii()
    assert max(map(len, lines)) <= 80
    assert "".join(lines).count("*") == 3
    (series,) = object_of(run(*OF_RUN7, "--json").stdout)["series"]
    assert series == {"run": "run7", "points": [[1000, 2.5], [2000, 2.0], [3000, 1.5]]}
    assert terminal(OF_RUN7).splitlines() == lines


def test_several_runs_have_marks_of_their_own(run: Run, catalog: Path) -> None:
    text = run("ls", "--plot", "step").stdout
    assert re.search(r"^  [ab]  run7$", text, re.MULTILINE)
    lines = run("ls", "--plot", "step", "-q").stdout.splitlines()
    assert min(line.split("\t")[1:] for line in lines) == ["1000", "1000.0"]


def test_what_cannot_be_drawn_is_refused(run: Run, catalog: Path) -> None:
    assert "is no number" in run("ls", "--plot", "kind", code=2).stderr
    assert "draws one key" in run("ls", "--plot", "step,size", code=2).stderr
    assert "exclude each other" in run("ls", "--plot", "step", "--columns", "id", code=2).stderr
    assert "no values" in run("ls", "run = 'none'", "--plot", "step").stdout


def test_too_many_runs_are_not_drawn(run: Run, catalog: Path) -> None:
    with Catalog(str(catalog)) as opened:
        for n in range(27):
            put(opened, 100 + n, run=f"many{n}")
    assert "at most 26 are drawn" in run("ls", "run like 'many%'", "--plot", "step", code=2).stderr


def test_what_is_not_drawn_is_told(run: Run, catalog: Path) -> None:
    with Catalog(str(catalog)) as opened:
        put(opened, 100, step=None, metrics={"val_loss": 1.0})
        put(opened, 101, step=7)
        put(opened, 102, step=8, metrics={"val_loss": NAN})
    told = "1 without a step, 1 without a value, 1 with a value that is not finite"
    assert f"not drawn of 6 checkpoints: {told}" in run(*OF_RUN7).stderr


def test_values_that_are_no_numbers_are_gaps() -> None:
    joined = drawn([(0, 0.0), (10, 0.0), (20, 1.0)])
    gap = drawn([(0, 0.0), (10, NAN), (20, 1.0)])
    assert "." in "".join(joined)
    assert "." not in "".join(gap)
    assert "".join(gap).count("*") == 2
    assert drawn([(0, 0.0), (10, None), (20, 1.0)]) == gap
    assert drawn([(0, 0.0), (10, INFINITE), (20, 1.0)]) == gap


@pytest.mark.parametrize("value", [0.0, -5.0, 1e308, 5e-324])
def test_a_constant_or_a_single_value_is_a_line(value: float) -> None:
    assert "".join(drawn([(7, value)])).count("*") == 1
    rows = [row for row in drawn([(0, value), (5, value), (9, value)]) if row.strip()]
    assert len(rows) == 1


def test_large_differences_and_steps_fit() -> None:
    rows = drawn([(0, -1.7e308), (1 << 62, 1.7e308)])
    assert rows[0].rstrip().endswith("*")
    assert rows[-1].strip().startswith("*")
    assert list(plot("t", {"run": [(0, NAN)]}, 40))[1:] == ["  no values"]
    assert list(plot("t", {}, 40))[1:] == ["  no values"]


def test_names_do_not_control_the_terminal() -> None:
    lines = list(plot("a\x1b[2J", {"x\x1b[2J": [(0, 1.0)], "y\n": [(0, 1.0)]}, 40))
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert any("#" in line for line in lines), "where two meet"
