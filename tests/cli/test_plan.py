"""`ucp plan`: the numbers of `Checkpoint.plan`, for one rank and for all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.cli.conftest import object_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

LAYOUT = """\
version: 1
mesh: {dp: 2, tp: 2}
rules:
  - match: embed.weight
    states: [weight, master, exp_avg]
    place: [{shard: 0, over: tp}]
  - match: "*"
    place: [replicate]
"""


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "tp2.yaml"
    path.write_text(LAYOUT)
    return path


def test_one_rank_prints_its_plan_and_its_files(run: Run, committed: Path, layout: Path) -> None:
    plan = ucformat.open(committed).plan(ucformat.Layout.load(layout), rank=1)
    text = run("plan", committed, "--layout", layout, "--rank", 1).stdout
    assert text.startswith(str(plan) + "\n\nfile ")
    assert f"of {len(plan.files) - 5} more" in text
    top = max(plan.files.values())
    assert f"{top / 1024:.1f} KiB" in text


def test_all_ranks_are_a_table_with_a_total(run: Run, committed: Path, layout: Path) -> None:
    lines = run("plan", committed, "-l", layout).stdout.splitlines()
    assert lines[0].split() == [
        "rank",
        "tensors",
        "memory",
        "needed",
        "read",
        "ratio",
        "requests",
        "files",
    ]
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert lines[-1].split()[:2] == ["total", "40"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("verify", ["whole", "always", "never"])
def test_json_has_the_numbers_of_the_plan(
    run: Run, committed: Path, layout: Path, verify: str
) -> None:
    args = (
        "plan",
        committed,
        "-l",
        layout,
        "-s",
        "master",
        "-s",
        "exp_avg",
        "--verify",
        verify,
        "--json",
    )
    found = object_of(run(*args).stdout)
    ck, tp2 = ucformat.open(committed), ucformat.Layout.load(layout)
    assert [r["rank"] for r in found["ranks"]] == [0, 1, 2, 3]
    for r in found["ranks"]:
        plan = ck.plan(tp2, r["rank"], ["master", "exp_avg"], verify=verify)  # type: ignore[arg-type]
        assert r == {
            "rank": plan.rank,
            "tensors": 2,
            "memory": plan.memory,
            "bytes_needed": plan.bytes_needed,
            "bytes_read": plan.bytes_read,
            "bytes_unverified": plan.bytes_unverified,
            "bytes_besides": plan.bytes_besides,
            "requests": plan.requests,
            "zero_filled": 0,
            "files": plan.files,
        }
    assert found["total"]["bytes_read"] == sum(r["bytes_read"] for r in found["ranks"])
    assert run(*args[:-1], "-q").stdout.split() == [str(r["bytes_read"]) for r in found["ranks"]]


def test_a_json_layout_serves_too(run: Run, committed: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(
        json.dumps(
            {"version": 1, "mesh": {"dp": 1}, "rules": [{"match": "*", "place": ["replicate"]}]}
        )
    )
    assert (
        object_of(run("plan", committed, "-l", path, "-r", 0, "--json").stdout)["total"]["tensors"]
        == 10
    )


def test_wrong_ranks_and_layouts_are_explained(
    run: Run, committed: Path, layout: Path, tmp_path: Path
) -> None:
    assert "ranks 0 to 3" in run("plan", committed, "-l", layout, "-r", 4, code=2).stderr
    assert "neither a rank" in run("plan", committed, "-l", layout, "-r", "first", code=2).stderr
    assert "--layout" in run("plan", committed, code=2).stderr
    assert "nope.yaml" in run("plan", committed, "-l", tmp_path / "nope.yaml", code=3).stderr
    layout.write_text("version: 1\nmesh: {tp: 2}\nrules: [{match: nothing, place: [replicate]}]\n")
    assert "no rule" in run("plan", committed, "-l", layout, code=2).stderr
    layout.write_text(LAYOUT.replace("version: 1", "version: 9"))
    assert "hint: upgrade" in run("plan", committed, "-l", layout, code=7).stderr
