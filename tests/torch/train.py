"""Train a tiny model under many layouts, one after the other, in one run of torchrun: `train.py JOBS.json`.

JOBS is a list of jobs (`Job` below). Each builds a training and then acts:

- `{"train": n}`: n steps; their losses are kept
- `{"save": url, …}`, `{"load": url, …}`: by `ucformat.torch`, with these options, and `spelling`,
  how the state is given: `live`, the objects themselves; `nested` or `flat`, what PyTorch's
  `get_state_dict` makes of them. `"form": "dcp"` goes through `torch.distributed.checkpoint` alone,
  which proves the harness itself
- `{"async_save": url, …}`, and `{"wait": true}` for the last of them
- `{"truth": path}`: writes what all ranks together hold, whole: `<path>.safetensors` and
  `<path>.json`
- `{"losses": path}`: writes the losses since the last such action
- `{"forget": what}`: loses a part of the state, as a checkpoint might: a state of the optimizer or
  a buffer by its name, `scheduler`, a group's `lr`, or which `batch` is next
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from tests.torch.layouts import Laid, LayoutSpec, cross_entropy, lay, names_of
from tests.torch.leaving import leave
from tests.torch.models import ModelSpec, build_net
from tests.torch.truth import Held, hold, whole_on_first

ROWS, LENGTH = 12, 13  # of the global batch: rows divide by 1, 2, 3 and 4 ranks


@dataclass
class Job:
    """What to build and what to do with it."""

    actions: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"


class Training:
    """A training under one layout: model, optimizer, scheduler, and the steps done."""

    def __init__(self, job: Job) -> None:
        options: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in job.model.items()
        }
        self.spec = ModelSpec(**options)
        self.laid: Laid = lay(build_net(self.spec), self.spec, LayoutSpec(**job.layout))
        self.model = self.laid.model
        self.names = names_of(self.model)
        self.optimizer = make_optimizer(job.optimizer, self.model)
        self.scheduler = LambdaLR(self.optimizer, slower)
        self.done = 0

    def step(self) -> float:
        """One step; the loss over the whole batch, the same on all ranks."""
        tokens = torch.randint(
            self.spec.vocab,
            (ROWS, LENGTH),
            generator=torch.Generator().manual_seed(1000 + self.done),
        )
        rows = ROWS // self.laid.dp_size
        loss = self.backward(tokens[self.laid.dp_rank * rows :][:rows])
        self.laid.average()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.laid.net.tick()
        self.done += 1
        return self.shared(loss)

    def backward(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Make the gradients; the local loss, None on a rank that has none."""
        if self.laid.schedule is None:
            loss = cross_entropy(self.model(tokens), tokens)
            loss.backward()
            return loss.detach()
        losses: list[torch.Tensor] = []
        if self.laid.net.first:
            self.laid.schedule.step(tokens)
        else:
            self.laid.schedule.step(target=tokens, losses=losses)
        return torch.stack(losses).mean().detach() if losses else None

    def shared(self, loss: torch.Tensor | None) -> float:
        """The mean over the data-parallel ranks, summed in their order; ranks of one place must agree to the bit."""
        nothing = float("nan")
        mine = torch.tensor(
            [self.laid.dp_rank, nothing if loss is None else loss.item()], dtype=torch.float64
        )
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        places: dict[int, set[float]] = {}
        for place, value in (f.tolist() for f in found):
            if not math.isnan(value):
                places.setdefault(int(place), set()).add(value)
        assert all(len(v) == 1 for v in places.values()), (
            f"ranks of one place disagree on the loss: {places}"
        )
        return float(sum(places[place].pop() for place in sorted(places)) / self.laid.dp_size)

    def state(self, spelling: str = "live") -> dict[str, Any]:
        """What is given to save and load: the objects, or their state dicts, the optimizer's `nested` or `flat`."""
        values = {"step": self.done, "notes": {"rate": 0.1, "of": ["a", None, True]}}
        if spelling == "live":
            return {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                **values,
            }
        options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            **values,
        }

    def restore(self, state: dict[str, Any], spelling: str = "live") -> None:
        """Take what was loaded into `state`; the objects themselves are filled already."""
        if spelling != "live":
            options = StateDictOptions(flatten_optimizer_state_dict=spelling == "flat")
            dicts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, options=options, **dicts)
            self.scheduler.load_state_dict(state["scheduler"])
        self.done = state["step"]

    def held(self) -> Held:
        """What all ranks hold, whole, on rank 0. Collective."""
        values = {"scheduler": self.scheduler.state_dict(), "step": self.done}
        return whole_on_first(hold(self.model, self.optimizer, self.names), values)


def slower(step: int) -> float:
    """The factor of the learning rate."""
    return 1 / (1 + 0.3 * step)


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups of unlike learning rate and weight decay: matrices, and the rest."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    cut = [[p for _, p in trained if p.dim() >= 2], [p for _, p in trained if p.dim() < 2]]
    rate = 1e-2 if kind == "adamw" else 0.3
    groups = [
        {"params": cut[0], "lr": rate, "weight_decay": 0.1},
        {"params": cut[1], "lr": rate / 2},
    ]
    if kind == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01, foreach=False)


def build(job: Job) -> Training:
    """Build a training. Collective."""
    return Training(job)


def save(training: Training, url: str, form: Any, spelling: str, **options: Any) -> None:
    if form == "dcp":
        dcp.save(training.state("nested"), checkpoint_id=url)
        return
    import ucformat.torch as ucf

    ucf.save(training.state(spelling), url, form=form, step=training.done, certify=True, **options)


def load(training: Training, url: str, form: str, spelling: str, **options: Any) -> None:
    state = training.state("nested" if form == "dcp" else spelling)
    state["step"], state["notes"] = -1, {"rate": 0.0, "of": ["", None, False]}
    if form == "dcp":
        dcp.load(state, checkpoint_id=url)
        training.restore(state, "nested")
    else:
        import ucformat.torch as ucf

        ucf.load(state, url, **{"strict": True, "certify": True, **options})
        training.restore(state, spelling)
    assert state["notes"] == training.state()["notes"]


class Run:
    """The actions of one job."""

    def __init__(self, job: Job) -> None:
        self.training = build(job)
        self.losses: list[float] = []
        self.handle: Any = None

    def act(self, action: dict[str, Any]) -> None:
        (verb, value), *options = action.items()
        getattr(self, f"do_{verb}")(value, **dict(options))

    def do_train(self, steps: int) -> None:
        self.losses += [self.training.step() for _ in range(steps)]

    def do_save(self, url: str, form: str = "zarr", spelling: str = "live", **options: Any) -> None:
        save(self.training, url, form, spelling, **options)

    def do_load(self, url: str, form: str = "", spelling: str = "live", **options: Any) -> None:
        load(self.training, url, form, spelling, **options)

    def do_async_save(self, url: str, spelling: str = "live", **options: Any) -> None:
        import ucformat.torch as ucf

        state = self.training.state(spelling)
        self.handle = ucf.async_save(state, url, step=self.training.done, certify=True, **options)
        assert self.handle.staged

    def do_wait(self, _: bool) -> None:
        self.handle.wait()
        assert self.handle.committed

    def do_truth(self, path: str) -> None:
        held = self.training.held()
        if dist.get_rank() == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save_file(held.tensors, f"{path}.safetensors")
            Path(f"{path}.json").write_text(json.dumps(held.facts, sort_keys=True))

    def do_forget(self, what: str) -> None:
        t = self.training
        buffers = [b for name, b in t.model.named_buffers() if name.endswith(f".{what}")]
        states = [s[what] for s in t.optimizer.state.values() if what in s]
        if what == "batch":
            t.done = 0
        elif what == "scheduler":
            t.scheduler.last_epoch = 0
        elif what == "lr":
            t.optimizer.param_groups[1]["lr"] = t.optimizer.param_groups[0]["lr"]
        else:
            assert buffers or states, f"nothing is called {what}"
            for tensor in buffers + states:
                tensor.zero_()

    def do_spoil(self, what: str, rank: int) -> None:
        """Change what one rank holds: an element, a moment, or two layers that change places."""
        if dist.get_rank() != rank:
            return
        names, states = self.training.names, self.training.optimizer.state
        params = {names[id(p)]: p for p in self.training.model.parameters()}
        with torch.no_grad():
            if what == "element":
                local_part(params["layers.0.up.weight"]).view(-1)[-1] += 1
            elif what == "moment":
                local_part(states[params["layers.0.up.weight"]]["exp_avg"]).zero_()
            else:
                a, b = (local_part(params[f"layers.{n}.up.weight"]) for n in (0, 1))
                a[:], b[:] = b.clone(), a.clone()

    def do_certify(self, url: str, path: str, spelling: str = "live") -> None:
        import ucformat.torch as ucf

        certificate = ucf.certify(self.training.state(spelling), url)
        if dist.get_rank() == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(certificate.document()))

    def do_losses(self, path: str) -> None:
        if dist.get_rank() == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(self.losses))
        self.losses = []


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        job = Job(**entry)
        run = Run(job)
        for action in job.actions:
            run.act(action)
        dist.barrier()
    leave()


if __name__ == "__main__":
    main()
