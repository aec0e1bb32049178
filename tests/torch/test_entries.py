"""A load fills what was asked for with what was saved of it, and says what it could not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim.swa_utils import AveragedModel

import ucformat
import ucformat.torch as ucf
from ucformat.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def linear(value: float) -> torch.nn.Linear:
    out = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in out.parameters():
            p.fill_(value)
    return out


def averaged(value: float) -> AveragedModel:
    return AveragedModel(linear(value))


def values(state: Any) -> set[float]:
    tensors = state.parameters() if isinstance(state, torch.nn.Module) else state.values()
    return {v for t in tensors for v in t.flatten().tolist()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    ucf.save({"model": linear(1), "ema": averaged(2), "step": 3}, tmp_path / "ck")
    return tmp_path / "ck"


def test_a_module_that_was_saved_in_a_wrapper(place: Path) -> None:
    """And not another one, which has the same last names."""
    for state in ({"ema": linear(0)}, {"ema": linear(0), "model": linear(0)}):
        report = ucf.load(state, place)
        assert [values(state[k]) for k in state] == [{2.0}, {1.0}][: len(state)]
        assert report.left == ("ema.n_averaged (weight)",)
        assert not report
        assert ucf.load(state, place, leave="ema.n_averaged")
    entries = {"ema": dict(linear(0).state_dict())}
    ucf.load(entries, place)
    assert values(entries["ema"]) == {2.0}


def test_part_of_a_module_that_was_saved_in_a_wrapper(place: Path) -> None:
    bigger = torch.nn.Module()
    bigger.weight, bigger.scale = (
        torch.nn.Parameter(torch.zeros(2, 3)),
        torch.nn.Parameter(torch.zeros(1)),
    )
    with pytest.raises(StateMismatch, match=r"missing: scale \(weight\)"):
        ucf.load({"ema": bigger}, place)
    report = ucf.load({"ema": bigger}, place, strict=False)
    assert values({"w": bigger.weight}) == {2.0}
    assert report.missing == ("scale (weight)",)


def test_nothing_is_taken_from_another_entry(tmp_path: Path) -> None:
    """The checkpoint has an entry of this key, in which the weights have other names."""
    ucf.save(
        {"model": linear(1), "ema": {"inner.weight": torch.ones(2, 3), "n": torch.ones(1)}},
        tmp_path / "ck",
    )
    mine = linear(0)
    with pytest.raises(
        StateMismatch, match=r"missing: ema\.weight \(weight\)\n  missing: ema\.bias"
    ):
        ucf.load({"ema": mine}, tmp_path / "ck")
    assert not ucf.load({"ema": mine}, tmp_path / "ck", strict=False)
    assert values(mine) == {values(linear(0)).pop()}
    asked = {"ema": {"module.weight": torch.zeros(2, 3)}}
    with pytest.raises(dcp.CheckpointException, match="ema"):
        dcp.load(asked, storage_reader=ucf.Reader(tmp_path / "ck"), no_dist=True)


def test_names_alone_are_followed_where_one_module_has_them(place: Path, tmp_path: Path) -> None:
    mine = linear(0)
    with pytest.raises(
        StateMismatch,
        match=r"student: the checkpoint has such weights more than once, as model\.weight",
    ):
        ucf.load({"student": mine}, place)
    assert ucf.load({"student": mine}, place, rename={r"(weight|bias)": r"student.\1"})
    assert values(mine) == {1.0}
    assert ucf.load({"net": linear(0)}, place)  # a name of the model itself
    ucf.save({"model": linear(4)}, tmp_path / "one")
    assert ucf.load({"student": mine}, tmp_path / "one")
    assert values(mine) == {4.0}


RENAMES: list[tuple[str, Any]] = [
    ("ema", {r"ema\.module\.(.*)": r"ema.\1"}),
    ("ema", {r"ema\.module\.(.*)": r"\1"}),
    ("model", {r"ema\.module\.(.*)": r"model.\1"}),
    ("model", {r"ema\.module\.(.*)": r"\1"}),
    ("student", lambda name: name.replace("ema.module.", "student.")),
    ("student", lambda name: name.removeprefix("ema.module.")),
]


@pytest.mark.parametrize(("key", "rename"), RENAMES)
def test_what_is_renamed_is_meant(key: str, rename: Any, place: Path) -> None:
    mine = linear(0)
    assert ucf.load({key: mine}, place, rename=rename, leave=["ema.n_averaged", "weight", "bias"])
    assert values(mine) == {2.0}


def test_renames_of_a_prefix_for_plain_weights(place: Path) -> None:
    rename = {r"ema\.module\.(.*)": r"\1"}
    assert values(ucf.state_dict(place, ["weight", "bias"], rename=rename)) == {2.0}
    mine = linear(0)
    found = ucf.load_into(mine, place, rename=rename, strict=False)
    assert values(mine) == {2.0}
    assert found.missing_keys == []
    assert found.unexpected_keys == ["weight", "bias", "ema.n_averaged"]


def test_values_of_an_entry_that_have_no_place(tmp_path: Path) -> None:
    ucf.save(
        {"trainer": {"step": 5, "epoch": {"n": 2}}, "other": 1, "rng": ucf.Rng()}, tmp_path / "ck"
    )
    state = {"trainer": {"step": 0}}
    report = ucf.load(state, tmp_path / "ck")
    assert state == {"trainer": {"step": 5}}
    assert report.left == ("the object trainer.epoch.n",)
    assert not report
    assert ucf.load(state, tmp_path / "ck", leave="trainer.epoch")
    with pytest.raises(StateMismatch, match=r"unexpected: the object trainer\.epoch\.n"):
        ucf.load(state, tmp_path / "ck", strict=True)
    assert ucf.load(
        {"trainer": {"step": 0, "epoch": {}}, "rng": ucf.Rng()}, tmp_path / "ck", strict=True
    )


def test_weights_of_an_entry_that_have_no_place(tmp_path: Path) -> None:
    both = {"model": {"w": torch.ones(2), "head": torch.ones(3)}, "ema": {"w": torch.ones(2)}}
    for state, url in ((both, tmp_path / "entries"), (both["model"], tmp_path / "flat")):
        ucf.save(state, url)
        asked: Any = {"model": {"w": torch.zeros(2)}} if state is both else {"w": torch.zeros(2)}
        report = ucf.load(asked, url)
        assert report.left == ("head (weight)",)
        assert not report
        assert ucf.load(asked, url, leave="head")
    assert ucf.load(
        {"model": dict(both["model"])}, tmp_path / "entries"
    )  # the rest was not asked for


@given(
    entries=st.dictionaries(
        st.sampled_from(["model", "ema", "student", "teacher", "net"]),
        st.tuples(st.booleans(), st.sampled_from([(3,), (4,)])),
        min_size=1,
    ),
    asked=st.sampled_from(["model", "ema", "student", "teacher", "net"]),
    shape=st.sampled_from([(3,), (4,)]),
)
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_entries(
    entries: dict[str, tuple[bool, tuple[int, ...]]],
    asked: str,
    shape: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """A weight comes from the entry of its key, or from the only one it can come from."""

    def module(shape: tuple[int, ...], value: float) -> torch.nn.Module:
        out = torch.nn.Module()
        out.w = torch.nn.Parameter(torch.full(shape, float(value)))
        return out

    state = {
        key: AveragedModel(module(of, n)) if wrapped else module(of, n)
        for n, (key, (wrapped, of)) in enumerate(entries.items(), 1)
    }
    ucf.save(state, tmp_path / "ck", overwrite=True)
    mine = module(shape, 0)
    try:
        ucf.load({asked: mine}, tmp_path / "ck")
    except StateMismatch:
        assert entries.get(asked, (0, None))[1] != shape
        return
    number = int(values(mine).pop())
    source = list(entries)[number - 1]
    fitting = [key for key, (_, of) in entries.items() if of == shape]
    assert source == asked or (
        asked not in entries and (fitting == [source] or asked in ("model", "net"))
    )


class Cloning(torch.nn.Linear):
    """Its state dict has a copy of the weight, and one that no parameter has."""

    def __init__(self, kind: str = "clone") -> None:
        super().__init__(3, 4)
        self.register_state_dict_post_hook(getattr(self, f"_{kind}"))
        if kind in ("split", "view"):
            self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _clone(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].clone()

    @staticmethod
    def _split(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, part in zip(("up", "gate"), state.pop(f"{prefix}weight").chunk(2), strict=True):
            state[f"{prefix}{name}.weight"] = part.clone()

    @staticmethod
    def _view(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, part in zip(("up", "gate"), state.pop(f"{prefix}weight").chunk(2), strict=True):
            state[f"{prefix}{name}.weight"] = part

    @staticmethod
    def _double(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[f"{prefix}other"] = state.pop(f"{prefix}weight").clone()

    @staticmethod
    def _join(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}up.weight" in state:
            parts = [state.pop(f"{prefix}{name}.weight") for name in ("up", "gate")]
            state[f"{prefix}weight"] = torch.cat(parts)


def hooked(kind: str, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Cloning(kind))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        [p.tolist(), {k: v.tolist() for k, v in optimizer.state[p].items()}]
        for p in model.parameters()
    ]


@pytest.mark.parametrize("kind", ["clone", "split", "view"])
def test_state_dict_hooks_are_followed(kind: str, tmp_path: Path) -> None:
    first, second = hooked(kind, 1), hooked(kind, 2)
    assert contents(*first) != contents(*second)
    ucf.save({"model": first[0], "optim": first[1]}, tmp_path / "ck")
    names = ucformat.open(tmp_path / "ck").states("1.up.weight") if kind != "clone" else ("weight",)
    assert tuple(names) == ("weight",)
    assert ucf.load({"model": second[0], "optim": second[1]}, tmp_path / "ck", strict=True)
    assert contents(*first) == contents(*second)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("double", r"model\.1\.weight is not as it was saved"),
        ("rename", r"model\.1\.other: the module's own load_state_dict does not take it"),
    ],
)
def test_hooks_that_nothing_reverses_are_refused(kind: str, match: str, tmp_path: Path) -> None:
    model, _ = hooked(kind, 1)
    ucf.save({"model": model}, tmp_path / "ck")
    with pytest.raises(StateMismatch, match=match):
        ucf.load({"model": hooked(kind, 2)[0]}, tmp_path / "ck")


class Extra(torch.nn.Module):
    """An extra state that is a tensor, of any length, as Transformer Engine's."""

    def __init__(self, history: int) -> None:
        super().__init__()
        self.w, self.history = torch.nn.Parameter(torch.ones(2)), torch.arange(float(history))

    def get_extra_state(self) -> torch.Tensor:
        return self.history.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state.clone()


def test_extra_states_that_are_tensors(tmp_path: Path) -> None:
    ucf.save({"model": torch.nn.Sequential(Extra(5))}, tmp_path / "ck")
    for history in (5, 2, 0):
        mine = torch.nn.Sequential(Extra(history))
        assert ucf.load({"model": mine}, tmp_path / "ck", strict=True)
        assert mine[0].history.tolist() == [0, 1, 2, 3, 4]


def views(kind: str) -> torch.nn.Module:
    memory = torch.zeros(20)
    make: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "next to each other": lambda: (memory[:10], memory[10:]),
        "in turn": lambda: (memory[::2], memory[1::2]),
        "columns": lambda: (memory.view(4, 5)[:, :2], memory.view(4, 5)[:, 2:]),
        "partly": lambda: (memory[:10], memory[5:15]),
        "one element": lambda: (memory[::3], memory[:1]),
        "of another shape": lambda: (memory[:10], memory[:10].view(2, 5)),
        "transposed": lambda: (memory[:9].view(3, 3), memory[:9].view(3, 3).t()),
        "of another dtype": lambda: (memory[:10], memory.view(torch.int32)[:10]),
        "columns and rows": lambda: (memory.view(4, 5)[:, :3], memory.view(4, 5)[3]),
    }
    out = torch.nn.Module()
    out.a, out.b = (torch.nn.Parameter(t, requires_grad=False) for t in make[kind]())
    return out


@pytest.mark.parametrize("kind", ["next to each other", "in turn", "columns"])
def test_views_that_do_not_share_memory(kind: str, tmp_path: Path) -> None:
    source = {n: torch.rand_like(p) for n, p in views(kind).named_parameters()}
    ucf.save(source, tmp_path / "ck")
    fill: tuple[Callable[[Any], Any], ...] = (
        lambda m: ucf.load_into(m, tmp_path / "ck"),
        lambda m: ucf.load({"model": m}, tmp_path / "ck"),
    )
    for each in fill:
        model = views(kind)
        each(model)
        assert all(torch.equal(p, source[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    "kind",
    [
        "partly",
        "one element",
        "of another shape",
        "transposed",
        "of another dtype",
        "columns and rows",
    ],
)
def test_memory_that_would_be_filled_twice_is_an_error(kind: str, tmp_path: Path) -> None:
    ucf.save({n: torch.ones_like(p) for n, p in views(kind).named_parameters()}, tmp_path / "ck")
    fill: tuple[Callable[[Any], Any], ...] = (
        lambda m: ucf.load_into(m, tmp_path / "ck"),
        lambda m: ucf.load_into(m, tmp_path / "ck", strict=False, dtype=torch.bfloat16),
        lambda m: ucf.load({"model": m}, tmp_path / "ck"),
        lambda m: dcp.load(
            {"model": m.state_dict()}, storage_reader=ucf.Reader(tmp_path / "ck"), no_dist=True
        ),
    )
    for each in fill:
        model = views(kind)
        with pytest.raises(
            (StateMismatch, dcp.CheckpointException), match="share memory, but not as the same view"
        ):
            each(model)
        assert not any(p.any() for p in model.parameters())
    report = ucf.load({"model": model}, tmp_path / "ck", strict=False)
    assert not report
    assert report.tensors == 0


def test_one_memory_for_two_states(tmp_path: Path) -> None:
    for values in ((1.0, 1.0), (1.0, 2.0)):
        saved = {n: {"exp_avg": torch.full((3,), v)} for n, v in zip("ab", values, strict=True)}
        groups = [{"params": ["a", "b"]}]
        weights = {n: torch.ones(3) for n in "ab"}
        ucf.save(
            {"model": weights, "optim": {"state": saved, "param_groups": groups}},
            tmp_path / "ck",
            overwrite=True,
        )
        memory = torch.zeros(3)
        entries = {"state": {n: {"exp_avg": memory} for n in "ab"}, "param_groups": groups}
        state = {"model": dict(weights), "optim": entries}
        if values[0] == values[1]:
            assert ucf.load(state, tmp_path / "ck")
        else:
            with pytest.raises(
                StateMismatch,
                match="share memory, but the checkpoint has two tensors, which differ",
            ):
                ucf.load(state, tmp_path / "ck")
