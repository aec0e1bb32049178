"""Runs trainings with Megatron-Core, and compares what they held, without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ucformat
from tests.torch.running import fork

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["differences", "trained"]


def trained(folder: Path, spec: dict[str, Any], *actions: dict[str, Any]) -> dict[str, Any]:
    """What the first rank of a training tells (`train.py`); it writes below the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "told.json"
    job = {"spec": spec, "actions": actions, "to": str(told)}
    program = "fsdp" if "fsdp" in spec else "train"
    script = ["-m", f"tests.engines.megatron.live.{program}", json.dumps(job)]
    fork(spec["world"], script, folder / "log", ("tests.engines.megatron.live.beside",))
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def differences(one: Path, other: Path, *, states: tuple[str, ...] = ()) -> list[str]:
    """What differs between the tensors of two checkpoints, bit for bit.

    Args:
        states: those that only one of them may have.
    """
    a, b = ucformat.open(str(one)), ucformat.open(str(other))
    out = [
        f"only one has {k}"
        for k in sorted(a.tensors.keys() ^ b.tensors.keys())
        if k.state not in states
    ]
    for key in sorted(a.tensors.keys() & b.tensors.keys()):
        x, y = a[key][...], b[key][...]
        if (x.dtype, x.shape, x.tobytes()) != (y.dtype, y.shape, y.tobytes()):
            out.append(f"{key} differs")
    return out
