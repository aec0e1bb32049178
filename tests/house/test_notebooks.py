"""The notebooks run, and print what they were saved with."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tests.house.notebooks import FOLDER, outputs, run_cells

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUMBER = re.compile(r"-?\d+\.\d*(?:e-?\d+)?")


def without_rounding(texts: Sequence[str]) -> list[list[str]]:
    """The words of each output; of numbers with a fraction, which differ between processors, a sign."""
    return [NUMBER.sub("#", text).split() for text in texts]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UCP_CATALOG", "none")
    notebook = json.loads(file.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert without_rounding(run_cells(notebook, file.name)) == without_rounding(outputs(notebook))
