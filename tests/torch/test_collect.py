"""What is found in a training state, and that what is put back goes where it was."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.torch.test_dtensor import alone_as
from ucformat.errors import UsageError
from ucformat.reading.state_names import dotted
from ucformat.torch import PerRank, Rng
from ucformat.torch.state.collect import collect
from ucformat.torch.state.local import local_state
from ucformat.torch.state.objects import StateParts

if TYPE_CHECKING:
    from pathlib import Path


class Pair(NamedTuple):
    """A tuple of a kind of its own."""

    tensor: torch.Tensor
    inner: list[Any]


class Net(torch.nn.Module):
    """Two layers, a buffer, one that is not kept, and something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.seen = {"count": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(torch.relu(self.a(x)))
        return out

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def two_groups(net: torch.nn.Module, *, stepped: bool = True) -> torch.optim.AdamW:
    decayed = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1]
    optim = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "lr": 0.5}], lr=0.1
    )
    if stepped:
        net(torch.ones(2, 3)).sum().backward()
        optim.step()
        optim.zero_grad()
    return optim


WEIGHTS = {"a.weight", "a.bias", "b.weight", "b.bias"}
MOMENTS = {(w, s) for w in WEIGHTS for s in ("exp_avg", "exp_avg_sq", "step")}


def names(state: dict[str, Any]) -> set[tuple[str, str]]:
    return {tuple(k) for k in collect(state).keys.values()}  # type: ignore[misc]


def leaves(state: Any) -> dict[str, Any]:
    return {dotted(path): leaf.value for path, leaf in collect(state).leaves.items()}


def groups(state: dict[str, Any]) -> list[tuple[set[str], dict[str, Any]]]:
    return [
        (set(g.params), dict(g.options)) for found in collect(state).groups.values() for g in found
    ]


def test_a_module_and_its_optimizer() -> None:
    net = Net()
    optim = two_groups(net)
    state = {"model": net, "optim": optim}
    assert names(state) == {(w, "weight") for w in WEIGHTS | {"mean"}} | MOMENTS
    found = collect(state)
    assert all(
        found.tensors["model", n].data_ptr() == p.data_ptr() for n, p in net.named_parameters()
    )
    stored = found.tensors["optim", "state", "a.weight", "exp_avg"]
    assert stored.data_ptr() == optim.state[net.a.weight]["exp_avg"].data_ptr()
    assert leaves(state) == {"model._extra_state": {"count": 3}}
    (plain, first), (decayed, second) = groups(state)
    assert (plain, decayed) == ({"a.bias", "b.bias"}, {"a.weight", "b.weight"})
    assert (first["lr"], first["weight_decay"], second["lr"]) == (0.1, 0.0, 0.5)
    assert "params" not in first


@pytest.mark.parametrize("flatten", [False, True])
def test_state_dicts_mean_the_same_as_what_they_are_of(flatten: bool) -> None:
    net = Net()
    optim = two_groups(net)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, states = get_state_dict(net, optim, options=options)
    live, dicts = {"model": net, "optim": optim}, {"model": weights, "optim": states}
    assert names(dicts) == names(live)
    assert sorted(map(str, groups(dicts))) == sorted(map(str, groups(live)))
    one, other = local_state(live), local_state(dicts)
    assert {t.key: t.tensor.data_ptr() for t in one.tensors} == {
        t.key: t.tensor.data_ptr() for t in other.tensors
    }
    assert one.objects == other.objects


@pytest.mark.parametrize("flatten", [False, True])
def test_hyper_parameters_are_set_in_place(flatten: bool) -> None:
    net = Net()
    optim = two_groups(net)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    dicts = {"model": net, "optim": get_state_dict(net, optim, options=options)[1]}
    for state in (dicts, {"model": net, "optim": optim}):
        for group in (g for found in collect(state).groups.values() for g in found):
            group.options["lr"] = 0.125 if "a.bias" in group.params else 0.25
        assert [options["lr"] for _, options in groups(state)] == [0.125, 0.25]
    assert [g["lr"] for g in optim.param_groups] == [0.125, 0.25]
    flat = dicts["optim"]
    if flatten:
        assert {k: v for k, v in flat.items() if k.endswith(".lr")} == {
            "param_groups.a.bias.lr": 0.125, "param_groups.b.bias.lr": 0.125,
            "param_groups.a.weight.lr": 0.25, "param_groups.b.weight.lr": 0.25,
        }  # fmt: skip
    else:
        assert [g["lr"] for g in flat["param_groups"]] == [0.125, 0.25]


def test_an_optimizer_that_made_no_step_yet_has_no_states() -> None:
    net = Net()
    optim = two_groups(net, stepped=False)
    assert names({"model": net, "optim": optim}) == {(w, "weight") for w in WEIGHTS | {"mean"}}
    assert not optim.state


def test_momentum_that_is_not_there_is_not_found() -> None:
    net = Net()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    assert names({"model": net, "optim": optim}) == {(w, "weight") for w in WEIGHTS | {"mean"}}


def test_an_optimizer_of_no_module_is_an_error() -> None:
    one, other = Net(), Net()
    for state in (
        {"optim": two_groups(one)},
        {"model": other, "train": {"optim": two_groups(one)}},
    ):
        with pytest.raises(
            UsageError,
            match=r"\d of \d parameters of the optimizer .*optim are in no module of the state",
        ):
            collect(state)


def test_two_models_each_with_its_optimizer() -> None:
    actor, critic = Net(), Net()
    state = {"actor": actor, "critic": critic, "one": two_groups(actor), "two": two_groups(critic)}
    found = collect(state)
    for model, optim, which in ((actor, "one", "actor"), (critic, "two", "critic")):
        assert found.tensors[which, "a.weight"].data_ptr() == model.a.weight.data_ptr()
        key = (optim, "state", "a.weight", "exp_avg")
        assert (
            found.tensors[key].data_ptr()
            == state[optim].state[model.a.weight]["exp_avg"].data_ptr()
        )


def test_ddp_leaves_no_prefix() -> None:
    with alone_as(0, 1):
        net = Net()
        optim = two_groups(net)
        wrapped = DistributedDataParallel(net)
        assert {n for n, _ in wrapped.named_parameters()} == {f"module.{w}" for w in WEIGHTS}
        assert names({"model": wrapped, "optim": optim}) == names({"model": net, "optim": optim})


def test_extra_state_goes_back_to_its_module() -> None:
    net = Net()
    found = collect({"model": net})
    found.leaves["model", "_extra_state"].put({"count": 9})
    assert net.seen == {"count": 3}
    for finish in found.finish:
        finish()
    assert net.seen == {"count": 9}


def test_plain_values_anywhere_are_replaced_in_place() -> None:
    inner: dict[Any, Any] = {"lr": 0.1, "history": [1, 2], "empty": {}, 3: "three", "pair": (1, 2)}
    state = {"inner": inner, "step": 7, "list": [torch.ones(1), {"x": 1}, 5]}
    assert leaves(state) == {
        "inner.lr": 0.1, "inner.history": [1, 2], "inner.empty": {}, "inner.3": "three", "inner.pair": (1, 2),
        "step": 7, "list.1.x": 1, "list.2": 5,
    }  # fmt: skip
    for leaf in collect(state).leaves.values():
        leaf.put("new")
    assert inner == dict.fromkeys(inner, "new")
    assert (state["step"], state["list"][1:]) == ("new", [{"x": "new"}, "new"])  # type: ignore[index]


def test_tensors_in_lists_and_tuples_are_tensors() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    found = collect({"ema": [one, {"deep": (two, 4)}], "plain": [1, 2]})
    assert {p: t.data_ptr() for p, t in found.tensors.items()} == {
        ("ema", 0): one.data_ptr(),
        ("ema", 1, "deep", 0): two.data_ptr(),
    }
    assert found.leaves["plain",].value == [1, 2]


def test_a_tuple_is_made_anew_of_what_is_put_into_it() -> None:
    tensor = torch.ones(2)
    pair = Pair(tensor, [(tensor, 4)])
    state: dict[str, Any] = {"deep": {"pair": pair}, "same": (tensor,)}
    kept = state["same"]
    found = collect(state)
    found.leaves["deep", "pair", 1, 0, 1].put(5)
    for finish in found.finish:
        finish()
    assert state["deep"]["pair"] == Pair(tensor, [(tensor, 5)])
    assert pair.inner[0][1] == 5
    assert state["same"] is kept


def test_an_object_with_a_state_of_plain_values_is_one_value() -> None:
    optim = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1 / (step + 1))
    found = collect({"schedule": schedule})
    assert found.leaves["schedule",].value["last_epoch"] == 0
    assert not found.tensors
    found.leaves["schedule",].put({**schedule.state_dict(), "last_epoch": 5})
    assert schedule.last_epoch == 5


class Averaged:
    """Has tensors and plain values, and keeps a copy of its own of what it is given."""

    def __init__(self) -> None:
        self.shadow, self.decay = {"w": torch.ones(2)}, 0.9

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": dict(self.shadow), "decay": self.decay, "clone": self.shadow["w"].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.decay = {k: v.clone() for k, v in state["shadow"].items()}, state["decay"]


def test_an_object_with_tensors_is_loaded_when_all_is_there() -> None:
    ema = Averaged()
    found = collect({"ema": ema})
    assert set(found.tensors) == {("ema", "shadow", "w"), ("ema", "clone")}
    found.tensors["ema", "shadow", "w"].fill_(5)
    found.leaves["ema", "decay"].put(0.5)
    assert ema.decay == 0.9
    for finish in found.finish:
        finish()
    assert (ema.decay, ema.shadow["w"].tolist()) == (0.5, [5, 5])


def test_what_each_rank_has_for_itself() -> None:
    tensor, net, values = torch.ones(2), Averaged(), {"n": 1}
    state = {
        "t": PerRank(tensor),
        "o": PerRank(net),
        "deep": {"v": PerRank(values), "n": PerRank(3)},
    }
    found = collect(state)
    assert not found.tensors
    assert not found.leaves
    assert {dotted(p) for p in found.ranks} == {"t", "o", "deep.v", "deep.n"}
    assert found.ranks["o",][1].value["decay"] == 0.9
    found.ranks["t",][1].put(torch.zeros(2))
    assert tensor.tolist() == [0, 0]
    found.ranks["o",][1].put({"shadow": {}, "decay": 0.1})
    assert net.decay == 0.1


def test_random_generators_are_each_ranks_own_and_are_put_back() -> None:
    rng = Rng()
    found = collect({"rng": rng})
    (per_rank, leaf), *rest = found.ranks.values()
    assert not rest
    assert per_rank.merge is not None
    saved = leaf.value
    drawn = (random.random(), np.random.random(), torch.rand(3).tolist())
    leaf.put(saved)
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn


def test_new_ranks_draw_other_numbers_than_any_and_the_same_at_every_restart() -> None:
    rng = Rng()
    saved = [rng.state_dict()]
    assert rng.merge(saved, 0, 3) is saved[0]
    first, second = rng.merge(saved, 1, 3), rng.merge(saved, 2, 3)
    assert first != second
    assert first == rng.merge(saved, 1, 5)
    rng.load_state_dict(first)
    one = (random.random(), np.random.random(), torch.rand(1).item())
    rng.load_state_dict(second)
    other = (random.random(), np.random.random(), torch.rand(1).item())
    rng.load_state_dict(rng.merge(saved, 1, 3))
    assert one == (random.random(), np.random.random(), torch.rand(1).item())
    assert all(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")
def test_a_stateful_data_loader_is_each_ranks_own() -> None:
    loader = StatefulDataLoader(list(range(10)), batch_size=2)
    batches = iter(loader)
    next(batches)
    found = collect({"data": loader})
    ((per_rank, leaf),) = found.ranks.values()
    assert per_rank.value is loader
    assert per_rank.merge is None
    saved, rest = leaf.value, [b.tolist() for b in batches]
    assert len(rest) == 4
    leaf.put(saved)
    assert [b.tolist() for b in loader] == rest


def test_a_state_that_is_no_mapping() -> None:
    with pytest.raises(UsageError, match="a training state is a mapping, not a Net"):
        collect(Net())


def test_ordered_and_empty_mappings() -> None:
    assert leaves(OrderedDict(a=OrderedDict(), b=1)) == {"a": {}, "b": 1}
    assert collect({}).tensors == {}


def test_parts_are_one_entry() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    parts = [torch.nn.ModuleDict({str(n): layer}) for n, layer in enumerate(layers)]
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    together = collect({"model": StateParts(parts), "optimizer": StateParts(optimizers)})
    whole = collect({"model": layers, "optimizer": torch.optim.AdamW(layers.parameters())})
    assert together.keys == whole.keys
    (group,) = whole.groups["optimizer",]
    assert [name for part in together.groups["optimizer",] for name in part.params] == [
        *group.params
    ]
    with pytest.raises(UsageError, match=r"two parts of model have the entry '0\.weight'"):
        collect({"model": StateParts([layers, layers])})


def test_plain_states_are_saved_without_the_packages_of_sharded_ones(tmp_path: Path) -> None:
    program = """
import sys, torch
from ucformat.torch import save
save({"model": torch.nn.Linear(2, 2), "t": torch.ones(2), "step": 1}, sys.argv[1])
slow = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._shard", "sympy")
print([name for name in slow if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "ck")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
