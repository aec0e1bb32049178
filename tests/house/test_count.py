"""What `tests.house.count` counts, and that no import circle comes back."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.count import PACKAGE, House, at, circles, here, imported, main

#: Modules that import each other, perhaps through others. No set may be added, and none may grow.
KNOWN = [
    {"catalog.catalog", "catalog.changes", "catalog.document", "catalog.reader"},
    {"sources.deepspeed.opened", "sources.deepspeed.source", "sources.deepspeed.universal"},
    {
        *("sources.megatron.classic", "sources.megatron.dist", "sources.megatron.flat_states"),
        "sources.megatron.source",
    },
    {
        *("sources", "sources.huggingface", "sources.huggingface.engines", "sources.huggingface.opened"),
        "sources.huggingface.source",
    },
]


def test_no_new_import_circles() -> None:
    found = [{m.removeprefix(f"{PACKAGE}.") for m in one} for one in here().circles]
    new = [one for one in found if not any(one <= known for known in KNOWN)]
    assert new == [], "modules import each other: move what both need into one that imports neither"
    assert [known for known in KNOWN if known not in found] == [], "a circle is gone or smaller: say so in KNOWN"


def test_circles_are_found_through_others() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": ["f"], "f": ["e"], "g": []}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import p.a", {"p.a"}),
        ("from p import a, b", {"p.a", "p.b"}),
        ("from p import a, thing", {"p.a", "p"}),
        ("from p.a import thing", {"p.a"}),
        ("if TYPE_CHECKING:\n    from p.a import thing", {"p.a"}),
        ("def f():\n    from p.a import thing", {"p.a"}),
        ("import json", set()),
        ("from p.c import itself", set()),
    ],
)
def test_every_import_counts(code: str, found: set[str]) -> None:
    assert imported("p.c", ast.parse(code), ["p", "p.a", "p.b", "p.c"]) == found


def test_what_is_a_box_type() -> None:
    box = "@dataclass(frozen=True)\nclass A:\n    start: tuple[int, ...]\n    shape: tuple[int, ...]\n"
    tuples = "class B(NamedTuple):\n    box: Box | None\n"
    no_box = "@dataclass\nclass C:\n    shape: int\n    read: Callable[[Box], None]\nclass D:\n    box: Box\n"
    house = House({f"{PACKAGE}.x": box + tuples + no_box, f"{PACKAGE}.y": "class A:\n    pass\n"})
    assert house.box_types == ["x.A", "x.B"]
    assert house.twice == {"A": 2}


def test_a_commit_is_counted_as_its_files_are() -> None:
    house = at("HEAD")
    assert house.lines[f"{PACKAGE}.geometry.box"] > 50
    assert PACKAGE in house.texts


def test_two_commits_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^modules +(\d+) +\1$", out, re.MULTILINE)
    assert not re.search(r"^  [+-] ", out, re.MULTILINE)
