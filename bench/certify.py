"""What certificates and the comparison of replicas cost, beside loads and saves of the same state.

`python -m bench.certify`. The Llama-like model of 1.1 GB of `bench.train`, over FSDP2 and as replicas
(DDP), and 20,000 small tensors, on ranks of one machine over gloo; alternated rounds, of which the
first is not counted; saved below `bench/out`; each time is that of the slowest rank. Before a cold
load, the pages of the files are dropped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench.common import OUT, ROOT, median, table, targets

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
WORLDS = (1, 2, 4)
FORMS = ("zarr", "packed")
FOLDER = OUT / "certify"
SMALL = "20,000 tensors"


def main() -> None:
    rows, asked = [], []
    for world in WORLDS:
        for name, seconds in measured(world).items():
            load, cold, certificate, save, certified, unchecked = (
                median(seconds[what])
                for what in (
                    *("load", "cold load", "certificate"),
                    *("save", "certified save", "unchecked save"),
                )
            )
            rows.append(
                [
                    f"{name}, {world} ranks",
                    *(f"{1e3 * value:.0f}" for value in (load, cold, certificate)),
                    f"{certificate / load:.2f}",
                    f"{certificate / cold:.2f}",
                    *(f"{1e3 * value:.0f}" for value in (save, certified, unchecked)),
                    f"{unchecked / save:.2f}",
                    f"{save / certified:.2f}",
                ]
            )
            label = f"{name}, {world} ranks"
            asked.append((f"certificate / load, {label}", "<= 0.15", certificate / load))
            asked.append((f"certificate / cold load, {label}", "<= 0.15", certificate / cold))
            asked.append((f"unchecked save / save, {label}", ">= 0.9", unchecked / save))
    print(
        table(
            [
                "",
                "load, ms",
                "cold load, ms",
                "certificate, ms",
                "/ load",
                "/ cold load",
                "save, ms",
                "certify=True, ms",
                'replicas="first", ms',
                "speed / unchecked",
                "speed certified",
            ],
            rows,
        )
    )
    print("\n" + targets(*asked))


def measured(world: int) -> dict[str, dict[str, list[float]]]:
    """The seconds of each round, by state and measure."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "-m", "bench.certify"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    out = FOLDER / "out.json"
    subprocess.run([sys.executable, *command, str(out)], check=True, cwd=ROOT, env=environment)
    found: dict[str, dict[str, list[float]]] = json.loads(out.read_text())
    shutil.rmtree(FOLDER)
    return found


def be_a_rank(out: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {
        f"{name}, {form}": rounds_of(make(), form)
        for name, make in STATES.items()
        for form in (FORMS if name != SMALL else FORMS[1:])
    }
    if not dist.get_rank():
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def rounds_of(state: dict[str, Any], form: Any) -> dict[str, list[float]]:
    from ucformat.torch import load, save

    found: dict[str, list[float]] = {}
    place = FOLDER / "ck"
    for number in range(ROUNDS + 1):
        acts: dict[str, Callable[[], object]] = {
            "save": lambda: save(state, place, form=form, overwrite=True),
            "certified save": lambda: save(state, place, form=form, overwrite=True, certify=True),
            "unchecked save": lambda: save(
                state, place, form=form, overwrite=True, replicas="first"
            ),
        }
        seconds = {name: timed(act) for name, act in acts.items()}
        drop_pages(place)
        seconds["cold load"] = slowest(load(state, place).seconds)
        report = load(state, place, certify=True)
        assert report.certificate is not None
        seconds |= {
            "certificate": slowest(report.certificate.seconds),
            "load": slowest(report.seconds),
        }
        for name, value in seconds.items():
            if number:
                found.setdefault(name, []).append(value)
    return found


def drop_pages(place: Path) -> None:
    dist.barrier()
    if not dist.get_rank():
        for file in place.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
    dist.barrier()


def timed(act: Callable[[], object]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    act()
    return slowest(time.perf_counter() - begun)


def slowest(seconds: float) -> float:
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, seconds)
    return max(values)


def sharded() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    from bench import train_program

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {"model": train_program.state(mesh, "fsdp2", fill=True)}


def replicated() -> dict[str, Any]:
    from bench import train_program

    torch.manual_seed(0)
    return {"model": {name: torch.randn(shape) for name, shape in train_program.shapes().items()}}


def small() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": {f"layers.{n}.weight": torch.randn(32) for n in range(20_000)}}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "FSDP2": sharded,
    "replicas": replicated,
    SMALL: small,
}

if __name__ == "__main__":
    if sys.argv[1:]:
        be_a_rank(Path(sys.argv[1]))
    else:
        main()
