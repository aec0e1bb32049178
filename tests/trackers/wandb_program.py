"""Trainings that log to offline runs of W&B: run as a program, in the folder where they are."""

import sys
from typing import Any

import wandb

common: dict[str, Any] = {"mode": "offline", "dir": ".", "project": "p"}
with wandb.init(
    name="run7", id="one", config={"lr": 1e-3, "model": {"layers": 4}}, **common
) as run:
    for step in (50, 100, 200):
        run.log({"loss": 1 / step, "text": "a", "nested": {"a": step}, "flag": True}, step=step)
    run.log({"loss": float("nan"), "up": float("inf")}, step=300)
    run.config.update({"late": 2, "api_key": "0123456789"})
    run.log({"long": 1.0, "words": "x" * 100_000}, step=300)  # longer than a block
# the steps of Trainer and Lightning are not W&B's count of rows; the run is resumed once
for first in (100, 200):
    with wandb.init(name="run8", id="two", config={"first": first}, **common) as run:
        for step in (first, first + 100):
            run.log({"train/loss": step / 7, "train/global_step": step})
with wandb.init(id="three", **common) as run:
    run.log({"score": 0.5}, step=200)
    artifact = wandb.Artifact("a", type="model", metadata={"ucformat.id": sys.argv[1]})
    with artifact.new_file("ucformat.json") as file:
        file.write("{}")
    run.log_artifact(artifact)
