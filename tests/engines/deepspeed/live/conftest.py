from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines import torchrun
from tests.engines.deepspeed.live.plan import chosen_loads, starts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EDGES = (
    "refusals",
    "client",
    "mismatches",
    "unequal",
    "renamed",
    "guide",
    "certificates",
    "increments",
)
_HERE = Path(__file__).parent


def run_all(
    planned: Sequence[tuple[int, list[dict[str, Any]]]], folder: Path, program: str = "train.py"
) -> Path:
    """The folder in which all tasks are done; processes that share it do them once, and the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "failed").exists():
            raise RuntimeError((folder / "failed").read_text())
        if not (folder / "done").exists():
            (folder / "failed").write_text(f"the engines failed for an earlier test, see {folder}")
            for number, (world, tasks) in enumerate(planned):
                document = folder / f"tasks-{number}.json"
                document.write_text(json.dumps(tasks))
                script = [str(_HERE / program), str(document), str(folder)]
                torchrun(world, script, folder / f"log-{number}.txt")
            (folder / "done").touch()
            (folder / "failed").unlink()
    return folder


@pytest.fixture(scope="session")
def shared(common: Path) -> Path:
    """A folder that all test processes of this session see."""
    return common / "torch-deepspeed"


@pytest.fixture(scope="session")
def chosen(shared: Path) -> Callable[[], Path]:
    """Where the chosen engines saved and loaded, and the edges were tried."""
    edges = [(2, {"name": name, "edge": name}) for name in EDGES]
    return lambda: run_all(starts(chosen_loads(), edges), shared / "chosen")
