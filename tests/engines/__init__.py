"""Real checkpoints from real training engines, each made in a virtual environment of its own.

Programs that engines run are in the rooms of the engines: beside these, where Python puts the
folder of a program first, `import numpy` would import the tests of NumPy's room.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forkserver import Program, run
from tests.patience import PATIENCE

__all__ = ["Made", "engine", "make_deepspeed", "torchrun"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_AT_ONCE = 12  # engines in one process: each leaves threads of its groups of ranks behind
_MODULES = (
    "deepspeed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "ucformat.torch.deepspeed",
)
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class Made:
    """A checkpoint that an engine wrote, and the truth: `{(state, name): (dtype, shape, bytes)}`."""

    name: str
    folder: Path
    facts: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "ckpt"

    @property
    def truth(self) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
        data = (self.folder / "truth.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        out = {}
        for key, entry in json.loads(data[8:start]).items():
            if key != "__metadata__":
                state, _, name = key.partition("/")
                first, last = entry["data_offsets"]
                out[state, name] = (
                    _DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                    data[start + first : start + last],
                )
        return out


def engine(name: str) -> Path:
    """The interpreter that has the engine; fails where there is none: what is not run is not proved."""
    told = os.environ.get(f"UCFORMAT_{name.upper()}_PYTHON")
    python = Path(told) if told else _ROOT / ".engines" / name / "bin" / "python"
    if not python.exists():
        raise RuntimeError(
            f"no {name} at {python}: run `make engines`, or set UCFORMAT_{name.upper()}_PYTHON to a Python that has it"
        )
    return python


def make_deepspeed(
    specs: list[dict[str, Any]],
    world: int,
    folder: Path,
    script: str = "deepspeed/make_deepspeed.py",
) -> dict[str, Made]:
    """Checkpoints of these configurations by name, made by `world` processes unless they are there.

    Test processes that share `folder` make them once: a file lock lets one work, and the others
    wait.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = [spec for spec in specs if not (folder / spec["name"] / "done").exists()]
        for start in range(0, len(left), _AT_ONCE):
            (folder / "specs.json").write_text(json.dumps(left[start : start + _AT_ONCE]))
            torchrun(
                world,
                [str(_HERE / script), str(folder / "specs.json"), str(folder)],
                folder / "log",
            )
    return {
        spec["name"]: Made(
            spec["name"],
            folder / spec["name"],
            json.loads((folder / spec["name"] / "truth.json").read_text()),
        )
        for spec in specs
    }


def torchrun(world: int, script: list[str], log: Path) -> None:
    """Run a script under DeepSpeed as torchrun does, by ranks that are forked with DeepSpeed imported."""
    python = engine("deepspeed")
    environment = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    log.unlink(missing_ok=True)
    codes = run(
        str(python), _MODULES, Program(script, environment, [str(log)], ranks=world), PATIENCE
    )
    if any(codes):
        lines = log.read_text().splitlines()
        told = [line for line in lines if "Error" in line][-12:] + lines[
            -40:
        ]  # a signal's traceback
        raise RuntimeError(f"DeepSpeed failed with {codes}, see {log}:\n" + "\n".join(told))
