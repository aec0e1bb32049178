"""Optimizer states come back as they were saved: all of them, and none where there were none."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ucformat
import ucformat.torch as ucf
from ucformat.errors import StateMismatch, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[[torch.nn.Module], torch.optim.Optimizer]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Net(torch.nn.Module):
    """`unused` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.unused = (
            torch.nn.Linear(3, 4),
            torch.nn.Linear(4, 2),
            torch.nn.Linear(2, 2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.ones(2, 3) * (step + 1)).square().sum()
            loss.backward()
            return float(loss.item())

        closure()
        optimizer.step(closure)


def trained(make: Make, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = make(model)
    train(model, optimizer, steps)
    return model, optimizer


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        n: [p.detach().clone(), deepcopy(dict(optimizer.state.get(p, {})))]
        for n, p in model.named_parameters()
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **options})


def of_kind(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **{"lr": 0.01, **options})


OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "AMSGrad": lambda m: adamw(m, amsgrad=True),
    "momentum": of_kind(torch.optim.SGD, momentum=0.9),
    **{
        kind.__name__: of_kind(kind)
        for kind in (
            torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adadelta,
            torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
            torch.optim.Rprop,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_same_program_goes_on_from_any_step(make: Make, tmp_path: Path) -> None:
    """Also from before the first one, and in a program that has trained already."""
    for saved_steps, steps_here in ((3, 0), (0, 0), (3, 2), (0, 2)):
        model, optimizer = trained(make, saved_steps)
        place = tmp_path / f"{saved_steps}-{steps_here}"
        ucf.save({"model": model, "optim": optimizer}, place)
        other, again = trained(make, steps_here)
        assert ucf.load({"model": other, "optim": again}, place, strict=True)
        assert same(held(other, again), held(model, optimizer))
        for each in ((model, optimizer), (other, again)):
            train(*each, 2, first=9)
        assert same(held(other, again), held(model, optimizer))


def test_a_save_and_a_refused_load_change_nothing(tmp_path: Path) -> None:
    model, optimizer = trained(adamw, 0)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "fresh")
    assert {k.state for k in ucformat.open(tmp_path / "fresh").tensors} == {"weight"}
    train(model, optimizer, 2)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "trained")
    other, again = trained(adamw, 0)
    other.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
    before, groups = held(other, again), deepcopy(again.state_dict()["param_groups"])
    with pytest.raises(StateMismatch, match="missing: more"):
        ucf.load({"model": other, "optim": again}, tmp_path / "trained")
    assert same(held(other, again), before)
    assert again.state_dict()["param_groups"] == groups
    assert all(p.grad is None for p in other.parameters())


def test_states_of_parameters_that_are_frozen_here(tmp_path: Path) -> None:
    model, optimizer = trained(adamw, 3)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "all")
    other, again = trained(adamw, 0)
    other.a.weight.requires_grad_(False)
    assert ucf.load({"model": other, "optim": again}, tmp_path / "all", strict=True)
    assert same(held(other, again), held(model, optimizer))

    other = Net()
    state = {"model": other, "optim": torch.optim.AdamW(other.b.parameters())}
    report = ucf.load(state, tmp_path / "all")
    assert not report
    assert {
        f"a.{n} ({s})" for n in ("weight", "bias") for s in ("step", "exp_avg", "exp_avg_sq")
    } == {*report.left}
    with pytest.raises(StateMismatch, match=r"unexpected: a\.weight"):
        ucf.load(state, tmp_path / "all", strict=True)
    for leave in (
        "optim.state.a",
        ["a.*.exp_avg*", "a.*.step"],
        ["a.weight (*", "optim.state.a.bias.*"],
    ):
        assert ucf.load(state, tmp_path / "all", strict=True, leave=leave)


def test_parameters_that_are_new_or_were_frozen_get_no_state(tmp_path: Path) -> None:
    """The first update of Adam with a state of zeros is another one than without."""
    model = Net()
    model.a.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer, 3)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "some")
    other, again = trained(adamw, 0)
    assert ucf.load({"model": other, "optim": again}, tmp_path / "some", strict=True)
    assert {n for n, p in other.named_parameters() if again.state.get(p)} == {"b.weight", "b.bias"}
    model.a.requires_grad_(True)
    for each in ((model, optimizer), (other, again)):
        train(*each, 1, first=5)
    assert same(held(other, again), held(model, optimizer))

    more = Net()
    more.c = torch.nn.Linear(2, 2)
    third = torch.optim.AdamW(more.parameters(), 0.1)
    report = ucf.load({"model": more, "optim": third}, tmp_path / "some", strict=False)
    assert not report
    assert {n for n, p in more.named_parameters() if third.state.get(p)} == {"b.weight", "b.bias"}


def test_hyper_parameters_that_need_more_states(tmp_path: Path) -> None:
    """An optimizer that is made without momentum has it after the load, with its buffers."""
    for saved, here in (
        (OPTIMIZERS["momentum"], OPTIMIZERS["SGD"]),
        (OPTIMIZERS["AMSGrad"], OPTIMIZERS["AdamW"]),
    ):
        model, optimizer = trained(saved, 3)
        ucf.save({"model": model, "optim": optimizer}, tmp_path / "more", overwrite=True)
        other, again = trained(here, 0)
        assert ucf.load({"model": other, "optim": again}, tmp_path / "more", strict=True)
        assert same(held(other, again), held(model, optimizer))


def by_name(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: bool
) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)))


def empty_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (group,) = optimizer.state_dict()["param_groups"]
    return {
        "state": {},
        "param_groups": [group | {"params": [n for n, _ in model.named_parameters()]}],
    }


TEMPLATES: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], dict[str, Any]]] = {
    "nothing in it": empty_by_name,
    "by name": by_name,
    "flattened": lambda m, o: by_name(m, o, flatten_optimizer_state_dict=True),
    "only the groups, flattened": lambda m, o: {
        k: v
        for k, v in by_name(m, o, flatten_optimizer_state_dict=True).items()
        if k.startswith("param_groups")
    },
    "numbered": lambda _, o: o.state_dict(),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_state_dict_of_a_fresh_optimizer_gets_the_states(template: Any, tmp_path: Path) -> None:
    model, optimizer = trained(adamw, 3)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    other, again = trained(lambda m: adamw(m, lr=0.5), 0)
    entries = template(other, again)
    assert ucf.load({"model": other, "optim": entries}, tmp_path / "ck", strict=True)
    names = {n: str(i) for i, (n, _) in enumerate(other.named_parameters())}
    found: dict[str, Any] = {}
    for name, number in names.items():
        for key in (f"state.{name}.", f"state.{number}."):
            flat = {k: v for k, v in entries.items() if k.startswith(key)}
            found.setdefault(name, {}).update({k.rpartition(".")[2]: v for k, v in flat.items()})
        nested = entries.get("state", {})
        found[name] |= nested.get(name, nested.get(int(number), {}))
    assert same(found, {n: states for n, (_, states) in held(model, optimizer).items()})
    rates = [v for k, v in entries.items() if k.endswith(".lr")] or [
        g["lr"] for g in entries["param_groups"]
    ]
    assert {*rates} == {0.1}


def test_numbered_state_dicts(tmp_path: Path) -> None:
    model, optimizer = trained(adamw, 3)
    ucf.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "ck")
    other, again = trained(adamw, 0)
    entries = again.state_dict()
    assert ucf.load({"model": other, "optim": entries}, tmp_path / "ck", strict=True)
    again.load_state_dict(entries)
    assert same(held(other, again), held(model, optimizer))
    two_groups = torch.optim.AdamW(
        [{"params": other.a.parameters()}, {"params": other.b.parameters()}]
    )
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "named")
    with pytest.raises(StateMismatch, match="the groups have other numbers of parameters"):
        ucf.load({"model": other, "optim": two_groups.state_dict()}, tmp_path / "named")


def test_states_that_belong_to_all_parameters(tmp_path: Path) -> None:
    """LBFGS has one state for all, and keeps it at the first: it fits only the same parameters in the same order."""
    model, optimizer = trained(OPTIMIZERS["LBFGS"], 2)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    other = Net()
    turned = torch.optim.LBFGS(list(other.parameters())[::-1])
    with pytest.raises(StateMismatch, match=r"the states of optim \(LBFGS\) cannot be made"):
        ucf.load({"model": other, "optim": turned}, tmp_path / "ck")
    assert not turned.state


def adversaries(*, steps: int, nested: bool = False) -> dict[str, Any]:
    """Two modules, one of which has a name of the other, trained by one optimizer."""
    torch.manual_seed(steps)
    g, d = torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 1))
    groups = [{"params": [*g.parameters()], "lr": 0.1 + steps}, {"params": [*d.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.2 + steps)
    for _ in range(steps):
        optimizer.zero_grad()
        d(g(torch.ones(1, 2))).sum().backward()
        optimizer.step()
    modules = {"g": g, "d": d}
    return {"optimizer": optimizer} | ({"nets": modules} if nested else modules)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_one_optimizer_of_several_modules(nested: bool, form: Any, tmp_path: Path) -> None:
    given = adversaries(steps=3, nested=nested)
    ucf.save(given, tmp_path / "ck", form=form)
    assert {"g.weight", "d.0.weight"} <= set(ucformat.open(tmp_path / "ck").names())
    for steps in (0, 2):
        state = adversaries(steps=steps, nested=nested)
        assert ucf.load(dict(reversed(state.items())), tmp_path / "ck", strict=True)
        mine, other = (s["optimizer"].state_dict() for s in (state, given))
        assert mine["param_groups"] == other["param_groups"]
        for number, states in other["state"].items():
            assert all(torch.equal(mine["state"][number][k], v) for k, v in states.items())
        for name in ("g", "d"):
            one, two = ((s["nets"] if nested else s)[name].state_dict() for s in (state, given))
            assert all(torch.equal(one[k], v) for k, v in two.items())


def test_an_optimizer_of_modules_of_which_one_is_not_in_the_state(tmp_path: Path) -> None:
    given = adversaries(steps=1)
    del given["d"]
    with pytest.raises(
        UsageError,
        match="2 of 4 parameters of the optimizer optimizer are in no module of the state",
    ):
        ucf.save(given, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_lazy_modules_are_refused_by_name(tmp_path: Path) -> None:
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    for state in (
        {"m": lazy},
        {"m": lazy, "o": torch.optim.SGD(lazy.parameters())},
        {"m": lazy.state_dict()},
    ):
        with pytest.raises(UsageError, match=r"m\.0\.weight is a UninitializedParameter") as caught:
            ucf.save(state, tmp_path / "ck")
        assert "run the module once" in str(caught.value)
    ucf.save(
        {"m": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))}, tmp_path / "ck"
    )
    with pytest.raises(UsageError, match=r"m\.0\.weight is a UninitializedParameter"):
        ucf.load({"m": lazy}, tmp_path / "ck")
    with pytest.raises(UsageError, match=r"0\.weight is a UninitializedParameter"):
        ucf.load_into(lazy, tmp_path / "ck")


class Counting(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


def test_optimizers_with_other_state_are_refused(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(UnsupportedError, match="the state dict of Counting has the entry 'count'"):
        ucf.save({"model": model, "optim": Counting(model.parameters())}, tmp_path / "ck")
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["steps"] = 3
    with pytest.raises(
        UnsupportedError, match="SGD has a state of 'steps', which is none of its parameters"
    ):
        ucf.save({"model": model, "optim": optimizer}, tmp_path / "ck")
    hooked = torch.optim.SGD(model.parameters())
    hooked.register_state_dict_post_hook(lambda _, entries: {**entries, "count": 3})
    with pytest.raises(UnsupportedError, match="the state dict of SGD has the entry 'count'"):
        ucf.save({"model": model, "optim": hooked}, tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


class Odd(torch.optim.Optimizer):
    """States of any shapes and kinds, which it makes when a parameter has a gradient."""

    def __init__(self, params: Any, kinds: tuple[str, ...]) -> None:
        self.kinds = kinds
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            new = not state
            for kind in self.kinds:
                add = 0.0 if new and not p.grad.any() else 1.0
                if kind == "number":
                    state[kind] = state.get(kind, 0) + 1
                elif kind == "list":
                    state[kind] = [*state.get(kind, []), p.detach().clone()][-2:]
                elif kind == "deep":
                    state[kind] = {"row": p.detach().sum(-1), 3: {"n": 1.5}}
                else:
                    shape = {
                        "like": p.shape,
                        "scalar": (),
                        "row": p.shape[:1],
                        "wide": (*p.shape, 2),
                    }[kind]
                    state[kind] = state.get(kind, torch.zeros(shape, dtype=torch.float64)) + add
            p.data.add_(p.grad, alpha=-self.param_groups[0]["lr"])


@given(
    kinds=st.sets(
        st.sampled_from(["number", "list", "deep", "like", "scalar", "row", "wide"]), min_size=1
    ),
    frozen_then=st.sets(st.sampled_from(["a.weight", "a.bias", "b.weight"])),
    frozen_now=st.sets(st.sampled_from(["a.weight", "a.bias", "b.weight"])),
    steps=st.integers(0, 2),
    here=st.integers(0, 2),
)
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_states(
    kinds: set[str],
    frozen_then: set[str],
    frozen_now: set[str],
    steps: int,
    here: int,
    tmp_path: Path,
) -> None:
    def make(frozen: set[str], steps: int) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        optimizer = Odd(model.parameters(), tuple(sorted(kinds)))
        train(model, optimizer, steps)
        return model, optimizer

    model, optimizer = make(frozen_then, steps)
    other, again = make(frozen_now, here)
    expected = held(model, optimizer)
    ucf.save({"model": model, "optim": optimizer}, tmp_path / "ck", overwrite=True)
    assert ucf.load({"model": other, "optim": again}, tmp_path / "ck", strict=True)
    assert same(held(other, again), expected)


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_a_new_optimizer_gets_states_that_are_stored_by_number(tmp_path: Path, kind: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if kind == "file":
        parts["ema"] = average
        torch.save({k: v.state_dict() for k, v in parts.items()}, tmp_path / "ck.pt")
    else:
        entries = {k: v.state_dict() for k, v in parts.items()}
        torch.distributed.checkpoint.save(entries, checkpoint_id=tmp_path / "ck.pt")
    fresh = Net()
    state: dict[str, Any] = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    if kind == "file":
        state["ema"] = torch.optim.swa_utils.AveragedModel(fresh)
    report = ucf.load(state, tmp_path / "ck.pt", certify=True)
    assert report.unexpected == ()
    assert len(state["optimizer"].state) == 4
    assert state["optimizer"].param_groups[0]["lr"] == 0.5


def test_numbers_that_nothing_explains_ask_for_names(tmp_path: Path) -> None:
    """A parameter has no states, and may be that or a buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(requires_grad=False)
    model[0].register_buffer("scale", torch.ones(3))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    train(model, state["optimizer"], 1)
    torch.save({k: v.state_dict() for k, v in state.items()}, tmp_path / "ck.pt")
    with pytest.raises(
        StateMismatch, match="its parameters have numbers in the checkpoint"
    ) as info:
        ucf.load(state, tmp_path / "ck.pt")
    assert "options={'groups': [[names of the first optimizer group, in order], …]}" in str(
        info.value
    )
    [entry] = ucf.certify(state, tmp_path / "ck.pt").different
    assert str(entry).startswith("group 0 of optimizer on rank 0: its parameters have numbers")
    groups = [[name for name, _ in model.named_parameters()]]
    assert ucf.certify(state, ucformat.open(tmp_path / "ck.pt", options={"groups": groups}))


@pytest.mark.parametrize("form", ["zarr", "packed"])
def test_a_step_that_a_group_has_is_that_of_its_parameters(tmp_path: Path, form: Any) -> None:
    """As Megatron-Core and fused optimizers save it, of which PyTorch's take a tensor for each parameter."""
    model, optimizer = trained(adamw, 3)
    expected = held(model, optimizer)
    for states in optimizer.state.values():
        assert states.pop("step") == 3
    optimizer.param_groups[0]["step"] = 3
    ucf.save({"model": model, "optimizer": optimizer}, tmp_path / "ck", form=form)
    assert {key.state for key in ucformat.open(tmp_path / "ck").tensors} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
    }
    other = Net()
    again = adamw(other)
    report = ucf.load({"model": other, "optimizer": again}, tmp_path / "ck", certify=True)
    assert (bool(report), report.missing) == (True, ())
    assert same(held(other, again), expected)
    assert not again.state.get(other.unused.weight)
    again.state[other.a.weight]["step"] += 1
    certificate = ucf.certify({"model": other, "optimizer": again}, tmp_path / "ck")
    assert not certificate
    assert [entry.name for entry in certificate.different] == ["a.weight (step)"]
