"""Build the documentation as a web site: `make docs`.

The pages are those of the repository, in the same folders, so that links between them are the same
there; what they link to and is no page becomes plain text. Notebooks become pages with the outputs
that they were saved with. MkDocs checks all links and anchors.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/RESULTS.md",
    "docs/**/*.md",
    "docs/notebooks/*.ipynb",
)
FILES = ("docs/assets/*", "docs/images/*")  # that pages show or load
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def collect(folder: Path) -> list[Path]:
    """Copy the pages into a folder, and return their paths in it."""
    shutil.rmtree(folder, ignore_errors=True)
    sources = sorted(paths_of(PAGES))
    for source in sources:
        target = folder / page_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / source).read_text()
        if source.suffix == ".ipynb":
            text = notebook_page(json.loads(text))
        target.write_text(_linked(text, source, frozenset(sources)))
    for file in paths_of(FILES):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, folder / file)
    return [page_of(source) for source in sources]


def paths_of(patterns: Iterable[str]) -> set[Path]:
    """The files of the repository that match, relative to it."""
    return {p.relative_to(ROOT) for pattern in patterns for p in ROOT.glob(pattern)}


def page_of(source: Path) -> Path:
    """The page that is made of a file."""
    return source.with_suffix(".md")


def notebook_page(notebook: dict[str, Any]) -> str:
    """The cells of a notebook, with their outputs as text, as a page."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        shown = "".join(_output(output) for output in cell["outputs"])
        if shown.strip():
            parts.append(f"```text\n{_COLOUR.sub('', shown).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """An output of a cell as text."""
    text = output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]
    return "".join(text)


def _linked(text: str, source: Path, sources: frozenset[Path]) -> str:
    """The text of a page; of links to what is no page, only the text stays."""

    def replace(match: re.Match[str]) -> str:
        target = (ROOT / source.parent / match[2]).resolve()
        if target.is_dir() and (target / "README.md").is_file():
            return f"[{match[1]}]({match[2].rstrip('/')}/README.md{match[3] or ''})"
        if not (target.is_relative_to(ROOT) and target.relative_to(ROOT) in sources):
            return match[1]
        return f"[{match[1]}]({page_of(Path(match[2]))}{match[3] or ''})"

    return _LINK.sub(replace, text)


def expanded(entries: list[Any], pages: Iterable[Path]) -> list[Any]:
    """A navigation in which a pattern, such as `docs/adr/*`, is all its pages, the README first."""
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            inside = [inside] if "*" in inside else inside
            result.append({title: inside if isinstance(inside, str) else expanded(inside, pages)})
        elif "*" in entry:
            matching = [p for p in pages if p.match(entry)]
            result += map(str, sorted(matching, key=lambda p: (p.name != "README.md", p.name)))
        else:
            result.append(entry)
    return result


def listed(entries: list[Any]) -> list[Path]:
    """The pages of an expanded navigation, in order."""
    pages: list[Path] = []
    for entry in entries:
        inside = next(iter(entry.values())) if isinstance(entry, dict) else entry
        pages += [Path(inside)] if isinstance(inside, str) else listed(inside)
    return pages


def on_config(config: Any) -> Any:
    """Expand the navigation, and refuse one without some page: MkDocs calls this (`hooks`)."""
    from mkdocs.exceptions import PluginError

    folder = Path(config.docs_dir)
    pages = sorted(p.relative_to(folder) for p in folder.rglob("*.md"))
    config.nav = expanded(config.nav, pages)
    if absent := sorted(set(pages) - set(listed(config.nav))):
        message = f"not in the navigation of mkdocs.yml: {', '.join(map(str, absent))}"
        raise PluginError(message)
    return config


def main() -> None:
    """Build the site."""
    collect(ROOT / "build" / "pages")
    # not `--quiet`, with which --strict counts no warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)  # noqa: S603


if __name__ == "__main__":
    main()
