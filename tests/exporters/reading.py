"""What PyTorch's own reader finds in a DCP checkpoint."""

from __future__ import annotations

import pickletools
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["differences", "globals_of", "state_of"]


def state_of(folder: Path, scratch: Path) -> Any:
    """The whole state, nested as `planner_data` says."""
    dcp_to_torch_save(folder, scratch)
    return torch.load(scratch, weights_only=False)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The paths at which two states differ in type, dtype, or any bit."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__}, {type(b).__name__}"]
    if isinstance(a, dict):
        if list(map(repr, sorted(map(str, a)))) != list(map(repr, sorted(map(str, b)))):
            return [f"{path}: {sorted(map(str, set(a) ^ set(b)))}"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}/{k}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)}, {len(b)} items"]
        return [
            d
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for d in differences(x, y, f"{path}/{i}")
        ]
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return [] if (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*raw) else [path]
    return [] if a == b or (a != a and b != b) else [f"{path}: {a!r}, {b!r}"]


def globals_of(folder: Path) -> set[tuple[str, str]]:
    """The globals that the pickles of a checkpoint name: those of `.metadata` and of all items."""
    import io
    import zipfile

    found = _globals((folder / ".metadata").read_bytes())
    for place in FileSystemReader(folder).read_metadata().storage_data.values():
        data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            found |= _globals(
                next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
            )
    return found


def _globals(data: bytes) -> set[tuple[str, str]]:
    found = set()
    for opcode, argument, _ in pickletools.genops(data):
        assert opcode.name not in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4")
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            found.add((module, name))
    return found
