"""What pages state is so: figures are those of the results, drawings those of the code, and calls exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ucformat
from tests.modules import module_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_figures_are_those_of_the_results() -> None:
    results = (ROOT / "bench" / "RESULTS.md").read_text()
    sections = {s.partition("\n")[0]: s for s in results.split("\n## ")[1:]}
    table = (DOCS / "comparison.md").read_text().split("\n## Figures\n")[1]
    rows = re.findall(r"^\| (?!peer|-)(.*?) \| (.*?) \| (.*?) \| (`.*?`) \|$", table, re.MULTILINE)
    assert len(rows) >= 10
    for what, figure, section, command in rows:
        text = sections[section]
        assert command in text, what
        for number in re.findall(r"[\d.]+", figure):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", text), (what, number)


def test_drawings_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_CATALOG", "none")
    pictures = module_of(DOCS / "drawings.py").pictures()
    assert {p.name for p in (DOCS / "images").glob("*.svg")} == set(pictures)
    for name, text in pictures.items():
        assert (DOCS / "images" / name).read_text() == text, "run `python docs/drawings.py`"


def test_how_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "how_it_works.md").read_text(), re.DOTALL)
    exec(compile(code, "how_it_works.md", "exec"), {})  # noqa: S102


@pytest.mark.parametrize("page", ["coming_from", "comparison", "install", "releases"])
def test_what_a_page_calls_exists(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    api = (DOCS / "api.md").read_text()
    commands = (DOCS / "cli.md").read_text()
    for name in re.findall(r"`ucformat\.([a-z_.A-Z]+)\(", text):
        known = name in ucformat.__all__ or f"`ucformat.{name}(" in api
        assert known, name
    for command in re.findall(r"`ucp ([a-z]+(?: (?:set|check|info|upgrade|mlflow|wandb))?)", text):
        assert f"## ucp {command}\n" in commands, command
