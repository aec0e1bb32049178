"""The examples of the README and the guides run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.storage.memory import MemoryStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint under the names that the examples use."""
    shapes = {"mlp.up_proj": (16, 12), "mlp.down_proj": (12, 16)}
    arrays = {
        (f"model.layers.0.{n}.weight", state): random_array(shape, "float32", i)
        for i, (n, shape) in enumerate(shapes.items())
        for state in ("weight", "exp_avg")
    }
    arrays["model.norm.weight", "weight"] = random_array((8,), "bfloat16")
    ucformat.convert(Checkpoint(FakeSource.write(MemoryStore("documents"), arrays)), tmp_path / "global_step100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def shell(lines: str) -> None:
    for line in lines.splitlines():
        words = line.removeprefix("$ ").split()
        assert words[0] == "ucp"
        command = [sys.executable, "-m", "ucformat.cli", *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_readme(folder: Path) -> None:
    (code,) = blocks("README.md", "python")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    (lines,) = blocks("README.md", "console")
    shell(lines)


def test_the_guide_for_evaluators(folder: Path) -> None:
    pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    ucformat.convert("global_step100", "universal")
    names: dict[str, object] = {}
    for code in blocks("docs/guides/evaluate.md", "python"):
        exec(compile(code, "evaluate.md", "exec"), names)  # noqa: S102
    assert names["half"].shape == (8, 12)  # type: ignore[attr-defined]
