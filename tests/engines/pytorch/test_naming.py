"""Names, states and groups: spellings of programs and of PyTorch's versions, and what is unclear."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ucformat.checkpoint import open_checkpoint
from ucformat.engines.pytorch.source import Dcp
from ucformat.errors import UnsupportedError, UsageError
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
W = torch.arange(6.0).reshape(2, 3)


def save(state: dict[str, Any], folder: Path, *, flatten: bool = True) -> Path:
    dcp.save(
        state,
        checkpoint_id=folder,
        planner=DefaultSavePlanner(flatten_state_dict=flatten),
        no_dist=True,
    )
    return folder


def optim(names: list[Any], shape: tuple[int, ...] = (2, 3), **hyper: Any) -> dict[str, Any]:
    return {
        "state": {n: {"exp_avg": torch.ones(shape), "step": 4} for n in names},
        "param_groups": [{"lr": 0.5, **hyper, "params": names}],
    }


def keys(folder: Path) -> set[tuple[str, str]]:
    return {tuple(k) for k in open_checkpoint(folder).tensors}  # type: ignore[misc]


def test_states_that_are_plain_numbers_are_in_the_group(tmp_path: Path) -> None:
    ck = open_checkpoint(
        save({"model": {"a": W, "b": W}, "optim": optim(["a", "b"])}, tmp_path / "x")
    )
    assert ck.metadata.groups == ({"lr": 0.5, "params": ["a", "b"], "state": {"step": 4}},)
    assert dict(ck.objects) == {"optim": {"state": {"a": {"step": 4}, "b": {"step": 4}}}}


def test_two_models_and_their_optimizers_keep_their_keys(tmp_path: Path) -> None:
    state = {
        "gen": {"a": W},
        "disc": {"b": W, "c": W},
        "opt_g": optim(["a"]),
        "opt_d": optim(["b", "c"]),
    }
    ck = open_checkpoint(save(state, tmp_path / "x"))
    assert {tuple(k) for k in ck.tensors} == {
        (n, s) for n in ("gen.a", "disc.b", "disc.c") for s in ("weight", "exp_avg")
    }
    assert [g["params"] for g in ck.metadata.groups] == [["gen.a"], ["disc.b", "disc.c"]]


def test_an_optimizer_that_may_be_of_either_model_names_its_states_itself(tmp_path: Path) -> None:
    place = save({"a": {"w": W}, "b": {"w": W + 1}, "x": {"o": optim(["w"])}}, tmp_path / "x")
    assert keys(place) == {("a.w", "weight"), ("b.w", "weight"), ("x.o.w", "exp_avg")}
    assert open_checkpoint(place).metadata.groups[0]["params"] == ["x.o.w"]
    with pytest.raises(UsageError, match=r"there is no 'c', which `owners` names"):
        Dcp(owners={"x.o": "c"}).open(LocalStore(place))
    source = Dcp(owners={"x.o": "b"}).open(LocalStore(place))
    assert {tuple(i.key) for i in source.metadata.tensor_list.tensors} == {
        ("a.w", "weight"), ("w", "weight"), ("w", "exp_avg"),
    }  # fmt: skip


def test_numbers_that_shapes_do_not_tell_ask_for_names(tmp_path: Path) -> None:
    place = save({"model": {"a": W, "b": W, "frozen": W}, "optim": optim([0, 1])}, tmp_path / "x")
    with pytest.raises(UsageError, match="numbered"):
        open_checkpoint(place)
    source = Dcp(groups=[["b", "a"]]).open(LocalStore(place))
    assert source.metadata.groups[0]["params"] == ["b", "a"]
    with pytest.raises(UsageError, match="given"):
        Dcp(groups=[["b"]]).open(LocalStore(place))
    told = save(
        {"model": {"a": W, "b": W, "c": W}, "optim": optim([0, 1], param_names=["c", "a"])},
        tmp_path / "y",
    )
    assert open_checkpoint(told).metadata.groups == (
        {"lr": 0.5, "params": ["c", "a"], "state": {"step": 4}},
    )


def test_a_planner_that_keeps_no_paths(tmp_path: Path) -> None:
    state = {
        "model.a": W,
        "optim.state.a.exp_avg": W,
        "optim.param_groups.a.lr": 0.5,
        "step": 7,
    }
    ck = open_checkpoint(save(state, tmp_path / "x", flatten=False))
    assert ("a", "exp_avg") in {tuple(k) for k in ck.tensors}
    assert ck.metadata.step == 7


def test_a_value_with_the_name_of_an_optimizer_is_none_of_its_groups(tmp_path: Path) -> None:
    state = {"model.a": W, "optim": 3, "optim.state.a.exp_avg": W, "optim.param_groups.a.lr": 0.5}
    ck = open_checkpoint(save(state, tmp_path / "x", flatten=False))
    assert ck.metadata.groups == ({"lr": 0.5, "params": ["a"]},)
    assert ck.objects["optim"] == 3


def test_groups_as_one_value_as_pytorch_2_3_kept_them(tmp_path: Path) -> None:
    state = {
        "model": {"a": W},
        "optim": {"state": {"a": {"exp_avg": W}}, "param_groups": ({"lr": 1, "params": ["a"]},)},
    }
    place = save(state, tmp_path / "y")  # a tuple is one value in every version
    assert open_checkpoint(place).metadata.groups == ({"lr": 1, "params": ["a"]},)


def test_groups_of_numbers_beside_states_of_names_are_not_known(tmp_path: Path) -> None:
    state = {"model": {"a": W}, "optim": optim(["a"])}
    state["optim"]["param_groups"][0]["params"] = [0]
    ck = open_checkpoint(save(state, tmp_path / "x"))
    assert {tuple(k) for k in ck.tensors} == {("a", "weight"), ("a", "exp_avg")}
    assert ck.metadata.groups == ()


def test_a_stream_transform_is_refused_by_name(tmp_path: Path) -> None:
    place = save({"a": W}, tmp_path / "x")
    meta = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301 - torch has just written it
    meta.storage_data = {
        k: _StorageInfo(v.relative_path, v.offset, v.length, ["stream.zstd"])
        for k, v in meta.storage_data.items()
    }
    (place / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(UnsupportedError, match=r"stream\.zstd"):
        open_checkpoint(place)


def test_only_a_model_only_an_optimizer(tmp_path: Path) -> None:
    assert keys(save({"layers.0.w": W}, tmp_path / "a")) == {("layers.0.w", "weight")}
    assert keys(save({"net": {"w": W}}, tmp_path / "b")) == {("w", "weight")}
    assert keys(save(optim(["layers.0.w"]), tmp_path / "c")) == {("layers.0.w", "exp_avg")}


def test_a_model_nested_below_its_key(tmp_path: Path) -> None:
    state = {
        "model": {"encoder": {"w": W}, "decoder": {"w": W}},
        "optim": optim(["encoder.w", "decoder.w"]),
    }
    assert keys(save(state, tmp_path / "x")) == {
        (f"{m}.w", s) for m in ("encoder", "decoder") for s in ("weight", "exp_avg")
    }
