"""What is refused, what does not fit, and what is kept besides tensors: each function is a task of `train.py`.

Each writes facts.json for the tests; what they would see on two ranks must be the same, and is
checked here.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

import ucformat
import ucformat.torch
import ucformat.torch.deepspeed as ucd
from tests.engines.deepspeed.live.train import (
    Task,
    ZeRO,
    config,
    losses,
    model_of,
    optimizer_of,
    said,
    tokens_of,
)
from ucformat.engines.deepspeed.live_engine import inspect_engine, optimizer_tensors


def write(folder: Path, found: dict[str, Any]) -> None:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    assert all(f == found for f in everybody), everybody
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "facts.json").write_text(json.dumps(found))


def made(name: str = "", **spec: Any) -> ZeRO:
    return ZeRO(Task(name, **{"zero": 1, "empty": False, **spec}))


def refusals(folder: Path) -> None:
    """Engines that hold what cannot be saved yet."""
    found: dict[str, str] = {}
    half = made(accumulate=2)
    half.engine.backward(half.engine(torch.zeros(3, 5, dtype=torch.int64)).sum())
    half.engine.step()
    found["half a step"] = said(lambda: ucd.save(half.engine, str(folder / "half")))
    half.close()
    trainer = made(zero=3)
    engine = trainer.engine
    ucd.save(engine, str(folder / "good"))
    for name, value in (
        ("has_moe_layers", True),
        ("mp_world_size", 2),
        ("zenflow", True),
        ("optimizer.swap_optimizer", True),
        ("optimizer.offloaded_states", {"hp_params"}),
    ):
        owner, _, attribute = name.rpartition(".")
        holder = getattr(engine, owner) if owner else engine
        kept = getattr(holder, attribute)
        setattr(holder, attribute, value)
        found[name] = said(lambda: ucd.save(engine, str(folder / "no")))
        found[f"load {name}"] = said(lambda: ucd.load(engine, str(folder / "good")))
        setattr(holder, attribute, kept)
    for name in ("names", "group"):
        wrong: Any = {name: 1}
        found[name] = said(partial(ucd.save, engine, str(folder / "no"), **wrong))
    found["no engine"] = said(lambda: ucd.save(trainer.net, str(folder / "no")))
    found["committed"] = str((folder / "no").exists() or (folder / "half").exists())
    trainer.close()
    write(folder, found)


class Extra(torch.nn.Module):
    """Keeps a value that is neither parameter nor buffer."""

    value: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def client(folder: Path) -> None:
    """Values of the user's own: shared, large tensors, each rank's, and a module's."""
    trainer = made(zero=3, empty=True)
    trainer.net.extra = extra = Extra()
    extra.value = {"of": [7, 0.5]}
    rank = dist.get_rank()
    state: dict[Any, Any] = {"epoch": 3, "of": (1, 2.5), 7: {"$odd": None}, "few": torch.arange(3)}
    state["ema"] = {"a": torch.arange(20000.0)}
    ucd.save(
        trainer.engine,
        str(folder / "zarr"),
        client_state={**state, "own": ucformat.torch.PerRank([rank])},
    )
    unlike = said(lambda: ucd.save(trainer.engine, str(folder / "no"), client_state={"rank": rank}))
    extra.value = None
    loaded = ucd.load(trainer.engine, str(folder / "zarr"), strict=True)
    assert extra.value == {"of": [7, 0.5]}
    found = loaded.client_state
    assert found.pop("own") == [rank]
    assert torch.equal(found.pop("few"), torch.arange(3))
    assert torch.equal(found.pop("ema")["a"], torch.arange(20000.0))
    trainer.close()
    facts = {
        "client": {str(k): v for k, v in found.items()},
        "ranks": {k: list(v) for k, v in loaded.client_ranks.items()},
        "unlike": unlike,
    }
    write(folder, facts)


def increments(folder: Path) -> None:
    """A save on the one before is loaded bit for bit; what is frozen is not written again."""
    trainer = made(zero=3, dtype="bf16")
    trainer.step(0)
    ucd.save(trainer.engine, str(folder / "first"), form="packed", codec="raw")
    loaded = made(zero=3, dtype="bf16")
    saved = ucd.save(trainer.engine, str(folder / "same"), form="packed", base=True)
    trainer.step(1)
    ucd.save(trainer.engine, str(folder / "second"), form="packed", base=str(folder / "first"))
    good = bool(loaded.load(str(folder / "second"), certify=True).certificate)
    trainer.close()
    loaded.close()
    bases = [
        [base.url for base in ucformat.open(str(folder / name)).manifest.bases]
        for name in ("same", "second")
    ]
    write(folder, {"good": good, "bases": bases, "referenced": saved.referenced > 0})


def certificates(folder: Path) -> None:
    """What one rank spoils of masters, of moments and of the module is named, with the rank."""
    found: dict[str, Any] = {}
    for zero in (1, 3):
        trainer = made(zero=zero, dtype="bf16")
        trainer.step(0)
        url = str(folder / f"zero{zero}")
        ucd.save(trainer.engine, url, certify=True)
        again = made(zero=zero, dtype="bf16")
        good = again.load(url, certify=True).certificate
        entry = next(e for e in optimizer_tensors(inspect_engine(again.engine)) if e.parts)
        name, (_, _, at) = list(entry.parts.items())[-1]
        told: list[Any] = [None, None]
        dist.all_gather_object(told, name)
        rows = {"good": [bool(good), len(good.equal)], "name": told[1]}
        for what, memory, value in (
            ("master", entry.tensor.detach(), 7.0),
            ("moment", entry.states["exp_avg"], 0.0),
        ):
            kept = memory[at].clone()
            if dist.get_rank() == 1:
                memory[at] = value + kept if value else 9.0
            bad = ucd.certify(again.engine, url)
            rows[what] = [[e.name, e.state, list(e.ranks)] for e in bad.different]
            memory[at] = kept
        weight = again.net.layers["0"].up.weight
        if dist.get_rank() == 1:
            memory = getattr(weight, "ds_tensor", weight)
            memory.data.view(-1)[0] += 3
        bad = ucd.certify(again.engine, url)
        rows["module"] = [[e.name, e.state, list(e.ranks)] for e in bad.different]
        rows["weights"] = bool(ucd.certify(again.engine, url, optimizer=False, leave="none"))
        found[str(zero)] = rows
        again.close()
        trainer.close()
    write(folder, found)


def mismatches(folder: Path) -> None:
    """A checkpoint that does not fit changes nothing; what can be chosen to be left out is."""
    found: dict[str, Any] = {}
    other = made(groups=1)
    other.step(0)
    ucd.save(other.engine, str(folder / "one"))
    other.close()
    untouched = made()
    found["expected"] = losses(untouched, 0)
    untouched.close()
    trainer = made()
    trainer.net.register_buffer("more", torch.zeros(2))
    trainer.net.layers["0"].register_buffer("other", torch.zeros(2))
    net = model_of(Task("", empty=False))
    ucformat.torch.save({"model": net}, str(folder / "weights"))
    found["missing"] = said(lambda: trainer.load(str(folder / "one")))
    found["weights alone"] = said(lambda: trainer.load(str(folder / "weights")))
    found["losses"] = losses(trainer, 0)
    trainer.close()
    trainer = made(load="x")  # another seed
    report = trainer.load(str(folder / "weights"), optimizer=False)
    found["report"] = [bool(report), report.missing, report.unexpected]
    found["weights"] = all(
        torch.equal(a, b) for a, b in zip(net.parameters(), trainer.net.parameters(), strict=True)
    )
    net.register_buffer("spare", torch.zeros(2))
    ucformat.torch.save({"model": net}, str(folder / "more"))
    found["left"] = [
        [bool(report), report.left]
        for leave in ((), "spare", ["spa*"])
        for report in [trainer.load(str(folder / "more"), optimizer=False, leave=leave)]
    ]
    trainer.close()
    write(folder, found)


def unequal(folder: Path) -> None:
    """Parameters that were stepped on less often, or never: plain torch counts for each, flat groups do not."""
    found: dict[str, Any] = {}
    task = Task("", zero=0, empty=False, groups=1)
    net = model_of(task)
    optimizer = optimizer_of(task, net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    late = {"layers.0.gain": 1, "norm.bias": 3}
    for step in range(3):
        for name, p in net.named_parameters():
            p.grad = torch.ones_like(p) if step >= late.get(name, 0) else None
        optimizer.step()
    state = {"model": net, "optimizer": optimizer, "lr_scheduler": scheduler}
    ucformat.torch.save(state, str(folder / "late"))
    net.layers["0"].gain.grad = None
    optimizer.state[net.layers["0"].gain]["step"].fill_(3)
    ucformat.torch.save(state, str(folder / "never"))
    for zero in (0, 1, 3):
        trainer = made(zero=zero, groups=1, load="x")
        found[f"late {zero}"] = said(partial(trainer.load, str(folder / "late")))
        trainer.close()
        trainer = made(zero=zero, groups=1, load="x")
        trainer.load(str(folder / "never"))
        trainer.save_own(folder / f"zero{zero}")
        trainer.close()
    write(folder, found)


def renamed(folder: Path) -> None:
    """Under other names: the two layers change places."""
    trainer = made(zero=3)
    trainer.step(0)
    ucd.save(trainer.engine, str(folder / "saved"))
    trainer.close()
    trainer = made(load="x")
    none = said(lambda: trainer.load(str(folder / "saved"), rename=lambda n: f"model.{n}"))
    trainer.load(
        str(folder / "saved"),
        rename={r"layers\.0\.(.*)": r"layers.1.\1", r"layers\.1\.(.*)": r"layers.0.\1"},
    )
    ucd.save(trainer.engine, str(folder / "swapped"))
    trainer.close()
    write(folder, {"none": none})


class WithLoss(torch.nn.Module):
    """A model that answers with its loss."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.net(tokens)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def guide(folder: Path) -> None:
    """The script of the guide, as it is printed: once through under ZeRO 1, and from its middle on under ZeRO 3."""
    page = (Path(__file__).parents[4] / "docs" / "guides" / "deepspeed.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    for zero, resume, to in ((1, None, "whole"), (3, "whole/2", "resumed")):
        task = Task("", zero=zero, warmup=True, empty=False, load=resume or "")
        names: dict[str, Any] = {
            "model": WithLoss(model_of(task)),
            "config": {**config(task), "optimizer": optimizer},
            "resume": resume and str(folder / resume),
            "folder": str(folder / to),
            "batch": lambda step: tokens_of(step).chunk(dist.get_world_size())[dist.get_rank()],
            "steps": 4,
            "every": 2,
        }
        exec(compile(code, "deepspeed.md", "exec"), names)  # noqa: S102
        names["engine"].destroy()
    write(folder, {})
