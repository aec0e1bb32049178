"""A universal checkpoint to look at, and `ucp` in this process and in its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import ucformat
from tests.fakes import ODD, FakeSource
from ucformat.checkpoint import Checkpoint
from ucformat.cli.main import ucp
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Result]
    Shell = Callable[..., subprocess.CompletedProcess[str]]

FACTS: dict[str, Any] = {
    "groups": ({"params": ["embed.weight"], "lr": 0.1, "foreach": None}, {"params": ["norm.bias"], "lr": float("inf")}),
    "aliases": {"head.weight": "embed.weight"},
    "objects": {"scheduler": {"last": 3}, "client_state": {}},
    "step": 1700,
    "layout": {"zero": 3, "dp": 3},
    "engine": {"name": "fake", "version": "1"},
}


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint; tests that change it make a copy."""
    root = tmp_path_factory.mktemp("cli")
    source = Checkpoint(FakeSource.write(LocalStore(root / "src"), ODD, **FACTS))
    ucformat.convert(source, root / "dst", chunk_bytes=256, shard_bytes=4096)
    return root / "dst"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCP_DEBUG", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run() -> Run:
    """`ucp` in this process."""

    def call(*args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(ucp, [str(a) for a in args])
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return call


@pytest.fixture
def shell() -> Shell:
    """`ucp` in a process of its own, through a shell."""

    def call(line: str, **env: str) -> subprocess.CompletedProcess[str]:
        line = line.replace("ucp ", f"{sys.executable} -m ucformat.cli ")
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **env},
            check=False,
        )

    return call


def object_of(text: str) -> dict[str, Any]:
    """The one JSON object on one line."""
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    return found
