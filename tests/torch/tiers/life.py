"""What ranks on several nodes do, each node with a folder of its own: restore, train, save to tiers, and be killed.

A node is a working folder: `/proc/self/cwd/ck` is one path that is another folder on each node, as
`/dev/shm/ck` is on separate machines. So are the processes that write in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.torch.layouts import LayoutSpec, lay
from tests.torch.models import ModelSpec, build_net
from ucformat.errors import IntegrityError
from ucformat.torch import Manager, Tier

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

SPEC = ModelSpec(vocab=61, hidden=22, heads=2, head_dim=6, inner=31, layers=2)
#: The first tier.
FAST = "/proc/self/cwd/ck"


def enter(place: Path, node: str) -> None:
    """Be on a node."""
    own = place / node.replace("/", "-")
    own.mkdir(exist_ok=True)
    os.chdir(own)
    os.environ["UCP_NODE"] = node


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What all ranks hold together, tensor by tensor. Collective."""
    out = {}

    def digest(tensor: torch.Tensor) -> str:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        bits = whole.detach().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(bits.tobytes()).hexdigest()

    for name, parameter in model.named_parameters():
        out[name] = digest(parameter)
        for state, value in sorted(optimizer.state.get(parameter, {}).items()):
            out[f"{name}/{state}"] = digest(value)
    for name, buffer in model.named_buffers():
        if not name.endswith("scratch"):
            out[name] = digest(buffer)
    return out


class Training:
    """A model and its optimizer under a layout."""

    def __init__(self, layout: dict[str, Any], seed: int) -> None:
        net = build_net(SPEC)
        self.laid = lay(net, SPEC, LayoutSpec(**layout))
        self.model = self.laid.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.seed = seed

    def step(self, number: int) -> None:
        """Train on made-up tokens."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        tokens = torch.randint(0, SPEC.vocab, (4 * self.laid.dp_size, 9), generator=generator)
        own = tokens[self.laid.dp_rank * 4 :][:4]
        logits = self.model(own)
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), own[:, 1:].flatten()
        ).backward()
        self.laid.average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.laid.net.tick()

    def state(self, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **more}


def live(
    folder: Path,
    nodes: list[str],
    layout: dict[str, Any],
    seed: int,
    steps: int,
    tiers: dict[str, Any],
    *,
    verify: str = "full",
    asynchronous: bool = False,
    die: float | None = None,
) -> dict[str, Any]:
    """Restore what survives, tell what it is, train and save some steps, and be killed (unless `die` is None).

    Args:
        nodes: of each rank.
        steps: how many are trained.
        tiers: `replicas`, `keep`, and `slow`, every how many steps the url is filled.
        die: seconds after the last of them.
    """
    rank, place = dist.get_rank(), folder / "nodes"
    place.mkdir(exist_ok=True)
    enter(place, nodes[rank])
    training = Training(layout, seed)
    state = training.state(token="")
    fast = Tier(FAST, every=1, keep=tiers["keep"], replicas=tiers["replicas"])
    manager = Manager(
        folder / "slow", every=tiers["slow"], tiers=[fast], asynchronous=asynchronous, signals=()
    )
    told: dict[str, Any] = {"step": None, "token": None, "lost": ""}
    try:
        report = manager.restore_latest(state, verify=verify)  # type: ignore[arg-type]
    except IntegrityError as error:
        told["lost"], report = error.message, None
    held = digests(training.laid.net, training.optimizer)
    first = 1
    if report is not None:
        first = (report.step or 0) + 1
        truth = json.loads((folder / "truth" / f"{state['token']}.json").read_text())
        told |= {"step": report.step, "token": state["token"], "same": held == truth}
        told["nbytes"] = report.nbytes
    if not rank:
        (folder / "told.json").write_text(json.dumps(told))
    for number in range(first, first + steps):
        training.step(number)
        token = f"{seed}-{number}"
        truth = digests(training.laid.net, training.optimizer)
        if not rank:
            (folder / "truth").mkdir(exist_ok=True)
            (folder / "truth" / f"{token}.json").write_text(json.dumps(truth))
        dist.barrier()
        if die is not None and number == first + steps - 1:
            _die_after(die)
        manager.save(number, training.state(token=token))
    if die is not None:
        time.sleep(die + 60)
    manager.close()
    return told


def _die_after(seconds: float) -> None:
    """Be killed, all ranks at about the same time, whatever they do then."""

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def chance_of(seed: int) -> random.Random:
    return random.Random(f"tiers {seed}")
