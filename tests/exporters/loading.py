"""Engines that load exports of checkpoints that other engines saved."""

from __future__ import annotations

import fcntl
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

from tests.engines import Made, make_deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Engines"]


class Engines:
    """Sources on two ranks, and engines that loaded exports of them; processes that share the folder make them once.

    Args:
        folder: where they are made.
        script: the program of `tests/engines` that makes them.
        sources: the specs of the engines that save.
        loads: by the name of an engine its number of ranks, and what exports one of the sources to
            a folder and returns the spec of the engine that is to load it.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        sources: Sequence[dict[str, Any]],
        loads: Mapping[str, tuple[int, Callable[[Mapping[str, Made], Path], dict[str, Any]]]],
    ) -> None:
        self.folder, self.script, self.loads = folder, script, loads
        self.sources = make_deepspeed(list(sources), 2, folder / "sources", script)

    @cache  # noqa: B019 - one for a session
    def on(self, world: int) -> Mapping[str, Made]:
        """All that load on so many ranks."""
        folder = self.folder / str(world)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "exporting").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            specs = []
            for name, (ranks, export) in self.loads.items():
                if ranks != world:
                    continue
                place, spec = folder / "exports" / name, {}
                if not (folder / name / "done").exists():
                    shutil.rmtree(place, ignore_errors=True)
                    spec = export(self.sources, place)
                specs.append({**spec, "name": name})
            return make_deepspeed(specs, world, folder, self.script)
