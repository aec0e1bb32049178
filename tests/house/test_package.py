"""What is shipped, what is documented, and that the rooms stand where a reader looks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ucformat
from ucformat.storage.strided import NATIVE

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[str]:
    out = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return out.splitlines()


def build_wheel(tmp_path: Path, **environment: str) -> tuple[str, set[str]]:
    """Build a wheel of the tracked files, through an sdist; return its name and its files."""
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    for name in tracked():
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | environment)
    (wheel,) = dist.glob("*.whl")
    return wheel.name, set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_ucformat_alone(tmp_path: Path) -> None:
    _, names = build_wheel(tmp_path)
    assert {n.split("/")[0] for n in names} == {
        "ucformat",
        f"ucformat-{ucformat.__version__}.dist-info",
    }
    native = {n for n in names if n.endswith(".so")}
    assert native == ({"ucformat/_native.abi3.so"} if NATIVE else set())
    sources = {n for n in tracked("ucformat") if n.endswith(".c")}
    assert {n for n in names if n.startswith("ucformat/")} - native == set(
        tracked("ucformat")
    ) - sources
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_it_installs_without_a_compiler(tmp_path: Path) -> None:
    name, names = build_wheel(tmp_path, CC="false")
    assert not any(n.endswith(".so") for n in names), name
    assert "ucformat/storage/strided.py" in names


@pytest.mark.parametrize("room", ["schema", "catalog", "migrations"])
def test_rooms_at_the_top_are_links_into_the_package(room: str) -> None:
    link = ROOT / room
    assert link.is_symlink()
    assert link.readlink() == Path("ucformat") / room
    assert (link / "__init__.py").is_file()


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [
        n for n in ucformat.__all__ if not n.startswith("_") and f"ucformat.{n}" not in text
    ] == []


def test_the_core_installs_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = " ".join(project["dependencies"])
    assert all(heavy not in core for heavy in ("torch", "zarr", "tensorstore", "psycopg", "dask"))


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {ucformat.__version__}" in text


def test_links_in_the_documents_lead_somewhere() -> None:
    import re

    broken = []
    for page in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").glob("*.md"),
    ]:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_no_file_names_a_machine() -> None:
    words = [b"/" + b"work/", b"/" + b"root/"]
    for name in tracked():
        file = ROOT / name
        if file.is_file():
            data = file.read_bytes()
            assert not any(w in data for w in words), name
