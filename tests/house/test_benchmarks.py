"""The page of results: each section bears its own stamp, and is kept until it is measured anew."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bench import run
from bench.common import targets

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


STAMP = re.compile(
    r"\n20\d\d-\d\d-\d\d, commit [0-9a-f]{10}( with changes)?; Python 3\..*\n\n(.* cores, .* GiB; .*)\n"
)


def test_every_section_has_its_own_stamp() -> None:
    sections = run.before()
    assert sections
    assert set(sections) <= set(run.BENCHMARKS.values())
    stamps = {title: STAMP.search(text) for title, text in sections.items()}
    assert [title for title, stamp in stamps.items() if stamp is None] == []


def test_a_partial_run_stamps_only_its_own_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "RESULTS.md"
    here, elsewhere = run.machine_of_today(), "Another, 64 cores, 512 GiB; Linux 1"
    old = {
        title: f"`x`\n\n2001-01-01, commit 0123456789; Python 3.11\n\n{here}\n\n{title}!"
        for title in ("A", "B")
    }
    old["C"] = old["A"].replace(here, elsewhere)
    page.write_text(
        "# Results\n\n" + "\n".join(f"## {title}\n\n{text}\n" for title, text in old.items())
    )
    monkeypatch.setattr(run, "RESULTS", page)
    monkeypatch.setattr(run, "ROOT", tmp_path.parent)
    monkeypatch.setattr(run, "commit", lambda: "f" * 10)
    monkeypatch.setattr(run, "BENCHMARKS", {"a": "A", "common": "B", "c": "C"})
    monkeypatch.setattr("sys.argv", ["run", "common"])
    run.main()
    found = run.before()
    assert {title: found[title] for title in "AC"} == {
        title: old[title] for title in "AC"
    }  # C was measured elsewhere
    assert f"commit {'f' * 10}" in found["B"]
    assert here in found["B"]


def test_a_target_that_is_missed_says_so() -> None:
    rows = targets(("speed", ">= 0.7", 0.69), ("bytes", "<= 1.05", 1.0)).splitlines()
    assert [cell.strip() for cell in rows[2].strip("| ").split("|")] == [
        "speed",
        "≥ 0.7",
        "0.69",
        "**missed**",
    ]
    assert rows[3].rstrip("| ").endswith("yes")
