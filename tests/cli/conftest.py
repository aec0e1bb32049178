"""A universal checkpoint and a catalog to look at, and `ucp` in this process, in its own, and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

import ucformat
from tests.catalog.manifests import made_from, manifest
from tests.fakes import ODD, FakeSource
from tests.patience import PATIENCE
from ucformat.checkpoint import Checkpoint
from ucformat.cli.main import ucp
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ucformat.catalog.entries import Entry

    Run = Callable[..., Result]
    Terminal = Callable[..., str]
    Shell = Callable[..., subprocess.CompletedProcess[str]]

FACTS: dict[str, Any] = {
    "groups": (
        {"params": ["embed.weight"], "lr": 0.1, "foreach": None},
        {"params": ["norm.bias"], "lr": float("inf")},
    ),
    "aliases": {"head.weight": "embed.weight"},
    "objects": {"scheduler": {"last": 3}, "client_state": {}},
    "step": 1700,
    "layout": {"zero": 3, "dp": 3},
    "engine": {"name": "fake", "version": "1"},
}


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A universal checkpoint; tests that change it, or make it known to a catalog, make a copy."""
    root = tmp_path_factory.mktemp("cli")
    source = Checkpoint(FakeSource.write(LocalStore(root / "src"), ODD, **FACTS))
    ucformat.convert(source, root / "dst", chunk_bytes=256, shard_bytes=4096)
    return root / "dst"


LONG_RUN = "a-sweep-whose-name-says-all-that-was-tried-lr-3e-4-wd-0.1-warmup-2000"


@pytest.fixture(scope="session")
def _filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog of four checkpoints, nothing of which is in storage."""
    file = tmp_path_factory.mktemp("catalog") / "catalog.db"
    now = datetime.now(UTC)
    with ucformat.Catalog(str(file)) as catalog:
        last = None
        for k, (run, step) in enumerate(
            (("run7", 1000), ("run7", 2000), ("run7", 3000), (LONG_RUN, 4000))
        ):
            doc = manifest(
                k,
                run,
                step,
                created=now - timedelta(days=10 - k),
                metrics={"val_loss": 3 - step / 2000},
                config={"optimizer": {"lr": 3e-4 * (k + 1), "name": "adamw"}},
                layout={"dp": 8},
                lineage=()
                if last is None
                else made_from(last, "resume", f"/nowhere/{last.run}/{last.step}"),
            )
            catalog.record(doc, f"/nowhere/{run}/{step}")
            last = doc
    return file


@pytest.fixture
def catalog(_filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a catalog of run7@1000, run7@2000, run7@3000 and one checkpoint of a run with a long name."""
    file = tmp_path / "catalog.db"
    shutil.copy(_filled, file)
    monkeypatch.setenv("UCP_CATALOG", str(file))
    return file


@pytest.fixture
def entry(catalog: Path) -> Callable[[str], Entry]:
    """What the catalog knows of a checkpoint."""

    def get(ref: str) -> Entry:
        with ucformat.Catalog(str(catalog)) as opened:
            return opened.get(ref)

    return get


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
            timeout=PATIENCE,
            env={**os.environ, **env},
            check=False,
        )

    return call


@pytest.fixture
def terminal() -> Terminal:
    """What commands show at a terminal of 80 columns, all run in one process of their own; without colours."""

    def call(*commands: list[object], answer: str = "") -> str:
        master, slave = pty.openpty()
        os.write(master, answer.encode())  # typed ahead
        code = (
            "from ucformat.cli.main import ucp\n"
            f"for args in {[[str(a) for a in c] for c in commands]}:\n"
            "    try: ucp.main(args)\n"
            "    except SystemExit: pass"
        )
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environ
        ):
            os.close(slave)
            text = b""
            try:
                while data := os.read(master, 1 << 16):
                    text += data
            except OSError:  # the other end is closed
                pass
        os.close(master)
        return re.sub(r"\x1b\[[0-9;]*m|\r", "", text.decode())

    return call


def object_of(text: str) -> dict[str, Any]:
    """The one JSON object on one line."""
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(
        text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")
    )
    return found
