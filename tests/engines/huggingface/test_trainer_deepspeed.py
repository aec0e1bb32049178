"""The guide that continues a run of stock Trainer and DeepSpeed on another number of ranks, and such a run killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import ucformat
from tests.forkserver import Program
from tests.forkserver import run as forked
from tests.patience import PATIENCE
from tests.torch.running import MODULES, environment
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.retention import load_policy
from ucformat.jobs.register import register, reindex

pytestmark = [pytest.mark.engine, pytest.mark.matrix]  # programs that import both frameworks

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "trainer_deepspeed.md").read_text()
#: DeepSpeed first: the others look for it when they are imported.
BOTH = ("tests.engines.beside", "transformers.trainer", "accelerate")
# the last file but one of a Trainer's checkpoint
UNFINISHED = "transformers.trainer_callback:TrainerState.save_to_json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program of the guide."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    return tmp_path


def train(folder: Path, ranks: int, script: str, kill: str = "") -> dict[int, float]:
    """The losses that a training printed, on ranks that are forked with both frameworks imported."""
    (log := folder / "log.txt").unlink(missing_ok=True)
    argv = [*(["-m", "tests.torch.killed", *kill.split()] if kill else []), *script.split()]
    variables = environment({"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "PYTHONSAFEPATH": ""})
    program = Program(argv, variables, [str(log)], ranks=ranks, cwd=str(folder), modules=BOTH)
    codes = forked(sys.executable, MODULES, program, PATIENCE)
    text = log.read_text()
    assert -9 in codes if kill else not any(codes), f"{script} ended with {codes}:\n{text[-3000:]}"
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", text)}


def shell(folder: Path, line: str) -> None:
    command = line.replace("ucp ", f"{sys.executable} -m ucformat.cli ")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_guide(folder: Path) -> None:
    """On two ranks, and then on one: the loss goes on as it would have."""
    (lines,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    losses = []
    for line in lines.splitlines():
        words = line.removeprefix("$ ").split()
        if words[0] == "torchrun":
            losses.append(train(folder, int(words[2]), " ".join(words[3:])))
        else:
            shell(folder, " ".join(words))
    uninterrupted, continued = losses
    assert len(continued) == 6
    assert continued == pytest.approx(uninterrupted, abs=1e-4)


def test_a_run_that_is_killed_and_continued(folder: Path) -> None:
    """On 1, 2 and 3 ranks; its checkpoints are found, kept by a policy that is none for them, exported and loaded."""
    whole = train(folder, 1, "train.py 6")
    shutil.rmtree(folder / "run")
    train(folder, 1, "train.py 6", f"{UNFINISHED} 2")
    places = {2: folder / "run" / "checkpoint-2"}
    for step, ranks, kill in ((2, 2, f"{UNFINISHED} 2"), (4, 3, "")):
        place = folder / f"for-{ranks}" / f"checkpoint-{step}"
        shell(folder, f"ucp export deepspeed {places[step]} {place} --world {ranks}")
        shell(folder, f"cp {places[step]}/*.json {places[step]}/scheduler.pt {place}")
        losses = train(folder, ranks, f"train.py {6 // ranks} {place}", kill)
        places[step + 2] = folder / "again" / f"checkpoint-{step + 2}"
    assert losses == pytest.approx(whole, abs=1e-4)

    with Catalog(str(folder / "catalog.db")) as catalog:
        register(folder, catalog, recursive=True)
        assert {e.urls[0] for e in catalog.find("metric.loss < 100 and run = 'again'")} == {
            str(places[4]),
            str(places[6]),
        }
        (folder / "policy.yaml").write_text("version: 1\nkeep: {last: 1}\n")
        plan = catalog.retain(load_policy(folder / "policy.yaml"))
        assert not plan.keep + plan.delete
        assert {kept.reasons[0].split(":")[0] for kept in plan.untouched} == {"not ours"}
        shutil.rmtree(places[4])
        assert reindex(folder / "again", catalog, forget=True).forgotten == (str(places[4]),)
        assert [e.step for e in catalog.find("metric.loss < 100 and run = 'again'")] == [6]

    exported = ucformat.export(places[6], folder / "model", "safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(exported.url).state_dict()
    ck = ucformat.open(places[6])
    assert all((loaded[name].numpy() == ck[name][...]).all() for name in ck.names())
    assert len(loaded) == len(ck.names())
