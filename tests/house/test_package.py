"""What is shipped, what is documented, and that the rooms stand where a reader looks for them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ucformat

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_ucformat_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"ucformat", f"ucformat-{ucformat.__version__}.dist-info"}
    assert "ucformat/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.parametrize("room", ["schema", "catalog", "migrations"])
def test_rooms_at_the_top_are_links_into_the_package(room: str) -> None:
    link = ROOT / room
    assert link.is_symlink()
    assert link.readlink() == Path("ucformat") / room
    assert (link / "__init__.py").is_file()


def test_every_public_name_is_documented() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert [n for n in ucformat.__all__ if not n.startswith("_") and f"ucformat.{n}" not in text] == []


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
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_no_file_names_a_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    words = [b"/" + b"work/", b"/" + b"root/"]
    for name in filter(None, tracked):
        file = ROOT / name
        if file.is_file():
            data = file.read_bytes()
            assert not any(w in data for w in words), name
