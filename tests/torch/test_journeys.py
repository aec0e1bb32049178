"""The programs of the guides as users drive them: on 1, 2 and 3 ranks, killed while they save, and their checkpoints.

What is resumed goes on with the losses of a run that nothing interrupts. Checkpoints are found by
metric, retained and purged, exported, and loaded by the loader that the ecosystem has.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

import ucformat
from tests.forkserver import Program
from tests.forkserver import run as forked
from tests.patience import PATIENCE
from tests.torch.running import MODULES, environment, fork
from ucformat.cli.main import ucp

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
KILLED = -9


@dataclass(frozen=True)
class Journey:
    """How the program of a guide is driven.

    Args:
        page: the guide.
        runs: the commands on 1, 2 and 3 ranks, the first two with when they are killed
            (`tests/torch/killed.py`).
        loads: what is exported, `{last}` being the last checkpoint, and a program that loads it
            into `tensors`.
        changes: what a user changes in the program.
        modules: what the program imports.
        around: what the lines of a guide that has no program need to be `train.py`.
        before: a program that writes what the training begins with.
        metric: whether the program records its loss, or it is added by `ucp metric`.
        reindex: whether nothing records what was committed by a program that was killed.
        whole: the command of a run that nothing interrupts, if it is another than the first.
    """

    page: str
    runs: tuple[tuple[str, str], ...]
    loads: tuple[str, str]
    changes: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    around: str = ""
    before: str = ""
    metric: bool = False
    reindex: bool = False
    whole: str = ""

    @property
    def slow(self) -> bool:
        """Whether its libraries take long to import, or processes that write to start."""
        return bool(self.modules) or self.page in ("fsdp2.md", "training.md")

    def write(self, folder: Path) -> None:
        """Write its programs, and run the first."""
        folder.mkdir()
        text = (ROOT / "docs" / "guides" / self.page).read_text()
        for name, code in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL):
            of_mine = self.changes.items() if self.runs[0][0].startswith(name) else ()
            assert all(old in code for old, _ in of_mine), self.page
            (folder / name).write_text(
                reduce(lambda text, change: text.replace(*change), of_mine, code)
            )
        if self.around:
            lines = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
            (folder / "train.py").write_text(f"{self.around}\n{lines}")
        if self.before:
            (folder / "before.py").write_text(self.before)
            fork(0, ["before.py"], folder / "log.txt", self.modules, cwd=folder)

    def run(self, ranks: int, command: str, folder: Path, kill: str = "", **env: str) -> str:
        """What one run printed; it fails unless it ends as it should."""
        (log := folder / "log.txt").unlink(missing_ok=True)
        argv = [*(["-m", "tests.torch.killed", *kill.split()] if kill else []), *command.split()]
        more = environment(
            {"PYTHONSAFEPATH": "", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", **env}
        )
        program = Program(
            argv, more, [str(log)], ranks=ranks, cwd=str(folder), modules=self.modules
        )
        codes = forked(sys.executable, MODULES, program, PATIENCE)
        text = log.read_text()
        assert KILLED in codes if kill else not any(codes), (
            f"{command} ended with {codes}:\n{text[-3000:]}"
        )
        return text


def losses(text: str) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([-+.\de]+)", text)
    }


def committed(folder: Path) -> set[str]:
    return {str(file.parent) for file in folder.rglob("manifest.json")}


def table(folder: Path, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(told(folder, "ls", *words, "--json"))["checkpoints"]
    return found


def told(folder: Path, *words: object) -> str:
    """What `ucp` prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(
            ucp, [str(w) for w in words], env={"UCP_CATALOG": str(folder / "catalog.db")}
        )
    assert done.exit_code == 0, done.output
    return done.stdout


_NET = "import torch; net = torch.nn.Sequential(torch.nn.Embedding(1003, 32), torch.nn.Linear(32, 1003))"
_OF_DCP = f"""
import torch.distributed.checkpoint as dcp
{_NET}
state = {{"model": net.state_dict()}}
dcp.load(state, checkpoint_id="out", no_dist=True)
tensors = state["model"]
"""
_OF_TRANSFORMERS = """
from transformers import AutoModelForCausalLM
tensors = AutoModelForCausalLM.from_pretrained("out").state_dict()
"""
_BASE = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=1003, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(config).save_pretrained("base")
"""
_OF_PEFT = """
from peft import PeftModel
from transformers import LlamaForCausalLM
tensors = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "out").state_dict()
"""
_OF_ACCELERATE = f"""
from accelerate import Accelerator
{_NET}
state = torch.load("whole.pt")
torch.save(state["optimizer"], "out/optimizer.bin")
torch.save(state["object"], "out/custom_checkpoint_0.pkl")
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(net.parameters())
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
net, optimizer = accelerator.prepare(net, optimizer)
accelerator.register_for_checkpointing(scheduler)
accelerator.load_state("out")
assert scheduler.last_epoch == 6 and len(optimizer.state_dict()["state"]) == 3
tensors = net.state_dict()
"""
_OF_LIGHTNING = """
exec(open("train.py").read().partition("if args.fsdp:\\n    strategy")[0])
tensors = Module.load_from_checkpoint("out").state_dict()
"""
_OF_TORCH = """
import torch
tensors = torch.load("out/model.pt", weights_only=True)
"""
_OF_NUMPY = """
import numpy, torch
tensors = {name: torch.from_numpy(array) for name, array in numpy.load("out/model.npz").items()}
"""
#: What the lines of DeepSpeed's guide need, and stock DeepSpeed too.
_ENGINE = """
import os, socket, sys
import deepspeed, torch
import torch.distributed as dist


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(1003, 32), torch.nn.Linear(32, 1003))

    def forward(self, tokens):
        loss = torch.nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        dist.all_reduce(mean := loss.detach().clone())
        if dist.get_rank() == 0:
            print(f"step {engine.global_steps + 1}: loss {mean.item() / dist.get_world_size():.6f}", flush=True)
        return loss


def batch(step):
    tokens = torch.randint(1003, (12, 16), generator=torch.Generator().manual_seed(step + 1))
    return tokens[dist.get_rank() :: dist.get_world_size()]


if "RANK" not in os.environ:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
stage, resume = int(sys.argv[1]) if len(sys.argv) > 1 else 2, sys.argv[2] if len(sys.argv) > 2 else None
adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
config = {"train_batch_size": 12, "zero_optimization": {"stage": stage}, "optimizer": adam}
steps, every, folder = 6, 2, "run"
torch.manual_seed(0)
deepspeed.init_distributed("gloo")
model = Net()
"""
_OF_DEEPSPEED = f"""
{_ENGINE}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.load_checkpoint("out")
assert engine.global_steps == 6
tensors = engine.module.state_dict()
"""
_ADAPTED = """MyTrainer(
    get_peft_model(
        LlamaForCausalLM.from_pretrained("base"), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ),
    arguments,"""
_HF = ("transformers", "accelerate", "peft", "ucformat.torch.integrations.huggingface")
_TRAINER = {
    '"run" if resume is None else "again"': '"run"',
    "save_total_limit=2": "save_total_limit=3",
}
_TRAINED = (
    ("train.py 6", "before 2"),
    ("train.py 3 run/checkpoint-2", "after 1"),
    ("train.py 2 run/checkpoint-4", ""),
)

JOURNEYS = {
    "trainer": Journey(
        "huggingface.md",
        _TRAINED,
        ("export safetensors {last} out", _OF_TRANSFORMERS),
        changes=_TRAINER,
        modules=_HF,
        metric=True,
    ),
    "peft": Journey(
        "huggingface.md",
        _TRAINED,
        ("export safetensors {last} out", _OF_PEFT),
        changes={
            **_TRAINER,
            "from transformers import ": "from peft import LoraConfig, get_peft_model\nfrom transformers import ",
            "MyTrainer(LlamaForCausalLM(config), arguments,": _ADAPTED,
        },
        before=_BASE,
        modules=_HF,
        metric=True,
    ),
    "accelerate": Journey(
        "huggingface.md",
        (("loop.py", "before 2"), ("loop.py loop/2", "after 1"), ("loop.py loop/4", "")),
        ("export safetensors {last} out; export torch --nested {last} whole.pt", _OF_ACCELERATE),
        modules=("accelerate",),
        metric=True,
    ),
    "lightning": Journey(
        "lightning.md",
        (
            ("train.py", "before 2"),
            ("train.py --fsdp 2 --resume again/epoch=0.ckpt", "after 1"),
            ("train.py --fsdp 3 --resume again/epoch=1-v1.ckpt", ""),
        ),
        ("convert {last} out", _OF_LIGHTNING),
        changes={'"run" if args.fsdp else "again"': '"again"'},
        modules=("lightning.pytorch", "ucformat.torch.integrations.lightning"),
        metric=True,
    ),
    "deepspeed": Journey(
        "deepspeed.md",
        (
            ("train.py 1", "before 2"),
            ("train.py 2 run/2", "after 1"),
            ("train.py 3 run/4", ""),
        ),  # ZeRO stages, too
        ("export deepspeed {last} out --world 1 --stage 2", _OF_DEEPSPEED),
        modules=("tests.engines.beside", "ucformat.torch.deepspeed"),
        around=_ENGINE,
    ),
    "torchtitan": Journey(
        "torchtitan.md",
        (("train.py run", "before 2"), ("train.py run", "after 1"), ("train.py run", "")),
        ("export dcp {last} out", _OF_DCP),
        changes={"keep_latest_k=2": "keep_latest_k=3"},
    ),
    "dcp": Journey(
        "dcp.md",
        (("loop.py", "before 2"), ("loop.py run/2", "after 1"), ("loop.py run/4", "")),
        ("export dcp {last} out", _OF_DCP),
        metric=True,
        reindex=True,  # DCP's calls have no place for the lineage
    ),
    "fsdp2": Journey(
        "fsdp2.md",
        (
            (
                "train.py --steps 6",
                "before 1",
            ),  # another process commits what is saved in the background
            ("train.py --steps 10 --resume checkpoints/step-4", "after 1"),
            ("train.py --steps 14 --resume checkpoints/last", ""),
        ),
        ("export torch {last} out/model.pt", _OF_TORCH),
        whole="train.py --steps 14",
    ),
    "tensor-parallel": Journey(
        "fsdp2_tp.md",
        (
            ("train.py", "before 2"),
            ("train.py --tp 2 --resume checkpoints/2", "after 1"),
            ("train.py --resume checkpoints/4", ""),
        ),
        ("export npz {last} out/model.npz", _OF_NUMPY),
    ),
    "manager": Journey(
        "training.md",
        (("loop.py 6", "begun 2"), ("loop.py 6", "begun 1"), ("loop.py 6", "")),
        ("export torch {last} out/model.pt", _OF_TORCH),
        changes={"keep=2": "keep=4"},
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[*[pytest.mark.matrix] * j.slow, *[pytest.mark.engine] * bool(j.around)]
        )
        for n, j in JOURNEYS.items()
    ],
)
def test_a_guide_as_it_is_lived(tmp_path: Path, name: str) -> None:
    journey, folder = JOURNEYS[name], tmp_path / "lived"
    for place in (tmp_path / "whole", folder):
        journey.write(place)
    expected = losses(journey.run(1, journey.whole or journey.runs[0][0], tmp_path / "whole"))
    catalog = {"UCP_CATALOG": str(folder / "catalog.db")}
    told_by = [
        journey.run(n, command, folder, kill, **catalog)
        for n, (command, kill) in enumerate(journey.runs, 1)
    ]
    if name == "manager":  # whose ranks have random numbers of their own
        documents_are_used_once(told_by)
    else:
        for part in map(losses, told_by):
            assert part == {step: pytest.approx(expected[step], rel=1e-4) for step in part}
        assert {step for text in told_by for step in losses(text)} == expected.keys()

    if journey.reindex:
        told(folder, "reindex", folder)
    known = table(folder)
    assert {e["urls"][0] for e in known} == committed(folder)
    assert len(known) >= 3
    for entry in [] if journey.metric else known:
        told(folder, "metric", entry["id"], f"loss={100 - entry['step']}")
    what_is_retained(folder)

    last = table(folder)[0]["urls"][0]
    words, program = journey.loads
    for command in words.format(last=last).split("; "):
        told(folder, *command.split())
    (folder / "load.py").write_text(
        f"{program}\nimport torch\ntorch.save(dict(tensors), 'loaded.pt')\n"
    )
    fork(0, ["load.py"], folder / "log.txt", journey.modules, cwd=folder)
    loaded = torch.load(folder / "loaded.pt", weights_only=True)
    ck = ucformat.open(last)
    assert ck.names()
    for weight in ck.names():
        assert torch.equal(loaded[weight], torch.from_numpy(ck[weight][...])), weight


def what_is_retained(folder: Path) -> None:
    """The newest and the best stay; the others, and what is unfinished, are gone from storage and from queries."""
    newest, *others = table(folder)
    by_loss = sorted([newest, *others], key=lambda e: float(e["metrics"]["loss"]))
    (best,) = table(folder, f"metric.loss <= {by_loss[0]['metrics']['loss']!r}")
    assert best == by_loss[0]
    kept = {e["urls"][0] for e in (newest, best)}
    (folder / "policy.yaml").write_text(
        "version: 1\ngrace: 0s\nkeep: {last: 1, best: {metric: loss, count: 1, mode: min}}\n"
    )
    told(folder, "retain", "-p", "policy.yaml", "--apply", "--yes")
    told(folder, "gc", folder, "--grace", "0s", "--apply", "--yes")
    assert committed(folder) == kept
    for query in ([], ["metric.loss < 1000"], ["step >= 0"]):
        assert {e["urls"][0] for e in table(folder, *query)} == kept
    assert {str(file.parents[1]) for file in folder.rglob("attempts/*.json")} == kept
    for place in kept:
        told(folder, "verify", place)


def documents_are_used_once(texts: Iterable[str]) -> None:
    """What the last run that made a step used in it was used in no other."""
    used: dict[int, list[int]] = {}
    for text in texts:
        of_run: dict[int, list[int]] = {}
        for step, numbers in re.findall(r"step (\d+): rank \d used \[([\d, ]*)\]", text):
            of_run.setdefault(int(step), []).extend(int(n) for n in numbers.split(", ") if n)
        used |= of_run
    numbers = [n for of_step in used.values() for n in of_step]
    assert len(numbers) == len(set(numbers)) >= 20
    assert list(used) == list(range(1, 7))
