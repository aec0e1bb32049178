"""Layout files and views: text that is nearly one, and files that are small and stand for very much."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import bounded, changed, harmless, mutated
from ucformat.errors import LayoutError, UcformatError
from ucformat.geometry.layout import Layout
from ucformat.geometry.placement import compile_match
from ucformat.geometry.tensor import TensorInfo, TensorList
from ucformat.views.document import read_steps
from ucformat.views.steps import apply
from ucformat.views.table import ViewTable

if TYPE_CHECKING:
    from pathlib import Path

CONSTANT = 48 << 20
TENSORS = TensorList(
    (TensorInfo("a.0.w", "weight", "float32", (8, 6)), TensorInfo("b", "weight", "bfloat16", (7,)))
)
DOCUMENT: dict[str, Any] = {
    "version": 1,
    "mesh": {"pp": 2, "dp": 2, "tp": 2},
    "stages": [
        {"match": r"/a\.(\d+)\.w/", "place": [{"stage": [0, 4], "over": "pp"}]},
        {"match": "*", "place": []},
    ],
    "rules": [
        {"match": ["a.*", "c"], "place": [{"shard": 0, "over": "tp", "parts": [2, 2, 4]}]},
        {"match": "*", "states": ["weight"], "place": [{"pattern": "replicate"}, "replicate"]},
    ],
    "data": [
        {
            "match": "*",
            "place": [{"flat": "all", "over": ["dp"], "tensor_align": 4, "group_pad": 2}],
        }
    ],
    "renames": [{"from": r"(.*)\.w", "to": r"\1.v"}],
    "view": [
        {"rename": r"/a\.(\d+)\.w/", "to": r"c.\1.w"},
        {"split": "c.*", "into": ["q", "k"], "sizes": [3, 1], "repeat": 2},
        {"fuse": "/q/", "and": ["k"], "into": "qk"},
        {"unstack": "qk", "into": "n.{i}", "dim": 0},
        {"stack": r"/n\.(?P<i>\d+)/", "into": "m"},
        {"cast": "b", "dtype": "float32"},
    ],
}
STEPS = DOCUMENT["view"]
TEXTS = (
    yaml.safe_dump(DOCUMENT).encode(),
    yaml.safe_dump(DOCUMENT, default_flow_style=True).encode(),
    b"a: &a [*a]",
)


def use(layout: Layout) -> None:
    """Bind it, and do its steps."""
    table = ViewTable.of(TENSORS, {}, {})
    with suppress(UcformatError):
        apply(table, layout.view)
    layout.bind(TENSORS)
    layout.rename("a.0.w")


def load(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    use(Layout.load(path))


@pytest.mark.matrix
@given(changed(DOCUMENT))
@settings(max_examples=120)
def test_documents_near_a_layout(document: Any) -> None:
    harmless(lambda: use(Layout.parse(document)), 2000, constant=CONSTANT)


@pytest.mark.matrix
@given(changed(STEPS))
@settings(max_examples=120)
def test_documents_near_a_view(document: Any) -> None:
    def view() -> None:
        apply(
            ViewTable.of(TENSORS, {}, {}),
            read_steps(document if isinstance(document, list) else [document]),
        )

    harmless(view, 1000, constant=CONSTANT)


@pytest.mark.matrix
@given(mutated(TEXTS))
@settings(max_examples=40)
def test_mutated_yaml(tmp_path: Path, data: bytes) -> None:
    harmless(lambda: load(tmp_path / "a.yaml", data), len(data), constant=CONSTANT)


@pytest.mark.matrix
@given(mutated([json.dumps(DOCUMENT).encode()]))
@settings(max_examples=60)
def test_mutated_json(tmp_path: Path, data: bytes) -> None:
    harmless(lambda: load(tmp_path / "a.json", data), len(data), constant=CONSTANT)


def laughs(times: int, width: int = 9) -> str:
    """A list of lists that is ever so much longer once it is written out."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * width)}]" for i in range(times)),
    ]
    return "version: 1\n" + "\n".join(lines) + f"\nrules: *a{times}\n"


SHARD = "{shard: 0, over: tp, sizes: &s [" + "1, " * 300 + "1]}"
RULE = "{match: '*', place: &p [" + "&x " + SHARD + ", *x" * 300 + "]}"
BOMBS = {
    "laughs": laughs(12),
    "laughs in a key": laughs(12) + "? *a12\n: 1\n",
    "laughs that are merged": "b0: &b0 {x: 1}\n"
    + "".join(f"b{i + 1}: &b{i + 1} {{<<: [{', '.join([f'*b{i}'] * 9)}]}}\n" for i in range(12)),
    "rules that are valid": f"version: 1\nmesh: {{tp: 2}}\nrules: [&r {RULE}" + ", *r" * 300 + "]",
    "a list in itself": "version: 1\nrules: &a [*a]",
    "a key in itself": "&a ? [*a]\n: 1",
    "deep lists": "[" * 900,
    "deep mappings": "{a: " * 900,
    "a long number": "version: " + "9" * 5000,
    "a date that cannot be": "version: 2026-99-99",
    "a number without digits": "version: !!int ''",
    "a float without digits": "version: !!float ''",
    "a mesh that is too large": "version: 1\nmesh: {dp: 10000000000}\nrules: [{match: '*', place: []}]",
    "many faults": "version: 1\nmesh: {tp: 2}\nrules: [" + "{}, " * 400 + "]",
    "a pattern that repeats too often": "version: 1\nmesh: {tp: 2}\nrules: [{match: '/a{99999999999}/', place: []}]",
    "a pattern that is too deep": (
        "version: 1\nmesh: {tp: 2}\nrules: [{match: '/" + "(" * 5000 + ")" * 5000 + "/', place: []}]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BOMBS)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_what_stands_for_too_much_is_an_error(tmp_path: Path, what: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text(BOMBS[what])
    with (
        bounded(len(BOMBS[what]), constant=CONSTANT, seconds=4),
        pytest.raises(LayoutError) as error,
    ):
        Layout.load(path)
    assert (
        "a.yaml" in str(error.value)
        or "a.json" in str(error.value)
        or what.startswith(("a pattern", "a mesh"))
    )
    assert len(str(error.value)) < 20_000


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(LayoutError, match="too deeply"):
        Layout.load(tmp_path / "a.json")


def test_a_glob_of_many_stars_takes_no_longer_than_the_name() -> None:
    with bounded(0):
        assert not compile_match("*a" * 30 + "b").fullmatch("a" * 5000)
        assert compile_match("*a*?b**c*").fullmatch("xayybc")


@given(st.text("ab*?.", max_size=8), st.text("ab.", max_size=8))
def test_globs_match_what_plain_ones_do(glob: str, name: str) -> None:
    def plain(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return plain(pattern[1:], text) or (bool(text) and plain(pattern, text[1:]))
        return bool(text) and pattern[0] in ("?", text[0]) and plain(pattern[1:], text[1:])

    assert bool(compile_match(glob).fullmatch(name)) == plain(glob, name)
