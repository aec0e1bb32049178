"""Every engine loads what every other has saved: the matrix of sources and targets, as in the paper's table.

`python -m bench.engines [--model NAME] [--json FILE] [LAYOUT …]`, in three minutes for each model: a tiny Llama, and a
tiny Mixtral of four experts. It is trained for two steps under each
layout and saved, loaded under each, and saved again from there. A cell has the number of tensors,
weights and states of the optimizer, and `=` if each is equal bit for bit, the reports and
certificates are complete, and the next two losses are those of the uninterrupted run but for
rounding; or `≠`, which makes the program fail. With `--resume` it goes on where the same commit was interrupted.
The engines are those that `make engines` installs.
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
    AUTOEP,
    BEFORE,
    COUNT_FOR_JAX,
    JAX,
    JAX_EXPERTS,
    MEGATRON,
    PARAMETERS,
    PIPELINE,
    WHOLE,
    Names,
)
from bench.run import commit
from tests.torch.running import fork

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = OUT.absolute() / "engines"
#: States that only some engines have: a number that others keep beside the tensors, or in a group.
BESIDE = ("step",)
TITLES = {
    "dense": "A tiny Llama:",
    "moe": "A tiny Mixtral, whose experts are stacked, apart, cut across ranks, or turned:",
}
#: What is imported once before the ranks of engines are forked, for each model.
MODULES = {"dense": [], "moe": ["transformers.models.mixtral.modeling_mixtral"]}
#: What makes the engines that are installed apart from PyTorch available.
BESIDE_TORCH = {
    "deepspeed": "tests.engines.beside",
    "megatron": "tests.engines.megatron.live.beside",
}
ROUNDING = 1e-4  # relative, of losses


@dataclass(frozen=True)
class Layout:
    """An engine and how it cuts the model; `engine` and `options` are those of `bench.engines_program`."""

    engine: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Names = WHOLE

    def load(self, source: Layout, place: Path) -> dict[str, Any]:
        """How this engine loads what a source has saved: as what view, and under which names."""
        view = [*source.names.view, *self.names.into]
        if self.engine == "jax" and source.engine != "megatron":
            # Megatron-Core has one step for a group of parameters
            view.append(COUNT_FOR_JAX)
        return {
            "place": str(place),
            "view": view or None,
            "rename": dict(self.names.rename),
            "strict": PARAMETERS if source.engine == "jax" else "report",  # no hyper-parameters
        }

    def run(self, model: str, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
        """Do a job with a model on all ranks; what they tell."""
        told = folder / "told.json"
        if told.exists():  # before the matrix was interrupted
            return dict(json.loads(told.read_text()))
        shutil.rmtree(folder, ignore_errors=True)  # what a start has left that was interrupted
        folder.mkdir(parents=True)
        job |= {
            "model": model,
            "engine": self.engine,
            "options": dict(self.options),
            "folder": str(folder),
        }
        script = ["-m", "bench.engines_program", json.dumps(job)]
        if self.engine == "jax":
            self._run_jax(job, folder / "log")
        else:
            modules = [BESIDE_TORCH[self.engine]] if self.engine in BESIDE_TORCH else []
            modules += MODULES[model] if self.engine != "megatron" else []
            fork(self.ranks, script, folder / "log", modules, DS_ACCELERATOR="cpu")
        return dict(json.loads(told.read_text()))

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


def _megatron(ranks: int, names: Names = WHOLE, **options: Any) -> Layout:
    return Layout("megatron", ranks, {"world": ranks, **options}, names)


ANY_MODEL = {
    "one process": Layout("plain", 1),
    "FSDP2, 2": Layout("plain", 2, {"dp": 2}),
    "FSDP2 × TP, 2 × 2": Layout("plain", 4, {"dp": 2, "tp": 2}),
}
FLAT: dict[str, Any] = {"optimizer": "dp_reshardable"}
FULL: dict[str, Any] = {"optimizer": "fully_reshardable"}
FSDP: dict[str, Any] = {"fsdp": "optim_grads_params", "optimizer": "fsdp_dtensor"}
EXPERTS = {"experts": 4, "silu": True}
MODELS = {
    "dense": {
        **ANY_MODEL,
        "ZeRO-1, 2": Layout("deepspeed", 2, {"zero": 1}),
        "ZeRO-3, 2": Layout("deepspeed", 2, {"zero": 3}),
        "DeepSpeed PP × DP, 2 × 2": Layout("deepspeed", 4, {"zero": 1, "pp": 2}, PIPELINE),
        "DeepSpeed PP × TP, 2 × 2": Layout("deepspeed", 4, {"zero": 1, "pp": 2, "tp": 2}, PIPELINE),
        "Megatron DP, 2": _megatron(2, **FULL),
        "Megatron TP × PP, 2 × 2": _megatron(4, tp=2, pp=2, **FLAT),
        "Megatron-FSDP, 2": _megatron(2, **FSDP),
        "JAX, 4 devices": Layout("jax", 1, {"devices": 4}, JAX),
    },
    "moe": {
        **ANY_MODEL,
        "ZeRO-3, 2": Layout("deepspeed", 2, {"zero": 3}),
        "AutoEP × ZeRO-1, 2": Layout("deepspeed", 2, {"zero": 1, "ep": 2}, AUTOEP),
        "AutoEP × ZeRO-2 × DP, 2 × 2": Layout("deepspeed", 4, {"zero": 2, "ep": 2}, AUTOEP),
        "AutoEP × ZeRO-3 × DP, 2 × 2": Layout("deepspeed", 4, {"zero": 3, "ep": 2}, AUTOEP),
        "Megatron EP, 2": _megatron(2, MEGATRON, ep=2, **EXPERTS, **FULL),
        "Megatron TP × PP × EP, 2 × 2 × 2": _megatron(
            4, MEGATRON, tp=2, pp=2, ep=2, **EXPERTS, **FLAT
        ),
        "Megatron TP × EP × ETP, 2 × 2 × 2": _megatron(
            4, MEGATRON, tp=2, ep=2, etp=2, **EXPERTS, **FLAT
        ),
        "Megatron-FSDP, 2": _megatron(2, MEGATRON, **EXPERTS, **FSDP),
        "JAX, 4 devices": Layout("jax", 1, {"devices": 4}, JAX_EXPERTS),
    },
}


def main(arguments: list[str] | None = None) -> None:
    """Print the matrix of each model."""
    every = dict.fromkeys(name for layouts in MODELS.values() for name in layouts)
    parser = argparse.ArgumentParser(prog="python -m bench.engines")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=", ".join(every))
    parser.add_argument("--model", choices=MODELS, help="default: all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the cells there")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same commit was interrupted"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.layouts) - every.keys():
        parser.error(f"there is no layout {', '.join(sorted(unknown))}")
    os.environ["PYTHONPATH"] = str(ROOT)
    rows: list[dict[str, Any]] = []
    reasons: list[str] = []
    for model in [options.model] if options.model else MODELS:
        names = [name for name in MODELS[model] if name in (options.layouts or every)]
        begin(FOLDER / model, names, resume=options.resume)
        cells, why = matrix(model, names)
        begin(FOLDER / model, [], resume=False)
        print(f"{TITLES[model]}\n\n{text_of(names, cells)}\n")
        rows += cells.values()
        reasons += why
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if reasons:
        print("\n".join(reasons))
        sys.exit(1)


def begin(top: Path, names: list[str], *, resume: bool) -> None:
    """Remove what was made of a matrix before, unless it is resumed."""
    record, begun = top / "begun.json", [commit(), *names]
    same = record.exists() and json.loads(record.read_text()) == begun
    if not (resume and same and "with changes" not in begun[0]):
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir(parents=True)
        record.write_text(json.dumps(begun))


def text_of(names: list[str], cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """The table of cells."""
    letters = [chr(ord("A") + n) for n in range(len(names))]

    def cell(source: str, target: str) -> str:
        made = cells[source, target]
        return f"{'=' if made['equal'] else '≠'} {made['tensors']}"

    lines = [
        [f"{letter} {source}", *(cell(source, target) for target in names)]
        for letter, source in zip(letters, names, strict=True)
    ]
    return table(["saved by", *(f"loaded by {letter}" for letter in letters)], lines)


def matrix(model: str, names: list[str]) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """The cells of a model by source and target, and why some are not equal."""
    layouts, top = MODELS[model], FOLDER / model
    numbers = {name: str(n) for n, name in enumerate(names)}
    saved = {name: top / numbers[name] / "ck" for name in names}
    losses = {
        name: layouts[name].run(model, top / numbers[name], {"save": str(place), "loads": {}})[
            "losses"
        ][""]
        for name, place in saved.items()
    }
    cells, reasons = {}, []
    for target in names:
        layout, folder = layouts[target], top / numbers[target] / "from"
        loads = {numbers[s]: layout.load(layouts[s], saved[s]) for s in names}
        told = layout.run(model, folder, {"save": "", "loads": loads})
        for source in names:
            number = numbers[source]
            tensors, why = differences(saved[source], layouts[source], folder / number, layout)
            why += told["problems"][number]
            for expected, loss in zip(losses[source], told["losses"][number], strict=True):
                if not math.isclose(loss, expected, rel_tol=ROUNDING):
                    why.append(f"a loss is {loss}, and was {expected}")
            cells[source, target] = {
                "model": model,
                "source": source,
                "target": target,
                "equal": not why,
                "tensors": tensors,
            }
            reasons += [f"{model}: {source} → {target}: {reason}" for reason in why]
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
    ck = ucformat.open(place, view=layout.names.view or None)
    out: dict[tuple[str, str], Any] = {}
    for key in sorted(ck.tensors):  # `master` before `weight`
        state = "weight" if key.state == "master" else key.state
        if state not in BESIDE:
            out.setdefault((key.name, state), ck[key][...])
    return out


if __name__ == "__main__":
    main()
