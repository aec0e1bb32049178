"""Every engine loads what every other has saved: the matrix of sources and targets, as in the paper's table.

`python -m bench.engines [--json FILE] [LAYOUT …]`, in three minutes. A tiny Llama is trained for two steps under each
layout and saved, loaded under each, and saved again from there. A cell has the number of tensors,
weights and states of the optimizer, and `=` if each is equal bit for bit, the reports and
certificates are complete, and the next two losses are those of the uninterrupted run but for
rounding; or `≠`, which makes the program fail. The engines are those that `make engines` installs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ucformat
from bench.common import OUT, ROOT, table
from bench.engines_model import batch_of
from bench.engines_shared import (
    AFTER,
    BEFORE,
    COUNT_FOR_JAX,
    FROM_JAX,
    NAMES_IN_PIPELINE,
    PARAMETERS,
    PIPELINE_NAMES,
    TO_JAX,
)
from tests.engines import torchrun as run_deepspeed
from tests.torch.running import fork

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = OUT.absolute() / "engines"
#: States that only some engines have: a number that others keep beside the tensors, or in a group.
BESIDE = ("step",)
ROUNDING = 1e-4  # relative, of losses


@dataclass(frozen=True)
class Layout:
    """An engine and how it cuts the model; `engine` and `options` are those of `bench.engines_program`."""

    engine: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_pipeline(self) -> bool:
        """Whether parameters have the names of DeepSpeed's pipelines."""
        return self.engine == "deepspeed" and "pp" in self.options

    @property
    def view(self) -> list[Mapping[str, Any]]:
        """What a checkpoint is under the names of the whole model, with the states of PyTorch's AdamW."""
        if self.is_pipeline:
            return [{"rename": f"/{name}/", "to": to} for name, to in PIPELINE_NAMES.items()]
        return FROM_JAX if self.engine == "jax" else []

    def load(self, source: Layout, place: Path) -> dict[str, Any]:
        """How this engine loads what a source has saved: as what view, and under which names."""
        view = source.view
        if self.engine == "jax":
            # Megatron-Core has one step for a group of parameters
            view = [*view, *TO_JAX, *([] if source.engine == "megatron" else [COUNT_FOR_JAX])]
        return {
            "place": str(place),
            "view": view or None,
            "rename": NAMES_IN_PIPELINE if self.is_pipeline else {},
            "strict": PARAMETERS if source.engine == "jax" else "report",  # no hyper-parameters
        }

    def run(self, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
        """Do a job on all ranks; what they tell."""
        folder.mkdir(parents=True, exist_ok=True)
        job |= {"engine": self.engine, "options": dict(self.options), "folder": str(folder)}
        script = ["-m", "bench.engines_program", json.dumps(job)]
        if self.engine == "jax":
            self._run_jax(job, folder / "log")
        elif self.engine == "deepspeed":
            run_deepspeed(self.ranks, script, folder / "log")
        else:
            beside = ("tests.engines.megatron.live.beside",) if self.engine == "megatron" else ()
            fork(self.ranks, script, folder / "log", beside)
        told: dict[str, Any] = json.loads((folder / "told.json").read_text())
        return told

    def _run_jax(self, job: dict[str, Any], log: Path) -> None:
        """As `run`, with the devices of one process."""
        job["batches"] = [batch_of(step).tolist() for step in range(BEFORE + AFTER)]
        devices = f"--xla_force_host_platform_device_count={self.options['devices']}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
        # `tests.jax.main` finds the packages of JAX
        program = "import sys, tests.jax.main, bench.engines_jax as j; j.run(sys.argv[1])"
        command = [sys.executable, "-c", program, json.dumps(job)]
        with log.open("w") as out:
            code = subprocess.run(
                command, env=environment, cwd=ROOT, stdout=out, stderr=out, check=False
            ).returncode
        if code:
            raise SystemExit(f"JAX failed with {code}, see {log}")


LAYOUTS = {
    "one process": Layout("plain", 1),
    "FSDP2, 2": Layout("plain", 2, {"dp": 2}),
    "FSDP2 × TP, 2 × 2": Layout("plain", 4, {"dp": 2, "tp": 2}),
    "ZeRO-1, 2": Layout("deepspeed", 2, {"zero": 1}),
    "ZeRO-3, 2": Layout("deepspeed", 2, {"zero": 3}),
    "DeepSpeed PP × DP, 2 × 2": Layout("deepspeed", 4, {"zero": 1, "pp": 2}),
    "Megatron DP, 2": Layout("megatron", 2, {"world": 2, "optimizer": "fully_reshardable"}),
    "Megatron TP × PP, 2 × 2": Layout(
        "megatron", 4, {"world": 4, "tp": 2, "pp": 2, "optimizer": "dp_reshardable"}
    ),
    "Megatron-FSDP, 2": Layout(
        "megatron", 2, {"world": 2, "fsdp": "optim_grads_params", "optimizer": "fsdp_dtensor"}
    ),
    "JAX, 4 devices": Layout("jax", 1, {"devices": 4}),
}


def main(arguments: list[str] | None = None) -> None:
    """Print the matrix."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=", ".join(LAYOUTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the cells there")
    options = parser.parse_args(arguments)
    if unknown := set(options.layouts) - LAYOUTS.keys():
        parser.error(f"there is no layout {', '.join(sorted(unknown))}")
    names = options.layouts or [*LAYOUTS]
    os.environ["PYTHONPATH"] = str(ROOT)
    shutil.rmtree(FOLDER, ignore_errors=True)
    cells, reasons = matrix(names)
    letters = [chr(ord("A") + n) for n in range(len(names))]
    rows = [
        [f"{letter} {source}", *(text_of(cells[source, target]) for target in names)]
        for letter, source in zip(letters, names, strict=True)
    ]
    print(table(["saved by", *(f"loaded by {letter}" for letter in letters)], rows))
    if options.json:
        options.json.write_text(json.dumps([*cells.values()], indent=1))
    if reasons:
        print("\n" + "\n".join(reasons))
        sys.exit(1)


def text_of(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    return f"{'=' if cell['equal'] else '≠'} {cell['tensors']}"


def matrix(names: list[str]) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """The cells by source and target, and why some are not equal."""
    numbers = {name: str(n) for n, name in enumerate(names)}
    saved = {name: FOLDER / numbers[name] / "ck" for name in names}
    losses = {
        name: LAYOUTS[name].run(FOLDER / numbers[name], {"save": str(saved[name]), "loads": {}})[
            "losses"
        ][""]
        for name in names
    }
    cells, reasons = {}, []
    for target in names:
        layout, folder = LAYOUTS[target], FOLDER / numbers[target] / "from"
        loads = {numbers[s]: layout.load(LAYOUTS[s], saved[s]) for s in names}
        told = layout.run(folder, {"save": "", "loads": loads})
        for source in names:
            number = numbers[source]
            tensors, why = differences(saved[source], LAYOUTS[source], folder / number, layout)
            why += told["problems"][number]
            for expected, loss in zip(losses[source], told["losses"][number], strict=True):
                if not math.isclose(loss, expected, rel_tol=ROUNDING):
                    why.append(f"a loss is {loss}, and was {expected}")
            cells[source, target] = {
                "source": source,
                "target": target,
                "equal": not why,
                "tensors": tensors,
            }
            reasons += [f"{source} → {target}: {reason}" for reason in why]
    return cells, reasons


def differences(one: Path, source: Layout, other: Path, target: Layout) -> tuple[int, list[str]]:
    """How many tensors two checkpoints have, and how they differ, by the names of the whole model."""
    a, b = tensors_of(one, source), tensors_of(other, target)
    why = [f"only one has {name} ({state})" for name, state in sorted(a.keys() ^ b.keys())]
    for key in sorted(a.keys() & b.keys()):
        x, y = a[key], b[key]
        if (x.dtype, x.shape, x.tobytes()) != (y.dtype, y.shape, y.tobytes()):
            why.append(f"{key[0]} ({key[1]}) differs")
    return len(a), why


def tensors_of(place: Path, layout: Layout) -> dict[tuple[str, str], Any]:
    """The values of a checkpoint by name in the whole model and state; the weights are those in full precision."""
    ck = ucformat.open(place, view=layout.view or None)
    out: dict[tuple[str, str], Any] = {}
    for key in sorted(ck.tensors):  # `master` before `weight`
        state = "weight" if key.state == "master" else key.state
        if state not in BESIDE:
            out.setdefault((key.name, state), ck[key][...])
    return out


if __name__ == "__main__":
    main()
