"""What `tests.house.count` counts, and that no import circle comes back."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.count import PACKAGE, House, at, circles, here, imported, main


def test_no_modules_import_each_other() -> None:
    assert here().circles == [], "move what both need into a module that imports neither"


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


def test_what_is_code_and_what_is_of_the_core() -> None:
    text = (
        '"""Says.\n\nMore.\n"""\n\nx = 1  # one\n\n\ndef f() -> None:\n    """Does."""\n    '
        + "y" * 97
        + "\n"
    )
    house = House({f"{PACKAGE}.x": text, f"{PACKAGE}.engines.a.x": "z = 1\n"})
    assert house.code[f"{PACKAGE}.x"] == ["x = 1  # one", "def f() -> None:", "    " + "y" * 97]
    assert house.core == {f"{PACKAGE}.x": 11}
    assert (len(house.long), house.written) == (1, 8)


def test_what_has_many_parameters() -> None:
    text = """
class A:
    def seven(self, a, b, c, d, *, e, f, g): ...
    def eight(self, a, b, /, c, d, *e, f, g, **h): ...
def nine(a, b, c, d, e, f, g, h, i):
    def inner(self_, a, b, c, d, e, f, g): ...
"""
    house = House({f"{PACKAGE}.x": text})
    assert house.many_parameters == {"x.nine": 9, "x.eight": 8, "x.inner": 8}


def test_a_commit_is_counted_as_its_files_are() -> None:
    house = at("HEAD")
    assert house.lines[f"{PACKAGE}.geometry.box"] > 50
    assert PACKAGE in house.texts


def test_two_commits_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["HEAD"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^modules +(\d+) +\1$", out, re.MULTILINE)
    assert not re.search(r"^  [+-] ", out, re.MULTILINE)
