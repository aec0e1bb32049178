"""Runs the notebooks of docs/notebooks, and saves what they print: `python -m tests.house.notebooks`.

Cells are run one after the other in an empty folder; what they show, they print, so no kernel is needed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def run_cells(notebook: dict[str, Any], name: str) -> list[str]:
    """Run the cells of code in the working directory, and return what each prints."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("".join(cell["source"]), name, "exec"), names)  # noqa: S102
            printed.append(out.getvalue())
    return printed


def outputs(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code printed when the notebook was saved."""
    code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join("".join(o["text"]) for o in cell["outputs"]) for cell in code]


def main() -> None:
    """Run all, and save them with their outputs."""
    os.environ["UCP_CATALOG"] = "none"
    for file in sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(file.read_text())
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            printed = run_cells(notebook, file.name)
        code = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        for number, (cell, text) in enumerate(zip(code, printed, strict=True), 1):
            stream = {
                "name": "stdout",
                "output_type": "stream",
                "text": text.splitlines(keepends=True),
            }
            cell["execution_count"] = number
            cell["outputs"] = [stream] if text else []
        file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
