"""Regular expressions that are not ours: what is refused, what is taken, and that what is taken takes bounded work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import bounded
from ucformat.errors import LayoutError
from ucformat.geometry.layout import Layout
from ucformat.geometry.patterns import Pattern, RegexNode, compile_pattern, expand, parse
from ucformat.geometry.placement import compile_match
from ucformat.geometry.tensor import TensorInfo, TensorList
from ucformat.views.document import read_steps
from ucformat.views.steps import apply
from ucformat.views.table import ViewTable

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Patterns, and what of them is refused.
ENDLESS = {
    "(a+)+b": "(a+)+",
    "(a|a)*b": "*",
    "(.*)*x": "(.*)*",
    r"(\d+\.?)+w": r"(\d+\.?)+",
    r"(?:\w+\.?)*weight": r"(?:\w+\.?)*",
    "(?:a|ab|b)*c": "*",
    "((a?)){40}a": "{40}",
    "a?" * 30 + "a" * 30: "a?",
    "(a{1,9}){1,9}x": "{1,9}",
    "(?:a{1,9}){1,9}?x": "{1,9}?",
    "(?:a+|b)+c": "(?:a+|b)+",
    ".*.*.*.*=": ".*",
    "[a-z]*" * 9 + "1": "[a-z]*",
    "(?i:(?:ka|\u212aa)*)x": "*",
    "(?:(?:a?)*)*b": "*",
    r"(a)\1": r"\1",
    "(?P<x>a)(?P=x)": "(?P=x)",
    "(a)?(?(1)b|c)": "(?(1)b|c)",
    "(?:(?=a*a*a*a*)a)*b": "*",
    "(?:){1000000000}a": "{1000000000}",
}


@pytest.mark.parametrize("regex", ENDLESS)
def test_what_may_take_for_ever_is_refused(regex: str) -> None:
    with bounded(len(regex)), pytest.raises(LayoutError, match="may take too long: ") as error:
        compile_pattern(regex)
    assert f"{ENDLESS[regex]}'" in error.value.message.replace("\\\\", "\\")
    assert error.value.hint


TAKEN = [
    r"model\.layers\.(\d+)\..*", r"(layers\.\d+)\..*", r"module\.(.*)", r"(.*)\.linear_qkv\.(weight|bias)", r"(.*)\.w",
    r"((?:.*\.)?layers)\.(?P<i>\d+)\.(.*)", r"(?:[^.]+\.)*layers\.(?!\d+\.)(.+)", r"(?:model\.|module\.)*(.+)",
    r".*\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)", r"(?:\w+\.)+weight", r"(?:a|b|ca)+d", ".*.*.*=", r"\(a+\)+",
    r"(?i)(?:[a-z]+\.)*Weight", r"(?s)(.*)experts(.*)", "[(+*]x*", r"^a.b+$", r"(?>a+)b|(?:[ab]++c)*+d", r"\d{1,6}\.w",
]  # fmt: skip


@pytest.mark.parametrize("regex", TAKEN)
def test_what_people_write_is_taken(regex: str) -> None:
    pattern = compile_pattern(regex)
    assert pattern.longest is not None
    assert pattern.longest >= 200


def test_what_presets_and_documents_use_is_taken() -> None:
    used = []
    for path in [
        *Path("docs").rglob("*.md"),
        *Path("docs/layouts").glob("*"),
        *Path("tests").rglob("*.yaml"),
    ]:
        used += re.findall(r"['\"](/[^'\"\n]*[\\*+][^'\"\n]*/)['\"]", path.read_text())
    for path in [*Path("ucformat/sources").rglob("*.py"), *Path("ucformat/engines").rglob("*.py")]:
        used += [
            f"/{found}/"
            for found in re.findall(r'(?<=re\.compile\()r"([^"\n]+)"\)', path.read_text())
        ]
    assert len(used) > 40
    for regex in used:
        assert compile_match(regex).longest


def test_it_is_refused_wherever_a_pattern_stands() -> None:
    rule = {"match": "*", "place": ["replicate"]}
    bad = "/(a+)+b/"
    for document in (
        {"rules": [{"match": bad, "place": ["replicate"]}]},
        {"rules": [{"match": "*", "states": [bad], "place": ["replicate"]}, rule]},
        {"rules": [{"match": "*", "place": [{"flat": "/((a+)+)b/", "over": "dp"}]}]},
        {"rules": [rule], "renames": [{"from": bad[1:-1], "to": "x"}]},
    ):
        with pytest.raises(LayoutError, match="may take too long: "):
            Layout.parse({"version": 1, "mesh": {"dp": 2}, **document})
    table = ViewTable.of(TensorList((TensorInfo("a" * 60, "weight", "float32", (2,)),)), {}, {})
    with bounded(100), pytest.raises(LayoutError, match=r"view\[0\].*may take too long: "):
        apply(table, read_steps([{"drop": [bad]}]))


def test_a_name_that_is_too_long_for_a_pattern() -> None:
    pattern = compile_pattern(".*.*.*=")
    assert pattern.fullmatch("a" * 200) is None
    for use in (pattern.match, pattern.fullmatch):
        with pytest.raises(LayoutError, match="accepts at most "):
            use("a" * 5000)
    assert compile_match("*a*b*").fullmatch("ab" * 100_000)


def test_a_template_that_makes_a_very_long_name() -> None:
    steps = [{"rename": "/(.*)/", "to": r"\1\1"}] * 60
    table = ViewTable.of(TensorList((TensorInfo("a", "weight", "float32", (2,)),)), {}, {})
    with bounded(1000), pytest.raises(LayoutError, match="may produce a name of more than"):
        apply(table, read_steps(steps))
    found = compile_pattern("(.*)").match("name")
    assert found
    assert expand(found, r"x\1\g<1>") == "xnamename"


# That it is bounded: an engine that does what `re` does, counting.


class Enough(Exception):
    pass


class Engine:
    """Backtracks as `re` does, one step for each place of the pattern that it comes to."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.left = name, most

    def fullmatch(self, nodes: tuple[RegexNode, ...]) -> bool:
        return any(end == len(self.name) for end in self.seq(nodes, 0))

    def seq(self, nodes: tuple[RegexNode, ...], at: int) -> Iterator[int]:
        if not nodes:
            yield at
            return
        for end in self.node(nodes[0], at):
            yield from self.seq(nodes[1:], end)

    def node(self, node: RegexNode, at: int) -> Iterator[int]:
        self.left -= 1
        if self.left < 0:
            raise Enough
        if node.kind == "group":
            for option in node.options:
                yield from self.seq(option, at)
        elif node.kind == "repeat":
            (inner,) = node.options
            yield from self.repeat(node.mode != "?", node.low, node.high, inner, at)
        elif node.kind == "look":
            if next(self.seq(node.options[0], at), None) is None:
                yield at
        elif at < len(self.name) and re.fullmatch(node.text, self.name[at]):
            yield at + 1

    def repeat(
        self, greedy: bool, least: int, most: int | None, inner: tuple[RegexNode, ...], at: int
    ) -> Iterator[int]:
        if not greedy and least <= 0:
            yield at
        if most is None or most > 0:
            for end in self.seq(inner, at):
                if end > at or least > 0:
                    rest = None if most is None else most - 1
                    yield from self.repeat(greedy, max(least - 1, 0), rest, inner, end)
        if greedy and least <= 0:
            yield at


LEAVES = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^.]", r"\d", "[a-c]", "1"])
OFTEN = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,4}?", "{2,}"])
GRAMMAR = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.builds(lambda part, often: f"({part}){often}", inner, OFTEN),
        st.builds(lambda part, often: f"{part}{often}", LEAVES, OFTEN),
        inner.map(lambda part: f"(?!{part}b)"),
    ),
    max_leaves=8,
)
ALIKE = st.sampled_from(["a", "ab", "a.", "a1", "ab.", "1.", "aab", "b", ".a.b"])
ENDS = st.sampled_from(["", "b", "1", ".", "\n", "x"])


@given(GRAMMAR, ALIKE, ENDS)
@example(".*a.*b.*1", "ab", "x")
@example(r"([^.]+\.)*([^.]+)?\d", "a.", "x")
@example("a*b?(?:1)?(?:[a-c]1)?x", "a", ".")
@settings(max_examples=150, deadline=None)
def test_what_is_taken_takes_no_more_steps_than_were_counted(
    regex: str, part: str, end: str
) -> None:
    try:
        pattern = compile_pattern(regex)
    except LayoutError as error:
        assume("may take too long: " not in error.message)  # else the grammar is wrong
        raise
    from ucformat.geometry import patterns

    name = part * (12 // len(part)) + end
    tree = parse(regex, re.compile(regex).flags)
    work = patterns._Count(regex).seq(tree, patterns._END)[1]
    most = patterns._value(work, len(name))
    assert Engine(name, most).fullmatch(tree) == bool(pattern.fullmatch(name)), most


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        (r"a{2}b{,3}c{1,}d{2,4}?{x}{}", ["a{2}", "b{,3}", "c{1,}", "d{2,4}?", *"{x}{}"]),
        (r"[]x\]^-]+[^]]*+\.\101\x41\0", [r"[]x\]^-]+", "[^]]*+", r"\.", r"\101", r"\x41", r"\0"]),
        (r"^(?#no)a(?P<n>b)(?i:c)(?<!d)(?>e)$", ["^", "a", "(?P<n>b)", "(?i:c)", "(?<!d)", "(?>e)", "$"]),
        ("ab|ac|ad", ["a", "ab|ac|ad"]),
    ],
)  # fmt: skip
def test_parts_of_a_pattern(regex: str, texts: list[str]) -> None:
    assert [node.text for node in parse(regex, re.compile(regex).flags)] == texts


@given(GRAMMAR, ALIKE, ENDS)
@settings(max_examples=60, deadline=None)
def test_what_is_taken_ends(regex: str, part: str, end: str) -> None:
    try:
        pattern = compile_pattern(regex)
    except LayoutError:
        assume(False)
    assert isinstance(pattern, Pattern)
    with bounded(1000, seconds=30):
        pattern.fullmatch(part * (200 // len(part) - 1) + end)
