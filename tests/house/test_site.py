"""The documentation as a web site: pages are reached, links lead somewhere, and it opens without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.modules import module_of

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
# what a browser fetches by itself: scripts, pictures, style sheets and fonts
FETCHED = re.compile(r"""(?:\bsrc=|<link\b[^>]*\bhref=|url\()["']?((?:https?:)?//[^"')\s>]*)""")


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """`docs/site.py`, which is in no package."""
    return module_of(ROOT / "docs" / "site.py")


def build(root: Path) -> subprocess.CompletedProcess[str]:
    if find_spec("material") is None:
        pytest.skip("no mkdocs-material: pip install 'ucformat[docs]'")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


def settings(root: Path, navigation: str) -> None:
    """The site's own configuration in a folder, with another navigation."""
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "site.py", root / "docs")
    text, _ = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    (root / "mkdocs.yml").write_text(f"{text}\nnav:\n{navigation}\n")


def test_every_page_is_reached_every_link_leads_somewhere_and_nothing_is_fetched(
    tmp_path: Path, site: ModuleType
) -> None:
    _, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    settings(tmp_path, navigation)
    pages = site.collect(tmp_path / "build" / "pages")
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr

    built = tmp_path / "build" / "site"
    for page in pages:
        name = page.with_name("index.html") if page.name == "README.md" else page
        html = (built / name.with_suffix(".html")).read_text()
        assert FETCHED.findall(html) == [], page
    for style in built.rglob("*.css"):
        assert FETCHED.findall(style.read_text()) == [], style
    assert (built / "search" / "search_index.js").is_file()
    assert (built / "docs" / "assets" / "iframe-worker.js").is_file()


@pytest.mark.matrix
def test_a_page_on_a_disk_can_be_searched(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium: apt-get install chromium")
    settings(tmp_path, "  - README.md")
    pages = tmp_path / "build" / "pages"
    (pages / "docs" / "assets").mkdir(parents=True)
    (pages / "README.md").write_text("# Start\n\nAbout quokkas.\n")
    shutil.copy(ROOT / "docs" / "assets" / "iframe-worker.js", pages / "docs" / "assets")
    assert build(tmp_path).returncode == 0
    page = f"file://{tmp_path}/build/site/index.html?q=quokkas"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=15000"]
    command += [f"--user-data-dir={tmp_path}/browser"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "1 matching document<" in done.stdout


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    settings(tmp_path, "  - README.md\n  - Others: docs/*.md")
    pages = tmp_path / "build" / "pages"
    (pages / "docs").mkdir(parents=True)
    (pages / "docs" / "README.md").write_text("# Others\n")
    (pages / "README.md").write_text(
        "# Start\n[a](docs/absent.md) [b](docs/README.md#absent) [c](#nowhere) [d](docs/README.md#others)\n"
    )
    done = build(tmp_path)
    assert done.returncode != 0
    for target in ("docs/absent.md", "docs/README.md#absent", "#nowhere"):
        assert f"'{target}'" in done.stderr, done.stderr
    assert "#others'" not in done.stderr


def test_a_page_outside_the_navigation_is_named(tmp_path: Path) -> None:
    settings(tmp_path, "  - README.md")
    pages = tmp_path / "build" / "pages"
    pages.mkdir(parents=True)
    (pages / "README.md").write_text("# Start\n")
    (pages / "orphan.md").write_text("# Nobody's\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "not in the navigation of mkdocs.yml: orphan.md" in done.stderr


def test_links_to_what_is_no_page_become_text(site: ModuleType) -> None:
    sources = frozenset({Path("docs/a.md"), Path("docs/notebooks/n.ipynb")})
    text = "[a](a.md#x), [n](notebooks/n.ipynb), [code](../ucformat/errors.py), ![p](images/p.svg)"
    assert site._linked(text, Path("docs/b.md"), sources) == (
        "[a](a.md#x), [n](notebooks/n.md), code, ![p](images/p.svg)"
    )
