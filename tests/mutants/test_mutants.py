from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.mutants.__main__ import ROOT, every_site, main
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.sites import changed, marked, sites
from tests.mutants.trial import PACKAGES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.mutants.sites import Site

CODE = '''
def clamp(value, low, high):
    """Into the range."""
    if low > high:
        raise ValueError(f"{low + 1} is above {high}")
    if value < low and not high == 3:
        return low
    note(value, low)
    return min(value, high) + 1
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "ucformat" / "geometry" / "toy.py"
    file.parent.mkdir(parents=True)
    file.write_text(CODE)
    return file


def test_each_kind_of_change(module: Path, tmp_path: Path) -> None:
    after = {f"{s.change}: {s.code}": changed(CODE, s.index) for s in sites(module, tmp_path)}
    assert set(after) == {
        *(
            "check dropped: if low > high: raise ValueError(f'{low + 1} is above {high}')",
            "comparison: low > high",
        ),
        *("boundary: low > high", "raise dropped: raise ValueError(f'{low + 1} is above {high}')"),
        *(
            "check dropped: if value < low and (not high == 3): return low",
            "and, or: value < low and (not high == 3)",
        ),
        *(
            "boundary: value < low",
            "comparison: value < low",
            "not dropped: not high == 3",
            "comparison: high == 3",
        ),
        *("number: 3", "call dropped: note(value, low)", "arguments swapped: note(value, low)"),
        *("operator: min(value, high) + 1", "number: 1"),
    }
    assert (
        "raise"
        not in after["check dropped: if low > high: raise ValueError(f'{low + 1} is above {high}')"]
    )
    assert "if low >= high" in after["boundary: low > high"]
    assert "if low <= high" in after["comparison: low > high"]
    assert "value < low or not" in after["and, or: value < low and (not high == 3)"]
    assert "not not high == 3" in after["not dropped: not high == 3"]
    assert "note(low, value)" in after["arguments swapped: note(value, low)"]
    assert "min(value, high) - 1" in after["operator: min(value, high) + 1"]


def test_marks_stand_before_the_statements(module: Path, tmp_path: Path) -> None:
    (number,) = (
        s.index
        for s in sites(module, tmp_path)
        if s.code == "note(value, low)" and "call" in s.change
    )
    lines = marked(CODE, {number: 7}).splitlines()
    assert "hit(7)" in lines[lines.index("    note(value, low)") - 1]


def test_each_change_of_the_package_can_be_made() -> None:
    every = every_site(ROOT, PACKAGES)
    assert len({s.name for s in every}) == len(every) > 1000
    of_a_file: dict[str, list[Site]] = {}
    for site in every:
        of_a_file.setdefault(site.file, []).append(site)
    for name, here in list(of_a_file.items())[::4]:  # each takes a quarter of a second
        source = (ROOT / name).read_text()
        assert (
            len({changed(source, s.index) for s in here[:: max(1, len(here) // 3)]} - {source}) >= 1
        )
        compile(marked(source, {s.index: s.index for s in here}), name, "exec")


def test_what_is_equivalent_is_there_and_argued_for() -> None:
    assert EQUIVALENT.keys() <= {s.name for s in every_site(ROOT, PACKAGES)}
    assert all(EQUIVALENT.values())


def test_a_change_is_killed_or_survives(
    module: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = "def larger(a, b):\n    return a > b\n\ndef unused(a):\n    return a < 3\n"
    module.write_text(code)
    (tmp_path / "tests" / "geometry").mkdir(parents=True)
    test = (
        "import subprocess, sys\nfrom ucformat.geometry.toy import larger\n\n"
        "def test_it():\n    assert larger(2, 1)\n"
    )
    (tmp_path / "tests" / "geometry" / "test_toy.py").write_text(test)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['matrix: many']\n"
    )
    for folder in ("ucformat", "ucformat/geometry", "tests", "tests/geometry"):
        (tmp_path / folder / "__init__.py").touch()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    verdicts = tmp_path / "verdicts.jsonl"
    words = ["--jobs", "1", "--json", str(verdicts)]
    assert main(words, tmp_path) == 1
    output = capsys.readouterr().out
    assert (
        "ucformat/geometry/toy.py:larger: comparison: a > b  tests/geometry/test_toy.py::test_it"
        in output
    )
    assert (
        "survived: ucformat/geometry/toy.py:2 ucformat/geometry/toy.py:larger: boundary: a > b"
        in output
    )
    assert (
        "unreached: ucformat/geometry/toy.py:5 ucformat/geometry/toy.py:unused: boundary: a < 3"
        in output
    )
    assert "all                1 killed, 4 survived, 0 equivalent; 20.0% " in output
    assert main(words, tmp_path) == 1
    assert "5 picked, 0 to try" in capsys.readouterr().out
    assert module.read_text() == code
