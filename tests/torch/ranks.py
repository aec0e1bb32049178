"""Ranks for one scenario after another, forked with torch imported.

A scenario is a function of a module; each rank calls it inside an initialised gloo process group,
and may be killed.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.forkserver import Program
from tests.forkserver import run as forked
from tests.patience import PATIENCE
from tests.torch.running import MODULES, environment
from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucformat.torch.comm.group import Group

__all__ = ["KILLED", "Ranks", "all_gather", "told"]

#: What a rank that was killed gives.
KILLED = "killed"


class Ranks:
    """The scenarios of a module.

    Args:
        modules: what ranks need besides torch; imported before they are forked.
    """

    def __init__(self, module: str, modules: Sequence[str] = ()) -> None:
        self._module, self._modules = module, modules

    def run(self, scenario: str, size: int, folder: Path, **arguments: Any) -> list[Any]:
        """What each of `size` ranks gave; `KILLED` of one that ended by SIGKILL. AssertionError where one failed."""
        folder.mkdir(parents=True, exist_ok=True)
        store = next(p for n in range(1000) if not (p := folder / f"store-{n}").exists())
        argv = [
            "-m",
            "tests.torch.ranks",
            self._module,
            scenario,
            str(folder),
            store.name,
            json.dumps(arguments),
        ]
        logs = [str(folder / f"rank-{rank}.log") for rank in range(size)]
        for log in logs:
            Path(log).unlink(missing_ok=True)
        program = Program(
            argv,
            environment({"MASTER_ADDR": "127.0.0.1"}),
            logs,
            ranks=size,
            modules=self._modules,
            together=False,
        )
        codes = forked(sys.executable, MODULES, program, PATIENCE)
        return [self._outcome(folder, scenario, rank, code) for rank, code in enumerate(codes)]

    def _outcome(self, folder: Path, scenario: str, rank: int, code: int) -> Any:
        if code == -signal.SIGKILL:
            return KILLED
        log = (folder / f"rank-{rank}.log").read_text(errors="replace")
        assert code == 0, f"{scenario}: rank {rank} ended with {code}:\n{log[-4000:]}"
        return pickle.loads((folder / f"rank-{rank}.pickle").read_bytes())  # noqa: S301


def all_gather(group: Group, value: Any, kind: Any = Any) -> list[Any]:
    """The values of all ranks of one of our groups, on every rank."""
    found: list[Any] = group.gather_scatter(
        value, lambda values: [values] * group.size, kind, list[kind]
    )
    return found


def told(call: Callable[[], Any]) -> str:
    """The error of a call; empty: it passed in silence."""
    try:
        call()
    except UcformatError as error:
        return str(error)
    return ""


def main(module: str, scenario: str, folder: Path, store: str, arguments: dict[str, Any]) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    made = dist.FileStore(str(folder / store), size)
    dist.init_process_group(
        "gloo", store=made, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    given = getattr(importlib.import_module(module), scenario)(folder, **arguments)
    (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(given))


if __name__ == "__main__":
    _, module, scenario, folder, store, arguments = sys.argv
    main(module, scenario, Path(folder), store, json.loads(arguments))
