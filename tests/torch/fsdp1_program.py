"""Trainings under FSDP1, ZeroRedundancyOptimizer, FSDP2 and none of these, saved and loaded by ranks.

All ranks have the same batch, and 2 or 4 ranks average equal gradients without rounding, so each of
these trainings is that of one process to the bit.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.nn.parallel import DistributedDataParallel

from tests.torch.ranks import told
from ucformat.torch import ChangedRows, async_save, certify, load, load_into, save
from ucformat.torch.comm.group import group_of
from ucformat.torch.saving.plan import SavePlanner

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["RECIPES", "Net", "after", "make", "train"]

State = dict[str, Any]

#: Name -> what is special of the model and the optimizer.
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True, "recompute": True},
    "frozen": {"frozen": True},
    "momentum": {"optimizer": "sgd"},
}
BEFORE, AFTER = 3, 3
TOKENS = 13

warnings.filterwarnings("ignore", message=".*NO_SHARD.*")


class Block(nn.Module):
    """Of odd sizes, with a parameter of one element, one of one index, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 11), nn.Linear(11, 7)
        self.gain = nn.Parameter(torch.full((1,), 0.7))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain


class Net(nn.Module):
    def __init__(self, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 7), nn.Linear(7, TOKENS, bias=False)
        blocks = [Block(), Block()]
        self.layers = nn.ModuleList(
            [checkpoint_wrapper(b) for b in blocks] if recompute else blocks
        )
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast("torch.Tensor", self.head(x))


def wrapped(net: Any, kind: str) -> nn.Module:
    """A model under one of the kinds: `one`, `zero`, `fsdp2`, or a strategy of FSDP1 with `orig` or `flat`."""
    if kind == "one":
        return cast("nn.Module", net)
    if kind == "zero":
        return DistributedDataParallel(net)
    if kind == "fsdp2":
        for layer in net.layers:
            fully_shard(layer)
        return cast("nn.Module", fully_shard(net))
    strategy, views = kind.split("-")
    options: State = {
        "sharding_strategy": getattr(ShardingStrategy, strategy),
        "use_orig_params": views == "orig",
        "device_id": torch.device("cpu"),
    }
    if "HYBRID" in strategy:
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    for number, layer in enumerate(net.layers):
        net.layers[number] = Fsdp1(layer, **options)
    return Fsdp1(net, **options)


def optimizer_of(
    model: nn.Module, kind: str, choice: str = "adamw", **options: Any
) -> torch.optim.Optimizer:
    """Of two groups with hyper-parameters of their own: the first block, and the rest."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if ("layers.0." in n) is first], "lr": rate}
        for first, rate in ((True, 1e-2), (False, 3e-3))
    ]
    options |= {"foreach": False}
    if choice == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, **options)
    if kind == "zero":
        return dealt(groups, torch.optim.AdamW, **options)
    return torch.optim.AdamW(groups, **options)


def dealt(params: Any, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """A ZeroRedundancyOptimizer, whose package warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, kind, **options)


def make(kind: str, recipe: str = "plain", *, seed: int = 0, **options: Any) -> State:
    """A training state that has made no step."""
    special = dict(RECIPES[recipe])
    torch.manual_seed(seed)
    net = Net(tied=special.get("tied", False), recompute=special.get("recompute", False))
    if special.get("frozen"):
        net.layers[1].requires_grad_(requires_grad=False)
    model = wrapped(net, kind)
    optimizer = optimizer_of(model, kind, special.get("optimizer", "adamw"), **options)
    return {"model": model, "optimizer": optimizer, "done": 0}


def train(state: State, steps: int) -> list[float]:
    """The losses of some steps."""
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state["done"])
        tokens = torch.randint(TOKENS, (5, 4), generator=generator)
        logits = state["model"](tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["done"] += 1
        losses.append(loss.item())
    return losses


def after(kind: str, recipe: str) -> list[float]:
    """The losses of a training that is not interrupted."""
    state = make(kind, recipe)
    train(state, BEFORE)
    return train(state, AFTER)


def writes(folder: Path, kinds: Iterable[str], recipes: Iterable[str], **options: Any) -> State:
    """Save under each kind; the losses afterwards, and how many tensors had to be listed."""
    out: State = {}
    for recipe in recipes:
        for kind in kinds:
            state = make(kind, recipe)
            train(state, BEFORE)
            place = folder / f"{kind}-{recipe}"
            if options.get("background"):
                async_save(state, place).wait()
            else:
                save(state, place, **{"certify": True, **options})
                assert not group_of(None).links.kept[SavePlanner].listed, kind
            out[f"{kind}-{recipe}"] = train(state, AFTER)
    return out


def reads(
    folder: Path, sources: Iterable[str], kinds: Iterable[str], recipes: Iterable[str]
) -> State:
    """Load what was saved under each kind into each kind, of other values; the losses afterwards."""
    out: State = {}
    for recipe in recipes:
        for source in sources:
            for kind in kinds:
                state = make(kind, recipe, seed=1)
                report = load(state, folder / f"{source}-{recipe}", strict=True, certify=True)
                assert report, report
                assert state["done"] == BEFORE
                out[f"{source}-to-{kind}-{recipe}"] = train(state, AFTER)
    return out


def layouts(folder: Path) -> list[Any]:
    """The layout that is recorded, and whether each rank has given parts of a weight."""
    state = make("FULL_SHARD-orig")
    report = save(state, folder / "ck")
    return [report.url, load(state, folder / "ck").layout]


# What is refused


class Eight(torch.optim.Optimizer):
    """Keeps a scale for each of 4 elements, as 8-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self.state[p]["scale"] = torch.ones(-(-p.numel() // 4))


class Hooked(nn.Linear):
    """Makes an entry of its own of its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(lambda *_: None)


class Acting(nn.Linear):
    """Makes something of its weight when it is loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def fsdp1(module: nn.Module, **options: Any) -> Fsdp1:
    return Fsdp1(module, device_id=torch.device("cpu"), **options)


def refusals(folder: Path) -> dict[str, str]:
    """What is said of each state that cannot be saved, and that nothing was written."""
    said: dict[str, str] = {}

    def refused(what: str, state: State, call: Any = save) -> None:
        said[what] = told(partial(call, state, folder / what))
        if call is save and any(p.is_file() for p in (folder / what).glob("**/*")):
            said[what] = f"written: {said[what]}"

    offloaded = fsdp1(nn.Linear(4, 4), cpu_offload=CPUOffload(offload_params=True))
    refused("offload", {"model": offloaded})
    state = make("SHARD_GRAD_OP-orig")
    loss = state["model"](torch.zeros(1, 2, dtype=torch.int64)).sum()
    refused("forward", state)
    loss.backward()
    with Fsdp1.summon_full_params(state["model"]):
        refused("summoned", state)
    with Fsdp1.summon_full_params(flat := make("FULL_SHARD-flat")["model"]):
        refused("summoned-flat", {"model": flat})
    state = make("FULL_SHARD-orig")
    state["model"].embed.weight.data = state["model"].embed.weight.detach().clone()
    refused("replaced", state)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    refused("strides", {"model": fsdp1(conv)})
    both = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    both[1].weight = both[0].weight
    both[0] = fsdp1(both[0], use_orig_params=True)
    refused("tied", {"model": fsdp1(both, use_orig_params=True)})
    refused("hooks", {"model": fsdp1(nn.Sequential(Hooked()))})
    for views in (True, False):
        model = fsdp1(nn.Linear(5, 9), use_orig_params=views)
        eight = Eight(model.parameters())
        model(torch.ones(1, 5)).sum().backward()
        eight.step()
        refused(f"inner-{views}", {"model": model.module})
        refused(f"scales-{views}", {"model": model, "optimizer": eight})
    model = DistributedDataParallel(nn.Linear(5, 9))
    overlapping = dealt(model.parameters(), torch.optim.Adam, overlap_with_ddp=True)
    refused("overlap", {"model": model, "optimizer": overlapping})
    tables = make("FULL_SHARD-orig")
    rows = ChangedRows(tables["model"])
    save(tables, folder / "base")
    refused("rows", tables, partial(save, base=folder / "base", patch=True, changed=rows))
    refused("load_into", tables, lambda s, _: load_into(s["model"], folder / "base"))
    acting = {"model": fsdp1(nn.Sequential(Acting(4, 4)))}
    save(acting, folder / "acting")
    refused("acting", acting, load)
    return said


# Traps


def gathered(folder: Path, kind: str) -> tuple[list[float], list[float]]:
    """What a model computes that was evaluated before it was loaded, and what was saved computes.

    FSDP1 leaves what it has gathered for an evaluation, and uses it in the next forward.
    """
    tokens = torch.arange(8).reshape(2, 4)
    source = make(kind)
    train(source, BEFORE)
    save(source, folder / "ck")
    state = make(kind, seed=1)
    train(state, 1)
    state["model"].eval()
    with torch.no_grad():
        state["model"](tokens)
        load(state, folder / "ck")
        expected = source["model"].eval()(tokens)
        return state["model"](tokens).flatten().tolist(), expected.flatten().tolist()


def mixed(folder: Path) -> tuple[list[float], list[float]]:
    """The same with parameters in lower precision, of which an evaluation leaves full ones."""
    tokens = torch.arange(8).reshape(2, 4)
    precision = MixedPrecision(param_dtype=torch.bfloat16)

    def training(seed: int) -> State:
        torch.manual_seed(seed)
        model = fsdp1(
            Net(),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=precision,
        )
        return {"model": model, "optimizer": optimizer_of(model, ""), "done": 0}

    source, state = training(0), training(1)
    for each in (source, state):
        train(each, 2)
    save(source, folder / "ck")
    with torch.no_grad():
        state["model"].eval()(tokens)
    load(state, folder / "ck", certify=True)
    return train(state, AFTER), train(source, AFTER)


def twice(folder: Path) -> list[str]:
    """PyTorch 126310: modules that are registered under two names; each name is saved."""
    inner = nn.ModuleDict({"one": nn.Linear(3, 5), "two": nn.Linear(5, 3)})
    outer = nn.ModuleDict({"inner": inner, "one": inner["one"]})
    model = fsdp1(outer, use_orig_params=True)
    save({"model": model}, folder / "ck")
    report = load({"model": model}, folder / "ck", strict=True)
    return [str(report.tensors)]


def ignored(folder: Path) -> State:
    """Modules that FSDP1 leaves alone are whole on each rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model = fsdp1(net, use_orig_params=True, ignored_states=list(net[1].parameters()))
    save({"model": model}, folder / "ck", certify=True)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    if dist.get_world_size() == 1:
        load({"model": plain}, folder / "ck", strict=True)
    other = fsdp1(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), use_orig_params=True)
    load({"model": other}, folder / "ck", strict=True, certify=True)
    return {"certified": bool(certify({"model": other}, folder / "ck"))}


def stateless(folder: Path, kind: str) -> str:
    """What is said where a parameter has no states, and the others that FSDP1 joins with it have."""
    one = make("one")
    train(one, 1)
    del one["optimizer"].state[one["model"].layers[0].gain]
    if not dist.get_rank():
        save(one, folder / "ck", group=cast("Any", dist.new_group([0])))
    else:
        dist.new_group([0])
    dist.barrier()
    state = make(kind, seed=1)
    said = told(lambda: load(state, folder / "ck", strict=True, certify=True))
    if not said:
        name = "layers.0._fsdp_wrapped_module.gain"
        gain = dict(state["model"]._fsdp_wrapped_module.named_parameters())[name]
        assert gain not in state["optimizer"].state
    return said


def amsgrad(folder: Path, kind: str) -> bool:
    """States that a trial step without the option would not make."""
    state = make(kind, amsgrad=True)
    train(state, BEFORE)
    save(state, folder / "ck")
    other = make(kind, seed=1, amsgrad=True)
    load(other, folder / "ck", strict=True, certify=True)
    return train(other, AFTER) == train(state, AFTER)


def consolidated(folder: Path) -> list[float]:
    """What ZeroRedundancyOptimizer gathers after a load is what was loaded, with the loaded learning rates."""
    state = make("zero")
    train(state, BEFORE)
    state["optimizer"].param_groups[0]["lr"] = 0.5
    save(state, folder / "ck")
    other: State = make("zero", seed=1)
    train(other, 1)
    other["optimizer"].consolidate_state_dict(0)
    load(other, folder / "ck", strict=True)
    optimizer: Any = other["optimizer"]
    assert not optimizer._all_state_dicts
    assert optimizer.optim.param_groups[0]["lr"] == 0.5
    optimizer.consolidate_state_dict(0)
    if dist.get_rank():
        return []
    steps = [s["step"].item() for s in optimizer.state_dict()["state"].values()]
    return sorted(set(steps))


def state_dicts(folder: Path) -> bool:
    """What is saved live is what FSDP1's own sharded state dict holds, as the module's state dict is loaded."""
    state = make("FULL_SHARD-orig", "tied")
    train(state, BEFORE)
    save({"model": state["model"]}, folder / "live")
    other = make("FULL_SHARD-flat", "tied", seed=1)
    with Fsdp1.state_dict_type(other["model"], StateDictType.SHARDED_STATE_DICT):
        entries = other["model"].state_dict()
        load({"model": entries}, folder / "live")
        other["model"].load_state_dict(entries)
    return bool(certify({"model": other["model"]}, folder / "live"))


Form = Literal["zarr", "packed", "safetensors"]
