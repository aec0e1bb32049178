"""Plain values and hyper-parameters come back in their places, and what cannot is told."""

from __future__ import annotations

from collections import Counter, OrderedDict
from datetime import date
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ucformat
from ucformat.errors import ChecksumError, StateMismatch, UsageError
from ucformat.torch import PerRank, load, load_into, save
from ucformat.torch.loading.match import stored_names
from ucformat.torch.loading.values import SavedState, find_object, fit_groups, fit_objects
from ucformat.torch.state.collect import collect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ucformat.torch.comm.group import Group


class Ranks:
    """A group of which only the rank and the size are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def of(rank: int, size: int) -> Group:
    return Ranks(rank, size)  # type: ignore[return-value]


def checkpoint(folder: Path, state: dict[Any, Any]) -> ucformat.Checkpoint:
    save(state, folder)
    return ucformat.open(folder)


KEYS: list[Any] = ["a", "3", 4, -4, "$x", "$int:3", "$", "a.b", ""]
ODD_KEYS: list[Any] = [*KEYS, True, None, 1.5, (1, "x"), b"k"]


@pytest.mark.parametrize(
    ("keys", "depth"), [(KEYS, 0), (KEYS, 1), (KEYS, 2), (ODD_KEYS, 1), (ODD_KEYS, 2)]
)
def test_values_under_keys_of_all_kinds(tmp_path: Path, keys: list[Any], depth: int) -> None:
    def state(values: list[Any]) -> dict[Any, Any]:
        out: dict[Any, Any] = dict(zip(keys, values, strict=True))
        for _ in range(depth):
            out = {"in": out, "$beside": 0}
        return out

    values = [f"value {n}" for n in range(len(keys))]
    ck = checkpoint(tmp_path / "ck", state(values))
    other = state([None] * len(keys))
    report = load(other, ck)
    assert report
    assert other == state(values)


@pytest.mark.parametrize(
    "state", [{None: 1}, {"in": {1.5: torch.ones(1)}}, {"in": [{True: torch.ones(1)}]}], ids=str
)
def test_what_has_a_name_of_its_own_has_a_key_that_can_name_it(
    tmp_path: Path, state: dict[Any, Any]
) -> None:
    with pytest.raises(UsageError, match=r"has the key (None|1\.5|True), but keys must be"):
        save(state, tmp_path / "ck")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"a": {"b": 1}, "c": 2})
    absent = find_object(ck.objects, ("nowhere",))
    assert find_object(ck.objects, ("a", "b")) == 1
    for path in (("a", "x"), ("a", "b", "c"), ("c", "d"), ("a", 0)):
        assert find_object(ck.objects, path) is absent


@pytest.mark.parametrize("strict", ["yes", 1, None])
def test_strictness_of_another_kind_is_refused(tmp_path: Path, strict: Any) -> None:
    ck = checkpoint(tmp_path / "ck", {"w": torch.ones(2)})
    state = {"w": torch.zeros(2)}
    with pytest.raises(UsageError, match=f"strict={strict!r} is not supported"):
        load(state, ck, strict=strict)
    assert not state["w"].any()


def test_missing_values_are_told_with_all_else(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"a": 1, "w": torch.ones(2), "rank": PerRank(3)})
    state = {
        "a": 5,
        "b": {"c": 2},
        "w": torch.zeros(3),
        "rank": PerRank(0),
        "mine": PerRank(0),
        "v": torch.zeros(1),
    }
    with pytest.raises(StateMismatch) as caught:
        load(state, ck)
    for line in (
        "missing: v (weight)",
        "missing: the object b.c",
        "missing: the per-rank value mine",
        "shape: w",
    ):
        assert line in caught.value.message
    assert (state["a"], state["b"]) == (5, {"c": 2})
    report = load(state, ck, strict=False)
    assert not report
    assert (state["a"], state["b"]) == (1, {"c": 2})
    assert report.missing == ("v (weight)", "the object b.c", "the per-rank value mine")


def test_values_take_the_types_that_the_state_has(tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.ones(1)], lr=0.1), lambda _: 1.0
    )
    given = {
        "betas": (0.9, 0.99),
        "kinds": OrderedDict(a=1),
        "schedule": schedule,
        "size": torch.Size([2]),
    }
    ck = checkpoint(tmp_path / "ck", given)
    state: dict[str, Any] = {
        "betas": (0, 0),
        "kinds": OrderedDict(),
        "schedule": schedule,
        "size": torch.Size([]),
    }
    assert load(state, ck)
    assert state["betas"] == (0.9, 0.99)
    assert list(state["kinds"]) == ["a"]
    assert type(state["size"]) is torch.Size


class Pickled:
    def __init__(self, value: int) -> None:
        self.value = value


def test_pickles_are_opened_where_that_is_asked_for(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"a": Pickled(3), "each": PerRank({"x": Pickled(4)}), "n": 1})
    state: dict[str, Any] = {"a": None, "n": 0}
    with pytest.raises(StateMismatch, match="the object a: the value is a pickle"):
        load(state, ck)
    assert state["n"] == 0
    report = load(state, ck, strict=False)
    assert (state["a"], state["n"]) == (None, 1)
    assert len(report.problems.others) == 1
    state["each"] = PerRank({"x": None})
    with pytest.raises(StateMismatch, match="the per-rank value each: the value is a pickle"):
        load(state, ck)
    assert load({"each": PerRank({"x": None})}, ck, strict=False).problems.others
    assert load(state, ck, trust=True)
    assert state["a"].value == 3


def test_an_object_may_be_called_per_rank(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"per_rank": 1, "x": PerRank(2)})
    state: dict[str, Any] = {"per_rank": 0, "x": PerRank(0)}
    load(state, ck)
    assert (state["per_rank"], state["x"].value) == (1, 2)
    assert (dict(ck.objects), list(ck.per_rank["x"])) == ({"per_rank": 1}, [2])


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def of_ranks(tmp_path: Path, values: list[Any]) -> ucformat.Checkpoint:
    """A checkpoint that so many ranks saved, each with its value."""
    ck = checkpoint(tmp_path / "ck", {"data": PerRank(Box(values[0]))})
    ck.__dict__["per_rank"] = {"data": values}  # as that many ranks would have left it
    return ck


def test_each_rank_gets_its_own_value_back(tmp_path: Path) -> None:
    ck = of_ranks(tmp_path, [{"at": 0}, {"at": 10}, {"at": 20}])
    for rank in range(3):
        box = Box({"at": -1})
        fitted = fit_objects(
            collect({"data": PerRank(box)}), SavedState(ck, {}), of(rank, 3), trust=False
        )
        assert not fitted.others
        assert not fitted.missing
        assert box.value == {"at": -1}
        fitted.put()
        assert box.value == {"at": 10 * rank}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_needs_a_merge(tmp_path: Path, ranks: int) -> None:
    ck = of_ranks(tmp_path, [{"at": 0}, {"at": 10}, {"at": 20}])
    box = Box(None)
    fitted = fit_objects(
        collect({"data": PerRank(box)}), SavedState(ck, {}), of(0, ranks), trust=False
    )
    fitted.put()
    assert box.value is None
    (line,) = fitted.others
    assert f"data (Box) has a value of each of 3 ranks, and is loaded by {ranks}" in line
    assert "merge" in line

    def merge(values: list[Any], rank: int, of_ranks: int) -> Any:
        return {"all": [v["at"] for v in values], "rank": rank, "of": of_ranks}

    for rank in range(ranks):
        fitted = fit_objects(
            collect({"data": PerRank(box, merge)}), SavedState(ck, {}), of(rank, ranks), trust=False
        )
        assert not fitted.others
        fitted.put()
        assert box.value == {"all": [0, 10, 20], "rank": rank, "of": ranks}


def test_a_merge_is_not_asked_where_the_number_is_the_same(tmp_path: Path) -> None:
    ck = of_ranks(tmp_path, [1, 2])
    box = Box(None)

    def merge(*_: Any) -> Any:
        raise AssertionError

    fitted = fit_objects(
        collect({"data": PerRank(box, merge)}), SavedState(ck, {}), of(1, 2), trust=False
    )
    fitted.put()
    assert box.value == 2


def trained(
    order: tuple[int, ...] = (0, 1), lrs: tuple[float, ...] = (0.1, 0.2), **options: Any
) -> dict[str, Any]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    groups = [
        {"params": list(net[i].parameters()), "lr": lr} for i, lr in zip(order, lrs, strict=True)
    ]
    return {"model": net, "optim": torch.optim.AdamW(groups, **options)}


def options_of(state: dict[str, Any]) -> list[tuple[float, tuple[float, float]]]:
    return [(g["lr"], tuple(g["betas"])) for g in state["optim"].param_groups]


def test_groups_are_known_by_their_parameters_whatever_their_order(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", trained(betas=(0.5, 0.75)))
    state = trained(order=(1, 0), lrs=(7.0, 7.0))
    assert load(state, ck)
    assert options_of(state) == [(0.2, (0.5, 0.75)), (0.1, (0.5, 0.75))]
    assert type(state["optim"].param_groups[0]["betas"]) is tuple


def test_a_group_of_parameters_that_had_different_hyper_parameters(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", trained())
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = {"model": net, "optim": torch.optim.AdamW(net.parameters(), lr=3.0)}
    with pytest.raises(
        StateMismatch, match="group 0 of optim: its parameters were in groups with different hyper"
    ):
        load(state, ck)
    load(state, ck, strict=False)
    assert options_of(state)[0][0] == 3.0
    same = checkpoint(tmp_path / "same", trained(lrs=(0.5, 0.5)))
    assert load(state, same)
    assert options_of(state)[0][0] == 0.5


class Phase(IntEnum):
    WARMUP = 1
    DECAY = 2


class Name(str):
    __slots__ = ()


def test_values_keep_the_classes_that_the_program_has(tmp_path: Path) -> None:
    ck = checkpoint(
        tmp_path / "ck", {"phase": Phase.DECAY, "name": Name("x"), "mine": PerRank([Name("y")])}
    )
    state: dict[str, Any] = {"phase": Phase.WARMUP, "name": Name(""), "mine": PerRank([Name()])}
    assert load(state, ck)
    assert [type(v) for v in (state["phase"], state["name"], *state["mine"].value)] == [
        Phase,
        Name,
        Name,
    ]
    state = {"phase": 0, "name": "", "mine": PerRank([])}
    report = load(state, ck)
    assert state["phase"] is Phase.DECAY
    assert type(state["name"]) is str
    assert not report
    assert [line.partition(":")[0] for line in report.problems.inexact] == [
        "the object name",
        "the per-rank value mine",
    ]
    with pytest.raises(
        StateMismatch, match=r"the object name: it was saved as a tests\.torch\.test_restore\.Name"
    ):
        load(state, ck, strict=True)


def test_mappings_of_the_state_stay_what_they_are(tmp_path: Path) -> None:
    for counted in (Counter("aab"), Counter()):
        ck = checkpoint(tmp_path / f"ck{len(counted)}", {"counts": counted})
        mine: Counter[str] = Counter()
        state = {"counts": mine}
        assert load(state, ck)
        assert state["counts"] is mine
        assert mine == counted


def test_a_mapping_that_cannot_be_changed_is_an_error_before_anything_is(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"w": torch.ones(1), "fixed": {"a": 1}})
    state = {"w": torch.zeros(1), "fixed": MappingProxyType({"a": 2})}
    with pytest.raises(StateMismatch, match=r"fixed\.a cannot be replaced where it is"):
        load(state, ck)
    assert state["w"] == 0


def test_options_that_only_the_program_has_are_told(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", trained())
    state = trained()
    for group in state["optim"].param_groups:
        group["exotic"] = 1
    report = load(state, ck)
    assert not report
    assert report.problems.inexact == tuple(
        f"the hyper-parameter exotic of group {number} of optim was not saved, and stays as it is"
        for number in (0, 1)
    )
    assert [g["exotic"] for g in state["optim"].param_groups] == [1, 1]


def test_an_option_that_is_a_pickle_is_an_error_before_anything_is_changed(tmp_path: Path) -> None:
    given = trained()
    for group in given["optim"].param_groups:
        group["since"] = date(2026, 1, 2)
    ck = checkpoint(tmp_path / "ck", given)
    state = trained()
    before = {n: t.clone() for n, t in state["model"].state_dict().items()}
    with pytest.raises(
        StateMismatch, match="a hyper-parameter of group 0 of optim: the value is a pickle"
    ):
        load(state, ck)
    assert all(torch.equal(t, before[n]) for n, t in state["model"].state_dict().items())
    assert load(state, ck, trust=True)
    assert state["optim"].param_groups[0]["since"] == date(2026, 1, 2)


def test_parameters_whose_group_is_not_stored(tmp_path: Path) -> None:
    given = trained()
    ck = checkpoint(tmp_path / "ck", {"model": given["model"]})
    found = collect(trained())
    fitted = fit_groups(found, SavedState(ck, stored_names(ck, None)))
    fitted.put()
    assert [line.split(":")[0] for line in fitted.missing] == [
        "group 0 of optim",
        "group 1 of optim",
    ]
    assert "0.bias, 0.weight" in fitted.missing[0]


def test_groups_under_other_names(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", trained())
    net = torch.nn.ModuleDict({"0": torch.nn.Linear(2, 2), "1": torch.nn.Linear(2, 2)})
    outer = torch.nn.ModuleDict({"body": net})
    groups = [{"params": list(net[k].parameters()), "lr": 9.0} for k in "10"]
    state = {"model": outer, "optim": torch.optim.AdamW(groups)}
    assert load(state, ck, rename=lambda name: f"body.{name}")
    assert [lr for lr, _ in options_of(state)] == [0.2, 0.1]


def test_options_that_the_optimizer_does_not_have_yet(tmp_path: Path) -> None:
    """What a scheduler or the program has added comes back, as from PyTorch; a flattened state dict has no place."""
    given = trained()
    for group in given["optim"].param_groups:
        group.update(initial_lr=0.75, exotic=1)
    ck = checkpoint(tmp_path / "ck", given)
    state = trained()
    assert load(state, ck)
    assert [g["initial_lr"] for g in state["optim"].param_groups] == [0.75, 0.75]
    assert [g["exotic"] for g in state["optim"].param_groups] == [1, 1]
    flat = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat["optim"] = get_optimizer_state_dict(flat["model"], flat["optim"], options=options)
    report = load(flat, ck)
    assert not report
    assert {line.partition(" of ")[0] for line in report.left} == {
        "the hyper-parameter exotic",
        "the hyper-parameter initial_lr",
    }
    assert load(flat, ck, leave="optim.param_groups.*")


def test_groups_that_differ_in_a_mark_of_their_engine_become_one(tmp_path: Path) -> None:
    """As Megatron-Core's groups of experts, which an optimizer without expert parallelism does not have apart."""

    def made(marks: Sequence[bool], lr: float) -> dict[str, Any]:
        net = torch.nn.Linear(2, 2)
        groups = [{"params": [p], "lr": lr} for p in net.parameters()]
        optimizer = torch.optim.AdamW(groups if marks else net.parameters(), lr=lr)
        for group, mark in zip(optimizer.param_groups, marks, strict=False):
            group["is_expert_parallel"] = mark
        net(torch.ones(2)).sum().backward()
        optimizer.step()
        return {"model": net, "optim": optimizer}

    ck = checkpoint(tmp_path / "ck", made((True, False), 0.7))
    state = made((), 0.2)
    report = load(state, ck)
    assert report.left == ("the hyper-parameter is_expert_parallel of group 0 of optim",)
    assert load(state, ck, leave="optim.param_groups.*.is_expert_parallel")
    (group,) = state["optim"].param_groups
    assert (group["lr"], "is_expert_parallel" in group) == (0.7, False)
    given = made((True, False), 0.7)
    given["optim"].param_groups[1]["lr"] = 0.1
    with pytest.raises(StateMismatch, match=r"groups with different hyper-parameters \(lr\)"):
        load(state, checkpoint(tmp_path / "other", given))


def test_options_of_a_group_without_parameters(tmp_path: Path) -> None:
    """A scheduler sets them, and parameters may be added later."""

    def made(lr: float, *, empty: bool = True) -> dict[str, Any]:
        net = torch.nn.Linear(2, 2)
        more = [{"params": [], "lr": lr}] * empty
        return {
            "model": net,
            "optim": torch.optim.AdamW([{"params": list(net.parameters())}, *more], lr=lr),
        }

    ck = checkpoint(tmp_path / "ck", made(0.7))
    state = made(0.2)
    assert load(state, ck)
    assert [g["lr"] for g in state["optim"].param_groups] == [0.7, 0.7]
    with pytest.raises(
        StateMismatch, match="group 1 of optim: its hyper-parameters; it has no parameters"
    ):
        load(made(0.2), checkpoint(tmp_path / "other", made(0.7, empty=False)))


@pytest.mark.parametrize(
    "empty", [{}, None, torch.nn.Identity(), []], ids=["mapping", "none", "module", "list"]
)
def test_an_entry_that_has_no_tensors_here(tmp_path: Path, empty: Any) -> None:
    """What was saved in an entry that is asked for is told, though the state has a place for no tensor."""
    ck = checkpoint(
        tmp_path / "ck", {"a": {"w": torch.ones(2), "n": 1}, "b": torch.nn.Linear(2, 2)}
    )
    state = {"a": empty}
    report = load(state, ck)
    assert not report
    assert "a.w (weight)" in report.left
    assert not any(line.startswith(("weight", "bias", "b")) for line in report.left), (
        "b is not asked for"
    )
    assert load({"n": 0}, checkpoint(tmp_path / "other", {"n": 1, "a": {"w": torch.ones(2)}}))


def test_nothing_is_put_where_reading_fails(tmp_path: Path) -> None:
    ck = checkpoint(tmp_path / "ck", {"w": torch.arange(4096.0), "n": 1})
    (shard,) = (tmp_path / "ck").glob("data/*/weight/w/c/0")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    state = {"w": torch.zeros(4096), "n": 0}
    with pytest.raises(ChecksumError):
        load(state, ck)
    assert state["n"] == 0


class Summed(torch.nn.Linear):
    """Has the sum of its weight, which no state dict has."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.sum()

    def sum(self) -> None:
        self.total = self.weight.detach().sum()


class SummedByHook(Summed):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.sum())


class SummedInside(Summed):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.sum()


class SummedByRoot(Summed):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        out = super().load_state_dict(*args, **kwargs)
        self.sum()
        return out


@pytest.mark.parametrize("kind", [SummedByHook, SummedInside, SummedByRoot])
def test_modules_make_what_they_make_in_a_load(tmp_path: Path, kind: type[Summed]) -> None:
    ck = checkpoint(tmp_path / "ck", {"model": kind()})
    model = kind()
    assert load({"model": model}, ck)
    assert model.total == model.weight.sum() == ck["weight"][...].sum()
    model = kind()
    load_into(model, ck)
    assert model.total == model.weight.sum() == ck["weight"][...].sum()
