"""Saving weights as safetensors files, beside the packed and the Zarr form, in alternated rounds of one run.

`python -m bench.in_place`. Weights of 0.4 GB, alone and with the two moments of Adam, which are
arrays, over FSDP2, and with all matrices cut along columns, on 2 or 4 ranks of one machine over
gloo. Each time is that of the slowest rank; the first round is not counted. The ratio to the packed
form is the median of the rounds' own ratios, since the speed of a shared machine changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import OUT, ROOT, median, table, targets

ROUNDS = 5
STATES = ("weights", "weights and moments")
#: The state, the layout, and the number of ranks.
CASES = (
    (STATES[0], "fsdp2", 2),
    (STATES[0], "fsdp2", 4),
    (STATES[0], "columns", 2),
    (STATES[1], "fsdp2", 2),
)
FORMS = ("packed", "safetensors", "zarr")
LAYERS = 2


def main() -> None:
    """Run all cases, and print the tables."""
    rows, asked = [], []
    for held, kind, world in CASES:
        before = os.getloadavg()[0]
        rounds = measured(world, kind, held)
        for form in FORMS:
            ratios = [r[form] / r["packed"] for r in rounds]
            times = [r[form] for r in rounds]
            cells = [f"{median(times):.2f} ({min(times):.2f}–{max(times):.2f})"]
            cells += [f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"]
            rows.append(
                [
                    f"{held}, {kind}, {world} ranks",
                    form,
                    *cells,
                    f"{before:.1f}–{os.getloadavg()[0]:.1f}",
                ]
            )
            if form == "safetensors":
                asked.append(
                    (
                        f"`save`, safetensors ÷ packed, {held}, {kind}, {world} ranks",
                        "<= 1.1",
                        median(ratios),
                    )
                )
    print(
        table(["state", "form", "seconds (range)", "÷ packed (range)", "load average"], rows) + "\n"
    )
    print(targets(*asked))


def measured(world: int, kind: str, held: str) -> list[dict[str, float]]:
    """The seconds of each form in each round."""
    folder = OUT / f"in-place-{world}-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "UCP_CATALOG": "none",
    }
    program = [str(ROOT / "bench/in_place.py"), str(folder), kind, held]
    done = subprocess.run(
        [*run, *program], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    shutil.rmtree(folder)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ranks(folder: Path, kind: str, held: str) -> None:
    """What each rank does; rank 0 prints the seconds of each round after the first."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import ucformat.torch as uct
    from bench import train_program

    dist.init_process_group("gloo")
    train_program.LAYERS = LAYERS
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = train_program.state(mesh, kind, fill=True)
    moments: dict[str, Any] = {
        name: {
            "exp_avg": t.detach() * 0.5,
            "exp_avg_sq": t.detach() * 0.25,
            "step": torch.tensor(3.0),
        }
        for name, t in model.items()
    }
    optimizer = {"state": moments, "param_groups": [{"params": list(model), "lr": 0.1}]}
    state = {"model": model} if held == STATES[0] else {"model": model, "optim": optimizer}
    for number in range(ROUNDS + 1):
        seconds = {}
        for form in FORMS:
            place = train_program.fresh(folder, form)
            act = partial(uct.save, state, place, form=form)  # type: ignore[arg-type]
            seconds[form] = train_program.timed(act)[0]
        if number and not dist.get_rank():
            print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ranks(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main()
