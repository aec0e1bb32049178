"""Build the documentation as a web site: `make docs`.

The pages are those of the repository, in the same folders, so that links between them are the same
there; what they link to and is no page becomes plain text. MkDocs checks all links and anchors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/RESULTS.md",
    "docs/**/*.md",
)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def collect(folder: Path) -> list[Path]:
    """Copy the pages into a folder, and return their paths in it."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = sorted({p.relative_to(ROOT) for pattern in PAGES for p in ROOT.glob(pattern)})
    for page in pages:
        target = folder / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_linked(page, frozenset(pages)))
    return pages


def _linked(page: Path, pages: frozenset[Path]) -> str:
    """The text of a page; of links to what is no page, only the text stays."""

    def replace(match: re.Match[str]) -> str:
        target = (ROOT / page.parent / match[2]).resolve()
        if target.is_dir() and (target / "README.md").is_file():
            return f"[{match[1]}]({match[2].rstrip('/')}/README.md{match[3] or ''})"
        is_page = target.is_relative_to(ROOT) and target.relative_to(ROOT) in pages
        return match[0] if is_page else match[1]

    return _LINK.sub(replace, (ROOT / page).read_text())


def main() -> None:
    """Build the site."""
    collect(ROOT / "build" / "pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)  # noqa: S603


if __name__ == "__main__":
    main()
