"""One comparison of the paper's table: what all ranks of a layout read of a checkpoint, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ucformat.errors import UcformatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.layout import Layout
    from ucformat.storage.wrappers import RecordingStore

__all__ = ["Cell", "Expected", "read_all"]

#: What a rank is to hold, by (name, state), flat buffers by (`flat:<group>`, state).
Expected = dict[tuple[str, str], Any]


@dataclass(frozen=True)
class Cell:
    """What all ranks of one target made of one source; `wrong` says what differs, None where nothing does."""

    source: str
    target: str
    ranks: int
    needed: int  # bytes of the tensors' elements that the ranks hold
    read: int  # bytes read of the files to fill the ranks' arrays
    planning: int  # and before that, to open files and compare replicas
    wrong: str | None = None

    @property
    def ratio(self) -> float:
        return self.read / self.needed

    def __str__(self) -> str:
        return "≠" if self.wrong else f"{self.ratio:.2f}"


def read_all(
    ck: Checkpoint, recorder: RecordingStore, where: Layout, expected: Callable[[int], Expected]
) -> tuple[int, int, str | None]:
    """Plan and execute every rank's read; the bytes read, those read for planning, and what is wrong."""
    read = planning = 0
    for rank in range(where.mesh.size):
        try:
            recorder.clear()
            plan = ck.plan(where, rank)
            planning += recorder.nbytes
            recorder.clear()
            arrays = plan.execute()
        except UcformatError as error:
            return read, planning, f"rank {rank}: {error.message}"
        read += recorder.nbytes
        # not the views of tensors in flat buffers
        found = {b.key: arrays[b.key] for b in plan.buffers}
        if wrong := _difference(expected(rank), found):
            return read, planning, f"rank {rank}: {wrong}"
    return read, planning, None


def _difference(right: Expected, found: Expected) -> str | None:
    if right.keys() != found.keys():
        return f"it holds, or should hold, {sorted(found.keys() ^ right.keys())[:3]}"
    for key, a in right.items():
        b = found[key]
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            return f"{key[0]} ({key[1]}) differs"
    return None
