"""`register -r` that is killed, and repeated until it ends, records what it records when it is left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.jobs.conftest import foreign, universal
from tests.patience import PATIENCE
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.recording import Found
from ucformat.jobs import batches
from ucformat.jobs.register import register

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for step in range(STEPS):
        universal(tmp_path / "tree" / "run7" / str(step), step)
        foreign(tmp_path / "tree" / "ds", step)
    return tmp_path / "tree"


#: Registers in batches of three, and says after each checkpoint that it is recorded.
PROGRAM = """
import sys
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.recording import Found
from ucformat.jobs import batches
from ucformat.jobs.register import register
batches._TOGETHER = 3
with Catalog(sys.argv[2]) as catalog:
    register(sys.argv[1], catalog, recursive=True, progress=lambda done, _: print(done, flush=True))
"""


@pytest.mark.front("2")
@pytest.mark.parametrize("seed", range(3))
def test_killed_and_repeated(tree: Path, tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    url = f"sqlite:///{tmp_path}/killed.db"
    before = 0
    for _ in range(3):
        after, told = pick.randrange(1, 9), 0
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tree), url], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                told = int(line)
                if told >= after:
                    time.sleep(pick.random() * 0.02)
                    os.kill(process.pid, signal.SIGKILL)
                    break
            process.wait(PATIENCE)
        with Catalog(url) as catalog:
            known = catalog.count()
            assert known >= max(before, min(told, 2 * STEPS - before)), (
                "what was said to be recorded is"
            )
            before = known
    with Catalog(url) as catalog, Catalog(f"sqlite:///{tmp_path}/alone.db") as alone:
        found, expected = (
            register(tree, catalog, recursive=True),
            register(tree, alone, recursive=True),
        )
        assert found == expected
        assert [(e.id, e.urls, e.run, e.step) for e in found.entries] == [
            (e.id, e.urls, e.run, e.step) for e in expected.entries
        ]


def test_one_that_is_refused_fails_no_other_of_its_batch(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tree / "run7" / "5" / "manifest.json"
    (tmp_path / "other").mkdir()
    other = universal(tmp_path / "other" / "5", 77)
    with Catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        register(other.url, catalog)
        text = manifest.read_text()

        def stolen(
            doc: Any, url: str, kind: str, *more: Any
        ) -> Found:  # as if its id were that of another checkpoint
            if doc.step == 5 and kind == "ucformat":
                doc = doc.model_copy(update={"id": other.id})
            return Found(doc, url, kind, *more)

        monkeypatch.setattr(batches, "Found", stolen)
        found = register(tree, catalog, recursive=True)
        assert [f.url for f in found.failures] == [str(manifest.parent)]
        assert "another checkpoint" in found.failures[0].message
        assert len(found.ids) == 2 * STEPS - 1
        assert manifest.read_text() == text
