"""Export of 1 GB of weights as safetensors: ucformat, `cp` + `sync -f`, and what PyTorch and DeepSpeed offer.

`python -m bench.export [--rounds N]`. Sources hold the same weights: a universal checkpoint of
arrays, a folder of safetensors, PyTorch DCP; and, with a third as many, a real ZeRO-3 checkpoint.
Everything is in the page cache, rounds are interleaved, and `cp` and ucformat end when all is
durable. Only the call is timed in each process, so that nobody pays for imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import ucformat
from bench.common import OUT, engine_environment, median, ours, real_checkpoint, table, targets
from tests.engines import engine

if TYPE_CHECKING:
    from pathlib import Path

EXPORT = """
import sys, time, resource
import ucformat, ucformat.jobs.export
def memory():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1e3
import ucformat.exporters.safetensors
ucformat.open(sys.argv[1])  # imports what reads it
before = memory()
begun = time.perf_counter()
ucformat.export(sys.argv[1], sys.argv[2], "safetensors", **eval(sys.argv[3]))
print(time.perf_counter() - begun, memory() - before)
"""
DCP = """
import sys, time, warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
begun = time.perf_counter()
dcp_to_torch_save(sys.argv[1], sys.argv[2])
print(time.perf_counter() - begun, 0)
"""
CONSOLIDATE = """
import sys, time, os
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
os.makedirs(sys.argv[2])
names = {name: 1 for name in eval(sys.argv[3])}
begun = time.perf_counter()
consolidate_safetensors_files(sys.argv[1], sys.argv[2], names)
print(time.perf_counter() - begun, 0)
"""
FP32 = """
import sys, time
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
begun = time.perf_counter()
torch.save(get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]), sys.argv[2])  # as zero_to_fp32.py does
print(time.perf_counter() - begun, 0)
"""
SAVE_DCP = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
state = load_file(sys.argv[1] + "/model.safetensors")
dcp.save(state, checkpoint_id=sys.argv[2])
dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(sys.argv[3], {n: 1 for n in state}, save_distributed=True))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    folder = OUT / "export"
    target = folder / "target"
    names = _sources(folder)
    fp32 = folder / "fp32"
    commands: dict[str, list[str]] = {
        "`cp -r` + `sync -f`": [],
        "universal": [ours(), "-c", EXPORT, str(folder / "universal"), str(target), "{}"],
        "safetensors": [ours(), "-c", EXPORT, str(folder / "model"), str(target), "{}"],
        "DCP": [ours(), "-c", EXPORT, str(folder / "dcp"), str(target), "{}"],
        "hard link": [
            ours(),
            "-c",
            EXPORT,
            str(folder / "model"),
            str(target),
            "dict(link='hard', read_only=True)",
        ],
        "`dcp_to_torch_save`": [ours(), "-c", DCP, str(folder / "dcp"), str(target)],
        "`consolidate_safetensors_files`": [
            ours(),
            "-c",
            CONSOLIDATE,
            str(folder / "hf"),
            str(target),
            repr(names),
        ],
    }
    zero = real_checkpoint()
    tag = zero / (zero / "latest").read_text()
    commands["ZeRO-3"] = [ours(), "-c", EXPORT, str(tag), str(target), "{}"]
    try:
        commands["`zero_to_fp32` of it"] = [
            str(engine("deepspeed")),
            "-c",
            FP32,
            str(zero),
            str(fp32),
        ]
    except RuntimeError as error:
        print(error, file=sys.stderr)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    peaks: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            _clean(target)
            _clean(fp32)
            taken, peak = _copied(folder / "model", target) if not command else _timed(command)
            seconds[name].append(taken)
            peaks[name].append(peak)
    for file in (folder / "model").iterdir():
        file.chmod(0o644)
    took = {name: median(values) for name, values in seconds.items()}
    size = (folder / "model" / "model.safetensors").stat().st_size
    load = os.getloadavg()[0]
    of_zero = f"ZeRO-3: {_weights(tag) / 1e9:.2f}"
    print(
        f"{size / 1e9:.2f} GB of weights ({of_zero}), {rounds} interleaved rounds, load average {load:.1f}:\n"
    )
    cp = took["`cp -r` + `sync -f`"]
    rows = [
        [
            name,
            f"{took[name]:.3f} ({min(v):.3f}–{max(v):.3f})",
            f"{took[name] / cp:.2f}",
            f"{max(peaks[name]):.0f}",
        ]
        for name, v in seconds.items()
    ]
    print(table(["", "seconds, median (range)", "× cp", "MB above the start"], rows))
    peer = min(took["`dcp_to_torch_save`"], took["`consolidate_safetensors_files`"])
    of_fp32 = took.get("`zero_to_fp32` of it", 0) / took["ZeRO-3"]
    fp32_of = [("`zero_to_fp32` ÷ export of ZeRO-3", ">= 10", of_fp32)] if of_fp32 else []
    print(
        targets(
            ("export of arrays, × cp", "<= 1.3", took["universal"] / cp),
            ("export of DCP, × cp", "<= 1.3", took["DCP"] / cp),
            (
                "MB above the start",
                "<= 300",
                max(max(peaks[n]) for n in ("universal", "safetensors", "DCP", "ZeRO-3")),
            ),
            (
                "`dcp_to_torch_save` ÷ export of DCP",
                ">= 10",
                took["`dcp_to_torch_save`"] / took["DCP"],
            ),
            ("the faster of PyTorch's two ÷ export of DCP", ">= 10", peer / took["DCP"]),
            *fp32_of,
            ("hard links, ms", "<= 50", 1e3 * took["hard link"]),
        )
    )


def _sources(folder: Path) -> list[str]:
    """Make the sources, once; returns the names of the tensors."""
    shapes = {"model.embed_tokens.weight": (32000, 1024)}
    parts = {
        "q": (1024, 1024),
        "k": (1024, 1024),
        "up": (4096, 1024),
        "down": (1024, 4096),
        "gate": (4096, 1024),
    }
    for layer in range(16):
        shapes |= {
            f"model.layers.{layer}.{name}_proj.weight": shape for name, shape in parts.items()
        }
    if not (folder / "universal" / "manifest.json").exists():
        from safetensors.numpy import save_file

        shutil.rmtree(folder, ignore_errors=True)
        (folder / "model").mkdir(parents=True)
        random = np.random.default_rng(0)
        made = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        save_file(made, folder / "model" / "model.safetensors")
        command = [ours(), "-c", SAVE_DCP, *(str(folder / name) for name in ("model", "dcp", "hf"))]
        subprocess.run(command, check=True, capture_output=True)
        ucformat.convert(folder / "model", folder / "universal")
    return list(shapes)


def _weights(tag: Path) -> int:
    return sum(i.nbytes for i in ucformat.open(tag).tensors.values() if i.state == "master")


def _timed(command: list[str]) -> tuple[float, float]:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=engine_environment()
    )
    if done.returncode:
        raise SystemExit(f"{command[:2]} failed:\n{done.stderr[-2000:]}")
    took, peak = done.stdout.split()[-2:]
    return float(took), float(peak)


def _copied(source: Path, target: Path) -> tuple[float, float]:
    begun = time.perf_counter()
    subprocess.run(["sh", "-c", f"cp -r {source} {target} && sync -f {target}"], check=True)
    return time.perf_counter() - begun, 0


def _clean(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    subprocess.run(["sync", "-f", str(OUT)], check=True)


if __name__ == "__main__":
    main()
